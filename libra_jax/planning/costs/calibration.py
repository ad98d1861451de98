"""Fits costs to a run's measurements: engine steps and prefill, training steps, weight updates.

An engine step of n decoding requests with C tokens of context in all takes `step + request n + context C`. Prefill that
shares the step adds `prefill_request` for each request. It also adds `prefill_token` for each token that is new to the
instance, and `cached_token` for each token that the instance has seen. `cached_token` is 0 if the prefix cache finds
all seen tokens, and as large as `prefill_token` if it finds none. Every coefficient is a time, so none is negative.

The coefficients are fitted to streams. A stream is one stay of a request on an instance: from the moment the instance
was asked for the request's tokens to its last token there. An output is one stream, or several if the request moved in
the middle of it. A stream of g tokens goes through g steps, so its duration is

  step g + request g mean(n) + context g mean(C) + prefill_token (new tokens of all requests that came meanwhile)
    + cached_token (their cached tokens) + prefill_request (their number) + wait

with means over the time of the stream. `wait` is the remaining time: the step that was running at its arrival, and
the way to the engine and back. The duration is linear in the coefficients, so `robust_fit` finds them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from libra_jax import protocols
from libra_jax.planning.costs import measured_costs

Values: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

ROUNDS = 25
"""Most rounds in which `robust_fit` reweighs the measurements."""

LEAST_STREAMS = 20
"""Least number of streams from which an engine's coefficients are fitted."""

GENERATE = "generate"
"""Name of the spans that are streams."""


@dataclass(frozen=True)
class RequestStay:
    """A request's stay on an instance; times are seconds, the rest tokens.

    Attributes:
      instance: name of the instance.
      start: time at which the instance was asked.
      end: time of the last token.
      tokens: tokens generated in between.
      new: tokens of the context at the start that are new to the instance; 0 if not known.
      cached: tokens of the context at the start that the instance saw in this request's stream before; 0 if not known.
      usable: the trace gives `new` and `cached`, so costs can be fitted to the stream.
    """

    instance: str
    start: float
    end: float
    tokens: int
    new: int = 0
    cached: int = 0
    usable: bool = False


def read_streams(spans: Iterable[protocols.Span], records: Iterable[Mapping[str, Any]]) -> list[RequestStay]:
    """Returns the streams of a timeline, in order of their starts.

    Args:
      spans: spans of the timeline. Streams of requests without a record (evaluation, aborted rollouts) still load their
        instance, and get `usable` False. So do streams that do not add up to their record.
      records: records of the trace (`telemetry/trace.py`).
    """
    by_request: dict[str, list[RequestStay]] = collections.defaultdict(list)
    for span in spans:
        if span.name == GENERATE and {"request", "tokens"} <= span.arguments.keys():
            stream = RequestStay(span.track, span.start, span.end, span.arguments["tokens"])
            by_request[span.arguments["request"]].append(stream)
    streams: list[RequestStay] = []
    for record in records:
        request_streams = sorted(by_request.pop(record["trajectory_id"], ()), key=lambda stream: stream.start)
        turns = record["turns"]
        if sum(stream.tokens for stream in request_streams) != sum(turn["generated_tokens"] for turn in turns):
            streams += request_streams
            continue
        remaining_turns = collections.deque((turn["generated_tokens"], turn["payload_tokens"]) for turn in turns)
        output, payload = remaining_turns.popleft() if remaining_turns else (0, 0)
        context, previous_context, instance = record["prompt_tokens"], 0, ""
        for stream in request_streams:
            # An output may take several streams, if its request moved.
            while output <= 0 and remaining_turns:
                context += payload
                output, payload = remaining_turns.popleft()
            # After a move, the new instance counts as having seen nothing.
            cached = previous_context if stream.instance == instance else 0
            streams.append(dataclasses.replace(stream, new=context - cached, cached=cached, usable=True))
            context += stream.tokens
            previous_context, instance = context, stream.instance
            output -= stream.tokens
    for request_streams in by_request.values():
        streams += request_streams
    return sorted(streams, key=lambda stream: (stream.start, stream.end))


def fit_engine(instances: Sequence[Sequence[RequestStay]]) -> measured_costs.EngineCosts:
    """Fits the costs of engines of one degree.

    Args:
      instances: the streams of each instance. Streams that are not `usable` load the instance but are not fitted to.

    Raises:
      DataError: fewer than `LEAST_STREAMS` can be fitted to.
    """
    tables = [_table(sorted(streams, key=lambda stream: stream.start)) for streams in instances if streams]
    terms = np.concatenate([terms for terms, _ in tables]) if tables else np.zeros((0, 7))
    seconds = np.concatenate([seconds for _, seconds in tables]) if tables else np.zeros(0)
    if len(seconds) < LEAST_STREAMS:
        raise protocols.DataError(
            f"{len(seconds)} streams of tokens are too few to calibrate an engine by; at least {LEAST_STREAMS} are "
            "needed: record more steps"
        )
    return measured_costs.EngineCosts(*(float(value) for value in robust_fit(terms, seconds)))


def _table(streams: Sequence[RequestStay]) -> tuple[Values, Values]:
    """Returns the terms of each usable stream's duration, in the order of `EngineCosts`, and the duration."""
    start, end, tokens, new, cached = np.array(
        [(item.start, item.end, item.tokens, item.new, item.cached) for item in streams]
    ).T
    context = new + cached + tokens / 2  # half-way through the stream
    ones = np.ones_like(start)
    seconds = np.where(end > start, end - start, 1.0)

    # Mean number of open streams and of their contexts over each stream's time. In a sweep over all starts and ends,
    # the level is constant between two of them, so its integral is linear there.
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
    times, means = times[order], []
    for height in (ones, context):
        level = np.cumsum(np.concatenate([height, -height])[order])
        area = np.concatenate(([0.0], np.cumsum(level[:-1] * np.diff(times))))
        means.append((np.interp(end, times, area) - np.interp(start, times, area)) / seconds)

    # A request that arrives just before a stream is prefilled in the stream's first step; one that arrives in the
    # stream's last step is prefilled after its end.
    early = seconds / np.maximum(1.0, tokens)
    first = np.searchsorted(start, start - early, side="right")
    last = np.searchsorted(start, end - early, side="right")
    sums = [np.concatenate(([0.0], np.cumsum(values))) for values in (new, cached, ones)]
    arrivals = [total[last] - total[first] for total in sums]

    terms = np.stack([tokens, *(tokens * mean for mean in means), *arrivals, ones], axis=1)
    usable = np.array([item.usable for item in streams]) & (tokens > 0) & (end > start)
    return terms[usable], seconds[usable]


def fit_train(columns: Sequence[int], seconds: Sequence[float]) -> measured_costs.TrainCosts:
    """Fits the costs of training steps.

    Args:
      columns: columns computed in each step (`rows.processed_columns`).
      seconds: seconds of each step.
    """
    terms = np.stack([np.ones(len(columns)), np.asarray(columns, np.float64)], axis=1)
    step, column = robust_fit(terms, np.asarray(seconds, np.float64))
    return measured_costs.TrainCosts(float(step), float(column))


def fit_update(syncs: Sequence[float], loads: Sequence[float]) -> measured_costs.UpdateCosts:
    """Fits the costs of weight updates: medians, since all updates do the same.

    Args:
      syncs: seconds of each weight sync to all instances.
      loads: seconds of each instance's part in a sync, from its pause to its resumption; may be empty.
    """
    sync = statistics.median(syncs)
    # Medians of noisy times could make a part longer than the whole.
    load = min(statistics.median(loads), sync) if loads else sync
    return measured_costs.UpdateCosts(sync - load, load)


def robust_fit(rows: Values, measured: Values) -> Values:
    """Returns the coefficients c >= 0 that minimise `sum rho(measured - rows @ c)`, rho the soft L1 loss.

    A few bad measurements cannot drag the coefficients far.
    `rho(r) = 2 s^2 (sqrt(1 + (r / s)^2) - 1)` is squared for residuals below the scale s, and absolute beyond. The
    scale is the median size of the residuals. Solved by iteratively reweighted least squares (Holland and Welsch,
    1977).

    Args:
      rows: [N, K], one measurement a row; K at most 8.
      measured: [N].

    Returns:
      [K]; a coefficient on which no row depends is 0.

    Example:
      >>> steps = np.arange(1.0, 9.0)
      >>> measured = 1.0 + 2.0 * steps + 40.0 * (steps == 4)  # one step was disturbed
      >>> robust_fit(np.stack([np.ones(8), steps], axis=1), measured).round(3)
      array([1., 2.])
    """
    weights = np.ones(len(measured))
    coefficients = np.zeros(rows.shape[1])
    for _ in range(ROUNDS):
        before, coefficients = coefficients, non_negative_fit(rows * weights[:, None], measured * weights)
        residuals = np.abs(measured - rows @ coefficients)
        scale = float(np.median(residuals))
        # A perfect fit has no scale to weigh residuals by.
        if scale <= 1e-12 * float(np.abs(measured).max(initial=0.0)) or np.allclose(before, coefficients, 1e-9, 0.0):
            break
        weights = (1.0 + (residuals / scale) ** 2) ** -0.25  # square roots: the loss squares them again
    return coefficients


def non_negative_fit(rows: Values, measured: Values) -> Values:
    """Returns the least-squares solution among coefficients >= 0.

    It equals the unconstrained solution over its positive coefficients. With few coefficients, trying every subset
    finds the best feasible one.
    """
    # Columns of unit length keep the digits if coefficients differ by orders of magnitude.
    sizes = np.sqrt((rows**2).sum(axis=0))
    used = [column for column in range(rows.shape[1]) if sizes[column] > 0]
    scaled = rows[:, used] / sizes[used]
    gram, moments = scaled.T @ scaled, scaled.T @ measured
    best, best_gain = np.zeros(rows.shape[1]), 0.0
    for count in range(1, len(used) + 1):
        for subset in itertools.combinations(range(len(used)), count):
            chosen = list(subset)
            try:
                solution = np.linalg.solve(gram[np.ix_(chosen, chosen)], moments[chosen])
            except np.linalg.LinAlgError:  # two columns are equivalent: a smaller subset fits as well
                continue
            gain = float(solution @ moments[chosen])  # reduction of the sum of squares
            if (solution >= 0).all() and gain > best_gain * (1 + 1e-12):
                best, best_gain = np.zeros(rows.shape[1]), gain
                best[[used[index] for index in chosen]] = solution / sizes[[used[index] for index in chosen]]
    return best
