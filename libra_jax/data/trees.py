"""Lays the segments of a rollout out as a tree, so that shared tokens are computed once.

A segment begins with a part of its parent's context. The segments of a rollout therefore are a forest of tokens. It is
laid out depth first: at a fork, the children come before the rest of their parent. The subtree of a token is then a
run of columns that begins with the token, and a token attends to those before it whose subtree it is in. So one number
a column, the end of the token's subtree, replaces a mask of all pairs.

A forest that is longer than a row is split into parts. Each part holds some segments whole, and computes again what
they share with segments of other parts. Each trained token is trained in one part. Numpy only, deterministic.

Letters: N own tokens of all segments, one segment after the other; S segments; C columns of a part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libra_jax.data import sequences as sequences_lib


def lay_out(tree: sequences_lib.Tree, mask_N: np.ndarray, longest: int) -> list[sequences_lib.ColumnLayout]:
    """Returns the parts of a tree, each of at most `longest` columns; none if nothing is trained.

    Columns without an effect are left out: those of a segment after its last trained token, and after the last token
    that a segment of the part shares. Segments fill the parts in order.

    Args:
      tree: the segments.
      mask_N: true on trained tokens; false on each segment's first own token, which no column predicts.
      longest: most columns of a part. A single segment that needs more has a part of its own, which is longer.
    """
    parts: list[tuple[dict[int, int], set[int]]] = [({}, set())]
    columns = 0
    for segment, count in trained_columns(tree, mask_N).items():
        needed, trained_segments = parts[-1]
        grown = _grown(tree, segment, count, needed)
        if trained_segments and columns + sum(grown.values()) > longest:
            needed, trained_segments, columns = {}, set(), 0
            parts.append((needed, trained_segments))
            grown = _grown(tree, segment, count, needed)
        for part, more in grown.items():
            needed[part] = needed.get(part, 0) + more
        trained_segments.add(segment)
        columns += sum(grown.values())
    return [_part(tree, needed, trained_segments) for needed, trained_segments in parts if trained_segments]


def trained_columns(tree: sequences_lib.Tree, mask_N: np.ndarray) -> dict[int, int]:
    """Returns the own columns that each segment with a trained token needs for its own tokens, in segment order."""
    trained, starts = np.flatnonzero(mask_N), np.array(tree.starts)
    segments = np.searchsorted(starts, trained, side="right") - 1
    # Column j predicts token j + 1, so the index of the last trained token, which comes last here, is the number.
    return dict(zip(segments.tolist(), (trained - starts[segments]).tolist(), strict=True))


def shared_columns(
    tree: sequences_lib.Tree, mask_N: np.ndarray, layouts: Sequence[sequences_lib.ColumnLayout | sequences_lib.Path]
) -> int:
    """Returns the columns that the segments would take in addition if each one computed its whole context."""
    separate_columns = sum(tree.shared[segment] + count for segment, count in trained_columns(tree, mask_N).items())
    return separate_columns - sum(layout.columns for layout in layouts)


def _grown(tree: sequences_lib.Tree, segment: int, count: int, present_columns: dict[int, int]) -> dict[int, int]:
    """Returns the columns that a part needs in addition to `present_columns`, of a segment and its ancestors."""
    added_columns: dict[int, int] = {}
    while count > present_columns.get(segment, 0):
        added_columns[segment] = count - present_columns.get(segment, 0)
        if tree.parents[segment] == sequences_lib.NONE:
            break
        segment, count = tree.parents[segment], tree.fork(segment)
    return added_columns


def _part(tree: sequences_lib.Tree, needed: dict[int, int], trained_segments: set[int]) -> sequences_lib.ColumnLayout:
    """Lays out the first columns of each segment in `needed`, and trains those of `trained_segments`."""
    runs, ends, column = _runs(tree, needed), {}, 0
    inputs, targets, positions = [], [], []
    for segment, first, end in runs:
        column += end - first
        ends[segment] = column
        index_C = np.arange(tree.starts[segment] + first, tree.starts[segment] + end, dtype=np.int32)
        # After the last own token, another segment's tokens follow.
        trains = (segment in trained_segments) & (index_C + 1 < tree.starts[segment + 1])
        inputs.append(index_C)
        targets.append(np.where(trains, index_C + 1, np.int32(sequences_lib.NONE)))
        positions.append(np.arange(first, end, dtype=np.int32) + np.int32(tree.shared[segment]))
    # A parent comes before its children, so theirs are known first.
    for segment in sorted(needed, reverse=True):
        if (parent := tree.parents[segment]) != sequences_lib.NONE:
            ends[parent] = max(ends[parent], ends[segment])
    until_C = np.concatenate([np.full(end - first, ends[segment], np.int32) for segment, first, end in runs])
    return sequences_lib.ColumnLayout(
        np.concatenate(inputs),
        np.concatenate(targets),
        np.concatenate(positions),
        None if (until_C == column).all() else until_C,
    )


def _runs(tree: sequences_lib.Tree, needed: dict[int, int]) -> list[tuple[int, int, int]]:
    """Returns the runs of own tokens, depth first: segment, first own token, and end."""
    children: dict[int, list[int]] = {}
    for segment in sorted(needed):
        children.setdefault(tree.parents[segment], []).append(segment)
    runs: list[tuple[int, int, int]] = []
    # A stack and no recursion: a history that is rewritten again and again makes a long chain.
    stack: list[int | tuple[int, int, int]] = list(reversed(children[sequences_lib.NONE]))
    while stack:
        entry = stack.pop()
        if isinstance(entry, tuple):
            runs.append(entry)
            continue
        first = 0
        below: list[int | tuple[int, int, int]] = []
        # Sorting keeps the order of two children at one fork.
        for child in sorted(children.get(entry, ()), key=tree.fork):
            if (fork := tree.fork(child)) > first:
                below.append((entry, first, fork))
                first = fork
            below.append(child)
        if needed[entry] > first:
            below.append((entry, first, needed[entry]))
        stack += reversed(below)
    return runs
