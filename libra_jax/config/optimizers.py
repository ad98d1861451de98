"""Settings of the optimizer and its schedule."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from libra_jax.config.checks import check, check_choice, check_finite
from libra_jax.config.group import group

OPTIMIZERS = {
    "adamw": ("beta1", "beta2", "eps", "weight_decay"),
    "adam": ("beta1", "beta2", "eps"),
    "sgd": (),
    "adafactor": (),
    "muon": ("beta1", "beta2", "eps", "weight_decay"),
    "lion": ("beta1", "beta2", "weight_decay"),
}
"""Optimizers by name, and which of the settings that not all optimizers share each of them reads."""

OPTIMIZER_ARGUMENTS = {
    "sgd": ("momentum", "nesterov"),
    "adafactor": (
        "min_dim_size_to_factor",
        "decay_rate",
        "clipping_threshold",
        "multiply_by_parameter_scale",
        "momentum",
    ),
    "muon": ("momentum", "ns_steps", "consistent_rms"),
}
"""Names in `optimizer.arguments` that a named optimizer takes (libra_jax/training/optimizer.py); others take none."""

SCHEDULES = {
    "constant": (),
    "cosine": ("min_ratio",),
    "linear": ("min_ratio",),
    "wsd": ("min_ratio", "decay_share"),
}
"""Learning-rate schedules by name, and which of the settings that not all schedules share each of them reads."""


@dataclass
@group("optimizer")
class OptimizerConfig:
    """optax optimizer and schedule."""

    # Optimizer: adamw, adam, sgd, adafactor, muon, lion, or a function of your own as "package.module:function". It is
    # called with the optimizer's config and returns an optax.GradientTransformation.
    name: str = "adamw"
    # Further arguments of the optimizer: of your function, or of a named one (docs/guides/optimizers.md), such as
    # {"momentum": 0.9} for sgd.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-3  # peak learning rate
    # Learning-rate schedule: constant, cosine and linear (fall to min_ratio at config.steps), wsd (constant, falls
    # linearly in the last steps), or a function of your own as "package.module:function". It is called with the
    # optimizer's config and config.steps, and returns a function from the training step to the learning rate.
    schedule: str = "constant"
    schedule_arguments: Mapping[str, Any] = field(default_factory=dict)  # further arguments of your own schedule
    # Number of first steps in which the learning rate rises linearly from 0. A schedule of your own reads it itself.
    warmup_steps: int = 0
    min_ratio: float = 0.0  # learning rate at the end of cosine, linear and wsd, as a share of the peak
    decay_share: float = 0.2  # share of config.steps, at the end, in which wsd lowers the learning rate
    # Decoupled weight decay (adamw, muon, lion), without norms, biases and the embedding. With an adapter, it applies
    # to the adapter's matrices.
    weight_decay: float = 0.0
    decay_all: bool = False  # weight decay of norms, biases and the embedding, too
    beta1: float = 0.9  # decay of the first moment (adamw, adam, muon's tables and norms); lion: weight of the moment
    beta2: float = 0.99  # decay of the second moment (adamw, adam, muon's tables and norms); lion: decay of the moment
    eps: float = 1e-8  # constant added to the root of the second moment (adamw, adam, muon)
    clip_norm: float = 1.0  # largest global gradient norm; 0 is off
    # Keep the moments in the host's memory between updates. This frees the devices of 8 bytes a parameter (adamw, adam)
    # or of 4 (muon, lion), and makes every update wait for them.
    offload: bool = False

    def __post_init__(self) -> None:
        for name, known in (("name", OPTIMIZERS), ("schedule", SCHEDULES)):
            if ":" not in (value := getattr(self, name)):
                check_choice(value, (*known, '"package.module:function"'), f"optimizer.{name}")
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            check_finite(value, f"optimizer.{name}")
            check(value >= 0, f"optimizer.{name}", f"must not be negative, not {value}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            check(0 <= value < 1, f"optimizer.{name}", f"must lie in [0, 1), not {value}")
        check_finite(self.eps, "optimizer.eps")
        check(self.eps > 0, "optimizer.eps", f"must be positive, not {self.eps}")
        check(self.warmup_steps >= 0, "optimizer.warmup_steps", "must not be negative")
        check(0 <= self.min_ratio <= 1, "optimizer.min_ratio", f"must lie in [0, 1], not {self.min_ratio}")
        check(0 < self.decay_share <= 1, "optimizer.decay_share", f"must lie in (0, 1], not {self.decay_share}")
        check_finite(self.clip_norm, "optimizer.clip_norm")
        check(self.clip_norm >= 0, "optimizer.clip_norm", f"must not be negative (0 is off), not {self.clip_norm}")
        self._check_effects()

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

    def _check_effects(self) -> None:
        """Refuses settings that the optimizer or the schedule does not read."""
        for name in self.arguments if ":" not in self.name else ():
            takes = OPTIMIZER_ARGUMENTS.get(self.name, ())
            near = difflib.get_close_matches(name, takes, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(takes) or 'none'}"
            check(name in takes, "optimizer.arguments", f"optimizer.name={self.name} takes no {name!r}; {hint}")
        for partner, known in (("name", OPTIMIZERS), ("schedule", SCHEDULES)):
            chosen = getattr(self, partner)
            for name in sorted({name for read in known.values() for name in read}):
                default, readers = getattr(type(self), name), [key for key, read in known.items() if name in read]
                check(
                    ":" in chosen or chosen in readers or getattr(self, name) == default,
                    f"optimizer.{name}",
                    f"has no effect with optimizer.{partner}={chosen}; leave it at {default:g}, or set "
                    f"optimizer.{partner} to {' or '.join(readers)}",
                )
        check(
            not self.decay_all or self.weight_decay > 0,
            "optimizer.decay_all",
            "has no effect with optimizer.weight_decay=0; leave it at False, or set optimizer.weight_decay",
        )
        check(
            not self.schedule_arguments or ":" in self.schedule,
            "optimizer.schedule_arguments",
            f"optimizer.schedule={self.schedule} takes none; leave it empty, or name a function of your own there",
        )
        check(
            not self.offload or self.name != "sgd" or bool(self.arguments.get("momentum")),
            "optimizer.offload",
            "has no effect with optimizer.name=sgd, which keeps no moments; leave it at False, or set "
            'optimizer.arguments={"momentum": 0.9}',
        )
