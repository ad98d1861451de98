"""Makes harnesses from the arguments in a config."""

from __future__ import annotations

import functools
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.harness import jobs, scoring
from libra_jax.harness.processes import callables, commands, confined, program
from libra_jax.rewards.repair import grading
from libra_jax.rollouts import tool_results
from libra_jax.tools import toolkit
from libra_jax.utils import resolving

_FIELD = "task.environment_arguments"


def environment(
    tools: toolkit.Toolkit | None = None,
    command: Sequence[str] | str = (),
    callable: str = "",
    container: str = "",
    sandbox: bool = False,
    python: str = "",
    arguments: Mapping[str, Any] | None = None,
    search: Sequence[str] = (),
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    fields: Sequence[str] = (),
    files: str = "",
    workspace: str = "",
    collect: Sequence[str] = (),
    score: str = scoring.VERDICT,
    score_seconds: float = 60.0,
    partial: bool = False,
    seconds: float = 600.0,
    overdue: str = "crash",
    exits: Sequence[int] = (0,),
    most: int = 64,
    most_mib: int = 32,
    output_bytes: int = 65_536,
    status: str = "",
    demonstrate: str = "",
) -> program.AgentHarness:
    """Returns the harness of one rollout. Give either `command` or `callable`.

    Args:
      tools: Tools of the run, which hold its sandbox.
      command: Words of a command, or one string for a shell. `{NAME}` stands for a field of the task's payload, and
        `{prompt_id}`, `{model}` and `{url}` for those of the session.
      callable: "package.module:function", called as `function(task, endpoint, **arguments)`. An async one runs on the
        run's event loop, a plain one on a thread.
      container: Image of a container in which the command runs, by podman or docker.
      sandbox: Whether the command runs in the run's sandbox, which reaches the session and nothing else.
      python: Interpreter of a process of its own for `callable`, such as that of a virtual environment; "python" is
        the run's. Empty: the run's own process.
      arguments: Further arguments of `callable`.
      search: Directories of modules for `python`. Its working directory is the rollout's.
      options: Further words for podman or docker.
      variables: Further environment variables of the agent. It gets PATH and those of `Endpoint.environment()` anyway.
      fields: Fields of the task's payload that the agent sees: in `task.payload`, or in the file $LIBRA_TASK_FILE of a
        command. "*" is all of them. Empty: those that pose the task (`jobs.PROMPT_FIELDS`), because others may hold
        the answer.
      files: Field of the payload with files for the working directory: texts by path, or a path. Empty: none.
      workspace: Directory whose copy the working directory starts as. Empty: an empty one.
      collect: Patterns of the files that the scorer gets, such as "*.py".
      score: "verdict" (what `callable` returns), "tests" (the task's hidden tests or calls), or
        "package.module:function" of `jobs.Finished`, which returns a number or a `protocols.Outcome`. A command needs
        one of the last two.
      score_seconds: Deadline of the function, or of the hidden tests, in seconds.
      partial: Whether hidden tests give the share that passes.
      seconds: Deadline of the agent in seconds. The session's own limits may come first: `task.max_seconds` of the
        rollout, `task.reset_seconds` before the first request, and `task.tool_seconds` between two requests and after
        the last one, the scorer included.
      overdue: What a missed deadline is: "crash" (infrastructure, retried) or "score" (data: the scorer judges what is
        there).
      exits: Exit statuses that are scored. Others are crashes.
      most: Number of agents that run at once.
      most_mib: Largest size of the working directory in MiB that the scorer may get.
      output_bytes: Last bytes of the program's output, and of its errors, that are kept.
      status: "package.module:function" that reads the outcome of tool calls (`protocols.ReadsStatus.status`). Empty:
        the conventions of `libra_jax.rollouts.tool_results.status`.
      demonstrate: "package.module:function" that returns the solved dialogue of a task, for the warm start
        (`protocols.Demonstrator.demonstration`). Empty: none.
    """
    both = bool(command), bool(callable)
    config_lib.check(sum(both) == 1, _FIELD, "must hold either 'command' or 'callable'")
    for name, value in (("container", container), ("sandbox", sandbox), ("options", options)):
        config_lib.check(not (value and callable), f"{_FIELD}.{name}", "belongs to 'command', not to 'callable'")
    for name, argument in (("python", python), ("arguments", arguments), ("search", search)):
        config_lib.check(not (argument and command), f"{_FIELD}.{name}", "belongs to 'callable', not to 'command'")
    config_lib.check(not search or bool(python), f"{_FIELD}.search", "needs 'python', an interpreter of its own")
    config_lib.check(not options or bool(container), f"{_FIELD}.options", "needs 'container'")
    config_lib.check(not (container and sandbox), f"{_FIELD}.sandbox", "is for commands without 'container'")
    for name, number in (("seconds", seconds), ("score_seconds", score_seconds), ("most", most),
                         ("most_mib", most_mib), ("output_bytes", output_bytes)):  # fmt: skip
        config_lib.check(0 < number < math.inf, f"{_FIELD}.{name}", f"must be positive and finite, not {number}")
    config_lib.check_choice(overdue, ("crash", "score"), f"{_FIELD}.overdue")
    config_lib.check(
        not workspace or os.path.isdir(workspace), f"{_FIELD}.workspace", f"{workspace} is no directory of this host"
    )
    # Hidden tests judge all files, not a choice of them.
    collect = ("*",) if score == scoring.TESTS and not collect else tuple(collect)
    settings = commands.ProgramSettings(
        seconds, output_bytes, collect, most_mib * 2**20, tuple(fields), dict(variables or {}), files, workspace
    )
    if callable:
        runner = _of_callable(callable, python, dict(arguments or {}), search, settings)
    else:
        runner = _of_command(command, container, sandbox, options, settings, tools)
    config_lib.check(
        not (command and score == scoring.VERDICT),
        f"{_FIELD}.score",
        "must be 'tests' or the name of a function: commands that the model has the agent run can write all that the "
        "agent writes, so a verdict of a command's own would be forged",
    )
    return program.AgentHarness(
        callable or (command if isinstance(command, str) else command[0]),
        runner,
        _scorer(score, tools, files, partial, score_seconds, settings),
        settings,
        tuple(exits),
        overdue,
        most,
        tool_results.status if not status else resolving.resolve(status, f"{_FIELD}.status"),
        None if not demonstrate else resolving.resolve(demonstrate, f"{_FIELD}.demonstrate"),
    )


def _of_callable(
    name: str, python: str, arguments: Mapping[str, Any], search: Sequence[str], settings: commands.ProgramSettings
) -> jobs.AgentRunner:
    if not python:
        config_lib.check(not settings.variables, f"{_FIELD}.variables", "need 'python': the run's process has its own")
        function = resolving.resolve(name, f"{_FIELD}.callable", asynchronous=True)
        return callables.InProcess(name, function, arguments, settings)
    config_lib.check(":" in name, f"{_FIELD}.callable", f'{name!r} must have the form "package.module:function"')
    # This package's own folder comes last: plain modules of it can be imported anywhere.
    package = str(Path(__file__).parents[2])
    folders = [os.getcwd(), *(os.path.abspath(folder) for folder in search), package]
    interpreter = sys.executable if python == "python" else _program(python, "python")
    return callables.InChild(interpreter, name, arguments, folders, settings)


def _of_command(
    command: Sequence[str] | str,
    container: str,
    sandbox: bool,
    options: Sequence[str],
    settings: commands.ProgramSettings,
    tools: toolkit.Toolkit | None,
) -> jobs.AgentRunner:
    words = command if isinstance(command, str) else [str(word) for word in command]
    if sandbox:
        return confined.Confined(words, settings, _needed(tools, "sandbox"))
    if not container:
        if not isinstance(words, str):
            words[0] = _program(words[0], "command")
        return commands.Command(words, settings)
    runtime = shutil.which("podman") or shutil.which("docker")
    if runtime is None:
        raise protocols.ConfigError(f"config.{_FIELD}.container: needs podman or docker, and neither is here")
    return commands.Command(words, settings, commands.CommandContainer(runtime, container, tuple(options)))


@functools.cache
def _program(word: str, field: str) -> str:
    """Returns the path of a program. A relative path is one of the run's working directory, if it exists there."""
    if "{" in word or ("/" in word and not os.path.exists(word)):
        config_lib.check(field != "python", f"{_FIELD}.{field}", f"there is no program {word}")
        return word  # a file of the rollout's working directory
    path = shutil.which(word)
    config_lib.check(path is not None, f"{_FIELD}.{field}", f"there is no program {word} on this machine")
    assert path is not None
    # Not resolved: an interpreter of a virtual environment is a link, and knows its place by the link's path.
    return os.path.abspath(path)


def _needed(tools: toolkit.Toolkit | None, name: str) -> toolkit.Toolkit:
    config_lib.check(tools is not None, f"{_FIELD}.{name}", "needs the sandbox of a run")
    assert tools is not None
    return tools


def _scorer(
    score: str,
    tools: toolkit.Toolkit | None,
    files: str,
    partial: bool,
    seconds: float,
    settings: commands.ProgramSettings,
) -> scoring.RolloutScorer:
    if score == scoring.VERDICT:
        return scoring.OwnVerdict()
    if score == scoring.TESTS:
        config_lib.check(bool(files), f"{_FIELD}.files", "must name the field with the files that hidden tests judge")
        grader = grading.grader(_needed(tools, "score"), partial, seconds, settings.most_bytes)
        return scoring.HiddenTests(grader, files, settings.most_bytes)
    function: Callable[..., Any] = resolving.resolve(score, f"{_FIELD}.score", asynchronous=True)
    return scoring.ByFunction(score, function, seconds)
