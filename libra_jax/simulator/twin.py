"""A recorded run's twin: calibrated on the first half of its steps, it predicts the others.

The twin is the run's own coordinator, agent loop and scheduler on the virtual clock, among machines whose costs were
fitted to the first half; its attempts are the recorded ones, in the order in which they were dispatched. The second
half is looked at only to be compared.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import checkpoints
from libra_jax.planning import calibration, rows, streams
from libra_jax.scheduling import costs as scheduling_costs
from libra_jax.scheduling import registry
from libra_jax.simulator import recording, world

TARGET = 0.10
"""Mean absolute error of a held-out step's predicted time, as a part of the measured one, that is good enough ..."""

SPREADS = 1.5
"""... or so many times the spread of steps that did the same work, where that is more."""

LEVELLINGS = 3
"""Times at most that the simulated first half is compared with the measured one, to set the engines' level."""

LEVEL = 0.01
"""Relative difference between the two at which that ends."""

PARTS = ("total", "rollout", "train", "sync")


@dataclass(frozen=True)
class Twin:
    """A run beside its twin.

    Attributes:
      model: the calibrated costs.
      level: factor on the fitted engine costs, from the comparison of the simulated first half with the measured one.
      measured: each step's seconds.
      predicted: the twin's.
      calibrated: the first so many steps are those that were fitted to.
      spread: of the seconds of held-out steps that did the same work (`spread`); None where no two did.
      repeated: held-out steps that had others like them.
      kinds: different works among those.
    """

    model: calibration.Calibration
    level: float
    measured: tuple[recording.Parts, ...]
    predicted: tuple[recording.Parts, ...]
    calibrated: int
    spread: float | None
    repeated: int
    kinds: int

    def error(self, part: str = "total", *, held_out: bool = True) -> float:
        """Mean absolute error of a part of the steps, relative to the measured seconds."""
        chosen = slice(self.calibrated, None) if held_out else slice(self.calibrated)
        pairs = zip(self.measured[chosen], self.predicted[chosen], strict=True)
        return statistics.fmean(relative_error(getattr(m, part), getattr(p, part)) for m, p in pairs)

    @property
    def constant_error(self) -> float:
        """Error of who predicts the mean step of the first half for every other."""
        mean = statistics.fmean(parts.total for parts in self.measured[: self.calibrated])
        return statistics.fmean(relative_error(parts.total, mean) for parts in self.measured[self.calibrated :])

    @property
    def threshold(self) -> float:
        """What the error of the total must not exceed."""
        return target(self.spread)

    @property
    def met(self) -> bool:
        """Whether the prediction is good enough."""
        return self.error() <= self.threshold


def target(spread: float | None) -> float:
    """What a prediction's mean error must not exceed, given the spread of what repeats."""
    return max(TARGET, SPREADS * (spread or 0.0))


def relative_error(measured: float, predicted: float) -> float:
    """|predicted - measured| / measured."""
    return abs(predicted - measured) / measured if measured else float(predicted != measured)


def make(recorded: recording.Recording) -> Twin:
    """Calibrates on the first half of the steps and replays the run.

    Raises:
      DataError: the first half is too little to calibrate by.
      LibraError: the replay ended in an error.
    """
    half = len(recorded.steps) // 2
    model, level = levelled(recorded, half, calibrate(recorded, half))
    held_out = recorded.steps[half:]
    deviation, repeated, kinds = spread([(step.work, step.parts.total) for step in held_out])
    return Twin(
        model=model,
        level=level,
        measured=tuple(step.parts for step in recorded.steps),
        predicted=replay(recorded, model, len(recorded.steps)),
        calibrated=half,
        spread=deviation,
        repeated=repeated,
        kinds=kinds,
    )


def calibrate(recorded: recording.Recording, steps: int) -> calibration.Calibration:
    """Costs fitted to the first `steps` steps.

    Raises:
      DataError: an instance served too little in them.
    """
    end = recorded.ends[steps - 1]
    by_degree: dict[int, dict[str, list[streams.Stream]]] = {
        degree: collections.defaultdict(list) for degree in recorded.config.rollout.tensor_parallel
    }
    for stream in recorded.streams_of(steps):
        by_degree[recorded.degree(stream.instance)][stream.instance].append(stream)
    engines = {degree: calibration.fit_engine(list(mine.values())) for degree, mine in by_degree.items()}
    first, trainer = recorded.steps[:steps], recorded.config.trainer
    shape = rows.Shape((trainer.row_tokens, *trainer.row_buckets), trainer.rows_per_micro_batch, trainer.pack)
    columns = [rows.processed_columns(step.lengths, shape) for step in first]
    return calibration.Calibration(
        engines=engines,
        train=calibration.fit_train(columns, [step.parts.train for step in first]),
        update=calibration.fit_update(
            [step.parts.sync for step in first], [seconds for at, seconds in recorded.loads if at <= end]
        ),
        rows=shape,
    )


def levelled(
    recorded: recording.Recording, steps: int, model: calibration.Calibration
) -> tuple[calibration.Calibration, float]:
    """The model with its engines at the level that makes the simulated rollout of the first `steps` steps as long as
    the measured one, and the factor: what the fit to single streams does not see (the ways between turns, steps that
    queue behind each other) is in there.
    """
    level = 1.0
    measured = [step.parts.rollout for step in recorded.steps[:steps]]
    for _ in range(LEVELLINGS):
        simulated = [parts.rollout for parts in replay(recorded, _at_level(model, level), steps)]
        factor = statistics.median(m / s for m, s in zip(measured, simulated, strict=True) if m and s)
        level *= factor
        if abs(factor - 1.0) <= LEVEL:
            break
    return _at_level(model, level), level


def _at_level(model: calibration.Calibration, level: float) -> calibration.Calibration:
    return model.scaled(dict.fromkeys(model.engines, level))


def replay(recorded: recording.Recording, model: calibration.Calibration, steps: int) -> tuple[recording.Parts, ...]:
    """The simulated seconds of the first `steps` steps."""
    config = _simulated(recorded.config, steps)
    result = world.run(
        config,
        world.SimulationConfig(train_devices=config.trainer.devices),
        recorded,
        lambda costs, remaining: _scheduler(config),
        model=model,
    )
    names = ("step/seconds", "rollout/seconds", "train/seconds", "sync/seconds")
    return tuple(recording.Parts(*(step[name] for name in names)) for step in result.steps)


def _simulated(config: configuration.RunConfig, steps: int) -> configuration.RunConfig:
    return dataclasses.replace(
        config,
        steps=steps,
        warm_start=dataclasses.replace(config.warm_start, steps=0),
        evaluation=dataclasses.replace(config.evaluation, every=0),
        checkpoint=dataclasses.replace(config.checkpoint, every=0),
        planner=dataclasses.replace(config.planner, period=0),
        rollout=dataclasses.replace(config.rollout, kv_transfer="none"),  # here a moved context is prefilled again
    )


def _scheduler(config: configuration.RunConfig) -> protocols.Scheduler:
    """The run's own: with the costs that it was told, not those that were measured."""
    costs = scheduling_costs.LinearCosts(config.scheduler.costs, transfers=config.rollout.kv_transfer != "none")
    made = registry.create(config.scheduler, costs=costs, seed=config.seed, degrees=config.rollout.tensor_parallel)
    checkpoints.teach(made, config.scheduler.learnt_from)
    return made


def spread(steps: Sequence[tuple[Hashable, float]]) -> tuple[float | None, int, int]:
    """How much the seconds of steps differ that did the same work.

    Args:
      steps: work and seconds of each.

    Returns:
      The standard deviation of a step's seconds around the mean of its kind, as a part of that mean, pooled over kinds
      (sum of squares over the sum of the kinds' degrees of freedom); None without two steps of a kind. Then the steps
      that had others of their kind, and those kinds.
    """
    kinds: dict[Hashable, list[float]] = collections.defaultdict(list)
    for work, seconds in steps:
        kinds[work].append(seconds)
    repeated = [seconds for seconds in kinds.values() if len(seconds) > 1]
    if not repeated:
        return None, 0, 0
    count = sum(map(len, repeated))
    squares = 0.0
    for alike in repeated:
        mean = statistics.fmean(alike)
        squares += sum((seconds / mean - 1.0) ** 2 for seconds in alike)
    return math.sqrt(squares / (count - len(repeated))), count, len(repeated)
