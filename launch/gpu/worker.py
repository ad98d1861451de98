"""The process in which cases run, and the process that waits for it.

JAX and torch live in the worker alone. A case that hangs, dies or leaves a broken device is ended with it, and the next
case gets a new worker. All processes of the script are descendants of one.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import psutil

from libra_jax import protocols
from libra_jax.utils import parent_death

END_SECONDS = 10.0
"""Seconds for a process to end after it was asked to, or killed."""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Call:
    """A function, as "module:function", and its arguments."""

    target: str
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class Reply:
    """What a call returned, or the sentence of the error that it raised.

    Attributes:
      value: what it returned.
      error: empty if it returned.
      kind: name of the error's type.
    """

    value: object = None
    error: str = ""
    kind: str = ""


class Worker:
    """A process that runs one call after the other.

    Args:
      environment: environment variables, set before anything is imported there.
      path: folders to import from, beside those of this process.
    """

    def __init__(self, environment: Mapping[str, str], path: Sequence[str] = ()) -> None:
        # Spawned, because a fork of a process with threads may deadlock, and JAX must start with its own environment.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, os.getpid(), dict(environment), list(path)), name="gpu_check-worker"
        )
        self._process.start()
        theirs.close()  # its own end of the pipe tells when the worker is gone

    def call(self, target: str, arguments: tuple[object, ...], seconds: float) -> Reply:
        """Runs a function there.

        Raises:
          DeadlineMissed: it did not return in time. The worker has to be ended.
          WorkerLost: the worker ended.
        """
        try:
            self._pipe.send(Call(target, arguments))
            if not self._pipe.poll(max(0.0, seconds)):
                raise protocols.DeadlineMissed(f"it did not end within {seconds:.0f} s")
            reply = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(END_SECONDS)
            code = self._process.exitcode
            how = f"exit status {code}"
            if code is not None and code < 0:
                how = f"killed by {signal.Signals(-code).name}"
            raise protocols.WorkerLost(f"its process ended: {how}") from error
        assert isinstance(reply, Reply)
        return reply

    def end(self) -> None:
        """Lets the worker return, and ends it if it does not. Idempotent."""
        with contextlib.suppress(OSError):  # it is gone already
            self._pipe.send(None)
            self._process.join(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kills the worker and all of its children, and reaps them. Idempotent."""
        family: list[psutil.Process] = []
        # A worker that died by itself was reaped: its id may be another process's, and its children die with it.
        if self._process.is_alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._process.join(END_SECONDS)
        psutil.wait_procs(family, END_SECONDS)
        self._pipe.close()


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent dies, so that it can reap them (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _serve(pipe: connection.Connection, parent: int, environment: Mapping[str, str], path: Sequence[str]) -> None:
    parent_death.die_with_parent(parent)
    # Ctrl-C reaches the whole group; the parent answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment)
    sys.path.extend(folder for folder in path if folder not in sys.path)
    while (call := pipe.recv()) is not None:
        try:
            module, _, name = call.target.partition(":")
            function: Any = getattr(importlib.import_module(module), name)
            reply = Reply(function(*call.arguments))
        except Exception as error:
            if os.environ.get("LIBRA_JAX_TRACEBACK"):
                traceback.print_exc()
            kind, said = type(error).__name__, " ".join(str(error).split())[:400]
            reply = Reply(error=said if isinstance(error, protocols.LibraError) else f"{kind}: {said}", kind=kind)
        pipe.send(reply)
