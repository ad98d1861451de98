"""The gradient channel: carries gradient sums from a hybrid worker to the core trainer, over torch.distributed's gloo.

Between weight relays (`relay`), a channel carries the bytes of weights from the sender to the listening relay.

A channel is one gloo process group with a store of its own, for one worker and one membership generation. It does not
touch torch's global process group. Its ranks are the core's processes, in their order, and last the worker. A sum
travels as a header of fixed size, followed by its arrays as one run of bytes, cut into few large messages. The first
failure closes a channel for good, because gloo cannot use a connection again after a wait has timed out.

Gloo (torch 2.13) ends the *receiving process* if a message is larger than its receive, and does not notice a smaller
message. So a message's tag is its size: a message of another size matches no receive.

Thread-safety: one thread sends or receives. Connecting runs on the channel's own thread. Any thread may close the
channel.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import distributed

from libra_jax import protocols
from libra_jax.utils import machine

HEADER_BYTES = 64 * 2**10
"""Bytes of every header."""

PART_BYTES = 64 * 2**20
"""Maximum bytes of a message."""

LOOK_SECONDS = 0.02
"""Seconds between two looks whether all ranks have arrived."""

MEETING_SECONDS = 10.0
"""Seconds for ranks to connect after all have arrived. If it takes longer, one of them has died."""

ArrayKind = tuple[str, tuple[int, ...]]
"""Dtype of an array, by numpy's name, and its shape."""


class ChannelError(protocols.LibraError):
    """A closed gradient channel; the message says why."""


@dataclass(frozen=True)
class Header:
    """Describes a gradient sum, or the chunk of weights that follows.

    Attributes:
      worker: the hybrid worker that computed the sum, or the relay that receives the chunk.
      generation: membership generation in which the worker joined.
      version: policy version of its parameters.
      digest: digest of those parameters, as in the trainer's snapshot.
      first: first micro-batch of the sum, or number of the chunk.
      last: one after the last micro-batch, or one after the chunk's number.
      metrics: metric name to (sum, count) over those micro-batches.
      maxima: metric name to maximum over them.
    """

    worker: str
    generation: int
    version: int
    digest: str
    first: int
    last: int
    metrics: Mapping[str, tuple[float, float]]
    maxima: Mapping[str, float]


class SendCost(NamedTuple):
    """The cost of sending a sum.

    Attributes:
      nbytes: bytes sent to each process of the core.
      waited: seconds until all processes took the header. It measures their readiness, not the transfer.
    """

    nbytes: int
    waited: float


class ChannelListener:
    """The meeting point of one channel: a store on a free port, in the core's first process.

    Attributes:
      address: address to pass to the other ranks; plain values.
    """

    def __init__(self, worker: str, generation: int, ranks: int, host: str = "127.0.0.1") -> None:
        """Opens the port.

        Args:
          worker: the hybrid worker that will connect.
          generation: membership generation of the worker.
          ranks: number of ranks: the core's processes and the worker.
          host: address of this host at which to listen, as other ranks reach it.

        Raises:
          ChannelError: this host has no such address.
        """
        door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            door.bind((host, 0))
            door.listen()
            port = door.getsockname()[1]
            # With a port alone, the store would listen at every address of the host.
            self.store: Any = distributed.TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach()
            )
        except OSError as error:
            door.close()
            raise ChannelError(f"no gradient channel for {worker} can listen at {host} ({error.strerror}).") from error
        self.address = {
            "kind": "gloo",
            "host": host,
            "port": port,
            "worker": worker,
            "generation": generation,
            "ranks": ranks,
        }

    def close(self) -> None:
        """Closes the port. If a channel uses the store, the port closes with that channel. Idempotent."""
        self.store = None


class Channel:
    """One rank's end of a channel. It connects on its own thread; `wait` returns once it is connected.

    Attributes:
      generation: membership generation of the worker.
      closed: reason of the closing; empty while the channel connects or is open.
    """

    def __init__(
        self, address: Mapping[str, Any], rank: int, seconds: float, listener: ChannelListener | None = None
    ) -> None:
        """Starts to connect.

        Args:
          address: address of the listener.
          rank: rank of this process: the core's processes from 0, the worker last.
          seconds: deadline in seconds for all ranks to arrive.
          listener: the listener, in the process that listens. Its store then belongs to this channel.
        """
        self.worker, self.generation = str(address["worker"]), int(address["generation"])
        self._ranks = int(address["ranks"])
        self.closed = ""
        self._store = listener.store if listener is not None else None
        self._group: Any = None
        self._buffer = np.zeros(0, np.uint8)
        self._lock = threading.Lock()
        # The channel holds the store from now on, so the port closes with the channel.
        if listener is not None:
            listener.close()
        self._thread = threading.Thread(
            target=self._connect, args=(address, rank, seconds), name=f"connect to {self.worker}", daemon=True
        )
        self._thread.start()

    @property
    def ready(self) -> bool:
        """True while the channel is connected and open."""
        return self._group is not None

    def wait(self, seconds: float) -> None:
        """Waits until the channel is connected.

        Raises:
          ChannelError: the channel is closed, or does not connect in time and is closed therefore.
        """
        self._thread.join(max(seconds, 0.0))
        if not self.ready:
            raise self._fail("not everybody came to it in time")

    def send(self, header: Header, arrays: Sequence[np.ndarray], seconds: float) -> SendCost:
        """Sends arrays to every process of the core.

        A message leaves only when the other side waits for it. So this method returns after the core has taken them.

        Args:
          header: description of the arrays.
          arrays: arrays of any kind. A single vector of bytes is sent without a copy.
          seconds: deadline in seconds for the whole transfer.

        Raises:
          ChannelError: the channel is closed, here or by the other side, or the deadline passed.
          ValueError: the header does not fit.
        """
        deadline = time.monotonic() + seconds
        self.wait(seconds)
        if len(arrays) == 1 and arrays[0].dtype == np.uint8 and arrays[0].ndim == 1:
            # A chunk of weights already is one run of bytes.
            flat = arrays[0]
        else:
            flat, at = self._room(sum(array.nbytes for array in arrays)), 0
            for array in arrays:
                flat[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                at += array.nbytes
        head = _encode(header, [(str(array.dtype), array.shape) for array in arrays])
        start = time.monotonic()
        self._pass("send", head, deadline)
        waited = time.monotonic() - start
        for at in range(0, len(flat), PART_BYTES):
            self._pass("send", flat[at : at + PART_BYTES], deadline)
        return SendCost(len(head) + len(flat), waited)

    def receive(
        self, expected: Sequence[ArrayKind], seconds: float, into: np.ndarray | None = None
    ) -> tuple[Header, list[np.ndarray]]:
        """Receives the arrays of the next `send` of the hybrid worker.

        Args:
          expected: kinds of the arrays. The sender's sizes are compared with these, never trusted.
          seconds: deadline in seconds for the whole transfer.
          into: vector of bytes to receive into, as large as the arrays; None for this channel's memory.

        Returns:
          The header, and the arrays: views of `into`, or of this channel's memory, valid until the next call.

        Raises:
          ChannelError: the channel is closed, here or by the other side, the deadline passed, or the sum has other
            arrays.
        """
        deadline = time.monotonic() + seconds
        self.wait(seconds)
        head = np.zeros(HEADER_BYTES, np.uint8)
        self._pass("recv", head, deadline)
        try:
            record = json.loads(head.tobytes())
            header = Header(
                worker=str(record["worker"]),
                generation=int(record["generation"]),
                version=int(record["version"]),
                digest=str(record["digest"]),
                first=int(record["first"]),
                last=int(record["last"]),
                metrics={str(name): (float(total), float(count)) for name, (total, count) in record["metrics"].items()},
                maxima={str(name): float(value) for name, value in record["maxima"].items()},
            )
            kinds = [(str(dtype), tuple(int(size) for size in shape)) for dtype, shape in record["arrays"]]
        # Garbage may be anything that JSON can say.
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            raise self._fail("what came over it is no header of a gradient sum") from None
        # Sizes from the network never decide how much is read or allocated.
        if kinds != [(dtype, tuple(shape)) for dtype, shape in expected]:
            raise self._fail("the sum offered over it has other arrays than this model's")
        sizes = [np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in expected]
        flat = self._room(sum(sizes)) if into is None else into
        for at in range(0, len(flat), PART_BYTES):
            self._pass("recv", flat[at : at + PART_BYTES], deadline)
        ends = np.cumsum(sizes)
        return header, [
            flat[end - size : end].view(dtype).reshape(shape)
            for end, size, (dtype, shape) in zip(ends, sizes, expected, strict=True)
        ]

    def close(self, why: str = "it was aborted here") -> None:
        """Closes the connection. The connecting thread ends by itself. Idempotent: the first reason stays."""
        with self._lock:
            self.closed = (
                self.closed or f"the gradient channel of {self.worker} (generation {self.generation}) is closed: {why}."
            )
            self._group = self._store = None
        self._buffer = np.zeros(0, np.uint8)

    def _connect(self, address: Mapping[str, Any], rank: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        try:
            store = self._store
            if store is None:
                store = distributed.TCPStore(
                    address["host"],
                    address["port"],
                    is_master=False,
                    timeout=datetime.timedelta(seconds=seconds),
                    wait_for_workers=False,
                )
            # Gloo's own rendezvous cannot be cancelled, so it begins only once all ranks have arrived.
            store.set(f"rank {rank}", "here")
            everybody = [f"rank {other}" for other in range(self._ranks)]
            while not store.check(everybody):
                if self.closed:
                    return
                if time.monotonic() > deadline:
                    self.close(f"not everybody came to it within {seconds:g} s")
                    return
                time.sleep(LOOK_SECONDS)
            # Private names of torch: its public functions make groups in the global registry only.
            options = distributed.ProcessGroupGloo._Options()
            local_address = machine.address(address["host"])
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=local_address)]
            options._timeout = datetime.timedelta(seconds=MEETING_SECONDS)
            group = distributed.ProcessGroupGloo(store, rank, self._ranks, options)
        except (RuntimeError, OSError) as error:  # torch.distributed's errors are RuntimeErrors
            self.close(f"it could not be connected ({_line(error)})")
            return
        with self._lock:
            # Closed while it connected: the group goes unused, and its connections with it.
            if not self.closed:
                self._store, self._group = store, group

    def _room(self, nbytes: int) -> np.ndarray:
        """Returns memory that is kept from sum to sum, which saves page faults."""
        buffer = self._buffer
        if buffer.nbytes != nbytes:
            buffer = self._buffer = np.empty(nbytes, np.uint8)
        return buffer  # not the attribute, which another thread empties if it closes the channel meanwhile

    def _pass(self, verb: Literal["send", "recv"], message: np.ndarray, deadline: float) -> None:
        """Sends a message to every process of the core, or receives one from the hybrid worker."""
        group = self._group  # read once: another thread may close the channel meanwhile
        if group is None:
            raise ChannelError(self.closed)
        tensor = torch.from_numpy(message)
        ranks = range(self._ranks - 1) if verb == "send" else [self._ranks - 1]
        try:
            # Each message's tag is its size (see above): gloo would end a process that received a larger one.
            works = [getattr(group, verb)([tensor], rank, tensor.nbytes) for rank in ranks]
            for work in works:
                # One millisecond more: gloo takes a timeout of zero as no timeout, and cuts fractions of it off.
                seconds = max(deadline - time.monotonic(), 0.0) + 0.001
                work.wait(datetime.timedelta(seconds=seconds))
        except RuntimeError as error:
            late = time.monotonic() >= deadline
            raise self._fail(
                "the other side took too long" if late else f"the connection broke ({_line(error)})"
            ) from error

    def _fail(self, why: str) -> ChannelError:
        self.close(why)
        return ChannelError(self.closed)


def _encode(header: Header, kinds: Sequence[ArrayKind]) -> np.ndarray:
    text = json.dumps({**dataclasses.asdict(header), "arrays": kinds}).encode()
    if len(text) > HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes, of which {HEADER_BYTES} fit")
    # Padded with blanks, which JSON ignores.
    return np.frombuffer(text.ljust(HEADER_BYTES), np.uint8).copy()


def _line(error: BaseException) -> str:
    """Returns the first line of an error's text, without gloo's source position, cut to a readable length."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text.rpartition("] ")[2].partition(". ")[0][:200]
