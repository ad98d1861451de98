"""Settings of the coordinator: batches, evaluations, checkpoints, plans, and who changes sides."""

from __future__ import annotations

import math
from dataclasses import dataclass

from libra_jax.config.checks import check, check_choice, check_finite, check_temperature
from libra_jax.config.group import group


@group
@dataclass
class CoordinatorConfig:
    """Batches, staleness and replacement."""

    groups_per_step: int = 32  # prompts a training step
    group_size: int = 8  # attempts a prompt
    staleness: int = 0  # eta: a group trains at most this many versions after its first dispatch; 0 is synchronous
    stale: str = "wait"  # a group about to pass eta: wait (training waits for it) or replace
    # Replace groups whose rewards are all equal (counted, capped). The environment's own rewards are compared, without
    # what reward functions add; with reward.environment_weight=0 the functions' sums are.
    filter_zero_variance: bool = False
    max_replacements: float = 1.0  # replaced groups allowed, as a multiple of the groups trained (plus one step)
    # Groups begun beyond what a step needs, as a share of it, rounded up. The first to finish are trained on, the last
    # are given up whole: training sees fewer long attempts than the policy makes, which biases it. 0 is off.
    redundancy: float = 0.0

    @property
    def spare_groups(self) -> int:
        """Groups that may run beyond what the steps to come can train on."""
        return math.ceil(round(self.redundancy * self.groups_per_step, 6))

    def __post_init__(self) -> None:
        check_finite(self.redundancy, "coordinator.redundancy")
        check(self.redundancy >= 0, "coordinator.redundancy", f"must not be negative, not {self.redundancy}")
        check(self.groups_per_step > 0, "coordinator.groups_per_step", "must be positive")
        check(self.group_size > 0, "coordinator.group_size", "must be positive")
        check(
            self.group_size > 1 or not self.filter_zero_variance,
            "coordinator.filter_zero_variance",
            "replaces every group of one rollout, which has one reward; set coordinator.group_size to 2 or more",
        )
        check(self.staleness >= 0, "coordinator.staleness", "must not be negative")
        check_choice(self.stale, ("wait", "replace"), "coordinator.stale")
        allowed = self.max_replacements  # may be infinite
        check(not math.isnan(allowed), "coordinator.max_replacements", "must be a number, not nan")
        check(allowed >= 0, "coordinator.max_replacements", f"must not be negative, not {allowed}")


@group
@dataclass
class EvaluationConfig:
    """Held-out tasks, attempted once each at the given version."""

    every: int = 0  # training steps between evaluations; also before the first and after the last; 0 is off
    tasks: int = 128  # held-out tasks of an evaluation
    temperature: float = 0.0  # 0 is greedy; else 0.01 to 2

    def __post_init__(self) -> None:
        check(self.every >= 0, "evaluation.every", "must not be negative")
        check(self.tasks > 0, "evaluation.tasks", "must be positive")
        if self.temperature != 0:
            check_temperature(self.temperature, "evaluation.temperature", "; 0 is greedy")


@group
@dataclass
class CheckpointConfig:
    """Composite checkpoints (one manifest each)."""

    every: int = 20  # training steps; 0 is off
    keep: int = 2  # newest manifests kept

    def __post_init__(self) -> None:
        check(self.every >= 0, "checkpoint.every", "must not be negative")
        check(self.keep > 0, "checkpoint.keep", "must be positive")


@group
@dataclass
class PlannerConfig:
    """When and by what rules the devices are split and laid out again (`planning/planner.py`)."""

    period: int = 0  # training steps between two looks for a better plan; 0: the layout stays
    shadow: bool = False  # decide and log, and never move
    hardware: str = "cpu"  # accelerator whose sheet costs start from; cpu: this machine, measured on the spot
    profile: str = ""  # file of launch/calibrate.py: plans go by what was measured, not by the sheet
    degrees: tuple[int, ...] = (1, 2, 4, 8)  # tensor-parallel degrees of a plan, as far as they divide the model
    window: int = 2  # training steps whose trajectories say what the next ones will be like
    horizon: int = 20  # steps over which a move has to pay
    cooldown: int = 5  # steps after a move before the next
    least_gain: float = 0.05  # gain of a step, relative, below which nothing moves
    queue_pressure: float = 1.0  # requests waiting for a slot, over all slots, above which it looks early
    imbalance: float = 2.0  # times that a stage may take as long as the other before it looks early
    start_seconds: float = 10.8  # of an engine until it serves (published for a warm one: arXiv 2606.03077)
    resize_seconds: float = 8.0  # of a mesh: snapshot and recovery (same source)

    def __post_init__(self) -> None:
        for name in ("period", "cooldown"):
            check(getattr(self, name) >= 0, f"planner.{name}", f"must not be negative, not {getattr(self, name)}")
        for name in ("window", "horizon"):
            check(getattr(self, name) > 0, f"planner.{name}", f"must be positive, not {getattr(self, name)}")
        for name in ("least_gain", "queue_pressure", "imbalance", "start_seconds", "resize_seconds"):
            value = getattr(self, name)
            check_finite(value, f"planner.{name}")
            check(value >= 0, f"planner.{name}", f"must not be negative, not {value}")
        check(self.imbalance >= 1, "planner.imbalance", f"must be at least 1, not {self.imbalance}")
        check(bool(self.degrees), "planner.degrees", "needs at least one degree")
        for degree in self.degrees:
            check(degree in (1, 2, 4, 8), "planner.degrees", f"{degree} is not one of 1, 2, 4, 8")


@group
@dataclass
class ElasticConfig:
    """Who may change sides while the run goes on (libra_jax/elastic)."""

    hybrid: int = 0  # number of hybrid workers: the last instances of rollout.tensor_parallel also help to train
    floor: int = 1  # instances that always roll out, at least
    cores: tuple[int, ...] = ()  # on CPU: the core of each hybrid worker's replica; empty: not pinned
    resize: bool = False  # plans may change the trainer's mesh as well
    spare_devices: int = 0  # beyond its mesh's, devices that the trainer's process holds for a larger mesh
    gain: float = 0.05  # gain of a step, relative, below which no worker changes sides
    patience: int = 2  # looks in a row that have to say the same
    cooldown: int = 4  # steps after a change of a worker before its next
    late: float = 2.0  # a share is late after this multiple of the core's time for its own; the core then computes it
    late_seconds: float = 1.0  # and not before this
    restarts: int = 3  # times that a hybrid worker which failed is brought back to rollout

    def __post_init__(self) -> None:
        for name in ("hybrid", "spare_devices", "cooldown", "restarts"):
            check(getattr(self, name) >= 0, f"elastic.{name}", f"must not be negative, not {getattr(self, name)}")
        for name in ("floor", "patience"):
            check(getattr(self, name) > 0, f"elastic.{name}", f"must be positive, not {getattr(self, name)}")
        for name in ("gain", "late", "late_seconds"):
            check_finite(getattr(self, name), f"elastic.{name}")
            check(getattr(self, name) >= 0, f"elastic.{name}", f"must not be negative, not {getattr(self, name)}")
