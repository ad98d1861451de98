"""Runs cases within a budget of seconds. Every case gets a row, also one that hangs or dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpu import cases, rows, worker
from libra_jax import protocols
from libra_jax.utils import processes

START_SECONDS = 90.0
"""Deadline in seconds for a worker to import JAX and to find its devices."""

DRY_RUN_PATIENCE = 4.0
"""Factor on the cases' deadlines in a dry run, because other work may share its few cores."""


CUT_SHARE = 2.0
"""A case that the budget ends was cut off if it had less than this multiple of its expected seconds; else it hung."""


class NoDevice(protocols.LibraError):
    """Raised if JAX finds no device of the platform."""


class Runner:
    """Runs cases one after the other, in as few workers as possible.

    Args:
      seconds: budget in seconds, which begins now.
      environment: environment variables of the workers.
      scratch: folder for files of the cases.
      path: folders for the workers to import from, beside those of this process.
      clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        seconds: float,
        environment: Mapping[str, str],
        scratch: str,
        path: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._began = clock, clock()
        self._budget = seconds
        self._environment, self._scratch, self._path = environment, scratch, path
        self._worker: processes.Peer | None = None
        self._process = "jax"

    @property
    def seconds(self) -> float:
        """Seconds since the budget began."""
        return self._clock() - self._began

    def machine(self) -> rows.Machine:
        """Returns where the cases run.

        Raises:
          NoDevice: JAX does not start.
        """
        reply = self._call(worker.Call("gpu.machine:describe"), START_SECONDS)
        if reply.error:
            raise NoDevice(f"JAX finds no device here: {reply.error}")
        assert isinstance(reply.value, rows.Machine)
        return reply.value

    def run(
        self, chosen: Sequence[cases.Case], platform: str, traces: str = "", results: str = ""
    ) -> Iterator[rows.Row]:
        """Yields the row of each case when the case has ended. See `rows.Bench` for the other arguments."""
        bench = rows.Bench(platform, self._scratch, traces, results)
        for case in chosen:
            left = self._budget - self.seconds
            expected = 0.0 if bench.tiny else case.expected_seconds
            if left <= expected:
                reason = f"takes about {expected:.0f} s, and {left:.0f} s of --minutes are left"
                reason = "--minutes are over" if left <= 0 else reason
                yield rows.Row(case.name, "left out", reason=reason)
            else:
                yield self._row(case, bench, left)

    def end(self) -> None:
        """Ends the worker. Idempotent."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def abort(self) -> None:
        """Ends the worker in the middle of a case. Idempotent."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _call(self, call: worker.Call, seconds: float) -> worker.Reply:
        """Runs a function in the worker. If it does not answer in time or ends, it has to be aborted."""
        if self._worker is None:
            self._worker = processes.Peer(worker.serve, dict(self._environment), list(self._path), name="its process")
        reply = self._worker.ask(call, seconds)
        assert isinstance(reply, worker.Reply)
        return reply

    def _row(self, case: cases.Case, bench: rows.Bench, left: float) -> rows.Row:
        if case.process != self._process:
            self.end()
            self._process = case.process
        began = self.seconds
        longest = case.most_seconds * (DRY_RUN_PATIENCE if bench.tiny else 1.0)
        deadline = min(longest, left)
        try:
            reply = self._call(worker.Call(case.target, (bench, *case.arguments)), deadline)
        except protocols.LibraError as error:
            # It hangs or is dead, and the device with it; the next case gets a new worker.
            self.abort()
            cut = isinstance(error, protocols.DeadlineMissed) and deadline < CUT_SHARE * case.expected_seconds
            reason = f"--minutes were over after {deadline:.0f} s of it" if cut else str(error)
            return rows.Row(case.name, "left out" if cut else "failed", self.seconds - began, reason)
        seconds = self.seconds - began
        if reply.error:
            left_out = reply.kind == rows.LeftOut.__name__
            row = rows.Row(case.name, "left out" if left_out else "failed", seconds, reply.error)
        else:
            found = reply.value
            assert isinstance(found, rows.Outcome)
            row = rows.Row(case.name, "failed" if found.problem else "passed", seconds, found.problem, found.figures)
        # A device that has seen an error may answer every later call with it.
        if row.state == "failed":
            self.end()
        return row
