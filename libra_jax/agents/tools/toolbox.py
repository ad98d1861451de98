"""Tools by name: what the policy is told of them, and calls that never break the attempt, whatever it writes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from libra_jax import config, protocols
from libra_jax.agents.sandbox import limits

_KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
_UNKNOWN = "unknown"
"""The tool that a return names where the call named none that there is."""


class Tool(Protocol):
    """Something that a policy may call.

    Attributes:
      name: by which it is called.
      description: what it does, for the policy.
      parameters: JSON schema of its arguments, an object's.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    async def call(self, arguments: Mapping[str, Any]) -> protocols.ToolReturn:
        """Does it. What the policy got wrong is a return with status "failure"; what is raised is infrastructure."""
        ...


class Toolbox:
    """The tools of an attempt.

    Args:
      tools: each with a name of its own.
      most_characters: of a return's content; what is more is cut out of its middle.

    Raises:
      ConfigError: two tools have one name, a schema is none, or the limit is not positive.
    """

    def __init__(self, tools: Sequence[Tool], most_characters: int = 16_384) -> None:
        config.check(most_characters > 0, "tools.most_characters", f"must be positive, not {most_characters}")
        self._tools: dict[str, Tool] = {}
        self._most_characters = most_characters
        for tool in tools:
            config.check(tool.name not in self._tools, "tools", f"two tools have the name {tool.name!r}; rename one")
            schema = tool.parameters
            good = isinstance(schema, Mapping) and schema.get("type") == "object"
            config.check(good, "tools", f"the parameters of {tool.name!r} must be a JSON schema of type object")
            self._tools[tool.name] = tool

    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
            }
            for tool in self._tools.values()
        ]

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
        problem = problem or mismatch(values, tool.parameters, "arguments")
        if problem:
            return protocols.ToolReturn(tool.name, "failure", self._cut(f"error: {problem}"))
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await tool.call(values)
        seconds = answer.seconds or loop.time() - began
        return dataclasses.replace(answer, content=self._cut(answer.content), seconds=seconds)

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
    return dict(arguments), ""


def mismatch(value: Any, schema: Mapping[str, Any], where: str) -> str:
    """What keeps a value from being as its JSON schema says, in a few words; empty: nothing that is looked at.

    Looked at are `type`, `enum`, `minimum`, `properties`, `required`, `additionalProperties` and `items`: enough for
    tools of ours. Servers of others check their own arguments.
    """
    kind = schema.get("type")
    if isinstance(kind, str) and kind in _KINDS:
        right = isinstance(value, _KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))
        if not right:
            return f"{where} must be of type {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {', '.join(map(str, schema['enum']))}"
    if "minimum" in schema and isinstance(value, int | float) and value < schema["minimum"]:
        return f"{where} must be {schema['minimum']} or more"
    if isinstance(value, dict):
        return _mismatch_in_object(value, schema, where)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        found = (mismatch(item, schema["items"], f"{where}[{index}]") for index, item in enumerate(value))
        return next(filter(None, found), "")
    return ""


def _mismatch_in_object(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> str:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            return f"{where} must have {name!r}"
    if schema.get("additionalProperties") is False:
        unknown = [name for name in value if name not in properties]
        if unknown:
            return f"{where} has no {unknown[0]!r}; it takes {', '.join(properties)}"
    found = (mismatch(item, properties[name], name) for name, item in value.items() if name in properties)
    return next(filter(None, found), "")
