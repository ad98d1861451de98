"""Thoughts in a model's output: which text is thought, and which is the answer.

Graders, formats of tool calls and chat formats all read thoughts here. A thought lies between an opening and a closing
mark. Some templates write the opening mark themselves, at the end of the context (`opening`). The loop puts that text
in front of the output, so an output's text alone says what is thought.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MARKS = {
    "<think>": "</think>",  # Qwen3, DeepSeek-R1, GLM, Kimi K2, MiniMax M2, Nemotron and most others
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",  # MiniMax M3
    "<ifm|think>": "</ifm|think>",  # K2 Horizon
    "[THINK]": "[/THINK]",  # Mistral
    "<|START_THINKING|>": "<|END_THINKING|>",  # Cohere
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",  # Kimi K3
    "<|plamo:begin_think:plamo|>": "<|plamo:end_think:plamo|>",
}
"""Closing marks of thoughts by their opening marks, as the models' templates and vLLM's reasoning parsers have them."""

_MARK = re.compile("|".join(map(re.escape, (*MARKS, *MARKS.values()))))


TOKENS = 64
"""Tokens at the end of a context that hold an opening mark and white space after it."""


class OutputParts(NamedTuple):
    """The two parts of an output, without marks.

    Attributes:
      thought: Text of all thoughts.
      answer: Text outside of thoughts. White space at its ends is kept.
    """

    thought: str
    answer: str


def split(output: str) -> OutputParts:
    """Splits an output into thought and answer.

    A thought goes up to its first closing mark, and to the end of the output without one. An opening mark inside a
    thought is part of it. If a mark closes no thought, all text before that mark is thought: a template or a model left
    out the opening mark.
    """
    pieces = list(_pieces(output))
    answers = max((number for number, piece in enumerate(pieces, 1) if piece.stray), default=0)
    thought = "".join(piece.text for number, piece in enumerate(pieces) if piece.thought or number < answers)
    return OutputParts(thought, "".join(piece.text for piece in pieces[answers:] if not piece.thought))


def outside(text: str) -> str:
    """Returns the text outside of thoughts. Unlike an answer, it keeps text before a mark that closes no thought."""
    return "".join(piece.text + piece.stray for piece in _pieces(text) if not piece.thought)


class _Piece(NamedTuple):
    """Text up to a mark. `stray` is that mark if it closes no thought."""

    text: str
    thought: bool
    stray: str = ""


def _pieces(output: str) -> Iterator[_Piece]:
    close, place = "", 0
    for mark in _MARK.finditer(output):
        text = mark.group()
        if close and text != close:
            continue
        stray = "" if close or text in MARKS else text
        yield _Piece(output[place : mark.start()], bool(close), stray)
        close, place = "" if close else MARKS.get(text, ""), mark.end()
    yield _Piece(output[place:], bool(close))


def opening(context: str) -> str:
    """Returns the end of a context from an opening mark on, if the next output begins inside a thought. Else empty.

    Args:
      context: Text before the output. Its end will do.
    """
    text = context.rstrip()
    mark = next((mark for mark in MARKS if text.endswith(mark)), None)
    return "" if mark is None else context[len(text) - len(mark) :]
