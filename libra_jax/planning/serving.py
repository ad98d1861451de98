"""Predicts how long an instance takes to serve a run of requests: the rollout half of the cost evaluator.

`Demand` has a training step's requests, the longest first. Lengths are generated tokens. The demand also counts the
other cost factors: context that decoding reads, prefilled tokens, and tool time. Its prefix sums give the total of any
run of requests.

`Serving` estimates the number of engine steps from a run's totals. It is the largest of three: the longest request's
tokens, all tokens over the slots, and all context over the tokens that the cache holds. With max staleness eta above 0,
the requests of eta + 1 training steps overlap, so each step counts only 1 / (eta + 1) of the longest request's tokens.
All tokens over the steps give the mean number of decoding requests, which gives the time of a step. Prefill comes on
top, and so does prefilling live contexts again at each weight update. The result is at least the longest path. One
candidate is the longest request at the pace of this mean batch, with its prefill and its tools. The other candidate is
any request with slower tools, alone on the instance. The path is divided by eta + 1.

The time grows with every added request if longer requests have no shorter contexts and tools; the search relies on
this. Otherwise the growth may not hold exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from libra_jax import protocols
from libra_jax.planning import costs

Values: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Places: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

FIELDS = ("tokens", "context", "new", "cached", "pairs", "prefills", "tool_seconds", "peak")


@dataclass(frozen=True)
class Demand:
    """A training step's requests in order of `tokens`, the longest first; each field has one entry a request.

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

    @classmethod
    def of_trajectories(
        cls, prompts: Sequence[int], turns: Sequence[Sequence[protocols.Turn]], *, requests: int | None = None
    ) -> Demand:
        """Returns the demand of a training step of trajectories like these.

        Args:
          prompts: tokens of each trajectory's prompt.
          turns: turns of each trajectory, as recorded or scripted.
          requests: requests of a training step; None takes the given number. If more trajectories are given, neighbours
            in length are averaged: the longest is then a step's expected longest, not the longest ever seen. If fewer
            are given, some are repeated.

        Raises:
          DataError: there are none, or none generates a token.
        """
        rows = []
        for prompt, one in zip(prompts, turns, strict=True):
            tokens = context = new = cached = pairs = tools = 0.0
            held, fresh = 0, prompt
            for turn in one:
                new += fresh
                cached += held
                # Causal: a new token attends to half of the new tokens on average.
                pairs += fresh * (held + fresh / 2)
                start = held + fresh
                # An output has a stop token at least.
                generated = max(1, turn.generated_tokens)
                context += generated * (start + generated / 2)
                tokens += generated
                held, fresh = start + generated, turn.payload_tokens
                tools += turn.tool_seconds
            rows.append((tokens, context, new, cached, pairs, len(one), tools, held))  # as `FIELDS`
        table = np.array(rows, np.float64)
        if not len(table) or not table[:, 0].any():
            raise protocols.DataError("a plan needs the lengths of requests, and there is none that generates a token")
        table = table[np.argsort(-table[:, 0], kind="stable")]
        if requests is not None:
            starts = (np.arange(requests) * len(table)) // requests
            if requests >= len(table):
                table = table[starts]
            else:
                peaks = np.maximum.reduceat(table[:, -1], starts)
                table = np.add.reduceat(table, starts, axis=0) / np.diff(np.append(starts, len(table)))[:, None]
                # The largest peak, not the mean: the longest context has to fit.
                table[:, -1] = peaks
        return cls(**{name: np.ascontiguousarray(column) for name, column in zip(FIELDS, table.T, strict=True)})

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


class Serving:
    """Seconds of each run of the demand's requests on one instance of each degree.

    Args:
      model: costs of the engines.
      demand: the requests of a training step.
      degrees: degrees that instances may have.
      slots: slots of an instance of each degree.
      staleness: max staleness; a request's path may take that many steps more.
    """

    def __init__(
        self, model: costs.RolloutCosts, demand: Demand, degrees: Sequence[int], slots: Sequence[int], *, staleness: int
    ) -> None:
        self.demand = demand
        self.degrees = tuple(degrees)
        self._model = model
        self._slots = dict(zip(degrees, slots, strict=True))
        self._staleness = staleness
        self._peaks = Maxima(demand.peak)
        self._tables: dict[int, Values] = {}
        self._besides: dict[int, Values] = {}
        self._paths: dict[int, Maxima] = {}
        for degree in degrees:
            # Seconds of a step by its decoding requests, apart from contexts.
            self._tables[degree] = np.array([model.fixed_seconds(degree, n) for n in range(self._slots[degree] + 1)])
            # Seconds of each request besides decoding: its prefill and its tools.
            terms = model.prefill_terms(degree)
            prefill = terms.new * demand.new + terms.cached * demand.cached + terms.pair * demand.pairs
            self._besides[degree] = prefill + terms.prefill * demand.prefills + demand.tool_seconds
            # Seconds of each request on an instance of its own.
            decode = model.fixed_seconds(degree, 1) * demand.tokens + model.context_seconds(degree) * demand.context
            self._paths[degree] = Maxima(decode + self._besides[degree])

    def seconds(self, degree: int, first: Places, last: Places) -> Values:
        """Returns the seconds of requests first..last-1 for each pair; 0 for an empty run, infinite if a context does
        not fit.

        At max staleness 0 the seconds are the makespan. Above 0 they are the busy time of the instance for one
        training step, and at least the longest path divided by `staleness` + 1.
        """
        sums, terms = self.demand.sums, self._model.prefill_terms(degree)
        room, slots = max(1.0, float(self._model.kv_tokens(degree))), self._slots[degree]
        spans = {name: values[last] - values[first] for name, values in sums.items()}
        tokens, context = spans["tokens"], spans["context"]
        # The first request is the longest; an empty run may begin past the end.
        head = np.minimum(first, len(self.demand) - 1)
        longest, per_context = self.demand.tokens[head], self._model.context_seconds(degree)
        overlapping = self._staleness + 1
        steps = np.maximum(longest / overlapping, np.maximum(tokens / slots, context / room))
        decoding = tokens / steps
        # The mean number of decoding requests need not be whole.
        table = self._tables[degree]
        fixed = np.interp(decoding, np.arange(len(table)), table)
        decode = steps * fixed + per_context * context
        prefill = (
            terms.new * spans["new"]
            + terms.cached * spans["cached"]
            + terms.pair * spans["pairs"]
            + terms.prefill * spans["prefills"]
        )
        again = terms.new * context / steps if self._staleness else 0.0  # contexts that are live at a weight update
        path = longest * fixed + per_context * decoding * self.demand.context[head] + self._besides[degree][head]
        path = np.maximum(path, self._paths[degree].over(first, last))
        seconds = np.maximum(decode + prefill + again, path / overlapping)
        seconds = np.where(self._peaks.over(first, last) > room, np.inf, seconds)
        return np.where(last > first, seconds, 0.0)


class Maxima:
    """Maxima over many ranges of an array at a time.

    A sparse table (Bender and Farach-Colton, 2000): log2(n) rows, each range answered by two of its entries.

    Args:
      values: the array.
    """

    def __init__(self, values: Values) -> None:
        rows = [np.asarray(values, np.float64)]
        while 2 * (width := 1 << (len(rows) - 1)) <= len(values):
            last = rows[-1]
            joined = np.full(len(values), -np.inf)
            joined[: len(values) - 2 * width + 1] = np.maximum(
                last[: len(values) - 2 * width + 1], last[width : len(values) - width + 1]
            )
            rows.append(joined)
        self._rows = np.stack(rows)
        self._levels = np.frexp(np.arange(len(values) + 1))[1] - 1  # log2 of each width, rounded down

    def over(self, first: Places, last: Places) -> Values:
        """Returns the largest of values[first:last] for each pair; minus infinity if the range is empty."""
        width = last - first
        some = width > 0
        level = np.where(some, self._levels[width], 0)
        # Two overlapping windows of 2^level cover the range; the overlap does not change a maximum.
        left = self._rows[level, np.where(some, first, 0)]
        right = self._rows[level, np.where(some, last - (1 << level), 0)]
        return np.where(some, np.maximum(left, right), -np.inf)
