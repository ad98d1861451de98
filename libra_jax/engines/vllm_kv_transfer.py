"""Moves a request's keys and values to its new instance, through vLLM's NIXL connector.

Written against vLLM 0.32 and **not run**: it needs several GPUs and the nixl package. It uses the hand-over of split
prefill and decode, with both roles in every instance. The old instance prefills the context, which its prefix cache
holds except for the tool's return, and keeps the blocks. The new instance pulls the blocks over RDMA or NVLink. Blocks
that cannot be pulled are recomputed (`kv_load_failure_policy`). The coordinator requests a hand-over only between
instances of one policy version.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Mapping
from typing import Any

from libra_jax.engines import vllm_quiet  # noqa: F401

# isort: split
import torch
import vllm
from vllm.config import KVTransferConfig
from vllm.sampling_params import RequestOutputKind

from libra_jax import config, protocols

ARGUMENT = "kv_transfer_params"
"""Key under which vLLM reads a request's part of a transfer, in `SamplingParams.extra_args`."""


def check(rollout: config.RolloutConfig) -> None:
    """Raises ConfigError if this machine cannot make the configured transfer.

    Raises:
      ConfigError: no CUDA device, or no nixl package, is available.
    """
    if rollout.kv_transfer == "none":
        return
    if not torch.cuda.is_available():
        raise protocols.ConfigError(
            f"config.rollout.kv_transfer: {rollout.kv_transfer!r} needs CUDA, which torch does not find here; "
            "use 'none', which prefills again"
        )
    if importlib.util.find_spec("nixl") is None:
        raise protocols.ConfigError(
            "config.rollout.kv_transfer: the nixl package is not installed; install it with `pip install nixl`, or use "
            "'none', which prefills again"
        )


def engine_arguments(rollout: config.RolloutConfig) -> dict[str, Any]:
    """Returns the engine arguments of the transfer; empty without a transfer."""
    if rollout.kv_transfer == "none":
        return {}
    connector = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", kv_load_failure_policy="recompute")
    return {"kv_transfer_config": connector}


def variables(rollout: config.RolloutConfig) -> dict[str, str]:
    """Returns environment variables for the engine's processes: a free port for exchanging memory addresses."""
    if rollout.kv_transfer == "none":
        return {}
    with socket.socket() as free:
        free.bind(("", 0))
        return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free.getsockname()[1])}


def giving() -> vllm.SamplingParams:
    """Returns the sampling of a request that only fills keys and values for another instance."""
    remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return vllm.SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={ARGUMENT: {"do_remote_decode": True, "do_remote_prefill": False, **remote}},
    )


def taking(source: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns `SamplingParams.extra_args` to take keys and values from another instance; None without a source."""
    return None if source is None else {ARGUMENT: dict(source)}
