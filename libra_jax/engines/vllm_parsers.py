"""Reads model outputs with vLLM's own tool parsers and reasoning parsers, as vLLM's chat endpoint does."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import Parser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from libra_jax import protocols
from libra_jax.chat import hugging_face, messages, output_parsers, thoughts

# A call that does not parse is everyday here, and stays in the content. vLLM writes a stack trace for each.
for _name in ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)

_OWN_ID = "functions."
"""Beginning of call ids that a model writes itself (Kimi K2). All others are drawn at random by vLLM."""

_LIVE_TOOLS = ("hermes", "qwen3_json", "qwen3_xml", "qwen3_coder", "glm45", "kimi_k2", "minimax_m2")
"""Parsers that take text before the first mark for content, white space at its ends aside: a test compares them on
random outputs. With `llama3_json`, for example, text before a call is no part of the message."""

_OWN_FORMAT = ("openai", "openai_gptoss")


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raises ConfigError if vLLM has no such tool parser or reasoning parser; an empty name stands for none."""
    for field, name, known in (
        ("tool_parser", tool_parser, ToolParserManager.list_registered()),
        ("reasoning_parser", reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"vLLM has {', '.join(known)}"
            raise protocols.ConfigError(f"config.gateway.{field}: vLLM has no such parser as {name!r}; {hint}")
        if name in _OWN_FORMAT:
            raise protocols.ConfigError(
                f"config.gateway.{field}: {name!r} reads a format that no chat template writes (OpenAI's Harmony), and "
                "the gateway does not support it"
            )


def parsing(tokenizer: protocols.Tokenizer, tool_parser: str, reasoning_parser: str) -> output_parsers.Parsing:
    """Returns a maker of parsers that read calls and reasoning of whole outputs as vLLM does.

    vLLM's streaming functions are not used: some read an output otherwise than its functions for whole outputs do.

    Args:
      tokenizer: The model's tokenizer.
      tool_parser: Name of vLLM's tool parser; empty: calls stay in the content.
      reasoning_parser: Name of vLLM's reasoning parser, `output_parsers.BY_MARKS`, or empty: reasoning stays in the
        content. Calls in a thought are none, unless vLLM's parser has found its end.

    Raises:
      ConfigError: vLLM has no parser of a name, or the parser cannot read this tokenizer's tokens.
    """
    thinks = reasoning_parser == output_parsers.BY_MARKS
    reasoning_parser = "" if thinks else reasoning_parser
    check_names(tool_parser, reasoning_parser)
    if isinstance(tokenizer, hugging_face.HuggingFaceTokenizer):
        vocabulary: Any = tokenizer.hugging_face
    else:
        vocabulary = _Vocabulary(tokenizer)
    try:
        made, tools_only = (
            ParserManager.get_parser(
                tool_parser_name=tool_parser or None,
                reasoning_parser_name=reasoning or None,
                enable_auto_tools=True,
                tokenizer=vocabulary,
            )
            for reasoning in (reasoning_parser, "")
        )
    except Exception as error:  # parsers raise errors of many types if they miss a token
        raise protocols.ConfigError(
            f"config.gateway.tool_parser = {tool_parser!r} and reasoning_parser = {reasoning_parser!r} cannot read the "
            f"tokens of this tokenizer ({error})"
        ) from error

    def parser(tools: Sequence[protocols.ToolSpec], context: Sequence[int]) -> protocols.OutputParser:
        # A template without thinking closes the thought itself. vLLM's parsers would take the whole answer for one.
        closed = tokenizer.decode(context[-thoughts.TOKENS :]).rstrip().endswith(tuple(thoughts.MARKS.values()))
        reasons = bool(reasoning_parser) and not closed
        make = made if reasons else tools_only
        read = functools.partial(_read, make, vocabulary, _request(tools), reasons) if make is not None else None
        marks = None if reasons else thinks or bool(reasoning_parser)
        streams = tool_parser in _LIVE_TOOLS and not reasons
        return output_parsers.MessageParser(tokenizer, context, thinks=marks, read=read, streams=streams)

    return parser


def _read(
    make: type[Parser], vocabulary: Any, request: ChatCompletionRequest, reasons: bool, text: str, tokens: Sequence[int]
) -> tuple[str, str, Sequence[protocols.ToolCall]]:
    """Reads a whole output, or without `reasons` the text after its thought (`output_parsers.ReadWhole`)."""
    seen = text if reasons else thoughts.outside(text)
    try:
        reasoning, content, calls = make(vocabulary, request.tools).parse(
            seen, request, enable_auto_tools=True, model_output_token_ids=tokens if reasons else ()
        )
    except Exception:  # what a parser cannot read stays content
        return "", text, ()
    # Without calls, all that was written is the message.
    content = content if calls or seen == text else text
    return reasoning or "", content or "", [_call(call) for call in calls or ()]


def _call(call: FunctionCall) -> protocols.ToolCall:
    own = call.id if call.id and call.id.startswith(_OWN_ID) else ""
    return protocols.ToolCall(own, call.name, call.arguments)


def _request(tools: Sequence[protocols.ToolSpec]) -> ChatCompletionRequest:
    offered = list(map(messages.tool_for_template, tools)) or None
    return ChatCompletionRequest(messages=[], model="", tools=offered, tool_choice="auto" if offered else "none")


class _Vocabulary:
    """A tokenizer that is none of Hugging Face's, for vLLM's parsers."""

    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def __init__(self, tokenizer: protocols.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def get_vocab(self) -> dict[str, int]:
        return {self._tokenizer.decode([token]): token for token in range(self._tokenizer.vocab_size)}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        del add_special_tokens
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int] | int, **_: object) -> str:
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.get_vocab().get(token)
