"""Reads requests: JSON with strict types. Unknown fields are hints, which change nothing and are counted."""

from __future__ import annotations

import functools
import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeVar

import pydantic
import pydantic_core
from pydantic import BeforeValidator, ConfigDict

from libra_jax import protocols
from libra_jax.harness.gateway import errors

Ignored = Any
"""Type of a field that is accepted and changes nothing of what is sampled."""

Name = Annotated[str, pydantic.Field(min_length=1)]

MOST_ITEMS = 20_000
"""Messages of a request, and parts of a message. More cost seconds to check, and no context holds them."""

Count = Annotated[int, pydantic.Field(ge=1, lt=2**31)]
Limit = Annotated[Count | None, BeforeValidator(lambda value: None if value in (-1, 0) else value)]
"""Most tokens of an output. Some clients write -1 or 0 for no limit."""

Temperature = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]


def _as_stops(value: Any) -> Any:
    """Returns stop texts as a list. Some clients send an empty text for none."""
    listed = [value] if isinstance(value, str) else value
    return [text for text in listed if text != ""] if isinstance(listed, list) else listed


Stops = Annotated[list[Name], BeforeValidator(_as_stops), pydantic.Field(max_length=64)]
"""Texts that end an output."""

TEXT_ONLY = "the model answers in plain text; leave it out"
NOT_KEPT = "the gateway keeps no state beside a session's dialogues; leave it out"

LONGEST_NAME = 60
"""Characters of an unknown field's name that are kept."""

Neutral = tuple[tuple[object, ...], str]
"""The only values of a field that are accepted, and the reason against others."""


def names(listed: str) -> frozenset[str]:
    """Returns names that are separated by spaces."""
    return frozenset(listed.split())


def parse(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a request's body.

    Raises:
      Problem: the body is no JSON object in UTF-8, is nested more than 200 deep, or holds a number that is not finite.
    """
    try:
        # Nothing of a request may outlive it, so the parser caches no strings.
        value = pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise errors.Problem(400, f"The body is no valid JSON in UTF-8: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise errors.Problem(400, f"The body must be a JSON object, not {_kind(value)}.", code="invalid_json")
    _check_finite(value, "")
    return value


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _check_finite(value: object, path: str) -> None:
    """Refuses numbers that overflow: 1e999 is valid JSON, and is read as infinity."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_finite(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_finite(item, f"{path}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise errors.invalid(path, "the number is too large")


class Fields(pydantic.BaseModel):
    """A JSON object of a request. Other fields than its own are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
}
"""Values of a sampler's settings that change nothing."""

_Share = Annotated[float, pydantic.Field(ge=0, le=1)]
_Penalty = Annotated[float, pydantic.Field(ge=-2, le=2)]


class RequestBody(Fields):
    """The JSON object of a whole request.

    Attributes:
      ignored: further fields that change nothing of what is sampled.
      hinted: further fields that would change what is sampled or returned, with the values that do not. Others are
        hints.
      neutral: further fields that are accepted with one of a few values, or null.
    """

    ignored: ClassVar[frozenset[str]] = frozenset()
    hinted: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    neutral: ClassVar[Mapping[str, Neutral]] = {}

    top_p: _Share | None = None
    top_k: Annotated[int, pydantic.Field(ge=-1, lt=2**31)] | None = None
    min_p: _Share | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, pydantic.Field(gt=0, le=100)] | None = None
    seed: int | float | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """Returns a checked request, and the names of its hints.

        Raises:
          Problem: a field is missing, of the wrong type or refused.
        """
        parameters, hints = {}, []
        for name, value in values.items():
            if value is None or name in cls.ignored:  # null is the same as leaving the field out
                continue
            if name in cls.neutral:
                allowed, reason = cls.neutral[name]
                if not _among(value, allowed):
                    raise errors.invalid(name, reason)
            elif name in cls.hinted:
                hints += [] if _among(value, cls.hinted[name]) else [name]
            else:
                parameters[name] = value
        return validated(cls, parameters, "", hints), hints

    def options(self, form: object = None) -> protocols.SamplingOptions:
        """Returns the settings that would change what is sampled; `form` is as OpenAI's `response_format`."""
        settings = {name: getattr(self, name) for name in (*_NEUTRAL, "seed")}
        used = {name: None if _among(value, _NEUTRAL.get(name, ())) else value for name, value in settings.items()}
        return protocols.SamplingOptions(**used, schema=_schema(form))


def _among(value: object, allowed: Sequence[object]) -> bool:
    # A boolean equals 0 or 1, so its type must match, too.
    return any(value == candidate and isinstance(value, bool) == isinstance(candidate, bool) for candidate in allowed)


def _schema(form: object) -> str | None:
    """Returns the JSON schema of structured output as text; None for plain text."""
    if not isinstance(form, dict) or form.get("type") in (None, "text"):
        return None
    inner = form.get("json_schema")
    return to_json((inner if isinstance(inner, dict) else form).get("schema") or {})


T = TypeVar("T", bound=pydantic.BaseModel)


def validated(model: type[T], value: object, path: str, hints: list[str]) -> T:
    """Returns the checked object of a type. Takes unknown fields out of the JSON, at any depth.

    Args:
      model: type of the object.
      value: the JSON.
      path: path of the object in the request.
      hints: gets the path of each unknown field, without the numbers of items.

    Raises:
      Problem: the JSON is wrong; the message names the first wrong field.
    """
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    # A second look, because most requests have no unknown field and a walk through all objects would cost them.
    unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    if len(unknown) == len(details) and all(_removed(value, steps) for steps in unknown):
        start = [re.sub(r"\[\d+\]", "", path)] if path else []
        names = (".".join([*start, *(step for step in steps if isinstance(step, str))]) for steps in unknown)
        hints += {name[:LONGEST_NAME] for name in names}
        return validated(model, value, path, hints)
    first = next(detail for detail in details if len(unknown) == len(details) or detail["type"] != "extra_forbidden")
    for step in first["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    # Fields of type None are known, and serve nothing that the gateway has.
    plain = {"extra_forbidden": "unknown field", "none_required": "is not supported; leave it out"}
    message = plain.get(first["type"], first["msg"].removeprefix("Value error, "))
    raise errors.invalid(path, message[:1].lower() + message[1:])


def _removed(value: Any, steps: Sequence[int | str]) -> bool:
    """Removes a field from the JSON; returns whether it was there."""
    try:
        del functools.reduce(operator.getitem, steps[:-1], value)[steps[-1]]
    except (LookupError, TypeError):  # a validator has read the JSON in another form
        return False
    return True


CUSTOM_INPUT = "input"
"""Argument of a function that stands for a tool with free text."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that hold text."""


class ContentPart(Fields):
    """A part of a message's content: text. Parts of other types (images, audio, files) are refused."""

    type: str
    text: str
    annotations: Ignored = None
    cache_control: Ignored = None
    citations: Ignored = None
    logprobs: Ignored = None
    prompt_cache_breakpoint: Ignored = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind not in TEXT_PARTS:
            raise ValueError(f"content of type {kind!r} is not supported: the model reads text only")
        return value


def _as_parts(value: Any) -> Any:
    if value is None:
        return []
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Content = Annotated[list[ContentPart], BeforeValidator(_as_parts), pydantic.Field(max_length=MOST_ITEMS)]
"""Content of a message: a string, or parts."""


def texts_of_result(content: Any) -> Any:
    """Returns a tool's result in which a note stands for each part that is no text, such as an image."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": f"[{part['type']}: the model reads text only]"}
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] not in TEXT_PARTS
        else part
        for part in content
    ]


def text(parts: Sequence[ContentPart], role: str) -> str:
    """Returns the text of a message.

    Parts of an assistant's message are pieces of one output, and are joined as they are. Parts of others are lines.
    """
    return ("" if role == "assistant" else "\n").join(part.text for part in parts)


def tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> protocols.ToolSpec:
    """Returns the tool that a request offers."""
    return protocols.ToolSpec(name, description or "", parameters or {"type": "object", "properties": {}})


def custom_tool(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool that takes free text as a function with that text as its only argument."""
    parameters = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
    return {"name": definition.get("name"), "description": definition.get("description"), "parameters": parameters}


def offers_tools(choice: object, hints: list[str]) -> bool:
    """Returns whether the model is offered the tools of a request.

    A choice that forces a call is a hint: the model samples from its own distribution, and may call or not.

    Args:
      choice: `tool_choice`: its name, or an object with its name under `type`.
      hints: gets the name of a choice that forces a call.

    Raises:
      Problem: the choice is no name.
    """
    name = choice.get("type") if isinstance(choice, dict) else choice
    if not isinstance(name, str | None):
        raise errors.invalid("tool_choice", "must be 'auto', 'none', or a choice that forces a call")
    if name not in (None, "auto", "none"):
        hints.append("tool_choice")
    return name != "none"


def to_json(value: object) -> str:
    """Returns compact JSON text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def encoded(value: object) -> bytes:
    """Returns compact JSON in UTF-8."""
    # A half of a surrogate pair has no UTF-8. Models write none, but tools' arguments may hold one as an escape.
    return to_json(value).encode("utf-8", "replace")
