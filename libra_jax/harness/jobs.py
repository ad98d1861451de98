"""What a harness's parts hand each other: one rollout to run, and its end, which a scorer judges."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from libra_jax import protocols
from libra_jax.harness.processes import child
from libra_jax.rewards.repair import snapshots

PROMPT_FIELDS = ("prompt", "issue", "instruction", "question", "expression")
"""Fields of a payload that pose the task. An agent sees these unless the config names others."""

EVERY_FIELD = "*"

_PLACE = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
"""A placeholder. A shell's own `${NAME}` is none."""


def public(task: protocols.Task, fields: Sequence[str]) -> protocols.Task:
    """Returns the task as its agent sees it: with the named fields of its payload, or else with `PROMPT_FIELDS`."""
    if EVERY_FIELD in fields:
        return task
    for name in fields:
        if name not in task.payload:
            raise protocols.DataError(f"task {task.prompt_id}: its payload has no field {name!r}")
    names = fields or [name for name in PROMPT_FIELDS if name in task.payload]
    payload = child.Payload({name: task.payload[name] for name in names}, task.payload.keys() - set(names))
    return protocols.Task(task.prompt_id, payload, task.repeats)


@dataclass(frozen=True)
class Job:
    """One rollout to run.

    Attributes:
      task: its task, with fields that the agent must not see.
      public: the task as the agent sees it.
      endpoint: address of its session.
      root: folder of the rollout alone: `work` is the agent's working directory, `home` its HOME, `tmp` its TMPDIR.
    """

    task: protocols.Task
    public: protocols.Task
    endpoint: protocols.Endpoint
    root: Path

    @property
    def work(self) -> Path:
        """The agent's working directory."""
        return self.root / "work"

    def filled(self, command: Sequence[str] | str) -> list[str]:
        """Returns the words of a command, with the values of its placeholders.

        Placeholders are `{prompt_id}`, `{model}`, `{url}`, and `{NAME}` for each field of the task's payload. Other
        braces stay: they may be code. A command that is one string is run by a shell, and values in it are quoted.
        """
        values = {**self.task.payload, "prompt_id": self.task.prompt_id}
        values |= {"model": self.endpoint.model, "url": self.endpoint.url}
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
        if isinstance(command, str):
            return [
                "/bin/sh",
                "-c",
                _PLACE.sub(lambda at: shlex.quote(texts[at[1]]) if at[1] in texts else at[0], command),
            ]
        for word in command:
            place = _PLACE.fullmatch(word)
            if place is not None and place[1] not in texts:
                raise protocols.DataError(
                    f"config.task.environment_arguments.command: task {self.task.prompt_id} has no field {place[1]!r} "
                    f"for the word {word}; it has {', '.join(texts)}"
                )
        return [_PLACE.sub(lambda at: texts.get(at[1], at[0]), word) for word in command]


@dataclass(frozen=True)
class Finished:
    """The end of an agent's run, for its scorer.

    Attributes:
      task: the task.
      status: exit status of the program, 128 + N after signal N; 0 for a callable in the run's process. None if the
        deadline ended the agent.
      output: last part of what the program printed.
      errors: last part of what it printed to standard error. A sandbox has it in `output`.
      seconds: seconds that the agent ran.
      verdict: what a callable returned; None if it returned nothing, and for commands.
      files: files that it left in its working directory, by path: those that `collect` names.
      refused: why no files were taken, in a few words: they were too large, for example. Empty if they were.
    """

    task: protocols.Task
    status: int | None
    output: str = ""
    errors: str = ""
    seconds: float = 0.0
    verdict: object = None
    files: Mapping[str, snapshots.File] = field(default_factory=dict)
    refused: str = ""


_MACHINES = re.compile(
    r"Connect|Disconnect|Timeout|TimedOut|InternalServer|Unavailable|RateLimit|Overloaded|Network|Protocol|BrokenPipe"
    r"|IncompleteRead|ChunkedEncoding|ClientPayload|RetryError|URLError|SSL|MemoryError"
    r"|^(?:APIError|OSError|ReadError|WriteError)$"  # their subclasses may be an agent's own, such as FileNotFoundError
)
"""In the name of an error: the machine or the endpoint failed, and not the agent."""

_LAST_ERROR = re.compile(
    r"^(?: *\| )?(?:(?:[\w<>]+\.)+(?=[A-Z])|(?=\w*(?:Error|Exception|Exceeded|Failed)))(\w+)(?=:|$)", re.MULTILINE
)
"""Name of an error at the start of a line, as a traceback ends. A group of errors draws a bar before it."""


def failure(message: str, errors: str, reason: str = "") -> protocols.EnvironmentCrashed:
    """Returns the failure of an agent: one of the machine, or else the agent's own.

    Args:
      message: a sentence on it.
      errors: names of the errors that ended the agent, or the end of what it printed.
      reason: name of the last error; empty: as `errors` has it.
    """
    names = _LAST_ERROR.findall(errors)
    last = reason or (names[-1] if names else "")
    # Before its last error, a program's text may quote any. With a reason, all names are of classes.
    if _MACHINES.search(last) or ((reason or not last) and _MACHINES.search(errors)):
        return protocols.AttemptVoided(message)  # a model may write such words, too
    return protocols.AgentFailed(message, (last or "an exit status")[:60])


class AgentRunner(Protocol):
    """Runs the agent of one rollout."""

    async def run(self, job: Job) -> Finished:
        """Runs the agent to its end or deadline, and ends all its processes, also if this call is cancelled.

        Raises:
          EnvironmentCrashed: the agent could not be run.
        """
        ...


def metrics(verdict: object) -> dict[str, float]:
    """Returns the metrics of a verdict, unchecked. Nothing else of it counts because a scorer gives the reward."""
    values = verdict.metrics if isinstance(verdict, protocols.Outcome) else None
    if isinstance(verdict, Mapping):
        values = verdict.get("metrics")
    if not isinstance(values, Mapping):
        return {}
    return {str(name): value for name, value in values.items() if isinstance(value, int | float)}


def outcome(verdict: object, subject: str) -> protocols.Outcome:
    """Returns a verdict as an `Outcome`.

    Args:
      verdict: an `Outcome`, a number, or a mapping with `reward`, and maybe `metrics` and `segment_rewards`.
      subject: who gave the verdict, for errors.

    Raises:
      AttemptVoided: it is none of these.
    """
    if isinstance(verdict, protocols.Outcome):
        return verdict
    values: Mapping[str, Any] = verdict if isinstance(verdict, Mapping) else {"reward": verdict}
    try:
        if isinstance(values["reward"], str):  # float() would take a text, and a verdict is a number
            raise TypeError
        return protocols.Outcome(
            float(values["reward"]),
            {str(name): float(value) for name, value in (values.get("metrics") or {}).items()},
            {int(index): float(value) for index, value in (values.get("segment_rewards") or {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise protocols.AttemptVoided(
            f'{subject} gave the verdict {str(verdict)!r:.120}; it must be a number, or {{"reward": NUMBER}}'
        ) from error
