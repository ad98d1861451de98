"""The confusion of predicted and true lengths, by which a plan knows on which instances its requests really run.

A plan draws a range of lengths for the instances of each degree: a *band*. Only a clairvoyant policy serves each
request on the instances of its band. Of most requests, a policy predicts nothing: any free slot serves them. Where
nothing tells lengths, a band predicts nothing at all. Then one degree is best unless its pace is too slow for the
longest requests, and the search finds so by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.planning.forecast.pipeline import Integers

CLAIRVOYANT = ("oracle", "clairvoyant")
"""Policies that know true lengths."""

BY_RETURNS = ("cmlfq", "cmlfq_paper", "cmlfq_authors")
"""Policies that predict lengths from tool returns."""

FILLS_CACHES = ("cmlfq", "sticky_cache", *CLAIRVOYANT)
"""Policies whose admission `auto` fills `scheduler.cache_share` of a cache and no more."""

RECOGNISED = 0.22
"""Share of the longest band's requests that a policy of `BY_RETURNS` brings to their instances. Measured under `cmlfq`,
seed 0, 48 simulated A800s, max staleness 4, instances of degrees 2 and 4 (`tests/benchmarks/watched.py`). Instances of
degree 4 decode a share b of the band's tokens and a share o of all others', and the measure is (b - o) / (1 - o). With
24, 32 and 40 accelerators that train it is 0.18, 0.32 and 0.22 (software engineering), 0.21, 0.39 and 0.03 (search).
The mean of these six is taken. Without tools (math) it is 0.01. Shorter bands got their share of slots."""

GOLDEN = 0.6180339887498949
"""Its multiples, modulo 1, fill the unit interval evenly."""


def cache_share(scheduler: config_lib.SchedulerConfig) -> float:
    """Returns the share of a cache that a policy fills; 0 if it admits any number of contexts."""
    by_cache = scheduler.policy in FILLS_CACHES if scheduler.admission == "auto" else scheduler.admission == "cache"
    return scheduler.cache_share if by_cache else 0.0


@dataclass(frozen=True)
class Confusion:
    """Shares of requests by predicted and true band.

    Attributes:
      matrix: `matrix[i][j]` is the share of requests of true band j that are predicted to belong to band i. A column
        adds up to 1 at most: nothing is predicted of the other requests.
      source: where the matrix comes from, as a clause.
    """

    matrix: tuple[tuple[float, ...], ...]
    source: str

    def __post_init__(self) -> None:
        table = np.array(self.matrix, np.float64)
        if table.ndim != 2 or table.shape[0] != table.shape[1] or not np.isfinite(table).all():
            raise protocols.DataError(f"a confusion matrix is square and finite, not {self.matrix}")
        if (table < 0).any() or (table.sum(axis=0) > 1 + 1e-9).any():
            raise protocols.DataError(
                f"a column of a confusion matrix has the shares of a true band, at most 1 in all, not {self.matrix}"
            )

    def predict_bands(self, bands: Integers) -> Integers:
        """Returns the predicted band of each request of these true bands; -1 if nothing is predicted.

        Of each true band, any long stretch of requests has the shares of the matrix.
        """
        predicted_bands = np.full(len(bands), -1, np.int64)
        sums = np.cumsum(np.array(self.matrix, np.float64), axis=0)
        for band in range(len(self.matrix)):
            (places,) = np.nonzero(bands == band)
            quantiles = np.arange(1, len(places) + 1) * GOLDEN % 1.0
            predicted = np.searchsorted(sums[:, band], quantiles, side="right")
            predicted_bands[places] = np.where(predicted < len(self.matrix), predicted, -1)
        return predicted_bands

    def lines(self, bounds: Sequence[int]) -> list[str]:
        """Returns the matrix as lines of text, a line for each true band.

        Args:
          bounds: most tokens of each band.
        """
        if len(bounds) == 1:
            return [f"All instances have one degree and serve all lengths ({self.source})."]
        lines, low = [f"Assumed of routing ({self.source}):"], 0
        for band, bound in enumerate(bounds):
            share = [row[band] for row in self.matrix]
            to = [f"{100 * one:.0f}% to band {number + 1}" for number, one in enumerate(share) if one >= 0.005]
            rest = 1.0 - sum(share)
            if rest >= 0.005:
                to.append(f"{100 * rest:.0f}% to any free slot")
            length = f"beyond {low:,}" if band == len(bounds) - 1 else f"{low:,} to {bound:,}"
            lines.append(f"  band {band + 1}, {length} tokens: {', '.join(to)}")
            low = bound
        return lines


def calibrated(policy: str, bands: int, *, tools: bool) -> Confusion:
    """Returns what is known of a policy without a measurement of the run.

    Args:
      policy: name of the scheduling policy.
      bands: number of bands.
      tools: whether rollouts call tools, which is what `BY_RETURNS` predict from.
    """
    shares = np.zeros(bands)
    source = f"{policy} predicts no lengths"
    if policy in CLAIRVOYANT:
        shares[:], source = 1.0, f"{policy} knows true lengths"
    elif policy in BY_RETURNS and tools:
        shares[-1], source = RECOGNISED, f"{policy}, calibrated on simulated runs"
    elif policy in BY_RETURNS:
        source = f"{policy} without tools: nothing tells lengths"
    return Confusion(tuple(map(tuple, np.diag(shares).tolist())), source)
