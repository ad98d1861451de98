"""One blow to a run: when it lands, what follows, and how that is judged."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from libra_jax import protocols
from tests.drills import judging, processes, runs

FIRST_STEP = 2
"""No blow comes before this step: what happens while a run starts is another matter."""


@dataclass
class Blow:
    """One blow and what followed; made at its moment.

    Attributes:
      run: that is hit.
      expected: a regular expression that a sentence of the log has to match.
      hit: what of it was.
      may_end: the run may end of it, and is given its command again; otherwise it has to go on by itself.
      when: at which moment it landed.
      again_seconds: as of `judging.Outcome`.
      ended_seconds: likewise.
      status: the exit status with which the run that was hit ended.
      left: names of what was left behind by the run while its hosts lived.
      also: further problems, in sentences.
      trained: what became of the prompts.
      steps: what is wrong with the steps that were recorded.
      longest_step_seconds: as of `judging.Outcome`.
    """

    run: runs.Run
    expected: str
    hit: str = ""
    may_end: bool = False
    when: str = ""
    again_seconds: float | None = None
    ended_seconds: float | None = None
    status: int | None = None
    left: tuple[str, ...] = ()
    also: list[str] = field(default_factory=list)
    trained: judging.Prompts = field(default_factory=judging.Prompts)
    steps: str = ""
    longest_step_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._began = self._landed = time.monotonic()
        self._place = self.run.log.stat().st_size
        self._step = 0
        self._status = ""  # what launch/status.py said

    def land(self, hit: str) -> None:
        """It has hit what was looked for."""
        self.hit, self._landed = hit, time.monotonic()
        self._step = self.run.step()
        self.when = f"after step {self._step}"

    def follow(self, restart: Callable[[], None]) -> None:
        """Waits until a step has been taken after it, and then for the end of the run; restarts it if it ends before.

        Args:
          restart: gives the command again, on hosts that are as they should be.

        Raises:
          Stuck: the run does not go on.
        """
        run = self.run
        if run.wait(lambda: run.step() > self._step, "step after the blow"):
            self.again_seconds = time.monotonic() - self._landed
        self.status = run.end()
        if self.status:
            self.ended_seconds = time.monotonic() - self._landed
            self._restart(restart)
        self.trained, self.steps = self.run.prompts(), self.run.wrong_steps()
        self.longest_step_seconds = judging.longest_step(self.run.records("metrics.jsonl"), self._step)

    def _restart(self, restart: Callable[[], None]) -> None:
        run = self.run
        if not any(sentence.startswith("error: ") for sentence in self.said()):  # it could not say anything itself
            self._status = run.status()
        restart()
        began = time.monotonic()
        run.wait_for_step(1)
        self.again_seconds = time.monotonic() - began
        status = run.end()
        if status:
            raise runs.Stuck(f"the run that was started again ended with status {status}; see {run.log}")

    def said(self) -> list[str]:
        """The sentences of the log from the blow on, and of launch/status.py where the run could say nothing."""
        found = judging.sentences(self.run.said(self._place))
        return [self._status, *found] if self._status else found

    def outcome(self, drill: str, left: processes.Left) -> judging.Outcome:
        """Judges it; call it when everything has ended."""
        said = self.said()
        left = dataclasses.replace(left, processes=self.left + left.processes)
        return judging.Outcome(
            drill=drill,
            hit=self.hit,
            when=self.when,
            said=said,
            again_seconds=self.again_seconds,
            longest_step_seconds=self.longest_step_seconds,
            ended=self.ended_seconds is not None,
            ended_seconds=self.ended_seconds,
            prompts=self.trained,
            left=left,
            seconds=time.monotonic() - self._began,
            problems=self.also
            + judging.problems(
                log=self.run.all_said(),
                said=said,
                expected=self.expected,
                again_seconds=self.again_seconds,
                ended=self.ended_seconds is not None,
                may_end=self.may_end,
                steps=self.steps,
                trained=self.trained,
                left=left,
            ),
        )


def at_random_moment(
    run: runs.Run, plan: runs.Plan, rng: random.Random, expected: str, *, may_end: bool = False
) -> Blow:
    """Waits for a random moment of a run's first half; the blow is still to land.

    Args:
      run: to be hit.
      plan: what all drills are told.
      rng: of the moment.
      expected: as of `Blow`.
      may_end: likewise.

    Raises:
      Stuck: the run does not come so far.
    """
    step, late = rng.randint(FIRST_STEP, plan.steps // 2), rng.random() * plan.step_seconds
    run.wait_for_step(step)
    time.sleep(late)
    return Blow(run, expected, may_end=may_end)


def carried_out(name: str, drill: Callable[[processes.Family], Blow]) -> judging.Outcome:
    """Carries one drill out and judges it; what does not go on as it should is a problem, and ends no other drill.

    Args:
      name: of the drill.
      drill: given the processes that it will have started, it ends all of them and returns the blow.
    """
    began, blow, problem = time.monotonic(), None, ""
    with processes.Family() as family:
        try:
            blow = drill(family)
        except (protocols.LibraError, OSError, subprocess.SubprocessError, psutil.Error) as error:
            problem = str(error) or type(error).__name__
        left = family.left()
        family.kill()
    if blow is None:
        return judging.Outcome(name, left=left, seconds=time.monotonic() - began, problems=[problem])
    return dataclasses.replace(blow.outcome(name, left), seconds=time.monotonic() - began)
