"""How dialogues become tokens, and outputs become messages: the chat format of a model.

A whole dialogue is rendered by the model's own chat template, with the arguments that vLLM's chat endpoint passes. A
dialogue that goes on after an output is not rendered again: the sampled tokens stay, and only the text that the
template writes after them is added. `extend` says when that is right, and `None` when it is not.
"""

from __future__ import annotations

import array
import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from libra_jax import protocols
from libra_jax.agents import control_tokens, hugging_face, tokenizers
from libra_jax.agents import messages as messages_lib

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no text."""


class Parsing(Protocol):
    """Makes a parser for each output."""

    def __call__(self, tools: Sequence[protocols.ToolSpec], context: Sequence[int]) -> protocols.OutputParser:
        """Returns a parser for one output, as `ChatFormat.parser` does."""
        ...


# Parsing --------------------------------------------------------------------------------------------------------------

_OFTEN = 16
"""Number of waiting tokens up to which each further one is tried. Beyond, at powers of two: a run of bytes that are no
text would cost the square of its length."""


class Decoder(Protocol):
    """Decodes tokens; a tokenizer and a chat format do."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of these tokens."""
        ...


class TextStream:
    """Decodes one output while its tokens arrive, as the `DecodeStream` of Hugging Face's tokenizers does.

    Tokens are decoded together with the ones before them, because the first token of a text may decode differently
    from a later one. Tokens whose text ends with U+FFFD wait: later ones may complete its character. The text does not
    depend on how the output is cut into pieces.
    """

    def __init__(self, decoder: Decoder) -> None:
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


class TextParser:
    """Passes the text of an output through: calls and reasoning stay in the content."""

    def __init__(self, tokenizer: protocols.Tokenizer) -> None:
        self._stream = TextStream(tokenizer)
        self._text: list[str] = []

    def feed(self, token_ids: Sequence[int]) -> Sequence[protocols.MessageDelta]:
        """Returns the text that further tokens complete."""
        return self._told(self._stream.feed(token_ids))

    def finish(self) -> tuple[Sequence[protocols.MessageDelta], protocols.Message]:
        """Returns the text held back, and the whole message."""
        rest = self._told(self._stream.finish())
        return rest, protocols.Message("assistant", "".join(self._text))

    def _told(self, text: str) -> Sequence[protocols.MessageDelta]:
        self._text += [text] if text else []
        return [protocols.ContentDelta(text)] if text else []


def text_parsing(tokenizer: protocols.Tokenizer) -> Parsing:
    """Returns a maker of parsers that pass text through."""

    def parser(tools: Sequence[protocols.ToolSpec], context: Sequence[int]) -> protocols.OutputParser:
        del tools, context
        return TextParser(tokenizer)

    return parser


def call_id(context: Sequence[int], output: Sequence[int], index: int) -> str:
    """Returns the id of a call: 9 letters and digits, which is the form that Mistral's templates demand.

    It follows from the tokens before the call's output, the output, and the number of the call in it. So a replay
    gives the same id, and no other call of the session has it.
    """
    digest = hashlib.sha256(array.array("q", (index, len(context), *context, *output)).tobytes())
    return digest.hexdigest()[:9]


class Parsers(NamedTuple):
    """Names of vLLM's parsers of an output; empty for none.

    Attributes:
      tool: parser of tool calls.
      reasoning: parser of reasoning.
    """

    tool: str = ""
    reasoning: str = ""


def parsers_of(template: str, header: str) -> Parsers:
    """Returns the parsers that a chat template is certain to need.

    A template shows the model how to write calls, and so tells more than an architecture: Qwen3 writes JSON, and
    Qwen3-Coder, of the same architecture, XML.

    Args:
      template: the template's source.
      header: text with which it begins an output.
    """
    tool = reasoning = ""
    if "<tool_call>" in template and "<function=" in template:
        tool = "qwen3_xml"
    elif "<tool_call>" in template and re.search(r'\\*"arguments\\*"', template) and "<arg_key>" not in template:
        tool = "hermes"
    elif "<|start_header_id|>" in template and re.search(r'\\*"parameters\\*": ', template):
        tool = "llama3_json"
    # Without a switch or an open mark, the model does not think, and the parser would take its answers for reasoning.
    thinks = "enable_thinking" in template or header.rstrip().endswith("<think>")
    if thinks and all(mark in template for mark in ("<|im_start|>", "</think>", "reasoning_content")):
        reasoning = "qwen3"
    return Parsers(tool, reasoning)


# The character tokenizer ----------------------------------------------------------------------------------------------


class CharacterFormat:
    """The chat format of the character tokenizer.

    Its template writes the messages one after the other, so each dialogue that goes on extends the one before. It
    writes no tools: a task states them in its prompt. Structured calls are written as Hermes writes them, and reasoning
    in front of the content, between `<think>` and `</think>`.
    """

    def __init__(self, tokenizer: tokenizers.CharacterTokenizer, parsing: Parsing | None = None) -> None:
        """Takes the tokenizer, and a maker of parsers. Without one, text passes through."""
        self._tokenizer = tokenizer
        self._parsing = parsing or text_parsing(tokenizer)
        self.stop_token_ids = tokenizer.stop_token_ids

    def render(self, messages: Sequence[protocols.Message], tools: Sequence[protocols.ToolSpec]) -> list[int]:
        """Returns the tokens of a whole dialogue, up to the assistant's role token.

        Raises:
          DataError: A message has an unknown role.
        """
        del tools
        return self._tokenizer.render(messages, first=True, generation_prompt=True)

    def extend(
        self, messages: Sequence[protocols.Message], known: int, tools: Sequence[protocols.ToolSpec]
    ) -> list[int] | None:
        """Returns the tokens of the messages after the first `known`, up to the assistant's role token.

        Raises:
          DataError: A message has an unknown role.
        """
        return self.render(messages[known:], tools)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of these tokens."""
        return self._tokenizer.decode(token_ids)

    def parser(self, tools: Sequence[protocols.ToolSpec], context: Sequence[int]) -> protocols.OutputParser:
        """Returns a parser for one output."""
        return self._parsing(tools, context)


# Hugging Face ---------------------------------------------------------------------------------------------------------


class HuggingFaceFormat:
    """The chat format of a Hugging Face tokenizer: its chat template.

    Tokens of a whole dialogue equal those that vLLM's chat endpoint gives the model, but for control tokens that a
    message spells (`control_tokens`).
    """

    def __init__(self, tokenizer: hugging_face.HuggingFaceTokenizer, parsing: Parsing | None = None) -> None:
        """Takes the tokenizer, and a maker of parsers. Without one, text passes through."""
        self._tokenizer = tokenizer
        self._parsing = parsing or text_parsing(tokenizer)
        self.stop_token_ids = tokenizer.stop_token_ids
        # A listed token that the vocabulary lacks has no text.
        self._ends = tuple(filter(None, (tokenizer.decode([token]) for token in self.stop_token_ids)))

    def render(self, messages: Sequence[protocols.Message], tools: Sequence[protocols.ToolSpec]) -> list[int]:
        """Returns the tokens of a whole dialogue, up to the header after which the assistant writes.

        Raises:
          DataError: The template refuses the messages.
        """
        return self._tokenizer.encode(self._text(messages, tools))

    def extend(
        self, messages: Sequence[protocols.Message], known: int, tools: Sequence[protocols.ToolSpec]
    ) -> list[int] | None:
        """Returns the tokens after the stop token of the output `messages[known - 1]`.

        Compared is what the template writes for all messages with what the model saw:
        - before the output, the text has to be the one that the output followed, character by character;
        - of the output, its reasoning, content and calls have to be there still. White space does not count, nor how
          the template writes the calls' JSON, because the sampled tokens stay;
        - the text after the output is taken as it is.

        Returns:
          The tokens; None if the text differs.

        Raises:
          DataError: The template refuses the messages.
        """
        output = messages[known - 1]
        seen, whole = self._text(messages[: known - 1], tools), self._text(messages, tools)
        if not whole.startswith(seen):
            return None
        written, after = self._split(whole[len(seen) :])
        if after is None or not self._keeps(output, written):
            return None
        return self._tokenizer.encode_after_turn(after)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of these tokens."""
        return self._tokenizer.decode(token_ids)

    def parser(self, tools: Sequence[protocols.ToolSpec], context: Sequence[int]) -> protocols.OutputParser:
        """Returns a parser for one output."""
        return self._parsing(tools, context)

    def _split(self, text: str) -> tuple[str, str | None]:
        """Returns the text before and after the first stop token's text. The latter is None without one."""
        found = [(at, end) for end in self._ends if (at := text.find(end)) >= 0]
        if not found:
            return text, None
        at, end = min(found)
        return text[:at], text[at + len(end) :]

    def _keeps(self, output: protocols.Message, written: str) -> bool:
        """Returns whether the template has written all of an output."""
        squeezed = "".join(control_tokens.joined(written).split())
        parts = [output.reasoning, output.content, *(call.name for call in output.tool_calls)]
        # An output that spells a stop token's text in other tokens would be cut in the middle.
        if any(end in part for end in self._ends for part in (*parts, *(call.arguments for call in output.tool_calls))):
            return False
        return all("".join(part.split()) in squeezed for part in parts)

    def _text(self, messages: Sequence[protocols.Message], tools: Sequence[protocols.ToolSpec]) -> str:
        """Returns the template's text of a dialogue, up to the header after which the assistant writes."""
        return self._tokenizer.dialogue(
            [messages_lib.for_template(message) for message in messages],
            [messages_lib.tool_for_template(tool) for tool in tools],
        )
