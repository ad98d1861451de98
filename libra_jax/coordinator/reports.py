"""Builds the report of a training step, and notes steps without anything to learn from."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import routing

MOST_TOOLS = 16
"""Number of tools that a step reports one by one."""

OTHER_TOOLS = "(other)"


@dataclass
class StepTimes:
    """Seconds of one training step and its accompanying work, on the event loop's clock.

    Attributes:
      step: seconds from the end of the step before to the end of this step, including an evaluation after it.
      rollout: seconds in which at least one group ran.
      wait: seconds in which the trainer waited for its batch, without those in which it had begun on it.
      train: seconds of the trainer's step, with those in which it had begun on the first groups.
      ahead: seconds of `train` before the batch was complete.
      sync: seconds of the weight sync.
      checkpoint: seconds spent on checkpoints since the step before.
    """

    step: float = 0.0
    rollout: float = 0.0
    wait: float = 0.0
    train: float = 0.0
    ahead: float = 0.0
    sync: float = 0.0
    checkpoint: float = 0.0


@dataclass
class StepReport:
    """All measurements of one training step.

    Attributes:
      version: the version that trained.
      trainer: the trainer's own metrics.
      begun_groups: number of the groups that the trainer began on before the batch was complete.
      sync_bytes: bytes that each engine loaded in the weight sync after the step.
      sync_paused: seconds for which an engine stopped in it, a mean.
      sync_sent: bytes that weight relays sent to other hosts in it, and bytes of the chunks that these brought.
      streams: counts of the streams since the step before.
      scheduling_seconds: seconds of scheduling decisions since the step before.
      routing: counts of routing since the step before.
      replaced: number of groups replaced since the step before, by reason.
      replaced_tokens: tokens generated in replaced groups.
      task: says which rollouts the trainer masks (`TaskConfig.masks`).
      voids: number of rollouts that a crash of the environment voided since the step before, by prompt.
      evaluation: metrics of the evaluation after the step, if it took place.
      replay: numbers of what is stored for replays; empty if the run replays nothing.
      plan: the planner's metrics, including its prediction of the step; empty without a planner.
      peak_flops: peak FLOP/s of one of the trainer's devices; None if unknown.
      rollout_devices: devices of the serving engines at the step's end.
    """

    version: int
    groups: Sequence[protocols.Group]
    trainer: Mapping[str, float]
    times: StepTimes = field(default_factory=StepTimes)
    begun_groups: int = 0
    sync_bytes: int = 0
    sync_paused: float = 0.0
    sync_sent: tuple[int, int] = (0, 0)
    streams: protocols.StreamCounts = field(default_factory=protocols.StreamCounts)
    scheduling_seconds: float = 0.0
    routing: routing.RoutingCounts = field(default_factory=routing.RoutingCounts)
    replaced: Mapping[str, int] = field(default_factory=dict)
    replaced_tokens: int = 0
    task: config_lib.TaskConfig = field(default_factory=config_lib.TaskConfig)
    voids: Mapping[str, int] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    replay: Mapping[str, float] = field(default_factory=dict)
    plan: Mapping[str, float] = field(default_factory=dict)
    peak_flops: float | None = None
    rollout_devices: int = 0

    def metrics(self) -> dict[str, float]:
        """Returns the step's scalars. `policy_version` is the version that the step produced."""
        trajectories = [trajectory for group in self.groups for trajectory in group.rollouts]
        rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
        sizes = [len(group.rollouts) for group in self.groups]
        staleness = [self.version - group.dispatch_version for group in self.groups]
        generated = [trajectory.sampled_tokens for trajectory in trajectories]
        masked = [self.task.masks(trajectory.finish) for trajectory in trajectories]
        counts, times, (sent, whole_bytes) = self.streams, self.times, self.sync_sent
        finishes = collections.Counter(trajectory.finish for trajectory in trajectories)
        rate = counts.tokens / times.step if times.step > 0 else 0.0
        return {
            **self.trainer,
            "policy_version": self.version + 1,
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "tokens_per_second": rate,
            **({"rollout/tokens_per_second_per_device": rate / devices} if (devices := self.rollout_devices) else {}),
            **training_speed(self.trainer, times.train, self.peak_flops),
            "tokens/generated": counts.tokens,
            "tokens/trained": sum(count for count, out in zip(generated, masked, strict=True) if not out),
            "rollout/masked": statistics.fmean(masked),
            "tokens/mean": statistics.fmean(generated),
            "turns/mean": statistics.fmean(len(trajectory.all_turns) for trajectory in trajectories),
            "segments/mean": statistics.fmean(len(trajectory.segments) for trajectory in trajectories),
            "staleness/mean": statistics.fmean(staleness),
            "staleness/max": max(staleness),
            "step/seconds": times.step,
            "rollout/seconds": times.rollout,
            "rollout/wait_seconds": times.wait,
            "train/seconds": times.train,
            "sync/seconds": times.sync,
            "sync/bytes": self.sync_bytes,
            "sync/paused_seconds": self.sync_paused,
            **({"sync/sent_bytes": sent, "sync/sent_share": sent / whole_bytes} if whole_bytes else {}),
            "checkpoint/seconds": times.checkpoint,
            "coordinator/seconds_per_request": (self.scheduling_seconds / counts.requests if counts.requests else 0.0),
            "rollout/resumed": counts.resumed,
            **routing.metrics(self.routing, counts),
            "groups/rollouts_least": min(sizes),
            "groups/rollouts_most": max(sizes),
            "groups/begun": self.begun_groups,
            "groups/older": sum(versions > 0 for versions in staleness),
            "groups/replaced": sum(self.replaced.values()),
            **{f"groups/replaced_{reason}": count for reason, count in self.replaced.items()},
            "tokens/replaced": self.replaced_tokens,
            "voids/rollouts": sum(self.voids.values()),
            "voids/most_of_a_prompt": max(self.voids.values(), default=0),
            **{f"finish/{name}": finishes[name] / len(trajectories) for name in protocols.FINISHES},
            **mean_metrics(trajectories),
            **tool_metrics(trajectories),
            **self._replayed(),
            **self.plan,
            **self.evaluation,
        }

    def _replayed(self) -> dict[str, float]:
        """Returns the metrics of replayed rollouts, which count nowhere else; empty if the run replays nothing."""
        if not self.replay:
            return {}
        replayed = [trajectory for group in self.groups for trajectory in group.trajectories if trajectory.replayed]
        sampled = [
            [version for segment in item.segments for version in segment.policy_versions if version >= 0]
            for item in replayed
        ]
        return {
            **self.replay,
            "replay/rollouts": len(replayed),
            "replay/groups": statistics.fmean(len(group.trajectories) > len(group.rollouts) for group in self.groups),
            "replay/tokens": sum(map(len, sampled)),
            **({"replay/staleness_max": self.version - min(map(min, sampled))} if replayed else {}),
        }


def training_speed(trainer: Mapping[str, float], seconds: float, peak_flops: float | None) -> dict[str, float]:
    """Returns the speed of a training step: tokens a second, also for each device, and the model FLOPs utilisation.

    Args:
      trainer: the trainer's metrics of the step.
      peak_flops: peak FLOP/s of a device; None leaves the utilisation out.
    """
    # Simulated trainers report none of these.
    if not {"tokens/processed", "train/devices", "train/flops"} <= set(trainer) or seconds <= 0:
        return {}
    rate = trainer["tokens/processed"] / seconds
    speed = {
        "train/tokens_per_second": rate,
        "train/tokens_per_second_per_device": rate / trainer["train/devices"],
    }
    if peak_flops is not None:
        speed["train/mfu"] = trainer["train/flops"] / (seconds * trainer["train/devices"] * peak_flops)
    return speed


def mean_metrics(trajectories: Iterable[protocols.Trajectory]) -> dict[str, float]:
    """Returns the mean of each metric over its rollouts: `agent/...`, or as named (`reward.../...`, `teacher/...`)."""
    values: dict[str, list[float]] = collections.defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            named = name.startswith(("reward", "teacher/")) and "/" in name
            values[name if named else f"agent/{name}"].append(value)
    return {name: statistics.fmean(numbers) for name, numbers in sorted(values.items())}


def tool_metrics(trajectories: Iterable[protocols.Trajectory]) -> dict[str, float]:
    """Returns `calls`, `failures`, `timeouts`, and the mean `seconds` and `payload_tokens` of a call, for each tool.

    Metrics are named `tool/<name>/...`. All but the `MOST_TOOLS` most called tools are counted together as
    `OTHER_TOOLS`. A policy may invent any number of tool names, and each name would be a metric of its own.
    """
    calls: dict[str, list[protocols.Turn]] = collections.defaultdict(list)
    for trajectory in trajectories:
        for turn in trajectory.all_turns:
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


def trace_record(trajectory: protocols.Trajectory, group: protocols.Group, step: int) -> protocols.TraceRecord:
    """Returns a trajectory's record for the simulator."""
    turns: list[protocols.TurnRecord] = []
    segment_of = {id(turn): segment.index for segment in trajectory.segments for turn in segment.turns}
    for turn in trajectory.all_turns:
        turns.append(
            {
                "generated_tokens": turn.generated_tokens,
                "tool": turn.tool,
                "status": turn.status,
                "payload_tokens": turn.payload_tokens,
                "tool_seconds": turn.tool_seconds,
                "start_seconds": turn.start_seconds,
            }
        )
        # Left out if unknown: most calls have none of them, and traces are long.
        if turn.call:
            turns[-1]["call"] = turn.call
        if turn.error:
            turns[-1]["error"] = turn.error
        if turn.moves:
            turns[-1]["moves"] = [
                {
                    "source": move.source,
                    "target": move.target,
                    "reason": move.reason,
                    "expected_gain": move.expected_gain,
                }
                for move in turn.moves
            ]
        if trajectory.branches:
            turns[-1]["segment"] = segment_of[id(turn)]
    record: protocols.TraceRecord = {
        "trajectory_id": trajectory.trajectory_id,
        "prompt_id": trajectory.prompt_id,
        "prompt_tokens": trajectory.prompt_tokens,
        "turns": turns,
        "group_id": group.group_id,
        "step": step,
        "policy_version": group.dispatch_version,
        "reward": trajectory.reward,
        "finish": trajectory.finish,
        "start_seconds": trajectory.start_seconds,
    }
    if trajectory.branches:
        record["segments"] = [
            {
                "parent": segment.parent.index if segment.parent is not None else None,
                "shared_tokens": segment.shared,
                "prompt_tokens": segment.prompt_tokens,
            }
            for segment in trajectory.segments
        ]
    return record


PATIENCE = 3
"""Steps in a row without anything to learn from, before the note."""


CUT_SHARE = 0.95
"""Share of rollouts cut off in an output from which on the limit is said to be too low."""


@dataclass(eq=False)
class Watch:
    """Looks at the metrics of each training step.

    A step has nothing to learn from in three cases: no group has a gradient, the gradient norm is 0, or every rollout
    had the same reward. Only steps of real trainers count, because simulated ones report no gradient norm.

    Attributes:
      config: the run's configuration (`algorithm`, `coordinator`).
      note: takes the note for the person watching.
    """

    config: config_lib.RunConfig
    note: Callable[[str], None]
    _in_a_row: int = field(default=0, init=False)
    _told: str = field(default="", init=False)
    _cut: bool = field(default=False, init=False)

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Checks a step's metrics. After `PATIENCE` useless steps in a row, notes the reason, once for each reason.

        Notes at once, and once, if nearly all rollouts ended in an output that was cut off.
        """
        if not self._cut and (share := metrics.get("finish/length", 0.0)) >= CUT_SHARE:
            self._cut = True
            self.note(
                f"Step {step}: {share:.0%} of the rollouts were cut off in an output of "
                f"{self.config.rollout.max_tokens} tokens, before they could answer. Raise rollout.max_tokens, or look "
                "at what is written (launch/show.py): a model may think for longer, or never write its stop token."
            )
        # Simulated trainers report no gradient norm.
        learns = "grad_norm" not in metrics or (
            metrics.get("groups/without_gradient") != 1
            and metrics["grad_norm"] != 0
            and (metrics["reward/std"] != 0 or metrics.get("replay/rollouts", 0) > 0)
        )
        if learns:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row < PATIENCE:
            return
        reason, sentence = self._reason(metrics)
        if reason != self._told:
            self._told = reason
            # A KL or entropy term moves the weights even if all rewards are equal.
            had = "learned from KL and entropy terms alone" if metrics["grad_norm"] else "had nothing to learn from"
            self.note(f"Steps {step - PATIENCE + 1} to {step} {had}: {sentence}")

    def _reason(self, metrics: Mapping[str, float]) -> tuple[str, str]:
        """Returns a short name of the last step's reason, and its sentence."""
        advantage, size = self.config.algorithm.advantage, self.config.coordinator.group_size
        if metrics["rollout/masked"] == 1:
            return "masked", (
                "every rollout was cut off at a limit and masked (task.cut_off). Raise task.max_seconds or "
                "rollout.max_context, or set task.cut_off=zero."
            )
        if size == 1 and advantage in config_lib.GROUP_ADVANTAGES:
            return "group_size", (
                f"coordinator.group_size is 1, so {advantage} compares a rollout with no one. Raise it, or use "
                "algorithm.advantage=reinforce_plus_plus."
            )
        if metrics["reward/std"] == 0:
            return "reward", (
                f"every rollout had the reward {metrics['reward/mean']:g}; with equal rewards nothing is better. Look "
                "at how task.environment and reward.functions score, and at tasks that are too hard or too easy."
            )
        if metrics.get("groups/without_gradient") == 1:
            return "groups", (
                "rewards differ between prompts, never within a group. Raise coordinator.group_size or "
                "rollout.temperature, or take tasks that the policy solves sometimes."
            )
        return "gradient", (
            "the gradient norm is 0 although rewards differ. Look at clip/* and correction/* in metrics.jsonl: "
            "algorithm.clip_low, clip_high and correction_cap may drop every token."
        )
