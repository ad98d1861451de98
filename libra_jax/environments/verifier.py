"""Compares answers with `math-verify`, in processes that an answer can hang or kill without harm.

An answer has a limit of processor seconds. Past it, its process is killed and replaced, and the answer counts as not
verifiable. If the wall-clock deadline comes first, this holds only if the answer got half of its limit. A process that
got less, or that ended otherwise, is an infrastructure failure and raises.

A `pebble.ProcessPool` is not used. Its processes import the user's script again, which fails for a script without
`if __name__ == "__main__"`. A dying idle process breaks that pool, and it made fewer calls per second.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from libra_jax import protocols
from libra_jax.utils import deadlines, processes

START_SECONDS = 60.0
"""Seconds that a process may take to import `math-verify`."""

WALL_SECONDS = 60.0
"""Largest wall-clock seconds of a comparison, for a machine that also does other work."""

_ENOUGH = 0.5
"""Share of an answer's processor limit (or of the wall-clock deadline, if shorter) that blames the answer.

An answer that used less when the deadline came was held up by a busy machine, which is not the answer's fault.
"""

_REAP_SECONDS = 10.0
_WORKER = "libra_jax.environments.verifier_worker"
_NEEDED = ("math_verify", "latex2sympy2_extended", "antlr4")


@dataclass(frozen=True)
class Finding:
    """The result of a comparison.

    Attributes:
      right: Whether the answer is one of the accepted ones.
      read: Whether the answer contained an expression.
      overran: Whether the comparison took too much processor time, so that its result is unknown.
    """

    right: bool
    read: bool = False
    overran: bool = False


@functools.cache
def check_installed() -> None:
    """Raises ConfigError if `math-verify` or a package that it needs is missing."""
    for module in _NEEDED:
        if importlib.util.find_spec(module) is None:
            raise protocols.ConfigError(
                f"config.task.environment: checking answers needs the package math-verify (there is no {module}); "
                "install it with pip install 'math-verify[antlr4_13_2]'"
            )


class Verifier:
    """Processes that compare answers. Belongs to one event loop.

    Args:
      processes: Number of processes that compare at the same time.
      seconds: Processor seconds that one answer may take.
      wall_seconds: Wall-clock seconds that one answer may take.
    """

    def __init__(self, processes: int = 2, seconds: float = 4.0, wall_seconds: float = WALL_SECONDS) -> None:
        self._seconds, self._wall_seconds = seconds, wall_seconds
        self._processes, self._places = processes, asyncio.Semaphore(processes)
        self._idle: list[_Process] = []
        self._live: set[_Process] = set()
        self._closed = False

    async def open(self) -> None:
        """Starts the processes."""
        self._idle += await asyncio.gather(*(self._start() for _ in range(self._processes)))

    async def check(self, answer: str, accepted: Sequence[str]) -> Finding:
        """Compares an answer with the accepted ones (see `verifier_worker.find`).

        Raises:
          EnvironmentCrashed: The comparison failed, and the answer is not the cause.
        """
        if self._closed:
            raise protocols.EnvironmentCrashed("the verifier of answers was closed")
        async with self._places:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                finding = await process.ask(answer, accepted, self._seconds, self._wall_seconds)
            finally:
                # An unusable process is replaced when the next comparison needs one.
                if process.alive and not self._closed:
                    self._idle.append(process)
                else:
                    process.kill()
        return finding

    async def close(self) -> None:
        """Ends every process and waits for their end. Idempotent."""
        self._closed = True
        self._idle.clear()
        # All are killed before the first is waited for, so that a close takes the time of one.
        for process in self._live:
            process.kill()
        await asyncio.gather(*(process.wait_for_end() for process in self._live))
        self._live.clear()

    async def _start(self) -> _Process:
        # Ended processes are dropped here, or a long run would keep one for each replacement.
        self._live = {process for process in self._live if process.process.returncode is None}
        # -P keeps the current folder off sys.path. If it is the worker's, its `math.py` would hide the standard module.
        process = _Process(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", _WORKER, str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)},
                start_new_session=True,  # Ctrl-C should reach the run only
            )
        )
        self._live.add(process)
        try:
            message = await process.read_message(START_SECONDS)
            if message is None:
                raise protocols.EnvironmentCrashed("the verifier of answers ended as it was started")
            if "problem" in message:
                raise protocols.ConfigError(
                    f"config.task.environment: math-verify cannot be used: {message['problem']}; install it with pip "
                    "install 'math-verify[antlr4_13_2]'"
                )
        except deadlines.Overdue:
            process.kill()
            raise protocols.EnvironmentCrashed(
                f"the verifier of answers took more than {START_SECONDS:g} s to start"
            ) from None
        except BaseException:
            process.kill()
            raise
        return process


@dataclass(eq=False)  # a set holds the processes, each for itself
class _Process:
    """One process. `alive` is True until it is killed, overruns or breaks. After that it cannot be used."""

    process: asyncio.subprocess.Process
    alive: bool = True

    async def ask(self, answer: str, accepted: Sequence[str], seconds: float, wall_seconds: float) -> Finding:
        """Asks for one comparison; see `Verifier.check`.

        If cancelled, kills the process: its late answer would mix with others.
        """
        assert self.process.stdin is not None
        request = json.dumps({"given": answer, "accepted": list(accepted), "seconds": seconds})
        spent = self._spent()
        try:
            with contextlib.suppress(ConnectionError):  # the process has ended, which reading will show
                self.process.stdin.write(request.encode() + b"\n")
                await self.process.stdin.drain()
            message = await self.read_message(wall_seconds)
        except deadlines.Overdue:
            answer_at_fault = self._spent() - spent >= _ENOUGH * min(seconds, wall_seconds)
            self.kill()
            if answer_at_fault:
                return Finding(right=False, overran=True)
            raise protocols.EnvironmentCrashed(
                f"the verifier of answers stood still for {wall_seconds:g} s, or hardly got to compute, as it compared "
                "one"
            ) from None
        except BaseException:
            self.kill()
            raise
        if message is not None:
            return Finding(bool(message["right"]), bool(message["read"]))
        self.alive = False
        await self.wait_for_end()
        # The worker's own timer of processor time sends SIGPROF, so this end is the answer's overrun.
        if self.process.returncode == -signal.SIGPROF:
            return Finding(right=False, overran=True)
        raise protocols.EnvironmentCrashed(
            f"the verifier of answers ended with status {self.process.returncode} as it compared one"
        )

    async def read_message(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next line that the process writes. None if the process has ended."""
        assert self.process.stdout is not None
        line = await deadlines.cancel_after(seconds, self.process.stdout.readline())
        # A line without a newline was cut off by the end of the process.
        return dict(json.loads(line)) if line.endswith(b"\n") else None

    def _spent(self) -> float:
        """Returns the processor seconds that the process has used."""
        with contextlib.suppress(psutil.Error):  # the process has ended
            times = psutil.Process(self.process.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def kill(self) -> None:
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def wait_for_end(self) -> None:
        """Waits until the process has ended.

        Raises:
          DeadlineMissed: The process was killed and still runs.
        """
        await processes.reap(self.process, _REAP_SECONDS, "the verifier process")
