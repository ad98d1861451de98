"""Formats in which a policy writes tool calls: JSON as Hermes and Qwen write it, or plain tags.

A parser reads the pieces of one output as they stream in, and returns each call as soon as it is complete. The result
does not depend on how the output is cut into pieces. Text that looks like a call but is not valid is returned with its
problem, which the policy sees as a failure. Text inside a thought (`chat.thoughts`) is ignored.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as config_lib
from libra_jax.chat import thoughts


@dataclass(frozen=True)
class WrittenCall:
    """A call as the policy wrote it.

    Attributes:
      name: Name of the tool. May be of any type.
      arguments: Arguments, normally a mapping. May be of any type.
      problem: Why the text is not a valid call, in a few words. Empty if it is valid.
    """

    name: object
    arguments: object
    problem: str = ""


# Finding calls --------------------------------------------------------------------------------------------------------

_MOST_DOUBTS = 16
"""Largest number of closing marks inside JSON strings of one call.

The call is parsed again at each, so it is bounded.
"""


@dataclass(frozen=True)
class Tag:
    """A closing mark, and `read`. `read` parses a call's text, and tells whether the closing mark may be part of it."""

    close: str
    read: Callable[[str], tuple[WrittenCall, bool]] | None


_THOUGHTS = {mark: Tag(close, None) for mark, close in thoughts.MARKS.items()}


class Scanner:
    """Reads one output. Its tags do not nest. It reads text once, and stores no text outside of calls."""

    def __init__(self, tags: Mapping[str, Tag]) -> None:
        self._tags = {**tags, **_THOUGHTS}
        self._opening = re.compile("|".join(map(re.escape, self._tags)))
        self._longest = max(map(len, self._tags))
        self._ahead = ""  # text not scanned yet, or the beginning of a mark
        self._tag: Tag | None = None
        self._body: list[str] = []
        # Positions where the call might have ended, and the call that each would give.
        self._doubts: list[tuple[int, WrittenCall]] = []

    def feed(self, text: str) -> list[WrittenCall]:
        """Returns the calls that the next piece of the output completes."""
        calls: list[WrittenCall] = []
        # Positions move and the text stays: a copy of the rest at each mark would cost a long output its square.
        ahead, place = self._ahead + text, 0
        while True:
            if self._tag is None:
                opening = self._opening.search(ahead, place)
                if opening is None:
                    # The end may be the beginning of a mark whose rest comes with the next piece.
                    self._ahead = ahead[max(place, len(ahead) - self._longest) :]
                    return calls
                self._tag, place = self._tags[opening.group()], opening.end()
                self._body, self._doubts = [], []
            tag = self._tag
            end = ahead.find(tag.close, place)
            if end < 0:
                keep = max(place, len(ahead) - len(tag.close))
                self._body.append(ahead[place:keep])
                self._ahead = ahead[keep:]
                return calls
            body = "".join([*self._body, ahead[place:end]])
            place = end + len(tag.close)
            call, doubtful = tag.read(body) if tag.read is not None else (None, False)
            if call is not None and doubtful and len(self._doubts) < _MOST_DOUBTS:
                self._doubts.append((len(body), call))
                self._body = [body + tag.close]
            elif call is not None and call.problem and self._doubts:
                place = end - len(body) + self._doubts[0][0] + len(tag.close)
                if place < 0:  # the call began in an earlier piece
                    ahead, place = body + ahead[end:], place + len(body) - end
                calls.append(self._back())
            else:
                calls += [] if call is None else [call]
                self._tag = None

    def _back(self) -> WrittenCall:
        """Ends the call at the first closing mark that was taken for a part of it. Later text is scanned again."""
        self._tag = None
        return self._doubts[0][1]

    def finish(self) -> list[WrittenCall]:
        """Returns the calls that the end of the output leaves, such as a call that was not closed."""
        calls: list[WrittenCall] = []
        while self._tag is not None and self._doubts:
            text = "".join(self._body) + self._ahead
            self._ahead = text[self._doubts[0][0] + len(self._tag.close) :]
            calls += [self._back(), *self.feed("")]
        if self._tag is not None and self._tag.read is not None:
            calls.append(WrittenCall(None, None, f"the call was not closed with {self._tag.close}"))
        return calls


def read_json(text: str) -> Any:
    """Reads a JSON value.

    Raises:
      ValueError: The text is not JSON. NaN and Infinity are not accepted either.
      RecursionError: The value is nested too deeply.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    return json.loads(text, parse_constant=refuse)


def write_json(value: Any) -> str:
    """Writes a value as JSON that contains no closing mark."""
    # JSON allows a slash to be written as \/, which keeps every closing mark out of the text.
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/")


# Hermes ---------------------------------------------------------------------------------------------------------------

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _hermes_call(body: str) -> tuple[WrittenCall, bool]:
    """Returns the call between two marks, and whether it may go on behind the closing mark."""
    try:
        value = read_json(body)
    except json.JSONDecodeError as error:
        call = WrittenCall(None, None, f"the call is no JSON ({error.msg}, character {error.pos})")
        # An unterminated string: the closing mark may lie inside it, and the call may go on.
        return call, error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError) as error:
        return WrittenCall(None, None, f"the call is no JSON ({error})"), False
    if not isinstance(value, dict) or "name" not in value or ("arguments" not in value and len(value) > 1):
        return WrittenCall(None, None, 'the call must be a JSON object with "name" and "arguments"'), False
    return WrittenCall(value["name"], value.get("arguments", {})), False


class Hermes:
    """The format `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` of Hermes 2 Pro and Qwen.

    A closing mark inside a JSON string belongs to the call, if the text between the marks is valid JSON that way.
    """

    name = "hermes"

    def parser(self, schemas: Sequence[Mapping[str, Any]]) -> Scanner:
        """Returns a parser for one output. Its calls do not depend on the tools."""
        del schemas
        return Scanner({_OPEN: Tag(_CLOSE, _hermes_call)})

    def instructions(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Returns the wording of Qwen's chat template, which its models know."""
        tools = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
            f"function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\nFor each function "
            "call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns a call in the form that the policy should write."""
        return f"{_OPEN}{write_json({'name': name, 'arguments': dict(arguments)})}{_CLOSE}"


# Tags -----------------------------------------------------------------------------------------------------------------


class _Parameters:
    """Parameters of one tool.

    Attributes:
      schemas: Schemas of the parameters, by name.
      required: Names of the required parameters.
      text: Parameter that a body without inner tags sets: the only required one, if it is text. Otherwise "".
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        parameters = schema["function"]["parameters"]
        # JSON schema allows True and False instead of a schema. They say nothing about the type.
        self.schemas: dict[str, Mapping[str, Any]] = {
            name: inner if isinstance(inner, Mapping) else {}
            for name, inner in parameters.get("properties", {}).items()
        }
        self.required = tuple(parameters.get("required", ()))
        one = self.required[0] if len(self.required) == 1 else ""
        self.text = one if _is_text(self.schemas.get(one, {})) else ""


def _is_text(schema: object) -> bool:
    """Returns whether a text fits the schema. Inner schemas may be True or False, which say nothing about texts."""
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type")
    if kind is None and "enum" in schema:
        return all(isinstance(value, str) for value in schema["enum"])
    inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return kind == "string" or (isinstance(kind, list) and "string" in kind) or any(map(_is_text, inner))


def _children(body: str, parameters: _Parameters) -> dict[str, Any] | None:
    """Returns the arguments of a body that consists of parameter tags, each at most once. None for any other body.

    A value ends at the first of its closing tags that is followed by another parameter's tag or by the end of the body.
    """
    values: dict[str, Any] = {}
    place = 0
    while place < len(body):
        opening_tag = re.compile(r"\s*<([^<>\s/]+)>").match(body, place)
        if opening_tag is None or (name := opening_tag.group(1)) in values or name not in parameters.schemas:
            return values if not body[place:].strip() and values else None
        next_names = "|".join(re.escape(key) for key in parameters.schemas if key not in (*values, name))
        follows = rf"\s*(?:<(?:{next_names})>|\Z)" if next_names else r"\s*\Z"
        closing_tag = re.compile(rf"</{re.escape(name)}>(?={follows})").search(body, opening_tag.end())
        if closing_tag is None:
            return None
        # Without the line breaks right after the opening tag and right before the closing tag.
        text = body[opening_tag.end() : closing_tag.start()].removeprefix("\n").removesuffix("\n")
        values[name] = text
        if not _is_text(parameters.schemas[name]):
            # Text that is not JSON stays as it is. The check against the schema refuses it later.
            with contextlib.suppress(ValueError, RecursionError):
                values[name] = read_json(text)
        place = closing_tag.end()
    return values or None


def _tag_call(name: str, parameters: _Parameters, body: str) -> tuple[WrittenCall, bool]:
    """Returns the call of a tool between two tags. It never goes on behind the closing tag."""
    arguments: object = _children(body, parameters)
    if arguments is None and parameters.text:
        arguments = {parameters.text: body.removeprefix("\n").removesuffix("\n")}
    elif arguments is None:
        try:
            arguments = read_json(body) if body.strip() else {}
        except (ValueError, RecursionError):
            tags = "".join(f"<{key}>...</{key}>" for key in parameters.required or parameters.schemas)
            problem = f"between <{name}> and </{name}> must be {tags or 'nothing'}, or a JSON object"
            return WrittenCall(name, None, problem), False
    return WrittenCall(name, arguments), False


class Tags:
    """The format `<search>when was Ada born</search>`: a tag with the tool's name.

    Its body is read as the first form that fits:

    1. a tag for each argument: `<edit><command>view</command><path>a.py</path></edit>`;
    2. the text itself, if the tool requires exactly one argument and it is a text;
    3. a JSON object with the arguments.

    A line break right after a text's opening tag or right before its closing tag is removed. Only tool names make
    calls; other tags are text.
    """

    name = "tags"

    def parser(self, schemas: Sequence[Mapping[str, Any]]) -> Scanner:
        """Returns a parser for one output. `schemas` are the tools, in the form of `toolbox.Toolbox.schemas`."""
        tags = {}
        for schema in schemas:
            name, parameters = schema["function"]["name"], _Parameters(schema)
            tags[f"<{name}>"] = Tag(f"</{name}>", functools.partial(_tag_call, name, parameters))
        return Scanner(tags)

    def instructions(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Returns a text that lists each tool, how to call it, and its arguments."""
        lines = []
        for schema in schemas:
            function, parameters = schema["function"], _Parameters(schema)
            name, text = function["name"], parameters.text
            children = "".join(f"<{key}>...</{key}>" for key in parameters.required)
            lines.append(f"`<{name}>{text or children}</{name}>`: {function.get('description', '')}".rstrip(": "))
            for key, inner in parameters.schemas.items():
                kind = f"one of {json.dumps(inner['enum'])}" if "enum" in inner else str(inner.get("type", "any JSON"))
                optional = "" if key in parameters.required else ", optional"
                lines.append(f"- {key} ({kind}{optional}): {inner.get('description', '')}".rstrip(": "))
            if text and len(parameters.schemas) > 1:
                every = "".join(f"<{key}>...</{key}>" for key in parameters.schemas)
                lines.append(f"With optional arguments: `<{name}>{every}</{name}>`")
        return (
            "# Tools\n\nYou may call tools. Write each call as a tag of the tool's name, as shown; what it returns is "
            "shown to you.\n\n" + "\n".join(lines)
        )

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Writes a single text without inner tags, and any other arguments in tags.

        Raises:
          ValueError: An argument holds a mark that would close it.
        """
        bodies = {}
        for key, value in arguments.items():
            text = value if isinstance(value, str) else write_json(value)
            for mark in (f"</{name}>", f"</{key}>"):
                if mark in text:
                    raise ValueError(f"the call's argument {key!r} holds {mark}, which would close it")
            # `_children` removes one line break at each end, so a text that has one gets another.
            bodies[key] = f"\n{text}\n" if text.startswith("\n") or text.endswith("\n") else text
        if len(bodies) == 1 and all(isinstance(value, str) for value in arguments.values()):
            return f"<{name}>{''.join(bodies.values())}</{name}>"
        return f"<{name}>{''.join(f'<{key}>{body}</{key}>' for key, body in bodies.items())}</{name}>"


# By name --------------------------------------------------------------------------------------------------------------

Format = Hermes | Tags
"""A way of writing calls. Both kinds have the same methods."""

FORMATS: Mapping[str, type[Format]] = {"hermes": Hermes, "tags": Tags}


def named(name: str) -> Format:
    """Returns the format that a config names.

    Raises:
      ConfigError: The name is unknown.
    """
    config_lib.check_choice(name, tuple(FORMATS), "tools.format")
    return FORMATS[name]()
