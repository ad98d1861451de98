"""Simulates a plan for some steps: the check of what `launch/plan.py` and a run's planner choose."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.planning.costs import costs
from libra_jax.planning.forecast import confusion, forecast
from libra_jax.planning.search import search
from libra_jax.scheduling import registry
from libra_jax.simulator import scripts, settings, world

if TYPE_CHECKING:
    from libra_jax.build import planned  # it imports what a run is made of, which no simulation needs

WINDOWS = 2
"""Multiples of max staleness + 1 in steps whose mean counts. The steps before them fill the slots, and those after them
empty the slots."""


@dataclass(frozen=True)
class Sampled(scripts.Workload):
    """A workload that draws its groups from a sample of rollouts.

    Attributes:
      rollouts: rollouts, in which members of a group follow each other.
      size: rollouts of a group.
    """

    rollouts: Sequence[scripts.Script]
    size: int

    def script(self, task_index: int, sample: int) -> scripts.Script:
        groups = max(1, len(self.rollouts) // self.size)
        group = int((task_index * confusion.GOLDEN) % 1.0 * groups)
        return self.rollouts[(group * self.size + sample) % len(self.rollouts)]


@dataclass(frozen=True)
class Trial:
    """A split with the step that a simulation measured.

    Attributes:
      split: the split, with its predicted step.
      simulated_seconds: mean seconds of a simulated step.
    """

    split: search.Split
    simulated_seconds: float

    def line(self) -> str:
        """Returns a line that compares both."""
        instances = ", ".join(f"{one.count} of degree {one.tensor_parallel}" for one in self.split.rollout)
        off = self.split.step_seconds / self.simulated_seconds - 1.0
        return (
            f"{self.split.train.devices} train, {instances}: {self.split.step_seconds:.1f} s predicted, "
            f"{self.simulated_seconds:.1f} s simulated ({off:+.1%})"
        )


@dataclass(frozen=True)
class Subject:
    """The run whose steps are simulated, apart from its plan.

    Attributes:
      run: its configuration.
      model: costs of the hardware sheet.
      slots: slots of an instance, by degree.
      requests: rollouts of a training step.
      rollouts: a sample of rollouts, in which members of a group follow each other.
      kv_cache: where contexts go that leave a cache (`simulation.kv_cache`).
    """

    run: config_lib.RunConfig
    model: costs.CostModel
    slots: Mapping[int, int]
    requests: int
    rollouts: Sequence[scripts.Script] = ()
    kv_cache: str = "recompute"

    @classmethod
    def from_config(cls, run: config_lib.RunConfig, setting: forecast.Setting) -> Subject:
        """Returns the subject of a run, without rollouts.

        Raises:
          ConfigError: the run has measured costs or a context axis, which no simulation has.
        """
        config_lib.check(
            setting.profile is None,
            "planner.simulate_top",
            "simulations take the costs of the sheet, and this plan has those of planner.profile; set it to 0",
        )
        config_lib.check(
            run.trainer.context == 1,
            "planner.simulate_top",
            f"simulations have no context axis, and trainer.context is {run.trainer.context}; set it to 0",
        )
        kv_cache = run.simulation.kv_cache if isinstance(run, settings.SimulatedRun) else "recompute"
        slots = dict(zip(setting.degrees, setting.slots, strict=True))
        return cls(run, setting.model, slots, setting.requests, kv_cache=kv_cache)


def of_splits(case: planned.Case, splits: Sequence[search.Split]) -> list[Trial]:
    """Simulates splits of a case; returns them with the shortest simulated step first.

    Raises:
      ConfigError: the case has measured costs or a context axis, which no simulation has.
    """
    subject = dataclasses.replace(Subject.from_config(case.run, case.setting), rollouts=case.work.scripts)
    trials = [Trial(split, step_seconds(subject, split.plan)) for split in splits]
    return sorted(trials, key=lambda trial: trial.simulated_seconds)


def step_seconds(subject: Subject, plan: protocols.Plan) -> float:
    """Returns the mean seconds of a simulated step under a plan, with all slots in use."""
    base = subject.run
    degrees = tuple(one.tensor_parallel for one in plan.rollout for _ in range(one.count))
    window = base.coordinator.max_staleness + 1
    size = base.coordinator.group_size
    # What a plan does not read keeps its default: an agent, rewards and checkpoints are no part of the simulation.
    run = config_lib.RunConfig(
        name=base.name,
        steps=window * (1 + WINDOWS) + base.coordinator.max_staleness,
        seed=base.seed,
        algorithm=config_lib.AlgorithmConfig(objective=base.algorithm.objective),
        coordinator=config_lib.CoordinatorConfig(
            groups_per_step=max(1, subject.requests // size), group_size=size, max_staleness=window - 1
        ),
        model=dataclasses.replace(base.model, path="", preset=config_lib.ModelConfig().preset),
        rollout=config_lib.RolloutConfig(
            tensor_parallel=degrees,
            max_context=base.rollout.max_context,
            max_tokens=base.rollout.max_tokens,
            health_seconds=60.0,
            stream_interval=1_000,
        ),
        scheduler=dataclasses.replace(
            base.scheduler, max_remaining_tokens=tuple(one.max_remaining_tokens for one in plan.rollout[:-1])
        ),
        trainer=dataclasses.replace(base.trainer, data=1, fsdp=1, tensor=1),
        task=config_lib.TaskConfig(max_turns=10_000, tool_seconds=3_600.0),
        deadlines=config_lib.DeadlineConfig(first_token=36_000.0, train_step=36_000.0),
        checkpoint=config_lib.CheckpointConfig(every=0),
        telemetry=config_lib.TelemetryConfig(console=False),
    )
    mesh = plan.data, plan.fsdp, plan.tensor
    simulation = world.SimulationConfig(
        train_devices=plan.train_devices,
        train_mesh=mesh,
        slots=tuple(subject.slots[degree] for degree in degrees),
        kv_cache=subject.kv_cache,
        hardware=subject.model.sheet.name,
    )
    result = world.run(
        run,
        simulation,
        Sampled(subject.rollouts, size),
        lambda costs, remaining: registry.create(
            run.scheduler, costs=costs, remaining=remaining, seed=run.seed, kinds=run.rollout.kinds
        ),
        model=subject.model,
    )
    return statistics.fmean(result.step_seconds[window : window * (1 + WINDOWS)])
