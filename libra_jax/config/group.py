"""Groups of settings: dataclasses that a config file fills in, with types checked, and that the run holds frozen."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast, get_type_hints

from libra_jax.config.checks import check
from libra_jax.config.fields import check_fields
from libra_jax.protocols import ConfigError

T = TypeVar("T")

RENAMED = {
    "coordinator.filter_zero_variance": "algorithm.filter",
    "coordinator.staleness": "coordinator.max_staleness",
    "deadlines.publish": "deadlines.weight_sync",
    "elastic.late": "elastic.late_factor",
    "elastic.late_seconds": "elastic.late_min_seconds",
    "gateway.temperature": "gateway.strict",
    "rollout.bucket_mib": "rollout.chunk_mib",
    "task.reward": "reward.functions",
    "tools.servers": "tools.mcp",
}
"""Former name of a setting, and its present name."""

_FORMS = {
    "algorithm.filter": '"zero_variance"',
    "gateway.strict": "True",
    "reward.functions": '{"mine": {"factory": "package.module:factory"}}',
    "tools.mcp": '{"mcpServers": {"time": {"command": "mcp-server-time", "args": []}}}',
}
"""Example of each renamed setting whose value has another form than under its former name."""

_CONVERTED: Mapping[str, Mapping[Any, Any]] = {
    "coordinator.filter_zero_variance": {False: "none", True: "zero_variance"},
    "gateway.temperature": {"run": False, "refuse": True},
}
"""Present values of each renamed setting whose former values all have one, by former value."""


@dataclasses.dataclass(frozen=True)
class RemovedSetting:
    """A setting that no longer exists.

    Attributes:
      advice: clause that says what runs do without the setting.
      accepted: values under which stored runs did the same, so that their configs are still read; None: any value.
    """

    advice: str
    accepted: tuple[Any, ...] | None = None


def _policy_argument(policy: str, name: str, value: float, default: float | tuple[int, ...]) -> RemovedSetting:
    """Returns a setting that is an argument of a scheduling policy now, with an example and its former default."""
    accepted = (default, list(default)) if isinstance(default, tuple) else (default,)
    return RemovedSetting(f'{policy} takes it as scheduler.arguments, e.g. {{"{name}": {value}}}', accepted)


REMOVED = {
    "coordinator.max_concurrent": RemovedSetting("coordinator.max_staleness alone bounds the rollouts under way", (0,)),
    "coordinator.stale": RemovedSetting("training waits for a group that is about to exceed max_staleness", ("wait",)),
    "gateway.processes": RemovedSetting("one process serves, and each of rollout.loop_workers has its own", (1,)),
    "rollout.kv_transfer": RemovedSetting("the instance that a request moves to prefills its context", ("none",)),
    "scheduler.costs.transfer_tokens_per_second": RemovedSetting("a move costs a prefill of the context"),
    "planner.simulate_seconds": RemovedSetting("predictions alone rank plans"),
    "planner.simulate_top": RemovedSetting("predictions alone rank plans", (0,)),
    "reward.cache_entries": RemovedSetting("every rollout is scored; a slow function can keep its own values"),
    "task.answer_tokens": RemovedSetting("tools.most_characters bounds what a return takes of the context"),
    "task.context_policy": RemovedSetting(
        "a return that leaves no room ends the rollout; lower tools.most_characters to cut returns", ("stop",)
    ),
    "tools.exceptions": RemovedSetting(
        "the policy reads a tool's exception; raise protocols.WorkerLost to begin the rollout again", ("failure",)
    ),
    "scheduler.max_residents": _policy_argument("cmlfq_authors", "max_residents", 64, 0),
    "scheduler.move_margin": _policy_argument("cmlfq", "move_margin", 1.0, 8.0),
    "scheduler.predictor_sigma": _policy_argument("length_predictor", "sigma", 1.0, 0.5),
    "scheduler.preempt_ratio": _policy_argument("heddle", "preempt_ratio", 2.0, 1.0),
    "scheduler.quanta": _policy_argument("mlfq", "quantum", 250, ()),
    "scheduler.reserve": RemovedSetting(
        "a request takes a free slot of a wider bucket if that costs it less than a wait"
    ),
    "scheduler.sticky_threshold": _policy_argument("sticky", "threshold", 0.2, 0.1),
    "scheduler.tail_power": _policy_argument("cmlfq", "tail_power", 1.0, 4.0),
}
"""Settings that were removed, by their former name."""

_FROZEN = "_frozen"
"""Entry of a group's `__dict__` that says that no field may be set any more."""


def group(place: str | None) -> Callable[[type[T]], type[T]]:
    """Makes a class a group of settings, whose fields can be set until `freeze`. `dataclass` decorates its result.

    A new group is checked by its fields' constraints, and then by its `__post_init__`, which checks how its settings
    fit each other. The attribute check is added here and not in a base class, because mypy accepts any name on a class
    whose `__setattr__` it can see. So a mistyped field of a config file is an error for mypy and at run time.

    Args:
      place: full name of the group, such as "model.lora"; empty for the run itself. None: a group of many places, whose
        fields `check_fields` checks where the place is known.

    Raises (when a field is set):
      ConfigError: the group has no such field (the message offers the nearest name), or the value is of the wrong type.
      dataclasses.FrozenInstanceError: the run has begun with these settings.
    """

    def decorated(cls: type[T]) -> type[T]:
        hints = get_type_hints(cls)
        # ml_collections reads the fields' types, and needs them resolved.
        cls.__annotations__ = {name: hints[name] for name in cls.__annotations__}
        check_relations: Callable[[T], None] | None = getattr(cls, "__post_init__", None)

        def check_group(self: T) -> None:
            if place is not None:
                check_fields(self, f"{place}." if place else "")
            if check_relations:
                check_relations(self)

        def set_field(self: Any, name: str, value: Any) -> None:
            if name not in hints:
                hint = now(f"{place}.{name}") or nearest(name, hints)
                raise ConfigError(f"{cls.__name__} has no field {name!r}; {hint}")
            if self.__dict__.get(_FROZEN):
                raise dataclasses.FrozenInstanceError(f"{cls.__name__}.{name}: settings are frozen once they are read")
            default = getattr(cls, name, None)
            object.__setattr__(self, name, coerced(value, hints[name], f"{cls.__name__}.{name}", default))

        cls.__setattr__ = set_field  # type: ignore[method-assign]
        cls.__post_init__ = check_group  # type: ignore[attr-defined]
        return cls

    return decorated


def nearest(name: str, known: Collection[str], prefix: str = "") -> str:
    """Returns a clause that offers the setting that a mistyped name may mean.

    A setting of exactly this name in another group comes first, then the nearest name of the group.

    Args:
      name: name that the group does not have.
      known: names of the group's fields.
      prefix: full name of the group, with a dot at its end; empty if it is not known.
    """
    # Imported here, because the groups of both are made with this module.
    from libra_jax.config import listing, run

    elsewhere = [each.name for each in listing.settings(run.RunConfig) if each.name.rpartition(".")[2] == name]
    if elsewhere:
        return f"did you mean config.{' or config.'.join(elsewhere)}?"
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {prefix}{near[0]}?" if near else f"its fields are {', '.join(sorted(known))}"


def now(name: str) -> str:
    """Returns a clause about a former setting: its present name and form, or that it is gone; empty for other names."""
    if name in REMOVED:
        return f"{name} is gone: {REMOVED[name].advice}"
    present = RENAMED.get(name, "")
    form = _FORMS.get(present)
    return present and f"{name} is now {present}" + (f", e.g. {form}" if form else "")


def renamed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config that an earlier version wrote, with former names replaced by present ones.

    Removed settings are left out.

    Raises:
      ConfigError: a setting has another form now, or was removed and held a value that runs no longer follow.
    """
    found = copy.deepcopy(dict(stored))
    for old, new in RENAMED.items():
        (old_group, old_name), (new_group, new_name) = old.split("."), new.split(".")
        group_of = found.get(old_group)
        if not isinstance(group_of, dict) or old_name not in group_of:
            continue
        value = group_of.pop(old_name)
        if new not in _FORMS:
            found[new_group].setdefault(new_name, value)
        elif value in list(present := _CONVERTED.get(old, {})):  # a stored list has no hash
            found[new_group].setdefault(new_name, present[value])
        else:  # an empty value says the same in every form
            check(not value, old, f"no such field; {now(old)}")
    for name, removed in REMOVED.items():
        *group_names, field_name = name.split(".")
        settings: Any = found
        for group_name in group_names:
            settings = settings.get(group_name) if isinstance(settings, dict) else None
        if isinstance(settings, dict) and field_name in settings:
            value = settings.pop(field_name)
            check(removed.accepted is None or value in removed.accepted, name, f"no such field; {now(name)}")
    return found


def example(kind: Any, default: Any = None) -> str:
    """Returns a value of a field's type as Python writes it: the default, unless that is empty."""
    if default or (default is not None and kind in (bool, int, float)):
        return repr(default)
    if dataclasses.is_dataclass(kind):
        return f"{cast(type, kind).__name__}()"
    if "tuple" in str(kind):
        return "('first', 'second')" if "str" in str(kind) else "(1, 2)"
    return {bool: "True", int: "1", float: "0.5", str: "'text'"}.get(kind, "{'name': 1}")


def coerced(value: Any, kind: Any, name: str, default: Any = None) -> Any:
    """Returns a field's value in the field's type: an integer becomes a float if the field is one, a list a tuple.

    Args:
      value: what a config file, a flag or a program gives.
      kind: the field's type.
      name: the field's name in the error.
      default: the field's default, for the example in the error.

    Raises:
      ConfigError: the value is of another type; the message has an example of a right one.
    """

    def need(right: bool, problem: str) -> None:
        if not right:  # the example takes time, and settings are set by the thousand
            shown = _named(value) or f"for example {example(kind, default)}"
            raise ConfigError(f"{name}: {problem}, not {value!r}; {shown}")

    if dataclasses.is_dataclass(kind):
        need(isinstance(value, cast(type, kind)), f"must be of type {cast(type, kind).__name__}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (bool, int, float, str):
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        need(right, f"must be of type {kind.__name__}")
        return value
    if "tuple" in str(kind):
        need(isinstance(value, list | tuple), "must be a tuple")
        holds, called = (str, "strings") if "str" in str(kind) else (int, "integers")
        need(all(isinstance(item, holds) for item in value), f"must hold {called}")
        return tuple(value)
    need(isinstance(value, Mapping), "must be a mapping")
    return value  # the caller's own, which a config file may go on to fill


def _named(value: Any) -> str:
    """Advises how to name classes and functions that were given instead of their names; empty if there are none."""
    values = value if isinstance(value, list | tuple) else [value]
    names = [f"{item.__module__}:{item.__qualname__}" for item in values if hasattr(item, "__qualname__")]
    return f"name the object by its module, as {', '.join(map(repr, names))}" if names else ""


def freeze(config: T) -> T:
    """Freezes a group and all groups within it, and returns it."""
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            freeze(value)
    config.__dict__[_FROZEN] = True
    return config
