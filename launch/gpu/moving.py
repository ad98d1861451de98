"""Moves arrays: to torch and back, to another mesh, to the host and back, and to disk and back."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch

from gpu import rows, shapes, timing
from libra_jax import config as config_lib
from libra_jax.models.hf import gather
from libra_jax.training import checkpoints, resize
from libra_jax.training import learner as learner_lib
from libra_jax.training import state as state_lib
from libra_jax.weights import snapshot

MODEL = "Qwen3-0.6B"


def dlpack(bench: rows.Bench) -> rows.Outcome:
    """Checks that an array goes from JAX to torch and back, and from torch to JAX, without a copy of its memory."""
    device = jax.devices(bench.platform)[0]
    for dtype in ("float32", "bfloat16", "int32"):
        array = jax.device_put(jnp.arange(4096).reshape(64, 64).astype(dtype), device)
        tensor = snapshot.to_torch(array)
        back = jnp.from_dlpack(tensor)
        torch_first = torch.arange(4096, device=timing.torch_device(device)).to(getattr(torch, dtype)).reshape(64, 64)
        other = jnp.from_dlpack(torch_first)
        pointers = {
            "from JAX to torch": (array.unsafe_buffer_pointer(), tensor.data_ptr()),
            "from JAX to torch and back": (array.unsafe_buffer_pointer(), back.unsafe_buffer_pointer()),
            "from torch to JAX": (torch_first.data_ptr(), other.unsafe_buffer_pointer()),
        }
        for way, (before, after) in pointers.items():
            if before != after:
                return rows.Outcome({"dtype": dtype}, f"{dtype} was copied {way}")
        if not bool((back == array).all()) or not bool((other == array).all()) or tensor.device != torch_first.device:
            return rows.Outcome({"dtype": dtype}, f"{dtype} arrived with other values, or on another device")
    return rows.Outcome({"dtypes": "float32, bfloat16, int32", "device": str(torch_first.device), "copies": 0})


def _learner(bench: rows.Bench, layers: int | None, trainer: config_lib.TrainerConfig) -> learner_lib.Learner:
    """Returns a learner with random parameters and Adam's moments. Moments of 0 would be compressed to nothing."""
    model = config_lib.ModelConfig(preset=MODEL, compute_dtype=shapes.dtype(bench))
    shape, config = shapes.shape(bench, MODEL, layers), config_lib.RunConfig(model=model, trainer=trainer)
    made = learner_lib.Learner(config, shape, jax.devices(bench.platform))
    made.begin(state_lib.random_params(shape, made.layout, seed=0))
    made.state = jax.block_until_ready(_random_moments(made.train_state()))
    return made


@functools.partial(jax.jit, donate_argnums=0)
def _random_moments(state: state_lib.TrainState) -> state_lib.TrainState:
    """Returns the state with random float32 numbers instead of the optimizer's moments."""
    leaves, structure = jax.tree.flatten(state.opt_state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [
        jax.random.normal(key, leaf.shape, leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return dataclasses.replace(state, opt_state=jax.tree.unflatten(structure, drawn))


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@jax.jit
def _prints(leaves: list[jax.Array]) -> list[jax.Array]:
    """Returns a checksum of each leaf: 32-bit words, each weighted by its place. Equal leaves have equal checksums."""
    sums = []
    for leaf in leaves:
        place = jnp.uint32(0)
        for axis, size in enumerate(leaf.shape):
            place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        # Odd weights, so that each changed bit changes the sum.
        sums.append(jnp.sum(words * (2 * place + 1), dtype=jnp.uint32))
    return sums


def _same(before: list[jax.Array], after: Any) -> bool:
    found = _prints(jax.tree.leaves(after))
    return all(int(a) == int(b) for a, b in zip(before, found, strict=True))


def reshard(bench: rows.Bench) -> rows.Outcome:
    """Moves a train state from a mesh of fsdp shards to one of half as many shards and two replicas, and back."""
    count = min(4, len(jax.devices(bench.platform)))
    if count < 4:
        raise rows.LeftOut(f"a mesh is changed on four devices, and there are {count}")
    trainer = config_lib.TrainerConfig(fsdp=count)
    present = _learner(bench, None, trainer)
    halves = config_lib.TrainerConfig(fsdp=count // 2, data=2)
    following = present.on(halves, jax.devices(bench.platform))
    layouts = (present.layout, following.layout)
    before = _prints(jax.tree.leaves(present.state))
    leaves, structure = present.release()
    moved, took = 0, 0.0
    for source, target in (layouts, layouts[::-1]):
        began = time.perf_counter()
        resize.move(leaves, jax.tree.leaves(target.state))
        took += time.perf_counter() - began
        moved += resize.estimate(source, target, holds_sums=False).arriving_bytes
    same = _same(before, jax.tree.unflatten(structure, leaves))
    figures: rows.Figures = {
        "devices": count,
        "state_gigabytes": _nbytes(leaves) / 1e9,
        "arriving_gigabytes": moved / 1e9,
        "seconds": took,
        "gigabytes_per_second": moved / 1e9 / took,
    }
    return rows.Outcome(figures, "" if same else "the state came back with other bits")


def offload(bench: rows.Bench) -> rows.Outcome:
    """Moves parameters into the host's pinned memory and back, and compares with torch's copy."""
    device = jax.devices(bench.platform)[0]
    shape = shapes.shape(bench, MODEL)
    params = _learner(bench, None, config_lib.TrainerConfig()).params
    before, nbytes = _prints(jax.tree.leaves(params)), _nbytes(params)
    kinds = {memory.kind for memory in device.addressable_memories()}
    if gather.PINNED not in kinds:
        raise rows.LeftOut(f"{device.device_kind} has no memory named {gather.PINNED}")
    host = jax.sharding.SingleDeviceSharding(device, memory_kind=gather.PINNED)
    home = jax.sharding.SingleDeviceSharding(device)
    there, back = [], []
    for _ in range(3):
        began = time.perf_counter()
        parked = jax.block_until_ready(jax.device_put(params, host))
        there.append(time.perf_counter() - began)
        del params
        began = time.perf_counter()
        params = jax.block_until_ready(jax.device_put(parked, home))
        back.append(time.perf_counter() - began)
        del parked
    source = torch.ones(min(nbytes, 2**28), dtype=torch.uint8, device=timing.torch_device(device))
    limit = timing.copy_bytes_per_second(source, torch.empty_like(source, device="cpu", pin_memory=source.is_cuda))
    figures: rows.Figures = {
        "layers": shape.num_layers,
        "gigabytes": nbytes / 1e9,
        "to_host_gigabytes_per_second": nbytes / 1e9 / min(there),
        "to_device_gigabytes_per_second": nbytes / 1e9 / min(back),
        "copy_to_host_gigabytes_per_second": limit / 1e9,
        "ratio_to_copy": nbytes / min(there) / limit,
    }
    return rows.Outcome(figures, "" if _same(before, params) else "the parameters came back with other bits")


def checkpoint(bench: rows.Bench) -> rows.Outcome:
    """Saves a train state of random parameters as a run does, and restores it."""
    made = _learner(bench, 4, config_lib.TrainerConfig())
    state = made.train_state()
    before, nbytes = _prints(jax.tree.leaves(state)), _nbytes(state)
    path, saver = str(Path(bench.scratch) / "checkpoint"), checkpoints.Checkpointer()
    try:
        began = time.perf_counter()
        saver.save(path, state)
        blocked = time.perf_counter() - began
        saver.wait()
        saved = time.perf_counter() - began
        made.release()
        del state
        began = time.perf_counter()
        restored = jax.block_until_ready(saver.restore(path, made.layout.state))
        took = time.perf_counter() - began
    finally:
        saver.close()
    figures: rows.Figures = {
        "gigabytes": nbytes / 1e9,
        "blocking_seconds": blocked,
        "save_seconds": saved,
        "restore_seconds": took,
        "save_gigabytes_per_second": nbytes / 1e9 / saved,
        "restore_gigabytes_per_second": nbytes / 1e9 / took,
    }
    return rows.Outcome(figures, "" if _same(before, restored) else "the state was restored with other bits")
