"""One of two trainer processes with four CPU devices each, whose parameters have the proportions of Qwen3-8B.

  python gathering_process.py RANK PORT DIRECTORY

Opens a snapshot, and measures what the next one adds to this process's memory. Prints {"layer": bytes of a layer on the
wire, "peak": the largest growth}; the first process adds {"wrong": the tensors that are not the parameters}.
Then both export the parameters to DIRECTORY.
"""

import ctypes
import dataclasses
import functools
import json
import math
import os
import sys
import threading
import time

import numpy as np

from libra_jax.models import config as models_config
from libra_jax.models.hf import hf_names

# Every width an eighth of Qwen3-8B's, and all its layers: 6 MB a layer in bfloat16, 256 MB in all.
SHAPE = dataclasses.replace(
    models_config.load_preset("Qwen3-8B"),
    hidden_size=512,
    intermediate_size=1536,
    num_heads=4,
    num_kv_heads=1,
    vocab_size=18992,
)
ENTRIES = {entry.hf_name: entry for entry in hf_names.weight_map(SHAPE)}


LEAVES = sorted({entry.path for entry in ENTRIES.values()})


def value(entry: hf_names.HfEntry) -> np.ndarray:
    """The tensor of an entry: numbers that bfloat16 holds exactly, in another order than in any other tensor."""
    numbers = np.arange(math.prod(entry.shape), dtype=np.uint32) * np.uint32(2654435761)
    seed = (LEAVES.index(entry.path) * 64 + (entry.layer or 0)) * 40503 % 2**32
    return (((numbers + np.uint32(seed)) >> np.uint32(25)).astype(np.float32) - 64).reshape(entry.shape)


def main(rank: int, port: int, directory: str) -> None:
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    import jax

    from libra_jax.models.hf import hf
    from libra_jax.weights import snapshot

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    params = sharded()
    publisher = snapshot.HostSnapshot(SHAPE, "bfloat16", 64 * 2**20, False)
    count = publisher.open(1, params)
    layer = [entry for entry in ENTRIES.values() if entry.layer == 0]
    found = {
        "layer": sum(math.prod(entry.shape) * (4 if len(entry.shape) == 1 else 2) for entry in layer),
        "peak": growth(lambda: publisher.open(2, params)),
    }
    if rank == 0:
        found["wrong"] = wrong_tensors(publisher, count)
    hf.save(params, SHAPE, directory)
    print(json.dumps(found))


def sharded() -> dict:
    """The parameters, over fsdp 4 (the processes cut it in two) and tensor 2."""
    import jax
    import jax.numpy as jnp

    from libra_jax.models import transformer

    def make(path, leaf):
        axes = [jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) for axis in range(leaf.ndim)]
        keys = tuple(key.key for key in path)
        layer = axes.pop(0) if keys[0] == "layers" else jnp.uint32(0)
        sizes = zip(axes, leaf.shape[-len(axes) :], strict=True)
        place = functools.reduce(lambda at, axis: at * axis[1] + axis[0], sizes, jnp.uint32(0))
        seed = (jnp.uint32(LEAVES.index(keys) * 64) + layer) * jnp.uint32(40503)
        return ((place * jnp.uint32(2654435761) + seed) >> 25).astype(jnp.float32) - 64

    axes = (jax.sharding.AxisType.Auto,) * 4
    mesh = jax.make_mesh((1, 4, 2, 1), ("data", "fsdp", "tensor", "context"), axis_types=axes)
    shapes = jax.eval_shape(lambda: transformer.init_params(SHAPE, jax.random.key(0)))
    build = jax.jit(lambda: jax.tree.map_with_path(make, shapes), out_shardings=transformer.shardings(SHAPE, mesh))
    return jax.block_until_ready(build())


def growth(work) -> int:
    """The largest growth of resident memory during `work`: arrays, buffers of XLA and gloo, everything."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # gives freed memory back, so that its reuse counts
    sizes, done = [resident()], threading.Event()

    def watch() -> None:
        while not done.is_set():
            sizes.append(resident())
            time.sleep(0.0005)

    watching = threading.Thread(target=watch)
    watching.start()
    work()
    done.set()
    watching.join()
    return max(sizes) - sizes[0]


def resident() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wrong_tensors(publisher, count: int) -> list[str]:
    import jax

    from libra_jax.weights import memfd

    wrong, seen = [], set()
    for index in range(count):
        chunk = publisher.stage(2, index)
        mapping = memfd.open_peer(chunk.transport)
        for entry in chunk.entries:
            kind = jax.numpy.dtype(entry.dtype)
            flat = np.frombuffer(mapping, kind, entry.nbytes // kind.itemsize, entry.offset)
            seen.add(entry.name)
            if not np.array_equal(flat.reshape(entry.shape).astype(np.float32), value(ENTRIES[entry.name])):
                wrong.append(entry.name)
    return wrong + sorted(set(ENTRIES) - seen)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
