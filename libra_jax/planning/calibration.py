"""Costs fitted to a run's measurements: engine steps and prefill, training steps, weight updates.

An engine step of n decoding requests with C tokens of context in all takes `step + request n + context C`. Prefill that
shares the step adds `prefill_request` for each request. It also adds `prefill_token` for each token that is new to the
instance, and `cached_token` for each token that the instance has seen. `cached_token` is 0 if the prefix cache finds
all seen tokens, and as large as `prefill_token` if it finds none. Every coefficient is a time, so none is negative.

The coefficients are fitted to streams. A stream of g tokens goes through g steps, so its duration is

  step g + request g mean(n) + context g mean(C) + prefill_token (new tokens of all requests that came meanwhile)
    + cached_token (their cached tokens) + prefill_request (their number) + wait

with means over the time of the stream. `wait` is the remaining time: the step that was running at its arrival, and
the way to the engine and back. The duration is linear in the coefficients, so `robust.fit` finds them.
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
"""Least number of streams from which an engine's coefficients are fitted."""


@dataclass(frozen=True)
class EngineCosts:
    """Costs of an engine of one tensor-parallel degree, in seconds.

    Attributes:
      step: fixed time of a step: launching it, reading the weights.
      request: time that each decoding request adds to a step.
      context: time that each token of decoding context adds to a step: reading its keys and values.
      prefill_token: time of each prefilled token that is new to the instance.
      cached_token: time of each token of a prefilled context that the instance has seen.
      prefill_request: time of each prefilled request.
      wait: remaining time of each stream; not a cost of the engine, and not used by `Calibration`.
    """

    step: float
    request: float
    context: float
    prefill_token: float
    cached_token: float
    prefill_request: float
    wait: float = 0.0

    def scaled(self, factor: float) -> EngineCosts:
        """Returns an engine that takes `factor` times as long for everything."""
        return EngineCosts(**{name: factor * value for name, value in vars(self).items()})


@dataclass(frozen=True)
class TrainCosts:
    """Costs of a training step, in seconds.

    Attributes:
      step: fixed time of a step.
      column: time of each column of the computed rows, padding included.
    """

    step: float
    column: float


@dataclass(frozen=True)
class UpdateCosts:
    """Costs of a weight update, in seconds.

    Attributes:
      gather: time in which the trainer puts a snapshot together, and the remaining time of an update.
      load: time in which an instance takes the snapshot, from its pause to its resumption.
    """

    gather: float
    load: float


@dataclass(frozen=True)
class MeasuredEngines:
    """Measured costs of rollout: implements `costs.RolloutCosts`, with the same meaning.

    Attributes:
      engines: costs by tensor-parallel degree.
      chunk_tokens: prefill tokens that share one engine step.
      cache_tokens: tokens that the cache of an instance of each degree holds. A recording does not contain them. The
        cache of a missing degree never fills, so nothing is pre-empted there.
    """

    engines: Mapping[int, EngineCosts]
    chunk_tokens: int = 2048
    cache_tokens: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def scaled(self, factors: Mapping[int, float]) -> Self:
        """Returns the same costs with engines that take `factors[degree]` times as long."""
        engines = {degree: engine.scaled(factors.get(degree, 1.0)) for degree, engine in self.engines.items()}
        return dataclasses.replace(self, engines=engines)

    def kv_tokens(self, degree: int) -> int:
        """Returns the tokens that an instance's cache holds; see `cache_tokens`."""
        # 2**40: no limit.
        return self.cache_tokens.get(degree, 2**40)

    def context_seconds(self, degree: int) -> float:
        """Returns the seconds that each token of decoding context adds to a step."""
        return self._engine(degree).context

    def fixed_seconds(self, degree: int, decoding: int, prefill: float = 0.0) -> float:
        """Returns the seconds of one step of `decoding` requests and `prefill` new tokens, apart from contexts."""
        engine = self._engine(degree)
        return engine.step + engine.request * decoding + engine.prefill_token * prefill

    def attention_seconds(self, degree: int, new: int, cached: int) -> float:
        """Returns the additional seconds of prefilling one request behind `cached` tokens."""
        engine = self._engine(degree)
        return engine.prefill_request + engine.cached_token * cached

    def prefill_seconds(self, degree: int, new: int, cached: int = 0) -> float:
        """Returns the seconds of prefilling `new` tokens on an idle instance."""
        chunks = max(1, -(-new // self.chunk_tokens))
        return chunks * self.fixed_seconds(degree, 0, new / chunks) + self.attention_seconds(degree, new, cached)

    def prefill_terms(self, degree: int) -> costs.PrefillTerms:
        """Returns the seconds that prefilling adds to steps in which others decode."""
        engine = self._engine(degree)
        return costs.PrefillTerms(engine.prefill_token, engine.cached_token, 0.0, engine.prefill_request)

    def step_seconds(self, degree: int, decoding: int, context: float) -> float:
        """Returns the seconds in which `decoding` requests with `context` tokens in all get one token each."""
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
    """All measured costs: implements `costs.Costs`, with the same meaning.

    Attributes:
      train: costs of the trainer, with the devices that it had.
      update: costs of a weight update.
      rows: rows of the trainer.
      parameters: parameters of the model; no cost depends on them.
      weight_bytes: bytes of a weight sync; no cost depends on them.
    """

    train: TrainCosts
    update: UpdateCosts
    rows: rows.Shape
    parameters: int = 0
    weight_bytes: int = 0

    def train_seconds(self, lengths: Sequence[int], devices: int) -> float:
        """Returns the seconds of a training step on sequences of these lengths; `devices` must be the measured ones."""
        return self.train.step + self.train.column * rows.processed_columns(lengths, self.rows)

    def gather_seconds(self, devices: int) -> float:
        """Returns the seconds in which the trainer puts a snapshot together."""
        return self.update.gather

    def load_seconds(self, degree: int) -> float:
        """Returns the seconds in which an instance receives a snapshot and puts it in place."""
        return self.update.load

    def transfer_seconds(self, degree: int, context: int) -> float:
        """Returns the seconds of prefilling a moved request again, because no transfer was measured."""
        return self.prefill_seconds(degree, context)


def fit_engine(instances: Sequence[Sequence[streams.Stream]]) -> EngineCosts:
    """Fits the costs of engines of one degree.

    Args:
      instances: the streams of each instance. Streams that are not `known` load the instance but are not fitted to.

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
    """Returns the terms of each known stream's duration, in the order of `EngineCosts`, and the duration."""
    start, end, tokens, new, cached, context = np.array(
        [(item.start, item.end, item.tokens, item.new, item.cached, item.mean_context) for item in mine]
    ).T
    known = np.array([item.known for item in mine]) & (tokens > 0) & (end > start)
    seconds = np.where(end > start, end - start, 1.0)
    open_ = _mean(start, end, np.ones_like(start))
    contexts = _mean(start, end, context)
    # A request that arrives just before a stream is prefilled in the stream's first step; one that arrives in the
    # stream's last step is prefilled after its end.
    early = seconds / np.maximum(1.0, tokens)
    first = np.searchsorted(start, start - early, side="right")
    last = np.searchsorted(start, end - early, side="right")
    arrivals = [_between(values, first, last) for values in (new, cached, np.ones_like(start))]
    terms = np.stack([tokens, tokens * open_, tokens * contexts, *arrivals, np.ones_like(start)], axis=1)
    return terms[known], seconds[known]


def _between(values: robust.Values, first: np.ndarray, last: np.ndarray) -> robust.Values:
    """Returns the sum of values[first:last] for each pair."""
    totals = np.concatenate(([0.0], np.cumsum(values)))
    return np.asarray(totals[last] - totals[first], np.float64)


def _mean(start: robust.Values, end: robust.Values, height: robust.Values) -> robust.Values:
    """Returns for each interval the mean over its time of the summed heights of all open intervals."""
    times = np.concatenate([start, end])
    # A sweep over all starts and ends: the level is constant between two of them.
    order = np.argsort(times, kind="stable")
    times, jumps = times[order], np.concatenate([height, -height])[order]
    level = np.cumsum(jumps)
    area = np.concatenate(([0.0], np.cumsum(level[:-1] * np.diff(times))))
    length = np.where(end > start, end - start, 1.0)
    return np.asarray((np.interp(end, times, area) - np.interp(start, times, area)) / length, np.float64)


def fit_train(columns: Sequence[int], seconds: Sequence[float]) -> TrainCosts:
    """Fits the costs of training steps.

    Args:
      columns: columns computed in each step (`rows.processed_columns`).
      seconds: seconds of each step.
    """
    terms = np.stack([np.ones(len(columns)), np.asarray(columns, np.float64)], axis=1)
    step, column = robust.fit(terms, np.asarray(seconds, np.float64))
    return TrainCosts(float(step), float(column))


def fit_update(publications: Sequence[float], loads: Sequence[float]) -> UpdateCosts:
    """Fits the costs of weight updates: medians, since all updates do the same.

    Args:
      publications: seconds of each weight sync to all instances.
      loads: seconds of each instance's part in a sync, from its pause to its resumption; may be empty.
    """
    whole = statistics.median(publications)
    # Medians of noisy times could make a part longer than the whole.
    load = min(statistics.median(loads), whole) if loads else whole
    return UpdateCosts(whole - load, load)
