"""Compiling for GPUs and TPUs on a machine without one.

XLA compiles for the devices of a topology description (`jax.experimental.topologies`), which exist only on paper. It
needs the platform's compiler: jax's CUDA plug-in, which needs no CUDA library for that, or libtpu. Where they are not
installed beside jax, they come from a folder of their own (`launch/setup.sh --accelerators`), so that no other process
loads them.

All of JAX's GPU lowering works on such devices, except two kernels that ask the devices of this process: cuDNN's
attention for their compute capability, and the installed cuDNN for its version; grouped products for their cores.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo as stablehlo
from jax.experimental import topologies

from libra_jax import protocols

FOLDER_VARIABLE = "LIBRA_JAX_ACCELERATORS"
"""Environment variable that names the compilers' folder; default: `.venv/accelerators` beside the package."""

HOPPER_CORES = 132
"""Streaming multiprocessors of an H100 SXM, and of an H200."""

_CUDNN = re.compile(r"^dnn_version_info \{ major: (\d+) minor: (\d+) patch: (\d+) \}$", re.MULTILINE)


@dataclass(frozen=True)
class TargetAccelerator:
    """An accelerator to compile for.

    Attributes:
      platform: JAX's platform name.
      module: module of the compiler.
      grids: topologies in the order of their sizes: hosts x devices of a host for GPUs, the grid of chips for TPUs.
      description: file beside this module that describes the device to XLA; empty for TPUs, which XLA knows by name.
    """

    platform: str
    module: str
    grids: tuple[tuple[int, int], ...]
    description: str = ""


TARGETS: Mapping[str, TargetAccelerator] = {
    "h100": TargetAccelerator(
        "cuda", "jax_plugins.xla_cuda13", ((1, 8), *((2**power, 8) for power in range(1, 8))), "targets/h100.txtpb"
    ),
    "v6e": TargetAccelerator("tpu", "libtpu", ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))),
}
"""Accelerators by the name of their hardware sheet. TPU grids: Google Cloud documentation, "TPU v6e"."""


def available(name: str) -> bool:
    """Returns whether the compiler of a target is installed; looks, and loads nothing."""
    module = TARGETS[name].module
    if (compilers_folder() / module.replace(".", "/")).is_dir():
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def compilers_folder() -> Path:
    """Returns the folder of the compilers, whether it exists or not."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).parents[2] / ".venv/accelerators")


def devices(name: str, count: int, grid: tuple[int, int] | None = None) -> Sequence[jax.Device]:
    """Returns devices that exist only on paper, in the order of their ids.

    Call it before jax first looks for devices in this process. For a TPU, it sets the variables that libtpu reads.

    Args:
      count: least number of devices.
      grid: the topology; None takes the smallest with enough devices.

    Raises:
      ConfigError: there is no such target, or no topology of that many devices, or the compiler is not installed.
    """
    if name not in TARGETS:
        raise protocols.ConfigError(f"--target: {name!r} is not one of {', '.join(TARGETS)}")
    target = TARGETS[name]
    if grid is None:
        grid = next((grid for grid in target.grids if math.prod(grid) >= count), target.grids[-1])
    if math.prod(grid) < count:
        raise protocols.ConfigError(
            f"--topology: the mesh needs {count} devices, and the topology {grid[0]}x{grid[1]} has {math.prod(grid)}"
        )
    if not available(name):
        raise protocols.ConfigError(
            f"--target: the compiler for {name} is not installed: run bash launch/setup.sh --accelerators"
        )
    # Last, so that nothing of the folder shadows a module of the environment.
    if (folder := str(compilers_folder())) not in sys.path:
        sys.path.append(folder)
    if target.platform == "tpu":
        # libtpu asks the machine what slice it belongs to, unless these variables say so.
        os.environ.update(
            # One process at a time may open a TPU, which libtpu ensures by a lock that a killed process leaves behind.
            # No device is opened here.
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
            TPU_SKIP_MDS_QUERY="1",
            TPU_WORKER_ID="0",
            TPU_WORKER_HOSTNAMES="localhost",
            TPU_ACCELERATOR_TYPE=f"{name}-{math.prod(grid)}",
        )
        return list(topologies.get_topology_desc(f"{name}:{grid[0]}x{grid[1]}", platform="tpu").devices)
    # XLA reads a GPU topology as partitions x hosts of a partition x devices of a host.
    topology_description = topologies.get_topology_desc(
        platform=target.platform, target_config=_description(target), topology=f"1x{grid[0]}x{grid[1]}"
    )
    return list(topology_description.devices)


def cudnn_version() -> int:
    """Returns the version of cuDNN that programs for GPUs are compiled for, as cuDNN reports it: 9.20.0 is 92000.

    It stands in the target's description, which XLA reads, too.
    """
    match = _CUDNN.search(_description(TARGETS["h100"]))
    assert match is not None
    major, minor, patch = map(int, match.groups())
    return 10_000 * major + 100 * minor + patch


def _description(target: TargetAccelerator) -> str:
    return (Path(__file__).parent / target.description).read_text()


@contextlib.contextmanager
def answering_for(device: jax.Device) -> Iterator[None]:
    """Lets `device` answer JAX's questions about the GPU while a program is traced and compiled in this block.

    Thread-safety: none; the answers replace functions of a module of JAX.

    Args:
      device: a device of a topology description. For a device that is not a GPU, the block changes nothing.
    """
    if device.platform != "gpu":
        yield
        return
    capability, cudnn = _version(device.compute_capability), cudnn_version()
    answers = {
        "check_cudnn_version": lambda: cudnn,
        "check_compute_capability": lambda minimum: capability >= _version(minimum),
        "is_cuda_compute_capability_equal": lambda version: capability == _version(version),
    }
    places: list[tuple[Any, str, object]] = [(stablehlo, name, answer) for name, answer in answers.items()]
    if capability == (9, 0):
        # Imported here: it loads JAX's dialects for Hopper GPUs.
        from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

        cores = types.SimpleNamespace(core_count=HOPPER_CORES)
        answering = types.SimpleNamespace(**vars(jax) | {"devices": lambda: [cores]})
        places.append((transposed_ragged_dot_mgpu, "jax", answering))
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    try:
        for place, name, answer in places:
            setattr(place, name, answer)
        yield
    finally:
        for place, name, former in before:
            setattr(place, name, former)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
