"""Arguments of the built-in advantages, baselines, losses and scheduling policies, and the values that they take."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from libra_jax.config.checks import check
from libra_jax.config.fields import Constraint, check_value
from libra_jax.config.group import coerced

Rules = Mapping[str, tuple[type, Constraint] | None]
"""Type and constraint of each argument of a function; None: the function checks the value itself."""

_SHARE = (float, Constraint(ge=0, le=1))
_POSITIVE = (float, Constraint(gt=0))
_NOT_NEGATIVE = (float, Constraint(ge=0))
_COUNT = (int, Constraint(ge=0))
_ANY_NUMBER = (float, Constraint())
_SWITCH = (bool, Constraint())
_CRITIC: Rules = {"discount": _SHARE, "turn_discount": _SHARE, "trace_decay": _SHARE, "whitened": _SWITCH}
_AT_LEAST_ONE = (float, Constraint(ge=1))
_COST_RULE: Rules = {"tail_power": _AT_LEAST_ONE, "move_margin": _AT_LEAST_ONE}
ARGUMENTS: Mapping[str, Rules] = {
    "distillation": {"reward_weight": _NOT_NEGATIVE},
    "gae": _CRITIC,
    "egae": {
        **_CRITIC,
        "length_scale": _NOT_NEGATIVE,
        "ignored_tokens": _COUNT,
        "bound": _NOT_NEGATIVE,
    },
    "minimum_variance": {"weighted": _SWITCH, "cap": _NOT_NEGATIVE, "by_length": _SWITCH},
    "sapo": {"tau_positive": _POSITIVE, "tau_negative": _POSITIVE},
    "bapo": {
        "most_low": _SHARE,
        "most_high": _NOT_NEGATIVE,
        "low_step": _POSITIVE,
        "high_step": _POSITIVE,
        "positive_share": _SHARE,
    },
    "clip_cov": {"share": _SHARE, "least": _ANY_NUMBER, "most": _ANY_NUMBER},
    "kl_cov": {"share": _SHARE, "coefficient": _NOT_NEGATIVE},
    "cmlfq": _COST_RULE,
    "oracle": _COST_RULE,
    "cmlfq_authors": {"max_residents": _COUNT},
    "heddle": {"preempt_ratio": _AT_LEAST_ONE},
    "length_predictor": {"sigma": _NOT_NEGATIVE},
    "mlfq": {"quantum": _COUNT},
    "sticky": {"threshold": _NOT_NEGATIVE},
}
"""Arguments of each built-in function and policy that has any. Their signatures have the defaults."""


def check_arguments(
    name: str, arguments: Mapping[str, Any], field_name: str, functions: Mapping[str, Rules] = ARGUMENTS
) -> None:
    """Raises ConfigError unless a built-in function or policy takes the arguments. A user's function takes any here.

    Args:
      name: name of the function, or "package.module:function".
      arguments: its keyword arguments.
      field_name: the setting that holds the arguments.
      functions: arguments of each built-in function that has any; others take none.
    """
    rules = functions.get(name, {})
    for key, value in arguments.items():
        check(isinstance(key, str), field_name, f"{key!r} is not the name of an argument")
        if ":" in name:
            continue
        near = difflib.get_close_matches(key, rules, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(rules) or 'none'}"
        check(key in rules, field_name, f"{name} takes no argument {key!r}; {hint}")
        if (rule_of_key := rules[key]) and (value is not None or key != "turn_discount"):  # None: no discount of turns
            kind, rule = rule_of_key
            check_value(coerced(value, kind, f"config.{field_name}.{key}"), rule, f"{field_name}.{key}")
