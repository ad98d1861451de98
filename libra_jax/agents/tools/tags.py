"""Tool calls as plain tags of the tools' names, which a policy without any training in JSON can write."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax.agents.tools import formats


@dataclass(frozen=True)
class _Parameters:
    """Those of one tool, by name, and which of them must be given."""

    schemas: Mapping[str, Mapping[str, Any]]
    required: tuple[str, ...]

    def text(self) -> str:
        """The one that a bare body is: the only one required, if it is a text; empty: none."""
        one = self.required[0] if len(self.required) == 1 else ""
        return one if _is_text(self.schemas.get(one, {})) else ""


def _parameters(schema: Mapping[str, Any]) -> _Parameters:
    told = schema["function"]["parameters"]
    schemas = {name: inner if isinstance(inner, Mapping) else {} for name, inner in told.get("properties", {}).items()}
    return _Parameters(schemas, tuple(told.get("required", ())))


def _is_text(schema: object) -> bool:
    """Whether a text may stand there. Schemas inside of others may be True or False, which say nothing of texts."""
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type")
    if kind is None and "enum" in schema:
        return all(isinstance(value, str) for value in schema["enum"])
    inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return kind == "string" or (isinstance(kind, list) and "string" in kind) or any(map(_is_text, inner))


def _bare(text: str) -> str:
    """The text without the line break after its opening tag and the one before its closing tag."""
    return text.removeprefix("\n").removesuffix("\n")


def _children(body: str, parameters: _Parameters) -> dict[str, Any] | None:
    """The arguments of a body that is tags of parameters, each at most once; None if it is anything else.

    A value ends at the first closing tag of its own that the next parameter's tag or the body's end follows.
    """
    values: dict[str, Any] = {}
    place = 0
    while place < len(body):
        opened = re.compile(r"\s*<([^<>\s/]+)>").match(body, place)
        if opened is None or (name := opened.group(1)) in values or name not in parameters.schemas:
            return values if not body[place:].strip() and values else None
        left = "|".join(re.escape(other) for other in parameters.schemas if other not in (*values, name))
        follows = rf"\s*(?:<(?:{left})>|\Z)" if left else r"\s*\Z"
        closed = re.compile(rf"</{re.escape(name)}>(?={follows})").search(body, opened.end())
        if closed is None:
            return None
        values[name] = _value(_bare(body[opened.end() : closed.start()]), parameters.schemas[name])
        place = closed.end()
    return values or None


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """A child's value: as it is where a text may stand, else JSON; what is none is left for the schema to refuse."""
    if _is_text(schema):
        return text
    try:
        return formats.read_json(text)
    except (ValueError, RecursionError):
        return text


def _tag_call(name: str, parameters: _Parameters, body: str) -> tuple[formats.Call, bool]:
    arguments: object = _children(body, parameters)
    if arguments is None and (text := parameters.text()):
        arguments = {text: _bare(body)}
    elif arguments is None:
        try:
            arguments = formats.read_json(body) if body.strip() else {}
        except (ValueError, RecursionError):
            each = "".join(f"<{key}>...</{key}>" for key in parameters.required or parameters.schemas)
            problem = f"between <{name}> and </{name}> must be {each or 'nothing'}, or a JSON object"
            return formats.Call(name, None, problem), False
    return formats.Call(name, arguments), False


class Tags:
    """`<search>when was Ada born</search>`: a tag of the tool's name, and in it, whichever is the case first,

    1. a tag for each argument: `<edit><command>view</command><path>a.py</path></edit>`;
    2. if the tool requires just one argument, and that is a text: the text, as it is;
    3. a JSON object of the arguments.

    Of a text, a line break right after its opening tag and one right before its closing tag are no part. Only the names
    of tools make calls; other tags are text.
    """

    name = "tags"

    def parser(self, schemas: Sequence[Mapping[str, Any]]) -> formats.Parser:
        """See `formats.Format`."""
        tags = {}
        for schema in schemas:
            name, parameters = schema["function"]["name"], _parameters(schema)
            tags[f"<{name}>"] = formats.Tag(f"</{name}>", functools.partial(_tag_call, name, parameters))
        return formats.Scanner(tags)

    def instructions(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Each tool with how it is called, and its arguments."""
        told = "\n".join(_told(schema) for schema in schemas)
        return (
            "# Tools\n\nYou may call tools. Write each call as a tag of the tool's name, as shown; what it returns is "
            f"shown to you.\n\n{told}"
        )

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A single text is written as it is, as tools take it that require no more; else each argument has its tag."""
        texts = {
            key: value if isinstance(value, str) else formats.write_json(value) for key, value in arguments.items()
        }
        for key, text in texts.items():
            for mark in (f"</{name}>", f"</{key}>"):
                if mark in text:
                    raise ValueError(f"the call's argument {key!r} holds {mark}, which would close it")
        if len(texts) == 1 and all(isinstance(value, str) for value in arguments.values()):
            body = "".join(map(_framed, texts.values()))
        else:
            body = "".join(f"<{key}>{_framed(text)}</{key}>" for key, text in texts.items())
        return f"<{name}>{body}</{name}>"


def _framed(text: str) -> str:
    """The text, between line breaks of which `_bare` takes off as many, where it has some at its ends itself."""
    return f"\n{text}\n" if text.startswith("\n") or text.endswith("\n") else text


def _told(schema: Mapping[str, Any]) -> str:
    """A tool, for the policy."""
    function, parameters = schema["function"], _parameters(schema)
    name, text = function["name"], parameters.text()
    children = "".join(f"<{key}>...</{key}>" for key in parameters.required)
    lines = [f"`<{name}>{text or children}</{name}>`: {function.get('description', '')}".rstrip(": ")]
    for key, inner in parameters.schemas.items():
        kind = f"one of {json.dumps(inner['enum'])}" if "enum" in inner else str(inner.get("type", "any JSON"))
        optional = "" if key in parameters.required else ", optional"
        lines.append(f"- {key} ({kind}{optional}): {inner.get('description', '')}".rstrip(": "))
    if text and len(parameters.schemas) > 1:
        every = "".join(f"<{key}>...</{key}>" for key in parameters.schemas)
        lines.append(f"With optional arguments: `<{name}>{every}</{name}>`")
    return "\n".join(lines)
