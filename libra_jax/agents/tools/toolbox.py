"""Tools by name: their schemas for the policy, and calls that never break the attempt, with any text of the policy."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from libra_jax import config, protocols
from libra_jax.agents.sandbox import limits, pool
from libra_jax.agents.tools import schemas

_NAME = re.compile(r"[\w.:/-]+")
"""What a tool may be called, so that every format can write it."""

_UNKNOWN = "unknown"
"""The tool that a return names where the call named none that there is."""


class Tool(Protocol):
    """Something that a policy may call.

    A tool whose calls change nothing, and depend on nothing that other calls change, may have an attribute `eager`
    that is true: calls of it begin while the output that makes them is still generated, and may be cancelled.

    Attributes:
      name: by which it is called.
      description: what it does, for the policy.
      parameters: JSON schema of its arguments, an object's. Each `$ref` must lead to a place in it: none is fetched.
        A `pattern` is matched by RE2. One that RE2 does not know (it looks ahead or behind) is left to the tool.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    async def call(self, arguments: Mapping[str, Any]) -> protocols.ToolReturn | str:
        """Does it. What the policy got wrong is a return with status "failure"; what is raised is infrastructure.

        A string is a return with status "success".
        """
        ...


CALL = "async def call(self, arguments), which returns a protocols.ToolReturn or a string"
"""What the method of a tool has to be."""


def check_kind(tool: Any) -> None:
    """Refuses an object that is no `Tool`; what its other attributes hold is looked at later.

    Raises:
      ConfigError: an attribute is missing, or `call` is no async method.
    """
    lacking = [name for name in ("name", "description", "parameters", "call") if not hasattr(tool, name)]
    whose = f"{type(tool).__module__}.{type(tool).__qualname__}"
    config.check(
        not lacking,
        "tools.use",
        f"a tool of type {whose} has no {' and no '.join(lacking)}; tools have name, description, parameters (a JSON "
        f"schema) and {CALL}",
    )
    check_call(tool.call, f"{tool.name!r} ({whose})")


def check_call(call: Any, tool: str) -> None:
    """Refuses a tool's `call` that is no async function.

    Args:
      call: the tool's attribute, or that of its class.
      tool: the tool, for the error.

    Raises:
      ConfigError: it is a plain function, or cannot be called.
    """
    inner = inspect.unwrap(call) if callable(call) else call
    awaited = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
    config.check(awaited, "tools.use", f"call of the tool {tool} is no async method; write {CALL}")


class Toolbox:
    """The tools of an attempt.

    Args:
      tools: each with a name of its own.
      most_characters: of a return's content; what is more is cut out of its middle.
      session: the attempt's sandbox, which the toolbox closes; None where no tool works in one.
      in_session: names of the tools that work in it.

    Attributes:
      session: as given.
      any_eager: calls of some tool may begin early.

    Raises:
      ConfigError: two tools have one name, a name or a schema is none, or the limit is not positive.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        most_characters: int = 16_384,
        session: pool.Session | None = None,
        in_session: Collection[str] = (),
    ) -> None:
        config.check(most_characters > 0, "tools.most_characters", f"must be positive, not {most_characters}")
        self.session = session
        self._in_session = frozenset(in_session)
        self._tools: dict[str, Tool] = {}
        self._most_characters = most_characters
        for tool in tools:
            check_kind(tool)
            config.check(
                tool.name not in self._tools,
                "tools",
                f"two tools have the name {tool.name!r}; rename one (an MCP server's: 'prefix': True in "
                "tools.arguments under the server's name)",
            )
            named = isinstance(tool.name, str) and _NAME.fullmatch(tool.name)
            config.check(bool(named), "tools", f"{tool.name!r} is no name of a tool: take letters, digits, _ - . : /")
            schema = tool.parameters
            good = isinstance(schema, Mapping) and schema.get("type") == "object"
            config.check(good, "tools", f"the parameters of {tool.name!r} must be a JSON schema of type object")
            try:
                problem = schemas.problem_of(json.dumps(dict(schema)))
            except (TypeError, ValueError, RecursionError) as error:
                problem = str(error)
            config.check(not problem, "tools", f"the parameters of {tool.name!r} are no JSON schema: {problem}")
            self._tools[tool.name] = tool
        self.any_eager = any(map(self.eager, self._tools))

    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
            }
            for tool in self._tools.values()
        ]

    def eager(self, name: object) -> bool:
        """Whether a call of the tool may begin before it is known to be wanted."""
        tool = self._tools.get(name) if isinstance(name, str) else None
        return bool(getattr(tool, "eager", False))

    async def ready(self, names: Collection[object]) -> None:
        """Waits until the attempt has its sandbox, where calls of tools of these names need it."""
        if self.session is not None and any(isinstance(name, str) and name in self._in_session for name in names):
            await self.session.ready()

    async def call(self, name: object, arguments: object) -> protocols.ToolReturn:
        """Calls a tool with what the policy wrote.

        Args:
          name: the tool's; anything at all.
          arguments: an object, or its JSON text; anything at all.

        Returns:
          The tool's return. An unknown tool, and arguments that are not as its schema says, are failures.
        """
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return protocols.ToolReturn(_UNKNOWN, "failure", self._cut(f"error: no tool {name!r}; there are: {known}"))
        values, problem = _read(arguments)
        problem = problem or schemas.mismatch(values, tool.parameters, "arguments")
        if problem:
            return protocols.ToolReturn(tool.name, "failure", self._cut(f"error: {problem}"))
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await tool.call(values)
        if isinstance(answer, str):
            answer = protocols.ToolReturn(tool.name, "success", answer)
        if not isinstance(answer, protocols.ToolReturn) or not isinstance(answer.content, str):
            what = type(answer).__name__
            if isinstance(answer, protocols.ToolReturn):
                what = f"a ToolReturn whose content is of type {type(answer.content).__name__}"
            raise protocols.EnvironmentCrashed(f"call of the tool {tool.name!r} returned {what}; write {CALL}")
        seconds = answer.seconds or loop.time() - began
        return dataclasses.replace(answer, content=self._cut(answer.content), seconds=seconds)

    async def close(self) -> None:
        """Ends the attempt's sandbox, where it has one."""
        if self.session is not None:
            await self.session.close()

    def _cut(self, text: str) -> str:
        return limits.cut(text, self._most_characters)


def _read(arguments: object) -> tuple[dict[str, Any], str]:
    """The arguments as a mapping, or what is wrong with them."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}, "the arguments are no JSON"
    if not isinstance(arguments, Mapping):
        return {}, "the arguments must be a JSON object"
    try:
        json.dumps(dict(arguments), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):  # half of a surrogate pair, say, which no tool could pass on
        return {}, "the arguments hold what JSON cannot say"
    return dict(arguments), ""
