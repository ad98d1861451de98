"""How long an instance takes to serve a run of requests: the rollout half of the cost evaluator.

With a run's sums (`demand`), the steps that an instance makes are at least its longest request's tokens, its tokens
over the slots, and its context over the tokens that its cache holds; the largest of the three is taken. At eta > 0 the
requests of eta + 1 training steps overlap, so of the longest request's tokens that part counts for one of them. It
decodes so many requests at a time on average, which gives a step's time. Prefill comes on top, as does prefilling
again what was live whenever the weights change. Against that stands the longest path: the longest request at the pace
of so many decoding, with its prefill and its tools; or another, whose tools take longer, alone.

All of it grows with every request that is added, which the search relies on, if longer requests have no shorter
contexts and tools; where they have, it may fall a little short of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libra_jax.planning import costs, ranges
from libra_jax.planning.demand import Demand, Places, Values


class Serving:
    """Seconds of each run of the demand's requests on one instance of each degree.

    Args:
      model: of the engines.
      demand: the requests of a training step.
      degrees: that instances may have.
      slots: of an instance of each degree.
      staleness: eta; a request's path may take as many steps more.
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
        """Of the requests first..last-1 of each pair, longest first; 0 of none, infinite where a context does not fit.

        At eta = 0 they are the makespan, else what the instance is busy for a training step, and no less than what the
        longest path leaves of `staleness` + 1 of them.
        """
        sums, terms = self.demand.sums, self._model.prefill_terms(degree)
        room, slots = max(1.0, float(self._model.kv_tokens(degree))), self._slots[degree]
        spans = {name: values[last] - values[first] for name, values in sums.items()}
        tokens, context = spans["tokens"], spans["context"]
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
        again = terms.new * context / steps if self._staleness else 0.0  # the contexts that are live at an update
        path = longest * fixed + per_context * decoding * self.demand.context[head] + self._ways[degree][head]
        path = np.maximum(path, self._paths[degree].over(first, last))
        seconds = np.maximum(decode + prefill + again, path / overlapping)
        seconds = np.where(self._peaks.over(first, last) > room, np.inf, seconds)
        return np.where(last > first, seconds, 0.0)

    def _way(self, degree: int) -> Values:
        """Seconds of each request besides decoding: its prefill and its tools."""
        demand, terms = self.demand, self._model.prefill_terms(degree)
        prefill = terms.new * demand.new + terms.cached * demand.cached + terms.pair * demand.pairs
        return np.asarray(prefill + terms.prefill * demand.prefills + demand.tool_seconds, np.float64)

    def _alone(self, degree: int) -> Values:
        """Seconds of each request on an instance of its own."""
        pace = self._model.fixed_seconds(degree, 1)
        decode = pace * self.demand.tokens + self._model.context_seconds(degree) * self.demand.context
        return np.asarray(decode + self._ways[degree], np.float64)

    def _fixed(self, degree: int, decoding: Values) -> Values:
        """Seconds of a step of so many requests, a number that need not be whole, apart from contexts."""
        table = self._tables[degree]
        return np.asarray(np.interp(decoding, np.arange(len(table)), table), np.float64)
