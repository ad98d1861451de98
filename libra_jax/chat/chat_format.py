"""How dialogues become tokens, and outputs become messages: the chat format of a model.

A whole dialogue is rendered by the model's own chat template, with the arguments that vLLM's chat endpoint passes. A
dialogue that goes on after an output is not rendered again: the sampled tokens stay, and only the text that the
template writes after them is added. `extend` says when that is right, and `None` when it is not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from libra_jax import protocols
from libra_jax.chat import control_tokens, hugging_face, output_parsers, thoughts, tokenizers


class Parsers(NamedTuple):
    """Names of the parsers of an output; empty for none.

    Attributes:
      tool: vLLM's parser of tool calls.
      reasoning: vLLM's parser of reasoning, or `output_parsers.BY_MARKS`.
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
    # Other templates do not write reasoning: thoughts that were taken out of the content would leave the context.
    writes = "reasoning_content" in template and any(close in template for close in thoughts.MARKS.values())
    if writes or thoughts.opening(header):
        reasoning = output_parsers.BY_MARKS
    return Parsers(tool, reasoning)


class _Format:
    """What both chat formats do alike. Without a maker of parsers, outputs' text passes through."""

    def __init__(self, tokenizer: protocols.Tokenizer, parsing: output_parsers.Parsing | None = None) -> None:
        self.decode = tokenizer.decode
        self.parser = parsing or output_parsers.text_parsing(tokenizer)
        self.stop_token_ids = tokenizer.stop_token_ids


class CharacterFormat(_Format):
    """The chat format of the character tokenizer.

    Its template writes the messages one after the other, so each dialogue that goes on extends the one before. It
    writes no tools: a task states them in its prompt. Structured calls are written as Hermes writes them, and reasoning
    in front of the content, between `<think>` and `</think>`.
    """

    def __init__(self, tokenizer: tokenizers.CharacterTokenizer, parsing: output_parsers.Parsing | None = None) -> None:
        super().__init__(tokenizer, parsing)
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[protocols.Message], tools: Sequence[protocols.ToolSpec]) -> list[int]:
        del tools
        return self._tokenizer.render(messages, first=True, generation_prompt=True)

    def extend(
        self, messages: Sequence[protocols.Message], known_count: int, tools: Sequence[protocols.ToolSpec]
    ) -> list[int] | None:
        return self.render(messages[known_count:], tools)


class HuggingFaceFormat(_Format):
    """The chat format of a Hugging Face tokenizer: its chat template.

    Tokens of a whole dialogue equal those that vLLM's chat endpoint gives the model, but for control tokens that a
    message spells (`control_tokens`).
    """

    def __init__(
        self, tokenizer: hugging_face.HuggingFaceTokenizer, parsing: output_parsers.Parsing | None = None
    ) -> None:
        super().__init__(tokenizer, parsing)
        self._tokenizer = tokenizer
        # A listed token that the vocabulary lacks has no text.
        self._ends = tuple(filter(None, (tokenizer.decode([token]) for token in self.stop_token_ids)))

    def render(self, messages: Sequence[protocols.Message], tools: Sequence[protocols.ToolSpec]) -> list[int]:
        return self._tokenizer.encode(self._tokenizer.dialogue(messages, tools))

    def extend(
        self, messages: Sequence[protocols.Message], known_count: int, tools: Sequence[protocols.ToolSpec]
    ) -> list[int] | None:
        """Returns the tokens after the stop token of the output `messages[known_count - 1]`.

        Compared is what the template writes for all messages with what the model saw:
        - before the output, the text has to be the one that the output followed, character by character;
        - of the output, its reasoning, content and calls have to be there still. White space does not count, nor how
          the template writes the calls' JSON, because the sampled tokens stay;
        - the text after the output is taken as it is.
        """
        prefix = self._tokenizer.dialogue(messages[: known_count - 1], tools)
        dialogue = self._tokenizer.dialogue(messages, tools)
        if not dialogue.startswith(prefix):
            return None
        text = dialogue[len(prefix) :]
        ends = [(at, end) for end in self._ends if (at := text.find(end)) >= 0]
        if not ends:
            return None
        at, end = min(ends)
        if not self._keeps(messages[known_count - 1], text[:at]):
            return None
        return self._tokenizer.encode_after_turn(text[at + len(end) :])

    def _keeps(self, output: protocols.Message, text: str) -> bool:
        """Returns whether the template has written all of an output."""
        squeezed = "".join(control_tokens.joined(text).split())
        parts = [output.reasoning, output.content, *(call.name for call in output.tool_calls)]
        # An output that spells a stop token's text in other tokens would be cut in the middle.
        if any(end in part for end in self._ends for part in (*parts, *(call.arguments for call in output.tool_calls))):
            return False
        return all("".join(part.split()) in squeezed for part in parts)
