"""Reads model outputs: text from tokens that arrive, and messages with thought, content and calls from text."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence

from libra_jax import protocols
from libra_jax.chat import thoughts

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no text."""

BY_MARKS = "marks"
"""Name of the parser that takes the thought at an output's beginning out of the content, by `chat.thoughts`."""


Parsing = Callable[[Sequence[protocols.ToolSpec], Sequence[int]], protocols.OutputParser]
"""Makes a parser for each output (`ChatFormat.parser`)."""

ReadWhole = Callable[[str, Sequence[int]], tuple[str, str, Sequence[protocols.ToolCall]]]
"""Reads a whole output, or what of it follows its thought, from its text and tokens.

Returns reasoning, content and calls. Calls have the id that the model wrote, or none.
"""

_CALL_MARK = re.compile(r"<[^\s\d=]")
"""A mark of a call or the like."""

_OFTEN = 16
"""Number of waiting tokens up to which each further one is tried. Beyond, at powers of two: a run of bytes that are no
text would cost the square of its length."""


class TextStream:
    """Decodes one output while its tokens arrive, as the `DecodeStream` of Hugging Face's tokenizers does.

    Tokens are decoded together with the ones before them, because the first token of a text may decode differently
    from a later one. Tokens whose text ends with U+FFFD wait: later ones may complete its character. The text does not
    depend on how the output is cut into pieces.
    """

    def __init__(self, decoder: protocols.Tokenizer | protocols.ChatFormat) -> None:
        self._decoder = decoder
        self._before: list[int] = []
        self._before_text = ""
        self._ahead: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        """Returns the text that further tokens complete."""
        if token_ids and not self._ahead:
            text = self._text(token_ids)
            if _BROKEN not in text:
                return self._take(list(token_ids), text)
        return "".join(map(self._next, token_ids))

    def _next(self, token: int) -> str:
        self._ahead.append(token)
        count = len(self._ahead)
        if count > _OFTEN and count & (count - 1) and self._decoder.decode([token]).endswith(_BROKEN):
            return ""
        text = self._text(self._ahead)
        return "" if text.endswith(_BROKEN) else self._take(self._ahead, text)

    def _text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens that follow those before."""
        text = self._decoder.decode([*self._before, *tokens])
        # A decoder may read a character and broken bytes after it as broken bytes alone.
        if not text.startswith(self._before_text):
            return self._decoder.decode(tokens)
        return text[len(self._before_text) :]

    def _take(self, tokens: list[int], text: str) -> str:
        self._before, self._before_text, self._ahead = tokens, self._decoder.decode(tokens), []
        return text

    def finish(self) -> str:
        """Returns the text of tokens that still wait for the rest of a character."""
        return self._take(self._ahead, self._text(self._ahead)) if self._ahead else ""


class MessageParser:
    """Reads one output: a thought at its beginning, content, and calls at its end. A part never follows a later one.

    The thought streams as it comes. So does content without calls. Content that may hold calls streams up to the first
    mark, and the rest comes at the end. There `read` decides what is content: the text of a call that does not parse is
    content after all.

    Args:
      tokenizer: Tokenizer that decodes the output.
      context: Tokens before the output.
      thinks: Whether the thought is taken out of the content. None: `read` does that.
      read: Reads content and calls at the end. None: all text is content.
      streams: Whether `read` takes text before the first mark for content, so that it may stream.
    """

    def __init__(
        self,
        tokenizer: protocols.Tokenizer,
        context: Sequence[int] = (),
        *,
        thinks: bool | None = False,
        read: ReadWhole | None = None,
        streams: bool = True,
    ) -> None:
        self._stream = TextStream(tokenizer)
        self._context, self._read = context, read
        opening = thoughts.opening(tokenizer.decode(context[-thoughts.TOKENS :]))
        mark = opening.rstrip() if thinks else ""
        self._marks = ((mark,) if mark else tuple(thoughts.MARKS)) if thinks else ()
        self._close = thoughts.MARKS.get(mark, "")
        self._tokens: list[int] = []
        # A thought that stays in the content has its mark there, or it would pass for an answer.
        self._ahead, self._held = opening if thinks is False else "", ""
        self._text: list[str] = []  # what follows the thought
        self._quiet = read is not None and not streams
        self._sent_texts: dict[str, list[str]] = {"reasoning": [], "content": []}

    def feed(self, token_ids: Sequence[int]) -> Sequence[protocols.MessageDelta]:
        self._tokens += token_ids
        return self._next(self._stream.feed(token_ids))

    def finish(self) -> tuple[Sequence[protocols.MessageDelta], protocols.Message]:
        deltas = self._next(self._stream.finish(), last=True)
        calls: list[protocols.ToolCall] = []
        if self._read is not None:
            text, sent_content = "".join(self._text), "".join(self._sent_texts["content"])
            reasoning, content, raw_calls = self._read(text, self._tokens)
            # Parsers drop white space in front of calls, which has streamed. What else they drop is content after all.
            prefix = next(
                (prefix for prefix in (sent_content, sent_content.lstrip()) if content.startswith(prefix)), None
            )
            deltas += self._say("reasoning", reasoning)
            deltas += self._say("content", text[len(sent_content) :] if prefix is None else content[len(prefix) :])
            for index, call in enumerate(raw_calls):
                name = call.call_id or call_id(self._context, self._tokens, index)
                calls.append(dataclasses.replace(call, call_id=name))
                deltas.append(protocols.ToolCallDelta(index, name, call.name, call.arguments))
        reasoning, content = map("".join, self._sent_texts.values())
        return deltas, protocols.Message("assistant", content, tuple(calls), reasoning=reasoning)

    def _next(self, text: str, *, last: bool = False) -> list[protocols.MessageDelta]:
        """Returns what further text lets stream."""
        self._ahead += text
        if self._marks and not self._begin(last):
            return []
        deltas: list[protocols.MessageDelta] = []
        if self._close:
            thought, closed, rest = self._ahead.partition(self._close)
            if not closed and not last:
                sizes = range(min(len(thought), len(self._close) - 1), 0, -1)
                keep = next((size for size in sizes if self._close.startswith(thought[-size:])), 0)
                thought, rest = thought[: len(thought) - keep], thought[len(thought) - keep :]
            self._ahead = rest
            deltas += self._say("reasoning", thought)
            if not closed:
                return deltas
            self._close = ""
        return deltas + self._say("content", self._plain())

    def _begin(self, last: bool) -> bool:
        """Finds out whether the output begins with a thought. Returns whether that is certain."""
        text = self._ahead.lstrip()
        mark = next((mark for mark in self._marks if text.startswith(mark)), None)
        if mark is not None:
            # A model may repeat the mark that the template has written.
            self._close, self._ahead = thoughts.MARKS[mark], text[len(mark) :]
        elif not last and any(mark.startswith(text) for mark in self._marks):
            return False
        self._marks = ()
        return True

    def _plain(self) -> str:
        """Returns the content that may stream now."""
        text, self._ahead = self._ahead, ""
        self._text.append(text)
        if self._read is None or self._quiet:
            return "" if self._quiet else text
        search_start = max(len(self._held) - 1, 0)
        self._held += text
        mark = _CALL_MARK.search(self._held, search_start)
        self._quiet = mark is not None
        # Parsers may drop white space at the end of content.
        plain = self._held[: mark.start()].rstrip() if mark else self._held.removesuffix("<").rstrip()
        self._held = self._held[len(plain) :]
        return plain

    def _say(self, part: str, text: str) -> list[protocols.MessageDelta]:
        self._sent_texts[part].append(text)
        if not text:
            return []
        return [protocols.ReasoningDelta(text) if part == "reasoning" else protocols.ContentDelta(text)]


def text_parsing(tokenizer: protocols.Tokenizer, *, thinks: bool = False) -> Parsing:
    """Returns a maker of parsers that leave calls in the content, and thoughts unless `thinks`."""
    return lambda tools, context: MessageParser(tokenizer, context, thinks=thinks)


def call_id(context: Sequence[int], output: Sequence[int], index: int) -> str:
    """Returns the id of a call: 9 letters and digits, which is the form that Mistral's templates demand.

    It follows from the tokens before the call's output, the output, and the number of the call in it. So a replay
    gives the same id, and no other call of the session has it.
    """
    digest = hashlib.sha256(array.array("q", (index, len(context), *context, *output)).tobytes())
    return digest.hexdigest()[:9]
