"""Cases of real vLLM: start, log-probs against transformers, weight sync, pause and sleep, through our own engine.

Every engine is made by `libra_jax.engines.vllm_engine` with the shape of Qwen3-0.6B, and gets random weights by weight
sync. transformers' model with the same weights is the reference. In a dry run, vLLM's CPU build serves a model of two
layers; what only CUDA has is left out there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

# Set before JAX first asks for memory: the engines of these cases share the GPU with this process.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import torch

from gpu import reference, rows
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.models import transformer
from libra_jax.weights import create

MODEL = "Qwen3-0.6B"
MEMORY_FRACTION = 0.2
"""Share of the GPU's memory of one engine, so that some engines run side by side."""

SYNCS = 3
REQUESTS = 64
PROMPT, OUTPUT = 32, 64
"""Tokens of a prompt, and of the output whose log-probs are compared."""

ROUND_TRIP_SECONDS = 60.0
"""Deadline in seconds of one weight sync, and of one batch of requests."""

LOG_PROB_ERROR = {"float32": 2e-3, "bfloat16": 0.02}
"""Largest allowed mean error of a log-prob, in nats. Triton multiplies float32 in TF32, of 10 bits."""


@dataclass(frozen=True)
class Variant:
    """One way to run the engine.

    Attributes:
      dtype: dtype of weights and activations.
      backend: vLLM's name of the attention kernel; empty for vLLM's own choice.
      graphs: True to compile and to capture CUDA graphs, as a run on GPUs does.
    """

    dtype: str
    backend: str
    graphs: bool

    @property
    def name(self) -> str:
        """Name in figures, such as `bfloat16_flash_attn_graphs`."""
        return "_".join((self.dtype, self.backend.lower() or "default", "graphs" if self.graphs else "eager"))


PLAIN = Variant("bfloat16", "TRITON_ATTN", graphs=False)
VARIANTS = (
    Variant("float32", "TRITON_ATTN", graphs=False),
    Variant("bfloat16", "FLASH_ATTN", graphs=False),
    Variant("bfloat16", "FLASH_ATTN", graphs=True),
)
DRY = Variant("float32", "", graphs=False)


class Served:
    """A running engine, and the weights that it was sent.

    Args:
      engine: the engine, started.
      shape: shape of its model.
      variant: how it runs.
      transport: transport of its weights.
    """

    def __init__(
        self, engine: protocols.RolloutEngine, shape: model_config.TransformerConfig, variant: Variant, transport: str
    ) -> None:
        self.engine, self.shape, self.variant = engine, shape, variant
        self.version = 0
        self.params: transformer.Params = {}
        self._transport = transport
        self._snapshot = create.create(
            shape, variant.dtype, 256 * 2**20, transport, checksum=False, sync_seconds=60.0, host="127.0.0.1"
        )
        self._connected = False

    async def sync(self, params: transformer.Params) -> dict[str, float]:
        """Sends weights as the coordinator does; returns seconds by stage, and bytes."""
        if not self._connected:
            await self.engine.init_weight_transfer({"kind": self._transport})
            self._connected = True
        self.params = params
        self.version += 1
        began = time.perf_counter()
        await self.engine.pause()
        paused = time.perf_counter()
        destination = protocols.WeightDestination(self.variant.name, workers=1, life=1)
        count = self._snapshot.open(self.version, self.params, [destination])
        await self.engine.start_weight_update(self.version)
        opened, nbytes = time.perf_counter(), 0
        for index in range(count):
            chunk = self._snapshot.stage(self.version, index)
            nbytes += chunk.nbytes
            await self.engine.update_weights(chunk)
        await self.engine.finish_weight_update(self.version)
        self._snapshot.close(self.version)
        loaded = time.perf_counter()
        await self.engine.resume()
        return {
            "pause_seconds": paused - began,
            "snapshot_seconds": opened - paused,
            "load_seconds": loaded - opened,
            "seconds": time.perf_counter() - began,
            "bytes": float(nbytes),
        }

    async def sample(
        self, prompts: Sequence[tuple[int, ...]], tokens: int, decoding: asyncio.Event | None = None
    ) -> list[list[protocols.TokenDelta]]:
        """Returns the outputs of `tokens` tokens to all prompts, which are requested at once.

        Args:
          prompts: tokens of each prompt.
          tokens: tokens of each output.
          decoding: set once every request has its first tokens.
        """
        sampling = protocols.SamplingParams(1.0, tokens, ())
        waiting = set(range(len(prompts)))

        async def one(number: int, prompt: tuple[int, ...]) -> list[protocols.TokenDelta]:
            request = protocols.GenerationRequest(f"{self.version}-{number}-{len(prompt)}-{tokens}", prompt, sampling)
            deltas = []
            async for delta in self.engine.generate(request):
                deltas.append(delta)
                waiting.discard(number)
                if decoding is not None and not waiting:
                    decoding.set()
            return deltas

        return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))

    async def log_prob_error(self, prompts: int = 8) -> reference.Errors:
        """Compares the log-probs of sampled tokens with transformers' for the same tokens and weights."""
        asked = reference.prompts(self.shape, prompts, PROMPT)
        outputs = await self.sample(asked, OUTPUT)
        return reference.errors(self.shape, self.params, self.variant.dtype, asked, outputs)

    def close(self) -> None:
        """Frees the snapshot."""
        self._snapshot.shutdown()


def _run(work: Coroutine[Any, Any, rows.Outcome]) -> rows.Outcome:
    if not rows.is_installed("vllm"):
        work.close()
        raise rows.LeftOut("vllm is not installed; docs/results/gpu.md shows how to bring it")
    return asyncio.run(work)


def _shape(bench: rows.Bench) -> model_config.TransformerConfig:
    # vLLM's CPU kernels need heads of 32 numbers, which the dry run's narrow shapes do not have.
    shape = model_config.load_preset("libra-tiny" if bench.tiny else MODEL)
    return dataclasses.replace(shape, num_layers=2) if bench.tiny else shape


@contextlib.asynccontextmanager
async def _served(
    bench: rows.Bench, variant: Variant, transport: str = "memfd", hybrid: bool = False
) -> AsyncIterator[tuple[Served, float]]:
    """Yields an engine and the seconds that its start took; ends its processes."""
    from libra_jax.engines import vllm_engine

    arguments = {"attention_backend": variant.backend} if variant.backend else {}
    rollout = config_lib.RolloutConfig(
        max_context=512,
        max_tokens=256,
        slots=REQUESTS,
        dtype=variant.dtype,
        kv_cache_gib=0.25,
        gpu_memory_fraction=MEMORY_FRACTION,
        enforce_eager=not variant.graphs,
        transport=transport,
        engine_arguments=arguments,
    )
    shape = _shape(bench)
    engine = vllm_engine.create(
        variant.name, model_config.to_hf(shape), config_lib.to_dict(rollout), 1, seed=0, hybrid=hybrid
    )
    began = time.perf_counter()
    try:
        await engine.start()
        seconds = time.perf_counter() - began
        served = Served(engine, shape, variant, transport)
        try:
            yield served, seconds
        finally:
            served.close()
    finally:
        await engine.shutdown()


def libraries(bench: rows.Bench) -> rows.Outcome:
    """Imports vLLM's kernels, and checks that vLLM takes this platform."""
    if not rows.is_installed("vllm"):
        raise rows.LeftOut("vllm is not installed; docs/results/gpu.md shows how to bring it")
    if not bench.tiny:
        importlib.import_module("vllm._C_stable_libtorch")
    import vllm
    from vllm import platforms

    figures: rows.Figures = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "platform": platforms.current_platform.device_name,
        "sleep_mode": "yes" if platforms.current_platform.is_sleep_mode_available() else "no",
    }
    wanted = "cpu" if bench.tiny else "cuda"
    named = figures["platform"]
    return rows.Outcome(figures, "" if named == wanted else f"vLLM takes the platform {named}, not {wanted}")


def start(bench: rows.Bench) -> rows.Outcome:
    """Starts an engine, syncs weights, compares log-probs, and measures the speed of `REQUESTS` requests."""

    async def measure() -> rows.Outcome:
        variant = DRY if bench.tiny else PLAIN
        async with _served(bench, variant) as (served, seconds):
            first = await asyncio.wait_for(served.sync(reference.random_params(served.shape, 0)), ROUND_TRIP_SECONDS)
            errors = await asyncio.wait_for(served.log_prob_error(), ROUND_TRIP_SECONDS)
            prompts = reference.prompts(served.shape, REQUESTS, PROMPT)
            began = time.perf_counter()
            await asyncio.wait_for(served.sample(prompts, 4 * OUTPUT), ROUND_TRIP_SECONDS)
            took = time.perf_counter() - began
        figures = {"start_seconds": seconds, "first_sync_seconds": first["seconds"]} | errors.figures()
        figures["generated_tokens_per_second"] = REQUESTS * 4 * OUTPUT / took
        return rows.Outcome(figures, errors.problem(LOG_PROB_ERROR[variant.dtype]))

    return _run(measure())


def log_probs(bench: rows.Bench) -> rows.Outcome:
    """Compares log-probs with transformers' for each variant; the engines start side by side."""

    async def measure(variant: Variant) -> reference.Errors:
        async with _served(bench, variant) as (served, _):
            await asyncio.wait_for(served.sync(reference.random_params(served.shape, 1)), ROUND_TRIP_SECONDS)
            return await asyncio.wait_for(served.log_prob_error(), ROUND_TRIP_SECONDS)

    async def all_variants() -> rows.Outcome:
        variants = (DRY,) if bench.tiny else VARIANTS
        results = await asyncio.gather(*map(measure, variants), return_exceptions=True)
        figures: dict[str, rows.Value] = {}
        problems = []
        for variant, result in zip(variants, results, strict=True):
            # A variant that fails does not hide the figures of the others.
            if isinstance(result, BaseException):
                problems.append(f"{variant.name}: {' '.join(str(result).split())[:200]}")
                continue
            figures |= {f"{variant.name}_{name}": value for name, value in result.figures().items()}
            if problem := result.problem(LOG_PROB_ERROR[variant.dtype]):
                problems.append(f"{variant.name}: {problem}")
        return rows.Outcome(figures, "; ".join(problems))

    return _run(all_variants())


def sync(bench: rows.Bench, transport: str) -> rows.Outcome:
    """Syncs other weights into the running engine three times, and compares log-probs after each."""
    if bench.tiny and transport == "ipc":
        raise rows.LeftOut("CUDA IPC needs a GPU; weight_sync/ipc tries the sending half")

    async def measure() -> rows.Outcome:
        variant = DRY if bench.tiny else PLAIN
        async with _served(bench, variant, transport) as (served, _):
            await asyncio.wait_for(
                served.sync(reference.random_params(served.shape, 0)), ROUND_TRIP_SECONDS
            )  # opens the transport, and warms up
            timings, errors = [], []
            for seed in range(1, SYNCS + 1):
                timings.append(
                    await asyncio.wait_for(served.sync(reference.random_params(served.shape, seed)), ROUND_TRIP_SECONDS)
                )
                errors.append(await asyncio.wait_for(served.log_prob_error(), ROUND_TRIP_SECONDS))
        medians = {name: statistics.median(timing[name] for timing in timings) for name in timings[0]}
        size = medians.pop("bytes") / 1e9
        figures = {"gigabytes": size, **medians, "gigabytes_per_second": size / medians["seconds"]}
        worst = max(errors, key=lambda error: error.mean)
        return rows.Outcome(figures | worst.figures(), worst.problem(LOG_PROB_ERROR[variant.dtype]))

    return _run(measure())


def pause(bench: rows.Bench) -> rows.Outcome:
    """Syncs weights while `REQUESTS` requests are under way; each goes on, and its tokens carry both versions."""

    async def measure() -> rows.Outcome:
        async with _served(bench, DRY if bench.tiny else PLAIN) as (served, _):
            await asyncio.wait_for(served.sync(reference.random_params(served.shape, 0)), ROUND_TRIP_SECONDS)
            prompts = reference.prompts(served.shape, REQUESTS, PROMPT)
            # Drawn before, because the requests might end while large weights are drawn.
            following = reference.random_params(served.shape, 1)
            decoding = asyncio.Event()
            running = asyncio.create_task(served.sample(prompts, 4 * OUTPUT, decoding))
            await asyncio.wait_for(decoding.wait(), ROUND_TRIP_SECONDS)
            timing = await asyncio.wait_for(served.sync(following), ROUND_TRIP_SECONDS)
            outputs = await asyncio.wait_for(running, ROUND_TRIP_SECONDS)
        versions = [{version for delta in deltas for version in delta.policy_versions} for deltas in outputs]
        both = sum(seen == {1, 2} for seen in versions)
        tokens = {sum(len(delta.token_ids) for delta in deltas) for deltas in outputs}
        problem = "" if both else "no request was under way during the sync"
        if tokens != {4 * OUTPUT}:
            problem = f"outputs have {min(tokens)} to {max(tokens)} tokens, not {4 * OUTPUT}"
        figures = {"requests": REQUESTS, "requests_with_both_versions": both}
        return rows.Outcome({**figures, **{name: timing[name] for name in ("pause_seconds", "seconds")}}, problem)

    return _run(measure())


def sleep(bench: rows.Bench) -> rows.Outcome:
    """Puts an engine to sleep and wakes it; measures the memory that it frees, and compares log-probs afterwards."""

    async def measure() -> rows.Outcome:
        from vllm import platforms

        if not platforms.current_platform.is_sleep_mode_available():
            raise rows.LeftOut(f"vLLM has no sleep mode on {platforms.current_platform.device_name}")
        async with _served(bench, PLAIN, hybrid=True) as (served, _):
            await asyncio.wait_for(served.sync(reference.random_params(served.shape, 0)), ROUND_TRIP_SECONDS)
            await served.sample(reference.prompts(served.shape, 4, PROMPT), OUTPUT)
            free = torch.cuda.mem_get_info()[0]
            began = time.perf_counter()
            await asyncio.wait_for(served.engine.sleep(), ROUND_TRIP_SECONDS)
            asleep = time.perf_counter()
            freed = torch.cuda.mem_get_info()[0] - free
            await asyncio.wait_for(served.engine.wake(), ROUND_TRIP_SECONDS)
            awake = time.perf_counter()
            await asyncio.wait_for(served.sync(reference.random_params(served.shape, 1)), ROUND_TRIP_SECONDS)
            errors = await asyncio.wait_for(served.log_prob_error(), ROUND_TRIP_SECONDS)
        figures = {"sleep_seconds": asleep - began, "wake_seconds": awake - asleep, "freed_gigabytes": freed / 1e9}
        problem = errors.problem(LOG_PROB_ERROR[PLAIN.dtype])
        return rows.Outcome(figures | errors.figures(), problem or ("" if freed > 0 else "it freed no memory"))

    return _run(measure())
