"""Reads streams from a timeline and a trace: when each request was on which instance, and what it had to prefill.

A stream is one stay: from the moment an instance was asked for a request's tokens to its last token there. An output
is one stream, or several if the request moved in the middle of it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

GENERATE = "generate"
"""Name of the spans that are streams."""


class Span(Protocol):
    """A timed span; `telemetry.timeline.Span` is one."""

    @property
    def track(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...

    @property
    def arguments(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Stream:
    """A request's stay on an instance; times are seconds, the rest tokens.

    Attributes:
      instance: name of the instance.
      start: time at which the instance was asked.
      end: time of the last token.
      tokens: tokens generated in between.
      new: tokens of the context at the start that are new to the instance; 0 if not known.
      cached: tokens of the context at the start that the instance saw in this request's stream before; 0 if not known.
      known: the trace gives `new` and `cached`.
    """

    instance: str
    start: float
    end: float
    tokens: int
    new: int = 0
    cached: int = 0
    known: bool = False

    @property
    def mean_context(self) -> float:
        """Tokens of context half-way through."""
        return self.new + self.cached + self.tokens / 2


def read(spans: Iterable[Span], records: Iterable[Mapping[str, Any]]) -> list[Stream]:
    """Returns the streams of a timeline, in order of their starts.

    Args:
      spans: spans of the timeline. Streams of requests without a record (evaluation, aborted rollouts) still load their
        instance, and get `known` False. So do streams that do not add up to their record.
      records: records of the trace (`telemetry/trace.py`).
    """
    by_request: dict[str, list[Span]] = collections.defaultdict(list)
    for span in spans:
        if span.name == GENERATE and {"request", "tokens"} <= span.arguments.keys():
            by_request[span.arguments["request"]].append(span)
    found: list[Stream] = []
    for record in records:
        mine = sorted(by_request.pop(record["trajectory_id"], ()), key=lambda span: span.start)
        found += _of_record(mine, record["prompt_tokens"], record["turns"])
    for others in by_request.values():
        found += [_unknown(span) for span in others]
    return sorted(found, key=lambda stream: (stream.start, stream.end))


def _unknown(span: Span) -> Stream:
    return Stream(span.track, span.start, span.end, span.arguments["tokens"])


def _of_record(spans: Sequence[Span], prompt: int, turns: Sequence[Mapping[str, Any]]) -> list[Stream]:
    """Returns a trajectory's streams, matched with its turns."""
    # Without a match, the context at each stream's start is not known.
    if sum(span.arguments["tokens"] for span in spans) != sum(turn["generated_tokens"] for turn in turns):
        return [_unknown(span) for span in spans]
    left = collections.deque((turn["generated_tokens"], turn["payload_tokens"]) for turn in turns)
    output, payload = left.popleft() if left else (0, 0)
    context, seen, instance = prompt, 0, ""
    found = []
    for span in spans:
        # An output may take several spans, if its request moved.
        while output <= 0 and left:
            context += payload
            output, payload = left.popleft()
        tokens = span.arguments["tokens"]
        # After a move, the new instance counts as having seen nothing.
        cached = seen if span.track == instance else 0
        found.append(Stream(span.track, span.start, span.end, tokens, context - cached, cached, True))
        context += tokens
        seen, instance = context, span.track
        output -= tokens
    return found
