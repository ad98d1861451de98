"""The second process of the weight sync cases. It stands for an engine, so it has torch and no JAX."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from multiprocessing import connection

import torch
import torch.multiprocessing  # teaches pickle to receive tensors by handles of their memory

from libra_jax import protocols
from libra_jax.weights import memfd

Sums = Mapping[str, float]
"""Sum of each tensor's numbers by name; empty if it was not asked for."""


def total(tensor: torch.Tensor) -> float:
    """Returns the sum of a tensor's numbers."""
    return float(tensor.sum(dtype=torch.float64))


def wait(place: torch.device) -> None:
    """Waits for torch's work on a device."""
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def receive(pipe: connection.Connection, place: str) -> None:
    """Copies what arrives into memory of its own, and answers with sums or with the sentence of an error.

    Args:
      pipe: brings (True if sums are wanted, tensors by name or a chunk of shared memory), and None in the end.
      place: torch's name of the device.
    """
    memory, kept = memfd.PeerMemory(), {}
    while (message := pipe.recv()) is not None:
        asked, sent = message
        try:
            tensors = sent if isinstance(sent, dict) else _mapped(sent, memory)
            sums = {}
            for name, tensor in tensors.items():
                # Allocated in the first round alone, which warms up, so that the others measure the copy.
                if name not in kept:
                    kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=place)
                kept[name].copy_(tensor)
                if asked:
                    sums[name] = total(kept[name])
            wait(torch.device(place))
            # The sender frees its memory when no one here refers to it.
            del message, sent, tensors, tensor
            pipe.send(sums)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def _mapped(chunk: protocols.WeightChunk, memory: memfd.PeerMemory) -> Mapping[str, torch.Tensor]:
    """Returns views of a chunk's tensors in shared memory."""
    mapping, found = memory.map(chunk.transport), {}
    for entry in chunk.entries:
        kind = getattr(torch, entry.dtype)
        with warnings.catch_warnings():
            # The mapping is read-only on purpose, and nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(mapping, dtype=kind, count=entry.nbytes // kind.itemsize, offset=entry.offset)
        found[entry.name] = flat.view(entry.shape)
    return found
