"""Resolves `"package.module:factory"` of a config to the callable, calls it, and tells what went wrong in it."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.utils import user_code

GIVEN = "given"
"""Stands in for the module name of objects that a Python program passed to `libra_jax.train`."""

SHIPPED = "libra_jax."
"""Beginning of names of what ships. No trial before a run plays or scores with it: it may need programs or machines."""

ITSELF = "libra_jax.utils.resolving:itself"
"""Factory of a reward function that a Python program passed to `libra_jax.train`. Its argument is the name."""

_given: dict[str, Any] = {}

MOST_TOLD = 10
"""Largest number of sentences that one `FirstFew` passes on."""

_LONGEST_TOLD = 300

CLEARED_BY_FLAG = ("task.arguments", "task.environment_arguments")
"""Fields with arguments of a factory that a flag can set as a whole. Others lie within such a field."""

_REMOVED = {
    "libra_jax.agents.environments.verifiers": "release 0.4 of verifiers removed what this adapter used; its "
    "environments run as harnesses now (docs/guides/any_agent.md): task.environment="
    "libra_jax.harness:environment with 'callable': 'libra_jax.examples.outside.verifiers_v1:solve'",
    "libra_jax.agents.tools.calculator": "the tool's module has moved; name it 'calculator', or "
    "'libra_jax.tools.arithmetic:Calculator'",
}
"""Modules that configs may still name, and why they are gone."""

_RENAMED = {
    "data.columns": "data.packing",
    "telemetry.report.sections": "telemetry.report.run_report",
    "utils.call_deadlines": "utils.deadlines",
    "utils.child": "utils.processes",
    "agents.deadlines": "utils.deadlines",
    "agents.guarded": "rollouts.deadline_environment",
    "agents.wire": "rollouts.tool_results",
    "clients": "utils.typed_clients",
    "loops.client": "rollouts.loop_worker_client",
    "loops.worker": "rollouts.loop_worker",
    "planning.least": "models.communication_bounds",
    "planning.pools": "planning.forecast.degree_queues",
    "telemetry.sections": "telemetry.report.run_report",
    "training.columns": "data.packing",
    "weights.sync": "coordinator.weight_sync",
}
"""Modules of `libra_jax` that have another name now."""

_ROOMS = {
    "": ("utils",),
    "agents": ("rollouts", "environments", "rewards", "tools", "chat", "examples", "utils"),
    "agents.environments": ("environments", "examples"),
    "agents.environments.harness": ("harness", "harness.processes"),
    "agents.outside": ("examples.outside",),
    "agents.repair": ("rewards.repair", "examples"),
    "agents.rewards": ("rewards",),
    "agents.sandbox": ("tools.sandbox",),
    "agents.tools": ("tools", "chat"),
    "elastic": ("hybrid",),
    "gateway": ("harness.gateway",),
    "loops": ("rollouts",),
    "models": ("models", "models.adapters", "models.attention", "models.experts", "models.hf"),
    "planning": ("planning", "planning.compiled", "planning.costs", "planning.forecast", "planning.search", "models"),
    "runs": ("build", "telemetry.report"),
    "scheduling": ("scheduling", "scheduling.prediction", "scheduling.rivals"),
    "telemetry": ("telemetry", "telemetry.report"),
    "training": ("training", "data"),
}
"""Rooms of `libra_jax` that were divided or renamed, and the rooms where their modules are now."""


def _exists(module: str) -> bool:
    # By its file, because `find_spec` imports the rooms around a module.
    path = Path(__file__).parents[1].joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _present_name(module: str) -> str:
    """Returns where a module or room of this package is now, if it has moved, else ""."""
    former = module.removeprefix(SHIPPED)
    room, _, name = former.rpartition(".")
    places = [_RENAMED[former]] if former in _RENAMED else [*_ROOMS.get(former, ())[:1]]
    # A module whose name became a room's lies in that room: models.attention is models.attention.attention now.
    places += [place for now in _ROOMS.get(room, ()) for place in (f"{now}.{name}.{name}", f"{now}.{name}")]
    place = next(filter(_exists, places), former)
    return f"{SHIPPED}{place}" if module.startswith(SHIPPED) and place != former else ""


def give(target: Any, field: str, *, name: str = "", text: str = "") -> str:
    """Returns a name under which `resolve` finds an object.

    This is the object's own name if it can be imported. Otherwise it is a name under `GIVEN`, which only this process
    knows.

    Args:
      target: A class, a function or another callable of the caller.
      field: Config field that will hold the name, for errors.
      name: Readable name of the object. Empty: the object's own name.
      text: Text that identifies the object's content. A change makes it a different object. Empty: its source code.
    """
    config_lib.check(callable(target), field, f"{target!r} is not callable")
    module, qualified_name = getattr(target, "__module__", ""), getattr(target, "__qualname__", type(target).__name__)
    # Only if the name leads back to this very object: a local one, or one that was replaced, has no name to import.
    if module not in ("", "__main__", "builtins") and getattr(sys.modules.get(module), qualified_name, None) is target:
        return f"{module}:{qualified_name}"
    try:  # a workdir is named after the config, so an edited definition has to start another run
        text = text or inspect.getsource(target)
    except (OSError, TypeError):
        text = qualified_name
    label = f"{name or qualified_name.rpartition('.')[2].strip('<>')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    _given[label] = target
    return f"{GIVEN}:{label}"


def itself(name: str) -> Any:
    """Returns the function with this name (see `resolve`). Serves as a factory of reward functions."""
    return resolve(name, "reward.functions")


def shown(name: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Returns a factory's name for a sentence. An object of the caller's program keeps the name it has there."""
    if name == ITSELF:
        name = str(arguments.get("name", name))
    module, _, label = name.partition(":")
    return label.rpartition("-")[0] if module == GIVEN else name


def raised(error: BaseException) -> str:
    """Returns what a user's code raised, and where: `raised KeyError: 'gold' (reward.py, line 37)`.

    The place is the innermost line outside this package and installed packages. Without such a line, there is no place.
    """
    error = user_code.original(error)
    text = f"raised {type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, SyntaxError) and error.filename:  # its message already names the place
        return text
    frames = traceback.extract_tb(error.__traceback__)
    place = user_code.place((frame.filename, frame.lineno) for frame in frames)
    return f"{text} ({place})" if place else text


def _nearest(name: str, names: Iterable[str], likeness: float = 0.6) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=likeness)
    return f"; did you mean {near[0]!r}?" if near else ""


def resolve(name: str, field: str, *, asynchronous: bool = False) -> Callable[..., Any]:
    """Returns the callable that `"package.module:factory"` names. The working directory is searched too.

    Args:
      name: Name in the config.
      field: Config field with the name, for example "task.environment", for errors.
      asynchronous: Whether it may be async. A factory may not.

    Raises:
      ConfigError: The module or attribute does not exist (the nearest name is suggested), the import fails, or the name
        is not a plain callable.
    """
    module_name, _, attribute = name.partition(":")
    config_lib.check(bool(module_name and attribute), field, f'{name!r} must have the form "package.module:factory"')
    if module_name == GIVEN:
        config_lib.check(
            attribute in _given,
            field,
            f"{name!r} is an object that a Python program handed to libra_jax.train; only that program knows it. Call "
            "train from there again, or put the object into a module and name it here",
        )
        return cast("Callable[..., Any]", _given[attribute])
    config_lib.check(module_name not in _REMOVED, field, _REMOVED.get(module_name, ""))
    present = _present_name(module_name)
    config_lib.check(not present, field, f"{module_name} has moved; name it {present}:{attribute}")
    # A Python script has its own folder on the path instead of the working directory.
    # Appended, not inserted: a user's file must not hide a module of the standard library.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with user_code.contain_exits():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself exists, but a module that it imports does not.
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            missing, why = str(error.name), "is not installed"
            if missing.startswith(SHIPPED):
                rooms = [SHIPPED + room for room in _ROOMS.get(missing.removeprefix(SHIPPED), ())]
                place = ", ".join(rooms) or _present_name(missing)
                why = f"{f'has moved to {place}' if place else 'does not exist'}; see docs/concepts/architecture.md"
            raise protocols.ConfigError(
                f"config.{field}: {module_name} needs the module {missing}, which {why}"
            ) from error
        # For a short name, some installed package is always similar, so a top-level suggestion has to be much closer.
        hint = _nearest(module_name, _siblings(module_name), likeness=0.6 if "." in module_name else 0.8)
        raise protocols.ConfigError(f"config.{field}: there is no module {module_name!r}{hint}") from error
    except Exception as error:  # the user's own code runs during the import
        raise protocols.ConfigError(f"config.{field}: importing {module_name} {raised(error)}") from error
    target = getattr(module, attribute, None)
    if target is None:
        names = [key for key in vars(module) if not key.startswith("_")]
        candidates = [key for key in names if getattr(vars(module)[key], "__module__", "") == module_name]
        hint = _nearest(attribute, names) or (f"; it has {', '.join(candidates[:MOST_TOLD])}" if candidates else "")
        raise protocols.ConfigError(f"config.{field}: {module_name} has no {attribute!r}{hint}")
    config_lib.check(callable(target), field, f"{name!r} is not callable")
    config_lib.check(
        asynchronous or not inspect.iscoroutinefunction(target),
        field,
        f"{name!r} is async; a factory must be a plain function",
    )
    return cast("Callable[..., Any]", target)


def _siblings(module_name: str) -> list[str]:
    """Returns the modules beside the place of `module_name`: in its deepest existing package, or at the top level."""
    package, _, _ = module_name.rpartition(".")
    if not package:
        return [item.name for item in pkgutil.iter_modules()]
    try:
        parent = importlib.import_module(package)
    except Exception:  # the caller reports the missing module itself
        return [f"{name}.{module_name.rpartition('.')[2]}" for name in _siblings(package)]
    return [f"{package}.{item.name}" for item in pkgutil.iter_modules(getattr(parent, "__path__", []))]


def check_arguments(factory: Callable[..., Any], name: str, arguments: Mapping[str, Any], field: str) -> None:
    """Raises ConfigError if a factory does not take the arguments. The message names the field."""
    try:
        signature = inspect.signature(factory)
        signature.bind(**arguments)
    except TypeError as error:
        unknown = [key for key in arguments if key not in signature.parameters]
        hint = _nearest(unknown[0], signature.parameters) if unknown else ""
        if unknown and not hint:
            hint = f"; it takes {', '.join(signature.parameters) or 'none'}"
            # Often left over from the config's own environment or source, where the command line names another.
            if field in CLEARED_BY_FLAG:
                hint += f". Clear those of the config file with --config.{field}={{}}"
        raise protocols.ConfigError(
            f"config.{field}: {shown(name)} cannot be called with these ({error}){hint}"
        ) from error
    except ValueError:  # a callable written in C may have no readable signature
        pass


def call(factory: Callable[..., Any], name: str, arguments: Mapping[str, Any], field: str) -> Any:
    """Checks the arguments of a factory, and calls it."""
    check_arguments(factory, name, arguments, field)
    try:
        with user_code.contain_exits():
            return factory(**arguments)
    except protocols.LibraError:
        raise
    except Exception as error:
        raise protocols.ConfigError(f"config.{field}: {shown(name)} {raised(error)}") from error


@contextlib.contextmanager
def named(name: str, field: str, call: str) -> Iterator[None]:
    """Turns an error of a factory's product into a ConfigError that names factory, field and call."""
    try:
        with user_code.contain_exits():
            yield
    except protocols.LibraError:
        raise
    except Exception as error:  # the user's own code ran
        raise protocols.ConfigError(f"config.{field}: {call} of {shown(name)} {raised(error)}") from error


@contextlib.contextmanager
def contain_task_exits() -> Iterator[None]:
    """Turns a SystemExit of a background task of user code, which ends the event loop, into a LibraError.

    Run the event loop inside it.
    """
    try:
        with user_code.contain_exits():
            yield
    except user_code.UserExit as error:
        raise protocols.LibraError(f"a task that your code started {raised(error)}") from error


@dataclass
class FirstFew:
    """Shows only the first `MOST_TOLD` of many similar faults. Broken code or a broken environment may cause thousands.

    Attributes:
      say: Called with each sentence, including its full stop. The last one says that further ones are not shown.
      told: Number of sentences so far.
    """

    say: Callable[[str], None]
    told: int = 0

    def tell(self, sentence: str) -> None:
        """Takes another sentence, without its full stop."""
        self.told += 1
        if self.told <= MOST_TOLD:
            self.say(f"{sentence}{'; further ones are not shown' if self.told == MOST_TOLD else ''}.")


def loggable(text: str) -> str:
    """Returns the beginning of a text that a policy may have written. No escape in it reaches the terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:_LONGEST_TOLD])
