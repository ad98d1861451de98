"""JAX arrays as torch tensors, by DLPack: no copy where the bytes already lie in this host's memory.

A tensor made here keeps the array's buffer alive and JAX from donating it, and a write through it changes the array.
Drop it before the array's next donation.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import torch

from libra_jax import protocols


@dataclass(frozen=True)
class Piece:
    """One device's part of an array.

    Attributes:
      start: first index of the part along each axis of the array.
      tensor: the part, on the CPU.
    """

    start: tuple[int, ...]
    tensor: torch.Tensor


def to_torch(array: jax.Array) -> torch.Tensor:
    """A single-device array as a CPU tensor: shared where it lies on a CPU device, copied from an accelerator.

    Raises:
      LibraError: the array's buffer has been donated.
    """
    if array.is_deleted():
        raise protocols.LibraError(f"an array of shape {array.shape} was donated before it was handed to torch")
    (device,) = array.sharding.device_set
    if device.platform != "cpu":
        try:
            host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:
            raise protocols.ConfigError(
                'weights cannot reach host memory: JAX has no CPU backend; set JAX_PLATFORMS to "cuda,cpu" or unset it'
            ) from None
        array = jax.device_put(array, host)
    return torch.from_dlpack(array.block_until_ready())


def pieces(array: jax.Array) -> tuple[Piece, ...]:
    """An array over any devices of this process as the parts that make it up, each once, replicas left out."""
    if array.is_deleted():
        raise protocols.LibraError(f"an array of shape {array.shape} was donated before it was handed to torch")
    if not (array.is_fully_addressable or array.is_fully_replicated):
        raise protocols.LibraError("weights are published by one process that sees all their devices")
    if array.is_fully_replicated:
        return (Piece((0,) * array.ndim, to_torch(array.addressable_data(0))),)
    return tuple(
        Piece(tuple(axis.start or 0 for axis in shard.index), to_torch(shard.data))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    )
