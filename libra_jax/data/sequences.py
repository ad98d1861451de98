"""Sequences to train on: the per-token arrays of trajectories, with every number checked.

Of a trajectory of several segments, the own tokens of the segments follow one another.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from libra_jax import protocols
from libra_jax.data import trees
from libra_jax.models import config as model_config


@dataclass(frozen=True)
class Example:
    """A training sequence of N tokens.

    Attributes:
      sequence_id: names the sequence in errors.
      tokens_N: int32 token ids.
      mask_N: True for each token whose prediction is trained; the first token has no prediction.
      behaviour_N: float32 log-probability under the policy that sampled the token; 0 if no policy sampled it.
      on_version_N: True for each token sampled by the version that trains.
      routing_RxW: experts of R tokens, unsigned, layers first; None: no token's are known.
      routed_R: indices of these tokens; None: the first R.
      tree: segments of the rollout, whose own tokens follow one another; None: it has one. Their first own tokens are
        masked.
      outline: counts of a sequence whose tokens other processes train; the arrays are then empty.
    """

    sequence_id: str
    tokens_N: np.ndarray
    mask_N: np.ndarray
    behaviour_N: np.ndarray
    on_version_N: np.ndarray
    routing_RxW: np.ndarray | None = None
    routed_R: np.ndarray | None = None
    tree: trees.Tree | None = None
    outline: protocols.Outline | None = None

    @property
    def columns(self) -> int:
        """Number of columns without a tree: the predictions up to the last trained prediction; 0 without any."""
        if self.outline is not None:
            return self.outline.columns
        return columns_of(self.mask_N)

    @property
    def trained(self) -> int:
        """Number of trained predictions."""
        return int(np.count_nonzero(self.mask_N[1:])) if self.outline is None else self.outline.trained

    @property
    def routed(self) -> bool:
        """Whether experts of some of the tokens are known."""
        return self.routing_RxW is not None if self.outline is None else self.outline.routed

    def layouts(self, longest: int) -> Sequence[trees.Layout | trees.Path]:
        """Returns the sequences that hold the trained predictions: one, the parts of a tree, or none.

        Args:
          longest: columns of the longest row; only a path may need more.
        """
        if self.tree is not None:
            return trees.lay_out(self.tree, self.mask_N, longest)
        return [trees.Path(columns)] if (columns := self.columns) else []

    @property
    def prompt(self) -> np.ndarray | None:
        """Tokens before the first trained one; None if rollouts cannot share two of them or more."""
        if self.tree is not None or not self.columns:
            return None
        prompt_P = self.tokens_N[: 1 + int(np.argmax(self.mask_N[1:]))]
        return prompt_P if len(prompt_P) > 1 else None


def columns_of(mask_N: np.ndarray) -> int:
    """Returns the number of predictions up to the last trained one, 0 without any, from a plain sequence's mask."""
    # Column j - 1 predicts token j, so the index of the last trained token is the number of columns.
    trained_N = mask_N[1:]
    return len(trained_N) - int(trained_N[::-1].argmax()) if trained_N.any() else 0


def examples(
    trajectories: Sequence[protocols.Trajectory],
    policy_version: int,
    model: model_config.TransformerConfig,
    masked: Sequence[bool] | None = None,
) -> list[Example]:
    """Makes the per-token arrays of each trajectory.

    Args:
      trajectories: trajectories to train on.
      policy_version: version that trains. Tokens sampled by this version are `on_version`.
      model: shape of the model.
      masked: True for each trajectory whose tokens are all left out of the loss; None masks none.

    Raises:
      DataError: a trajectory's columns differ in length, a token is outside the vocabulary, a log-probability is not a
        number, its experts are not the model's, or its segments do not fit together; the message names the trajectory.
    """
    result = []
    for trajectory, out in zip(trajectories, masked or [False] * len(trajectories), strict=True):
        name, segments = trajectory.trajectory_id, trajectory.segments
        if trajectory.outline is not None:
            result.append(of_outline(trajectory))
            continue
        for segment in segments:
            columns = (segment.token_ids, segment.loss_mask, segment.log_probs, segment.policy_versions)
            if len(lengths := {len(column) for column in columns}) > 1:
                raise protocols.DataError(
                    f"trajectory {segment.name}: its columns have different lengths {sorted(lengths)}."
                )
        routing_RxW, routed_R = _routing(segments, model)
        example = Example(
            sequence_id=name,
            tokens_N=joined([segment.token_ids for segment in segments], np.int32),
            mask_N=joined([segment.loss_mask for segment in segments], bool),
            behaviour_N=joined([segment.log_probs for segment in segments], np.float32),
            on_version_N=joined([segment.policy_versions for segment in segments], np.int64) == policy_version,
            routing_RxW=routing_RxW,
            routed_R=routed_R,
            tree=trees.of_segments(segments) if len(segments) > 1 else None,
        )
        if example.tree is not None:
            # No column predicts the first own token of a segment (`protocols.Segment`).
            starts = [start for start in example.tree.starts[:-1] if start < len(example.mask_N)]
            example.mask_N[starts] = False
        # No device raises an error for a token outside the embedding table.
        if len(example.tokens_N) and not 0 <= example.tokens_N.min() <= example.tokens_N.max() < model.vocab_size:
            raise protocols.DataError(
                f"trajectory {name}: holds a token id outside the model's vocabulary of {model.vocab_size}; tokenizer "
                "and model do not belong together."
            )
        if not np.isfinite(example.behaviour_N).all():
            raise protocols.DataError(f"trajectory {name}: the engine returned a log-probability that is not a number.")
        example.mask_N[:] &= not out
        result.append(example)
    return result


def of_outline(trajectory: protocols.Trajectory) -> Example:
    """Returns the sequence of a trajectory whose tokens another process trains."""
    return Example(
        trajectory.trajectory_id,
        tokens_N=np.zeros(0, np.int32),
        mask_N=np.zeros(0, bool),
        behaviour_N=np.zeros(0, np.float32),
        on_version_N=np.zeros(0, bool),
        outline=trajectory.outline,
    )


def joined(columns: Sequence[array[Any]], dtype: Any) -> np.ndarray:
    """Returns a column of each segment as one array, which shares no memory with them."""
    if len(columns) == 1:
        return np.array(columns[0], dtype)
    return np.concatenate([np.asarray(column) for column in columns]).astype(dtype, copy=False)


def _routing(
    segments: Sequence[protocols.Segment], model: model_config.TransformerConfig
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns the experts of a rollout's tokens, [R, W], and these tokens, [R]; None for its first tokens or none."""
    experts, tokens, start = [], [], 0
    for segment in segments:
        if (of_segment := _segment_routing(segment, model)) is not None:
            experts.append(of_segment)
            tokens.append(start + np.arange(len(of_segment)))
        start += len(segment.token_ids)
    if not experts:
        return None, None
    return (experts[0], None) if len(segments) == 1 else (np.concatenate(experts), np.concatenate(tokens))


def _segment_routing(segment: protocols.Segment, model: model_config.TransformerConfig) -> np.ndarray | None:
    """Returns the experts of a segment's first own tokens, or None if it has none. See `_routing`."""
    if not segment.routing:
        return None
    name, dtype = segment.name, np.dtype(model.routing_dtype)
    width = model.routing_width * dtype.itemsize
    if len(segment.routing) > len(segment.token_ids) or {*map(len, segment.routing)} != {width}:
        raise protocols.DataError(
            f"trajectory {name}: the engine returned experts for {len(segment.routing)} of its "
            f"{len(segment.token_ids)} tokens, of {sorted({*map(len, segment.routing)})} bytes each; "
            f"the model's layers and experts take {width}."
        )
    found_RxW = np.frombuffer(b"".join(segment.routing), dtype).reshape(-1, model.routing_width)
    # By pairs of experts: sorting each token's takes ten times as long, and a batch may hold gigabytes.
    chosen_KxRxL = np.ascontiguousarray(np.moveaxis(found_RxW.reshape(len(found_RxW), model.num_layers, -1), -1, 0))
    for first, second in itertools.combinations(chosen_KxRxL, 2):
        if (same_RxL := first == second).any():
            # Rows of zeros, for one, which an engine returns where it has filled in nothing.
            token, layer = np.argwhere(same_RxL)[0]
            raise protocols.DataError(
                f"trajectory {name}: the engine returned an expert twice in layer {layer} of token {token}; each token "
                f"takes {model.experts_per_token} different experts of a layer."
            )
    if found_RxW.max() >= model.num_experts:
        raise protocols.DataError(
            f"trajectory {name}: the engine returned expert {found_RxW.max()}, and the model has {model.num_experts}."
        )
    return found_RxW
