"""Asks glibc's malloc for huge pages where the trainer runs on CPUs.

A step on CPUs writes fresh memory all the time. With pages of 4 KiB, page faults take much of the step; with pages of
2 MiB they take little of it. malloc reads its tunables when a program starts. So an actor's process gets the variable
from its `ActorSpec`, and a command that trains in its own process starts itself again.

On kernels that give huge pages to no one or to everybody, and without glibc 2.35 or newer, the variable does nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from libra_jax import config as config_lib

VARIABLE = "GLIBC_TUNABLES"

_TUNABLE = "glibc.malloc.hugetlb"
_KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def environment(trainer: config_lib.TrainerConfig) -> dict[str, str]:
    """Returns the variable of the trainer's process. Empty if the trainer uses no CPU or `trainer.huge_pages` is off.

    A value that the user set for the tunable stays. Other tunables of the user stay beside ours.
    """
    tunables = os.environ.get(VARIABLE, "")
    if trainer.platform != "cpu" or not trainer.huge_pages or _TUNABLE in tunables:
        return {}
    return {VARIABLE: ":".join(filter(None, (tunables, f"{_TUNABLE}=1")))}


def restart(config: config_lib.RunConfig, kernel: Path = _KERNEL) -> None:
    """Starts this command again with the variable, if the trainer will run in this process and the kernel allows it.

    Args:
      config: configuration of the run.
      kernel: file with the kernel's choices; the one in use is in brackets.
    """
    variables = environment(config.trainer)
    if not variables or config.cluster.backend != "inprocess":
        return
    try:
        if "[madvise]" not in kernel.read_text():
            return
    except OSError:
        return
    sys.stdout.flush()
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **variables})
