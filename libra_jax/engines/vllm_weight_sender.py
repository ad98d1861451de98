"""Sends weights through vLLM's own trainer-side engines: the sending half of the ipc and nccl transports.

Written against vLLM 0.32. vLLM's trainer engines call the inference side themselves; here the coordinator makes these
calls. So the client given to them only records, and the recorded data travel in the chunk, for each instance: how to
join (`init_info`), and what a version holds (`update_info`).

nccl: rank 0 of the group is the trainer's process 0, and the workers of all instances follow. The trainer's other
processes are no ranks: they take part in the gathering. One group serves all instances of a sync, because a broadcast
costs the sender the same for any number of ranks, and one instance's group for each would send the weights once for
each. A group cannot change. If the instances of a sync are not those of the sync before, by name or by life, they and
the trainer meet in a new group. If an instance is lost in the middle of a sync, the sync misses its deadline.

vLLM's `nccl_m2n`, which sends shards to shards, is not used: it needs the nccl-extensions package, and a trainer whose
processes each hold one shard; one JAX process drives all GPUs of a host.

ipc: the engines' workers run on the GPU that holds the snapshot. Torch counts the readers of exported memory, so each
instance gets exports of its own.

NOT RUN on CUDA, on any machine. `tests/weights/test_nccl_transport.py` runs nccl's path between processes on CPU, with
gloo instead of NCCL's communicator and without CUDA streams: two trainer processes, two instances, vLLM's packed
broadcast on both ends. ipc's sending was not run.
"""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import pybase64
import torch
from vllm.distributed.weight_transfer import base, factory, ipc_engine, nccl_common, nccl_engine

from libra_jax import protocols

BUFFERS = 2
"""Number of packed broadcasts in flight."""

ABORT_SECONDS = 10.0
"""Seconds for a send to end after its group was aborted."""


class Tensors(Protocol):
    """What is sent (`weights.device_snapshot.TensorStream`)."""

    def metadata(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Returns name, wire dtype and shape of every tensor."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) in the order of `metadata`."""
        ...


class Source(base.WeightSource):
    """vLLM's view of the tensors."""

    def __init__(self) -> None:
        self.stream: Tensors | None = None
        self.kept: list[tuple[str, torch.Tensor]] = []
        self._passing: Any = None

    def metadata(self) -> list[base.ParamMeta]:
        assert self.stream is not None
        return [base.ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in self.stream.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.kept:
            return iter(self.kept)
        assert self.stream is not None
        self._passing = self.stream.tensors()
        return self._passing

    def finish(self) -> None:
        """Ends a pass that stopped halfway. The trainer's other processes wait for what it would still gather."""
        passing, self._passing = self._passing, None
        if passing is not None:
            passing.close()


@dataclass
class _Client:
    """Records the calls of vLLM's trainer engine to the inference side."""

    init_info: dict[str, Any] = field(default_factory=dict)
    update_info: dict[str, Any] = field(default_factory=dict)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.init_info = init_info

    def start_weight_update(self) -> None:
        """Does nothing: the coordinator has sent the verb."""

    def update_weights(self, update_info: Any) -> None:
        self.update_info = update_info

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Does nothing: the coordinator sends the verb."""


class Sender:
    """Sends one version at a time. `begin` returns the address for the engines; `end` waits for the last byte.

    Every process of the trainer has a sender, and all are called alike.

    Args:
      transport: "ipc" or "nccl".
      device: device of the tensors.
      rank: index of this process among the trainer's.
      seconds: maximum seconds for the instances to join, and to take the last byte.
      host: address of this host, at which the instances meet process 0.
      buffer_bytes: bytes of a packed broadcast. A larger tensor is a broadcast of its own.
    """

    def __init__(
        self, transport: str, device: torch.device, rank: int, seconds: float, host: str, buffer_bytes: int
    ) -> None:
        self._transport = transport
        self._device = device
        self._rank = rank
        self._seconds = seconds
        self._host = host
        self._buffer_bytes = buffer_bytes
        self._client = _Client()
        self._source = Source()
        self._engine: base.TrainerWeightTransferEngine | None = None
        self._members: tuple[protocols.WeightDestination, ...] = ()
        self._info: nccl_engine.NCCLTrainerInitInfo | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, stream: Tensors, destinations: Sequence[protocols.WeightDestination]) -> Mapping[str, Any]:
        """Starts to send to the destinations. Returns the chunk's address, which has a part for each of them.

        Args:
          stream: the tensors, which must stay as they are until `end`.
          destinations: the instances that will receive.
        """
        self.end()
        self._source.stream = stream
        if not destinations:
            return {"kind": self._transport, "instances": {}}
        if self._transport == "nccl":
            return {"kind": "nccl", "instances": self._begin_nccl(tuple(destinations))}
        # Kept, because each instance needs a pass of its own, and a pass over the stream gathers all tensors again.
        self._source.kept = [*stream.tensors()]
        if self._engine is None:
            info = ipc_engine.IPCTrainerInitInfo(rank=0, packed=False)
            self._engine = factory.WeightTransferTrainerFactory.trainer_init(
                info, client=self._client, source=self._source
            )
        found = {}
        for destination in destinations:
            # Exporting handles does not wait for the receiver; the snapshot keeps the memory.
            self._engine.send_weights()
            update = dict(self._client.update_info)
            # The handles hold Python types, which vLLM's messages carry only pickled.
            update["ipc_handles_pickled"] = pybase64.b64encode(pickle.dumps(update.pop("ipc_handles"))).decode()
            found[destination.name] = {"init_info": dict(self._client.init_info), "update_info": update}
        return {"kind": self._transport, "instances": found}

    def _begin_nccl(self, destinations: tuple[protocols.WeightDestination, ...]) -> Mapping[str, Any]:
        """Starts the broadcast on a thread. Returns what each instance needs: its first rank, and the tensors."""
        meet = destinations != self._members or self._info is None
        if meet:
            self._members = destinations
            port = 0
            if self._rank == 0:
                # Free at this moment only: vLLM opens it itself, when the send begins.
                with socket.socket() as probe:
                    probe.bind((self._host, 0))
                    port = int(probe.getsockname()[1])
            self._info = nccl_engine.NCCLTrainerInitInfo(
                master_address=self._host,
                master_port=port,
                world_size=1 + sum(destination.workers for destination in destinations),
                rank=self._rank,
                packed_buffer_size_bytes=self._buffer_bytes,
                packed_num_buffers=BUFFERS,
            )
        # Kept before the thread starts, because a send that fails at once forgets the group.
        info = self._info
        assert info is not None
        self._thread = threading.Thread(target=self._send, args=(meet,), name="send-weights-nccl", daemon=True)
        self._thread.start()
        meta = self._source.metadata()
        update = nccl_engine.NCCLWeightTransferUpdateInfo(
            names=[item.name for item in meta],
            dtype_names=[str(item.dtype).removeprefix("torch.") for item in meta],
            shapes=[list(item.shape) for item in meta],
        )
        found, rank = {}, 1
        for member in self._members:
            join = nccl_common.NCCLWeightTransferInitInfo(
                master_address=info.master_address,
                master_port=info.master_port,
                rank_offset=rank,
                world_size=info.world_size,
                packed=info.packed,
                packed_buffer_size_bytes=info.packed_buffer_size_bytes,
                packed_num_buffers=info.packed_num_buffers,
            )
            init = nccl_common.worker_init_payload(join)
            found[member.name] = {"init_info": init, "update_info": asdict(update)}
            rank += member.workers
        return found

    def _send(self, meet: bool) -> None:
        """Meets the instances if they are others than before, and sends. Runs on a thread of its own."""
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins with the first GPU
            if meet or self._engine is None:
                if self._engine is not None:
                    self._engine.shutdown()
                    self._engine = None
                assert self._info is not None
                # Both calls wait for the receiving workers, which join when the chunk arrives there.
                self._engine = factory.WeightTransferTrainerFactory.trainer_init(
                    self._info, client=self._client, source=self._source
                )
            self._engine.send_weights()
        except BaseException as error:  # `end` raises it in the caller's thread
            self._error = error
            self._info = None  # the group cannot be used again
        finally:
            self._source.finish()

    def end(self) -> None:
        """Waits until everything is sent, and frees the snapshot. Aborts a group whose instances miss the deadline."""
        if self._thread is not None:
            self._thread.join(self._seconds)
            if self._thread.is_alive():
                self._info = None
                if self._engine is not None:
                    self._engine.shutdown()
                    self._thread.join(ABORT_SECONDS)
                if not self._thread.is_alive():
                    self._thread, self._error = None, None
                raise protocols.DeadlineMissed(
                    f"a rollout engine did not join, or take the weights sent over {self._transport}, within "
                    f"{self._seconds:g} s: look at the engines' logs in the workdir, or raise "
                    "config.deadlines.weight_sync"
                )
            self._thread = None
        self._source.stream, self._source.kept = None, []
        if self._error is not None:
            error, self._error = self._error, None
            raise protocols.LibraError(f"sending weights over {self._transport} failed: {error}")

    def shutdown(self) -> None:
        """Closes vLLM's trainer engine. Does not wait for a send that no engine receives."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
