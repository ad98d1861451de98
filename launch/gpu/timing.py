"""Times work on a device, and measures the rates that other figures are compared with."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch

QUEUED = 8
"""Products or copies that are queued before the device is waited for."""


def torch_device(device: jax.Device) -> torch.device:
    """Returns torch's name of a JAX device."""
    return torch.device("cpu") if device.platform == "cpu" else torch.device("cuda", device.local_hardware_id)


def seconds(work: Callable[[], object], repeats: int = 3) -> list[float]:
    """Returns the seconds of each call; one call before them warms up. `work` returns what has to be waited for."""
    jax.block_until_ready(work())
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(work())
        found.append(time.perf_counter() - began)
    return found


@functools.cache
def matmul_flops(dtype: str, side: int) -> float:
    """Returns operations a second of large products on the default device, random data, the fastest of several.

    Args:
      dtype: dtype of factors and product.
      side: rows and columns of the square factors.
    """
    left, right = (jax.random.normal(jax.random.key(seed), (side, side), dtype) for seed in range(2))
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=dtype))
    fastest = min(seconds(lambda: [product(left, right) for _ in range(QUEUED)], repeats=5))
    return QUEUED * 2.0 * side**3 / fastest


def copy_bytes_per_second(source: torch.Tensor, target: torch.Tensor) -> float:
    """Returns bytes a second of torch's copy of a tensor, the fastest of several."""

    def wait() -> None:
        for tensor in (source, target):
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)

    found = []
    for _ in range(5):
        wait()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait()
        found.append(time.perf_counter() - began)
    return source.nbytes / min(found)
