"""The twin of a recorded run: calibrated on the first half of its steps, it predicts the second half.

The twin runs the run's own coordinator, agent loop and scheduler on the virtual clock. Its machines have costs
fitted to the first half. Its rollouts are the recorded ones, in the order of their dispatch. The second half is only
used for comparison.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_jax.coordinator import checkpoints
from libra_jax.models import rows
from libra_jax.planning.costs import calibration, measured_costs
from libra_jax.scheduling import costs as scheduling_costs
from libra_jax.scheduling import registry
from libra_jax.simulator import recording, report, world

TARGET = 0.10
"""Largest acceptable mean absolute error of a held-out step's predicted time, relative to the measured time."""

SPREADS = 1.5
"""Factor on the spread of steps that did the same work; the larger of this and `TARGET` is the target."""

LEVELLINGS = 3
"""Most comparisons of the simulated first half with the measured one, to set the level of the engines."""

LEVEL = 0.01
"""Relative difference between the two halves at which the levelling ends."""

PARTS = ("total", "rollout", "train", "sync")


@dataclass(frozen=True)
class Twin:
    """A run beside its twin.

    Attributes:
      model: the calibrated costs.
      level: factor on the fitted engine costs, from the comparison of the simulated first half with the measured one.
      measured: measured seconds of each step.
      predicted: the twin's seconds of each step.
      calibrated: number of steps, from the first, that the costs were fitted to.
      spread: relative spread of held-out steps that did the same work (`spread`); None if no two did.
      repeated: held-out steps that share their work with another step.
      kinds: number of different works among the repeated steps.
    """

    model: measured_costs.Calibration
    level: float
    measured: tuple[recording.RecordedSeconds, ...]
    predicted: tuple[recording.RecordedSeconds, ...]
    calibrated: int
    spread: float | None
    repeated: int
    kinds: int

    def error(self, part: str = "total", *, held_out: bool = True) -> float:
        """Returns the mean absolute error of a part of the steps, relative to the measured seconds."""
        chosen = slice(self.calibrated, None) if held_out else slice(self.calibrated)
        pairs = zip(self.measured[chosen], self.predicted[chosen], strict=True)
        return statistics.fmean(relative_error(getattr(m, part), getattr(p, part)) for m, p in pairs)

    @property
    def constant_error(self) -> float:
        """Error of predicting the mean step of the first half for every held-out step."""
        mean = statistics.fmean(parts.total for parts in self.measured[: self.calibrated])
        return statistics.fmean(relative_error(parts.total, mean) for parts in self.measured[self.calibrated :])

    @property
    def met(self) -> bool:
        """True if the prediction meets the target."""
        return self.error() <= target(self.spread)


def target(spread: float | None) -> float:
    """Returns the largest acceptable mean error of a prediction, given the spread of repeated steps."""
    return max(TARGET, SPREADS * (spread or 0.0))


def relative_error(measured: float, predicted: float) -> float:
    """Returns |predicted - measured| / measured."""
    # A part that took no time cannot be divided by: any predicted time for it counts as wholly wrong.
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


def calibrate(recorded: recording.Recording, steps: int) -> measured_costs.Calibration:
    """Returns costs fitted to the first `steps` steps.

    Raises:
      DataError: an instance served too little in them.
    """
    end = recorded.ends[steps - 1]
    by_degree: dict[int, dict[str, list[calibration.RequestStay]]] = {
        degree: collections.defaultdict(list) for degree in recorded.config.rollout.tensor_parallel
    }
    # Streams of later steps are left out: the twin must not know what it predicts.
    for stream in recorded.streams_of(steps):
        by_degree[recorded.degree(stream.instance)][stream.instance].append(stream)
    engines = {degree: calibration.fit_engine(list(mine.values())) for degree, mine in by_degree.items()}
    first, trainer = recorded.steps[:steps], recorded.config.trainer
    shape = rows.RowShape((trainer.row_tokens, *trainer.row_buckets), trainer.micro_batch_rows, trainer.pack)
    columns = [rows.processed_columns(step.lengths, shape) for step in first]
    return measured_costs.Calibration(
        engines=engines,
        train=calibration.fit_train(columns, [step.parts.train for step in first]),
        update=calibration.fit_update(
            [step.parts.sync for step in first], [seconds for at, seconds in recorded.loads if at <= end]
        ),
        rows=shape,
    )


def levelled(
    recorded: recording.Recording, steps: int, model: measured_costs.Calibration
) -> tuple[measured_costs.Calibration, float]:
    """Returns the model at the level at which the simulated rollout of the first `steps` steps takes the measured time,
    and the level.

    The level covers what the fit to single streams does not see: the time between turns, and steps that queue behind
    each other.
    """
    # A fixed point: a step's time is not linear in the engines' costs, since tools and queues take a part of it.
    level = 1.0
    measured = [step.parts.rollout for step in recorded.steps[:steps]]
    scaled = model
    for _ in range(LEVELLINGS):
        simulated = [parts.rollout for parts in replay(recorded, scaled, steps)]
        # The median ignores a few disturbed steps.
        factor = statistics.median(m / s for m, s in zip(measured, simulated, strict=True) if m and s)
        level *= factor
        scaled = model.scaled(dict.fromkeys(model.engines, level))
        if abs(factor - 1.0) <= LEVEL:
            break
    return scaled, level


def replay(
    recorded: recording.Recording, model: measured_costs.Calibration, steps: int
) -> tuple[recording.RecordedSeconds, ...]:
    """Returns the simulated seconds of the first `steps` steps."""
    # Evaluations and checkpoints are not in the recorded seconds, and `recording.read` takes no run that moved.
    recorded_config = recorded.config
    config = dataclasses.replace(
        recorded_config,
        steps=steps,
        warm_start=dataclasses.replace(recorded_config.warm_start, steps=0),
        evaluation=dataclasses.replace(recorded_config.evaluation, every=0),
        checkpoint=dataclasses.replace(recorded_config.checkpoint, every=0),
        planner=dataclasses.replace(recorded_config.planner, period=0),
    )
    # The run's own scheduler, with the costs that it had in the run, not with the measured ones.
    costs = scheduling_costs.LinearCosts(config.scheduler.costs)
    scheduler = registry.create(config.scheduler, costs=costs, seed=config.seed, kinds=config.rollout.kinds)
    checkpoints.teach(scheduler, config.scheduler.learnt_from)
    simulation = world.SimulationConfig(train_devices=config.trainer.devices)
    result = world.run(config, simulation, recorded, lambda costs, remaining: scheduler, model=model)
    names = ("step/seconds", "rollout/seconds", "train/seconds", "sync/seconds")
    return tuple(recording.RecordedSeconds(*(step[name] for name in names)) for step in result.steps)


def spread(steps: Sequence[tuple[Hashable, float]]) -> tuple[float | None, int, int]:
    """Measures how much the seconds of steps with the same work differ.

    Args:
      steps: work and seconds of each step.

    Returns:
      The standard deviation of a step's seconds around the mean of its kind, as a part of that mean, pooled over
      kinds (sum of squares over the sum of the kinds' degrees of freedom); None without two steps of a kind. Then
      the number of steps that share their kind, and the number of those kinds.
    """
    kinds: dict[Hashable, list[float]] = collections.defaultdict(list)
    for work, seconds in steps:
        kinds[work].append(seconds)
    repeated = [seconds for seconds in kinds.values() if len(seconds) > 1]
    if not repeated:
        return None, 0, 0
    # Each kind's mean takes a degree of freedom, so kinds of two steps do not make the spread look small.
    count = sum(map(len, repeated))
    squares = 0.0
    for alike in repeated:
        mean = statistics.fmean(alike)
        squares += sum((seconds / mean - 1.0) ** 2 for seconds in alike)
    return math.sqrt(squares / (count - len(repeated))), count, len(repeated)


FEW_STEPS = 8
"""Number of held-out steps below which their mean error says little."""


def table(twin: Twin) -> str:
    """Returns a line for each held-out step, with measured and predicted seconds of its parts; then the fitted costs,
    and how well they predict."""
    columns = [f"{part} {kind}" for part in PARTS for kind in ("s", "twin")]
    rows = [("step", *columns, "error")]
    pairs = list(zip(twin.measured, twin.predicted, strict=True))
    for number, (measured, predicted) in list(enumerate(pairs, start=1))[twin.calibrated :]:
        seconds = (getattr(parts, part) for part in PARTS for parts in (measured, predicted))
        error = (predicted.total - measured.total) / measured.total
        rows.append((str(number), *(f"{value:.3f}" for value in seconds), f"{error:+.1%}"))
    steps = len(twin.measured)
    lines = [f"calibrated on steps 1-{twin.calibrated}, predicted steps {twin.calibrated + 1}-{steps}"]
    for degree, engine in sorted(twin.model.engines.items()):
        lines.append(
            f"engine of degree {degree}: a step {1e3 * engine.step:.2f} ms + {1e6 * engine.request:.1f} us a request + "
            f"{1e6 * engine.context:.3f} us a token of context; prefill {1e6 * engine.prefill_token:.1f} us a token + "
            f"{1e6 * engine.cached_token:.1f} us a token seen before + {1e6 * engine.prefill_request:.0f} us a request "
            f"(levelled by {twin.level:.3f})"
        )
    train, update = twin.model.train, twin.model.update
    alike = "spread of steps that did the same work: "
    if twin.spread is None:
        alike += "not known, as no two of the predicted steps did"
    else:
        alike += f"{twin.spread:.1%} ({twin.repeated} predicted steps of {twin.kinds} kinds)"
    lines += [
        f"training step: {train.step:.3f} s + {1e6 * train.column:.1f} us a column; "
        f"weight update: {update.gather + update.load:.3f} s",
        "mean absolute error of the predicted steps: "
        + ", ".join(f"{part} {twin.error(part):.1%}" for part in PARTS)
        + f" (of those it was calibrated on: total {twin.error(held_out=False):.1%})",
        f"error of predicting the mean of steps 1-{twin.calibrated} for each: {twin.constant_error:.1%}",
        alike,
        f"target: an error of at most max({TARGET:.0%}, {SPREADS:g} x spread) = {target(twin.spread):.1%}: "
        + ("met" if twin.met else "NOT met")
        + f" with {twin.error():.1%}",
    ]
    if steps - twin.calibrated < FEW_STEPS:
        lines.append(
            f"This is the mean of {steps - twin.calibrated} steps, which says little: record a run of "
            f"{2 * FEW_STEPS} steps or more."
        )
    return "\n".join([*report.aligned(rows, left_columns=0), "", *lines])


def to_json(twin: Twin) -> str:
    """Returns the content of `table` as a JSON object."""
    model = twin.model
    return (
        json.dumps(
            {
                "calibrated_steps": twin.calibrated,
                "steps": [
                    {"step": number, "measured": vars(measured), "predicted": vars(predicted)}
                    for number, (measured, predicted) in enumerate(
                        zip(twin.measured, twin.predicted, strict=True), start=1
                    )
                ],
                "error": {part: twin.error(part) for part in PARTS},
                "error_of_calibrated_steps": {part: twin.error(part, held_out=False) for part in PARTS},
                "error_of_a_constant": twin.constant_error,
                "spread": twin.spread,
                "repeated_steps": twin.repeated,
                "kinds_of_steps": twin.kinds,
                "threshold": target(twin.spread),
                "met": twin.met,
                "level": twin.level,
                "engines": {str(degree): vars(engine) for degree, engine in sorted(model.engines.items())},
                "train": vars(model.train),
                "update": vars(model.update),
            },
            indent=2,
        )
        + "\n"
    )


def write_picture(twin: Twin, path: Path, title: str) -> None:
    """Draws measured and predicted seconds of each step, with a shade behind the steps that were fitted to.

    Args:
      path: file to write, .svg or .png.
    """
    numbers = range(1, len(twin.measured) + 1)
    with report.picture_axes(path, 3.0, [title]) as axes:
        axes.axvspan(0.5, twin.calibrated + 0.5, color="#eeeeee", linewidth=0, label="calibrated on")
        for part, colour in (("total", "#333333"), ("rollout", "#4c78a8"), ("train", "#54a24b")):
            axes.plot(numbers, [getattr(parts, part) for parts in twin.measured], "o", color=colour, markersize=4)
            predicted = [getattr(parts, part) for parts in twin.predicted]
            axes.plot(numbers, predicted, color=colour, linewidth=1.2, label=part)
        axes.set(xlim=(0.5, len(twin.measured) + 0.5), xlabel="training step (dots measured, lines the twin)")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("seconds")
        axes.xaxis.get_major_locator().set_params(integer=True)
