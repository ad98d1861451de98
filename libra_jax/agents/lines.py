"""The dialogues that a session knows: their messages, and the tokens that hold them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from libra_jax import protocols


@dataclass(frozen=True)
class Output:
    """An output that the client has.

    Attributes:
      messages: number of messages of the dialogue up to it.
      end: number of the segment's own tokens up to it.
      stopped: it ends with a stop token.
    """

    messages: int
    end: int
    stopped: bool


@dataclass(frozen=True)
class Offered:
    """A complete output that the client may not have yet.

    Attributes:
      message: the output as the client gets it.
      tokens: number of its tokens.
      stopped: it ends with a stop token.
      unseen: the client does not have it.
    """

    message: protocols.Message
    tokens: int
    stopped: bool
    unseen: bool = False


@dataclass(eq=False)
class Line:
    """The dialogue of one segment, as far as the client knows it.

    Attributes:
      segment: tokens of the dialogue.
      tools: tools that its requests offer.
      messages: dialogue up to the last delivered output, and the messages after it that an outstanding request added.
      outputs: delivered outputs, in order.
      position: number of own tokens that `messages` account for.
      outstanding: a request's output is under way, or was not delivered as far as anybody knows.
      offered: the outstanding output, if it is complete.
      busy: an output is under way.
      returned: what tools returned before the outstanding output; None for the segment's first one.
      answered_at: event-loop time of the last delivery, in seconds.
    """

    segment: protocols.Segment
    tools: tuple[protocols.ToolSpec, ...]
    messages: tuple[protocols.Message, ...]
    outputs: list[Output] = field(default_factory=list)
    position: int = 0
    outstanding: bool = True
    offered: Offered | None = None
    busy: bool = False
    returned: protocols.CausalState | None = None
    answered_at: float = 0.0


def text_fits(segment: protocols.Segment, start: int, text: Sequence[int]) -> bool:
    """Returns whether the own tokens from `start` on are none, or begin with this text (or are its beginning)."""
    retained, sources = segment.token_ids[start:], segment.sources[start:]
    sampled = any(source == protocols.TokenSource.MODEL for source in sources[: len(text)])
    follows = len(retained) <= len(text) or sources[len(text)] == protocols.TokenSource.MODEL
    return not sampled and follows and list(text[: len(retained)]) == list(retained[: len(text)])


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the longest common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


def same(first: Sequence[protocols.Message], second: Sequence[protocols.Message]) -> bool:
    """Returns whether a client's messages are the known ones, as `equal` compares each."""
    return len(first) == len(second) and all(map(equal, first, second))


def equal(known: protocols.Message, given: protocols.Message) -> bool:
    """Returns whether a client's message is the known one. Clients need not send reasoning back."""
    if known is given:
        return True
    calls = len(known.tool_calls) == len(given.tool_calls) and all(
        one.call_id == other.call_id and one.name == other.name and _json(one.arguments) == _json(other.arguments)
        for one, other in zip(known.tool_calls, given.tool_calls, strict=False)
    )
    return calls and dataclasses.replace(known, tool_calls=(), reasoning="") == dataclasses.replace(
        given, tool_calls=(), reasoning=""
    )


def _json(text: str) -> object:
    """Returns the value of a call's arguments: clients may write the JSON in another way. Text if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the latter: nested too deeply
        return text
