"""Real vLLM engines, one for each tensor-parallel degree, against our own scoring and against transformers.

The tests of a degree share its engine and end with its death, so they run in the order in which they stand here.
"""

import asyncio
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import torch
import transformers

from libra_jax import config, protocols
from libra_jax.interop import dlpack, publication
from libra_jax.models import config as models_config
from libra_jax.models import transformer
from libra_jax.rollout import vllm_engine, vllm_kv_transfer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOLERANCE = 1e-3
CONTEXT = 256
PROMPTS = ((5, 6, 7, 8), (9, 3, 4), (20, 30, 40, 50, 60), (11, 11))
QWEN3 = dataclasses.replace(models_config.load_preset("libra-tiny"), num_layers=2, vocab_size=104)
QWEN2 = dataclasses.replace(QWEN3, architecture="qwen2", qk_norm=False, qkv_bias=True, hidden_size=128)
SHAPES = {1: QWEN3, 2: QWEN2}  # vLLM takes head_dim from hidden_size here: 128 / 4, of which its CPU kernels have 32.
ROLLOUT = config.RolloutConfig(
    max_context=CONTEXT, max_tokens=CONTEXT - 8, slots=16, kv_cache_gib=0.1, bucket_mib=1, checksum=True
)


class Host:
    """An engine, and the event loop that it lives on between tests."""

    def __init__(self, tensor_parallel: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.shape = SHAPES[tensor_parallel]
        self.version = 0
        self.engine = vllm_engine.create(
            f"tp{tensor_parallel}", models_config.to_hf(self.shape), config.to_dict(ROLLOUT), tensor_parallel, seed=0
        )
        self.info = self.run(self.engine.start())
        self.run(self.engine.init_weight_transfer({"kind": "memfd"}))

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 120))

    async def sync(self, shape: models_config.TransformerConfig, params: dict) -> int:
        """Publishes as the coordinator does; returns the version."""
        self.version += 1
        publisher = publication.Publisher(shape, "float32", 200_000, "memfd", True)
        count = publisher.open(self.version, params)
        assert count > 2
        await self.engine.pause()
        await self.engine.start_weight_update(self.version)
        for index in range(count):
            await self.engine.update_weights(publisher.stage(self.version, index))
        await self.engine.finish_weight_update(self.version)
        await self.engine.resume()
        publisher.shutdown()
        return self.version

    async def sample(
        self,
        prompt: tuple[int, ...],
        temperature: float,
        max_tokens: int,
        stops: tuple[int, ...] = (),
        begun: asyncio.Event | None = None,
    ) -> list[protocols.TokenDelta]:
        sampling = protocols.SamplingParams(temperature, max_tokens, stops)
        deltas = []
        async for delta in self.engine.generate(protocols.GenerationRequest(f"request-{prompt}", prompt, sampling)):
            deltas.append(delta)
            if begun is not None:
                begun.set()
        return deltas

    async def begin(self, prompts: tuple[tuple[int, ...], ...], max_tokens: int) -> list[asyncio.Task]:
        """Requests that have all begun to decode, and are far from done."""
        begun = [asyncio.Event() for _ in prompts]
        tasks = [
            asyncio.ensure_future(self.sample(prompt, 1.0, max_tokens, begun=event))
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        return tasks

    def close(self) -> None:
        self.run(self.engine.shutdown())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def host(request):
    made = Host(request.param)
    yield made
    made.close()


def with_tying(shape: models_config.TransformerConfig, tied: bool) -> models_config.TransformerConfig:
    return dataclasses.replace(shape, tie_word_embeddings=tied)


def random_params(shape: models_config.TransformerConfig, seed: int) -> dict:
    """Parameters under which tokens differ in probability, biases and norms included."""
    params = transformer.init_params(shape, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 100), len(leaves))
    noisy = [leaf + 0.15 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


@functools.cache
def scorer(shape: models_config.TransformerConfig):
    @jax.jit
    def score(params, tokens_1xT):
        positions = jnp.arange(CONTEXT)[None]
        segments = jnp.ones_like(tokens_1xT)
        hidden = transformer.forward(params, shape, transformer.ComputeOptions(), tokens_1xT, positions, segments)
        return (hidden @ transformer.unembedding(params, shape))[0]

    return score


def our_log_probs(shape, params, tokens: list[int], temperature: float) -> np.ndarray:
    """[T, V]: row t is the distribution of token t + 1, as the trainer scores it."""
    padded = jnp.array([tokens + [0] * (CONTEXT - len(tokens))])
    return np.asarray(jax.nn.log_softmax(scorer(shape)(params, padded) / temperature))[: len(tokens)]


def reference_model(shape, params) -> transformers.PreTrainedModel:
    hf_config = transformers.AutoConfig.for_model(**models_config.to_hf(shape))
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").float().eval()
    state = {}
    for entry in publication.published_entries(shape):
        leaf = params
        for key in entry.path:
            leaf = leaf[key]
        tensor = dlpack.to_torch(leaf)
        state[entry.hf_name] = (tensor if entry.layer is None else tensor[entry.layer]).clone()
    model.load_state_dict(state)
    return model


def flatten(deltas: list[protocols.TokenDelta]) -> tuple[list[int], list[float], list[int]]:
    assert all(len(d.token_ids) == len(d.log_probs) == len(d.policy_versions) for d in deltas)
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    return (
        [token for delta in deltas for token in delta.token_ids],
        [value for delta in deltas for value in delta.log_probs],
        [version for delta in deltas for version in delta.policy_versions],
    )


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_returned_log_probs_are_those_of_trainer_and_reference(host, tied):
    shape = with_tying(host.shape, tied)
    params = random_params(shape, seed=10 + tied)
    model = reference_model(shape, params)
    temperature = 0.7

    async def body():
        version = await host.sync(shape, params)
        return version, await asyncio.gather(*(host.sample(prompt, temperature, 48) for prompt in PROMPTS))

    version, outputs = host.run(body())
    for prompt, deltas in zip(PROMPTS, outputs, strict=True):
        tokens, log_probs, versions = flatten(deltas)
        assert deltas[-1].finish_reason == "length"
        assert (len(tokens), set(versions)) == (48, {version})
        whole = [*prompt, *tokens]
        rows = np.arange(len(prompt) - 1, len(whole) - 1)
        ours = our_log_probs(shape, params, whole, temperature)[rows, tokens]
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0] / temperature
        theirs = torch.log_softmax(logits, -1).numpy()[rows, tokens]
        np.testing.assert_allclose(log_probs, ours, atol=TOLERANCE)
        np.testing.assert_allclose(log_probs, theirs, atol=TOLERANCE)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_greedy_output_after_an_update_is_the_references(host, tied):
    shape = with_tying(host.shape, tied)
    params = random_params(shape, seed=20 + tied)
    model = reference_model(shape, params)

    async def body():
        await host.sync(shape, params)
        return await asyncio.gather(*(host.sample(prompt, 0.0, 32) for prompt in PROMPTS))

    for prompt, deltas in zip(PROMPTS, host.run(body()), strict=True):
        tokens = flatten(deltas)[0]
        with torch.no_grad():
            best = model(torch.tensor([[*prompt, *tokens]])).logits[0].argmax(-1)
        assert tokens == best[len(prompt) - 1 : -1].tolist()


def test_on_an_in_flight_update_every_token_has_the_log_prob_of_the_version_on_it(host):
    before, after = (random_params(host.shape, seed=seed) for seed in (30, 31))

    async def body():
        first = await host.sync(host.shape, before)
        streams = await host.begin(PROMPTS * 2, 200)
        second = await host.sync(host.shape, after)
        return first, second, await asyncio.gather(*streams)

    first, second, outputs = host.run(body())
    held = {first: before, second: after}
    mixed = 0
    for prompt, deltas in zip(PROMPTS * 2, outputs, strict=True):
        tokens, log_probs, versions = flatten(deltas)
        assert versions == sorted(versions)
        mixed += set(versions) == {first, second}
        whole = [*prompt, *tokens]
        scores = {version: our_log_probs(host.shape, params, whole, 1.0) for version, params in held.items()}
        rows = range(len(prompt) - 1, len(whole) - 1)
        expected = [scores[version][row, token] for version, row, token in zip(versions, rows, tokens, strict=True)]
        np.testing.assert_allclose(log_probs, expected, atol=TOLERANCE)
        wrong = [
            scores[first + second - version][row, token]
            for version, row, token in zip(versions, rows, tokens, strict=True)
        ]
        assert np.abs(np.array(wrong) - log_probs).max() > 0.1
    # An update that met no request half-way would prove nothing.
    assert mixed > 0


def test_generation_ends_with_the_stop_token_itself(host):
    params = random_params(host.shape, seed=40)

    async def body():
        await host.sync(host.shape, params)
        return await asyncio.gather(*(host.sample(prompt, 1.0, 200, tuple(range(50))) for prompt in PROMPTS))

    for deltas in host.run(body()):
        tokens, _, _ = flatten(deltas)
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


def test_a_context_without_room_is_refused_by_name(host):
    with pytest.raises(protocols.LibraError, match=f"no room in engine {host.info.name}'s context of {CONTEXT}"):
        host.run(host.sample(tuple([5] * CONTEXT), 1.0, 8))


def damaged(bucket: protocols.WeightBucket, **changes) -> protocols.WeightBucket:
    first, *others = bucket.entries
    return dataclasses.replace(bucket, entries=(dataclasses.replace(first, **changes), *others))


async def broken_update(host: Host, params: dict, damage) -> None:
    publisher = publication.Publisher(host.shape, "float32", 200_000, "memfd", True)
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
        (lambda bucket: damaged(bucket, name="model.no_such.weight"), "model.no_such.weight is not part of"),
        (
            lambda bucket: damaged(bucket, shape=(52, 192)),
            r"embed_tokens.weight has shape \(52, 192\), not",
        ),
        (lambda bucket: dataclasses.replace(bucket, policy_version=78), "of version 78 came while version 77"),
        (None, "0 of 0 weight buckets"),
        (lambda bucket: bucket, r"1 of \d+ weight buckets"),
        (lambda bucket: dataclasses.replace(bucket, count=1), r"lacks lm_head.weight \(\d+ tensors in all\)"),
    ],
    ids=["unknown", "shape", "version", "none", "incomplete", "missing"],
)
def test_weights_that_do_not_arrive_whole_are_a_sentence_and_the_next_update_mends_it(host, damage, message):
    params = random_params(host.shape, seed=50)
    with pytest.raises(protocols.LibraError, match=message) as caught:
        host.run(broken_update(host, params, damage))
    assert f"engine {host.info.name} c" in str(caught.value)
    assert "\n" not in str(caught.value)
    version = host.run(host.sync(host.shape, params))
    tokens, log_probs, versions = flatten(host.run(host.sample(PROMPTS[0], 1.0, 16)))
    assert set(versions) == {version}
    scores = our_log_probs(host.shape, params, [*PROMPTS[0], *tokens], 1.0)
    expected = scores[np.arange(3, 19), tokens]
    np.testing.assert_allclose(log_probs, expected, atol=TOLERANCE)


def test_damaged_bytes_are_told_by_their_checksum_and_the_next_update_mends_it(host):
    if host.info.tensor_parallel > 1:
        pytest.skip("one of several workers that fails costs the engine: the next test but one loses it to a kill")
    params = random_params(host.shape, seed=51)
    with pytest.raises(protocols.LibraError, match="bucket 0 of version 77 arrived damaged"):
        host.run(broken_update(host, params, lambda bucket: dataclasses.replace(bucket, checksum="0" * 32)))
    version = host.run(host.sync(host.shape, params))
    assert set(flatten(host.run(host.sample(PROMPTS[0], 1.0, 16)))[2]) == {version}


def test_no_process_of_the_engine_has_loaded_jax(host):
    for pid in host.info.process_ids:
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" in maps
        assert "jaxlib" not in maps


def test_a_killed_process_fails_running_requests_at_once_and_leaves_nothing(host):
    """The core process at tensor parallel 1, a worker at 2."""
    victim = host.info.process_ids[0 if host.info.tensor_parallel == 1 else -1]
    segments = set(host.engine._launch._segments)
    assert segments

    async def body():
        streams = await host.begin(PROMPTS, 240)
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
    assert all(is_gone(pid) for pid in host.info.process_ids)
    assert not segments & set(os.listdir("/dev/shm"))


PARENT = """
import asyncio, json, signal
from libra_jax import config
from libra_jax.models import config as models_config
from libra_jax.rollout import vllm_engine

async def main():
    rollout = config.to_dict(config.RolloutConfig(max_context=64, max_tokens=8, slots=4, kv_cache_gib=0.05))
    shape = models_config.to_hf(models_config.load_preset("libra-tiny"))
    engine = vllm_engine.create("orphan", shape, rollout, 1, seed=0)
    info = await engine.start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(json.dumps([list(info.process_ids), sorted(engine._launch._segments)]), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.multiprocess
def test_a_killed_front_end_takes_its_engine_with_it_and_ctrl_c_reaches_the_front_end_alone():
    # A short path, unlike pytest's own: sockets live in it, and their names have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="libra-") as directory:
        script = pathlib.Path(directory, "front_end.py")
        script.write_text(PARENT)
        environment = {**os.environ, "TMPDIR": directory}
        command = [sys.executable, str(script)]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
        try:
            pids, segments = json.loads(parent.stdout.readline())
            assert len(pids) >= 2
            os.killpg(parent.pid, signal.SIGINT)
            time.sleep(2.0)
            assert not any(is_gone(pid) for pid in pids)
        finally:
            parent.kill()
            parent.stdout.close()
            parent.wait()
        assert wait_until(lambda: all(is_gone(pid) for pid in pids))
        assert wait_until(lambda: not set(segments) & set(os.listdir("/dev/shm")))


def test_settings_that_vllm_refuses_are_a_sentence_and_leave_no_process():
    rollout = dataclasses.replace(ROLLOUT, max_context=QWEN3.max_position_embeddings + 1)

    async def body():
        engine = vllm_engine.create("refused", models_config.to_hf(QWEN3), config.to_dict(rollout), 1, seed=0)
        try:
            await engine.start()
        finally:
            await engine.shutdown()

    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(protocols.WorkerLost, match=r"engine refused did not start: .*2049") as caught:
        asyncio.run(body())
    assert "\n" not in str(caught.value)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [child for child in left if "resource_tracker" not in " ".join(child.cmdline())]


def test_a_failed_call_costs_an_engine_of_several_workers_but_not_one_of_a_single_worker():
    async def failing():
        raise RuntimeError("Worker failed with error 'bytes are damaged', please check the stack trace above")

    async def outcome(tensor_parallel: int) -> str:
        binding = "|".join("0" * tensor_parallel)
        engine = vllm_engine.create(
            "e", models_config.to_hf(QWEN3), config.to_dict(ROLLOUT), tensor_parallel, 0, cpu_cores=binding
        )
        engine._death = asyncio.get_running_loop().create_future()
        with pytest.raises(protocols.LibraError, match="could not load: bytes are damaged") as caught:
            await engine._call("load", failing())
        return caught.type.__name__

    assert [asyncio.run(outcome(degree)) for degree in (1, 2)] == ["LibraError", "WorkerLost"]


def test_more_workers_than_cores_are_refused_by_field(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    with pytest.raises(protocols.ConfigError, match="tensor_parallel: 2 workers on CPU need a core each, and only 1"):
        vllm_engine.create("wide", models_config.to_hf(QWEN3), config.to_dict(ROLLOUT), 2, seed=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_transfer_of_keys_and_values_without_cuda_is_refused_by_field():
    rollout = config.to_dict(dataclasses.replace(ROLLOUT, kv_transfer="nixl"))
    with pytest.raises(protocols.ConfigError, match=r"rollout.kv_transfer: 'nixl' needs CUDA.*use 'none'"):
        vllm_engine.create("remote", models_config.to_hf(QWEN3), rollout, 1, seed=0)


def test_a_transfer_without_its_package_is_refused_by_field(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(protocols.ConfigError, match=r"rollout\.kv_transfer: the nixl package is not installed"):
        vllm_kv_transfer.check(dataclasses.replace(ROLLOUT, kv_transfer="nixl"))


def test_a_transfer_is_vllms_own_connector_and_its_parameters_go_with_the_request():
    rollout = dataclasses.replace(ROLLOUT, kv_transfer="nixl")
    connector = vllm_kv_transfer.engine_arguments(rollout)["kv_transfer_config"]
    assert (connector.kv_connector, connector.is_kv_producer, connector.is_kv_consumer) == ("NixlConnector", True, True)
    ports = {vllm_kv_transfer.variables(rollout)["VLLM_NIXL_SIDE_CHANNEL_PORT"] for _ in range(3)}
    assert all(1024 < int(port) < 65536 for port in ports)
    giving = vllm_kv_transfer.giving()
    assert (giving.max_tokens, giving.extra_args["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    assert vllm_kv_transfer.taking({"remote_port": 7}) == {"kv_transfer_params": {"remote_port": 7}}
    assert vllm_kv_transfer.taking(None) is None
    assert not vllm_kv_transfer.engine_arguments(ROLLOUT)
    assert not vllm_kv_transfer.variables(ROLLOUT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_cuda_transport_without_cuda_is_refused_by_field(transport):
    rollout = config.to_dict(dataclasses.replace(ROLLOUT, transport=transport))
    with pytest.raises(protocols.ConfigError, match=f"rollout.transport: '{transport}' needs CUDA"):
        vllm_engine.create("remote", models_config.to_hf(QWEN3), rollout, 1, seed=0)
    with pytest.raises(protocols.ConfigError, match=f"rollout.transport: '{transport}' needs CUDA"):
        publication.create(QWEN3, "float32", 1 << 20, transport, False)
