"""Sequences to train on: the per-token arrays of trajectories, with every number checked.

Of a trajectory of several segments, the own tokens of the segments follow one another.

Letters: N tokens of a sequence, and of `BatchSequences` trajectories; C columns; R tokens with known experts.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import config as model_config

NONE = -1
"""Target of a column that trains no token, and parent of a segment that shares no token."""


@dataclass(frozen=True)
class Tree:
    """The segments of a rollout.

    Attributes:
      starts: index of each segment's first own token; and N.
      parents: index of each segment's parent, which comes before the segment; `NONE`: it shares no token.
      shared: number of tokens that each segment shares with its parent: the position of its first own token.
    """

    starts: tuple[int, ...]
    parents: tuple[int, ...]
    shared: tuple[int, ...]

    def fork(self, segment: int) -> int:
        """Returns the number of the parent's own tokens that a segment shares."""
        return self.shared[segment] - self.shared[self.parents[segment]]


@dataclass(frozen=True)
class ColumnLayout:
    """The columns of a sequence: of a plain rollout, a tree, or a part of a tree.

    Attributes:
      inputs_C: int32 index of each column's input token.
      targets_C: int32 index of the token whose prediction the column trains; `NONE` without one.
      positions_C: int32 position of the input token in its context.
      until_C: int32 end of the input token's subtree, a column of the sequence; None if the columns are one path, whose
        tokens all attend to all before them.
    """

    inputs_C: np.ndarray
    targets_C: np.ndarray
    positions_C: np.ndarray
    until_C: np.ndarray | None = None

    @property
    def columns(self) -> int:
        """C, the number of columns."""
        return len(self.inputs_C)

    @property
    def pairs(self) -> float:
        """Number of pairs of a query and a key that attention multiplies: half of all pairs of a path."""
        if self.until_C is None:
            return self.columns**2 / 2
        return float(np.sum(self.until_C - np.arange(self.columns) - 0.5))


@dataclass(frozen=True)
class Path:
    """The `ColumnLayout` of a plain sequence: column j holds token j, and trains token j + 1. Its arrays are made when
    read, because most of a batch's may belong to other processes."""

    columns: int
    until_C: None = None

    @property
    def inputs_C(self) -> np.ndarray:
        return np.arange(self.columns, dtype=np.int32)

    @property
    def targets_C(self) -> np.ndarray:
        return np.arange(1, self.columns + 1, dtype=np.int32)

    @property
    def positions_C(self) -> np.ndarray:
        return self.inputs_C

    @property
    def pairs(self) -> float:
        return self.columns**2 / 2


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
    tree: Tree | None = None
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


@dataclass(frozen=True)
class BatchSequences:
    """The sequences of a batch: what every stage of `batch.prepare` reads.

    Attributes:
      groups: whole groups.
      trajectories: trajectories of the groups, in order.
      examples: sequence of each trajectory.
      groups_N: number of each trajectory's group, int32.
      masked_N: True for trajectories left out of the loss (`TaskConfig.masks`); `Example.mask_N` excludes their tokens.
      truncated_N: True for trajectories that are trained without their reward (`TaskConfig.cuts`).
    """

    groups: Sequence[protocols.Group]
    trajectories: Sequence[protocols.Trajectory]
    examples: Sequence[Example]
    groups_N: np.ndarray
    masked_N: np.ndarray
    truncated_N: np.ndarray

    @classmethod
    def from_batch(
        cls, task: config_lib.TaskConfig, batch: protocols.TrainBatch, model: model_config.TransformerConfig
    ) -> BatchSequences:
        """Makes the sequences of a batch. See `examples`."""
        trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
        masked = [task.masks(trajectory.finish) for trajectory in trajectories]
        cut_off = [task.cuts(trajectory.finish) for trajectory in trajectories]
        return cls(
            batch.groups,
            trajectories,
            examples(trajectories, batch.policy_version, model, masked),
            np.repeat(
                np.arange(len(batch.groups), dtype=np.int32), [len(group.trajectories) for group in batch.groups]
            ),
            np.array(masked, bool),
            np.array(cut_off, bool) & ~np.array(masked, bool),
        )


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
            tree=of_segments(segments) if len(segments) > 1 else None,
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


def of_segments(segments: Sequence[protocols.Segment]) -> Tree:
    """Returns the tree of a rollout's segments.

    Raises:
      DataError: a parent does not come before its segment, or a segment shares other tokens than its parent has. The
        message names the segment.
    """
    parents, shared = [], []
    for number, segment in enumerate(segments):
        parent = segment.parent
        if parent is None:
            fits = segment.shared == 0
        else:
            before = parent.index < number and segments[parent.index] is parent
            fits = before and parent.shared < segment.shared <= parent.context_tokens
        if segment.index != number or not fits:
            raise protocols.DataError(
                f"trajectory {segment.name}: segment {segment.index} at place {number} shares {segment.shared} tokens "
                f"with {'none' if parent is None else f'segment {parent.index}'}, which does not hold them."
            )
        parents.append(NONE if parent is None else parent.index)
        shared.append(segment.shared)
    starts = np.cumsum([0, *(len(segment.token_ids) for segment in segments)]).tolist()
    return Tree(tuple(starts), tuple(parents), tuple(shared))


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
