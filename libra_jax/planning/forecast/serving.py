"""Predicts how long an instance takes to serve a run of requests: the rollout half of the cost evaluator.

`Demand` has requests. Lengths are generated tokens. The demand also counts the other cost factors: context that
decoding reads, prefilled tokens, and tool time. Its prefix sums give the total of any run of requests.

`Serving` estimates the number of engine steps from a run's totals. It is the largest of three: the longest request's
tokens, all tokens over the slots, and all context over the tokens that the cache holds. With max staleness eta above 0,
the requests of eta + 1 training steps overlap, so each step counts only 1 / (eta + 1) of the longest request's tokens.
All tokens over the steps give the mean number of decoding requests, which gives the time of a step. Prefill comes on
top, and so does prefilling live contexts again at each weight update. The result is at least the longest path. One
candidate is the longest request at the pace of this mean batch, with its prefill and its tools. The other candidate is
any request with slower tools, alone on the instance. A group that is dispatched at one version is trained eta steps
later at the earliest: so the path, with the training step and the weight sync after it, is divided by eta + 1.

These are bounds by which the search finds layouts. What a layout takes, waiting and unlike steps included, is predicted
by `pipeline`, whose pools `Pools` makes of the same costs.

The time grows with every added request if longer requests have no shorter contexts and tools; the search relies on
this. Otherwise the growth may not hold exactly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from libra_jax import protocols
from libra_jax.planning.costs import costs
from libra_jax.planning.forecast import degree_queues

SETTLED = 3
"""Rounds in which the pace of full slots is found."""

COUNTED_GROWTH = 0.2
"""Share of the way from a context's mean to its peak at which a policy counts it. C-MLFQ counts half of what a context
has yet to grow, as it predicts it, and the longest ones grow more than predicted. Of 0, 0.2, 0.35 and 0.5 this is the
best on simulated software engineering with 32 and 40 accelerators that train (seed 0 of docs/results/planning.md)."""

Values: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Places: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

GROWING = 2 / 3
"""Pairs of tokens in a live context, over its square's mean: contexts of mean m that grow evenly from 0 have
E[c^2] / 2 = 2/3 m^2."""

FIELDS = ("tokens", "context", "new", "cached", "pairs", "prefills", "tool_seconds", "peak")


@dataclass(frozen=True)
class Demand:
    """Requests, of a training step in order of `tokens`, the longest first; each field has one entry a request.

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
    def in_order(cls, prompts: Sequence[int], turns: Sequence[Sequence[protocols.Turn]]) -> Demand:
        """Returns the demand of these trajectories, in their order.

        Args:
          prompts: tokens of each trajectory's prompt.
          turns: turns of each trajectory, as recorded or scripted.

        Raises:
          DataError: there are none, or none generates a token.
        """
        rows = []
        for prompt, one in zip(prompts, turns, strict=True):
            tokens = context = new = cached = pairs = tools = 0.0
            context_length, new_tokens = 0, prompt
            for turn in one:
                new += new_tokens
                cached += context_length
                # Causal: a new token attends to half of the new tokens on average.
                pairs += new_tokens * (context_length + new_tokens / 2)
                start = context_length + new_tokens
                # An output has a stop token at least.
                generated = max(1, turn.generated_tokens)
                context += generated * (start + generated / 2)
                tokens += generated
                context_length, new_tokens = start + generated, turn.payload_tokens
                tools += turn.tool_seconds
            rows.append((tokens, context, new, cached, pairs, len(one), tools, context_length))  # as `FIELDS`
        table = np.array(rows, np.float64)
        if not len(table) or not table[:, 0].any():
            raise protocols.DataError("a plan needs the lengths of requests, and there is none that generates a token")
        return cls._of_table(table)

    @classmethod
    def of_trajectories(
        cls, prompts: Sequence[int], turns: Sequence[Sequence[protocols.Turn]], *, requests: int | None = None
    ) -> Demand:
        """Returns the demand of a training step of trajectories like these; see `in_order` and `of_step`."""
        return cls.in_order(prompts, turns).of_step(requests)

    def of_step(self, requests: int | None = None) -> Demand:
        """Returns a training step of requests like these, the longest first.

        Args:
          requests: requests of a training step; None takes the given number. If more are given, neighbours in length
            are averaged: the longest is then a step's expected longest, not the longest ever seen. If fewer are given,
            some are repeated.
        """
        table = np.stack([getattr(self, name) for name in FIELDS], axis=1)
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
        return self._of_table(table)

    @classmethod
    def _of_table(cls, table: Values) -> Demand:
        return cls(**{name: np.ascontiguousarray(column) for name, column in zip(FIELDS, table.T, strict=True)})

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def sums(self) -> dict[str, Values]:
        """By field, its sum over the first i requests, for i from 0 to the number of requests."""
        return {name: np.concatenate(([0.0], np.cumsum(getattr(self, name)))) for name in FIELDS}

    def edges(self, max_parts: int) -> Places:
        """Returns places to cut at, from 0 to the number of requests: at most `max_parts` parts, similar in requests
        and tokens.

        Short requests are many and alike, so their parts are larger than those of long requests.
        """
        if len(self) <= max_parts:
            return np.arange(len(self) + 1)
        counts, tokens = np.arange(len(self) + 1), self.sums["tokens"]
        # Half by requests and half by tokens.
        along = (counts / counts[-1] + tokens / tokens[-1]) / 2
        return np.unique(np.searchsorted(along, np.linspace(0.0, 1.0, max_parts + 1), side="left").clip(0, len(self)))


class Serving:
    """Seconds of each run of the demand's requests on one instance of each degree.

    Args:
      model: costs of the engines.
      demand: the requests of a training step.
      degrees: degrees that instances may have.
      slots: slots of an instance of each degree.
      staleness: max staleness; a request's path may take that many steps more.
      after: seconds of training and weight sync that follow a request's path, at least, without what a streamed step
        may begin before. At max staleness 0 they are no part of the time.
    """

    def __init__(
        self,
        model: costs.RolloutCosts,
        demand: Demand,
        degrees: Sequence[int],
        slots: Sequence[int],
        *,
        staleness: int,
        after: float = 0.0,
    ) -> None:
        self.demand = demand
        self.degrees = tuple(degrees)
        self._model = model
        self._slots = dict(zip(degrees, slots, strict=True))
        self._staleness = staleness
        self._after = after if staleness else 0.0
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

    def seconds(self, degree: int, first: Places, last: Places, instances: int | None = None) -> Values:
        """Returns the seconds of requests first..last-1 for each pair; 0 for an empty run, infinite if a context does
        not fit.

        At max staleness 0 the seconds are the makespan. Above 0 they are the busy time of the instance for one
        training step, and at least the longest path, with what follows it, divided by `staleness` + 1.

        Args:
          degree: degree of the instance.
          first: first request of each run.
          last: request after the last of each run.
          instances: instances that share a run evenly, with full slots at max staleness above 0. The path is then that
            of a request alone, a lower bound. None: one instance, which serves the run's longest request all the time.
        """
        sums, terms = self.demand.sums, self._model.prefill_terms(degree)
        room, slots = max(1.0, float(self._model.kv_tokens(degree))), self._slots[degree]
        spans = {name: (values[last] - values[first]) / (instances or 1) for name, values in sums.items()}
        tokens, context = spans["tokens"], spans["context"]
        # The first request is the longest; an empty run may begin past the end.
        head = np.minimum(first, len(self.demand) - 1)
        longest, per_context = self.demand.tokens[head], self._model.context_seconds(degree)
        overlapping = self._staleness + 1
        steps, full = np.maximum(tokens / slots, context / room), instances is not None and self._staleness > 0
        if not full:
            steps = np.maximum(longest / overlapping, steps)
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
        again: Values | float = 0.0
        if self._staleness:  # contexts that are live at a weight update, with attention over themselves
            mean = context / np.maximum(tokens, 1.0)
            again = (terms.new + GROWING * terms.pair * mean) * context / steps
        path = longest * fixed + per_context * decoding * self.demand.context[head] + self._besides[degree][head]
        path = np.maximum(0.0 if full else path, self._paths[degree].over(first, last))
        seconds = np.maximum(decode + prefill + again, (path + self._after) / overlapping)
        seconds = np.where(self._peaks.over(first, last) > room, np.inf, seconds)
        return np.where(last > first, seconds, 0.0)


class Pools:
    """Pools of instances for `pipeline`, with their costs of each sampled request.

    Args:
      model: costs of the engines.
      sample: the requests, in the order in which groups follow each other.
      slots: slots of an instance of each degree.
      room: share of a cache that the policy fills; 0: any number of contexts.
      pauses: seconds in which a weight sync stops an instance of each degree.
    """

    def __init__(
        self,
        model: costs.RolloutCosts,
        sample: Demand,
        slots: Mapping[int, int],
        *,
        room: float,
        pauses: Mapping[int, float],
    ) -> None:
        self._model, self._sample, self._slots = model, sample, slots
        self._room, self._pauses = room, pauses
        self._unit_pools: dict[int, degree_queues.DegreePool] = {}

    def pool(self, degree: int, instances: float) -> degree_queues.DegreePool:
        """Returns the pool of these instances; a fraction of an instance serves a smaller cluster."""
        unit_pool = self._unit_pools.get(degree)
        if unit_pool is None:
            unit_pool = self._unit_pools[degree] = self._make_unit_pool(degree)
        sizes = {name: getattr(unit_pool, name) * instances for name in ("slots", "room", "cache")}
        return dataclasses.replace(unit_pool, instances=instances, **sizes)

    def _make_unit_pool(self, degree: int) -> degree_queues.DegreePool:
        model, sample, slots = self._model, self._sample, self._slots[degree]
        terms, tokens = model.prefill_terms(degree), np.maximum(sample.tokens, 1.0)
        mean = sample.context / tokens
        prefill = terms.new * sample.new + terms.cached * sample.cached + terms.pair * sample.pairs
        drag = model.context_seconds(degree) * mean + (prefill + terms.prefill * sample.prefills) / tokens
        fixed = np.array([model.fixed_seconds(degree, count) for count in range(slots + 1)])
        footprint, cache = mean + COUNTED_GROWTH * (sample.peak - mean), float(model.kv_tokens(degree))
        room = self._room * cache if self._room else np.inf
        decoding, share = float(slots), np.ones_like(tokens)
        for _ in range(SETTLED):  # a faster pace makes tools take more ticks, and so fewer requests decode
            pace = np.interp(decoding, np.arange(slots + 1), fixed) + decoding * np.average(drag, weights=tokens)
            share = tokens / (tokens + sample.tool_seconds / pace)
            ticks = tokens / share
            # Requests that fit into the cache, and their decoding part.
            decoding = min(slots, room / np.average(footprint, weights=ticks) * tokens.sum() / ticks.sum())
        again = (terms.new + GROWING * terms.pair * mean) * mean + terms.prefill
        recall = share * (terms.new + terms.pair * mean / 2) * sample.cached / tokens
        columns = (tokens / share, share, share * drag, footprint, again, recall, sample.prefills)
        # As `Request._make` does, and without a call in Python: samples are large, and searches short.
        make_request = functools.partial(tuple.__new__, degree_queues.RequestCosts)
        requests = list(map(make_request, zip(*(column.tolist() for column in columns), strict=True)))
        return degree_queues.DegreePool(1.0, slots, room, cache, fixed.tolist(), self._pauses[degree], requests)


class Maxima:
    """Maxima over many ranges of an array at a time.

    A sparse table (Bender and Farach-Colton, 2000): log2(n) rows, each range answered by two of its entries.
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
        nonempty = width > 0
        level = np.where(nonempty, self._levels[width], 0)
        # Two overlapping windows of 2^level cover the range; the overlap does not change a maximum.
        left_maxima = self._rows[level, np.where(nonempty, first, 0)]
        right_maxima = self._rows[level, np.where(nonempty, last - (1 << level), 0)]
        return np.where(nonempty, np.maximum(left_maxima, right_maxima), -np.inf)
