"""Reads a streamed output for a client: parts of the message as they complete, up to the client's stop texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from libra_jax import protocols


class Reader:
    """Reads one output.

    Args:
      parser: parser of the model's chat format.
      stop_token_ids: tokens that end an output.
      stop: texts that end the content. The text itself is left out of the message, and its tokens are kept.

    Attributes:
      tokens: number of tokens of the output so far.
      stopped: the output has ended with a stop token.
      ended: the output has ended with a stop token or a stop text.
      stop_text: the stop text that ended the output; empty if none did.
    """

    def __init__(self, parser: protocols.OutputParser, stop_token_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._parser = parser
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stop = tuple(text for text in stop if text)
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
            end = next((at for at, token in enumerate(piece) if token in self._stop_token_ids), None)
            if self.ended:
                break
            self.stopped = self.ended = end is not None
            self.tokens += len(piece) if end is None else end + 1
            found += self._cut(self._parser.feed(piece[:end]))
        return found

    def finish(self) -> tuple[list[protocols.MessageDelta], protocols.Message]:
        """Ends the output; returns the parts that were held back, and the whole message."""
        cut = self.ended and not self.stopped
        deltas, message = self._parser.finish()
        rest = [] if cut else self._cut(deltas)
        if self._stop and not cut:
            # A stop text may stand in what the parser had held back.
            cut = self.ended and not self.stopped
            if not cut and self._sent < len(self._content):
                rest.append(protocols.ContentDelta(self._content[self._sent :]))
        # Calls begin after the content, and so after the stop text.
        return rest, dataclasses.replace(message, content=self._content, tool_calls=()) if cut else message

    def _cut(self, deltas: Sequence[protocols.MessageDelta]) -> list[protocols.MessageDelta]:
        """Ends the content at a stop text, and holds back what may be the beginning of one."""
        found: list[protocols.MessageDelta] = []
        for delta in deltas:
            if not isinstance(delta, protocols.ContentDelta) or not self._stop:
                found.append(delta)
                continue
            before = len(self._content)
            self._content += delta.text
            reach = max(map(len, self._stop)) - 1
            found_at = [(self._content.find(text, max(0, before - reach)), text) for text in self._stop]
            place, text = min(((at, text) for at, text in found_at if at >= 0), default=(None, ""))
            if place is not None:
                self.ended, self.stop_text, self._content = True, text, self._content[:place]
            upto = len(self._content) if place is not None else max(self._sent, len(self._content) - reach)
            if upto > self._sent:
                found.append(protocols.ContentDelta(self._content[self._sent : upto]))
                self._sent = upto
            if place is not None:
                break
        return found
