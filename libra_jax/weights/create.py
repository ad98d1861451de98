"""Makes the snapshot of a transport."""

from __future__ import annotations

import jax
import torch

from libra_jax import protocols
from libra_jax.models import config as models_config
from libra_jax.weights import adapter_snapshot, device_snapshot, snapshot

Snapshot = snapshot.HostSnapshot | adapter_snapshot.AdapterSnapshot | device_snapshot.DeviceSnapshot
"""One version's parameters for others to read, over any transport."""


def create(
    model_config: models_config.TransformerConfig,
    dtype: str,
    chunk_bytes: int,
    transport: str,
    checksum: bool,
    sync_seconds: float,
    host: str,
    *,
    adapter: bool = False,
) -> Snapshot:
    """Makes a snapshot through host memory (memfd), or one that is sent between devices (ipc, nccl).

    Args:
      dtype: wire dtype.
      chunk_bytes: maximum bytes of a chunk (memfd).
      transport: "memfd", "ipc" or "nccl".
      checksum: True to compute each chunk's checksum (memfd).
      sync_seconds: maximum seconds to wait for the instances to receive (ipc, nccl).
      host: address of this host, at which instances meet the trainer (nccl).
      adapter: True to send the model's adapter, and the frozen weights under it once (memfd); False to send all
        weights each time.

    Raises:
      ConfigError: the transport needs CUDA, or serves fewer trainer processes than the run has.
    """
    if adapter:
        return adapter_snapshot.AdapterSnapshot(model_config, dtype, chunk_bytes, checksum)
    if transport == "memfd":
        return snapshot.HostSnapshot(model_config, dtype, chunk_bytes, checksum)
    if transport == "ipc" and jax.process_count() > 1:
        raise protocols.ConfigError(
            "config.rollout.transport: 'ipc' hands memory of one process to engines on its GPU, and the trainer has "
            f"{jax.process_count()} processes (config.trainer.processes); use 'nccl' or 'memfd'"
        )
    if not torch.cuda.is_available():
        raise protocols.ConfigError(
            f"config.rollout.transport: {transport!r} needs CUDA, which torch does not find here; use 'memfd'"
        )
    return device_snapshot.DeviceSnapshot(model_config, dtype, transport, sync_seconds, host)
