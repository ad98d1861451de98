"""Runs in every process that vLLM starts, through the entry point group `vllm.general_plugins`.

The plug-in registers our weight transfers with vLLM, and mends speculation on CPU. If our environment variables ask for
it, the plug-in ties the process's life to its parent's. It also shields the process from Ctrl-C and sends its output to
a file. Nothing imported here reaches JAX.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from libra_jax.utils import parent_death

if TYPE_CHECKING:
    import torch

PARENT_DEATH_VARIABLE = "LIBRA_JAX_PARENT_DEATH_SIGNAL"
"""Environment variable; 1 lets the kernel kill vLLM's processes when their parent dies.

Such processes also leave their parent's process group.
"""

LOG_VARIABLE = "LIBRA_JAX_ENGINE_LOG"
"""Environment variable: path of a file for the stdout and stderr of vLLM's processes."""

ROUTING_VARIABLE = "LIBRA_JAX_RETURN_ROUTING"
"""Environment variable; 1 lets vLLM's CPU workers return the experts of every token."""

TRANSPORT = "libra_jax_memfd"
"""vLLM's name for our weight transfer."""

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
"""vLLM's logger of weight updates."""

NCCL_TRANSPORT = "libra_jax_nccl"
"""vLLM's name for its weight transfer by NCCL, in groups that change."""


def register() -> None:
    """Registers the transport. vLLM calls this function in each process; the front end only registers. Idempotent."""
    # Registered by name, not imported: vLLM loads the class when a worker first needs it.
    from vllm import platforms
    from vllm.distributed.weight_transfer import factory

    for name, engine in ((TRANSPORT, "MemfdWeightTransferEngine"), (NCCL_TRANSPORT, "NcclWeightTransferEngine")):
        if name not in factory.WeightTransferEngineFactory._registry:
            factory.WeightTransferEngineFactory.register_engine(name, "libra_jax.engines.vllm_weights", engine)
    logging.getLogger(RELOAD_LOGGER).addFilter(_is_news)
    if platforms.current_platform.is_cpu():
        from vllm.utils import cpu_triton_utils

        # vLLM 0.32's own function copies the temperatures of speculating requests to integers, and writes its result to
        # another copy. The logits are then divided by uninitialised memory, which breaks the log-prob contract. vLLM
        # looks the function up when a worker starts (`CpuPlatform.register_triton_kernel_overrides`).
        cpu_triton_utils._expand_kernel_impl = _expand
        from vllm import config

        verify = config.VllmConfig._verify_aux_output_compatibility
        if verify.__module__ != __name__:
            config.VllmConfig._verify_aux_output_compatibility = _unless_routing(verify)
        if os.environ.get(ROUTING_VARIABLE) == "1":
            from vllm.v1.worker import cpu_worker

            from libra_jax.engines import vllm_routing

            cpu_worker.CPUModelRunner = vllm_routing.ModelRunner
    parent = multiprocessing.parent_process()
    # The front end is our own process, whose life and output are not vLLM's.
    if parent is None:
        return
    if folder := os.environ.get("VLLM_RPC_BASE_PATH"):
        from vllm.utils import network_utils

        # The file at which workers meet lies in the engine's folder, so that it goes with it (`scratch`).
        network_utils.tempfile = types.SimpleNamespace(gettempdir=lambda: folder)
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


def _unless_routing(verify: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns vLLM's check of a config that returns experts, without effect while `ROUTING_VARIABLE` is 1.

    The check refuses all but the newer model runner, which does not run on CPU. The other cases that it refuses cannot
    come here: the run's config refuses them. The front end starts engines with and without the variable.
    """

    def checked(self: Any) -> None:
        if os.environ.get(ROUTING_VARIABLE) != "1":
            verify(self)

    return checked


def _is_news(record: logging.LogRecord) -> bool:
    """Returns False for the warning, at every weight update, that rotary embeddings got no weights: they have none."""
    return "RotaryEmbedding: Failed to load weights" not in record.getMessage()


def _expand(
    output: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Writes each request's value to all of its tokens, with `replace_from` replaced by `replace_to`.

    `ends` are cumulative numbers of tokens. `MAX_NUM_TOKENS` is part of vLLM's signature, and not used.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))
