"""Reads model outputs with vLLM's own tool parsers and reasoning parsers, as vLLM's chat endpoint does."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from libra_jax import protocols
from libra_jax.agents import chat_format, hugging_face

# A call that does not parse is everyday here, and stays in the content. vLLM writes a stack trace for each.
for _name in ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)

_OWN_ID = "functions."
"""Beginning of call ids that a model writes itself (Kimi K2). All others are drawn at random by vLLM."""

_LIVE_TOOLS = ("", "hermes", "qwen3_json", "qwen3_xml", "qwen3_coder", "glm45", "kimi_k2", "minimax_m2")
_LIVE_REASONING = ("", "qwen3", "glm45", "kimi_k2", "minimax_m2")
"""Parsers whose streaming functions read plain text as their functions for whole outputs do: a test compares them on
random outputs. With `llama3_json`, for example, text before a call streams, and is no part of the whole message."""

_OWN_FORMAT = ("openai", "openai_gptoss")

_MARK = re.compile(r"<[^\s\d=]")
"""A mark of a call or the like. vLLM's streaming functions may read what follows one in another way than its functions
for whole outputs."""

_TOGETHER = 8
"""Tokens that vLLM's streaming functions get at once."""

_BEGINS_MARK = re.compile(r"</?t?h?i?n?k?$")


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Checks the names of a tool parser and a reasoning parser; empty for none.

    Raises:
      ConfigError: vLLM has no parser of the name; the message suggests the nearest.
    """
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


def parsing(
    tokenizer: protocols.Tokenizer, tool_parser: str, reasoning_parser: str, header: Sequence[int]
) -> chat_format.Parsing:
    """Returns a maker of parsers that read outputs as vLLM does.

    Args:
      tokenizer: The model's tokenizer.
      tool_parser: Name of vLLM's tool parser; empty: calls stay in the content.
      reasoning_parser: Name of vLLM's reasoning parser; empty: reasoning stays in the content.
      header: Tokens with which the template begins an output. A parser has to know whether they open the reasoning.

    Raises:
      ConfigError: vLLM has no parser of a name, or the parser cannot read this tokenizer's tokens.
    """
    check_names(tool_parser, reasoning_parser)
    if isinstance(tokenizer, hugging_face.HuggingFaceTokenizer):
        vocabulary: Any = tokenizer.hugging_face
    else:
        vocabulary = _Vocabulary(tokenizer)
    try:
        made = ParserManager.get_parser(
            tool_parser_name=tool_parser or None,
            reasoning_parser_name=reasoning_parser or None,
            enable_auto_tools=True,
            tokenizer=vocabulary,
        )
    except Exception as error:  # parsers raise errors of many types if they miss a token
        raise protocols.ConfigError(
            f"config.gateway.tool_parser = {tool_parser!r} and reasoning_parser = {reasoning_parser!r} cannot read the "
            f"tokens of this tokenizer ({error})"
        ) from error

    live = tool_parser in _LIVE_TOOLS and reasoning_parser in _LIVE_REASONING

    def parser(tools: Sequence[protocols.ToolSpec], context: Sequence[int]) -> protocols.OutputParser:
        if made is None:
            return chat_format.TextParser(tokenizer)
        return _VllmParser(made, vocabulary, tokenizer, tools, context, list(header), live=live)

    return parser


class _VllmParser:
    """Reads one output with a parser of vLLM.

    The message is what vLLM's function for whole outputs reads. Before the end, plain text streams, as vLLM's streaming
    functions read it. Calls come at the end: a call is of no use before, and the text of a call that does not parse is
    content after all, which streamed parts of a call would contradict.
    """

    def __init__(
        self,
        made: Any,
        vocabulary: Any,
        tokenizer: protocols.Tokenizer,
        tools: Sequence[protocols.ToolSpec],
        context: Sequence[int],
        header: list[int],
        *,
        live: bool,
    ) -> None:
        self._request = _request(tools)
        self._make = lambda: made(vocabulary, self._request.tools)
        self._parser = self._make()
        self._stream = chat_format.TextStream(tokenizer)
        self._context, self._header = tuple(context), header
        self._tokens: list[int] = []
        self._text = ""
        self._ahead: list[int] = []
        self._ahead_text = ""
        self._said = {"reasoning": "", "content": ""}
        self._held = dict(self._said)
        self._quiet, self._plain = not live, 0

    def feed(self, token_ids: Sequence[int]) -> Sequence[protocols.MessageDelta]:
        """Returns the parts of reasoning and content that further tokens complete."""
        deltas: list[protocols.MessageDelta] = []
        for token in token_ids:
            text = self._stream.feed([token])
            self._tokens.append(token)
            self._text += text
            if not self._quiet:
                deltas += self._next(token, text)
        return deltas

    def finish(self) -> tuple[Sequence[protocols.MessageDelta], protocols.Message]:
        """Returns the rest of reasoning and content, and the calls; and the whole message."""
        text = self._stream.finish()
        self._text += text
        reasoning, content, calls = self._whole()
        deltas = [*self._rest("reasoning", reasoning), *self._rest("content", content)]
        read: list[protocols.ToolCall] = []
        for index, call in enumerate(calls):
            own = call.id if call.id and call.id.startswith(_OWN_ID) else ""
            name = own or chat_format.call_id(self._context, self._tokens, index)
            read.append(protocols.ToolCall(name, call.name, call.arguments))
            deltas.append(protocols.ToolCallDelta(index, name, call.name, call.arguments))
        said = self._said
        return deltas, protocols.Message("assistant", said["content"], tuple(read), reasoning=said["reasoning"])

    def _next(self, token: int, text: str) -> list[protocols.MessageDelta]:
        """Returns what one more token lets stream.

        Tokens go to vLLM by eight, which costs a tenth, but a mark alone. They never go as they came: what some of
        vLLM's streaming functions read depends on how an output is cut.
        """
        deltas = self._streamed() if "<" in text else []
        self._ahead.append(token)
        self._ahead_text += text
        if "<" in text or len(self._ahead) == _TOGETHER:
            deltas += self._streamed()
        return deltas

    def _streamed(self) -> list[protocols.MessageDelta]:
        """Returns what vLLM's streaming functions read in the tokens that wait for them."""
        tokens, text = self._ahead, self._ahead_text
        if not tokens:
            return []
        self._ahead, self._ahead_text = [], ""
        try:
            delta = self._parser.parse_delta(text, tokens, self._request, self._header, finished=False)
        except Exception:  # the whole output is read again at its end
            self._quiet = True
            return []
        waits = self._waits()
        deltas: list[protocols.MessageDelta] = []
        for part in self._held:
            self._held[part] += (getattr(delta, part) or "") if delta is not None else ""
            # vLLM drops some white space at the end of a whole output.
            told = "" if waits else self._held[part].rstrip()
            self._held[part] = self._held[part][len(told) :]
            deltas += self._say(part, told)
        return deltas

    def _waits(self) -> bool:
        """Returns whether nothing may stream now: there is a mark in the output, or the beginning of one at its end."""
        # Some parsers drop white space at the beginning if a call follows.
        self._quiet = self._text[:1].isspace()
        if "<" not in self._text[self._plain :]:
            return self._quiet
        # The marks around the reasoning are the expected ones.
        rest = self._text.removeprefix("<think>").replace("</think>", "", 1)
        self._quiet |= _MARK.search(rest) is not None
        waits = self._quiet or _BEGINS_MARK.search(rest) is not None
        if not waits:
            self._plain = len(self._text)
        return waits

    def _say(self, part: str, text: str) -> list[protocols.MessageDelta]:
        self._said[part] += text
        if not text:
            return []
        return [protocols.ReasoningDelta(text) if part == "reasoning" else protocols.ContentDelta(text)]

    def _whole(self) -> tuple[str, str, Sequence[Any]]:
        """Returns the reasoning, the content and the calls that vLLM reads in the whole output."""
        try:
            reasoning, content, calls = self._make().parse(
                self._text, self._request, enable_auto_tools=True, model_output_token_ids=self._tokens
            )
        except Exception:  # what a parser cannot read stays content
            return "", self._text, ()
        return reasoning or "", content or "", calls or ()

    def _rest(self, part: str, whole: str) -> list[protocols.MessageDelta]:
        """Returns the text that was not streamed yet. What has been streamed stays, even if vLLM reads it otherwise."""
        said = self._said[part]
        return self._say(part, whole[len(said) :]) if whole.startswith(said) else []


def _request(tools: Sequence[protocols.ToolSpec]) -> ChatCompletionRequest:
    offered = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ]
    return ChatCompletionRequest(
        messages=[], model="", tools=offered or None, tool_choice="auto" if offered else "none"
    )


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
