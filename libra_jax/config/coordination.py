"""Settings of the coordinator: batches, evaluations, checkpoints, plans, and hybrid workers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from libra_jax.config.checks import check, check_finite, check_temperature
from libra_jax.config.group import group


@dataclass
@group("coordinator")
class CoordinatorConfig:
    """Batches, staleness and replacement."""

    groups_per_step: int = 32  # prompts a training step
    group_size: int = 8  # rollouts of a prompt
    # Training steps between a group's first dispatch and its training, at most; 0 is synchronous. Training waits for a
    # group that the next step would push past it.
    max_staleness: int = 0
    max_replacements: float = 1.0  # replaced groups allowed, as a multiple of the groups trained (plus one step)
    # Groups begun beyond those that a step needs, as a share of them, rounded up. The first to finish are trained on,
    # the last are aborted: training sees fewer long rollouts than the policy makes, which biases it. 0 is off.
    redundancy: float = 0.0
    # Use of redundant groups that a step did not need: False aborts them, which biases training towards short
    # rollouts. True keeps their tokens, and they are trained by the next steps (APRIL). New groups then begin between
    # two steps alone. max_staleness is the number of steps that a group may wait.
    recycle: bool = False

    @property
    def spare_groups(self) -> int:
        """Groups that may run beyond those that later steps can train on."""
        return math.ceil(round(self.redundancy * self.groups_per_step, 6))

    def __post_init__(self) -> None:
        check_finite(self.redundancy, "coordinator.redundancy")
        check(self.redundancy >= 0, "coordinator.redundancy", f"must not be negative, not {self.redundancy}")
        if self.recycle:
            check(
                self.max_staleness > 0 and 0 < self.spare_groups <= self.groups_per_step,
                "coordinator.recycle",
                "True needs coordinator.max_staleness of 1 or more and coordinator.redundancy above 0, at most 1 (not "
                f"{self.max_staleness} and {self.redundancy:g}); set these, or set it to False",
            )
        check(self.groups_per_step > 0, "coordinator.groups_per_step", "must be positive")
        check(self.group_size > 0, "coordinator.group_size", "must be positive")
        check(self.max_staleness >= 0, "coordinator.max_staleness", "must not be negative")
        allowed = self.max_replacements  # may be infinite
        check(not math.isnan(allowed), "coordinator.max_replacements", "must be a number, not nan")
        check(allowed >= 0, "coordinator.max_replacements", f"must not be negative, not {allowed}")


@dataclass
@group("evaluation")
class EvaluationConfig:
    """Held-out tasks, with one or more attempts each at one policy version."""

    every: int = 0  # training steps between evaluations; also before the first and after the last; 0 is off
    tasks: int = 128  # most held-out tasks of an evaluation, each once
    # Rollouts of each held-out task; above 1, evaluation/pass_at_<k> estimates pass@k for k = 1, 2, 4, ... attempts
    attempts: int = 1
    threshold: float = 1.0  # reward from which on an attempt counts as solved, for evaluation/pass_at_<k>
    temperature: float = 0.0  # 0 is greedy, for one attempt; else 0.01 to 2

    def __post_init__(self) -> None:
        check(self.every >= 0, "evaluation.every", "must not be negative")
        check(self.tasks > 0, "evaluation.tasks", "must be positive")
        check(self.attempts > 0, "evaluation.attempts", f"must be positive, not {self.attempts}")
        check_finite(self.threshold, "evaluation.threshold")
        check(
            self.attempts == 1 or self.temperature != 0,
            "evaluation.attempts",
            f"{self.attempts} greedy attempts would be alike; set evaluation.temperature above 0, such as 1",
        )
        if self.temperature != 0:
            check_temperature(self.temperature, "evaluation.temperature", "; 0 is greedy")


@dataclass
@group("checkpoint")
class CheckpointConfig:
    """Composite checkpoints (one manifest each)."""

    every: int = 20  # training steps between checkpoints; 0 is off
    keep: int = 2  # number of the newest checkpoints that are kept

    def __post_init__(self) -> None:
        check(self.every >= 0, "checkpoint.every", "must not be negative")
        check(self.keep > 0, "checkpoint.keep", "must be positive")


@dataclass
@group("planner")
class PlannerConfig:
    """Conditions and rules of a new layout of the devices (`planning/planner.py`)."""

    period: int = 0  # training steps between two searches for a better plan; 0: the layout stays
    shadow: bool = False  # plans that are only logged and never applied
    # Accelerator whose hardware sheet gives the first costs; cpu: this machine, measured at the start.
    hardware: str = "cpu"
    profile: str = ""  # file of launch/calibrate.py, whose measured costs replace those of the hardware sheet
    # File of launch/compile.py --json. Memory and communication of its meshes replace those of the planner's formulas.
    compiled: str = ""
    # Tensor-parallel degrees of a plan. Degrees that do not divide the model are skipped.
    degrees: tuple[int, ...] = (1, 2, 4, 8)
    window: int = 2  # training steps whose trajectories predict the demand of the next
    horizon: int = 20  # training steps within which a move must pay off
    cooldown: int = 5  # training steps between a move and the next
    # Best plans that short simulations rank again, in launch/plan.py and (in the background) in a run; 0: none.
    simulate_top: int = 0
    simulate_seconds: float = 600.0  # seconds after which a run takes the best predicted plan instead
    least_gain: float = 0.05  # minimum relative gain in step time of a move
    queue_pressure: float = 1.0  # requests waiting for a slot, relative to all slots, above which a search starts early
    imbalance: float = 2.0  # ratio of the two stages' seconds above which a search starts early
    start_seconds: float = 10.8  # seconds until a started engine serves (warm start in arXiv 2606.03077)
    resize_seconds: float = 8.0  # seconds of a mesh resize: snapshot and recovery (same source)

    def __post_init__(self) -> None:
        for name in ("period", "cooldown", "simulate_top"):
            check(getattr(self, name) >= 0, f"planner.{name}", f"must not be negative, not {getattr(self, name)}")
        for name in ("window", "horizon"):
            check(getattr(self, name) > 0, f"planner.{name}", f"must be positive, not {getattr(self, name)}")
        for name in ("least_gain", "queue_pressure", "imbalance", "start_seconds", "resize_seconds"):
            value = getattr(self, name)
            check_finite(value, f"planner.{name}")
            check(value >= 0, f"planner.{name}", f"must not be negative, not {value}")
        check_finite(self.simulate_seconds, "planner.simulate_seconds")
        check(self.simulate_seconds > 0, "planner.simulate_seconds", f"must be positive, not {self.simulate_seconds}")
        check(self.imbalance >= 1, "planner.imbalance", f"must be at least 1, not {self.imbalance}")
        check(bool(self.degrees), "planner.degrees", "needs at least one degree")
        for degree in self.degrees:
            check(degree in (1, 2, 4, 8), "planner.degrees", f"{degree} is not one of 1, 2, 4, 8")


@dataclass
@group("elastic")
class ElasticConfig:
    """Hybrid workers, which switch between rollout and training while the run goes on (libra_jax/hybrid)."""

    hybrid: int = 0  # number of hybrid workers: the last instances of rollout.tensor_parallel, which also help to train
    floor: int = 1  # minimum number of instances that roll out
    cores: tuple[int, ...] = ()  # on CPU: the core of each hybrid worker's training side; empty: not pinned
    resize: bool = False  # permission for plans to change the trainer's mesh
    spare_devices: int = 0  # devices beyond its mesh that the trainer's process holds for a larger mesh
    gain: float = 0.05  # minimum relative gain in step time for which a worker switches
    patience: int = 2  # decisions in a row that must agree before a worker switches
    cooldown: int = 4  # training steps between two switches of a worker
    # Time after which a share is late and the core computes it, as a multiple of the core's time for its own share.
    late_factor: float = 2.0
    late_min_seconds: float = 1.0  # minimum seconds before a share counts as late
    restarts: int = 3  # times that a failed hybrid worker is restarted as a rollout engine

    def __post_init__(self) -> None:
        for name in ("hybrid", "spare_devices", "cooldown", "restarts"):
            check(getattr(self, name) >= 0, f"elastic.{name}", f"must not be negative, not {getattr(self, name)}")
        for name in ("floor", "patience"):
            check(getattr(self, name) > 0, f"elastic.{name}", f"must be positive, not {getattr(self, name)}")
        for name in ("gain", "late_factor", "late_min_seconds"):
            check_finite(getattr(self, name), f"elastic.{name}")
            check(getattr(self, name) >= 0, f"elastic.{name}", f"must not be negative, not {getattr(self, name)}")
