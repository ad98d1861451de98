"""A run that is drilled: started as a user does, watched by its log, and judged by its records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra_jax import protocols
from libra_jax.cluster import guard
from tests.drills import judging, settings

ROOT = Path(__file__).resolve().parents[2]
IN_ROOT = ("sh", "-c", 'cd "$0" && exec "$@"', str(ROOT))
"""Runs a command there: who enters another mount namespace is at its root."""

LIMIT_SECONDS = 900.0
"""Longest wait for anything that a drill waits for: on two busy cores vLLM takes minutes to start."""

VERDICTS = ("It lives.", "It has ended", "DEAD:")
END_SECONDS, STATUS_SECONDS = 10.0, 120.0
LOOK_SECONDS = 0.05


class Stuck(protocols.LibraError):
    """What a drill waits for does not come."""


@dataclass(frozen=True)
class Plan:
    """What all drills are told.

    Attributes:
      engine: `rollout.engine` of their runs.
      steps: training steps of each run.
      workdir: folder that holds a folder for each drill.
      seed: of victims and moments.
      step_seconds: of a step, about: blows land within so much of one.
      say: tells of progress.
    """

    engine: str
    steps: int
    workdir: Path
    seed: int
    step_seconds: float
    say: Callable[[str], None] = field(repr=False)


class Run:
    """One run, over all its starts. Its log is beside its workdir.

    Args:
      plan: what all drills are told.
      name: of the run.
      layout: of `settings`.
      prefix: what runs the script.
      seen: how a path of the run is seen from here.
    """

    def __init__(
        self,
        plan: Plan,
        name: str,
        layout: str,
        *,
        prefix: Sequence[str] = (sys.executable,),
        seen: Callable[[Path], Path] = lambda path: path,
    ) -> None:
        self.workdir = plan.workdir / name
        if self.workdir.exists():
            raise protocols.ConfigError(
                f"--workdir={plan.workdir} holds {name} of an earlier drill; remove it, or choose another folder"
            )
        self.log = plan.workdir / f"{name}.log"
        self._prefix = list(prefix)
        self._seen = seen
        self._plan = plan
        self._arguments = [
            "launch/train.py",
            f"--config=tests/drills/settings.py:{layout}",
            f"--config.rollout.engine={plan.engine}",
            f"--config.steps={plan.steps}",
            f"--workdir={self.workdir}",
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._from = 0

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """Of the present start."""
        assert self._process is not None, "start comes first"
        return self._process

    def start(self, environment: Mapping[str, str], *arguments: str) -> None:
        """Gives the command, with further settings that a start may have of its own (the cluster's address)."""
        self.kill()  # the guard of the start before has its end to see
        self._from = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                [*self._prefix, *self._arguments, *arguments],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._guard = guard.Guard([self._process.pid])

    def kill(self) -> None:
        """Ends the present start, if there is one that lives."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._guard.fire(END_SECONDS)

    def all_said(self) -> str:
        """The log of all starts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def said(self, since: int | None = None) -> str:
        """The log from a place on; None: of the present start."""
        with self.log.open("rb") as file:
            file.seek(self._from if since is None else since)
            return file.read().decode(errors="replace")

    def step(self) -> int:
        """The last step that the present start has told of; 0: none."""
        return judging.last_step(self.said())

    def wait(self, done: Callable[[], Any], what: str, seconds: float = LIMIT_SECONDS) -> bool:
        """Waits until it is done; False if the run ended before.

        Raises:
          Stuck: neither, in time.
        """
        deadline = time.monotonic() + seconds
        while not done():
            if self.process.poll() is not None:
                return bool(done())
            if time.monotonic() > deadline:
                raise Stuck(f"no {what} within {seconds:g} s; see {self.log}")
            time.sleep(LOOK_SECONDS)
        return True

    def wait_for_step(self, step: int) -> None:
        """Waits until so many steps have been taken.

        Raises:
          Stuck: the run ends before, or the step does not come.
        """
        if not self.wait(lambda: self.step() >= step, f"step {step}"):
            raise Stuck(f"the run ended with status {self.process.returncode} before step {step}; see {self.log}")

    def end(self, seconds: float = LIMIT_SECONDS) -> int:
        """Waits for the end of the present start; its exit status.

        Raises:
          Stuck: it does not end in time.
        """
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Stuck(f"the run did not end within {seconds:g} s; see {self.log}") from None

    def hosts(self) -> list[dict[str, Any]]:
        """What `hosts.json` says of the run's hosts, by their numbers in the run."""
        found: list[dict[str, Any]] = json.loads((self._seen(self.workdir) / "hosts.json").read_text())
        return found

    def status(self) -> str:
        """What launch/status.py says: whether it lives, and how it ended."""
        command = [sys.executable, "launch/status.py", str(self.workdir)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "400"},
            capture_output=True,
            text=True,
            timeout=STATUS_SECONDS,
            check=False,
        )
        lines = (line.strip("│ ") for line in done.stdout.splitlines())
        return next((line for line in lines if line.startswith(VERDICTS)), done.stderr.strip())

    def records(self, name: str) -> list[dict[str, Any]]:
        """Of a file of the workdir, one a line."""
        file = self._seen(self.workdir) / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def prompts(self) -> judging.Prompts:
        """What became of them, by its records."""
        return judging.prompts(
            self.records("trace.jsonl"),
            self.records("metrics.jsonl"),
            groups=settings.GROUPS,
            attempts=settings.ATTEMPTS,
            steps=self._plan.steps,
        )

    def wrong_steps(self) -> str:
        """See `judging.wrong_steps`."""
        return judging.wrong_steps(self.records("metrics.jsonl"), self._plan.steps)
