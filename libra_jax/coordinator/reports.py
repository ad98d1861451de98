"""What a training step reports: its metrics and its lines of the trace."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import dispatch, routing

MOST_TOOLS = 16
"""Tools whose calls a step reports apart."""

OTHER_TOOLS = "(other)"


@dataclass
class StepTimes:
    """Seconds of one training step, and of what came with it, on the event loop's clock.

    Attributes:
      step: from the end of the step before to the end of this one, an evaluation after it included.
      rollout: in which at least one group ran.
      wait: the trainer waited for its batch.
      train: the trainer's step.
      sync: publication of the new weights.
      checkpoint: spent in checkpoints since the step before.
    """

    step: float = 0.0
    rollout: float = 0.0
    wait: float = 0.0
    train: float = 0.0
    sync: float = 0.0
    checkpoint: float = 0.0


@dataclass
class StepReport:
    """Everything known about one training step.

    Attributes:
      version: the version that trained.
      groups: what it trained on.
      trainer: the trainer's own metrics.
      counts: what the dispatcher did since the step before.
      routing: what its decisions came to, likewise.
      replaced: groups replaced since the step before, by reason.
      replaced_tokens: tokens generated in them.
      task: says which rollouts the trainer masks (`TaskConfig.masks`).
      voids: attempts that a crash of the environment voided since the step before, by prompt.
      evaluation: what the evaluation after the step reported, if there was one.
      plan: what the planner had predicted, if there is one.
    """

    version: int
    groups: Sequence[protocols.Group]
    trainer: Mapping[str, float]
    times: StepTimes = field(default_factory=StepTimes)
    counts: dispatch.Counts = field(default_factory=dispatch.Counts)
    routing: routing.RoutingCounts = field(default_factory=routing.RoutingCounts)
    replaced: Mapping[str, int] = field(default_factory=dict)
    replaced_tokens: int = 0
    task: configuration.TaskConfig = field(default_factory=configuration.TaskConfig)
    voids: Mapping[str, int] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    plan: Mapping[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """The step's scalars. `policy_version` is the version that the step made, and that was evaluated after it."""
        trajectories = [trajectory for group in self.groups for trajectory in group.trajectories]
        rewards = rewards_of(trajectories)
        staleness = [self.version - group.dispatch_version for group in self.groups]
        generated = [trajectory.generated_tokens for trajectory in trajectories]
        masked = [self.task.masks(trajectory.finish) for trajectory in trajectories]
        counts, times = self.counts, self.times
        return {
            **self.trainer,
            "policy_version": self.version + 1,
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "tokens_per_second": counts.tokens / times.step if times.step > 0 else 0.0,
            "tokens/generated": counts.tokens,
            "tokens/trained": sum(count for count, out in zip(generated, masked, strict=True) if not out),
            "rollout/masked": statistics.fmean(masked),
            "tokens/mean": statistics.fmean(generated),
            "turns/mean": statistics.fmean(len(trajectory.turns) for trajectory in trajectories),
            "staleness/mean": statistics.fmean(staleness),
            "staleness/max": max(staleness),
            "step/seconds": times.step,
            "rollout/seconds": times.rollout,
            "rollout/wait_seconds": times.wait,
            "train/seconds": times.train,
            "sync/seconds": times.sync,
            "checkpoint/seconds": times.checkpoint,
            "coordinator/seconds_per_request": counts.seconds / counts.requests if counts.requests else 0.0,
            "rollout/resumed": counts.resumed,
            **self.routing.metrics(),
            "groups/replaced": sum(self.replaced.values()),
            **{f"groups/replaced_{reason}": count for reason, count in self.replaced.items()},
            "tokens/replaced": self.replaced_tokens,
            "voids/attempts": sum(self.voids.values()),
            "voids/most_of_a_prompt": max(self.voids.values(), default=0),
            **{f"finish/{name}": share for name, share in _finishes(trajectories).items()},
            **mean_metrics(trajectories),
            **tool_metrics(trajectories),
            **self.plan,
            **self.evaluation,
        }

    def trace(self) -> list[dict[str, Any]]:
        """One record of `trace.jsonl` for each trajectory."""
        return [
            trace_record(trajectory, group, self.version + 1)
            for group in self.groups
            for trajectory in group.trajectories
        ]


def rewards_of(trajectories: Iterable[protocols.Trajectory]) -> list[float]:
    """Rewards of finished attempts."""
    return [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]


def _finishes(trajectories: Sequence[protocols.Trajectory]) -> dict[str, float]:
    """The share of attempts that ended so, for each way to end."""
    counts = collections.Counter(trajectory.finish for trajectory in trajectories)
    return {name: counts[name] / len(trajectories) for name in protocols.FINISHES}


def mean_metrics(trajectories: Iterable[protocols.Trajectory]) -> dict[str, float]:
    """Mean of each number the attempts reported, over those that reported it: `agent/...`, and `reward.../...`."""
    values: dict[str, list[float]] = collections.defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values[name if _of_reward(name) else f"agent/{name}"].append(value)
    return {name: statistics.fmean(numbers) for name, numbers in sorted(values.items())}


def _of_reward(name: str) -> bool:
    return name.startswith("reward") and "/" in name


def tool_metrics(trajectories: Iterable[protocols.Trajectory]) -> dict[str, float]:
    """Of each tool `calls`, `failures` and `timeouts`, and means of its `seconds` and `payload_tokens` a call.

    They are `tool/<name>/...`. Beyond the `MOST_TOOLS` most called, tools are counted together as `OTHER_TOOLS`: what a
    policy calls at once is a name of its own, and there may be any number of those.
    """
    calls: dict[str, list[protocols.Turn]] = collections.defaultdict(list)
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if turn.tool is not None:
                calls[turn.tool].append(turn)
    ordered = sorted(calls, key=lambda name: (-len(calls[name]), name))
    for name in ordered[MOST_TOOLS:]:
        calls.setdefault(OTHER_TOOLS, []).extend(calls.pop(name))
    values: dict[str, float] = {}
    for name, turns in sorted(calls.items()):
        values |= {
            f"tool/{name}/calls": len(turns),
            f"tool/{name}/failures": sum(turn.status == "failure" for turn in turns),
            f"tool/{name}/timeouts": sum(turn.status == "timeout" for turn in turns),
            f"tool/{name}/seconds": statistics.fmean(turn.tool_seconds for turn in turns),
            f"tool/{name}/payload_tokens": statistics.fmean(turn.payload_tokens for turn in turns),
        }
    return values


def trace_record(trajectory: protocols.Trajectory, group: protocols.Group, step: int) -> dict[str, Any]:
    """A trajectory as the simulator replays it; `policy_version` is that of its group's first dispatch."""
    return {
        "trajectory_id": trajectory.trajectory_id,
        "prompt_id": trajectory.prompt_id,
        "prompt_tokens": trajectory.prompt_tokens,
        "turns": [_turn_record(turn) for turn in trajectory.turns],
        "group_id": group.group_id,
        "step": step,
        "policy_version": group.dispatch_version,
        "reward": trajectory.reward,
        "finish": trajectory.finish,
        "start_seconds": trajectory.start_seconds,
    }


def _turn_record(turn: protocols.Turn) -> dict[str, Any]:
    """Returns a turn as the trace holds it; `moves` is there only if the request moved, which is rare."""
    record = dict(vars(turn))
    moves = record.pop("moves")
    if moves:
        record["moves"] = [
            {
                "source": move.source,
                "target": move.target,
                "reason": move.reason,
                "expected_gain": move.expected_gain,
            }
            for move in moves
        ]
    return record
