"""Runs in every process that vLLM starts, through the entry point group `vllm.general_plugins`.

The plug-in registers the memfd weight transfer with vLLM. If our environment variables ask for it, the plug-in ties the
process's life to its parent's. It also shields the process from Ctrl-C and sends its output to a file. Nothing imported
here reaches JAX.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys

from libra_jax import parent_death

PARENT_DEATH_VARIABLE = "LIBRA_JAX_PARENT_DEATH_SIGNAL"
"""Environment variable; 1 lets the kernel kill vLLM's processes when their parent dies.

Such processes also leave their parent's process group.
"""

LOG_VARIABLE = "LIBRA_JAX_ENGINE_LOG"
"""Environment variable: path of a file for the stdout and stderr of vLLM's processes."""

TRANSPORT = "libra_jax_memfd"
"""vLLM's name for our weight transfer."""


def register() -> None:
    """Registers the transport. vLLM calls this function in each process; the front end only registers. Idempotent."""
    # Registered by name, not imported: vLLM loads the class when a worker first needs it.
    from vllm.distributed.weight_transfer import factory

    if TRANSPORT not in factory.WeightTransferEngineFactory._registry:
        factory.WeightTransferEngineFactory.register_engine(
            TRANSPORT, "libra_jax.engines.vllm_weights", "MemfdWeightTransferEngine"
        )
    parent = multiprocessing.parent_process()
    # The front end is our own process, whose life and output are not vLLM's.
    if parent is None:
        return
    if log := os.environ.get(LOG_VARIABLE):
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        # On the level of descriptors, so that output of C++ code is redirected, too.
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    if os.environ.get(PARENT_DEATH_VARIABLE) == "1":
        parent_death.die_with_parent(parent.pid)
        # A terminal sends Ctrl-C to a process group. In its own group, this process leaves that to the coordinator. A
        # guard that kills the parent's group (`cluster.guard`) no longer reaches it; it dies with its parent.
        with contextlib.suppress(PermissionError):  # it leads a session, and so a group, already
            os.setpgid(0, 0)
