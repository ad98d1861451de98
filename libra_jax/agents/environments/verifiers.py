"""Environments written for the `verifiers` package (github.com/PrimeIntellect-ai/verifiers), with their own rubrics.

Single-turn, multi-turn and tool environments of its `MultiTurnEnv` kind: releases before 0.4, which has them no more.
An environment runs its own rollout; the model that it calls is our policy, whose tokens stay as they were sampled.
What cannot be supported is refused: group-level rewards, and dialogues that do not grow at their end alone. A step that
takes longer than `task.tool_seconds` is a crash, even of a tool: the environment runs it itself, and it is not cut off.

    config.task.source = "libra_jax.agents.environments.verifiers:task_source"
    config.task.environment = "libra_jax.agents.environments.verifiers:environment"
    config.task.arguments = config.task.environment_arguments = {
        "name": "verifiers:ReasoningGymEnv", "arguments": {"gym": "leg_counting"}
    }

`name` is an installed environment's (`load_environment`), or "package.module:factory" of one. Tools of the environment
are described to the policy, and called, in the format of `config.tools`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from libra_jax import config, protocols
from libra_jax.agents import resolving, splits
from libra_jax.agents.environments import verifiers_rollout
from libra_jax.agents.tools import formats, toolkit

_INSTALL = "install it as third_party/cpu/lock.txt pins it, with --no-deps (it would bring an older mcp along)"


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Environments of the package take the process's signals for themselves when they are made: they are given back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


_made: dict[tuple[str, str], Any] = {}
"""The package's environments by name and arguments. All attempts share one, as the package means it."""


def _make(name: str, given: Mapping[str, Any], field: str) -> Any:
    os.environ.setdefault("VF_LOG_LEVEL", "WARNING")
    try:
        import datasets  # here: they are optional, and take seconds to import
        import verifiers
        import verifiers.envs.multiturn_env
        from verifiers.clients import client
    except ModuleNotFoundError as error:
        missing = (
            f"the package {error.name}" if error.name and "verifiers" not in error.name else "verifiers before 0.4"
        )
        raise protocols.ConfigError(f"config.{field}: these environments need {missing}; {_INSTALL}") from error
    del client
    logging.getLogger("verifiers").setLevel(logging.WARNING)
    datasets.disable_progress_bars()
    with _own_signals():
        if ":" in name:
            made = resolving.call(resolving.resolve(name, f"{field}.name"), name, given, f"{field}.arguments")
        else:
            try:
                made = verifiers.load_environment(name, **given)
            except Exception as error:  # of many kinds; the package says what it misses
                raise protocols.ConfigError(
                    f"config.{field}.name: verifiers cannot load {name!r} with {given} ({error})"
                ) from error
    config.check(
        isinstance(made, verifiers.envs.multiturn_env.MultiTurnEnv),
        f"{field}.name",
        f"{name} makes {type(made).__name__}, which is no MultiTurnEnv of verifiers; others drive the model themselves",
    )
    config.check(
        not made.rubric.has_group_rewards,
        f"{field}.name",
        f"the rubric of {name} scores attempts by groups, which is not supported: each is scored by itself here",
    )
    verifiers_rollout.tell(made)
    return made


def _load(name: str, arguments: Mapping[str, Any] | None, field: str) -> Any:
    config.check(bool(name), f"{field}.name", 'is empty: name an installed environment, or "package.module:factory"')
    given = dict(arguments or {})
    key = name, json.dumps(given, sort_keys=True)
    if key not in _made:
        _made[key] = _make(name, given, field)
    return _made[key]


class DatasetTasks:
    """An environment's training and evaluation rows; the former reshuffled each epoch."""

    def __init__(self, name: str, environment: Any, seed: int) -> None:
        self._name, self._seed = name.rpartition(":")[2], seed
        self._train = environment.get_dataset()
        environment.build_eval_dataset()
        self._evaluation = environment.eval_dataset
        self._order = functools.lru_cache(maxsize=2)(self._permutation)

    def task(self, index: int) -> protocols.Task:
        """The index-th training task, over as many epochs as it takes."""
        epoch, place = divmod(index, len(self._train))
        return self._make("", epoch, self._train, self._order(epoch)[place])

    def evaluation_task(self, index: int) -> protocols.Task:
        """The index-th evaluation task, over and over.

        Raises:
          DataError: the environment has no evaluation dataset.
        """
        if self._evaluation is None or not len(self._evaluation):
            raise protocols.DataError(
                f"{self._name}: the environment has no evaluation dataset; give --config.evaluation.every=0"
            )
        epoch, place = divmod(index, len(self._evaluation))
        return self._make("-evaluation", epoch, self._evaluation, place)

    def __len__(self) -> int:
        """Training tasks of an epoch."""
        return len(self._train)

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        splits.generator("epoch", self._seed, epoch).shuffle(order)
        return order

    def _make(self, split: str, epoch: int, rows: Any, place: int) -> protocols.Task:
        row = {key: value for key, value in rows[place].items() if value is not None}
        try:
            json.dumps(row)
        except (TypeError, ValueError) as error:
            raise protocols.DataError(f"{self._name}{split}, row {place}: JSON cannot hold it ({error})") from error
        suffix = f"-epoch{epoch}" if epoch else ""
        return protocols.Task(f"{self._name}{split}-{place}{suffix}", {"row": row})


class VerifiersEnvironment:
    """One attempt: a rollout of the environment."""

    def __init__(self, made: Any, tools: toolkit.Toolkit | None) -> None:
        self._made = made
        self._format = tools.format if tools is not None else formats.named("hermes")
        self._describe = tools is None or tools.describe
        self._rollout: verifiers_rollout.Rollout | None = None
        self._tools: Sequence[Mapping[str, Any]] = ()

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """The environment's prompt; its tools are described in the system message."""
        await self.close()
        self._rollout = verifiers_rollout.Rollout(self._made, task.payload["row"])
        asked = await self._rollout.asked()
        if isinstance(asked, verifiers_rollout.End):
            raise protocols.EnvironmentCrashed(
                f"task {task.prompt_id}: verifiers ended it before the policy said a word"
            )
        self._tools = asked.tools
        shown = [protocols.Message(_role(message), _text(message)) for message in asked.messages]
        if not (self._tools and self._describe):
            return shown
        told = self._format.instructions(self._tools)
        if shown[0].role == "system":
            return [protocols.Message("system", f"{shown[0].content}\n\n{told}"), *shown[1:]]
        return [protocols.Message("system", told), *shown]

    async def step(self, output: str) -> protocols.StepResult:
        """Hands the output to the environment; what it answers, or what it is worth."""
        if self._rollout is None:
            raise RuntimeError("step before reset")
        calls = self._calls(output)
        began = asyncio.get_running_loop().time()
        # What is no call is handed over as one whose arguments are no JSON: the environment refuses it, as it would
        # what a model's own API had let pass, and its place in the dialogue is kept.
        self._rollout.say(
            output, [(str(call.name), "" if call.problem else json.dumps(call.arguments)) for call in calls]
        )
        asked = await self._rollout.asked()
        if isinstance(asked, verifiers_rollout.End):
            # What the tools said is not told: the dialogue is over. What is no call has failed in any case.
            returns = [
                protocols.ToolReturn(str(call.name), "failure" if call.problem else "success", "") for call in calls
            ]
            return protocols.StepResult(tool_returns=returns, done=True, reward=asked.reward, metrics=asked.metrics)
        self._tools = asked.tools
        seconds = asyncio.get_running_loop().time() - began
        answered = [message for message in asked.messages if _role(message) == "tool"]
        others = [protocols.Message(_role(item), _text(item)) for item in asked.messages if _role(item) != "tool"]
        pairs = zip(calls, answered, strict=False)
        return protocols.StepResult(
            tool_returns=[self._return(call, _text(message), seconds) for call, message in pairs], messages=others
        )

    def _calls(self, output: str) -> list[formats.Call]:
        """The calls of an output, with what is wrong with them; none where the environment has no tools."""
        if not self._tools:
            return []
        parser = self._format.parser(self._tools)
        known = [schema["function"]["name"] for schema in self._tools]
        return [_checked(call, known) for call in (*parser.feed(output), *parser.finish())]

    def _return(self, call: formats.Call, text: str, seconds: float) -> protocols.ToolReturn:
        assert self._rollout is not None
        if call.problem:
            return protocols.ToolReturn(str(call.name), "failure", f"error: {call.problem}", seconds)
        failed = text in self._rollout.failures.tools
        return protocols.ToolReturn(str(call.name), "failure" if failed else "success", text, seconds)

    async def close(self) -> None:
        """Ends the rollout, with the environment's own cleanup."""
        held, self._rollout = self._rollout, None
        if held is not None:
            await held.close()


def _checked(call: formats.Call, known: Sequence[str]) -> formats.Call:
    if call.problem:
        return formats.Call("call", None, call.problem)
    if call.name not in known:
        return formats.Call("unknown", None, f"no tool {call.name!r}; there are: {', '.join(known)}")
    arguments = call.arguments
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        return formats.Call(call.name, None, "the arguments must be a JSON object")
    return formats.Call(call.name, dict(arguments))


def _role(message: Any) -> str:
    return "user" if message.role == "text" else str(message.role)


def _text(message: Any) -> str:
    return verifiers_rollout.text_of(message.content)


def task_source(
    path: str = "", seed: int = 0, name: str = "", arguments: Mapping[str, Any] | None = None
) -> DatasetTasks:
    """The rows of an environment's dataset.

    Args:
      path: must be empty: the environment brings its dataset.
      seed: of the order of training rows.
      name: of an installed environment, or "package.module:factory" of one.
      arguments: with which it is made; plain values.

    Raises:
      ConfigError: a path is given, the package is missing, or the environment cannot be made or supported.
    """
    config.check(not path, "task.path", "an environment of verifiers brings its own dataset; no file is read")
    return DatasetTasks(name, _load(name, arguments, "task.arguments"), seed)


def environment(
    tools: toolkit.Toolkit | None = None, name: str = "", arguments: Mapping[str, Any] | None = None
) -> VerifiersEnvironment:
    """A fresh attempt.

    Args:
      tools: the run's, for the format of calls; it must offer none: the environment has its own.
      name: as `task_source` has it.
      arguments: likewise.

    Raises:
      ConfigError: as `task_source`, or the config offers tools.
    """
    offered = ", ".join(tools.names) if tools is not None else ""
    config.check(not offered, "tools.use", f"names {offered}, but environments of verifiers bring their own tools")
    return VerifiersEnvironment(_load(name, arguments, "task.environment_arguments"), tools)
