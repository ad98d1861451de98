"""Rollouts of one prompt that follow each other in a batch, laid out so that the prompt is computed once
(`trainer.share_prompt`).

The rollouts are one tree: the prompt, and the answers. The last token of the prompt is computed for each answer,
because each answer begins with another token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libra_jax.data import sequences as sequences_lib


@dataclass(frozen=True)
class Bundled:
    """A rollout of a bundle that shares its prompt.

    Attributes:
      layout: columns of the rollout; of a bundle, the first rollout alone has those of the prompt.
      follows: whether the rollout goes right after the one before it in the bundle.
      saved: columns that the rollout would take in addition if it computed its prompt.
    """

    layout: sequences_lib.ColumnLayout
    follows: bool
    saved: int


def bundles(examples: Sequence[sequences_lib.Example], longest: int) -> dict[int, Bundled]:
    """Returns the rollouts that share a prompt with a neighbour, by index.

    Args:
      longest: columns of the longest row, which holds a whole bundle.
    """
    prompts, columns = [example.prompt for example in examples], [example.columns for example in examples]
    routing = [example.routing_RxW for example in examples]
    rollouts: list[list[int]] = []
    width = 0
    for index, prompt_P in enumerate(prompts):
        if prompt_P is None:
            continue
        suffix_width = columns[index] - (len(prompt_P) - 1)
        last = rollouts[-1][-1] if rollouts else index
        before_P, shared = prompts[last], len(prompt_P) - 1
        same = before_P is not None and np.array_equal(prompt_P, before_P)
        if last < index and same and width + suffix_width <= longest and _agree(routing[last], routing[index], shared):
            rollouts[-1].append(index)
            width += suffix_width
        else:
            rollouts.append([index])
            width = columns[index]
    bundled_rollouts: dict[int, Bundled] = {}
    for members in rollouts:
        prompt_P = prompts[members[0]]
        if len(members) == 1 or prompt_P is None:
            continue
        shared = len(prompt_P) - 1
        bundle_columns = shared + sum(columns[index] - shared for index in members)
        for index in members:
            layout, width = sequences_lib.Path(columns[index]), columns[index]
            if index == members[0]:
                until_C = np.full(width, width, np.int32)
                until_C[:shared] = bundle_columns
                bundled = sequences_lib.ColumnLayout(layout.inputs_C, layout.targets_C, layout.positions_C, until_C)
                bundled_rollouts[index] = Bundled(bundled, False, 0)
                continue
            until_C = np.full(width - shared, width - shared, np.int32)
            inputs_C, targets_C, positions_C = (
                part[shared:] for part in (layout.inputs_C, layout.targets_C, layout.positions_C)
            )
            bundled_rollouts[index] = Bundled(
                sequences_lib.ColumnLayout(inputs_C, targets_C, positions_C, until_C), True, shared
            )
    return bundled_rollouts


def _agree(first: np.ndarray | None, second: np.ndarray | None, tokens: int) -> bool:
    """Returns True if the first tokens of two rollouts have the same experts, or no known ones."""
    if first is None or second is None:
        return first is second
    return np.array_equal(first[:tokens], second[:tokens])
