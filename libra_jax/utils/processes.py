"""Child processes that end with this process, in bounded time, and leave nothing behind.

A `Peer` runs a function of ours, and a `pool` runs calls in peers. `parent_death.command` starts a program that dies
with this process. `reap` waits for the end of a program that an event loop has started.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import connection, context
from typing import Any, TypeVar

import psutil

from libra_jax import protocols
from libra_jax.utils import deadlines, parent_death

T = TypeVar("T")

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
        # A terminal sends Ctrl-C to a whole session, and the peer belongs to ours until it leads its own. It inherits
        # that it ignores the signal. Only the main thread may set signal handlers.
        main = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        with warnings.catch_warnings():
            # A notebook's process may hold JAX. A forked peer neither uses JAX nor outlives a deadline of this process.
            warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called|This process .* is multi-threaded")
            try:
                self._process.start()
            finally:
                if main:
                    signal.signal(signal.SIGINT, handler)
        peer_pipe.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, message: object, seconds: float | None) -> Any:
        """Sends a message and returns the answer. Raises the errors of `receive`."""
        with contextlib.suppress(OSError):  # the peer is gone, which `receive` tells
            self.pipe.send(message)
        return self.receive(seconds)

    def receive(self, seconds: float | None) -> Any:
        """Returns the next message. None as `seconds` waits until the peer answers or ends.

        Raises:
          DeadlineMissed: No message began to come within `seconds`. The peer still runs.
          WorkerLost: The peer has ended.
        """
        try:
            if self.pipe.poll(seconds if seconds is None else max(0.0, seconds)):
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
        if self.pipe.closed:  # killed before, so its id may be another process's
            return
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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent_death.die_with_parent(parent)
    target(pipe, *arguments)


class _PeerExecutor(concurrent.futures.ThreadPoolExecutor):
    """Runs each call in a peer, for which one of its threads waits."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._idle: queue.SimpleQueue[Peer] = queue.SimpleQueue()
        self.peers: list[Peer] = []
        try:
            for _ in range(workers):
                self.peers.append(Peer(_answer_calls, name="a worker of the pool"))
                self._idle.put(self.peers[-1])
        except BaseException:  # one that did not start leaves no others
            for peer in self.peers:
                peer.kill()
            raise

    def submit(self, function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> concurrent.futures.Future[T]:
        def call() -> T:
            peer = self._idle.get()
            try:
                result, error = peer.ask((function, arguments, keywords), None)
            finally:
                self._idle.put(peer)
            if error is not None:
                raise error
            return result

        return super().submit(call)


def _answer_calls(pipe: connection.Connection) -> None:
    with contextlib.suppress(EOFError):  # the other process has ended
        while True:
            function, arguments, keywords = pipe.recv()
            answer: tuple[Any, Exception | None]
            try:
                answer = function(*arguments, **keywords), None
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = None, error
            try:
                pipe.send(answer)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                pipe.send((None, RuntimeError(f"{answer[1] or 'a result'!r} cannot be sent: {error}")))


@contextlib.contextmanager
def pool(workers: int) -> Iterator[concurrent.futures.Executor]:
    """Yields an executor of `workers` peers. An error or Ctrl-C in the block ends them at once, even during a call."""
    executor = _PeerExecutor(workers)
    try:
        yield executor
        executor.shutdown()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        # A thread that waits for a call sees the end of its peer.
        for peer in executor.peers:
            peer.kill()
        executor.shutdown()


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
