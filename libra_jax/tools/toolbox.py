"""A rollout's tools by name. Gives the policy their schemas, and calls them so that no text breaks the rollout."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import inspect
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.tools import schemas
from libra_jax.tools.sandbox import limits, pool
from libra_jax.utils import resolving, user_code, user_values

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[\w.:/-]+")
"""Pattern of a tool's name. Every format can write these names."""

_UNKNOWN = "unknown"
"""Name in the return of a call whose tool does not exist."""


class Tool(Protocol):
    """Something that a policy may call.

    A tool may have an attribute `eager` that is true, if its calls change nothing and do not depend on what other calls
    change. Its calls then begin while the output that makes them is still generated, and may be cancelled.

    Attributes:
      name: Name by which the policy calls the tool.
      description: What the tool does, for the policy.
      parameters: JSON schema of the arguments, of type object. Each `$ref` must lead to a place inside the schema; none
        is fetched. RE2 matches each `pattern`. A pattern that RE2 does not support (look-around) is left to the tool.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    async def call(self, arguments: Mapping[str, Any]) -> protocols.ToolReturn | str:
        """Does it. What the policy got wrong is a return with status "failure". A string is one with "success".

        An exception is a failure, too, whose type and message the policy reads. A `protocols.LibraError`, such as
        `WorkerLost`, is infrastructure: the rollout begins again.
        """
        ...


CALL = "async def call(self, arguments), which returns a protocols.ToolReturn or a string"
"""What the method of a tool has to be."""


def check_kind(tool: Any) -> None:
    """Refuses an object that is no `Tool`; what its other attributes hold is looked at later."""
    lacking = [name for name in ("name", "description", "parameters", "call") if not hasattr(tool, name)]
    type_name = f"{type(tool).__module__}.{type(tool).__qualname__}"
    config_lib.check(
        not lacking,
        "tools.use",
        f"a tool of type {type_name} has no {' and no '.join(lacking)}; tools have name, description, parameters (a "
        f"JSON schema) and {CALL}",
    )
    check_call(tool.call, f"{tool.name!r} ({type_name})")


def check_call(call: Any, tool: str) -> None:
    """Refuses a `call` of a tool, or of a tool's class, that is no async function."""
    inner = inspect.unwrap(call) if callable(call) else call
    awaited = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
    config_lib.check(awaited, "tools.use", f"call of the tool {tool} is no async method; write {CALL}")


class Toolbox:
    """The tools of a rollout.

    Args:
      tools: Tools with different names.
      most_characters: Largest length of a return's content. The middle of longer content is cut out.
      session: Sandbox session of the rollout, which the toolbox closes. None if no tool needs one.
      in_session: Names of the tools that work in the session.

    Attributes:
      session: The argument.
      any_eager: Whether calls of some tool may begin early.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        most_characters: int = 16_384,
        session: pool.SandboxSession | None = None,
        in_session: Collection[str] = (),
    ) -> None:
        config_lib.check(most_characters > 0, "tools.most_characters", f"must be positive, not {most_characters}")
        self.session = session
        self._counts = user_values.counts.get(collections.Counter())
        self._in_session = frozenset(in_session)
        self._tools: dict[str, Tool] = {}
        self._most_characters = most_characters
        for tool in tools:
            check_kind(tool)
            config_lib.check(
                tool.name not in self._tools,
                "tools",
                f"two tools have the name {tool.name!r}; rename one (an MCP server's: 'prefix': True in "
                "tools.arguments under the server's name)",
            )
            named = isinstance(tool.name, str) and _NAME.fullmatch(tool.name)
            config_lib.check(
                bool(named), "tools", f"{tool.name!r} is no name of a tool: take letters, digits, _ - . : /"
            )
            schema = tool.parameters
            good = isinstance(schema, Mapping) and schema.get("type") == "object"
            config_lib.check(good, "tools", f"the parameters of {tool.name!r} must be a JSON schema of type object")
            try:
                problem = schemas.problem_of(json.dumps(dict(schema)))
            except (TypeError, ValueError, RecursionError) as error:
                problem = str(error)
            config_lib.check(not problem, "tools", f"the parameters of {tool.name!r} are no JSON schema: {problem}")
            # Every check lies before the first rollout, whose policy could do nothing about a broken tool.
            self._tools[tool.name] = tool
        self.any_eager = any(map(self.eager, self._tools))

    def schemas(self) -> list[dict[str, Any]]:
        """Returns the tools' schemas in the form that chat templates take."""
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
            }
            for tool in self._tools.values()
        ]

    def eager(self, name: object) -> bool:
        """Returns whether a call of the tool may begin before it is certain that the call is wanted."""
        tool = self._tools.get(name) if isinstance(name, str) else None
        return bool(getattr(tool, "eager", False))

    async def ready(self, names: Collection[object]) -> None:
        """Waits until the rollout has its sandbox, if a tool of these names needs it."""
        if self.session is not None and any(isinstance(name, str) and name in self._in_session for name in names):
            await self.session.ready()

    async def call(self, name: object, arguments: object) -> protocols.ToolReturn:
        """Calls a tool with what the policy wrote.

        Args:
          name: Name of the tool. May be anything.
          arguments: A mapping or its JSON text. May be anything.

        Returns:
          The tool's return. If the tool is unknown or the arguments do not match its schema, the return is a failure.
        """
        # A name that is a list or a mapping could not even be looked up.
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None:
            problem = f"no tool {name!r}; there are: {', '.join(self._tools) or 'none'}"
        else:
            values, problem = _read(arguments)
            # Checked here, so that a tool can take its arguments for granted.
            problem = problem or schemas.mismatch(values, tool.parameters, "arguments")
        if tool is None or problem:
            # Cut as well: it may repeat a long text that the policy wrote.
            text = limits.cut(f"error: {problem}", self._most_characters)
            return protocols.ToolReturn(_UNKNOWN if tool is None else tool.name, "failure", text)
        loop = asyncio.get_running_loop()
        start = loop.time()
        answer: object
        try:
            with user_code.contain_exits():
                answer = await tool.call(values)
        except protocols.LibraError:
            raise
        except Exception as error:
            self._counts["raised_calls"] += 1
            _log_once(tool.name, resolving.raised(error))
            cause = user_code.original(error)
            answer = protocols.ToolReturn(tool.name, "failure", f"error: {type(cause).__name__}: {cause}")
        if isinstance(answer, str):
            answer = protocols.ToolReturn(tool.name, "success", answer)
        problem = type(answer).__name__
        if not isinstance(answer, protocols.ToolReturn) or (problem := user_values.returns_problem([answer])):
            raise protocols.EnvironmentCrashed(f"call of the tool {tool.name!r} returned {problem}; write {CALL}")
        text = limits.cut(answer.content, self._most_characters)
        # A tool may know better than the clock how long it worked, for example without a wait for its turn.
        seconds = answer.seconds or loop.time() - start
        return dataclasses.replace(answer, tool=tool.name, content=text, seconds=seconds)

    async def close(self) -> None:
        """Ends the rollout's sandbox, if it has one."""
        if self.session is not None:
            await self.session.close()


@functools.lru_cache(maxsize=256)
def _log_once(tool: str, problem: str) -> None:
    """Logs what a tool raised, because only the policy sees the failure. Later equal calls do nothing."""
    _log.warning("the tool %r %s: a failure that the policy reads; raise WorkerLost to begin again.", tool, problem)


def _read(arguments: object) -> tuple[dict[str, Any], str]:
    """Returns the arguments as a mapping, or what is wrong with them."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}, "the arguments are no JSON"
    if not isinstance(arguments, Mapping):
        return {}, "the arguments must be a JSON object"
    try:
        json.dumps(dict(arguments), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):  # for example half of a surrogate pair, which no tool could pass on
        return {}, "the arguments hold what JSON cannot say"
    return dict(arguments), ""
