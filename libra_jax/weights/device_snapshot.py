"""Syncs weights without host memory: a snapshot in torch's memory on the trainer's first GPU, sent by vLLM's engines.

NOT RUN YET, on any machine. The snapshot is a copy in torch's memory, because CUDA IPC exports only memory that torch
allocated.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import jax
import torch

from libra_jax import protocols
from libra_jax.models import config as models_config
from libra_jax.weights import snapshot

SENDER = "libra_jax.engines.vllm_weight_sender"
"""Module of the sender. It is named and not imported, because weights do not depend on an engine."""


class DeviceSnapshot:
    """`snapshot.Snapshot` over the ipc and nccl transports. One chunk holds the whole model."""

    def __init__(
        self,
        model_config: models_config.TransformerConfig,
        dtype: str,
        transport: str,
        workers: int,
        publish_seconds: float,
    ) -> None:
        self._sources = snapshot.wire_entries(model_config)
        self._dtype_name = dtype
        self._dtype = getattr(torch, dtype)
        self._sender = importlib.import_module(SENDER).Sender(transport, workers, publish_seconds)
        self._version: int | None = None
        self._chunk: protocols.WeightChunk | None = None

    def open(self, version: int, params: Mapping[str, Any]) -> int:
        """Takes the snapshot and starts to send it. See `snapshot.HostSnapshot.open`."""
        leaves = {source.path: snapshot.leaf(params, source) for source in self._sources}
        gathered: dict[tuple[str, ...], torch.Tensor] = {}
        for path, leaf in leaves.items():
            device = min(leaf.sharding.device_set, key=lambda item: item.id)
            gathered[path] = torch.from_dlpack(jax.device_put(leaf, device).block_until_ready())
        snapshot = []
        for source in self._sources:
            tensor = gathered[source.path] if source.layer is None else gathered[source.path][source.layer]
            snapshot.append((source.hf_name, tensor.to(self._dtype, copy=True)))
        # The copies must be complete before the gathered arrays go, and before the engine reads them.
        torch.cuda.synchronize()
        # The snapshot has its own copies.
        gathered.clear()
        entries, offset = [], 0
        for name, tensor in snapshot:
            entries.append(protocols.WeightEntry(name, self._dtype_name, tuple(tensor.shape), offset, tensor.nbytes))
            offset += tensor.nbytes
        address = self._sender.begin(snapshot)
        self._version = version
        self._chunk = protocols.WeightChunk(version, 0, 1, tuple(entries), offset, address)
        return 1

    def stage(self, version: int, index: int) -> protocols.WeightChunk:
        """Returns the only chunk."""
        if version != self._version or index != 0 or self._chunk is None:
            raise protocols.LibraError(f"chunk {index} of version {version} cannot be staged: {self._version} is open")
        return self._chunk

    def close(self, version: int) -> None:
        """Waits until the last byte is sent, and frees the snapshot."""
        if version == self._version:
            self._version, self._chunk = None, None
            self._sender.end()

    def shutdown(self) -> None:
        """Closes the transport. Idempotent."""
        self._version, self._chunk = None, None
        self._sender.shutdown()
