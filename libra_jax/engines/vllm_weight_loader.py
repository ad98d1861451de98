"""Loads weights from shared memory into vLLM: the worker's side, inside each of the engine's worker processes.

Written against vLLM 0.32 (vllm/distributed/weight_transfer/base.py). Weights arrive in checkpoint format. Each layer is
reloaded as a whole, because on CPU its kernels have repacked the weights that they loaded first.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import base
from vllm.model_executor.model_loader import reload

from libra_jax.weights import memfd


@dataclass
class MemfdInitInfo(base.WeightTransferInitInfo):
    """Empty: each chunk carries the address of its bytes."""


@dataclass
class MemfdUpdateInfo(base.WeightTransferUpdateInfo):
    """A `protocols.WeightChunk` as plain values. Entries are (name, dtype, shape, offset, nbytes)."""

    policy_version: int
    index: int
    count: int
    entries: list[tuple[str, str, list[int], int, int]]
    nbytes: int
    transport: dict[str, Any]
    checksum: str | None = None


class MemfdWeightTransferEngine(base.WeightTransferEngine[MemfdInitInfo, MemfdUpdateInfo]):
    """Loads chunks of a snapshot into this worker's shard of the model."""

    init_info_cls = MemfdInitInfo
    update_info_cls = MemfdUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._peers = memfd.PeerMemory()

    def init_transfer_engine(self, init_info: MemfdInitInfo) -> None:
        """Does nothing: the first chunk carries its address."""

    def start_weight_update(self) -> None:
        """Prepares every layer for new weights."""
        reload.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads one chunk. Overrides the base method, which synchronises an accelerator that a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: MemfdUpdateInfo) -> None:
        """Loads one chunk's tensors.

        Raises:
          SharedMemoryError: the trainer's memory cannot be reached.
          ValueError: the bytes differ from the checksum.
        """
        memory = self._peers.map(update_info.transport)
        if update_info.checksum is not None:
            _verify(memory, update_info)
        # An incomplete layer keeps views of its tensors, until the update finishes at the latest. The trainer keeps
        # every chunk of the snapshot in place until then.
        self.model.load_weights(_tensors(memory, update_info))

    def finish_weight_update(self) -> None:
        """Switches to the new weights. `vllm_weight_check` has checked that they are complete."""
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Releases the trainer's memory."""
        self._peers.close()


def _verify(memory: mmap.mmap, chunk: MemfdUpdateInfo) -> None:
    digest = memfd.digest(memoryview(memory)[: chunk.nbytes])
    if digest != chunk.checksum:
        raise ValueError(
            f"chunk {chunk.index} of version {chunk.policy_version} arrived damaged: checksum {digest} instead of "
            f"{chunk.checksum}"
        )


def _tensors(memory: mmap.mmap, chunk: MemfdUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype, shape, offset, nbytes in chunk.entries:
        kind = getattr(torch, dtype)
        with warnings.catch_warnings():
            # The mapping is read-only on purpose, and nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(memory, dtype=kind, count=nbytes // kind.itemsize, offset=offset)
        yield name, flat.view(shape)
