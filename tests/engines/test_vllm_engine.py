"""Real vLLM engines, one for each tensor-parallel degree, against our own scoring and against transformers.

The tests of a degree share its engine and end with its death, so they run in the order in which they stand here.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import pathlib
import signal
import socket

import numpy as np
import pytest
import torch
import uvicorn
import vllm_host
from vllm.entrypoints.launchers import app, cli_args
from vllm.entrypoints.launchers.api_server import app_state
from vllm.utils import argparse_utils

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rewards import teacher
from libra_jax.weights import snapshot

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def host(request):
    made = vllm_host.Host(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_returned_log_probs_are_those_of_trainer_and_reference(host, tied):
    shape = vllm_host.with_tying(host.shape, tied)
    params = vllm_host.random_params(shape, seed=10 + tied)
    model = vllm_host.reference_model(shape, params)
    temperature = 0.7

    async def body():
        version = await host.sync(shape, params)
        return version, await asyncio.gather(*(host.sample(prompt, temperature, 48) for prompt in vllm_host.PROMPTS))

    version, outputs = host.run(body())
    for prompt, deltas in zip(vllm_host.PROMPTS, outputs, strict=True):
        tokens, log_probs, versions = vllm_host.flatten(deltas)
        assert deltas[-1].finish_reason == "length"
        assert (len(tokens), set(versions)) == (48, {version})
        whole = [*prompt, *tokens]
        rows = np.arange(len(prompt) - 1, len(whole) - 1)
        ours = vllm_host.our_log_probs(shape, params, whole, temperature)[rows, tokens]
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0] / temperature
        theirs = torch.log_softmax(logits, -1).numpy()[rows, tokens]
        np.testing.assert_allclose(log_probs, ours, atol=vllm_host.TOLERANCE)
        np.testing.assert_allclose(log_probs, theirs, atol=vllm_host.TOLERANCE)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_greedy_output_after_an_update_is_the_references(host, tied):
    shape = vllm_host.with_tying(host.shape, tied)
    params = vllm_host.random_params(shape, seed=20 + tied)
    model = vllm_host.reference_model(shape, params)

    async def body():
        await host.sync(shape, params)
        return await asyncio.gather(*(host.sample(prompt, 0.0, 32) for prompt in vllm_host.PROMPTS))

    for prompt, deltas in zip(vllm_host.PROMPTS, host.run(body()), strict=True):
        tokens = vllm_host.flatten(deltas)[0]
        with torch.no_grad():
            best = model(torch.tensor([[*prompt, *tokens]])).logits[0].argmax(-1)
        assert tokens == best[len(prompt) - 1 : -1].tolist()


def test_on_an_in_flight_update_every_token_has_the_log_prob_of_the_version_on_it(host):
    before, after = (vllm_host.random_params(host.shape, seed=seed) for seed in (30, 31))

    async def body():
        first = await host.sync(host.shape, before)
        streams = await host.begin(vllm_host.PROMPTS * 2, 200)
        second = await host.sync(host.shape, after)
        return first, second, await asyncio.gather(*streams)

    first, second, outputs = host.run(body())
    held = {first: before, second: after}
    mixed = 0
    for prompt, deltas in zip(vllm_host.PROMPTS * 2, outputs, strict=True):
        tokens, log_probs, versions = vllm_host.flatten(deltas)
        assert versions == sorted(versions)
        mixed += set(versions) == {first, second}
        whole = [*prompt, *tokens]
        scores = {version: vllm_host.our_log_probs(host.shape, params, whole, 1.0) for version, params in held.items()}
        rows = range(len(prompt) - 1, len(whole) - 1)
        expected = [scores[version][row, token] for version, row, token in zip(versions, rows, tokens, strict=True)]
        np.testing.assert_allclose(log_probs, expected, atol=vllm_host.TOLERANCE)
        wrong = [
            scores[first + second - version][row, token]
            for version, row, token in zip(versions, rows, tokens, strict=True)
        ]
        assert np.abs(np.array(wrong) - log_probs).max() > 0.1
    # An update that met no request half-way would prove nothing.
    assert mixed > 0


def test_generation_ends_with_the_stop_token_itself(host):
    params = vllm_host.random_params(host.shape, seed=40)

    async def body():
        await host.sync(host.shape, params)
        return await asyncio.gather(*(host.sample(prompt, 1.0, 200, tuple(range(50))) for prompt in vllm_host.PROMPTS))

    for deltas in host.run(body()):
        tokens, _, _ = vllm_host.flatten(deltas)
        assert deltas[-1].finish_reason == "stop"
        assert tokens[-1] < 50
        assert all(token >= 50 for token in tokens[:-1])


def test_closing_the_iterator_aborts_the_request(host):
    async def body():
        request = protocols.GenerationRequest("endless", (5, 6), protocols.SamplingParams(1.0, 200, ()))
        stream = host.engine.generate(request)
        await anext(stream)
        assert (await host.engine.health())["running"] == 1
        await stream.aclose()
        return (await host.engine.health())["running"], host.engine._engine.get_num_unfinished_requests()

    assert host.run(body()) == (0, 0)


def test_a_token_outside_the_vocabulary_is_refused_and_the_engine_goes_on(host):
    with pytest.raises(protocols.LibraError, match="holds token 104, which the model's vocabulary of 104"):
        host.run(host.sample((5, 104), 1.0, 8))
    assert host.run(host.engine.health())["running"] == 0


def test_it_tells_how_many_tokens_of_context_its_cache_holds(host):
    """Keys and values of a token in float32, over all layers, in the memory that the config gives an instance."""
    shape = host.shape
    each = 2 * 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    assert host.info.cache_tokens * each == pytest.approx(vllm_host.ROLLOUT.kv_cache_gib * 2**30, rel=0.02)


def test_a_context_without_room_is_refused_by_name(host):
    with pytest.raises(
        protocols.LibraError, match=f"no room in engine {host.info.name}'s context of {vllm_host.CONTEXT}"
    ):
        host.run(host.sample(tuple([5] * vllm_host.CONTEXT), 1.0, 8))


@contextlib.asynccontextmanager
async def served(host):
    """Yields the address of vLLM's own OpenAI server before the engine."""
    level = logging.getLogger().level  # the server raises it, which would silence warnings of the tests that follow
    parser = cli_args.make_arg_parser(argparse_utils.FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", "teacher", "--disable-uvicorn-access-log"])
    front_end = host.engine._serving()
    tasks = await front_end.get_supported_tasks()
    made = app.build_app(arguments, tasks, front_end.model_config)
    await app_state.init_app_state(front_end, made.state, arguments, tasks)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(made, log_level="error", lifespan="off"))
    serving = asyncio.ensure_future(server.serve([listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await serving
        logging.getLogger().setLevel(level)


class Ids:
    """A tokenizer for a server that has none."""

    def encode(self, text):
        return list(range(3, 3 + len(text)))


def test_a_teacher_behind_vllms_server_scores_as_one_on_the_mesh(host):
    params = vllm_host.random_params(host.shape, seed=70)

    async def body():
        await host.sync(host.shape, params)
        async with served(host) as url:
            algorithm = config_lib.AlgorithmConfig(teacher=url, kl_coefficient=1.0)
            run = config_lib.RunConfig(
                algorithm=algorithm, rollout=config_lib.RolloutConfig(max_context=255, max_tokens=8)
            )
            async with teacher.open_teacher(run, Ids()) as made:
                scored = await asyncio.gather(*(made.log_probs(tokens) for tokens in vllm_host.PROMPTS))
                with pytest.raises(protocols.ConfigError, match=r"refuses 256 tokens \(BadRequestError"):
                    await made.log_probs([5] * 256)
            run.rollout.max_context = 256
            with pytest.raises(protocols.ConfigError, match="takes 256 tokens, and a rollout with one token after it"):
                async with teacher.open_teacher(run, Ids()):
                    pass
        return scored

    for tokens, found in zip(vllm_host.PROMPTS, host.run(body()), strict=True):
        wanted = vllm_host.our_log_probs(host.shape, params, list(tokens), 1.0)[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(found, [0.0, *wanted], atol=vllm_host.TOLERANCE)


def damaged(chunk: protocols.WeightChunk, **changes) -> protocols.WeightChunk:
    first, *others = chunk.entries
    return dataclasses.replace(chunk, entries=(dataclasses.replace(first, **changes), *others))


async def broken_update(host: vllm_host.Host, params: dict, damage) -> None:
    publisher = snapshot.HostSnapshot(host.shape, "float32", 200_000, True)
    publisher.open(77, params)
    try:
        await host.engine.pause()
        await host.engine.start_weight_update(77)
        if damage is not None:
            await host.engine.update_weights(damage(publisher.stage(77, 0)))
        await host.engine.finish_weight_update(77)
    finally:
        publisher.shutdown()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda chunk: damaged(chunk, name="model.no_such.weight"), "model.no_such.weight is not part of"),
        (
            lambda chunk: damaged(chunk, shape=(52, 192)),
            r"embed_tokens.weight has shape \(52, 192\), not",
        ),
        (lambda chunk: dataclasses.replace(chunk, policy_version=78), "of version 78 came while version 77"),
        (None, "0 of 0 weight chunks"),
        (lambda chunk: chunk, r"1 of \d+ weight chunks"),
        (lambda chunk: dataclasses.replace(chunk, count=1), r"lacks lm_head.weight \(\d+ tensors in all\)"),
    ],
    ids=["unknown", "shape", "version", "none", "incomplete", "missing"],
)
def test_weights_that_do_not_arrive_whole_are_a_sentence_and_the_next_update_mends_it(host, damage, message):
    params = vllm_host.random_params(host.shape, seed=50)
    with pytest.raises(protocols.LibraError, match=message) as caught:
        host.run(broken_update(host, params, damage))
    assert f"engine {host.info.name} c" in str(caught.value)
    assert "\n" not in str(caught.value)
    version = host.run(host.sync(host.shape, params))
    tokens, log_probs, versions = vllm_host.flatten(host.run(host.sample(vllm_host.PROMPTS[0], 1.0, 16)))
    assert set(versions) == {version}
    scores = vllm_host.our_log_probs(host.shape, params, [*vllm_host.PROMPTS[0], *tokens], 1.0)
    expected = scores[np.arange(3, 19), tokens]
    np.testing.assert_allclose(log_probs, expected, atol=vllm_host.TOLERANCE)


def test_damaged_bytes_are_told_by_their_checksum_and_the_next_update_mends_it(host):
    if host.info.tensor_parallel > 1:
        pytest.skip("one of several workers that fails costs the engine: the next test but one loses it to a kill")
    params = vllm_host.random_params(host.shape, seed=51)
    with pytest.raises(protocols.LibraError, match="chunk 0 of version 77 arrived damaged"):
        host.run(broken_update(host, params, lambda chunk: dataclasses.replace(chunk, checksum="0" * 32)))
    version = host.run(host.sync(host.shape, params))
    assert set(vllm_host.flatten(host.run(host.sample(vllm_host.PROMPTS[0], 1.0, 16)))[2]) == {version}


def test_an_engine_that_slept_serves_the_weights_it_wakes_with_and_none_of_its_old_requests(host):
    before, after = (vllm_host.random_params(host.shape, seed=seed) for seed in (60, 61))
    model = vllm_host.reference_model(host.shape, after)

    async def body():
        await host.sync(host.shape, before)
        streams = await host.begin(vllm_host.PROMPTS, 240)
        await host.engine.sleep()
        ended = await asyncio.gather(*streams)
        asleep = await host.engine.health()
        await host.engine.wake()
        version = await host.sync(host.shape, after)
        return ended, asleep, version, await host.sample(vllm_host.PROMPTS[0], 0.0, 24)

    ended, asleep, version, deltas = host.run(body())
    assert [stream[-1].finish_reason for stream in ended] == ["abort"] * 4
    assert (asleep["running"], asleep["paused"]) == (0.0, 1.0)
    tokens, _, versions = vllm_host.flatten(deltas)
    with torch.no_grad():
        best = model(torch.tensor([[*vllm_host.PROMPTS[0], *tokens]])).logits[0].argmax(-1)
    assert tokens == best[len(vllm_host.PROMPTS[0]) - 1 : -1].tolist()
    assert set(versions) == {version}


def test_no_process_of_the_engine_has_loaded_jax(host):
    for pid in host.info.process_ids:
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" in maps
        assert "jaxlib" not in maps


def test_a_single_worker_lives_in_the_core_process_which_keeps_to_its_cores(host):
    """vLLM's own way is a process more, for which the core process spins."""
    if host.info.tensor_parallel > 1:
        pytest.skip("several workers have a process each")
    assert len(host.info.process_ids) == 1
    threads = pathlib.Path(f"/proc/{host.info.process_ids[0]}/task").iterdir()
    assert {core for thread in threads for core in os.sched_getaffinity(int(thread.name))} == {vllm_host.CORE}


def test_a_killed_process_fails_running_requests_at_once_and_leaves_nothing(host):
    """The core process at tensor parallel 1, a worker at 2."""
    victim = host.info.process_ids[0 if host.info.tensor_parallel == 1 else -1]
    segments = set(host.engine._launch.segments)
    assert bool(segments) == (host.info.tensor_parallel > 1)  # a single worker is in the core process

    async def body():
        streams = await host.begin(vllm_host.PROMPTS, 240)
        os.kill(victim, signal.SIGKILL)
        lost = await asyncio.gather(*streams, return_exceptions=True)
        calls = (host.engine.health, host.engine.pause, host.engine.resume)
        later = await asyncio.gather(*(call() for call in calls), return_exceptions=True)
        await host.engine.shutdown()
        await host.engine.shutdown()
        return lost, later

    lost, later = host.run(body())
    assert all(isinstance(result, protocols.WorkerLost) for result in (*lost, *later)), (lost, later)
    assert f"engine {host.info.name} is gone" in str(lost[0])
    assert all(vllm_host.is_gone(pid) for pid in host.info.process_ids)
    assert not segments & set(os.listdir("/dev/shm"))
