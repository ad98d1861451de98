"""Describes the machine and the versions that figures were measured with."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import jax

from gpu import rows

ASK_SECONDS = 10.0
"""Deadline in seconds of a program that is asked about the machine."""

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint", "torch", "numpy", "vllm")


def describe() -> rows.Machine:
    """Returns the machine as JAX's default devices show it."""
    devices = jax.devices()
    memory = devices[0].memory_stats() if devices[0].platform != "cpu" else None
    versions = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(named, platform.machine())
    return rows.Machine(
        platform=devices[0].platform,
        device=devices[0].device_kind if devices[0].platform != "cpu" else processor,
        devices=len(devices),
        memory_bytes=int((memory or {}).get("bytes_limit", 0)),
        driver=_asked(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]),
        processor=processor,
        cores=len(os.sched_getaffinity(0)),
        versions=versions,
        commit=_asked(["git", "rev-parse", "--short", "HEAD"]),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _asked(command: list[str]) -> str:
    """Returns what a program says about the machine; empty if it is missing, fails or is silent."""
    try:
        told = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""
