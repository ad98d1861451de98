"""Serves a policy to any client: each request is a dialogue of its own, and nothing is trained."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator

from libra_jax import protocols
from libra_jax.agents import loop, session, wire
from libra_jax.loops import streams


class Public:
    """A `protocols.Conversation` of many clients. Belongs to the event loop of its streams.

    The engines' prefix caches keep what a dialogue's requests have in common.

    Args:
      sampler: source of tokens.
      form: chat format of the policy's model.
      limits: `max_context` and the temperature of requests that name none.
      version: served policy version.
    """

    def __init__(self, sampler: streams.Streams, form: protocols.ChatFormat, limits: loop.Limits, version: int) -> None:
        self._streams = sampler
        self._form = form
        self._limits = dataclasses.replace(limits, max_turns=1, max_tokens=limits.max_context, rollout_tokens=0)
        self._version = version
        self._numbers = itertools.count(1)

    async def reply(
        self, request: protocols.ChatRequest
    ) -> AsyncGenerator[protocols.MessageDelta | protocols.Reply, None]:
        """Streams one model output (`protocols.Conversation.reply`), at the temperature that the request names."""
        name = f"request-{next(self._numbers)}"
        trajectory, limits = protocols.Trajectory(name, name), self._limits
        if request.temperature is not None:
            limits = dataclasses.replace(limits, temperature=request.temperature)
        self._streams.open(trajectory, protocols.EVALUATION_GROUP, self._version)
        try:
            one = session.Session(
                trajectory, form=self._form, sampler=self._streams, limits=limits, read_status=wire.status
            )
            async with contextlib.aclosing(one.reply(request)) as items:
                async for item in items:
                    yield item
        finally:
            self._streams.finish(name)
