"""What vLLM runs in every process that it starts, through the entry point group `vllm.general_plugins`.

It makes the memfd weight transfer known to vLLM, and, where our environment variables ask for it, ties the process's
life to its parent's, keeps Ctrl-C from it, and sends its output to a file. Nothing imported from here reaches JAX.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys

from libra_jax import parent_death

PARENT_DEATH_VARIABLE = "LIBRA_JAX_PARENT_DEATH_SIGNAL"
"""Set to 1, processes that vLLM starts are killed by the kernel when the one that started them dies, and
leave its process group."""

LOG_VARIABLE = "LIBRA_JAX_ENGINE_LOG"
"""A file that takes what vLLM's processes write to stdout and stderr."""

TRANSPORT = "libra_jax_memfd"
"""vLLM's name for our weight transfer."""


def register() -> None:
    """Called by vLLM, in the front end too, where it only registers. Safe to call again."""
    # Named, not imported: vLLM loads the class when a worker first needs it.
    from vllm.distributed.weight_transfer import factory

    if TRANSPORT not in factory.WeightTransferEngineFactory._registry:
        factory.WeightTransferEngineFactory.register_engine(
            TRANSPORT, "libra_jax.engines.vllm_weight_loader", "MemfdWeightTransferEngine"
        )
    if multiprocessing.parent_process() is None:
        return
    if log := os.environ.get(LOG_VARIABLE):
        _redirect_output(log)
    if os.environ.get(PARENT_DEATH_VARIABLE) == "1":
        parent = multiprocessing.parent_process()
        parent_death.die_with_parent(None if parent is None else parent.pid)
        leave_group()


def leave_group() -> None:
    """Makes this process's own group, so that Ctrl-C, which a terminal sends to a group, reaches the coordinator only.

    A guard that kills the parent's group (`cluster.guard`) misses this process from now on; it dies with its parent.
    """
    with contextlib.suppress(PermissionError):  # it leads a session, and so a group, already
        os.setpgid(0, 0)


def _redirect_output(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
