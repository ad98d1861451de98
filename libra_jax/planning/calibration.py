"""Costs fitted to what a run measured: engine steps and prefill, training steps, weight updates.

An engine step of n decoding requests with C tokens of context in all takes `step + request n + context C`; prefill that
shares it adds `prefill_token` for each token that the instance has not seen, `cached_token` for each that it has (0
where its prefix cache finds all of them, as much as `prefill_token` where it finds none), and `prefill_request` for
each request. Every coefficient is a time, so none is negative.

They are read off streams. A stream of g tokens goes through g steps, so its duration is

  step g + request g mean(n) + context g mean(C) + prefill_token (new tokens of all requests that came meanwhile)
    + cached_token (their cached tokens) + prefill_request (their number) + wait

with means over the time of the stream, and `wait` what passes besides: the step under way when it arrived, and the ways
to the engine and back. That is linear in the coefficients; `robust.fit` finds them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from libra_jax import protocols
from libra_jax.planning import costs, robust, rows, streams

LEAST_STREAMS = 20
"""Streams from which an engine's coefficients are fitted at least."""


@dataclass(frozen=True)
class EngineCosts:
    """An engine of one tensor-parallel degree; seconds.

    Attributes:
      step: of a step, whatever is in it: launching it, reading the weights.
      request: that each decoding request adds to a step.
      context: that each token of decoding context adds to a step: reading its keys and values.
      prefill_token: of each prefilled token that the instance has not seen.
      cached_token: of each token of a prefilled context that it has.
      prefill_request: of each request that is prefilled.
      wait: of each stream besides; not a cost of the engine, and not used by `Calibration`.
    """

    step: float
    request: float
    context: float
    prefill_token: float
    cached_token: float
    prefill_request: float
    wait: float = 0.0

    def scaled(self, factor: float) -> EngineCosts:
        """An engine that takes `factor` times as long for everything."""
        return EngineCosts(**{name: factor * value for name, value in vars(self).items()})


@dataclass(frozen=True)
class TrainCosts:
    """A training step; seconds.

    Attributes:
      step: of a step, whatever is in it.
      column: of each column of the rows that are computed, padding included.
    """

    step: float
    column: float


@dataclass(frozen=True)
class UpdateCosts:
    """A weight update; seconds.

    Attributes:
      gather: the trainer puts a snapshot together, and what passes besides.
      load: an instance takes it, from its pause to its resumption.
    """

    gather: float
    load: float


@dataclass(frozen=True)
class MeasuredEngines:
    """Costs of rollout as they were measured: what `costs.RolloutCosts` asks, with the same meaning.

    Attributes:
      engines: by tensor-parallel degree.
      chunk_tokens: prefill tokens that share one engine step.
      cache_tokens: that an instance of each degree holds. A recording does not tell: the cache of a degree that is left
        out never fills, so nothing is pre-empted there.
    """

    engines: Mapping[int, EngineCosts]
    chunk_tokens: int = 2048
    cache_tokens: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def scaled(self, factors: Mapping[int, float]) -> Self:
        """The same with engines that take `factors[degree]` times as long."""
        engines = {degree: engine.scaled(factors.get(degree, 1.0)) for degree, engine in self.engines.items()}
        return dataclasses.replace(self, engines=engines)

    def kv_tokens(self, degree: int) -> int:
        """See `cache_tokens`."""
        return self.cache_tokens.get(degree, 2**40)

    def context_seconds(self, degree: int) -> float:
        """Seconds that each token of decoding context adds to a step."""
        return self._engine(degree).context

    def fixed_seconds(self, degree: int, decoding: int, prefill: float = 0.0) -> float:
        """Seconds of one step of `decoding` requests and `prefill` new tokens, apart from contexts."""
        engine = self._engine(degree)
        return engine.step + engine.request * decoding + engine.prefill_token * prefill

    def attention_seconds(self, degree: int, new: int, cached: int) -> float:
        """Seconds, besides, of prefilling one request behind `cached` tokens."""
        engine = self._engine(degree)
        return engine.prefill_request + engine.cached_token * cached

    def prefill_seconds(self, degree: int, new: int, cached: int = 0) -> float:
        """Seconds of prefilling `new` tokens on an idle instance."""
        chunks = max(1, -(-new // self.chunk_tokens))
        return chunks * self.fixed_seconds(degree, 0, new / chunks) + self.attention_seconds(degree, new, cached)

    def prefill_terms(self, degree: int) -> costs.PrefillTerms:
        """Seconds that prefilling adds to steps in which others decode."""
        engine = self._engine(degree)
        return costs.PrefillTerms(engine.prefill_token, engine.cached_token, 0.0, engine.prefill_request)

    def step_seconds(self, degree: int, decoding: int, context: float) -> float:
        """Seconds in which `decoding` requests with `context` tokens in all get one token each."""
        return self.fixed_seconds(degree, decoding) + self.context_seconds(degree) * context

    def _engine(self, degree: int) -> EngineCosts:
        try:
            return self.engines[degree]
        except KeyError:
            raise protocols.ConfigError(
                f"config.rollout.tensor_parallel: no instance of degree {degree} was measured, only of "
                f"{', '.join(map(str, sorted(self.engines)))}"
            ) from None


@dataclass(frozen=True, kw_only=True)
class Calibration(MeasuredEngines):
    """All costs as they were measured: what `costs.Costs` asks, with the same meaning.

    Attributes:
      train: of the trainer, with the devices that it had.
      update: of weights.
      rows: the trainer's.
      parameters: of the model; takes no part in any cost.
      weight_bytes: published; likewise.
    """

    train: TrainCosts
    update: UpdateCosts
    rows: rows.Shape
    parameters: int = 0
    weight_bytes: int = 0

    def train_seconds(self, lengths: Sequence[int], devices: int) -> float:
        """Seconds of one training step on sequences of these lengths; `devices` are those that were measured."""
        return self.train.step + self.train.column * rows.processed_columns(lengths, self.rows)

    def gather_seconds(self, devices: int) -> float:
        """Seconds in which the trainer puts a snapshot together."""
        return self.update.gather

    def load_seconds(self, degree: int) -> float:
        """Seconds in which an instance receives a snapshot and puts it in place."""
        return self.update.load

    def transfer_seconds(self, degree: int, context: int) -> float:
        """No transfer was measured: a request that moves is prefilled again, which takes as long."""
        return self.prefill_seconds(degree, context)


def fit_engine(instances: Sequence[Sequence[streams.Stream]]) -> EngineCosts:
    """Costs of engines that are alike.

    Args:
      instances: the streams of each. Streams that are not `known` load it and are not fitted to.

    Raises:
      DataError: fewer than `LEAST_STREAMS` can be fitted to.
    """
    tables = [_table(sorted(mine, key=lambda stream: stream.start)) for mine in instances if mine]
    terms = np.concatenate([terms for terms, _ in tables]) if tables else np.zeros((0, 7))
    seconds = np.concatenate([seconds for _, seconds in tables]) if tables else np.zeros(0)
    if len(seconds) < LEAST_STREAMS:
        raise protocols.DataError(
            f"{len(seconds)} streams of tokens are too few to calibrate an engine by; at least {LEAST_STREAMS} are "
            "needed: record more steps"
        )
    return EngineCosts(*(float(value) for value in robust.fit(terms, seconds)))


def _table(mine: Sequence[streams.Stream]) -> tuple[robust.Values, robust.Values]:
    """The terms of each known stream's duration, in the order of `EngineCosts`, and the duration."""
    start, end, tokens, new, cached, context = np.array(
        [(item.start, item.end, item.tokens, item.new, item.cached, item.mean_context) for item in mine]
    ).T
    known = np.array([item.known for item in mine]) & (tokens > 0) & (end > start)
    seconds = np.where(end > start, end - start, 1.0)
    open_ = _mean(start, end, np.ones_like(start))
    contexts = _mean(start, end, context)
    # Who arrives just before a stream is prefilled in its first step, and who arrives in its last one after its end.
    early = seconds / np.maximum(1.0, tokens)
    first = np.searchsorted(start, start - early, side="right")
    last = np.searchsorted(start, end - early, side="right")
    arrivals = [_between(values, first, last) for values in (new, cached, np.ones_like(start))]
    terms = np.stack([tokens, tokens * open_, tokens * contexts, *arrivals, np.ones_like(start)], axis=1)
    return terms[known], seconds[known]


def _between(values: robust.Values, first: np.ndarray, last: np.ndarray) -> robust.Values:
    """Sum of values[first:last] of each pair."""
    totals = np.concatenate(([0.0], np.cumsum(values)))
    return np.asarray(totals[last] - totals[first], np.float64)


def _mean(start: robust.Values, end: robust.Values, height: robust.Values) -> robust.Values:
    """Of each interval, the mean over it of the summed heights of all that are open."""
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
    times, jumps = times[order], np.concatenate([height, -height])[order]
    level = np.cumsum(jumps)
    area = np.concatenate(([0.0], np.cumsum(level[:-1] * np.diff(times))))
    length = np.where(end > start, end - start, 1.0)
    return np.asarray((np.interp(end, times, area) - np.interp(start, times, area)) / length, np.float64)


def fit_train(columns: Sequence[int], seconds: Sequence[float]) -> TrainCosts:
    """Costs of training steps.

    Args:
      columns: computed in each step (`rows.processed_columns`).
      seconds: of each.
    """
    terms = np.stack([np.ones(len(columns)), np.asarray(columns, np.float64)], axis=1)
    step, column = robust.fit(terms, np.asarray(seconds, np.float64))
    return TrainCosts(float(step), float(column))


def fit_update(publications: Sequence[float], loads: Sequence[float]) -> UpdateCosts:
    """Costs of weight updates: medians, since all of them do the same.

    Args:
      publications: seconds of each publication to all instances.
      loads: seconds of each instance's part in one, from its pause to its resumption; may be empty.
    """
    whole = statistics.median(publications)
    load = min(statistics.median(loads), whole) if loads else whole
    return UpdateCosts(whole - load, load)
