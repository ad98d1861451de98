"""When hybrid workers are borrowed for training and when they are released: never to and fro.

Each look scales what the last step took to the arrangements that one change leads to: training goes faster by the speed
of each worker that trains, the core's own being 1; rollout takes time inversely to its slots; what else the trainer
does between two batches stays. A change has to shorten the step by `elastic.gain`, to pay for itself within
`planner.horizon` steps, to be what `elastic.patience` looks in a row say, and to come `elastic.cooldown` steps after
the worker's last.

Several workers change together only where they have few of the slots: what the others take then is no matter of slots
alone (fuller engines are slower, and who waits for the longest request waits no less), and is best seen on the way.

Times that err by less than half of `elastic.gain` cannot make a worker go to and fro: every change then makes the step
truly shorter. Where a change brings less than was promised, because times do not scale like that or because work
drifts, how much less is remembered, and the same change has to promise so much more the next time. This fades: by half
within `planner.horizon` steps, and half as fast each time that it is found again. So what was learnt of other work is
no obstacle for long, and where nothing else changes, changes become ever rarer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from libra_jax import config as configuration

WAITED = 0.15
"""Share of a step for which the trainer waited, above which the step was as long as rollout made it."""

NEAR = 0.2
"""Share of the slots that roll out up to which several workers change together; one alone may have more."""

Kind = Literal["borrow", "release", "stay"]


@dataclass(frozen=True)
class Hybrid:
    """A worker that may change sides now: it is at rest and has not failed.

    Attributes:
      name: the worker's.
      slots: requests that its engine decodes at once.
      speed: work of a training step that its replica does while the core does 1; measured, or the ratio of devices.
      trains: it trains; else it rolls out.
    """

    name: str
    slots: int
    speed: float
    trains: bool


@dataclass(frozen=True)
class Sight:
    """What a training step showed, of the arrangement that it ran under.

    Attributes:
      step: its number.
      step_seconds: from the end of the step before, without an evaluation.
      train_seconds: of them, the training step.
      wait_seconds: of them, the trainer waited for its batch.
      rollout_seconds: that the requests of a batch need on the present slots when nothing holds them up. Where some
        request runs always, as it does under asynchronous training, the time in which one ran says nothing of this:
        count the time that slots were in use, over all slots.
      core_instances: instances that only roll out, and serve now.
      core_slots: slots of those.
      workers: the hybrid workers that may change sides.
      move_seconds: by which a change lengthens the steps that it touches, together.
      disturbed: a worker was on its way for some of the step, or one or an instance was lost, so that it says nothing
        of those to come.
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
        """How many roll out while these train."""
        return self.core_instances + sum(worker.name not in training for worker in self.workers)

    def slots(self, training: Collection[str]) -> int:
        """Of all that roll out while these train."""
        return self.core_slots + sum(worker.slots for worker in self.workers if worker.name not in training)

    def speed(self, training: Collection[str]) -> float:
        """Of training while these train; the core's own is 1."""
        return 1.0 + sum(worker.speed for worker in self.workers if worker.name in training)


@dataclass(frozen=True)
class Decision:
    """One look.

    Attributes:
      step: training step.
      kind: what to do now.
      workers: with whom; empty if all stay.
      why: a sentence with the numbers.
      now_seconds: of a step as things are, as predicted.
      then_seconds: likewise after the change, or, if all stay, after the best that was looked at. Where nothing was
        predicted, both are what the step took.
    """

    step: int
    kind: Kind
    workers: tuple[str, ...]
    why: str
    now_seconds: float
    then_seconds: float


@dataclass(frozen=True)
class _Change:
    """A change, and what it does to the set of those that train.

    Attributes:
      predicted: seconds of a step after it, scaled from the last one.
      seconds: that it promises: as many times as long as what the same change brought was longer the last time.
    """

    kind: Kind
    workers: tuple[str, ...]
    before: frozenset[str]
    after: frozenset[str]
    predicted: float
    seconds: float


@dataclass(frozen=True)
class _Shortfall:
    """What a change brought the last time: a step so many times as long as it promised.

    Attributes:
      ratio: at least 1.
      step: when it was found.
      times: that it has been found.
    """

    ratio: float
    step: int
    times: int

    def at(self, step: int, half_life: int) -> float:
        """What is left of the ratio now."""
        return 1.0 + (self.ratio - 1.0) * 0.5 ** ((step - self.step) / (half_life * 2 ** (self.times - 1)))


def predict(sight: Sight, training: Collection[str], *, synchronous: bool) -> float:
    """Seconds of a step while these workers train; infinite if nothing rolls out, now or then.

    Args:
      sight: a step under the present arrangement.
      training: names of workers.
      synchronous: the two stages take turns; else the longer one is the step.
    """
    present, slots = sight.training, sight.slots(training)
    rollout = in_slots = sight.rollout_seconds
    held = sight.wait_seconds
    if synchronous:
        held = rollout
    elif sight.wait_seconds > WAITED * sight.step_seconds:
        # Rollout made the step as long as it was; slots that were free meanwhile would not have made it shorter.
        rollout = sight.step_seconds
        in_slots = min(in_slots, rollout)
    beside = max(0.0, sight.step_seconds - sight.train_seconds - held)
    train = beside + sight.train_seconds * sight.speed(present) / sight.speed(training)
    if not slots or not sight.slots(present):
        return math.inf
    rollout += in_slots * (sight.slots(present) / slots - 1.0)
    return train + rollout if synchronous else max(train, rollout)


class Borrowing:
    """Decides step by step. What it decides is done: it counts the worker's cooldown from there.

    Args:
      config: gain, patience, cooldown and floor.
      horizon: steps over which a change has to pay.
      synchronous: training and rollout take turns (a staleness bound of 0).
    """

    def __init__(self, config: configuration.ElasticConfig, *, horizon: int, synchronous: bool) -> None:
        self._config = config
        self._horizon = horizon
        self._synchronous = synchronous
        self._changed: dict[str, int] = {}  # step of each worker's last change
        self._said: list[Kind] = []  # by the last looks, all the same
        self._promise: _Change | None = None  # the last change, until it is known what it brought
        self._brought: list[float] = []  # seconds of a step since
        self._short: dict[tuple[frozenset[str], frozenset[str]], _Shortfall] = {}

    def look(self, sight: Sight) -> Decision:
        """The decision after a training step."""
        if sight.training and sight.instances(sight.training) < self._config.floor:
            return self._keep_floor(sight)
        if sight.disturbed:
            return self._stay(sight, "a change or a loss touched the step, which says nothing of those to come")
        now = predict(sight, sight.training, synchronous=self._synchronous)
        self._learn(sight, now)
        best = min(self._changes(sight), key=lambda change: change.seconds, default=None)
        if best is None:
            self._said.clear()
            return self._stay(
                sight,
                "nobody may change sides: a worker is at rest, has not failed, changed elastic.cooldown = "
                f"{self._config.cooldown} steps ago or before, and leaves elastic.floor = {self._config.floor} "
                "instances that roll out",
            )
        against, numbers = self._against(sight, best, now), _numbers(sight, best, now)
        if against is not None:
            return Decision(sight.step, "stay", (), f"{numbers}: {against}", now, best.seconds)
        self._promise = best
        return self._change(sight, best.kind, best.workers, numbers, now, best.seconds)

    def _changes(self, sight: Sight) -> list[_Change]:
        """Those that there are, of one worker or several that have waited for long enough, and what each promises."""
        before, changes = sight.training, []
        most = NEAR * sight.slots(before)
        free = [
            worker
            for worker in sight.workers
            if sight.step - self._changed.get(worker.name, -math.inf) >= self._config.cooldown
        ]
        kinds: tuple[Kind, Kind] = ("borrow", "release")
        for kind in kinds:
            # Who is given to training first trains most for what is lost to rollout, and comes back last.
            able = sorted(
                (worker for worker in free if worker.trains == (kind == "release")),
                key=lambda worker: worker.slots / max(worker.speed, 1e-9),
                reverse=kind == "release",
            )
            names = [worker.name for worker in able]
            moved = itertools.accumulate(worker.slots for worker in able)
            together = sum(slots <= most for slots in moved)
            several = (tuple(names[:count]) for count in range(2, together + 1))
            for workers in itertools.chain(((name,) for name in names), several):
                after = before ^ set(workers)
                if kind == "borrow" and sight.instances(after) < self._config.floor:
                    continue
                predicted = predict(sight, after, synchronous=self._synchronous)
                short = self._short.get((before, after))
                seconds = predicted * (short.at(sight.step, self._horizon) if short is not None else 1.0)
                changes.append(_Change(kind, workers, before, after, predicted, seconds))
        return changes

    def _against(self, sight: Sight, best: _Change, now: float) -> str | None:
        """What speaks against the change, None if nothing does; counts the looks that were for it."""
        config, saved = self._config, (now - best.seconds) * self._horizon
        if best.kind not in self._said:
            self._said.clear()
        if best.seconds > now * (1.0 - config.gain) or best.seconds >= now:
            self._said.clear()
            return f"elastic.gain = {100 * config.gain:g}% is not reached"
        if saved <= sight.move_seconds:
            self._said.clear()
            return f"{self._horizon} steps would save {saved:.1f} s, and the change costs {sight.move_seconds:.1f} s"
        self._said.append(best.kind)
        if len(self._said) < config.patience:
            return f"so say {len(self._said)} looks in a row, of elastic.patience = {config.patience}"
        return None

    def _keep_floor(self, sight: Sight) -> Decision:
        """Too few roll out, as when an instance of the core is lost: whoever has most slots is released at once."""
        worker = max((worker for worker in sight.workers if worker.trains), key=lambda worker: worker.slots)
        why = f"{sight.instances(sight.training)} instances roll out, fewer than elastic.floor = {self._config.floor}"
        return self._change(sight, "release", (worker.name,), why, sight.step_seconds, sight.step_seconds)

    def _stay(self, sight: Sight, why: str) -> Decision:
        """Nothing was predicted."""
        return Decision(sight.step, "stay", (), why, sight.step_seconds, sight.step_seconds)

    def _change(
        self, sight: Sight, kind: Kind, workers: tuple[str, ...], why: str, now: float, then: float
    ) -> Decision:
        self._said.clear()
        self._brought.clear()
        self._changed.update(dict.fromkeys(workers, sight.step))
        return Decision(sight.step, kind, workers, why, now, then)

    def _learn(self, sight: Sight, now: float) -> None:
        """What the last change brought, by the shortest of the first steps since: one may be long by chance."""
        change = self._promise
        if change is None:
            return
        if sight.training != change.after:  # it was given up, or has failed
            self._promise = None
            return
        self._brought.append(now)
        if len(self._brought) < self._config.patience:
            return
        self._promise, key, brought = None, (change.before, change.after), min(self._brought)
        if 0.0 < change.predicted < brought:
            times = self._short[key].times + 1 if key in self._short else 1
            self._short[key] = _Shortfall(brought / change.predicted, sight.step, times)
        else:
            self._short.pop(key, None)


def _numbers(sight: Sight, best: _Change, now: float) -> str:
    """What the best change would bring, for the log."""
    gain = 100 * (1.0 - best.seconds / now) if now > 0 else 0.0
    side = "in training" if best.kind == "borrow" else "back in rollout"
    return (
        f"training takes {sight.train_seconds:.1f} s, rollout {sight.rollout_seconds:.1f} s, and the trainer waits "
        f"{sight.wait_seconds:.1f} s; with {', '.join(best.workers)} {side} a step takes {best.seconds:.1f} s instead "
        f"of {now:.1f} s, {gain:.1f}% less"
    )
