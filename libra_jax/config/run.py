"""The settings of a whole run, whether they fit each other, and the digest that names a run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from libra_jax.config import objective_checks
from libra_jax.config.algorithm import BATCH_LOSSES, AlgorithmConfig, CriticConfig
from libra_jax.config.checks import check
from libra_jax.config.coordination import (
    CheckpointConfig,
    CoordinatorConfig,
    ElasticConfig,
    EvaluationConfig,
    PlannerConfig,
)
from libra_jax.config.environments import SHARE_OF_CALLS, RewardConfig, SandboxConfig, TaskConfig, ToolsConfig
from libra_jax.config.fields import check_effects, field
from libra_jax.config.group import group
from libra_jax.config.operation import ClusterConfig, DeadlineConfig, GatewayConfig, TelemetryConfig
from libra_jax.config.optimizers import OptimizerConfig
from libra_jax.config.parsing import to_dict
from libra_jax.config.rollout import RolloutConfig, SchedulerConfig
from libra_jax.config.training import ModelConfig, TrainerConfig, WarmStartConfig

MAX_SEED = 2**31 - 1
"""Largest seed. Instances add their number to the seed, and NumPy's generators take 32 bits."""

MAY_CHANGE = (
    "steps",
    "telemetry",
    # Not how outputs are read: agents see what a parser makes of them.
    "gateway.host",
    "gateway.port",
    "gateway.max_body_bytes",
    "gateway.requests_per_second",
    "gateway.max_concurrent",
    "gateway.request_seconds",
    "gateway.write_seconds",
    "deadlines",
    "evaluation",
    "checkpoint",
    "rollout.slots",
    "rollout.accelerators",
    "rollout.slots_by_instance",
    "rollout.restarts",
    "rollout.loop_workers",
    "rollout.health_seconds",
    "trainer.restarts",
    "trainer.memory_fraction",
    "trainer.compilation_cache",
    "trainer.peak_flops",
    "reward.restarts",
    "elastic.restarts",
    "cluster.address",
)
"""Settings, and groups of settings, that a run may change when it goes on: none of them changes what it learns."""


@dataclass
@group("")
class RunConfig:
    """A whole run."""

    # Name of the run and of its default workdir.
    name: str = field("run", nonempty=True, hint="it names the default workdir")
    seed: int = field(0, ge=0, le=MAX_SEED)  # seed of all random numbers, from 0 to 2**31 - 1
    # Number of training steps. A finished run goes on if more steps are set. A learning rate that decays
    # (optimizer.schedule) then jumps up to its value in a run of the new length.
    steps: int = field(100, gt=0)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)

    def __post_init__(self) -> None:
        check_effects(self)
        check("/" not in self.name, "name", f"must hold no '/', as it names the default workdir, not {self.name!r}")
        check(self.name.isprintable(), "name", f"must be printable and on one line, not {self.name!r}")
        check(
            self.rollout.max_tokens < self.rollout.max_context,
            "rollout.max_tokens",
            f"{self.rollout.max_tokens} leaves no room for a prompt in max_context = {self.rollout.max_context}",
        )
        objective_checks.check_algorithm(self)
        if self.algorithm.routing_replay != "off":
            objective_checks.check_routing_replay(self)
        for name in ("python", "shell", "edit"):
            check(
                name not in self.tools.use or self.sandbox.seconds < self.task.call_seconds,
                "sandbox.seconds",
                f"{self.sandbox.seconds:g} must be less than {SHARE_OF_CALLS:.0%} of task.tool_seconds = "
                f"{self.task.tool_seconds:g}, or a step ends before a call of {name} may, which costs the rollout its "
                "files; lower it, or raise that",
            )
        self._check_elastic()
        check(
            not self.rollout.accelerators or not (self.planner.period or self.elastic.hybrid),
            "rollout.accelerators",
            "is for fixed layouts: plans and hybrid workers know one accelerator; set planner.period and "
            "elastic.hybrid to 0, or leave it empty",
        )
        self._check_lora()
        objective_checks.check_critic(self)
        objective_checks.check_stream(self)
        objective_checks.check_shared_prompts(self)
        objective_checks.check_teacher(self)
        self.algorithm.check_replay(self.coordinator.max_staleness)
        longest = max((self.trainer.row_tokens, *self.trainer.row_buckets))
        check(
            longest >= self.rollout.max_context,
            "trainer.row_tokens",
            f"the longest row ({longest}) must hold a whole context (rollout.max_context = {self.rollout.max_context})",
        )

    @property
    def uses_success(self) -> bool:
        """True if the run looks at the success rates of prompts."""
        return self.algorithm.budget != "uniform" or self.task.order == "success"

    @property
    def most_rollouts(self) -> int:
        """Most rollouts of a prompt."""
        size = self.coordinator.group_size
        return size if self.algorithm.budget == "uniform" else self.algorithm.budget_most or 4 * size

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens that a rollout may generate, if its context does not end it before."""
        return self.task.max_tokens or self.rollout.max_tokens * self.task.max_turns

    def _check_lora(self) -> None:
        lora = self.model.lora
        if not lora.rank:
            return
        check(
            lora.sync == "merge" or self.rollout.transport == "memfd",
            "model.lora.sync",
            f"adapter travels through shared memory, and rollout.transport is {self.rollout.transport}; set "
            "model.lora.sync=merge, or rollout.transport=memfd",
        )
        check(
            lora.sync == "adapter" or not self.elastic.hybrid,
            "model.lora.sync",
            "merge sends no adapter, which hybrid workers train; set model.lora.sync=adapter, or elastic.hybrid=0",
        )

    def _check_elastic(self) -> None:
        elastic, instances = self.elastic, len(self.rollout.tensor_parallel)
        check(
            self.trainer.processes == 1 or not elastic.spare_devices,
            "elastic.spare_devices",
            f"are one process's, and trainer.processes is {self.trainer.processes}; set it to 0",
        )
        check(
            elastic.floor <= instances,
            "elastic.floor",
            f"{elastic.floor} instances cannot always roll out, as rollout.tensor_parallel has {instances}; lower it, "
            "or add instances",
        )
        if not elastic.hybrid:
            return
        check(
            elastic.hybrid + elastic.floor <= instances,
            "elastic.hybrid",
            f"of the {instances} instances of rollout.tensor_parallel, {elastic.hybrid} would be hybrid and fewer than "
            f"elastic.floor = {elastic.floor} left; lower either, or add instances",
        )
        check(
            len(elastic.cores) in (0, elastic.hybrid),
            "elastic.cores",
            f"has {len(elastic.cores)} entries for {elastic.hybrid} hybrid workers; give one each, or none",
        )
        check(
            self.rollout.transport == "memfd",
            "elastic.hybrid",
            "training sides read parameters from host memory: rollout.transport must be memfd, not "
            f"{self.rollout.transport}",
        )
        check(
            self.rollout.dtype in (self.model.param_dtype, self.model.compute_dtype),
            "elastic.hybrid",
            f"training sides train on the parameters that engines get: rollout.dtype = {self.rollout.dtype} must be "
            f"that of model.param_dtype ({self.model.param_dtype}) or model.compute_dtype ({self.model.compute_dtype})",
        )
        check(
            self.algorithm.loss not in BATCH_LOSSES,
            "elastic.hybrid",
            f"training sides see a part of an update's tokens, and algorithm.loss={self.algorithm.loss} takes "
            "statistics of all; set elastic.hybrid=0, or another loss",
        )
        check(
            self.algorithm.baseline != "minimum_variance",
            "elastic.hybrid",
            "training sides compute no gradients of single rollouts, as algorithm.baseline=minimum_variance needs; set "
            "elastic.hybrid=0, or another baseline",
        )
        check(
            self.algorithm.kl_coefficient == 0,
            "elastic.hybrid",
            "training sides hold no reference model: algorithm.kl_coefficient must be 0",
        )


def identity(config: RunConfig) -> dict[str, Any]:
    """Returns what names a run's default workdir: nested plain dicts without steps, addresses, telemetry and deadlines.

    Other settings of `MAY_CHANGE` stay in the name, so that a sweep over them has a workdir for each value.
    """
    values = to_dict(config)
    for name in ("steps", "telemetry", "deadlines"):
        del values[name]
    # Another cluster, or one that was started again, goes on in the same workdir.
    values["cluster"]["address"] = ""
    for name in ("host", "port"):
        del values["gateway"][name]
    return values


def digest(config: RunConfig) -> str:
    """Returns eight hex digits of the run's identity, which end the name of the default workdir."""
    text = json.dumps(identity(config), sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
