"""What the gateway keeps of each session: its rate, its outputs under way, and its last responses."""

from __future__ import annotations

import collections
import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.harness.gateway import errors

KEPT_RESPONSES = 32
"""Responses of a session that a request may continue by `previous_response_id`."""

KEPT_ITEMS = 4096
"""Items of a session's responses that a request may name by `item_reference`, and contents of its failed requests."""


class GatewaySession:
    """A session's limits and memory. Lives as long as its conversation.

    Attributes:
      responses: the last responses by id, oldest first, each after the dialogue that ends in it.
      items: items of the responses, by id, oldest first.
    """

    def __init__(self, limits: config_lib.GatewayConfig) -> None:
        self._limits = limits
        self._burst = max(1.0, limits.requests_per_second)
        self._allowance, self._counted_at = self._burst, 0.0
        self._running = 0
        self._failures: collections.Counter[int] = collections.Counter()
        self.responses: dict[str, tuple[Sequence[protocols.Message], Mapping[str, Any]]] = {}
        self.items: dict[str, Mapping[str, Any]] = {}

    def count_request(self, now: float) -> None:
        """Counts a request against the rate: a token bucket that holds the requests of one second.

        Args:
          now: seconds on the event loop's clock.

        Raises:
          Problem: the session sends requests faster than it may.
        """
        rate = self._limits.requests_per_second
        if not rate:
            return
        self._allowance = min(self._burst, self._allowance + (now - self._counted_at) * rate)
        self._counted_at = now
        if self._allowance < 1:
            wait = (1 - self._allowance) / rate
            raise errors.Problem(
                429,
                f"The session may send {rate:g} requests a second. Try again in {wait:.3f} s.",
                code="rate_limit_exceeded",
                retry_seconds=math.ceil(wait),
            )
        self._allowance -= 1

    @contextlib.contextmanager
    def tries(self, content: int, marked: bool) -> Iterator[bool]:
        """Yields whether a marked try repeats a delivered answer: no try of its content failed. Counts failures."""
        retry = marked and not self._failures[content]
        self._failures[content] -= marked and not retry
        if len(self._failures) > KEPT_ITEMS:
            del self._failures[next(iter(self._failures))]
        try:
            yield retry
        except BaseException as error:
            # A retry that the gateway refuses, as one too many, still waits for the delivered answer.
            self._failures[content] += not (retry and isinstance(error, errors.Problem))
            raise

    @contextlib.contextmanager
    def outputs(self, count: int) -> Iterator[None]:
        """Counts outputs as under way inside the context.

        Raises:
          Problem: the session would wait for too many outputs at once.
        """
        limit = self._limits.max_concurrent
        if count > limit:
            raise errors.invalid("n", f"{count} choices are more than the {limit} outputs that a session may wait for")
        if self._running + count > limit:
            raise errors.Problem(
                429,
                f"The session waits for {self._running} outputs already, and {limit} are the most.",
                code="too_many_requests",
                retry_seconds=1,
            )
        self._running += count
        try:
            yield
        finally:
            self._running -= count

    def keep(self, messages: Sequence[protocols.Message], response: Mapping[str, Any]) -> None:
        """Keeps a response of OpenAI's API, and the dialogue that ends in it."""
        self.responses[response["id"]] = messages, response
        self.items |= {item["id"]: item for item in response["output"]}
        if len(self.responses) > KEPT_RESPONSES:
            del self.responses[next(iter(self.responses))]
        while len(self.items) > KEPT_ITEMS:
            del self.items[next(iter(self.items))]


class Sessions:
    """The sessions of a gateway, found by their secrets."""

    def __init__(self, conversations: protocols.Conversations, limits: config_lib.GatewayConfig) -> None:
        self._conversations, self._limits = conversations, limits
        # Weak, so that a session that ended leaves nothing behind.
        self._sessions: weakref.WeakKeyDictionary[protocols.Conversation, GatewaySession] = weakref.WeakKeyDictionary()

    @property
    def model(self) -> str:
        """Name of the model in answers."""
        return self._conversations.model

    def find(self, secret: str) -> tuple[protocols.Conversation, GatewaySession]:
        """Returns the session with this secret.

        Raises:
          Problem: no live session has it.
        """
        conversation = self._conversations.find(secret) if secret else None
        if conversation is None:
            raise errors.Problem(
                401,
                "No live session has this key. Send the session's secret as `Authorization: Bearer` or `x-api-key`.",
                code="invalid_api_key",
            )
        session = self._sessions.get(conversation)
        if session is None:
            session = self._sessions[conversation] = GatewaySession(self._limits)
        return conversation, session
