"""The settings of a whole run, their consistency checks, and the digest that names a run."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from libra_jax.config import engine_arguments
from libra_jax.config.algorithm import (
    BASELINES,
    BATCH_LOSSES,
    CRITIC_ADVANTAGES,
    GROUP_ADVANTAGES,
    TOKEN_LOSSES,
    WHITENED_ADVANTAGES,
    AlgorithmConfig,
    CriticConfig,
)
from libra_jax.config.checks import check
from libra_jax.config.coordination import (
    CheckpointConfig,
    CoordinatorConfig,
    ElasticConfig,
    EvaluationConfig,
    PlannerConfig,
)
from libra_jax.config.environments import SHARE_OF_CALLS, RewardConfig, SandboxConfig, TaskConfig, ToolsConfig
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


@group
@dataclass
class RunConfig:
    """A whole run."""

    name: str = "run"  # name of the run and of its default workdir
    seed: int = 0  # seed of all random numbers, from 0 to 2**31 - 1
    # Number of training steps. A finished run goes on if more steps are set. A learning rate that decays
    # (optimizer.schedule) then jumps up to its value in a run of the new length.
    steps: int = 100
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
        check(bool(self.name), "name", "must not be empty: it names the default workdir")
        check("/" not in self.name, "name", f"must hold no '/', as it names the default workdir, not {self.name!r}")
        check(self.steps > 0, "steps", f"must be positive, not {self.steps}")
        check(self.name.isprintable(), "name", f"must be printable and on one line, not {self.name!r}")
        check(0 <= self.seed <= MAX_SEED, "seed", f"must lie in [0, {MAX_SEED}], not {self.seed}")
        check(
            self.rollout.max_tokens < self.rollout.max_context,
            "rollout.max_tokens",
            f"{self.rollout.max_tokens} leaves no room for a prompt in max_context = {self.rollout.max_context}",
        )
        check(
            self.task.context_policy == "stop" or self.task.answer_tokens < self.rollout.max_context,
            "task.answer_tokens",
            f"{self.task.answer_tokens} leaves no room for anything else in rollout.max_context = "
            f"{self.rollout.max_context}; lower it, or set task.context_policy=stop",
        )
        self._check_algorithm()
        if self.algorithm.routing_replay != "off":
            self._check_routing_replay()
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
        self._check_critic()
        self._check_stream()
        self._check_shared_prompts()
        self._check_teacher()
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

    def _check_algorithm(self) -> None:
        """Refuses settings of the objective that have no effect, and quantised engines that it would not correct."""
        algorithm, defaults = self.algorithm, AlgorithmConfig()
        unmoved = algorithm.objective == "decoupled" and algorithm.proximal == "recompute" and algorithm.updates == 1
        for name in ("clip_low", "clip_high", "dual_clip") if unmoved else ():
            value, default = getattr(algorithm, name), getattr(defaults, name)
            check(
                value == default,
                f"algorithm.{name}",
                f"{value} never binds with algorithm.objective=decoupled and one update a batch: the ratio to the "
                "proximal policy is 1; set algorithm.minibatches or algorithm.epochs above 1, or leave it at "
                f"{default} and bound the importance weight by algorithm.correction and correction_cap, or set "
                "algorithm.objective=behaviour",
            )
        check(
            self.coordinator.group_size > 1 or algorithm.filter != "zero_variance",
            "algorithm.filter",
            "zero_variance replaces every group of one rollout, which has one reward; set coordinator.group_size to 2 "
            "or more",
        )
        check(
            algorithm.budget == "uniform"
            or algorithm.budget_least <= self.coordinator.group_size <= self.most_rollouts,
            "coordinator.group_size",
            f"{self.coordinator.group_size} is the mean number of rollouts of a prompt, and algorithm.budget gives "
            f"{algorithm.budget_least} to {self.most_rollouts} (algorithm.budget_least, budget_most); change either",
        )
        replays = algorithm.replay != "none"
        for name, read in (("success_reward", self.uses_success or replays), ("success_window", self.uses_success)):
            check(
                read or getattr(algorithm, name) == getattr(defaults, name),
                f"algorithm.{name}",
                f"has no effect: nothing looks at success rates; leave it at {getattr(defaults, name):g}, or set "
                "algorithm.budget=knapsack or task.order=success",
            )
        check(
            algorithm.overlong_buffer <= self.most_tokens,
            "algorithm.overlong_buffer",
            f"{algorithm.overlong_buffer} tokens exceed the {self.most_tokens} that a rollout may generate "
            "(task.max_tokens, or rollout.max_tokens x task.max_turns)",
        )
        check(
            not algorithm.overlong_buffer or self.most_tokens - algorithm.overlong_buffer < self.rollout.max_context,
            "algorithm.overlong_buffer",
            f"no rollout gets there: the penalty begins at {self.most_tokens - algorithm.overlong_buffer} generated "
            f"tokens, and rollout.max_context is {self.rollout.max_context}; set task.max_tokens to what a rollout may "
            "generate within its context",
        )
        check(
            algorithm.loss not in BATCH_LOSSES or algorithm.proximal == "recompute",
            "algorithm.proximal",
            f"interpolate moves with the policy, and algorithm.loss={algorithm.loss} takes statistics of a fixed "
            "proximal policy; set it to recompute, or take another loss",
        )
        check(
            algorithm.correction_level == "token"
            or algorithm.objective == "decoupled"
            or algorithm.correction == "masked",
            "algorithm.correction_level",
            f"{algorithm.correction_level} cannot truncate with algorithm.objective=behaviour, whose ratio is that of "
            "a token; set algorithm.objective=decoupled, or algorithm.correction=masked",
        )
        check(
            algorithm.minibatches <= self.coordinator.groups_per_step,
            "algorithm.minibatches",
            f"{algorithm.minibatches} parts of whole groups cannot be made of coordinator.groups_per_step = "
            f"{self.coordinator.groups_per_step} groups; lower it, or raise that",
        )
        for name, reads, partner, instead in (
            ("clip_low", algorithm.loss not in ("sapo", "kl_cov"), "loss", "clipped"),
            ("clip_high", algorithm.loss not in ("sapo", "kl_cov"), "loss", "clipped"),
            ("dual_clip", algorithm.loss not in ("cispo", "sapo", "gmpo", "kl_cov"), "loss", "clipped or gspo"),
            ("correction_cap", algorithm.correction != "none", "correction", "truncated or masked"),
            ("correction_floor", algorithm.correction == "masked", "correction", "masked"),
            ("correction_level", algorithm.correction != "none", "correction", "truncated or masked"),
            ("sequence_length_constant", algorithm.aggregation == "sequence_sum", "aggregation", "sequence_sum"),
            ("proximal", algorithm.objective == "decoupled", "objective", "decoupled"),
        ):
            value, default = getattr(algorithm, name), getattr(defaults, name)
            shown, usual = (f"{item:g}" if isinstance(item, float) else item for item in (value, default))
            check(
                reads or value == default,
                f"algorithm.{name}",
                f"{shown} has no effect with algorithm.{partner}={getattr(algorithm, partner)}; leave it at "
                f"{usual}, or set algorithm.{partner}={instead}",
            )
        arguments = self.rollout.engine_arguments
        quantises = [name for name in ("quantization", "quantization_config") if arguments.get(name)]
        if arguments.get("kv_cache_dtype", "auto") not in engine_arguments.PLAIN_CACHES:
            quantises.append("kv_cache_dtype")
        check(
            not quantises or algorithm.correction != "none",
            engine_arguments.FIELD,
            f"{''.join(quantises[:1])} makes the engine sample from another policy than the trainer's, and "
            "algorithm.correction=none ignores the difference; set algorithm.correction=truncated or masked",
        )

    def _check_routing_replay(self) -> None:
        """Refuses engines that return no experts."""
        rollout, name = self.rollout, "algorithm.routing_replay"
        check(rollout.engine == "vllm", name, f"rollout.engine={rollout.engine} returns no experts; use vllm, or off")
        check(
            rollout.kv_transfer == "none",
            name,
            f"vLLM returns no experts of contexts that rollout.kv_transfer={rollout.kv_transfer} brings; set that to "
            "none, or this to off",
        )
        check(
            rollout.engine_arguments.get("enable_prefix_caching", True) is not False,
            name,
            "vLLM returns experts only with prefix caching; leave enable_prefix_caching out of "
            "rollout.engine_arguments, or set this to off",
        )

    def _check_teacher(self) -> None:
        """Refuses a teacher that nothing reads or that is no URL, and a distillation without one."""
        algorithm = self.algorithm
        check(
            "://" not in algorithm.teacher or re.match(r"https?://[^/:]", algorithm.teacher) is not None,
            "algorithm.teacher",
            f"{algorithm.teacher!r} is no URL of a server; write http://host:port/v1",
        )
        check(
            not algorithm.teacher or algorithm.kl_coefficient > 0,
            "algorithm.teacher",
            "has no effect with algorithm.kl_coefficient=0; set a coefficient above 0, or leave it out",
        )
        check(
            algorithm.teacher_served or not algorithm.teacher_arguments,
            "algorithm.teacher_arguments",
            "are those of a teacher behind a URL; leave them empty, or set algorithm.teacher to http://host:port/v1",
        )
        check(
            not algorithm.teacher_served or self.rollout.temperature == 1,
            "rollout.temperature",
            f"{self.rollout.temperature:g} cannot be compared with a teacher behind a URL, which scores at temperature "
            "1; set it to 1, or algorithm.teacher to a directory",
        )
        if algorithm.advantage != "distillation":
            return
        for name, right, value in (
            ("teacher", bool(algorithm.teacher), "a Hugging Face directory or a URL"),
            ("kl_in_reward", algorithm.kl_in_reward, "True"),
            ("kl_estimator", algorithm.kl_estimator == "k1", "k1"),
        ):
            check(
                right,
                f"algorithm.{name}",
                f"must be {value} with algorithm.advantage=distillation, whose advantage is minus the KL of each token",
            )

    def _check_stream(self) -> None:
        """Refuses a streamed step with what looks at the whole batch, or updates several times."""
        algorithm = self.algorithm
        of_groups = [name for name in GROUP_ADVANTAGES if name not in WHITENED_ADVANTAGES]
        check(
            self.trainer.stream == "off" or self.coordinator.groups_per_step > 1,
            "coordinator.groups_per_step",
            "1 group is a whole batch, on which no step can begin early; set it to 2 or more, or trainer.stream=off",
        )
        batch = "may look at the whole batch"
        for name, right, why in (
            ("algorithm.minibatches", algorithm.minibatches == 1, "mini-batches divide a whole batch; set it to 1"),
            ("algorithm.epochs", algorithm.epochs == 1, "a second pass takes the whole batch; set it to 1"),
            ("critic.enabled", not self.critic.enabled, "a critic learns from the whole batch; set it to False"),
            (
                "algorithm.advantage",
                algorithm.advantage in (*of_groups, "distillation"),
                f"{algorithm.advantage} {batch}; use one of {', '.join(of_groups)}",
            ),
            (
                "algorithm.baseline",
                ":" not in algorithm.baseline,
                f"{algorithm.baseline} {batch}; use one of {', '.join(BASELINES)}",
            ),
            ("algorithm.loss", algorithm.loss not in BATCH_LOSSES, f"{algorithm.loss} {batch}; use another loss"),
        ):
            check(self.trainer.stream == "off" or right, name, f"{why}, or set trainer.stream=off")

    def _check_shared_prompts(self) -> None:
        """Refuses shared prompts with what takes the sequences of a row for single rollouts."""
        algorithm = self.algorithm
        for name, right, value, wanted in (
            ("trainer.pack", self.trainer.pack, self.trainer.pack, "True"),
            ("algorithm.aggregation", algorithm.aggregation == "token_mean", algorithm.aggregation, "token_mean"),
            ("algorithm.loss", algorithm.loss in TOKEN_LOSSES, algorithm.loss, f"one of {', '.join(TOKEN_LOSSES)}"),
            ("algorithm.correction_level", algorithm.correction_level == "token", algorithm.correction_level, "token"),
            ("algorithm.ess_scaling", algorithm.ess_scaling == "off", algorithm.ess_scaling, "off"),
            ("critic.enabled", not self.critic.enabled, self.critic.enabled, "False"),
        ):
            check(
                not self.trainer.share_prompt or right,
                name,
                f"{value} looks at single rollouts, and trainer.share_prompt makes one sequence of several; set it to "
                f"{wanted}, or trainer.share_prompt=False",
            )

    def _check_critic(self) -> None:
        """Refuses a critic that nothing reads, and what cannot move or share a critic."""
        advantage, enabled = self.algorithm.advantage, self.critic.enabled
        check(
            enabled or advantage not in CRITIC_ADVANTAGES,
            "critic.enabled",
            f"algorithm.advantage={advantage} needs the values of a critic; set it to True, or take another advantage",
        )
        bootstraps = self.task.cut_off == "bootstrap"
        check(
            not bootstraps or advantage == "egae" or ":" in advantage,
            "task.cut_off",
            f"bootstrap needs an advantage without the rollout's reward, and algorithm.advantage is {advantage}; set "
            "that to egae, or this to mask",
        )
        check(
            not bootstraps or bool(self.task.cut_off_limits),
            "task.cut_off_limits",
            "must name the limits whose rollouts task.cut_off=bootstrap is for, such as ('max_tokens', 'length')",
        )
        check(
            bootstraps or advantage != "egae",
            "algorithm.advantage",
            f"egae is for rollouts that a limit cuts off, and task.cut_off={self.task.cut_off} leaves it none; set "
            "task.cut_off=bootstrap (limits: task.cut_off_limits), or take gae",
        )
        if not enabled:
            return
        check(
            advantage in CRITIC_ADVANTAGES or ":" in advantage,
            "critic.enabled",
            f"algorithm.advantage={advantage} reads no values; set algorithm.advantage=gae, or this to False",
        )
        check(
            self.critic.warmup_steps < self.steps,
            "critic.warmup_steps",
            f"{self.critic.warmup_steps} leaves the policy no step of steps = {self.steps}; lower it",
        )
        for name, off in (
            ("elastic.hybrid", self.elastic.hybrid == 0),
            ("elastic.resize", not self.elastic.resize),
            ("model.lora.rank", self.model.lora.rank == 0),
        ):
            check(off, "critic.enabled", f"a critic does not work with {name}; switch one of the two off")

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
            self.gateway.processes == 1 or self.cluster.backend == "ray",
            "gateway.processes",
            f"{self.gateway.processes} processes need cluster.backend=ray",
        )
        check(
            self.trainer.processes == 1 or self.cluster.backend == "ray",
            "trainer.processes",
            f"{self.trainer.processes} processes need cluster.backend=ray",
        )
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
