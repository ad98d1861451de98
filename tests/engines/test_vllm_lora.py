"""Adapters in vLLM's LoRA runtime: an engine's tokens have the trainer's log-probabilities after each update.

The tests share one engine, whose buffers hold the largest rank.
"""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vllm_host

from libra_jax import config as config_lib
from libra_jax.engines import vllm_weights
from libra_jax.models import config as models_config
from libra_jax.models import transformer
from libra_jax.models.adapters import adapters, lora
from libra_jax.weights import adapter_snapshot

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LARGEST = config_lib.LoraConfig(rank=64, alpha=16)


@pytest.fixture(scope="module")
def host():
    made = vllm_host.Host(1, lora=LARGEST)
    yield made
    made.close()


def _adapter(shape, seed):
    """An adapter whose product is as large as the weights under it."""
    shapes, _ = lora.split(transformer.abstract_params(shape))
    rng = np.random.default_rng(seed)
    scale = (0.1 / (shape.adapter.scale * shape.adapter.rank**0.5)) ** 0.5
    # Drawn by numpy: JAX would compile a program for each shape.
    return jax.tree.map(lambda leaf: jnp.asarray(scale * rng.normal(size=leaf.shape), jnp.float32), shapes)


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_log_probs_after_each_update_are_the_trainers(host, rank, monkeypatch):
    given = dataclasses.replace(LARGEST, rank=rank, layers=(1,) if rank == 8 else ())
    shape = adapters.adapted(host.shape, given)
    # The engine is made for one rank; smaller ones are served in its buffers.
    monkeypatch.setattr(host.engine, "_update", vllm_weights.Checker("tp1", models_config.to_hf(host.shape), given))
    base = vllm_host.random_params(host.shape, seed=rank)
    sender = adapter_snapshot.AdapterSnapshot(shape, "float32", 200_000, True)
    moved = []
    for seed in (1, 2):
        adapter = _adapter(shape, seed)
        policy = lora.join(base, adapter)

        async def body(policy=policy):
            moved.append(await host.load(sender, policy))
            return await asyncio.gather(*(host.sample(prompt, 1.0, 32) for prompt in vllm_host.PROMPTS))

        differences = []
        for prompt, deltas in zip(vllm_host.PROMPTS, host.run(body()), strict=True):
            tokens, log_probs, versions = vllm_host.flatten(deltas)
            assert set(versions) == {host.version}
            whole = [*prompt, *tokens]
            rows = np.arange(len(prompt) - 1, len(whole) - 1)
            ours = vllm_host.our_log_probs(shape, policy, whole, 1.0)[rows, tokens]
            np.testing.assert_allclose(log_probs, ours, atol=vllm_host.TOLERANCE)
            differences.append(np.abs(ours - vllm_host.our_log_probs(host.shape, base, whole, 1.0)[rows, tokens]).max())
        # Without its adapter, the policy would be another one.
        assert max(differences) > 0.1
    sender.shutdown()
    assert moved == [sender.nbytes + sender.frozen_nbytes, sender.nbytes]
