"""Child processes that end with this process, in bounded time, and leave nothing behind.

A `Peer` runs a function of ours. `parent_death.command` starts a program that dies with this process. `reap` waits for
the end of a program that an event loop has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from multiprocessing import connection, context
from typing import Any

import psutil

from libra_jax import protocols
from libra_jax.utils import deadlines, parent_death

END_SECONDS = 10.0
"""Seconds that a peer may take to end after it was asked to, or killed."""


class Peer:
    """A process that runs `target(pipe, *arguments)`, and the pipe to it. A context manager, which kills it in the end.

    The peer leads its own session: Ctrl-C is for this process only, and processes that the peer starts are killed with
    it. It also dies with this process.

    Args:
      target: Function of a module.
      arguments: Its further arguments.
      name: Subject of error sentences, such as "the reading process".
      fork: Forks this process instead of spawning a fresh one. The peer then has this process's objects and needs no
        import of the command's script. A fork must not use JAX.

    Attributes:
      pipe: Its reading end raises EOFError once the peer is gone.
    """

    def __init__(self, target: Callable[..., None], *arguments: object, name: str, fork: bool = False) -> None:
        methods: context.ForkContext | context.SpawnContext
        methods = multiprocessing.get_context("fork") if fork else multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, peer_pipe = methods.Pipe()
        self._process = methods.Process(target=_run, args=(os.getpid(), target, peer_pipe, arguments), name=name)
        with warnings.catch_warnings():
            # A notebook's process may hold JAX. A forked peer neither uses JAX nor outlives a deadline of this process.
            warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called|This process .* is multi-threaded")
            self._process.start()
        peer_pipe.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, message: object, seconds: float) -> Any:
        """Sends a message and returns the answer. Raises the errors of `receive`."""
        with contextlib.suppress(OSError):  # the peer is gone, which `receive` tells
            self.pipe.send(message)
        return self.receive(seconds)

    def receive(self, seconds: float) -> Any:
        """Returns the next message.

        Raises:
          DeadlineMissed: No message came within `seconds`. The peer still runs.
          WorkerLost: The peer has ended.
        """
        try:
            if self.pipe.poll(max(0.0, seconds)):
                return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise protocols.WorkerLost(f"{self.name} ended: {self.exit_status(END_SECONDS)}") from error
        raise protocols.DeadlineMissed(f"{self.name} did not answer within {seconds:.0f} s")

    def exit_status(self, seconds: float) -> str:
        """Waits for the peer's end for at most `seconds`. Returns how it ended, such as "exit status 3"."""
        self._process.join(seconds)
        code = self._process.exitcode
        return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"

    def end(self) -> None:
        """Sends None, which asks the peer to return, and kills it if it does not. Idempotent."""
        with contextlib.suppress(OSError):  # it is gone already
            self.pipe.send(None)
            self._process.join(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kills the peer and the processes that it started, and reaps them. Idempotent."""
        family: list[psutil.Process] = []
        assert self._process.pid is not None
        # A peer that died by itself was reaped, so its id may be another process's.
        if self._process.is_alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(self._process.pid).children(recursive=True)
        # SIGTERM would run the handler that the command has installed, which a fork inherits.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # it may not have made its group yet
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._process.join(END_SECONDS)
        psutil.wait_procs(family, END_SECONDS)
        self.pipe.close()


def _run(parent: int, target: Callable[..., None], pipe: connection.Connection, arguments: tuple[object, ...]) -> None:
    os.setsid()
    parent_death.die_with_parent(parent)
    target(pipe, *arguments)


async def reap(process: asyncio.subprocess.Process, seconds: float, subject: str, *, group: bool = False) -> None:
    """Waits until a program that was asked to end has ended. Kills it after half of `seconds`.

    Args:
      process: The program.
      seconds: Deadline in seconds.
      subject: Subject of the error's sentence.
      group: Kills the program's process group, which the program leads.

    Raises:
      DeadlineMissed: The program was killed and still runs.
    """
    try:
        await deadlines.cancel_after(seconds / 2, process.wait())
    except deadlines.Overdue:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
        try:
            await deadlines.cancel_after(seconds / 2, process.wait())
        except deadlines.Overdue:
            raise protocols.DeadlineMissed(
                f"{subject} {process.pid} was killed and is not gone after {seconds:g} s"
            ) from None
    # asyncio leaves the pipes of a dead process open until they are collected.
    transport: Any = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()
