"""Reads requests: JSON with strict types, in which each unknown field is an error that names it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeVar

import pydantic
import pydantic_core
from pydantic import BeforeValidator, ConfigDict

from libra_jax import protocols
from libra_jax.gateway import errors

Ignored = Any
"""Type of a field that is accepted and changes nothing of what is sampled."""

Name = Annotated[str, pydantic.Field(min_length=1)]
Stops = Annotated[list[Name], pydantic.Field(max_length=64)]
"""Texts that end an output."""

Count = Annotated[int, pydantic.Field(ge=1, lt=2**31)]
Temperature = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]

SAMPLING = (
    "would change the distribution that is sampled. Training needs the log-probabilities of plain sampling at the "
    "run's temperature, so leave it out"
)
"""Reason for which fields of the sampler are refused."""

SEED = "would make the rollouts of a task alike, and they are compared with each other; leave it out"
TEXT_ONLY = "the model answers in plain text; leave it out"
NOT_KEPT = "the gateway keeps no state beside a session's dialogues; leave it out"

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


class Request(Fields):
    """The JSON object of a whole request.

    Attributes:
      ignored: further fields that are accepted, because they change nothing of what is sampled.
      neutral: further fields that are accepted with one of a few values, or null.
    """

    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, Neutral]] = {}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Returns a checked request.

        Raises:
          Problem: a field is unknown, missing, of the wrong type or refused.
        """
        kept = {}
        for name, value in values.items():
            if name in cls.neutral:
                allowed, reason = cls.neutral[name]
                # A boolean equals 0 or 1, so its type must match, too.
                same = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)
                if value is not None and not same:
                    raise errors.invalid(name, reason)
            elif name in cls.model_fields:
                if value is not None:  # null is the same as leaving the field out
                    kept[name] = value
            elif name not in cls.ignored:
                raise errors.invalid(name, "unknown field")
        return validated(cls, kept, "")


T = TypeVar("T", bound=pydantic.BaseModel)


def validated(model: type[T], value: object, path: str) -> T:
    """Returns the checked object of a type.

    Args:
      model: type of the object.
      value: the JSON.
      path: path of the object in the request.

    Raises:
      Problem: the JSON is wrong; the message names the first wrong field.
    """
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        for step in first["loc"]:
            path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
        # Fields of type None are known, and serve nothing that the gateway has.
        plain = {"extra_forbidden": "unknown field", "none_required": "is not supported; leave it out"}
        message = plain.get(first["type"], first["msg"].removeprefix("Value error, "))
        raise errors.invalid(path, message[:1].lower() + message[1:]) from None


TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that hold text."""


class Part(Fields):
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


Content = Annotated[list[Part], BeforeValidator(_as_parts)]
"""Content of a message: a string, or parts."""


def text(parts: Sequence[Part], role: str) -> str:
    """Returns the text of a message.

    Parts of an assistant's message are pieces of one output, and are joined as they are. Parts of others are lines.
    """
    return ("" if role == "assistant" else "\n").join(part.text for part in parts)


def tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> protocols.ToolSpec:
    """Returns the tool that a request offers."""
    return protocols.ToolSpec(name, description or "", parameters or {"type": "object", "properties": {}})


def offers_tools(choice: object, of_any: Sequence[str]) -> bool:
    """Returns whether the model is offered the tools of a request.

    Args:
      choice: `tool_choice`: its name, or an object with its name under `type`.
      of_any: names of choices that force a call.

    Raises:
      Problem: the choice forces a call, or is none.
    """
    name = choice.get("type") if isinstance(choice, dict) else choice
    if name in (None, "auto"):
        return True
    if name == "none":
        return False
    if isinstance(name, str) and name in of_any:
        raise errors.invalid(
            "tool_choice",
            f"{name!r} would force a call, so the model would no longer sample from its own distribution; use "
            "'auto', or 'none' to offer no tools",
        )
    raise errors.invalid("tool_choice", "must be 'auto' or 'none'")


def to_json(value: object) -> str:
    """Returns compact JSON text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def encoded(value: object) -> bytes:
    """Returns compact JSON in UTF-8."""
    # A half of a surrogate pair has no UTF-8. Models write none, but tools' arguments may hold one as an escape.
    return to_json(value).encode("utf-8", "replace")
