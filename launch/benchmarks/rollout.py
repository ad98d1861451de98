"""Measures tokens a second through the coordinator (admission to trajectory) over bare `AsyncLLM.generate`."""

from __future__ import annotations

import asyncio
import pathlib
import statistics
import uuid

import vllm
from vllm import sampling_params
from vllm.inputs import engine as engine_inputs
from vllm.v1.engine import async_llm

from benchmarks import workload
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.cluster import create as cluster_create
from libra_jax.coordinator import dispatch, instances, parts
from libra_jax.engines import vllm_launch
from libra_jax.models import config as models_config
from libra_jax.rollouts import loop as agent_loop
from libra_jax.rollouts import streams
from libra_jax.scheduling import registry
from libra_jax.telemetry import memory

REQUESTS = 64
PROMPTS = [f"{index:03d}*({index}+7)" for index in range(REQUESTS)]
TOKENS = 128
NAME = "rollout-0"


async def measure(rounds: int) -> workload.Figures:
    """Times 64 concurrent requests of one turn of 128 tokens, with the same prompts and engine arguments on both sides.

    The bare side is an engine of its own, started with the same arguments; the two never decode at the same time.
    """
    config = config_lib.RunConfig(rollout=config_lib.RolloutConfig(slots=REQUESTS, max_context=256, max_tokens=TOKENS))
    model = models_config.to_hf(models_config.load_preset("libra-tiny"))
    spec = workload.engine_spec(NAME, config, model)
    launch = vllm_launch.EngineLaunch("bare", model, config.rollout, 1, seed=0, cpu_cores="auto", log_path="")
    loop = asyncio.get_running_loop()
    cluster = cluster_create.create(config.cluster)
    run = parts.CoordinatorContext(config, cluster, memory.MemoryRecorder(), pathlib.Path())
    engines = instances.Instances(run, [spec])
    try:
        await engines.start()
        bare_engine = await loop.run_in_executor(vllm_launch.STARTER, launch.start)
        engines.engines[NAME].state = "serving"  # random weights will do, so the engine serves without a weight sync
        dispatcher = dispatch.Dispatcher(run, scheduler=registry.create(config.scheduler), engines=engines)
        sampler = streams.Streams(run, dispatcher=dispatcher, engines=engines)
        run.events.announce(protocols.EnginesChanged(engines.serving()))

        ours_seconds, bare_seconds = await workload.alternate_async(
            rounds,
            lambda: run.scope.race(_through_coordinator(sampler, config)),
            lambda: _bare(bare_engine, config),
        )
    finally:
        await run.scope.cancel_background(config.deadlines.shutdown)
        await cluster.shutdown()
        await loop.run_in_executor(None, launch.stop)
    tokens = REQUESTS * TOKENS
    return {
        "coordinator_tokens_per_second": tokens / statistics.median(ours_seconds),
        "bare_tokens_per_second": tokens / statistics.median(bare_seconds),
        "ratio_over_bare": workload.median_ratio(bare_seconds, ours_seconds),
        "rounds": rounds,
    }


async def _through_coordinator(sampler: streams.Streams, config: config_lib.RunConfig) -> None:
    tokenizer = workload.NeverStops()
    limits = agent_loop.Limits(
        max_turns=1, max_tokens=TOKENS, max_context=256, tool_seconds=10.0, temperature=config.rollout.temperature
    )

    async def rollout(index: int) -> None:
        name = uuid.uuid4().hex
        trajectory = protocols.Trajectory(trajectory_id=name, prompt_id=name)
        sampler.open(trajectory, group_id=index, dispatch_version=0)
        try:
            await agent_loop.run_rollout(
                agent_loop.RolloutSetup(
                    trajectory=trajectory,
                    task=protocols.Task(name, {"prompt": PROMPTS[index]}),
                    tokenizer=tokenizer,
                    sampler=sampler,
                    limits=limits,
                ),
                workload.OneTurn(),
            )
        finally:
            sampler.finish(name)
        if trajectory.generated_tokens != TOKENS:
            raise protocols.LibraError(f"{trajectory.generated_tokens} tokens came instead of {TOKENS}")

    await asyncio.gather(*(rollout(index) for index in range(REQUESTS)))


async def _bare(engine: async_llm.AsyncLLM, config: config_lib.RunConfig) -> None:
    tokenizer = tokenizers.CharacterTokenizer()
    params = vllm.SamplingParams(  # exactly what our engine asks for (engines/vllm_engine.py)
        temperature=config.rollout.temperature,
        max_tokens=TOKENS,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        skip_clone=True,
        output_kind=sampling_params.RequestOutputKind.DELTA,
    )

    async def one(index: int) -> None:
        tokens = tokenizer.render([protocols.Message("user", PROMPTS[index])], first=True, generation_prompt=True)
        count = 0
        async for output in engine.generate(engine_inputs.tokens_input(tokens), params, request_id=uuid.uuid4().hex):
            count += len(output.outputs[0].token_ids)
        if count != TOKENS:
            raise protocols.LibraError(f"{count} tokens came instead of {TOKENS}")

    await asyncio.gather(*(one(index) for index in range(REQUESTS)))
