"""Arguments of the built-in advantages, baselines, losses and scheduling policies, and the values that they take."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from libra_jax.config.checks import check


class Number(NamedTuple):
    """A number from `least` to `most`."""

    least: float = 0.0
    most: float = math.inf
    whole: bool = False
    above: bool = False  # `least` itself is refused
    optional: bool = False  # None is taken

    def takes(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return math.isfinite(value) and self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.most < math.inf:
            return f"{kind} in {'(' if self.above else '['}{self.least:g}, {self.most:g}]"
        return f"{kind} {'above' if self.above else 'of at least'} {self.least:g}"


class Switch(NamedTuple):
    """True or False."""

    def takes(self, value: Any) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "True or False"


_SHARE = Number(most=1.0)
_CRITIC: dict[str, Number | Switch] = {
    "discount": _SHARE,
    "turn_discount": Number(most=1.0, optional=True),
    "trace_decay": _SHARE,
    "whitened": Switch(),
}
_COST_RULE: dict[str, Number | Switch] = {"tail_power": Number(1.0), "move_margin": Number(1.0), "reserve": _SHARE}
ARGUMENTS: dict[str, dict[str, Number | Switch]] = {
    "distillation": {"reward_weight": Number()},
    "gae": _CRITIC,
    "egae": {**_CRITIC, "length_scale": Number(), "ignored_tokens": Number(whole=True), "bound": Number()},
    "minimum_variance": {"weighted": Switch(), "cap": Number(), "by_length": Switch()},
    "sapo": {"tau_positive": Number(above=True), "tau_negative": Number(above=True)},
    "bapo": {
        "most_low": _SHARE,
        "most_high": Number(),
        "low_step": Number(above=True),
        "high_step": Number(above=True),
        "positive_share": _SHARE,
    },
    "clip_cov": {"share": _SHARE, "least": Number(-math.inf), "most": Number(-math.inf)},
    "kl_cov": {"share": _SHARE, "coefficient": Number()},
    "cmlfq": _COST_RULE,
    "oracle": _COST_RULE,
    "clairvoyant": {"reserve": _SHARE},
    "cmlfq_authors": {"max_residents": Number(whole=True)},
    "heddle": {"preempt_ratio": Number(1.0)},
    "length_predictor": {"sigma": Number()},
    "mlfq": {"quantum": Number(whole=True)},
    "sticky": {"threshold": Number()},
}
"""Of each built-in function and policy with arguments. Others take none. Their signatures have the defaults."""


def check_arguments(name: str, arguments: Mapping[str, Any], field_name: str) -> None:
    """Raises ConfigError unless a built-in function or policy takes the arguments. Those of users' are not known."""
    if ":" in name:
        return
    known = ARGUMENTS.get(name, {})
    for key, value in arguments.items():
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known) or 'none'}"
        check(key in known, field_name, f"{name} takes no argument {key!r}; {hint}")
        check(known[key].takes(value), field_name, f"{key} must be {known[key]}, not {value!r}")
