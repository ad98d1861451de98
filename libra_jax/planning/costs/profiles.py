"""Measurements of one model on one machine, fitted so that plans can use them, and kept in a file.

Rollout: an engine of each degree is fitted to its streams of tokens (`calibration.fit_engine`). Its level is set so
that `pipeline` predicts the measured time of whole steps. Training: the coefficients that `meshes` uses are fitted to
steps on the measured meshes. Weight sync, and time that belongs to no stage: medians.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.planning.costs import calibration, costs, hardware, measured_costs
from libra_jax.planning.forecast import meshes, pipeline, serving
from libra_jax.utils import checksums

KEPT_FILE = "planner_profile.json"
"""File name of a run's own copy, in its workdir."""

SHARES = ("train_flops_share", "large_message_share")
"""Coefficients of training that are shares of a peak."""

SECONDS = ("train_overhead", "micro_batch_overhead", "large_message_latency")
"""Coefficients of training that are times."""

ROUNDS, CLOSE = 20, 1e-4
"""Most rounds in which a fit is repeated around its last result, and the relative change at which the rounds end."""

NUDGE = 1e-3
"""Change of a coefficient by which its effect is found, relative or in seconds."""


@dataclass(frozen=True)
class MeasuredStep:
    """A measured training step.

    Attributes:
      mesh: (data, fsdp, tensor) of the trainer.
      trainer: its rows.
      lengths: tokens of each trained sequence.
      demand: demand of its requests on rollout, in the order of their start.
      degree: degree of the instance that served them.
      slots: slots of that instance.
      seconds: seconds of its stages.
    """

    mesh: tuple[int, int, int]
    trainer: meshes.TrainerProperties
    lengths: tuple[int, ...]
    demand: serving.Demand
    degree: int
    slots: int
    seconds: Stages


@dataclass(frozen=True)
class Stages:
    """Seconds of a training step whose stages follow each other.

    Attributes:
      rollout: seconds of its requests.
      train: seconds of the trainer's step.
      sync: seconds of the weight sync.
      total: seconds of the whole step.
    """

    rollout: float
    train: float
    sync: float
    total: float


@dataclass(frozen=True)
class Profile:
    """A profile of measurements; see the module's docstring.

    Attributes:
      sheet: sheet of the machine; `coefficients` are shares of its peaks.
      model: the model's config.json.
      coefficients: coefficients with fitted values for training; the rest are the sheet's defaults.
      engines: costs of each measured degree, at its level.
      sync: seconds of a weight sync.
      between: seconds of a step that belong to no stage.
      errors: mean relative error of each of `Stages` on steps that were not fitted to; empty before it is known,
        never empty in a file.
    """

    sheet: hardware.HardwareSheet
    model: Mapping[str, Any]
    coefficients: costs.Coefficients
    engines: Mapping[int, measured_costs.EngineCosts]
    sync: float
    between: float
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def besides(self) -> float:
        """Seconds of a step in which nothing trains; at max staleness 0 nothing rolls out either."""
        return self.sync + self.between

    def rollout(self, model: costs.CostModel) -> measured_costs.MeasuredEngines:
        """Returns the costs of instances, with the cache sizes of the sheet."""
        return measured_costs.MeasuredEngines(
            self.engines, cache_tokens={degree: model.kv_tokens(degree) for degree in self.engines}
        )

    def cost_model(self, model: costs.CostModel) -> costs.CostModel:
        """Returns `model` with the measured machine's sheet and coefficients.

        Raises:
          ConfigError: it is another model, or other hardware.
        """
        here, there = (
            f"{sheet.name} of {sheet.devices_per_node} cores" if sheet.name == hardware.THIS_MACHINE else sheet.name
            for sheet in (model.sheet, self.sheet)
        )
        if here != there:
            raise protocols.ConfigError(
                f"config.planner.profile: it was measured on {there}, and this run is planned for {here}; record runs "
                "here (launch/calibrate.py)"
            )
        if model_config.to_hf(model.shape) != self.model:
            raise protocols.ConfigError(
                "config.planner.profile: it was measured with a model of another shape than this run's; record runs of "
                "this one (launch/calibrate.py)"
            )
        return dataclasses.replace(model, sheet=self.sheet, coefficients=self.coefficients)

    def measured(self, degrees: Sequence[int]) -> tuple[int, ...]:
        """Returns those of `degrees` that were measured.

        Raises:
          ConfigError: none was measured.
        """
        measured_degrees = tuple(degree for degree in degrees if degree in self.engines)
        if not measured_degrees:
            raise protocols.ConfigError(
                f"config.planner.profile: instances of degree {', '.join(map(str, sorted(self.engines)))} were "
                f"measured, and plans may use {', '.join(map(str, degrees))} (planner.degrees)"
            )
        return measured_degrees

    def predict(self, model: costs.CostModel, step: MeasuredStep) -> Stages:
        """Predicts a step by the profile, its stages one after another."""
        train = meshes.Training(self.cost_model(model), step.lengths, step.trainer).seconds(*step.mesh)
        rollout = rollout_seconds(self.rollout(model), step)
        return Stages(rollout, train, self.sync, rollout + train + self.besides)


def fit(
    model: costs.CostModel,
    steps: Sequence[MeasuredStep],
    by_degree: Mapping[int, Sequence[Sequence[calibration.RequestStay]]],
) -> Profile:
    """Fits the profile of these steps.

    Args:
      model: cost model of the machine's sheet; coefficients that are not fitted keep its values.
      steps: measured steps, their stages one after another.
      by_degree: the streams of each instance of each degree, in the same steps.

    Raises:
      DataError: an engine of some degree served too little to be fitted.
    """
    engines = {}
    for degree, instances in sorted(by_degree.items()):
        try:
            engines[degree] = calibration.fit_engine(instances)
        except protocols.DataError as error:
            raise protocols.DataError(f"instances of degree {degree}: {error}") from error
    engines = {
        degree: levelled(engine, [step for step in steps if step.degree == degree], model.kv_tokens(degree))
        for degree, engine in engines.items()
    }
    between = [step.seconds.total - step.seconds.rollout - step.seconds.train - step.seconds.sync for step in steps]
    return Profile(
        model.sheet,
        model_config.to_hf(model.shape),
        fit_training(model, steps),
        engines,
        statistics.median(step.seconds.sync for step in steps),
        max(0.0, statistics.median(between)),
    )


def levelled(
    engine: measured_costs.EngineCosts, steps: Sequence[MeasuredStep], cache_tokens: int
) -> measured_costs.EngineCosts:
    """Scales the engine so that the median step's rollout takes its measured time.

    Only part of a rollout's time grows with the engine's, because tool times stay. So the factor is approached in
    rounds.

    Args:
      engine: fitted costs.
      steps: measured steps, all on instances of one degree.
      cache_tokens: tokens that an instance's cache holds, as when the profile is used.
    """
    for _ in range(ROUNDS):
        engines = measured_costs.MeasuredEngines(
            {step.degree: engine for step in steps}, cache_tokens={step.degree: cache_tokens for step in steps}
        )
        factor = statistics.median(step.seconds.rollout / rollout_seconds(engines, step) for step in steps)
        engine = engine.scaled(factor)
        if abs(factor - 1.0) <= CLOSE:
            break
    return engine


def fit_training(model: costs.CostModel, steps: Sequence[MeasuredStep]) -> costs.Coefficients:
    """Fits `SHARES` and `SECONDS` to the measured training steps; other coefficients keep the model's values.

    Shares stay at 1 or below and times at 0 or above. A coefficient that has no effect on these steps keeps the
    model's value. Relative errors are fitted by `calibration.robust_fit`, with costs linearised around the last result.
    If nothing overlaps, costs are linear in times and inverse shares, so the second round changes nothing.
    """
    trainings = [meshes.Training(model, step.lengths, step.trainer) for step in steps]
    measured = np.array([step.seconds.train for step in steps])

    def ratios(values: calibration.Values) -> calibration.Values:
        changed = dataclasses.replace(model, coefficients=_coefficients(model.coefficients, values))
        seconds = [one.with_costs(changed).seconds(*step.mesh) for one, step in zip(trainings, steps, strict=True)]
        # Ratios, so that short steps count as much as long ones.
        return np.array(seconds) / measured

    # The fitted values are never negative: how much a share's inverse exceeds 1, and times.
    shares = [1.0 / getattr(model.coefficients, name) - 1.0 for name in SHARES]
    values = np.array([*shares, *(getattr(model.coefficients, name) for name in SECONDS)])
    for _ in range(ROUNDS):
        here, before = ratios(values), values
        slopes = np.stack([(ratios(values + nudge) - here) / NUDGE for nudge in NUDGE * np.eye(len(values))], axis=1)
        # A coefficient without effect would make the fit singular, so it keeps its value.
        has_effect = np.abs(slopes).max(axis=0) > 0.0
        values = np.where(has_effect, 0.0, before)
        values[has_effect] = calibration.robust_fit(
            slopes[:, has_effect], 1.0 - here + slopes[:, has_effect] @ before[has_effect]
        )
        if np.allclose(values, before, rtol=CLOSE, atol=CLOSE * NUDGE):
            break
    return _coefficients(model.coefficients, values)


def _coefficients(coefficients: costs.Coefficients, values: calibration.Values) -> costs.Coefficients:
    # Costs are linear in a share's inverse, and the inverse less 1 keeps the share at 1 or below.
    shares = {name: 1.0 / (1.0 + float(value)) for name, value in zip(SHARES, values[: len(SHARES)], strict=True)}
    times = {name: float(value) for name, value in zip(SECONDS, values[len(SHARES) :], strict=True)}
    return dataclasses.replace(coefficients, **shares, **times)  # type: ignore[arg-type]


def rollout_seconds(engines: costs.RolloutCosts, step: MeasuredStep) -> float:
    """Returns the predicted seconds of a measured step's requests."""
    # At max staleness 0, because the measured stages followed each other.
    pools = serving.Pools(engines, step.demand, {step.degree: step.slots}, room=0.0, pauses={step.degree: 0.0})
    rules = pipeline.Cycle(1, len(step.demand), 0, 0.0)
    requests = [number % rules.size for number in range(rules.requests)]
    return pipeline.step_seconds([pools.pool(step.degree, 1)], requests, [-1] * len(requests), rules)


def write(profile: Profile, path: Path) -> None:
    """Writes a profile as JSON.

    Raises:
      OSError: it cannot be written.
    """
    path.write_text(checksums.indented(dataclasses.asdict(profile)))


def read(path: Path) -> Profile:
    """Reads the profile in a file of `write`.

    Raises:
      DataError: the file is missing, or is no such profile; the message says what is wrong with it.
    """
    try:
        document = checksums.read_object(path)
        return Profile(
            hardware.HardwareSheet(**document["sheet"]),
            dict(document["model"]),
            costs.Coefficients(**document["coefficients"]),
            {int(degree): measured_costs.EngineCosts(**values) for degree, values in document["engines"].items()},
            float(document["sync"]),
            float(document["between"]),
            {stage: float(document["errors"][stage]) for stage in ("rollout", "train", "sync", "total")},
        )
    except OSError as error:
        raise protocols.DataError(
            f"config.planner.profile: {path} cannot be read ({error.strerror or error}); launch/calibrate.py writes one"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, protocols.ConfigError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise protocols.DataError(
            f"config.planner.profile: {path} is no profile of launch/calibrate.py ({problem})"
        ) from error
