"""The dialogues that a session knows: their messages, and the tokens that hold them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
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
    """Returns whether a client's message is the known one, for all that clients rewrite in histories.

    They need not send reasoning back, write white space and the JSON of calls in other ways, and may leave out text
    beside calls, or write calls as text. A call is the known one by its place, name and arguments. Its id stands for
    arguments that are no JSON, which clients repair. Other arguments are another call, as a guardrail puts it.
    """
    if known is given or known == given:
        return True
    if known.tool_calls and not given.tool_calls and given.role == known.role:
        # Some agents write the calls into the text, with their ids (smolagents).
        return all(call.call_id in given.content for call in known.tool_calls)
    calls = len(known.tool_calls) == len(given.tool_calls) and all(
        one.name == other.name and _same_arguments(one, other)
        for one, other in zip(known.tool_calls, given.tool_calls, strict=False)
    )
    dropped = bool(known.tool_calls) and not given.content.strip()
    return calls and known.role == given.role and (dropped or known.content.split() == given.content.split())


def call_ids(known: Sequence[protocols.Message], given: Sequence[protocols.Message]) -> dict[str, str]:
    """Returns the known ids of calls by the ids that a client has given them instead.

    Args:
      known: a dialogue up to an output.
      given: the same dialogue as the client sends it, and what follows. A result that names none of the output's calls
        answers the next one without a result.
    """
    pairs = (zip(one.tool_calls, other.tool_calls, strict=False) for one, other in zip(known, given, strict=False))
    ids = {theirs.call_id: mine.call_id for pair in pairs for mine, theirs in pair}
    added = itertools.takewhile(lambda message: message.role != "assistant", given[len(known) :])
    results = [message.tool_call_id for message in added if message.role == "tool"]
    calls = [call.call_id for call in known[-1].tool_calls]
    free = [name for name in calls if name not in {ids.get(result, result) for result in results}]
    strange = [name for name in results if name not in ids and name not in calls]
    return ids | dict(zip(strange, free, strict=False))


def renamed(message: protocols.Message, ids: Mapping[str, str]) -> protocols.Message:
    """Returns a message with the known id of the call that it answers."""
    known = ids.get(message.tool_call_id, message.tool_call_id)
    return message if known == message.tool_call_id else dataclasses.replace(message, tool_call_id=known)


def _same_arguments(known: protocols.ToolCall, given: protocols.ToolCall) -> bool:
    try:  # clients may write the JSON in another way; `int` refuses NaN, which is no JSON
        one, other = (json.loads(call.arguments, parse_constant=int) for call in (known, given))
    except (ValueError, RecursionError):  # the latter: nested too deeply
        return known.call_id == given.call_id or known.arguments == given.arguments
    return bool(one == other)
