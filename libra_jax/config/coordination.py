"""Settings of the coordinator: batches, evaluations, checkpoints, plans, and hybrid workers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from libra_jax.config.checks import DEGREES, check
from libra_jax.config.fields import SAMPLED, check_value, field
from libra_jax.config.group import group


@dataclass
@group("coordinator")
class CoordinatorConfig:
    """Batches, staleness and replacement."""

    groups_per_step: int = field(32, gt=0)  # prompts a training step
    group_size: int = field(8, gt=0)  # rollouts of a prompt
    # Training steps between a group's first dispatch and its training, at most; 0 is synchronous. Training waits for a
    # group that the next step would push past it.
    max_staleness: int = field(0, ge=0)
    # Replaced groups allowed, as a multiple of the groups trained (plus one step).
    max_replacements: float = field(1.0, ge=0, infinite=True)
    # Groups begun beyond those that a step needs, as a share of them, rounded up. The first to finish are trained on,
    # the last are aborted: training sees fewer long rollouts than the policy makes, which biases it. 0 is off.
    redundancy: float = field(0.0, ge=0)
    # Use of redundant groups that a step did not need: False aborts them, which biases training towards short
    # rollouts. True keeps their tokens, and they are trained by the next steps (APRIL). New groups then begin between
    # two steps alone. max_staleness is the number of steps that a group may wait.
    recycle: bool = False

    @property
    def spare_groups(self) -> int:
        """Groups that may run beyond those that later steps can train on."""
        return math.ceil(round(self.redundancy * self.groups_per_step, 6))

    def __post_init__(self) -> None:
        if self.recycle:
            check(
                self.max_staleness > 0 and 0 < self.spare_groups <= self.groups_per_step,
                "coordinator.recycle",
                "True needs coordinator.max_staleness of 1 or more and coordinator.redundancy above 0, at most 1 (not "
                f"{self.max_staleness} and {self.redundancy:g}); set these, or set it to False",
            )


@dataclass
@group("evaluation")
class EvaluationConfig:
    """Held-out tasks, with one or more attempts each at one policy version."""

    # Training steps between evaluations; also before the first and after the last; 0 is off.
    every: int = field(0, ge=0)
    tasks: int = field(128, gt=0)  # most held-out tasks of an evaluation, each once
    # Rollouts of each held-out task; above 1, evaluation/pass_at_<k> estimates pass@k for k = 1, 2, 4, ... attempts
    attempts: int = field(1, gt=0)
    threshold: float = 1.0  # reward from which on an attempt counts as solved, for evaluation/pass_at_<k>
    temperature: float = 0.0  # 0 is greedy, for one attempt; else 0.01 to 2

    def __post_init__(self) -> None:
        check(
            self.attempts == 1 or self.temperature != 0,
            "evaluation.attempts",
            f"{self.attempts} greedy attempts would be alike; set evaluation.temperature above 0, such as 1",
        )
        if self.temperature != 0:
            check_value(
                self.temperature,
                {**SAMPLED, "hint": "vLLM samples at no other, and 0 is greedy"},
                "evaluation.temperature",
            )


@dataclass
@group("checkpoint")
class CheckpointConfig:
    """Composite checkpoints (one manifest each)."""

    every: int = field(20, ge=0)  # training steps between checkpoints; 0 is off
    keep: int = field(2, gt=0)  # number of the newest checkpoints that are kept


@dataclass
@group("planner")
class PlannerConfig:
    """Conditions and rules of a new layout of the devices (`planning/planner.py`)."""

    period: int = field(0, ge=0)  # training steps between two searches for a better plan; 0: the layout stays
    shadow: bool = False  # plans that are only logged and never applied
    # Accelerator whose hardware sheet gives the first costs; cpu: this machine, measured at the start.
    hardware: str = "cpu"
    profile: str = ""  # file of launch/calibrate.py, whose measured costs replace those of the hardware sheet
    # File of launch/compile.py --json. Memory and communication of its meshes replace those of the planner's formulas.
    compiled: str = ""
    # Tensor-parallel degrees of a plan. Degrees that do not divide the model are skipped.
    degrees: tuple[int, ...] = field(DEGREES, choices=DEGREES, nonempty=True)
    window: int = field(2, gt=0)  # training steps whose trajectories predict the demand of the next
    horizon: int = field(20, gt=0)  # training steps within which a move must pay off
    cooldown: int = field(5, ge=0)  # training steps between a move and the next
    least_gain: float = field(0.05, ge=0)  # minimum relative gain in step time of a move
    # Requests waiting for a slot, relative to all slots, above which a search starts early.
    queue_pressure: float = field(1.0, ge=0)
    imbalance: float = field(2.0, ge=1)  # ratio of the two stages' seconds above which a search starts early
    start_seconds: float = field(10.8, ge=0)  # seconds until a started engine serves (warm start in arXiv 2606.03077)
    resize_seconds: float = field(8.0, ge=0)  # seconds of a mesh resize: snapshot and recovery (same source)


@dataclass
@group("elastic")
class ElasticConfig:
    """Hybrid workers, which switch between rollout and training while the run goes on (libra_jax/hybrid)."""

    # Number of hybrid workers: the last instances of rollout.tensor_parallel, which also help to train.
    hybrid: int = field(0, ge=0)
    floor: int = field(1, gt=0)  # minimum number of instances that roll out
    cores: tuple[int, ...] = ()  # on CPU: the core of each hybrid worker's training side; empty: not pinned
    resize: bool = False  # permission for plans to change the trainer's mesh
    spare_devices: int = field(0, ge=0)  # devices beyond its mesh that the trainer's process holds for a larger mesh
    gain: float = field(0.05, ge=0)  # minimum relative gain in step time for which a worker switches
    patience: int = field(2, gt=0)  # decisions in a row that must agree before a worker switches
    cooldown: int = field(4, ge=0)  # training steps between two switches of a worker
    # Time after which a share is late and the core computes it, as a multiple of the core's time for its own share.
    late_factor: float = field(2.0, ge=0)
    late_min_seconds: float = field(1.0, ge=0)  # minimum seconds before a share counts as late
    restarts: int = field(3, ge=0)  # times that a failed hybrid worker is restarted as a rollout engine
