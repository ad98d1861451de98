"""Every setting of a run, with its default, unit and meaning: the one place where fields are defined.

A config file (`configs/*.py`) returns a `RunConfig` whose fields it has set, so that editors complete them and mypy
sees a typo. Scripts apply the command line's flags to it, and `checked` returns the copy that the run holds, with every
value checked and frozen. Standard library only, so that reading a config imports no accelerator library.
"""

from libra_jax.config.algorithm import (
    ADVANTAGES,
    AGGREGATIONS,
    BASELINE_ADVANTAGES,
    BASELINES,
    BATCH_LOSSES,
    CORRECTIONS,
    CRITIC_ADVANTAGES,
    GROUP_ADVANTAGES,
    KL_ESTIMATORS,
    LOSSES,
    REWARD_ADVANTAGES,
    AlgorithmConfig,
    CriticConfig,
)
from libra_jax.config.arguments import ARGUMENTS
from libra_jax.config.checks import (
    LEAST_TEMPERATURE,
    MOST_TEMPERATURE,
    check,
    check_choice,
    check_cores,
)
from libra_jax.config.coordination import (
    CheckpointConfig,
    CoordinatorConfig,
    ElasticConfig,
    EvaluationConfig,
    PlannerConfig,
)
from libra_jax.config.environments import (
    RewardConfig,
    RewardFunctionConfig,
    SandboxConfig,
    SandboxLimits,
    TaskConfig,
    ToolsConfig,
)
from libra_jax.config.fields import field
from libra_jax.config.group import REMOVED, RENAMED, freeze, group, nearest, now, renamed
from libra_jax.config.operation import ClusterConfig, DeadlineConfig, GatewayConfig, TelemetryConfig
from libra_jax.config.optimizers import OptimizerConfig
from libra_jax.config.parsing import checked, parse, to_dict
from libra_jax.config.rollout import ORDERINGS, POLICIES, CostConfig, RolloutConfig, SchedulerConfig, slots_by_degree
from libra_jax.config.run import MAY_CHANGE, RunConfig, digest
from libra_jax.config.training import PROJECTIONS, LoraConfig, ModelConfig, TrainerConfig, WarmStartConfig

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "ARGUMENTS",
    "BASELINES",
    "BASELINE_ADVANTAGES",
    "BATCH_LOSSES",
    "CORRECTIONS",
    "CRITIC_ADVANTAGES",
    "GROUP_ADVANTAGES",
    "KL_ESTIMATORS",
    "LEAST_TEMPERATURE",
    "LOSSES",
    "MAY_CHANGE",
    "MOST_TEMPERATURE",
    "ORDERINGS",
    "POLICIES",
    "PROJECTIONS",
    "REMOVED",
    "RENAMED",
    "REWARD_ADVANTAGES",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CoordinatorConfig",
    "CostConfig",
    "CriticConfig",
    "DeadlineConfig",
    "ElasticConfig",
    "EvaluationConfig",
    "GatewayConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlannerConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "RunConfig",
    "SandboxConfig",
    "SandboxLimits",
    "SchedulerConfig",
    "TaskConfig",
    "TelemetryConfig",
    "ToolsConfig",
    "TrainerConfig",
    "WarmStartConfig",
    "check",
    "check_choice",
    "check_cores",
    "checked",
    "digest",
    "field",
    "freeze",
    "group",
    "nearest",
    "now",
    "parse",
    "renamed",
    "slots_by_degree",
    "to_dict",
]
