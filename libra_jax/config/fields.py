"""Constraints of settings, as metadata of dataclass fields, which one checker, `--config_help` and the docs read."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar, Unpack, cast, overload

from libra_jax.config.checks import LEAST_TEMPERATURE, MOST_TEMPERATURE, check, check_choice, either
from libra_jax.protocols import ConfigError

T = TypeVar("T")

OWN_FUNCTION = '"package.module:function"'
"""Form of the name of a user's function."""


class Constraint(TypedDict, total=False):
    """The values that a setting takes. Bounds and choices of a tuple hold for each of its items.

    Attributes:
      gt, ge, lt, le: bounds of a number: above, at least, below, at most.
      infinite: infinity is taken. Other numbers are finite.
      choices: the values, if they are few.
      own_function: "package.module:function" is taken, too.
      nonempty: an empty text or tuple is refused.
      unique: a tuple that holds an item twice is refused.
      ascending: a tuple whose items do not ascend is refused.
      needs: name of another setting (of another group: its full name), and its values with which this setting has an
        effect; without values, any but 0, "" and False. A run is refused in which this setting has no effect and
        differs from its default. With a function of the user's own, each setting has an effect.
      hint: end of the sentence that refuses a value.
    """

    gt: float
    ge: float
    lt: float
    le: float
    infinite: bool
    choices: tuple[str, ...] | tuple[int, ...]
    own_function: bool
    nonempty: bool
    unique: bool
    ascending: bool
    needs: tuple[str, ...]
    hint: str


SAMPLED = Constraint(ge=LEAST_TEMPERATURE, le=MOST_TEMPERATURE, hint="vLLM samples at no other")
"""Temperatures of sampling."""


@overload
def field(default: T, **constraint: Unpack[Constraint]) -> T: ...


@overload
def field(*, default_factory: Callable[[], T], **constraint: Unpack[Constraint]) -> T: ...


def field(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Any = dataclasses.MISSING,
    **constraint: Unpack[Constraint],
) -> Any:
    """Returns a dataclass's field whose metadata is its constraint. For type checkers, it has the default's type."""
    return dataclasses.field(default=default, default_factory=default_factory, metadata=constraint)


def constraint_of(item: dataclasses.Field[Any]) -> Constraint:
    """Returns the constraint of a dataclass's field."""
    return cast(Constraint, item.metadata)


def default_of(item: dataclasses.Field[Any]) -> Any:
    """Returns a field's default; `dataclasses.MISSING` without one."""
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def bounds(rule: Constraint) -> str:
    """Returns a number's bounds as the end of "must ..."; empty without bounds."""
    above, below = "gt" in rule, "lt" in rule
    low, high = rule.get("gt", rule.get("ge")), rule.get("lt", rule.get("le"))
    if low is not None and high is not None:
        return f"lie in {'(' if above else '['}{low:.10g}, {high:.10g}{')' if below else ']'}"
    if low is None:
        return f"be {'below' if below else 'at most'} {high:.10g}" if high is not None else ""
    if low == 0:
        return "be positive" if above else "not be negative"
    return f"be {'above' if above else 'at least'} {low:.10g}"


def listed(rule: Constraint) -> str:
    """Returns the choices of a setting as "a, b, c"; empty without choices."""
    return ", ".join([*map(str, rule.get("choices", ())), *[OWN_FUNCTION] * rule.get("own_function", False)])


def check_value(value: object, rule: Constraint, name: str) -> None:
    """Raises ConfigError, which names the field, the value and the fix, unless a setting takes the value."""
    hint = f"; {rule['hint']}" if "hint" in rule else ""
    check(bool(value) or not rule.get("nonempty"), name, f"must not be empty{hint}")
    items = value if isinstance(value, tuple) else (value,)
    for item in items:
        if isinstance(item, str) and listed(rule):
            _check_choice(item, rule, name)
        elif isinstance(item, int | float) and not isinstance(item, bool):
            _check_number(item, rule, name, hint)
    twice = [item for item in items if items.count(item) > 1] if rule.get("unique") else []
    check(not twice, name, f"names {twice[0] if twice else ''!r} twice")
    if rule.get("ascending"):
        check(list(items) == sorted(set(items)), name, f"must ascend, not {value}{hint}")


def _check_choice(value: str, rule: Constraint, name: str) -> None:
    if rule.get("own_function") and ":" in value:
        return
    check("choices" in rule, name, f"must have the form {OWN_FUNCTION}, not {value!r}")
    try:
        check_choice(value, cast("tuple[str, ...]", rule["choices"]), name)
    except ConfigError as error:
        if not rule.get("own_function"):
            raise
        raise ConfigError(f"{error}; a function of your own has the form {OWN_FUNCTION}") from None


def _check_number(value: float, rule: Constraint, name: str, hint: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        infinite = rule.get("infinite", False)
        check(infinite and not math.isnan(value), name, f"must be a {'' if infinite else 'finite '}number, not {value}")
    above = value > rule["gt"] if "gt" in rule else value >= rule.get("ge", value)
    below = value < rule["lt"] if "lt" in rule else value <= rule.get("le", value)
    check(above and below, name, f"must {bounds(rule)}, not {value}{hint}")
    check(value in rule.get("choices", (value,)), name, f"{value} is not one of {listed(rule)}{hint}")


def check_fields(group: Any, prefix: str) -> None:
    """Raises ConfigError unless each setting of a group, whose names begin with `prefix`, takes its value."""
    for item in dataclasses.fields(group):
        check_value(getattr(group, item.name), constraint_of(item), prefix + item.name)


def check_effects(run: Any, group: Any = None, prefix: str = "") -> None:
    """Raises ConfigError if a setting of a run, or of one of its groups, has a value that has no effect."""
    for item in dataclasses.fields(group or run):
        value, rule = getattr(group or run, item.name), constraint_of(item)
        if dataclasses.is_dataclass(value):
            check_effects(run, value, f"{prefix}{item.name}.")
        elif "needs" in rule and value != (default := default_of(item)):
            partner, *values = rule["needs"]
            partner = partner if "." in partner else prefix + partner
            chosen = functools.reduce(getattr, partner.split("."), run)
            own = isinstance(chosen, str) and ":" in chosen
            check(
                own or (chosen in values if values else bool(chosen)),
                prefix + item.name,
                f"{_named(value)}has no effect with {partner}={_shown(chosen)}; leave it at {_shown(default)}, or set "
                + partner
                + (f" to {either(values)}" if values else ""),
            )


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def _named(value: object) -> str:
    """Returns a value and a blank; nothing for a mapping or a URL, which may be long or hold a secret."""
    return "" if isinstance(value, Mapping) or "://" in str(value) else f"{_shown(value)} "


def described(rule: Constraint) -> str:
    """Returns a constraint in words, for help and docs: "One of a, b. Needs c = d."; empty without one."""
    partner, *values = rule.get("needs", ("",))
    parts = [
        f"One of {listed(rule)}." if listed(rule) else "",
        f"Must {bounds(rule)}." if bounds(rule) else "",
        f"Needs {partner}{' = ' + either(values) if values else ''}." if partner else "",
    ]
    return " ".join(filter(None, parts))
