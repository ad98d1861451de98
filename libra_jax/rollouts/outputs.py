"""Reads a streamed output for a client: parts of the message as they complete, up to the client's stop texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from libra_jax import protocols
from libra_jax.chat import output_parsers


class Reader:
    """Reads one output.

    Stop texts are looked for in the text of the tokens, as vLLM does. What a parser makes of them comes too late: some
    parsers hold content back until the end of the output.

    Args:
      form: the model's chat format.
      parser: its parser of this output.
      stop: texts that end the output. The text itself is left out of the message, and its tokens are kept.

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
        self._stream = output_parsers.TextStream(form)
        self._tail = ""
        self._texts = {"reasoning": "", "content": ""}
        self._sent = dict.fromkeys(self._texts, 0)
        self.tokens = 0
        self.stopped = self.ended = False
        self.stop_text = ""

    def feed(self, token_ids: Sequence[int]) -> list[protocols.MessageDelta]:
        """Takes further tokens; returns the parts of the message that they complete. Ignores tokens after the end."""
        deltas: list[protocols.MessageDelta] = []
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
            deltas += self._release(self._parser.feed(piece[:end]))
        return deltas

    def finish(self) -> tuple[list[protocols.MessageDelta], protocols.Message]:
        """Ends the output; returns the parts that were held back, and the whole message."""
        deltas, message = self._parser.finish()
        if not self._stop:
            return list(deltas), message
        calls = [delta for delta in deltas if isinstance(delta, protocols.ToolCallDelta)]
        visible_deltas = self._release([delta for delta in deltas if not isinstance(delta, protocols.ToolCallDelta)])
        for part, text in self._texts.items() if self.stop_text else ():
            place = text.find(self.stop_text, self._sent[part])
            if place >= 0:
                # Calls begin after the content, and so after the stop text. One inside a call ends the output alone.
                self._texts[part], calls = text[:place], []
                message = dataclasses.replace(message, **self._texts, tool_calls=())
        return [*visible_deltas, *self._rest(), *calls], message

    def _look(self, text: str) -> None:
        """Ends the output if further text completes a stop text."""
        self._tail += text
        places = [(at, stop) for stop in self._stop if (at := self._tail.find(stop)) >= 0]
        if places:
            self.ended, self.stop_text = True, min(places)[1]
        self._tail = self._tail[-self._reach :] if self._reach else ""

    def _release(self, deltas: Sequence[protocols.MessageDelta]) -> list[protocols.MessageDelta]:
        """Returns what a client may see now. Text that may be the beginning of a stop text is held back."""
        if not self._stop:
            return list(deltas)
        visible_deltas: list[protocols.MessageDelta] = []
        for delta in deltas:
            if isinstance(delta, protocols.ToolCallDelta):
                visible_deltas += [*self._rest(), delta]
                continue
            part = "reasoning" if isinstance(delta, protocols.ReasoningDelta) else "content"
            self._texts[part] += delta.text
            visible_deltas += [] if self.stop_text else self._rest(part, self._reach)
        return visible_deltas

    def _rest(self, last: str = "content", keep: int = 0) -> list[protocols.MessageDelta]:
        """Returns what was not shown yet up to the part `last`, without the `keep` last characters of that part."""
        deltas: list[protocols.MessageDelta] = []
        for part, text in self._texts.items():
            sent, end = self._sent[part], len(text) - (keep if part == last else 0)
            if sent < end:
                kind = protocols.ReasoningDelta if part == "reasoning" else protocols.ContentDelta
                deltas.append(kind(text[sent:end]))
                self._sent[part] = end
            if part == last:
                break
        return deltas
