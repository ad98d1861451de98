"""Thoughts in a model's output: which text is thought, and which is the answer.

Graders, formats of tool calls and chat formats all read thoughts here. A thought lies between an opening and a closing
mark. Some templates write the opening mark themselves, at the end of the context (`opening`). The loop puts that text
in front of the output, so an output's text alone says what is thought.
"""

from __future__ import annotations

import re
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


class Parts(NamedTuple):
    """The two parts of an output, without marks.

    Attributes:
      thought: Text of all thoughts.
      answer: Text outside of thoughts. White space at its ends is kept.
    """

    thought: str
    answer: str


def split(output: str) -> Parts:
    """Splits an output into thought and answer.

    A thought goes up to its first closing mark, and to the end of the output without one. An opening mark inside a
    thought is part of it. If a mark closes no thought, all text before that mark is thought: a template or a model left
    out the opening mark.
    """
    pieces: list[tuple[bool, str]] = []
    close, place, answers = "", 0, 0
    for mark in _MARK.finditer(output):
        text = mark.group()
        if close and text != close:
            continue
        pieces.append((bool(close), output[place : mark.start()]))
        if not close and text not in MARKS:
            answers = len(pieces)
        close, place = "" if close else MARKS.get(text, ""), mark.end()
    pieces.append((bool(close), output[place:]))
    thought = "".join(text for number, (inside, text) in enumerate(pieces) if inside or number < answers)
    return Parts(thought, "".join(text for inside, text in pieces[answers:] if not inside))


def opening(context: str) -> str:
    """Returns the end of a context from an opening mark on, if the next output begins inside a thought. Else empty.

    Args:
      context: Text before the output. Its end will do.
    """
    text = context.rstrip()
    mark = next((mark for mark in MARKS if text.endswith(mark)), None)
    return "" if mark is None else context[len(text) - len(mark) :]
