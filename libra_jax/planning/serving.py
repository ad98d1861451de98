"""Predicts how long an instance takes to serve a run of requests: the rollout half of the cost evaluator.

The number of steps is estimated from a run's sums (`demand`). It is the largest of three: the longest request's tokens,
all tokens over the slots, and all context over the tokens that the cache holds. With max staleness eta above 0, the
requests of eta + 1 training steps overlap, so each step counts only 1 / (eta + 1) of the longest request's tokens. All
tokens over the steps give the mean number of decoding requests, which gives the time of a step. Prefill comes on top,
and so does prefilling live contexts again at each weight update. The result is at least the longest path. One candidate
is the longest request at the pace of this mean batch, with its prefill and its tools. The other candidate is any
request with slower tools, alone on the instance. The path is divided by eta + 1.

The time grows with every added request if longer requests have no shorter contexts and tools; the search relies on
this. Otherwise the growth may not hold exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libra_jax.planning import costs, ranges
from libra_jax.planning.demand import Demand, Places, Values


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
        self._peaks = ranges.Maxima(demand.peak)
        self._tables = {
            degree: np.array([model.fixed_seconds(degree, count) for count in range(self._slots[degree] + 1)])
            for degree in degrees
        }
        self._ways = {degree: self._way(degree) for degree in degrees}
        self._paths = {degree: ranges.Maxima(self._alone(degree)) for degree in degrees}

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
        fixed = self._fixed(degree, decoding)
        decode = steps * fixed + per_context * context
        prefill = (
            terms.new * spans["new"]
            + terms.cached * spans["cached"]
            + terms.pair * spans["pairs"]
            + terms.prefill * spans["prefills"]
        )
        again = terms.new * context / steps if self._staleness else 0.0  # contexts that are live at a weight update
        path = longest * fixed + per_context * decoding * self.demand.context[head] + self._ways[degree][head]
        path = np.maximum(path, self._paths[degree].over(first, last))
        seconds = np.maximum(decode + prefill + again, path / overlapping)
        seconds = np.where(self._peaks.over(first, last) > room, np.inf, seconds)
        return np.where(last > first, seconds, 0.0)

    def _way(self, degree: int) -> Values:
        """Returns the seconds of each request besides decoding: its prefill and its tools."""
        demand, terms = self.demand, self._model.prefill_terms(degree)
        prefill = terms.new * demand.new + terms.cached * demand.cached + terms.pair * demand.pairs
        return np.asarray(prefill + terms.prefill * demand.prefills + demand.tool_seconds, np.float64)

    def _alone(self, degree: int) -> Values:
        """Returns the seconds of each request on an instance of its own."""
        pace = self._model.fixed_seconds(degree, 1)
        decode = pace * self.demand.tokens + self._model.context_seconds(degree) * self.demand.context
        return np.asarray(decode + self._ways[degree], np.float64)

    def _fixed(self, degree: int, decoding: Values) -> Values:
        """Returns the seconds of a step of `decoding` requests, a number that need not be whole, apart from
        contexts."""
        table = self._tables[degree]
        return np.asarray(np.interp(decoding, np.arange(len(table)), table), np.float64)
