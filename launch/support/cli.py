"""What every script here shares: flags, a config file, and errors that are one sentence instead of a traceback."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import gc
import itertools
import logging as python_logging
import os
import re
import signal
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from support import config_files

from absl import app, flags, logging

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.config import listing
from libra_jax.telemetry import escapes


class _MappingParser(flags.ArgumentParser):
    """Reads a field that is a mapping, such as --config.task.arguments="{'phases': 2}"."""

    def parse(self, argument: Any) -> dict[str, object]:
        if isinstance(argument, Mapping):
            return dict(argument)
        try:
            value = ast.literal_eval(argument)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{argument!r} is no mapping; one looks like {{'name': value}}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{argument!r} is no mapping; one looks like {{'name': value}}")
        return value


def _flags_of_configs() -> types.ModuleType:
    """Returns `ml_collections.config_flags`, which scripts without a config run without.

    It reads a field that is a mapping, too.
    """
    from ml_collections import config_flags

    config_flags.register_flag_parser_for_type(Mapping[str, Any], _MappingParser())
    return config_flags


GARBAGE_THRESHOLDS = (20_000, 50, 20)
"""Of `gc.set_threshold`: a coordinator keeps many small objects for long, hardly any of them in cycles, and Python's
defaults have it spend a quarter of a busy scheduler's time looking for those."""


FAILED, MISTAKEN = 1, 2
"""Exit statuses of work that fails, and of a command that has to change first: its flags, its config, a setting."""

REPOSITORY = Path(__file__).resolve().parents[2]
"""Folder that holds `launch/` and `configs/`. Scripts may be started from any folder."""

HELP_FLAG = "config_help"
"""Flag that lists settings; its value, a word to look for, may be left out."""


_WITHOUT_CONFIG = {"config", "flagfile", "help", "helpshort", "helpfull", "helpxml", "?"}
"""Flags that name a config, may name one, or need none."""


def run(
    main: Callable[[], int | None],
    config_type: type[Any] = config_lib.RunConfig,
    default_config: str | None = None,
    interrupted: str = "interrupted",
    lost: int = FAILED,
    needs_config: bool = False,
    positional: str = "",
) -> None:
    """Runs `main` under absl. A LibraError becomes `error: <sentence>`, any other error `error: <Type>: <text>`.

    The exit status is `MISTAKEN` if a flag or a setting is wrong, and `FAILED` if the work fails.
    LIBRA_JAX_TRACEBACK=1 in the environment shows tracebacks as well.

    Args:
      main: the script.
      config_type: dataclass of the script's config file, for the nearest field to a mistyped `--config.` flag.
      interrupted: what Ctrl-C is answered with.
      lost: exit status of a WorkerLost, where that differs from other errors.
      default_config: config file of the repository if no --config is given, such as "configs/simulate.py". As the
        flag's own default it would be read before anything here could turn its errors into a sentence.
      needs_config: whether the script prints its usage and ends with status `MISTAKEN` where no --config is given.
      positional: flag whose value may stand first, without the flag's name.
    """
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    sys.path.append(os.getcwd())  # where a user's own "module:factory" lives; last, so that it shadows nothing
    if "config" in flags.FLAGS:
        _flags_of_configs()
        flags.DEFINE_string(
            HELP_FLAG,
            None,
            "List the settings of --config with value, default and meaning: all, or those that hold a word "
            "(=learning_rate). Without --config, the values are the defaults.",
            module_name=sys.argv[0],  # as the script's own, so that --help shows it beside --config
        )
    logging.set_verbosity(logging.WARNING)  # libraries' own progress is not for the terminal; -v=0 brings it back
    # A config file without `return` is answered in a sentence, which needs no log lines of ml_collections above it.
    python_logging.getLogger("absl").addFilter(lambda record: "get_config() returned None" not in str(record.msg))
    logging.get_absl_handler().setFormatter(_Visible())
    app.run(
        lambda _: sys.exit(_guarded(main, interrupted, lost)),
        flags_parser=functools.partial(_parse_flags, config_type, default_config, needs_config, positional),
    )


class _Visible(logging.PythonFormatter):
    """Formats log records as absl does, with what would control a terminal spelled out."""

    def format(self, record: python_logging.LogRecord) -> str:
        return escapes.visible(super().format(record), lines=True)


def seeds(text: str) -> list[int]:
    """What --seeds says, each once.

    Raises:
      ConfigError: a part is no whole number.
    """
    found = []
    for part in text.split(","):
        if not part.strip().isdecimal():
            raise protocols.ConfigError(f"--seeds: {part!r} is no seed; seeds are whole numbers from 0, like 0,1,2")
        found.append(int(part))
    return list(dict.fromkeys(found))


def check_output(path: Path) -> None:
    """Makes the folder of --output and sees that the file can be written, before there is work to lose.

    Raises:
      DataError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise protocols.DataError(f"--output: {path} cannot be written ({error.strerror or error})") from error


def read_config(config_type: type[Any], file: str, settings: Sequence[str]) -> config_lib.RunConfig:
    """Returns the config of a file, not checked yet, under `--config.` flags, as launch/train.py would read both.

    Args:
      config_type: dataclass of the file's config, for the nearest field to a mistyped flag.
      file: path, with the variant behind a colon.
      settings: the flags, like "--config.steps=10".

    Raises:
      ConfigError: the file or a flag cannot be read; the message says which.
    """
    argv, own, path = ["config", f"--config={file}", *settings], flags.FlagValues(), file.partition(":")[0]
    _flags_of_configs().DEFINE_config_file("config", None, flag_values=own, lock_config=True, sys_argv=argv)
    try:
        with config_files.watched(path):
            own(argv)
            _check_made(path, own.config)
            made: config_lib.RunConfig = own.config
            return made
    except Exception as error:  # the file is a user's program, which may raise anything
        said = config_files.sentence(error, path) or _flag_sentence(config_type, argv, error)
        raise protocols.ConfigError(said) from error


def _guarded(main: Callable[[], int | None], interrupted: str, lost: int = FAILED) -> int:
    try:
        return main() or 0
    except Exception as error:
        traced = bool(os.environ.get("LIBRA_JAX_TRACEBACK"))
        if traced:
            print(escapes.visible(traceback.format_exc(), lines=True), end="", file=sys.stderr)
        said = str(error)
        if not isinstance(error, protocols.LibraError):
            said = " ".join(f"{type(error).__name__}: {error}".split())  # on one line
            said += "" if traced else " (unforeseen: LIBRA_JAX_TRACEBACK=1 in the environment shows where)"
        print(f"error: {escapes.visible(said, lines=True)}", file=sys.stderr)
        if isinstance(error, protocols.ConfigError):
            return MISTAKEN
        return lost if isinstance(error, protocols.WorkerLost) else FAILED
    except KeyboardInterrupt:
        print(f"error: {interrupted}", file=sys.stderr)
        return 130


def _parse_flags(
    config_type: type[Any], default_config: str | None, needs_config: bool, positional: str, argv: Sequence[str]
) -> Any:
    """Parses the flags; ends the process silently where the reader of --help has left, as `head` does."""
    try:
        try:
            return _parsed(config_type, default_config, needs_config, positional, argv)
        finally:
            sys.stdout.flush()  # else the interpreter would meet the closed pipe as it ends
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _parsed(
    config_type: type[Any], default_config: str | None, needs_config: bool, positional: str, argv: Sequence[str]
) -> Any:
    if positional and len(argv) > 1 and not argv[1].startswith("-"):
        argv = [argv[0], f"--{positional}={argv[1]}", *argv[2:]]
    _help(config_type, default_config, argv)
    named = {argument.lstrip("-").split("=")[0] for argument in argv[1:] if argument.startswith("-")}
    if needs_config and not named & _WITHOUT_CONFIG:
        known = {*flags.FLAGS, *(f"no{name}" for name in flags.FLAGS)}
        mistyped = [name for name in sorted(named) if name and not name.startswith("config.") and name not in known]
        said = _unknown_flag(config_type, mistyped[0]) if mistyped else "no --config is given"
        print(f"error: {escapes.visible(said, lines=True)}\n{_usage(argv[0])}", file=sys.stderr)
        sys.exit(MISTAKEN)
    if default_config and "config" not in named:
        argv = [argv[0], f"--config={REPOSITORY / default_config}", *argv[1:]]
    file = _config_file(argv).partition(":")[0] if "config" in flags.FLAGS else ""
    try:
        with config_files.watched(file):
            remaining = flags.FLAGS(list(argv))
            if len(remaining) > 1:
                raise flags.Error(f"unexpected argument {remaining[1]!r}; settings look like --config.steps=10")
            if "config" in flags.FLAGS:
                _check_made(file, flags.FLAGS.config)
        return remaining
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    except BaseException as error:
        raised = config_files.sentence(error, file) if file else None
        if isinstance(error, SystemExit | BrokenPipeError) and raised is None:  # --help ends so
            raise
        if os.environ.get("LIBRA_JAX_TRACEBACK"):
            traceback.print_exc()
        said = raised or _missing_flag(argv[0], positional, error) or _flag_sentence(config_type, argv, error)
        print(f"error: {escapes.visible(said, lines=True)}", file=sys.stderr)
        sys.exit(MISTAKEN)


def _unknown_flag(config_type: type[Any], name: str) -> str:
    """Says that a flag does not exist, with the setting of that name, or with the nearest flag."""
    named = [item.name for item in listing.settings(config_type) if f".{item.name}".endswith(f".{name}")]
    if named and "config" in flags.FLAGS:
        offered = [name] if name in named else named
        return f"there is no flag --{name}; did you mean --config.{' or --config.'.join(offered)}?"
    near = difflib.get_close_matches(name.partition(".")[0], list(flags.FLAGS), n=1)
    hint = f"did you mean --{near[0]}?" if near else "--help shows the flags"
    return f"there is no flag --{name}; {hint}"


def _missing_flag(script: str, positional: str, error: BaseException) -> str | None:
    """Says which flag has to be given; None if the error is another one."""
    missing = re.search(r"^flag --(\w+)=None: Flag --\1 must have a value", str(error))
    if missing is None:
        return None
    command = f"python {os.path.relpath(script)}"
    if missing[1] == positional:
        word = positional.upper()
        return f"no {word} is given; usage: {command} {word} [FLAG ...]; {command} --help shows the flags"
    return f"no --{missing[1]} is given; {command} --help shows the flags"


def _usage(script: str) -> str:
    """Says how a script is given its config, and which configs ship with the repository."""
    shown, folder = [], REPOSITORY / "configs"
    for file in sorted(folder.glob("*.py")):
        with contextlib.suppress(OSError, SyntaxError):
            about = ast.get_docstring(ast.parse(file.read_text())) or ""
            if not {Path(script).name, "quickstart.sh"} & set(re.findall(r"[\w.]+", about)):
                continue
            shown.append(f"  {os.path.relpath(file):32} {textwrap.shorten(about.split('. ')[0], 90)}")
    command, quickstart = f"python {os.path.relpath(script)}", os.path.relpath(folder / "quickstart.py")
    return "\n".join(
        [
            f"usage: {command} --config={quickstart} [--config.FIELD=VALUE ...] [FLAG ...]",
            *shown,
            f"{command} --help shows the flags, and --{HELP_FLAG} every FIELD with default and meaning.",
        ]
    )


def _help(config_type: type[Any], default_config: str | None, argv: Sequence[str]) -> None:
    """Answers --config_help, which absl would refuse without a value, and ends the process."""
    asked = [argument.lstrip("-").partition("=") for argument in argv[1:] if argument.startswith("-")]
    words = [word for name, _, word in asked if name == HELP_FLAG]
    if not words or "config" not in flags.FLAGS:
        return
    file, values = _config_file(argv) or (str(REPOSITORY / default_config) if default_config else ""), None
    if file:
        try:
            made = read_config(config_type, file, _settings(argv))
        except protocols.ConfigError as error:
            print(f"error: {escapes.visible(str(error), lines=True)}", file=sys.stderr)
            sys.exit(MISTAKEN)
        config_type, values = type(made), escapes.redacted_settings(listing.values_of(made))
    shown = listing.listing(config_type, words[-1], values)
    if not shown:
        print(f"error: --{HELP_FLAG}={words[-1]}: no setting's name or meaning holds this word", file=sys.stderr)
        sys.exit(MISTAKEN)
    if values is not None:
        count = len(listing.changed(config_type, values))
        print(f"Values of {os.path.relpath(file)}; in all, {count} differ from their default, which stands beside.")
    print(escapes.visible(shown, lines=True))
    sys.exit(0)


def _settings(argv: Sequence[str]) -> list[str]:
    """Returns the arguments that set a field of the config, with values that stand apart."""
    found = []
    for argument, following in itertools.pairwise([*argv[1:], "-"]):
        if re.match(r"--?(no)?config\.", argument):
            found += [argument] if "=" in argument or following.startswith("-") else [argument, following]
    return found


def _check_made(file: str, made: Any) -> None:
    """Refuses what is no config. A config file that cannot be read raises here, not in main."""
    if made is None and not file:
        return
    getattr(made, "name", None)  # raises the error with which ml_collections could not read the file
    if isinstance(made, config_lib.RunConfig):
        return
    returned = "nothing" if made is None else f"a {type(made).__name__}"
    raise flags.Error(
        f"--config={file}: get_config() returned {returned}; it has to return a libra_jax.config.RunConfig: "
        "begin with config = RunConfig(), set its fields, and return it"
    )


def _flag_sentence(config_type: type[Any], argv: Sequence[str], error: BaseException) -> str:
    """A sentence for a flag that cannot be parsed; for a mistyped config field, with the nearest field's full name."""
    if isinstance(error, AttributeError | KeyError):
        for argument in argv[1:]:
            name, separator, text = argument.removeprefix("--").partition("=")
            if not name.startswith("config."):
                continue
            path = name.removeprefix("config.").split(".")
            try:
                value = ast.literal_eval(text) if separator else True
            except (SyntaxError, ValueError):
                value = text
            try:
                config_lib.parse(config_type, _nested(path, value))
            except protocols.ConfigError as unknown:
                if "no such field" in str(unknown):
                    return str(unknown)
            if sentence := _unknown_key(config_type, path, value, error):
                return sentence
    if isinstance(error, protocols.ConfigError):  # a group that refuses a value knows its own name, and no other's
        for name in (argument.removeprefix("--").partition("=")[0] for argument in argv[1:]):
            refused = re.match(rf"\w+\.{re.escape(name.rpartition('.')[2])}: ", str(error))
            if name.startswith("config.") and refused:
                return f"{name}: {str(error)[refused.end() :]}"
    if isinstance(error, flags.UnrecognizedFlagError):
        return _unknown_flag(config_type, error.flagname)
    file, _, variant = _config_file(argv).partition(":")
    if isinstance(error, OSError) and not Path(file).exists():
        near = difflib.get_close_matches(Path(file).name, [item.name for item in Path(file).parent.glob("*.py")], n=1)
        hint = f"; did you mean {Path(file).parent / near[0]}?" if near else ""
        return f"--config={file}: no such config file{hint}"
    if isinstance(error, OSError):
        return "--config: " + " ".join(str(error).split("Attempted")[-1].split())
    if isinstance(error, AttributeError) and "'get_config'" in str(error):
        return f"--config={file}: defines no function get_config; it has to return a libra_jax.config.RunConfig"
    if wrong := _NO_VALUE.search(str(error)):
        flag, value = wrong["flag"].removesuffix(f"={wrong['value']}"), wrong["value"]
        wanted = (
            "a number" if "float" in wrong["kind"] else "a whole number" if "int" in wrong["kind"] else "True or False"
        )
        example = [item.default for item in listing.settings(config_type) if flag == f"config.{item.name}"]
        return f"--{flag}: {value!r} is not {wanted}" + (f"; for example --{flag}={example[0]}" if example else "")
    if wrong := _NO_TUPLE.search(str(error)):
        items = ",".join(repr(part.strip()) for part in wrong["value"].strip("()[]").split(","))
        once = f'--{wrong["flag"]}="({items})"'
        return f"--{wrong['flag']}: {wrong['value']!r} is no tuple; write {once}, or give the flag once for each value"
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if others and "parsing config file" in first:  # a traceback of the file follows; its last line says what is wrong
        if "get_config() takes 0 positional arguments" in others[-1]:
            return f"--config={file}: this config takes no variant, so leave out :{variant}"
        if "get_config() missing 1 required positional argument" in others[-1]:
            return f"--config={file}: this config needs a variant; give one as --config={file}:VARIANT"
        return "--config: " + others[-1]
    return first


_NO_VALUE = re.compile(
    r"flag --(?P<flag>.*): \(?['\"]?(?P<kind>invalid literal for int\(\) with base \d+: |"
    r"could not convert string to float: |Non-boolean argument to boolean flag', )['\"](?P<value>.*)['\"]"
)
"""absl's refusal of a number or of a switch, in Python's own words for what cannot be read."""


_NO_TUPLE = re.compile(r"flag --(?P<flag>[\w.]+)=.*Error while parsing string: (?P<value>.*) as tuple\.", re.DOTALL)
"""The refusal of a tuple by ml_collections."""


def _config_file(argv: Sequence[str]) -> str:
    """What the last --config says, its variant included."""
    found = ""
    for argument, following in itertools.pairwise([*argv[1:], ""]):
        name, separator, text = argument.lstrip("-").partition("=")
        if name == "config" and argument.startswith("-"):
            found = text if separator else following
    return found


def _nested(path: Sequence[str], value: Any) -> Any:
    for part in reversed(path):
        value = {part: value}
    return value


def _unknown_key(config_type: type[Any], path: list[str], value: Any, error: BaseException) -> str | None:
    """For a field that is a mapping: a flag can change a key that the config file has set, and add none."""
    kind: Any = config_type
    for depth, part in enumerate(path):
        if not dataclasses.is_dataclass(kind):
            if "Mapping" not in str(kind) or repr(part) not in str(error):  # another flag's fault
                return None
            field, keys = ".".join(path[:depth]), path[depth:]
            return (
                f"config.{field}: the config file sets no {part!r} in it; give it whole, as "
                f'--config.{field}="{_nested(keys, value)!r}"'
            )
        kind = get_type_hints(kind).get(part)
    return None
