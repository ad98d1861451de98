"""Hardware sheets: what the vendors publish about an accelerator. Only the last three fields come from measurements.

Rates are peaks; the cost model that reads a sheet knows what share of a peak an operation reaches. Link rates are
those of one direction. Vendors often quote the sum of both directions, which a collective never gets.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import subprocess
import sys
import timeit
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libra_jax import protocols

THIS_MACHINE = "cpu"
"""Name of the sheet of one core of the calling machine."""

REPEATS = 5
"""Measurements of this machine, of which the fastest counts."""

MEASURING_SECONDS = 60.0
"""Deadline in seconds of the measuring process, which takes about a second."""


@dataclass(frozen=True)
class HardwareSheet:
    """One accelerator, and the node that holds it.

    Attributes:
      name: name by which `sheet` finds it.
      flops: dense bfloat16 operations a second (no structured sparsity).
      memory_bytes_per_second: bandwidth of the high-bandwidth memory.
      memory_bytes: high-bandwidth memory, in bytes (vendors' decimal gigabytes).
      node_link_bytes_per_second: bandwidth between two accelerators of a node, in one direction, over all links of an
        accelerator.
      network_bytes_per_second: an accelerator's share of the bandwidth out of the node, in one direction.
      devices_per_node: accelerators that the node's links join.
      host_link_bytes_per_second: bandwidth between an accelerator and its host's memory, in one direction; 0 if the
        sheet does not know it.
      host_memory_bytes: an accelerator's share of its host's memory, in bytes; 0 if the sheet does not know it.
      memory_factor: share of its memory bandwidth that a decode step reaches, over that of an A100.
      layer_factor: time that each layer adds to a decode step, over that of an A100.
      host_factor: time of the host's work for a step, over that of a host with A100s.
    """

    name: str
    flops: float
    memory_bytes_per_second: float
    memory_bytes: float
    node_link_bytes_per_second: float
    network_bytes_per_second: float
    devices_per_node: int
    host_link_bytes_per_second: float = 0.0
    host_memory_bytes: float = 0.0
    memory_factor: float = 1.0
    layer_factor: float = 1.0
    host_factor: float = 1.0

    def collective_rate(self, span: int, link_share: float, network_share: float) -> float:
        """Returns the bytes a second of a collective over `span` neighbouring devices.

        Args:
          span: devices from the first to the last of a group, counted along the mesh.
          link_share: share of the link's bandwidth that a collective reaches inside a node.
          network_share: share of the network's bandwidth that it reaches between nodes.
        """
        if span <= self.devices_per_node:
            return self.node_link_bytes_per_second * link_share
        return self.network_bytes_per_second * network_share


HOPPER = {"memory_factor": 1.06, "layer_factor": 0.7, "host_factor": 0.3}
"""Factors of Hopper GPUs, relative to the coefficients that A100s ask for (`costs.Coefficients`). Matrix products of a
decode step of Qwen3-14B on one H100 read 0.84 of its bandwidth and take 32 microseconds a layer besides
(docs/results/machines.md); attention's kernels add to that. The host's factor makes published steps of vLLM on H100s
right in the mean."""

SHEETS = (
    # NVIDIA A100 80 GB SXM datasheet: 312 TFLOPS bf16, 2,039 GB/s, NVLink 600 GB/s in both directions.
    # DGX A100 80 GB datasheet: eight 200 Gb/s adapters for eight GPUs, 2 TB of memory, PCIe 4.0 x16 to each GPU.
    HardwareSheet("a100", 312e12, 2.039e12, 80e9, 300e9, 25e9, 8, 32e9, 250e9),
    # NVIDIA A800 80 GB SXM: the A100's silicon and memory with NVLink cut to 400 GB/s in both directions (NVIDIA's
    # statement to Reuters, 7 November 2022). The node is the DGX A100's, eight 200 Gb/s adapters.
    HardwareSheet("a800", 312e12, 2.039e12, 80e9, 200e9, 25e9, 8, 32e9, 250e9),
    # NVIDIA H100 SXM datasheet: 1,979 TFLOPS bf16 with sparsity, half of it dense; 3.35 TB/s; NVLink 900 GB/s in both
    # directions. DGX H100 datasheet: eight 400 Gb/s adapters, 2 TB of memory, PCIe 5.0 x16 to each GPU.
    HardwareSheet("h100", 989e12, 3.35e12, 80e9, 450e9, 50e9, 8, 64e9, 250e9, **HOPPER),
    # NVIDIA H800 SXM: the H100's silicon with NVLink cut to 400 GB/s in both directions; node of eight 400 Gb/s
    # adapters (both: lmsys.org blog of 19 September 2025). Host as the DGX H100's.
    HardwareSheet("h800", 989e12, 3.35e12, 80e9, 200e9, 50e9, 8, 64e9, 250e9, **HOPPER),
    # NVIDIA H20: 148 TFLOPS bf16, 96 GB at 4.0 TB/s, NVLink 900 GB/s in both directions; node of four 400 Gb/s adapters
    # (the same blog). Host as the DGX H100's.
    HardwareSheet("h20", 148e12, 4.0e12, 96e9, 450e9, 25e9, 8, 64e9, 250e9, **HOPPER),
    # NVIDIA H200 SXM datasheet: the H100's arithmetic and links with 141 GB at 4.8 TB/s. DGX H200: eight 400 Gb/s.
    HardwareSheet("h200", 989e12, 4.8e12, 141e9, 450e9, 50e9, 8, 64e9, 250e9, **HOPPER),
    # Google Cloud documentation, "TPU v5e": 197 TFLOPs bf16, 16 GB at 819 GB/s, interchip links of 400 GB/s in both
    # directions, 8 chips a host with two 100 Gb/s adapters.
    HardwareSheet("v5e", 197e12, 819e9, 16e9, 200e9, 3.125e9, 8),
    # Google Cloud documentation, "TPU v5p": 459 TFLOPs bf16, 95 GB at 2,765 GB/s, interchip links of 1,200 GB/s in both
    # directions, 4 chips a host with 200 Gb/s.
    HardwareSheet("v5p", 459e12, 2.765e12, 95e9, 600e9, 6.25e9, 4),
    # Google Cloud documentation, "TPU v6e": 918 TFLOPs bf16, 32 GB at 1,638 GB/s, interchip links of 800 GB/s in both
    # directions, 8 chips a host with four 200 Gb/s adapters.
    HardwareSheet("v6e", 918e12, 1.638e12, 32e9, 400e9, 12.5e9, 8),
)
"""Interchip links also join the hosts of one TPU slice; there, `network_bytes_per_second` is the rate between
slices."""

NAMES = tuple(sheet.name for sheet in SHEETS)
"""Names of accelerators that have a sheet."""

DEVICE_KINDS = {
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A800-SXM4-40GB": "a800",
    "NVIDIA A800-SXM4-80GB": "a800",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H800": "h800",
    "NVIDIA H20": "h20",
    "NVIDIA H200": "h200",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}
"""Names of sheets by the `device_kind` of a JAX device: CUDA's names of GPUs, and those that JAX gives to TPUs
(jax/_src/pallas/mosaic/tpu_info.py). Other boards of the same chip, such as "NVIDIA H100 PCIe", have other peaks and no
sheet."""


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak bfloat16 FLOP/s of a JAX device by its `device_kind`. None if it has no sheet."""
    name = DEVICE_KINDS.get(device_kind)
    return None if name is None else sheet(name).flops


def sheet(name: str, field: str = "simulation.hardware") -> HardwareSheet:
    """Returns the sheet of the accelerator `name`; for `planner.hardware`, "cpu" is this machine, measured now
    (`measured`).

    Args:
      name: one of `NAMES`.
      field: config field that names the accelerator.

    Raises:
      ConfigError: there is no such sheet; the message offers the nearest name.
    """
    if name == THIS_MACHINE and field == "planner.hardware":
        return measured()
    for candidate in SHEETS:
        if candidate.name == name:
            return candidate
    near = difflib.get_close_matches(name.lower(), NAMES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    named = field if field.startswith("--") else f"config.{field}"
    raise protocols.ConfigError(f"{named}: {name!r} is not one of {', '.join(NAMES)}{hint}")


def speeds(names: Sequence[str], field: str) -> dict[str, tuple[float, float]]:
    """Returns accelerators' speeds relative to the first: of decoding, by bandwidth, and of prefilling, by FLOP/s.

    Args:
      names: names of sheets.
      field: config field that names them.

    Raises:
      ConfigError: there is no such sheet.
    """
    sheets = [sheet(name, field) for name in dict.fromkeys(names)]
    return {
        accelerator.name: (
            accelerator.memory_bytes_per_second
            * accelerator.memory_factor
            / (sheets[0].memory_bytes_per_second * sheets[0].memory_factor),
            accelerator.flops / sheets[0].flops,
        )
        for accelerator in sheets
    }


@functools.cache
def measured() -> HardwareSheet:
    """Measures one core of this machine with NumPy: a matrix product, a copy through memory, and the memory size.

    Workers exchange data through memory too, so a link is as fast as a copy between two of them. The measurement runs
    in a process of its own, whose products stay on one core.

    Raises:
      ConfigError: the measuring process failed.
    """
    # One thread, because the sheet describes one core.
    environment = {**os.environ, **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")}
    command = [sys.executable, "-m", "libra_jax.planning.costs.hardware"]
    try:
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=MEASURING_SECONDS, check=True
        )
        product, copied = json.loads(process.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        raise protocols.ConfigError(
            f"config.planner.hardware: this machine could not be measured ({error}); name a sheet: {', '.join(NAMES)}"
        ) from error
    # A core stands for a device, so each has its share of the memory.
    cores = max(1, len(os.sched_getaffinity(0)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / cores
    return HardwareSheet(THIS_MACHINE, product, copied, memory, copied / 2, copied / 2, cores)


def _measure() -> tuple[float, float]:
    """Measures operations a second of a float32 product, and bytes a second that a copy reads and writes."""
    side, words = 768, 4_000_000  # 2 MiB a matrix, 32 MB a copy: larger than the caches
    matrix, source = np.ones((side, side), np.float32), np.ones(words)
    target = np.empty_like(source)
    # The fastest of several measurements, because other processes only make one slower.
    product = min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=REPEATS))
    copied = min(timeit.repeat(lambda: np.copyto(target, source), number=1, repeat=REPEATS))
    return 2 * side**3 / product, 2 * source.nbytes / copied


if __name__ == "__main__":
    print(json.dumps(_measure()))
