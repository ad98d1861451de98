"""Simulates plans in a child process beside a run (`planning.search.ranking.Trials`).

The child gets the run and its sample of rollouts as a file, and writes the seconds of a step under each plan. It has
one thread and a low priority. It dies with the run, and after its time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO

from libra_jax import protocols
from libra_jax.build import trial
from libra_jax.planning.forecast import forecast
from libra_jax.planning.search import ranking
from libra_jax.simulator import scripts
from libra_jax.utils import parent_death

NICENESS = 10
"""Added to the niceness of the run's processes, which are worth more than a simulation."""

MODULE = "libra_jax.build.background_trials"

REAPED_SECONDS = 5.0
"""Most seconds that a killed child takes to end."""


class BackgroundTrials:
    """Simulates plans of a run, one list at a time: a `ranking.Trials`.

    The thread that calls `start` has to live as long as the run.

    Args:
      subject: the run, without rollouts.
      seconds: most seconds of all simulations of a list.
      module: module that the child runs.
      now: clock.
    """

    def __init__(
        self,
        subject: trial.Subject,
        seconds: float,
        *,
        module: str = MODULE,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._subject = subject
        self._seconds = seconds
        self._module = module
        self._now = now
        self._child: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None
        self._began = 0.0
        self._failure = ""

    def start(self, work: forecast.Work, plans: Sequence[protocols.Plan]) -> None:
        """Begins to simulate; see `ranking.Trials`. `outcome` tells if the child could not be started."""
        self.close()
        rollouts = [
            scripts.Script(prompt, tuple(dataclasses.replace(turn, start_seconds=0.0, moves=()) for turn in turns))
            for prompt, turns in zip(work.prompts, work.turns, strict=True)
            if turns
        ]
        self._began, self._failure = self._now(), ""
        # Files, not pipes: neither side ever waits for the other.
        answer = tempfile.TemporaryFile()  # noqa: SIM115 (open while the child runs)
        # The child finds the user's modules, such as a policy, where this process finds them.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        try:
            with tempfile.TemporaryFile() as input_file:
                subject = dataclasses.replace(self._subject, rollouts=rollouts)
                pickle.dump((subject, list(plans), self._seconds), input_file)
                input_file.seek(0)
                self._child = subprocess.Popen(
                    parent_death.command([sys.executable, "-m", self._module]),
                    stdin=input_file,
                    stdout=answer,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the run, which then ends this child
                )
        except OSError as error:
            self._failure = f"the simulations could not be started ({error.strerror or error})"
        self._answer = answer

    def outcome(self) -> ranking.Outcome | None:
        """Returns the end of the simulations; see `ranking.Trials`."""
        child, answer = self._child, self._answer
        if child is None or answer is None:
            return ranking.Outcome(failure=self._failure or "no simulations were started")
        code = child.poll()
        if code is None and self._now() - self._began < self._seconds:
            return None
        if code is None or code == -signal.SIGALRM:
            result = ranking.Outcome(
                failure=f"the simulations took longer than planner.simulate_seconds = {self._seconds:g}"
            )
        else:
            answer.seek(0)
            lines = answer.read().decode(errors="replace").splitlines() or [f"exit status {code}"]
            result = _read(lines[-1]) if code == 0 else ranking.Outcome(failure=f"the simulations failed: {lines[-1]}")
        self.close()
        return result

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait(REAPED_SECONDS)
        if self._answer is not None:
            self._answer.close()
        self._child = self._answer = None


def _read(line: str) -> ranking.Outcome:
    """Returns the outcome that a child has written."""
    try:
        seconds = tuple(float(one) for one in json.loads(line))
    except (ValueError, TypeError):
        return ranking.Outcome(failure=f"the simulations wrote no times but {line[:200]!r}")
    return ranking.Outcome(seconds)


def main() -> None:
    """Simulates the plans of standard input, and writes their seconds of a step to standard output."""
    os.nice(NICENESS)
    subject, plans, seconds = pickle.load(sys.stdin.buffer)
    # Its own limit: a run whose step takes hours would end it only after the step.
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        print(json.dumps([trial.step_seconds(subject, plan) for plan in plans]))
    except protocols.LibraError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
