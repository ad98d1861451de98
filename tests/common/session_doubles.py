"""Doubles for sessions: a chat format of characters, and a sampler that writes scripted outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from libra_jax import protocols
from libra_jax.chat import tokenizers

CHARACTERS = tokenizers.CharacterTokenizer()
STOP = CHARACTERS.stop_token_ids[0]


class TextParser:
    """Passes text through, at once or at the end of the output."""

    def __init__(self, *, late: bool = False) -> None:
        self._late = late
        self.text = ""

    def feed(self, token_ids: Sequence[int]) -> Sequence[protocols.MessageDelta]:
        text = CHARACTERS.decode(token_ids)
        self.text += text
        return [protocols.ContentDelta(text)] if text and not self._late else []

    def finish(self) -> tuple[Sequence[protocols.MessageDelta], protocols.Message]:
        rest = [protocols.ContentDelta(self.text)] if self.text and self._late else []
        return rest, protocols.Message("assistant", self.text)


class Characters:
    """A chat format whose template is incremental, or forgets text in parentheses of earlier outputs.

    Its parser may hold the content back until the output ends (`late`).
    """

    def __init__(self, *, forgets: bool = False, late: bool = False) -> None:
        self.stop_token_ids = CHARACTERS.stop_token_ids
        self._forgets, self._late = forgets, late

    def render(self, messages: Sequence[protocols.Message], tools: Sequence[protocols.ToolSpec]) -> list[int]:
        if any(message.content == "unspeakable" for message in messages):
            raise protocols.DataError("the template has no such word")
        if self._forgets:
            messages = [
                protocols.Message(message.role, message.content.partition(")")[2] or message.content)
                for message in messages
            ]
        return CHARACTERS.render(messages, first=True, generation_prompt=True)

    def extend(
        self, messages: Sequence[protocols.Message], known_count: int, tools: Sequence[protocols.ToolSpec]
    ) -> list[int] | None:
        if self._forgets and any(")" in message.content for message in messages[:known_count]):
            return None
        self.render(messages, tools)
        return CHARACTERS.render(messages[known_count:], first=False, generation_prompt=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        return CHARACTERS.decode(token_ids)

    def parser(self, tools: Sequence[protocols.ToolSpec], context: Sequence[int]) -> protocols.OutputParser:
        return TextParser(late=self._late)


class Writer:
    """A sampler that answers each context by a function, some tokens at a time.

    Attributes:
      asked: context of each output asked for.
      events: what the dispatcher would have learned of tools: (segment's name, event).
      gate: outputs stop in their middle until it is set.
    """

    def __init__(self, write: Callable[[str], str], *, each: int = 3, version: int = 7) -> None:
        self._write, self._each, self._version = write, each, version
        self.asked: list[list[int]] = []
        self.events: list[tuple[str, object]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def sample(
        self,
        segment: protocols.Segment,
        sampling: protocols.SamplingParams,
        on_tokens: Callable[[], None] | None = None,
    ) -> protocols.FinishReason:
        context = list(segment.context())
        self.asked.append(context)
        last = max(at for at, token in enumerate(context) if token == 4)
        begun = context[last + 1 :]
        tokens = [*CHARACTERS.encode(self._write(CHARACTERS.decode(context[: last + 1]))), STOP][len(begun) :]
        tokens = tokens[: sampling.max_tokens]
        for at in range(0, len(tokens), self._each):
            piece = tuple(tokens[at : at + self._each])
            segment.append_sampled(
                protocols.TokenDelta(piece, tuple(-0.5 for _ in piece), (self._version,) * len(piece))
            )
            if on_tokens is not None:
                on_tokens()
            await asyncio.sleep(0)
            if at:
                await self.gate.wait()
        return "stop" if tokens and tokens[-1] == STOP else "length"

    async def tool_called(self, segment: protocols.Segment) -> None:
        self.events.append((segment.name, "called"))

    async def tool_returned(self, segment: protocols.Segment, causal_state: protocols.CausalState) -> None:
        self.events.append((segment.name, causal_state))


class Directly:
    """A gateway without HTTP: harnesses find their conversation by its secret."""

    def __init__(self) -> None:
        self.open_now: dict[str, protocols.Conversation] = {}
        self.reachable: dict[str, Callable[[bool], None]] = {}

    async def open(
        self,
        conversation: protocols.Conversation,
        secret: str = "",
        reachable: Callable[[bool], None] = lambda _: None,
    ) -> protocols.Endpoint:
        secret = f"secret {len(self.open_now)}"
        self.open_now[secret], self.reachable[secret] = conversation, reachable
        return protocols.Endpoint("http://nowhere/v1", secret, "policy")

    async def close(self, endpoint: protocols.Endpoint) -> None:
        del self.open_now[endpoint.secret]
