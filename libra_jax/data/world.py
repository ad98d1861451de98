"""One JAX distributed world for the processes of a trainer.

Each process is given the address of process 0, its own id and the process count. JAX's cluster detection is off: in one
Slurm allocation, two worlds would find the same port. Process 0 keeps its free port bound until JAX listens on it, so
that no other process takes the port. SO_REUSEPORT lets JAX share the port.

A world notices a killed process in three ways. A process that shares a collective with the dead process gets an error
at once (`peer_lost`). If process 0 dies, its coordination service dies too, and JAX aborts the other processes at once.
If another process dies, the service misses its heartbeats, and JAX aborts the rest after `HEARTBEAT_SECONDS`. JAX also
aborts a process that waits in vain for the others to join. A world never continues with fewer processes: the world
ends, and a new world starts.

Thread-safety: none; one thread makes, joins and leaves a world.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.utils import machine

HEARTBEAT_SECONDS = 30
"""Seconds of silence before a process counts as dead. Heartbeats have their own thread, so compilation does not delay
them."""

LEAVE_SECONDS = 5
"""Seconds that a leaving process waits for the others to leave with it."""

_SENTENCE_BYTES = 1024
"""Bytes of an error that processes tell each other."""

_ERRORS = (protocols.DataError, protocols.ConfigError, protocols.LibraError)
"""Types of these errors, each before its base."""

_SIGNS = ("gloo", "nccl", "coordination service", "connection", "socket closed", "heartbeat", "unavailable")
"""Words in the error of a collective when a peer is gone."""


@dataclass(eq=False)
class World:
    """This process's place among the trainer's processes.

    Attributes:
      process: id of this process, from 0.
      processes: number of processes. A world of one process needs no joining.
      host: address of this host, as the other processes reach it.
    """

    process: int
    processes: int
    host: str = machine.LOOPBACK
    _port: socket.socket | None = field(default=None, init=False)
    _joined: bool = field(default=False, init=False)

    def reserve(self) -> str:
        """Finds a free port on this host for process 0. Returns "host:port", which every process passes to `join`."""
        self._release()
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as JAX's server does: both may be bound
        self._port.bind((self.host, 0))
        return f"{self.host}:{self._port.getsockname()[1]}"

    def join(self, address: str, seconds: float) -> None:
        """Joins the world; returns when all processes have joined. Call before JAX is first asked for its devices.

        Args:
          address: the result of process 0's `reserve`.
          seconds: seconds to wait for the others. JAX aborts this process if they do not join.

        Raises:
          LibraError: JAX has begun to use its devices, or has joined a world before.
        """
        if self.processes == 1:
            return
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from this process
        try:
            jax.distributed.initialize(
                address,
                self.processes,
                self.process,
                cluster_detection_method="deactivate",
                initialization_timeout=max(1, int(seconds)),
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=LEAVE_SECONDS,
                # By default, JAX's coordinator would listen on all addresses of the host.
                coordinator_bind_address=address,
            )
        except RuntimeError as error:
            raise protocols.LibraError(
                f"process {self.process} of the trainer cannot join the others at {address} ({error}); every process "
                "of a trainer needs an actor of its own (cluster.backend=ray)."
            ) from error
        finally:
            self._release()
        self._joined = True

    def check(self, trainer: config_lib.TrainerConfig) -> None:
        """Raises ConfigError if this process does not see its share of the mesh's devices, LibraError before `join`."""
        if self.processes == 1:
            return
        if not self._joined:
            raise protocols.LibraError(f"process {self.process} of the trainer has not joined the others: call join.")
        here, expected = jax.local_device_count(), trainer.devices // trainer.processes
        if here != expected:
            raise protocols.ConfigError(
                f"config.trainer.processes: each of {trainer.processes} processes has to see {expected} of the mesh's "
                f"{trainer.devices} devices, and process {self.process} sees {here}"
            )

    def leave(self) -> None:
        """Leaves the world together with the others, or alone if they do not come. Idempotent.

        A process that leaves alone does not notify the others, so that they finish their work (the rest of a save).
        """
        self._release()
        if not self._joined:
            return
        self._joined = False
        with contextlib.suppress(RuntimeError):  # they do not come: the process ends without a word
            distributed.global_state.client.wait_at_barrier("libra leaves", LEAVE_SECONDS * 1000)
            jax.distributed.shutdown()

    def _release(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None


def peer_lost(error: BaseException) -> protocols.PeerLost | None:
    """Returns the error to raise if the error of a program or barrier means that a process of this world is gone."""
    text = str(error).strip()
    # JAX raises one type for all failures of a program, so only the text identifies a lost peer.
    if jax.process_count() == 1 or not any(sign in text.lower() for sign in _SIGNS):
        return None
    return protocols.PeerLost(
        f"a process of the trainer is lost: process {jax.process_index()} can no longer reach it "
        f"({text.splitlines()[0][:200]}); restart the trainer to go on"
    )


@contextlib.contextmanager
def agreeing() -> Iterator[None]:
    """Raises in every process what the block raises in one, so that no process waits for the others in a program.

    All processes run such a block at the same time. The first process with an error is heard.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as exception:
        error = exception
    if jax.process_count() > 1:
        message = np.zeros(_SENTENCE_BYTES, np.uint8)
        if error is not None:
            # Of an error that is no LibraError, the others hear what it was.
            shared_error = error if isinstance(error, protocols.LibraError) else protocols.LibraError(repr(error))
            kind = next(number for number, kind in enumerate(_ERRORS) if isinstance(shared_error, kind))
            text = np.frombuffer(str(shared_error).encode()[: _SENTENCE_BYTES - 1], np.uint8)
            message[0], message[1 : 1 + len(text)] = 1 + kind, text
        with explaining():
            everywhere = np.asarray(multihost_utils.process_allgather(message))
        for kind, *text in everywhere:
            if kind and error is None:
                error = _ERRORS[kind - 1](bytes(text).rstrip(b"\0").decode(errors="replace"))
    if error is not None:
        raise error


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Raises LibraError, or PeerLost, with one sentence instead of an error of the devices."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (lost := peer_lost(error)) is not None:
            raise lost from error
        text = str(error).strip().splitlines()[0][:300]
        if "RESOURCE_EXHAUSTED" in text:
            raise protocols.LibraError(
                "the trainer's devices ran out of memory; lower trainer.rows_per_micro_batch or model.logits_chunk, "
                "set model.remat, or raise trainer.fsdp or, for long rows, trainer.context "
                f"({text})."
            ) from error
        raise protocols.LibraError(f"a training program failed on the devices ({text}).") from error
