"""Chooses the turns of a batch that are trained (`algorithm.entropy_share`).

Letters: N tokens of a trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def highest_entropy(
    behaviour: Sequence[np.ndarray], masks: Sequence[np.ndarray], groups: Sequence[int], share: float
) -> list[np.ndarray]:
    """Returns the masks of the tokens that stay trained: those of each group's turns of the highest entropy.

    A turn is a run of trained tokens. Its entropy is estimated by the mean of -log π_b of its tokens, whose expectation
    is the mean entropy of the policy that sampled them. Of a group's m turns, the ceil(share x m) highest stay. Of
    equal ones, the first stay. Source: DART (arXiv 2509.23866).

    Args:
      behaviour: log-probability of each token under the policy that sampled it, [N] each.
      masks: true on trained tokens, [N] each.
      groups: number of each trajectory's group.
      share: share of the turns that stay, in (0, 1].

    Example:
      >>> masks = highest_entropy([np.array([0.0, -0.1, 0.0, -2.0])], [np.array([False, True, False, True])], [0], 0.5)
      >>> masks[0].tolist()
      [False, False, False, True]
    """
    # Entropy, trajectory, first token and end of each turn, by group.
    turns: dict[int, list[tuple[float, int, int, int]]] = {}
    for index, (log_probs_N, mask_N, group) in enumerate(zip(behaviour, masks, groups, strict=True)):
        edges = np.flatnonzero(np.diff(mask_N.astype(np.int8), prepend=0, append=0))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            # In float64, so that the order does not depend on how a float32 sum is split.
            surprise = -float(np.mean(log_probs_N[start:end], dtype=np.float64))
            turns.setdefault(group, []).append((surprise, index, start, end))
    selected_masks = [np.zeros_like(mask_N) for mask_N in masks]
    for group_turns in turns.values():
        # The small number undoes rounding: 0.8 x 5 turns are 4 turns.
        count = math.ceil(share * len(group_turns) - 1e-9)
        for _, index, start, end in sorted(group_turns, key=lambda turn: -turn[0])[:count]:
            selected_masks[index][start:end] = True
    return selected_masks
