"""Hands a model's weights to a second process, as weight sync does, and compares with a plain copy of their bytes.

The second process stands for an engine: it maps what it gets, and copies every tensor into memory of its own. vLLM's
part, which lays the tensors out for its kernels, is not measured.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping

import jax
import torch
import torch.multiprocessing  # teaches pickle to send tensors by handles of their memory

from gpu import receiving, rows, shapes, timing
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.models import transformer
from libra_jax.utils import processes
from libra_jax.weights import device_snapshot, snapshot

MODEL = "Qwen3-0.6B"
ROUNDS = 3
ANSWER_SECONDS = 60.0
"""Deadline in seconds of an answer of the second process, its start included."""


def torch_memory(bench: rows.Bench) -> rows.Outcome:
    """Measures the `ipc` transport without vLLM: tensors in torch's memory, sent as handles of CUDA IPC.

    In a dry run the memory is the host's, which torch shares by file descriptors.
    """
    shape, dtype = shapes.shape(bench, MODEL), shapes.dtype(bench)
    params = _params(shape)
    place = timing.torch_device(jax.devices(bench.platform)[0])
    sources = snapshot.wire_entries(shape)
    stream = device_snapshot.TensorStream(sources, dtype, place)
    stream.leaves = {source.path: snapshot.leaf(params, source) for source in sources}
    gathered, sent, nbytes, problem = [], [], 0, ""
    with _second_process(str(place)) as peer:
        for number in range(ROUNDS + 1):
            began = time.perf_counter()
            tensors = dict(stream.tensors())
            receiving.wait(place)
            ready = time.perf_counter()
            received = _received(peer, check=number == 0, chunk=tensors)
            done = time.perf_counter()
            if number == 0:  # the first round warms up, and is checked
                nbytes = sum(tensor.nbytes for tensor in tensors.values())
                problem = _problem(tensors, received, params, shape)
            else:
                gathered.append(ready - began)
                sent.append(done - ready)
            # The next round gathers all tensors again, and would otherwise hold them twice.
            del tensors
            gc.collect()
        peer.end()
    whole = torch.ones(nbytes, dtype=torch.uint8, device=place)
    limit = timing.copy_bytes_per_second(whole, torch.empty_like(whole))
    way = "CUDA IPC" if place.type == "cuda" else "torch's shared memory"
    return rows.Outcome(_figures(way, nbytes, gathered, sent, limit), problem)


def host_memory(bench: rows.Bench) -> rows.Outcome:
    """Measures the `memfd` transport without vLLM: a snapshot in the host's memory, which the second process maps."""
    shape, dtype = shapes.shape(bench, MODEL), shapes.dtype(bench)
    params = _params(shape)
    place = timing.torch_device(jax.devices(bench.platform)[0])
    snapshots = snapshot.HostSnapshot(shape, dtype, 256 * 2**20, checksum=False)
    gathered, sent = [], []
    sums: dict[str, float] = {}
    try:
        with _second_process(str(place)) as peer:
            for version in range(ROUNDS + 1):
                began = time.perf_counter()
                count = snapshots.open(version, params)
                ready = time.perf_counter()
                for index in range(count):
                    sums |= _received(peer, check=version == 0, chunk=snapshots.stage(version, index))
                done = time.perf_counter()
                snapshots.close(version)
                if version:
                    gathered.append(ready - began)
                    sent.append(done - ready)
            peer.end()
    finally:
        snapshots.shutdown()
    stream = device_snapshot.TensorStream(snapshot.wire_entries(shape), dtype, place)
    stream.leaves = {source.path: snapshot.leaf(params, source) for source in snapshot.wire_entries(shape)}
    problem = _problem(dict(stream.tensors()), sums, params, shape)
    whole = torch.ones(snapshots.nbytes, dtype=torch.uint8, device=place)
    limit = timing.copy_bytes_per_second(whole, torch.empty_like(whole, device="cpu", pin_memory=whole.is_cuda))
    return rows.Outcome(_figures("shared host memory", snapshots.nbytes, gathered, sent, limit), problem)


def _params(shape: model_config.TransformerConfig) -> Mapping[str, object]:
    draw = jax.jit(lambda: transformer.init_params(shape, jax.random.key(0), "float32"))
    return jax.block_until_ready(draw())


def _figures(way: str, nbytes: int, gathered: list[float], sent: list[float], limit: float) -> rows.Figures:
    seconds = statistics.median(a + b for a, b in zip(gathered, sent, strict=True))
    return {
        "way": way,
        "gigabytes": nbytes / 1e9,
        "seconds": seconds,
        "snapshot_seconds": statistics.median(gathered),
        "second_process_seconds": statistics.median(sent),
        "gigabytes_per_second": nbytes / 1e9 / seconds,
        "copy_gigabytes_per_second": limit / 1e9,
        "share_of_copy": nbytes / seconds / limit,
    }


def _problem(
    tensors: Mapping[str, torch.Tensor],
    received: receiving.Sums,
    params: Mapping[str, object],
    shape: model_config.TransformerConfig,
) -> str:
    """Says whether what arrived is what was sent, and whether what was sent are the parameters."""
    if received.keys() != tensors.keys():
        return f"{len(received)} of {len(tensors)} tensors arrived"
    wrong = [name for name, tensor in tensors.items() if receiving.total(tensor) != received[name]]
    for source in snapshot.wire_entries(shape):
        if source.layer not in (None, 0):
            continue
        leaf = snapshot.leaf(params, source)
        wanted = leaf if source.layer is None else leaf[source.layer]
        found = tensors[source.hf_name]
        sent = snapshot.to_torch(wanted.astype(str(found.dtype).removeprefix("torch.")))
        if not torch.equal(sent.to(found.device), found):
            wrong.append(source.hf_name)
    return f"{wrong[0]} and {len(wrong) - 1} other tensors arrived with other values" if wrong else ""


def _second_process(place: str) -> processes.Peer:
    return processes.Peer(receiving.receive, place, name="the second process")


def _received(peer: processes.Peer, *, check: bool, chunk: object) -> receiving.Sums:
    """Sends tensors, and returns the sums of those that arrived if `check`."""
    answer: receiving.Sums | str = peer.ask((check, chunk), ANSWER_SECONDS)
    if isinstance(answer, str):
        raise protocols.LibraError(f"the second process failed: {answer}")
    return answer
