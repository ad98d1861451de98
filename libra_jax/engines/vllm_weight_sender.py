"""Sends weights over CUDA through vLLM's own trainer-side engines: the sending half of the ipc and nccl transports.

Written against vLLM 0.32's source; NOT RUN YET, on any machine. ipc serves a trainer and an engine on the same GPU,
nccl an engine on other GPUs. Both serve one rollout instance. vLLM's trainer engines call the inference side
themselves; here the coordinator makes these calls. So the client given to them only records, and the recorded data
travel in the chunk: `init_info` once, `update_info` for each version.
"""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pybase64
import torch
from vllm.distributed.weight_transfer import base, factory, ipc_engine, nccl_engine

from libra_jax import protocols

Snapshot = Sequence[tuple[str, torch.Tensor]]


class SnapshotSource(base.WeightSource):
    """vLLM's view of the open snapshot: named CUDA tensors in checkpoint order."""

    def __init__(self) -> None:
        self.snapshot: Snapshot = ()

    def metadata(self) -> list[base.ParamMeta]:
        """Returns name, wire dtype and shape of every tensor."""
        return [base.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.snapshot]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.snapshot)


class _Client:
    """Records the calls of vLLM's trainer engine to the inference side."""

    def __init__(self) -> None:
        self.init_info: dict[str, Any] = {}
        self.update_info: dict[str, Any] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.init_info = init_info

    def start_weight_update(self) -> None:
        """Does nothing: the coordinator has sent the verb."""

    def update_weights(self, update_info: Any) -> None:
        self.update_info = update_info

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Does nothing: the coordinator sends the verb."""


class Sender:
    """Sends one snapshot at a time. `begin` returns the address for the engine; `end` waits for the last byte.

    Args:
      transport: "ipc" or "nccl".
      workers: number of worker processes of the receiving engine (its tensor-parallel degree).
      seconds: maximum seconds for the engine to join, and to take the last byte.
    """

    def __init__(self, transport: str, workers: int, seconds: float) -> None:
        if not torch.cuda.is_available():
            raise protocols.ConfigError(
                f"config.rollout.transport: {transport!r} needs CUDA, which torch does not find here; use 'memfd'"
            )
        self._transport = transport
        self._workers = workers
        self._seconds = seconds
        self._client = _Client()
        self._source = SnapshotSource()
        self._engine: base.TrainerWeightTransferEngine | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, snapshot: Snapshot) -> Mapping[str, Any]:
        """Starts sending.

        Args:
          snapshot: tensors in memory that torch allocated on the sending GPU; kept until `end`.

        Returns:
          The chunk's transport address.
        """
        self.end()
        self._source.snapshot = snapshot
        if self._transport == "nccl":
            return self._begin_nccl()
        info = ipc_engine.IPCTrainerInitInfo(rank=0, packed=False)
        if self._engine is None:
            self._engine = factory.WeightTransferTrainerFactory.trainer_init(
                info, client=self._client, source=self._source
            )
        # Exporting handles does not wait for the receiver; the snapshot keeps the memory.
        self._engine.send_weights()
        update = dict(self._client.update_info)
        # The handles hold Python types, which vLLM's messages carry only pickled.
        update["ipc_handles_pickled"] = pybase64.b64encode(pickle.dumps(update.pop("ipc_handles"))).decode()
        return {"kind": "ipc", "init_info": dict(self._client.init_info), "update_info": update}

    def _begin_nccl(self) -> Mapping[str, Any]:
        meta = self._source.metadata()
        update = {
            "names": [item.name for item in meta],
            "dtype_names": [str(item.dtype).removeprefix("torch.") for item in meta],
            "shapes": [list(item.shape) for item in meta],
        }
        if self._engine is None:
            # Free at this moment; vLLM opens the port itself, later.
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            self._info = nccl_engine.NCCLTrainerInitInfo(
                master_address=socket.gethostbyname(socket.gethostname()),
                master_port=port,
                world_size=1 + self._workers,
                rank=0,
            )
        init = {
            "master_address": self._info.master_address,
            "master_port": self._info.master_port,
            "world_size": self._info.world_size,
            "rank_offset": 1,
            "packed": self._info.packed,
            "packed_buffer_size_bytes": self._info.packed_buffer_size_bytes,
            "packed_num_buffers": self._info.packed_num_buffers,
        }

        def send() -> None:
            try:
                # Both calls wait for the receiving workers, which join when the chunk arrives there.
                if self._engine is None:
                    self._engine = factory.WeightTransferTrainerFactory.trainer_init(
                        self._info, client=self._client, source=self._source
                    )
                self._engine.send_weights()
            except BaseException as error:  # `end` raises it in the caller's thread
                self._error = error

        self._thread = threading.Thread(target=send, name="send-weights-nccl", daemon=True)
        self._thread.start()
        return {"kind": "nccl", "init_info": init, "update_info": update}

    def end(self) -> None:
        """Waits until everything is sent, and frees the snapshot.

        Raises:
          DeadlineMissed: the engine did not take it in time. The snapshot is kept, because the send is still running.
          LibraError: sending failed.
        """
        if self._thread is not None:
            self._thread.join(self._seconds)
            if self._thread.is_alive():
                raise protocols.DeadlineMissed(
                    f"the rollout engine did not join, or take the weights sent over {self._transport}, within "
                    f"{self._seconds:g} s: look at its log in the workdir, or raise config.deadlines.weight_sync"
                )
            self._thread = None
        self._source.snapshot = ()
        if self._error is not None:
            error, self._error = self._error, None
            raise protocols.LibraError(f"sending weights over {self._transport} failed: {error}")

    def shutdown(self) -> None:
        """Closes vLLM's trainer engine. Does not wait for a send that no engine receives."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
