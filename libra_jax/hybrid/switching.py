"""Decides when hybrid workers switch to training and when they switch back to rollout, without oscillation.

Each look predicts a step's seconds for every arrangement that one change leads to, from the last step. Training speeds
up by the speed of each worker that trains; the core's own speed is 1. Rollout time is inverse to its slots. The
trainer's other work between two batches stays. A change has to meet four conditions: it shortens the step by
`elastic.gain`; it pays for itself within `planner.horizon` steps; `elastic.patience` looks in a row favour it; and
`elastic.cooldown` steps have passed since the worker's last change.

Several workers change together only if they hold few of the slots. Otherwise the prediction is too coarse: fuller
engines are slower, and the longest request takes as long as before. Smaller changes show the effect on the way.

Errors below half of `elastic.gain` cannot cause oscillation, because every change then truly shortens the step. A
change may bring less than predicted, because times do not scale like that or because the workload drifts. The ratio is
remembered, and the same change then has to promise more by this ratio. The memory halves within `planner.horizon`
steps, and fades half as fast each time the shortfall recurs. So an old workload's shortfall is no obstacle for long,
and under a constant workload changes become ever rarer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from libra_jax import config as config_lib

WAITED = 0.15
"""Share of a step that the trainer waits, above which rollout determines the length of the step."""

NEAR = 0.2
"""Largest share of the rollout slots that several workers may take away or add together. One worker may have more."""

Kind = Literal["to_training", "to_rollout", "stay"]


@dataclass(frozen=True)
class Hybrid:
    """A worker that may switch now: it is at rest and has not failed.

    Attributes:
      name: name of the worker.
      slots: number of requests that its engine decodes at once.
      speed: speed of its training side relative to the core; measured, or the ratio of devices.
      trains: True in training, False in rollout.
    """

    name: str
    slots: int
    speed: float
    trains: bool


@dataclass(frozen=True)
class Sight:
    """Measurements of a training step, and the arrangement under which it ran.

    Attributes:
      step: number of the step.
      step_seconds: seconds since the end of the step before, without an evaluation.
      train_seconds: seconds of the training step itself.
      wait_seconds: seconds in which the trainer waited for its batch.
      rollout_seconds: seconds that the requests of a batch need on the present slots if nothing holds them up. Under
        asynchronous training some request always runs, so the time in which any request ran is no measure. Use the time
        in which slots were in use, divided by the number of slots.
      core_instances: number of serving instances that only roll out.
      core_slots: slots of those instances.
      workers: the hybrid workers that may switch.
      move_seconds: seconds that a change adds to the steps it touches, in total.
      disturbed: True if a worker switched during the step, or a worker or instance was lost. Such a step predicts
        nothing.
    """

    step: int
    step_seconds: float
    train_seconds: float
    wait_seconds: float
    rollout_seconds: float
    core_instances: int
    core_slots: int
    workers: tuple[Hybrid, ...]
    move_seconds: float = 0.0
    disturbed: bool = False

    @property
    def training(self) -> frozenset[str]:
        """Names of the workers that train."""
        return frozenset(worker.name for worker in self.workers if worker.trains)

    def instances(self, training: Collection[str]) -> int:
        """Returns the number of instances in rollout while `training` trains."""
        return self.core_instances + sum(worker.name not in training for worker in self.workers)

    def slots(self, training: Collection[str]) -> int:
        """Returns the slots of all instances in rollout while `training` trains."""
        return self.core_slots + sum(worker.slots for worker in self.workers if worker.name not in training)

    def speed(self, training: Collection[str]) -> float:
        """Returns the training speed while `training` trains, relative to the core alone."""
        return 1.0 + sum(worker.speed for worker in self.workers if worker.name in training)


@dataclass(frozen=True)
class SwitchDecision:
    """The decision of one look.

    Attributes:
      step: training step.
      kind: the change to make now.
      workers: names of the workers to change; empty if all stay.
      why: sentence with the numbers.
      now_seconds: predicted seconds of a step under the present arrangement.
      then_seconds: predicted seconds of a step after the change. If all stay, after the best change that was
        considered. Without a prediction, both fields hold the last step's seconds.
    """

    step: int
    kind: Kind
    workers: tuple[str, ...]
    why: str
    now_seconds: float
    then_seconds: float


@dataclass(frozen=True)
class _WorkerChange:
    """A change of the set of workers in training.

    Attributes:
      predicted: seconds of a step after the change, scaled from the last step.
      seconds: promised seconds of a step: `predicted` times the shortfall that the same change had before.
    """

    kind: Kind
    workers: tuple[str, ...]
    before: frozenset[str]
    after: frozenset[str]
    predicted: float
    seconds: float


@dataclass(frozen=True)
class _Shortfall:
    """The shortfall of an earlier change: its step took `ratio` times as long as predicted.

    Attributes:
      ratio: at least 1.
      step: training step at which it was measured.
      times: number of times it was measured.
    """

    ratio: float
    step: int
    times: int


def predict(sight: Sight, training: Collection[str], *, synchronous: bool) -> float:
    """Predicts the seconds of a step while `training` trains; infinite if nothing rolls out, now or then.

    Args:
      sight: measurements of a step under the present arrangement.
      training: names of the workers in training.
      synchronous: True if training and rollout alternate. If False, the longer of the two is the step.
    """
    present, slots = sight.training, sight.slots(training)
    rollout = in_slots = sight.rollout_seconds
    held = sight.wait_seconds
    if synchronous:
        held = rollout
    elif sight.wait_seconds > WAITED * sight.step_seconds:
        # Rollout determined the step's length, and slots that were free meanwhile would not have shortened it.
        rollout = sight.step_seconds
        in_slots = min(in_slots, rollout)
    # The remainder of the step is the trainer's own work between batches, which no change shortens.
    beside = max(0.0, sight.step_seconds - sight.train_seconds - held)
    train = beside + sight.train_seconds * sight.speed(present) / sight.speed(training)
    if not slots or not sight.slots(present):
        return math.inf
    rollout += in_slots * (sight.slots(present) / slots - 1.0)
    return train + rollout if synchronous else max(train, rollout)


@dataclass
class Switching:
    """Decides after each step. A decision counts as carried out: the worker's cooldown starts with it.

    Attributes:
      config: gain, patience, cooldown and floor (`elastic`).
      horizon: steps within which a change has to pay for itself.
      synchronous: True if training and rollout alternate (max staleness 0).
    """

    config: config_lib.ElasticConfig
    horizon: int
    synchronous: bool
    # Step of each worker's last change.
    _changed: dict[str, int] = field(default_factory=dict, init=False)
    # Kinds that the last looks favoured, all equal.
    _said: list[Kind] = field(default_factory=list, init=False)
    # The last change, until its effect is measured, and the predicted seconds of each step since.
    _promise: _WorkerChange | None = field(default=None, init=False)
    _brought: list[float] = field(default_factory=list, init=False)
    _short: dict[tuple[frozenset[str], frozenset[str]], _Shortfall] = field(default_factory=dict, init=False)

    def look(self, sight: Sight) -> SwitchDecision:
        """Returns the decision after a training step."""
        config, step, rolling = self.config, sight.step, sight.instances(sight.training)
        if sight.training and rolling < config.floor:
            # At once, without a prediction: below the floor, speed does not matter.
            worker = max((worker for worker in sight.workers if worker.trains), key=lambda worker: worker.slots)
            why = f"{rolling} instances roll out, fewer than elastic.floor = {config.floor}"
            return self._change(sight, "to_rollout", (worker.name,), why, sight.step_seconds, sight.step_seconds)
        if sight.disturbed:
            why = "a change or a loss touched the step, which says nothing of those to come"
            return SwitchDecision(step, "stay", (), why, sight.step_seconds, sight.step_seconds)
        now = predict(sight, sight.training, synchronous=self.synchronous)
        self._learn(sight, now)
        best = min(self._changes(sight), key=lambda change: change.seconds, default=None)
        if best is None:
            self._said.clear()
            why = (
                "no worker may switch: a worker is at rest, has not failed, changed elastic.cooldown = "
                f"{config.cooldown} steps ago or before, and leaves elastic.floor = {config.floor} "
                "instances that roll out"
            )
            return SwitchDecision(step, "stay", (), why, sight.step_seconds, sight.step_seconds)
        gain = 100 * (1.0 - best.seconds / now) if now > 0 else 0.0
        side = "in training" if best.kind == "to_training" else "back in rollout"
        numbers = (
            f"training takes {sight.train_seconds:.1f} s, rollout {sight.rollout_seconds:.1f} s, and the trainer waits "
            f"{sight.wait_seconds:.1f} s; with {', '.join(best.workers)} {side} a step takes {best.seconds:.1f} s "
            f"instead of {now:.1f} s, {gain:.1f}% less"
        )
        against = self._against(sight, best, now)
        if against is not None:
            return SwitchDecision(step, "stay", (), f"{numbers}: {against}", now, best.seconds)
        self._promise = best
        return self._change(sight, best.kind, best.workers, numbers, now, best.seconds)

    def _changes(self, sight: Sight) -> list[_WorkerChange]:
        """Returns the possible changes, of one worker or several past their cooldown, each with its promise."""
        before, changes = sight.training, []
        most = NEAR * sight.slots(before)
        free = [
            worker
            for worker in sight.workers
            if sight.step - self._changed.get(worker.name, -math.inf) >= self.config.cooldown
        ]
        kinds: tuple[Kind, Kind] = ("to_training", "to_rollout")
        for kind in kinds:
            # The first worker to switch to training loses the fewest slots for its speed, and comes back last.
            able = sorted(
                (worker for worker in free if worker.trains == (kind == "to_rollout")),
                key=lambda worker: worker.slots / max(worker.speed, 1e-9),
                reverse=kind == "to_rollout",
            )
            names = [worker.name for worker in able]
            moved = itertools.accumulate(worker.slots for worker in able)
            together = sum(slots <= most for slots in moved)
            several = (tuple(names[:count]) for count in range(2, together + 1))
            for workers in itertools.chain(((name,) for name in names), several):
                # Symmetric difference: workers join the set on "to_training" and leave it on "to_rollout".
                after = before ^ set(workers)
                if kind == "to_training" and sight.instances(after) < self.config.floor:
                    continue
                predicted = predict(sight, after, synchronous=self.synchronous)
                seconds, short = predicted, self._short.get((before, after))
                if short is not None:
                    # A shortfall fades, so that its change is tried again some day. One that was measured again and
                    # again fades more slowly, by a half-life that doubles each time.
                    half_life = self.horizon * 2 ** (short.times - 1)
                    seconds *= 1.0 + (short.ratio - 1.0) * 0.5 ** ((sight.step - short.step) / half_life)
                changes.append(_WorkerChange(kind, workers, before, after, predicted, seconds))
        return changes

    def _against(self, sight: Sight, best: _WorkerChange, now: float) -> str | None:
        """Returns the reason against a change, or None. Counts the looks in favour."""
        config, saved = self.config, (now - best.seconds) * self.horizon
        # Patience counts looks in a row that favour the same kind.
        if best.kind not in self._said:
            self._said.clear()
        if best.seconds > now * (1.0 - config.gain) or best.seconds >= now:
            self._said.clear()
            return f"elastic.gain = {100 * config.gain:g}% is not reached"
        if saved <= sight.move_seconds:
            self._said.clear()
            return f"{self.horizon} steps would save {saved:.1f} s, and the change costs {sight.move_seconds:.1f} s"
        self._said.append(best.kind)
        if len(self._said) < config.patience:
            return f"so say {len(self._said)} looks in a row, of elastic.patience = {config.patience}"
        return None

    def _change(
        self, sight: Sight, kind: Kind, workers: tuple[str, ...], why: str, now: float, then: float
    ) -> SwitchDecision:
        self._said.clear()
        self._brought.clear()
        self._changed.update(dict.fromkeys(workers, sight.step))
        return SwitchDecision(sight.step, kind, workers, why, now, then)

    def _learn(self, sight: Sight, now: float) -> None:
        """Learns the effect of the last change, from the shortest of the first steps since: one may be slow."""
        change = self._promise
        if change is None:
            return
        if sight.training != change.after:  # it was aborted, or has failed
            self._promise = None
            return
        self._brought.append(now)
        if len(self._brought) < self.config.patience:
            return
        self._promise, key, brought = None, (change.before, change.after), min(self._brought)
        if 0.0 < change.predicted < brought:
            times = self._short[key].times + 1 if key in self._short else 1
            self._short[key] = _Shortfall(brought / change.predicted, sight.step, times)
        else:
            self._short.pop(key, None)
