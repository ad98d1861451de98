"""Gloo instead of NCCL under vLLM's weight transfer, for machines without CUDA.

Replaced are NCCL's communicator, on both ends, and CUDA's streams. The rest is vLLM's: the meeting over its store,
ranks, packing, the order and size of broadcasts, and unpacking.
"""

import contextlib
import datetime

import torch
from torch import distributed
from vllm.distributed import utils
from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

SECONDS = 120


class Group:
    """What vLLM's engines use of `PyNcclCommunicator`."""

    def __init__(self, host: str, port: int, rank: int, size: int) -> None:
        meeting = utils.StatelessProcessGroup.create(host, port, rank, size, store_timeout=SECONDS)
        store = distributed.PrefixStore("gloo", meeting.store)
        self._meeting = meeting  # rank 0 serves the store
        self._group = distributed.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=SECONDS))
        self.broadcasts: list[int] = []

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()
        self.broadcasts.append(tensor.nbytes)

    def destroy(self) -> None:
        self._group = self._meeting = None


class Stream:
    def synchronize(self) -> None:
        """Everything is synchronous."""


def install() -> None:
    """Replaces them for the rest of this process."""
    nccl_engine.open_trainer_endpoint = lambda info: Group(info.master_address, info.master_port, 0, info.world_size)
    nccl_engine.worker_init_process_group = lambda info, parallel: Group(
        info.master_address, info.master_port, info.rank_offset + parallel.rank, info.world_size
    )
    packed_tensor._get_streams = lambda device, count: (Stream(),) * count
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.accelerator.current_device_index = lambda: 0
