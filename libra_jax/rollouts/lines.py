"""The dialogues that a session knows: their messages, and the tokens that hold them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from libra_jax import protocols
from libra_jax.rollouts import record


@dataclass(frozen=True)
class ClientOutput:
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
class PendingOutput:
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


@dataclass(eq=False, kw_only=True)
class SegmentDialogue(record.TokenRecord):
    """The dialogue of one segment, as far as the client knows it: `position` own tokens hold its messages.

    Attributes:
      tools: tools that its requests offer.
      messages: dialogue up to the last delivered output, and the messages after it that an outstanding request added.
      outputs: delivered outputs, in order.
      outstanding: a request's output is under way, or was not delivered as far as anybody knows.
      pending_output: the outstanding output, if it is complete.
      busy: an output is under way.
      returned: what tools returned before the outstanding output; None for the segment's first one.
      answered_at: event-loop time of the last delivery, in seconds.
    """

    tools: tuple[protocols.ToolSpec, ...]
    messages: tuple[protocols.Message, ...]
    outputs: list[ClientOutput] = field(default_factory=list)
    outstanding: bool = True
    pending_output: PendingOutput | None = None
    busy: bool = False
    returned: protocols.CausalState | None = None
    answered_at: float = 0.0


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the longest common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def same(first: Sequence[protocols.Message], second: Sequence[protocols.Message]) -> bool:
    """Returns whether a client's messages are the known ones, as `equal` compares each."""
    return len(first) == len(second) and all(map(equal, first, second))


def equal(session_message: protocols.Message, client_message: protocols.Message) -> bool:
    """Returns whether a client's message is the known one, for all that clients rewrite in histories.

    They need not send reasoning back, write white space and the JSON of calls in other ways, and may leave out text
    beside calls, or write calls as text. A call is the known one by its place, name and arguments. Its id stands for
    arguments that are no JSON, which clients repair. Other arguments are another call, as a guardrail puts it.
    """
    if session_message is client_message or session_message == client_message:
        return True
    if session_message.tool_calls and not client_message.tool_calls and client_message.role == session_message.role:
        # Some agents write the calls into the text, with their ids (smolagents).
        return all(call.call_id in client_message.content for call in session_message.tool_calls)
    calls = len(session_message.tool_calls) == len(client_message.tool_calls) and all(
        session_call.name == client_call.name and _same_arguments(session_call, client_call)
        for session_call, client_call in zip(session_message.tool_calls, client_message.tool_calls, strict=False)
    )
    dropped = bool(session_message.tool_calls) and not client_message.content.strip()
    return (
        calls
        and session_message.role == client_message.role
        and (dropped or session_message.content.split() == client_message.content.split())
    )


def call_ids(
    session_messages: Sequence[protocols.Message], client_messages: Sequence[protocols.Message]
) -> dict[str, str]:
    """Returns the known ids of calls by the ids that a client has given them instead.

    Args:
      session_messages: a dialogue up to an output.
      client_messages: the same dialogue as the client sends it, and what follows. A result that names none of the
        output's calls answers the next one without a result.
    """
    pairs = (
        zip(session_message.tool_calls, client_message.tool_calls, strict=False)
        for session_message, client_message in zip(session_messages, client_messages, strict=False)
    )
    ids = {client_call.call_id: session_call.call_id for pair in pairs for session_call, client_call in pair}
    added = itertools.takewhile(lambda message: message.role != "assistant", client_messages[len(session_messages) :])
    results = [message.tool_call_id for message in added if message.role == "tool"]
    calls = [call.call_id for call in session_messages[-1].tool_calls]
    free = [name for name in calls if name not in {ids.get(result, result) for result in results}]
    strange = [name for name in results if name not in ids and name not in calls]
    return ids | dict(zip(strange, free, strict=False))


def renamed(message: protocols.Message, ids: Mapping[str, str]) -> protocols.Message:
    """Returns a message with the known id of the call that it answers."""
    call_id = ids.get(message.tool_call_id, message.tool_call_id)
    return message if call_id == message.tool_call_id else dataclasses.replace(message, tool_call_id=call_id)


def _same_arguments(session_call: protocols.ToolCall, client_call: protocols.ToolCall) -> bool:
    try:  # clients may write the JSON in another way; `int` refuses NaN, which is no JSON
        session_arguments, client_arguments = (
            json.loads(call.arguments, parse_constant=int) for call in (session_call, client_call)
        )
    except (ValueError, RecursionError):  # the latter: nested too deeply
        return session_call.call_id == client_call.call_id or session_call.arguments == client_call.arguments
    return bool(session_arguments == client_arguments)
