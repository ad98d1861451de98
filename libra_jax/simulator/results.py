"""The results of a simulated run: what is recorded while it runs, and the totals at its end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra_jax import config as config_lib
from libra_jax.coordinator import run as coordinator
from libra_jax.simulator import engine, trainer, trajectory
from libra_jax.telemetry import memory
from libra_jax.telemetry.report import timeline


@dataclass(frozen=True)
class SimulationResult:
    """The results of a simulated run. Seconds are virtual, except `wall_seconds`.

    Attributes:
      seconds: from the first dispatch to the end of the last step.
      tokens_per_second: tokens generated in everything that was dispatched, over `seconds`.
      step_seconds: each training step's time, from the end of the step before.
      train_utilisation: share of `seconds` in which the trainer trained.
      rollout_utilisation: share of `seconds` in which instances ran steps, weighted by their devices.
      generated_tokens: tokens sampled in everything that was dispatched.
      moves: requests that began to be served by another instance than before.
      moved_tokens: context tokens of those requests.
      migrated_token_fraction: `moved_tokens` / `generated_tokens`.
      one_shot_routing_accuracy: share of rollouts with a tool return whose first decision after the return named the
        bucket of their true remaining length; None if no rollout had a tool return.
      prefilled_tokens: tokens prefilled.
      fetched_tokens: tokens whose keys and values came from host memory.
      kv_recompute_token_fraction: share of prefilled tokens whose keys and values had been computed before.
      preemptions: requests that lost their place on an instance for lack of cache.
      staleness_max: largest number of versions between a group's dispatch and its training.
      trained_trajectories: distinct rollouts trained.
      trained_tokens_mean: mean generated tokens of a trained rollout.
      replaced_trajectories: rollouts of groups that were replaced.
      lost_trajectories: rollouts that were dispatched, and neither trained nor replaced.
      duplicated_trajectories: rollouts trained more than once.
      steps: each step's metrics, as the coordinator reported them.
      decisions: the planner's looks, as the coordinator reported them.
      transitions: switches and resizes of workers, as the coordinator reported them.
      pool_sizes: devices of each pool, at each change.
      notes: the coordinator's sentences.
      wall_seconds: real time that the simulation took.
    """

    seconds: float
    tokens_per_second: float
    step_seconds: tuple[float, ...]
    train_utilisation: float
    rollout_utilisation: float
    generated_tokens: int
    moves: int
    moved_tokens: int
    migrated_token_fraction: float
    one_shot_routing_accuracy: float | None
    prefilled_tokens: int
    fetched_tokens: int
    kv_recompute_token_fraction: float
    preemptions: int
    staleness_max: int
    trained_trajectories: int
    trained_tokens_mean: float
    replaced_trajectories: int
    lost_trajectories: int
    duplicated_trajectories: int
    steps: tuple[Mapping[str, float], ...]
    decisions: tuple[Mapping[str, Any], ...]
    transitions: tuple[Mapping[str, Any], ...]
    pool_sizes: tuple[timeline.PoolSizes, ...]
    notes: tuple[str, ...]
    wall_seconds: float

    def step_summary(self) -> dict[str, float]:
        """Returns mean and quantiles of the step times (nearest rank)."""
        ordered = sorted(self.step_seconds)
        rank = {f"p{share}": ordered[max(0, -(-len(ordered) * share // 100) - 1)] for share in (50, 90, 99)}
        return {"mean": statistics.fmean(ordered), **rank}


class StepRecorder(memory.MemoryRecorder):
    """Keeps only what a `SimulationResult` is made of, because a simulation has very many spans and rollouts."""

    def span(self, track: str, name: str, start: float, end: float, arguments: Mapping[str, Any] | None = None) -> None:
        """Drops the span."""

    def trajectory(self, record: Mapping[str, Any]) -> None:
        """Drops the record."""

    def sample(self, record: Mapping[str, Any]) -> None:
        """Drops the record: simulated tokens have no text."""

    def status(self, worker: str, text: str) -> None:
        """Drops the status."""


class TraceRecorder(StepRecorder):
    """Keeps the records of trained rollouts, too.

    Attributes:
      trace: records in the order of training (`protocols.TraceRecord`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[Mapping[str, Any]] = []

    def trajectory(self, record: Mapping[str, Any]) -> None:
        """Keeps the record."""
        self.trace.append(record)


def from_run(
    config: config_lib.RunConfig,
    summary: coordinator.RunSummary,
    recorder: StepRecorder,
    book: trajectory.Book,
    log: trainer.TrainingLog,
    fleet: engine.Fleet,
    wall: float,
) -> SimulationResult:
    """Returns the results of a run.

    Args:
      summary: the coordinator's summary.
      recorder: the records of the run.
      log: what the trainer was given.
      wall: seconds of real time that the run took.
    """
    steps = [scalars for _, scalars in recorder.steps]
    step_seconds = tuple(step["step/seconds"] for step in steps)
    seconds = sum(step_seconds)
    generated = int(sum(step["tokens/generated"] for step in steps))
    moved = int(sum(step["routing/moved_tokens"] for step in steps))
    # Each step's accuracy counts by the number of its judged decisions.
    judged = sum(step.get("routing/judged", 0.0) for step in steps)
    right = sum(step.get("routing/judged", 0.0) * step.get("routing/one_shot_accuracy", 0.0) for step in steps)
    counters = fleet.counters
    prefilled = sum(count.prefilled for count in counters)
    replaced = summary.replaced_rollouts
    return SimulationResult(
        seconds=seconds,
        tokens_per_second=generated / seconds,
        step_seconds=step_seconds,
        train_utilisation=log.busy_seconds / seconds,
        rollout_utilisation=fleet.busy_share(seconds),
        generated_tokens=generated,
        moves=int(sum(step["routing/moves"] for step in steps)),
        moved_tokens=moved,
        migrated_token_fraction=moved / generated,
        one_shot_routing_accuracy=right / judged if judged else None,
        prefilled_tokens=prefilled,
        fetched_tokens=sum(count.fetched for count in counters),
        kv_recompute_token_fraction=sum(count.prefilled_again for count in counters) / prefilled,
        preemptions=sum(count.preempted for count in counters),
        staleness_max=max(log.staleness),
        trained_trajectories=len(log.trained),
        trained_tokens_mean=statistics.fmean(step["tokens/mean"] for step in steps),
        replaced_trajectories=replaced,
        lost_trajectories=book.trajectory_count - len(log.trained) - replaced,
        duplicated_trajectories=sum(count > 1 for count in log.trained.values()),
        steps=tuple(steps),
        decisions=tuple(recorder.decisions),
        transitions=tuple(recorder.transitions),
        pool_sizes=tuple(recorder.pool_sizes),
        notes=tuple(recorder.notes),
        wall_seconds=wall,
    )
