"""Finds the CPU cores near a worker's GPUs, on hosts with several NUMA nodes.

Asks NVIDIA's library through its own Python package (nvidia-ml-py, which installs `pynvml`). Not run on a host with a
GPU: tested against a stand-in for that library.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

_WORD_BITS = 64


def cores_near(visible: str) -> tuple[int, ...]:
    """Returns the usable cores of the NUMA nodes that the GPUs are attached to.

    The result is empty if there is no choice (all cores are equally near), no GPU is named, or the library or driver is
    missing.

    Args:
      visible: GPUs as in CUDA_VISIBLE_DEVICES, by number or UUID. Numbers are read as the library's, in bus order,
        which is CUDA's order too if all GPUs of a host are alike.

    Source: `nvmlDeviceGetCpuAffinityWithinScope` of NVIDIA's NVML reference.
    """
    names = [name.strip() for name in visible.split(",") if name.strip()]
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        near = {core for name in names for core in _of_gpu(nvml, name)}
    except nvml.NVMLError:  # an older driver lacks this query
        return ()
    finally:
        nvml.nvmlShutdown()
    usable = os.sched_getaffinity(0)
    kept = near & usable
    # If all usable cores are near, or none, there is nothing to pin.
    return () if kept in (set(), usable) else tuple(sorted(kept))


def _of_gpu(nvml: Any, name: str) -> list[int]:
    handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
    count = -(-(os.cpu_count() or 1) // _WORD_BITS)
    words = nvml.nvmlDeviceGetCpuAffinityWithinScope(handle, count, nvml.NVML_AFFINITY_SCOPE_NODE)
    return [word * _WORD_BITS + bit for word, mask in enumerate(words) for bit in range(_WORD_BITS) if mask >> bit & 1]
