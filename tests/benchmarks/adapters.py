"""What a weight sync of an adapter moves: bytes of published models by rank, and one sync of a 0.6 B model."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

from libra_jax import config as config_lib
from libra_jax.models import config as model_config
from libra_jax.models import transformer
from libra_jax.models.adapters import adapters, lora
from libra_jax.weights import adapter_snapshot, snapshot

MODELS = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Llama-3.1-70B")
RANKS = (1, 8, 32, 64)
CHUNK_BYTES = 256 * 2**20


def measure() -> dict[str, Any]:
    """Returns the bytes that a sync brings, all weights and adapters, and the seconds of a snapshot of each."""
    return {"bytes": [_bytes(name) for name in MODELS], "sync": _sync(MODELS[0], 8)}


def _snapshot(name: str, rank: int) -> tuple[model_config.TransformerConfig, adapter_snapshot.AdapterSnapshot]:
    shape = adapters.adapted(model_config.load_preset(name), config_lib.LoraConfig(rank=rank))
    return shape, adapter_snapshot.AdapterSnapshot(shape, "bfloat16", CHUNK_BYTES, False)


def _bytes(name: str) -> dict[str, Any]:
    """Returns the bytes on the wire in bfloat16, with adapters on every projection of every layer."""
    found: dict[str, Any] = {"model": name}
    for rank in RANKS:
        _, made = _snapshot(name, rank)
        found |= {"all": made.frozen_nbytes, f"rank {rank}": made.nbytes}
        found[f"rank {rank}, share"] = made.nbytes / made.frozen_nbytes
        made.shutdown()
    return found


def _sync(name: str, rank: int) -> dict[str, Any]:
    """Returns seconds and bytes of snapshots: all weights, twice, and an adapter's first and second version."""
    shape, made = _snapshot(name, rank)
    draw = jax.jit(lambda: transformer.init_params(shape, jax.random.key(0), "bfloat16"))
    base = draw()
    adapter = lora.init(lora.split(transformer.abstract_params(shape))[0], jax.random.key(1))
    whole = snapshot.HostSnapshot(shape, "bfloat16", CHUNK_BYTES, False)
    found: dict[str, Any] = {"model": name, "rank": rank}
    for version in range(2):
        for kind, sender in (("all weights", whole), ("adapter", made)):
            policy = base if sender is whole else lora.join(base, jax.tree.map(jnp.copy, adapter))
            jax.block_until_ready(policy)
            began = time.perf_counter()
            sender.open(version, policy)
            found[f"{kind}, version {version}, seconds"] = time.perf_counter() - began
            sender.close(version)
    found |= {"all weights, bytes": whole.nbytes, "adapter, bytes": made.nbytes}
    whole.shutdown()
    made.shutdown()
    return found
