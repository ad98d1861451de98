"""What a training step asks of rollout: its requests, longest first, summed so that any run of them is read off.

Lengths are generated tokens; what costs depend on besides is counted along: context that decoding reads, what is
prefilled, how long tools take.
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
    """Requests in order of `tokens`, the longest first; one entry each.

    Attributes:
      tokens: generated.
      context: tokens of context that its decoding reads: the length of the context summed over generated tokens.
      new: tokens prefilled that its instance has not seen: the prompt, and what tools return.
      cached: tokens that its instance has when it is prefilled, over all turns.
      pairs: pairs of tokens that attention multiplies while prefilling, over all turns: new (cached + new / 2).
      prefills: how many times it is prefilled, once a turn.
      tool_seconds: over all turns.
      peak: its longest context.
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
        """By field, its sum over the first i requests, at i from 0 to their number."""
        return {name: np.concatenate(([0.0], np.cumsum(getattr(self, name)))) for name in FIELDS}

    def edges(self, most: int) -> Places:
        """Places to cut at, from 0 to the number of requests: at most `most` parts, alike in requests and tokens.

        Short requests are many and alike, so they are cut in larger parts than long ones.
        """
        if len(self) <= most:
            return np.arange(len(self) + 1)
        counts, tokens = np.arange(len(self) + 1), self.sums["tokens"]
        along = (counts / counts[-1] + tokens / tokens[-1]) / 2
        return np.unique(np.searchsorted(along, np.linspace(0.0, 1.0, most + 1), side="left").clip(0, len(self)))


def of_trajectories(
    prompts: Sequence[int], turns: Sequence[Sequence[protocols.Turn]], *, requests: int | None = None
) -> Demand:
    """What a training step of trajectories like these asks for.

    Args:
      prompts: tokens of each one's prompt.
      turns: of each, as recorded or scripted.
      requests: of a training step, if not as many as there are here. Of more, neighbours in length are averaged, so
        that the longest is what a step's longest is expected to be and not the longest ever seen; of fewer, some come
        several times.

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
    """Tokens of each trajectory's whole context at its end: what its last tool returns is never shown."""
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
    """So many rows in the same order: averages of neighbours, or each several times."""
    if count >= len(table):
        return table[(np.arange(count) * len(table)) // count]
    starts = (np.arange(count) * len(table)) // count
    sizes = np.diff(np.append(starts, len(table)))
    resized = np.add.reduceat(table, starts, axis=0) / sizes[:, None]
    resized[:, -1] = np.maximum.reduceat(table[:, -1], starts)  # what has to fit is the longest
    return np.asarray(resized, np.float64)
