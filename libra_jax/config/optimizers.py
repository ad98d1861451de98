"""Settings of the optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra_jax.config.arguments import Rules, check_arguments
from libra_jax.config.checks import check
from libra_jax.config.fields import field
from libra_jax.config.group import group

OPTIMIZERS = ("adamw", "adam", "sgd", "adafactor", "muon", "lion")
_ADAFACTOR = (
    "min_dim_size_to_factor",
    "decay_rate",
    "clipping_threshold",
    "multiply_by_parameter_scale",
    "momentum",
)
OPTIMIZER_ARGUMENTS: Mapping[str, Rules] = {
    "sgd": dict.fromkeys(("momentum", "nesterov")),
    "adafactor": dict.fromkeys(_ADAFACTOR),
    "muon": dict.fromkeys(("momentum", "ns_steps", "consistent_rms")),
}
"""Names in `optimizer.arguments` that a named optimizer takes (libra_jax/training/optimizer.py); others take none."""

SCHEDULES = ("constant", "cosine", "linear", "wsd")


@dataclass
@group("optimizer")
class OptimizerConfig:
    """optax optimizer and schedule."""

    # Optimizer: adamw, adam, sgd, adafactor, muon, lion, or a function of your own as "package.module:function". It is
    # called with the optimizer's config and returns an optax.GradientTransformation.
    name: str = field("adamw", choices=OPTIMIZERS, own_function=True)
    # Further arguments of the optimizer: of your function, or of a named one (docs/guides/optimizers.md), such as
    # {"momentum": 0.9} for sgd.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = field(1e-3, ge=0)  # peak learning rate
    # Learning-rate schedule: constant, cosine and linear (fall to min_ratio at config.steps), wsd (constant, falls
    # linearly in the last steps), or a function of your own as "package.module:function". It is called with the
    # optimizer's config and config.steps, and returns a function from the training step to the learning rate.
    schedule: str = field("constant", choices=SCHEDULES, own_function=True)
    schedule_arguments: Mapping[str, Any] = field(default_factory=dict)  # further arguments of your own schedule
    # Number of first steps in which the learning rate rises linearly from 0. A schedule of your own reads it itself.
    warmup_steps: int = field(0, ge=0)
    # Learning rate at the end of cosine, linear and wsd, as a share of the peak.
    min_ratio: float = field(0.0, ge=0, le=1, needs=("schedule", "cosine", "linear", "wsd"))
    # Share of config.steps, at the end, in which wsd lowers the learning rate.
    decay_share: float = field(0.2, gt=0, le=1, needs=("schedule", "wsd"))
    # Decoupled weight decay (adamw, muon, lion), without norms, biases and the embedding. With an adapter, it applies
    # to the adapter's matrices.
    weight_decay: float = field(0.0, ge=0, needs=("name", "adamw", "muon", "lion"))
    decay_all: bool = field(False, needs=("weight_decay",))  # weight decay of norms, biases and the embedding, too
    # Decay of the first moment (adamw, adam, muon's tables and norms); lion: weight of the moment.
    beta1: float = field(0.9, ge=0, lt=1, needs=("name", "adamw", "adam", "muon", "lion"))
    # Decay of the second moment (adamw, adam, muon's tables and norms); lion: decay of the moment.
    beta2: float = field(0.99, ge=0, lt=1, needs=("name", "adamw", "adam", "muon", "lion"))
    # Constant added to the root of the second moment (adamw, adam, muon).
    eps: float = field(1e-8, gt=0, needs=("name", "adamw", "adam", "muon"))
    clip_norm: float = field(1.0, ge=0, hint="0 is off")  # largest global gradient norm; 0 is off
    # Keep the moments in the host's memory between updates. This frees the devices of 8 bytes a parameter (adamw, adam)
    # or of 4 (muon, lion), and makes every update wait for them.
    offload: bool = False

    @property
    def moments(self) -> tuple[int, int]:
        """Numbers that the optimizer keeps of each parameter of the layers, and of the embedding and output projection.

        A function of the user's own counts as Adam. Adafactor's row and column means count as nothing.
        """
        momentum = 1 if self.arguments.get("momentum") else 0
        return {
            "sgd": (momentum, momentum),
            "adafactor": (momentum, momentum),
            "lion": (1, 1),
            "muon": (1, 2),
        }.get(self.name, (2, 2))

    def __post_init__(self) -> None:
        check_arguments(self.name, self.arguments, "optimizer.arguments", OPTIMIZER_ARGUMENTS)
        check_arguments(self.schedule, self.schedule_arguments, "optimizer.schedule_arguments", {})
        check(
            not self.offload or self.name != "sgd" or bool(self.arguments.get("momentum")),
            "optimizer.offload",
            "has no effect with optimizer.name=sgd, which keeps no moments; leave it at False, or set "
            'optimizer.arguments={"momentum": 0.9}',
        )
