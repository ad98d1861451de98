"""Statistics of an update's trained tokens, as losses over a whole update take them (`batch_statistics`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from libra_jax.algorithms import batch_statistics
from libra_jax.data import packing


def added(
    statistics: Callable[[batch_statistics.BatchTokens, np.random.Generator], batch_statistics.Statistics],
    packed: packing.Packed,
    extras: Sequence[Mapping[str, Any]],
    part: range,
    log_probs: Iterable[np.ndarray],
    anchors: Iterable[np.ndarray] | None,
    rng: np.random.Generator,
) -> Sequence[Mapping[str, Any]]:
    """Returns `extras` with the statistics of an update's trained tokens.

    Args:
      statistics: makes them of the tokens, in the order of the batch.
      part: the update's micro-batches.
      log_probs: [B, T] arrays of the policy as it is now, one for each micro-batch of `part`.
      anchors: [B, T] arrays of the policy that ratios are taken to; None: it is the policy as it is now.
      rng: the same in every process, and after a restart.
    """
    masks = [packed.micro_batches[index].mask for index in part]
    # Draws and ties go by the order of tokens, so it is the batch's: that of a layout would change the loss.
    order_K = packed.batch_order(part)

    def trained(arrays: Iterable[Any]) -> np.ndarray:
        of_layout = [np.asarray(array)[mask] for array, mask in zip(arrays, masks, strict=True)]
        return np.concatenate(of_layout)[order_K]

    log_probs_K = trained(log_probs)
    anchors_K = log_probs_K if anchors is None else trained(anchors)
    advantages_K = trained(extras[index]["advantages"] for index in part)
    tokens = batch_statistics.BatchTokens(log_probs_K, log_probs_K - anchors_K, advantages_K)
    layout_K = np.argsort(order_K)
    of_layout = {
        name: value[layout_K] if isinstance(value, np.ndarray) else value
        for name, value in statistics(tokens, rng).items()
    }
    ends, more = np.cumsum([int(mask.sum()) for mask in masks]), list(extras)
    for index, mask, end in zip(part, masks, ends, strict=True):
        arrays = {name: np.zeros(mask.shape, np.float32) for name in of_layout}
        for name, value in of_layout.items():
            arrays[name][mask] = value[end - int(mask.sum()) : end] if isinstance(value, np.ndarray) else value
        more[index] = {**extras[index], **{batch_statistics.PREFIX + name: array for name, array in arrays.items()}}
    return more
