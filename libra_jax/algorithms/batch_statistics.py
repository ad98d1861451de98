"""Statistics of all trained tokens of an update, for losses that look beyond a micro-batch: BAPO, Clip-Cov, KL-Cov.

The policy scores the mini-batch before its update. The statistics are computed once on the host, from all trained
tokens, and handed to the loss as constants. So a loss stays independent of the split into micro-batches and devices.

Letters: K trained tokens of an update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from libra_jax import config as config_lib
from libra_jax.utils import resolving

LOG_RATIO_BOUND = 20.0
"""Largest absolute log-ratio, as in `corrections.bounded_ratio`."""


class BatchTokens(NamedTuple):
    """The trained tokens of an update, float32 [K], under the policy that is about to be updated.

    Attributes:
      log_probs_K: log π.
      log_ratio_K: log-ratio to the anchor, before any correction.
      advantages_K: advantages.
    """

    log_probs_K: np.ndarray
    log_ratio_K: np.ndarray
    advantages_K: np.ndarray


Statistics = Mapping[str, "float | np.ndarray"]
"""Numbers by name: one for the whole update, or one for each token, [K]."""


def bapo(
    tokens: BatchTokens,
    rng: np.random.Generator,
    *,
    clip_low: float,
    clip_high: float,
    most_low: float = 0.9,
    most_high: float = 3.0,
    low_step: float = 0.02,
    high_step: float = 0.05,
    positive_share: float = 0.4,
) -> Statistics:
    """Finds BAPO's clip bounds: they widen until tokens of positive advantage make up enough of the objective.

    A token contributes min(r, high) A if A >= 0, else max(r, low) A. While the positive part is less than
    `positive_share` of the sum of absolute contributions, the lower bound rises by `low_step` up to `most_low`. Then
    the upper bound rises by `high_step` up to `most_high`.

    Args:
      tokens: tokens of the update.
      rng: unused.
      clip_low: the lower bound starts at 1 - clip_low; the paper starts at 0.6.
      clip_high: the upper bound starts at 1 + clip_high; the paper starts at 1.2.
      most_low: largest lower bound.
      most_high: largest upper bound.
      low_step: step of the lower bound.
      high_step: step of the upper bound.
      positive_share: wanted share of positive contributions, from 0 to 1.

    Returns:
      `low` and `high`, the bounds of the ratio.

    References:
      Xi et al., arXiv 2510.18927, algorithm 1. The order of the two bounds is that of the authors' code.
    """
    del rng
    ratio_K = np.exp(np.clip(tokens.log_ratio_K.astype(np.float64), -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    advantages_K = tokens.advantages_K.astype(np.float64)

    def lacks(low: float, high: float) -> bool:
        effective_K = np.where(advantages_K >= 0, np.minimum(ratio_K, high), np.maximum(ratio_K, low)) * advantages_K
        positive, negative = effective_K.clip(min=0).sum(), -effective_K.clip(max=0).sum()
        return bool(negative > 0 and positive < positive_share * (positive + negative))

    low, high = 1.0 - clip_low, 1.0 + clip_high
    while lacks(low, high) and low < most_low:
        low = min(low + low_step, most_low)
    while lacks(low, high) and high < most_high:
        high = min(high + high_step, most_high)
    return {"low": low, "high": high}


def _covariances(tokens: BatchTokens) -> np.ndarray:
    """Returns each token's part of the covariance of advantage and log-probability, [K]."""
    advantages_K, log_probs_K = tokens.advantages_K.astype(np.float64), tokens.log_probs_K.astype(np.float64)
    return (advantages_K - advantages_K.mean()) * (log_probs_K - log_probs_K.mean())


def clip_cov(
    tokens: BatchTokens,
    rng: np.random.Generator,
    *,
    clip_low: float,
    clip_high: float,
    share: float = 0.0002,
    least: float = 1.0,
    most: float = 5.0,
) -> Statistics:
    """Draws the tokens that Clip-Cov drops: of high covariance of advantage and log-probability, and not clipped.

    Args:
      tokens: tokens of the update.
      rng: draws among the candidates.
      clip_low: the lower bound of the ratio is 1 - clip_low.
      clip_high: the upper bound of the ratio is 1 + clip_high.
      share: share of all trained tokens that are dropped; at least one token if there is a candidate.
      least: covariance above which a token is a candidate.
      most: covariance below which a token is a candidate.

    Returns:
      `dropped`: 1 for each dropped token, else 0; [K].

    References:
      Cui et al., arXiv 2505.22617, eq. 10 to 12; verl's `compute_policy_loss_clip_cov`.
    """
    if not len(tokens.advantages_K):
        return {"dropped": np.zeros(0, np.float32)}
    covariance_K, advantages_K = _covariances(tokens), tokens.advantages_K
    ratio_K = np.exp(np.clip(tokens.log_ratio_K, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    clipped_K = -advantages_K * ratio_K.clip(1 - clip_low, 1 + clip_high) > -advantages_K * ratio_K
    candidates = np.flatnonzero((covariance_K > least) & (covariance_K < most) & ~clipped_K)
    count = min(max(int(share * len(advantages_K)), 1), len(candidates))
    dropped_K = np.zeros(len(advantages_K), np.float32)
    dropped_K[rng.choice(candidates, count, replace=False)] = 1.0
    return {"dropped": dropped_K}


def kl_cov(
    tokens: BatchTokens, rng: np.random.Generator, *, clip_low: float, clip_high: float, share: float = 0.0002
) -> Statistics:
    """Finds the tokens that KL-Cov penalises: the `share` of tokens with the highest covariance, at least one.

    Args:
      tokens: tokens of the update.
      rng: unused.
      clip_low: unused, as the loss has no clip.
      clip_high: unused.
      share: share of all trained tokens.

    Returns:
      `chosen`: 1 for each penalised token, else 0; [K].

    References:
      Cui et al., arXiv 2505.22617, eq. 13 and 14; verl's `compute_policy_loss_kl_cov`.
    """
    del rng, clip_low, clip_high
    chosen_K = np.zeros(len(tokens.advantages_K), np.float32)
    if len(chosen_K):
        # Stable, so that every process chooses the same among equals.
        order = np.argsort(-_covariances(tokens), kind="stable")
        chosen_K[order[: max(1, int(share * len(chosen_K)))]] = 1.0
    return {"chosen": chosen_K}


NAMES = {"bapo": ("low", "high"), "clip_cov": ("dropped",), "kl_cov": ("chosen",)}
"""Names of the statistics of each loss that takes any."""

PREFIX = "statistic/"
"""Prefix of a statistic's name among the arrays of a micro-batch."""

OF_THE_LOSS = {"kl_cov": ("coefficient",)}
"""Arguments of a loss that its statistics do not take."""


def find(config: config_lib.AlgorithmConfig) -> Callable[[BatchTokens, np.random.Generator], Statistics] | None:
    """Returns the statistics of the config's loss, with its arguments; None if it takes none.

    Raises:
      ConfigError: the statistics do not take `algorithm.loss_arguments`.
    """
    functions: dict[str, Callable[..., Statistics]] = {"bapo": bapo, "clip_cov": clip_cov, "kl_cov": kl_cov}
    function = functions.get(config.loss)
    if function is None:
        return None
    arguments = {
        name: value for name, value in config.loss_arguments.items() if name not in OF_THE_LOSS.get(config.loss, ())
    }
    bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    resolving.check_arguments(
        function, config.loss, {"tokens": None, "rng": None, **bounds, **arguments}, "algorithm.loss_arguments"
    )
    return functools.partial(function, **bounds, **arguments)
