"""The demand of a training step on rollout: its requests, longest first, with prefix sums over them.

Lengths are generated tokens. The demand also counts the other cost factors: context that decoding reads, prefilled
tokens, and tool time. The sums give the total of any run of requests.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from libra_jax import protocols

Values: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Places: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

FIELDS = ("tokens", "context", "new", "cached", "pairs", "prefills", "tool_seconds", "peak")


@dataclass(frozen=True)
class Demand:
    """Requests in order of `tokens`, the longest first; each field has one entry a request.

    Attributes:
      tokens: generated tokens.
      context: tokens of context that its decoding reads: the length of the context summed over generated tokens.
      new: prefilled tokens that are new to its instance: the prompt and the tool returns.
      cached: tokens that its instance has when the request is prefilled, over all turns.
      pairs: pairs of tokens that attention multiplies while prefilling, over all turns: new (cached + new / 2).
      prefills: number of its prefills, one a turn.
      tool_seconds: seconds of its tools, over all turns.
      peak: tokens of its longest context.
    """

    tokens: Values
    context: Values
    new: Values
    cached: Values
    pairs: Values
    prefills: Values
    tool_seconds: Values
    peak: Values

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def sums(self) -> dict[str, Values]:
        """By field, its sum over the first i requests, for i from 0 to the number of requests."""
        return {name: np.concatenate(([0.0], np.cumsum(getattr(self, name)))) for name in FIELDS}

    def edges(self, most: int) -> Places:
        """Returns places to cut at, from 0 to the number of requests: at most `most` parts, similar in requests and
        tokens.

        Short requests are many and alike, so their parts are larger than those of long requests.
        """
        if len(self) <= most:
            return np.arange(len(self) + 1)
        counts, tokens = np.arange(len(self) + 1), self.sums["tokens"]
        # Half by requests and half by tokens.
        along = (counts / counts[-1] + tokens / tokens[-1]) / 2
        return np.unique(np.searchsorted(along, np.linspace(0.0, 1.0, most + 1), side="left").clip(0, len(self)))


def of_trajectories(
    prompts: Sequence[int], turns: Sequence[Sequence[protocols.Turn]], *, requests: int | None = None
) -> Demand:
    """Returns the demand of a training step of trajectories like these.

    Args:
      prompts: tokens of each trajectory's prompt.
      turns: turns of each trajectory, as recorded or scripted.
      requests: requests of a training step; None takes the given number. If more trajectories are given, neighbours in
        length are averaged: the longest is then a step's expected longest, not the longest ever seen. If fewer are
        given, some are repeated.

    Raises:
      DataError: there are none, or none generates a token.
    """
    table = np.array([_row(prompt, one) for prompt, one in zip(prompts, turns, strict=True)], np.float64)
    if not len(table) or not table[:, 0].any():
        raise protocols.DataError("a plan needs the lengths of requests, and there is none that generates a token")
    table = table[np.argsort(-table[:, 0], kind="stable")]
    if requests is not None:
        table = _resized(table, requests)
    return Demand(**{name: np.ascontiguousarray(column) for name, column in zip(FIELDS, table.T, strict=True)})


def contexts(prompts: Sequence[int], turns: Sequence[Sequence[protocols.Turn]]) -> list[int]:
    """Returns the tokens of each trajectory's whole context at its end, without its last tool return, which is never
    shown."""
    return [
        prompt + sum(max(1, turn.generated_tokens) + turn.payload_tokens for turn in one) - one[-1].payload_tokens
        for prompt, one in zip(prompts, turns, strict=True)
        if one
    ]


def _row(prompt: int, turns: Sequence[protocols.Turn]) -> tuple[float, ...]:
    tokens = context = new = cached = pairs = tools = 0.0
    held, fresh = 0, prompt
    for turn in turns:
        new += fresh
        cached += held
        pairs += fresh * (held + fresh / 2)
        start = held + fresh
        generated = max(1, turn.generated_tokens)
        context += generated * (start + generated / 2)
        tokens += generated
        held, fresh = start + generated, turn.payload_tokens
        tools += turn.tool_seconds
    return tokens, context, new, cached, pairs, float(len(turns)), tools, float(held)


def _resized(table: Values, count: int) -> Values:
    """Returns `count` rows in the same order: averages of neighbours, or repeated rows."""
    if count >= len(table):
        return table[(np.arange(count) * len(table)) // count]
    starts = (np.arange(count) * len(table)) // count
    sizes = np.diff(np.append(starts, len(table)))
    resized = np.add.reduceat(table, starts, axis=0) / sizes[:, None]
    resized[:, -1] = np.maximum.reduceat(table[:, -1], starts)  # the longest one has to fit
    return np.asarray(resized, np.float64)
