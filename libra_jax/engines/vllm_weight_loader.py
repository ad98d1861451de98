"""Weights through shared memory into vLLM: the worker's side, loaded inside each of the engine's worker processes.

Written against vLLM 0.32 (vllm/distributed/weight_transfer/base.py). Weights arrive in checkpoint format, so that a
layer is reloaded as a whole: on CPU its kernels have repacked what they loaded first.
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
    """Nothing to agree on: each chunk says where its bytes are."""


@dataclass
class MemfdUpdateInfo(base.WeightTransferUpdateInfo):
    """A `protocols.WeightChunk` as plain values; entries are (name, dtype, shape, offset, nbytes)."""

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
        """Nothing to open before the first chunk says where it is."""

    def start_weight_update(self) -> None:
        """Readies every layer to be loaded afresh."""
        reload.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads one chunk. Overrides the base, which synchronises an accelerator that a CPU does not have."""
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
        # A layer that is not complete yet keeps views of its tensors, at the latest until the update finishes; the
        # trainer keeps every chunk of the snapshot in place for as long.
        self.model.load_weights(_tensors(memory, update_info))

    def finish_weight_update(self) -> None:
        """Goes over to the new weights. That they are all there has been checked before (`vllm_weight_check`)."""
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Lets go of the trainer's memory."""
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
            # The mapping is read-only on purpose; nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(memory, dtype=kind, count=nbytes // kind.itemsize, offset=offset)
        yield name, flat.view(shape)
