"""Reads a streamed output for a client: parts of the message as they complete, up to the client's stop texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from libra_jax import protocols
from libra_jax.agents import chat_format


class Reader:
    """Reads one output.

    Stop texts are looked for in the text of the tokens, as vLLM does. What a parser makes of them comes too late: some
    parsers hold content back until the end of the output.

    Args:
      form: the model's chat format.
      parser: its parser of this output.
      stop: texts that end the output. The text itself is left out of the message, and its tokens are kept. A client
        that streams may see it in the reasoning, which is not held back.

    Attributes:
      tokens: number of tokens of the output so far.
      stopped: the output has ended with a stop token.
      ended: the output has ended with a stop token or a stop text.
      stop_text: the stop text that ended the output; empty if none did.
    """

    def __init__(self, form: protocols.ChatFormat, parser: protocols.OutputParser, stop: Sequence[str]) -> None:
        self._parser = parser
        self._stop_token_ids = frozenset(form.stop_token_ids)
        self._stop = tuple(text for text in stop if text)
        self._reach = max(map(len, self._stop), default=1) - 1
        self._stream = chat_format.TextStream(form)
        self._tail = ""
        self._content = ""
        self._sent = 0
        self.tokens = 0
        self.stopped = self.ended = False
        self.stop_text = ""

    def feed(self, token_ids: Sequence[int]) -> list[protocols.MessageDelta]:
        """Takes further tokens; returns the parts of the message that they complete. Ignores tokens after the end."""
        found: list[protocols.MessageDelta] = []
        # With stop texts, each token alone: the output ends with the very token that completes one.
        pieces = [[token] for token in token_ids] if self._stop else [list(token_ids)]
        for piece in pieces:
            if self.ended:
                break
            end = next((at for at, token in enumerate(piece) if token in self._stop_token_ids), None)
            self.stopped = self.ended = end is not None
            self.tokens += len(piece) if end is None else end + 1
            if self._stop:
                self._look(self._stream.feed(piece[:end]))
            found += self._shown(self._parser.feed(piece[:end]))
        return found

    def finish(self) -> tuple[list[protocols.MessageDelta], protocols.Message]:
        """Ends the output; returns the parts that were held back, and the whole message."""
        deltas, message = self._parser.finish()
        rest = self._shown(deltas)
        if self._cut:
            # Calls begin after the content, and so after the stop text.
            content = self._content.partition(self.stop_text)[0]
            message = dataclasses.replace(message, content=content, tool_calls=())
            self._content = content
        elif self.stop_text:
            message = dataclasses.replace(message, reasoning=message.reasoning.partition(self.stop_text)[0])
        return rest + self._held(len(self._content)), message

    @property
    def _cut(self) -> bool:
        """Whether a stop text has ended the content. One inside a call or the reasoning ends the output alone."""
        return bool(self.stop_text) and self.stop_text in self._content

    def _look(self, text: str) -> None:
        """Ends the output if further text completes a stop text."""
        self._tail += text
        places = [(at, stop) for stop in self._stop if (at := self._tail.find(stop)) >= 0]
        if places:
            self.ended, self.stop_text = True, min(places)[1]
        self._tail = self._tail[-self._reach :] if self._reach else ""

    def _shown(self, deltas: Sequence[protocols.MessageDelta]) -> list[protocols.MessageDelta]:
        """Returns what a client may see now. Content that may be the beginning of a stop text is held back."""
        if not self._stop:
            return list(deltas)
        found: list[protocols.MessageDelta] = []
        for delta in deltas:
            if isinstance(delta, protocols.ContentDelta):
                self._content += delta.text
                found += [] if self.stop_text else self._held(len(self._content) - self._reach)
            elif not self._cut:
                found += [] if self.stop_text else self._held(len(self._content))
                found.append(delta)
        return found

    def _held(self, upto: int) -> list[protocols.MessageDelta]:
        """Returns the content up to a character that was not shown yet."""
        sent, self._sent = self._sent, max(self._sent, upto)
        return [protocols.ContentDelta(self._content[sent:upto])] if sent < upto else []
