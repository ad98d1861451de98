"""What each API of the gateway provides: a reader of its requests, and a writer of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from libra_jax import protocols
from libra_jax.harness.gateway import errors, sessions

Json = Mapping[str, Any]


class Exchange(Protocol):
    """One request, and the writer of its answer. One output is one choice.

    Attributes:
      request: the request.
      choices: number of outputs that it asks for.
      streams: True if the answer is a stream of server-sent events.
    """

    request: protocols.ChatRequest
    choices: int
    streams: bool

    def body(self, replies: Sequence[protocols.Reply]) -> Json:
        """Returns the body of an answer that is not streamed."""
        ...

    def start(self) -> bytes:
        """Returns the events before all others."""
        ...

    def part(self, choice: int, delta: protocols.MessageDelta) -> bytes:
        """Returns the events of a further part of an output."""
        ...

    def end(self, choice: int, reply: protocols.Reply) -> bytes:
        """Returns the events that end an output."""
        ...

    def close(self, replies: Sequence[protocols.Reply]) -> bytes:
        """Returns the events after all outputs."""
        ...

    def failed(self, problem: errors.Problem) -> bytes:
        """Returns the event of an error after the stream has begun."""
        ...


Read = Callable[[Json, str, sessions.GatewaySession], Exchange]
"""Reads the JSON of a request to a model, in a session. Raises `errors.Problem` if it is wrong."""
