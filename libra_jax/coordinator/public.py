"""Serves a policy to any client: each request is a dialogue of its own, and nothing is trained."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator

from libra_jax import protocols
from libra_jax.rollouts import loop, session, streams, tool_results

_SEED = "vLLM's engine on CPUs fails at seeded requests, so this server repeats no sample; leave it out"
_SCHEMA = "the engines hold no tokenizer, by which vLLM would constrain outputs; describe the form in the prompt"
_NO_TOOLS = "the model's chat template writes no tools, so the model would not know them; describe them in the prompt"


class Public:
    """A `protocols.Conversation` of many clients. Belongs to the event loop of its streams.

    The engines' prefix caches keep what a dialogue's requests have in common.

    Args:
      sampler: source of tokens.
      form: chat format of the policy's model.
      limits: `max_context` and the temperature of requests that name none.
      version: served policy version.
      strict: refuse requests with hints.
    """

    def __init__(
        self,
        sampler: streams.Streams,
        form: protocols.ChatFormat,
        limits: loop.Limits,
        version: int,
        *,
        strict: bool = False,
    ) -> None:
        self._streams = sampler
        self._form = form
        self._limits = dataclasses.replace(limits, max_turns=1, max_tokens=limits.max_context, rollout_tokens=0)
        self._version, self._strict = version, strict
        self._writes_tools: bool | None = None
        self._numbers = itertools.count(1)

    async def reply(
        self, request: protocols.ChatRequest
    ) -> AsyncGenerator[protocols.MessageDelta | protocols.Reply, None]:
        """Streams one model output (`protocols.Conversation.reply`), with the settings that the request names."""
        self._check(request)
        name = f"request-{next(self._numbers)}"
        trajectory = protocols.Trajectory(name, name)
        limits = dataclasses.replace(self._limits, options=request.options)
        if request.temperature is not None:
            limits = dataclasses.replace(limits, temperature=request.temperature)
        self._streams.open(trajectory, protocols.EVALUATION_GROUP, self._version)
        try:
            one = session.RolloutSession(
                trajectory,
                form=self._form,
                sampler=self._streams,
                limits=limits,
                read_status=tool_results.status,
                strict=self._strict,
            )
            async with contextlib.aclosing(one.reply(request)) as items:
                async for item in items:
                    yield item
        finally:
            self._streams.finish(name)

    def note_refusal(self, sentence: str) -> None:
        """Ignores refused requests: their clients know (`protocols.Conversation.note_refusal`)."""

    def _check(self, request: protocols.ChatRequest) -> None:
        """Refuses what a request asks for and would not get."""
        if request.tools and self._writes_tools is None:
            question = [protocols.Message("user", "?")]
            try:
                self._writes_tools = self._form.render(question, request.tools) != self._form.render(question, ())
            except protocols.DataError as error:
                raise protocols.Refused("invalid", str(error), "tools") from error
        for field, reason, is_requested in (
            ("seed", _SEED, request.options.seed is not None),
            ("response_format", _SCHEMA, request.options.schema is not None),
            ("tools", _NO_TOOLS, bool(request.tools) and not self._writes_tools),
        ):
            if is_requested:
                raise protocols.Refused("invalid", f"{field}: {reason}", field)
