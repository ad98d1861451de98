"""Prefix trees over causal states: how many tokens are left to generate, seen from a path (arXiv 2606.03077, sec. 4).

A node stands for a path. It holds a window of the latest *samples*: the generated tokens from there to the end of a
finished trajectory. A new sample displaces the oldest of a full window. A sample loses half its weight with every
`half_life` trajectories that the tree has seen since, so statistics follow a policy that drifts. The number of nodes
is capped: the least recently used path goes first. A parent always counts as used more recently than its children, so
what goes is always a leaf.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LEVELS: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.875, 0.975)
"""Probabilities at which a sketch samples a distribution: the midpoints of strata with these `MASSES`."""

MASSES: tuple[float, ...] = (0.2, 0.2, 0.2, 0.2, 0.15, 0.05)
"""Probability mass of each point of a sketch; the upper tail is cut finer, because it decides a step's length."""

Sketch = tuple[float, ...]
"""Tokens at each of `LEVELS`, ascending."""


SETTLED_SAMPLES = 64
"""A node with fewer samples changes with each of them."""


class PathNode:
    """One path's statistics. Reading them costs a sort only after the window has changed.

    Attributes:
      samples: the window, in tokens; a full one is overwritten in a ring.
      stamp: number of the tree's trajectory that gave the latest sample.
      mass: weight of its samples as of `stamp`.
      blend: the node's sketch blended with the evidence behind it, as `evidence.Evidence` keeps it.
      due: the tree's clock at which `blend` is to be renewed; a sample makes it due while the node has few.
    """

    __slots__ = (
        "_changes",
        "_next",
        "_ordered",
        "_sketch",
        "blend",
        "children",
        "due",
        "edge",
        "mass",
        "parent",
        "samples",
        "stamp",
    )

    def __init__(self, edge: Hashable = None, parent: PathNode | None = None) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[Hashable, PathNode] | None = None
        self.samples: list[int] = []
        self.stamp = 0
        self.mass = 0.0
        self._next = 0
        self._changes = 0
        self._ordered: list[int] | None = None
        self._sketch: Sketch = ()
        self.blend: Sketch = ()
        self.due = 0

    def add(self, sample: int, window: int, stamp: int, half_life: float) -> None:
        """Adds a sample (tokens) of the tree's trajectory number `stamp`; the oldest leaves a full window."""
        samples, ordered = self.samples, self._ordered
        mass = self.mass
        if stamp != self.stamp:  # earlier samples are discounted to the present before this one counts 1
            mass *= 0.5 ** ((stamp - self.stamp) / half_life)
            self.stamp = stamp
        if (count := len(samples)) < window:
            samples.append(sample)
            self.mass = mass + 1.0
            if count < SETTLED_SAMPLES:
                self.due = 0  # the blend is renewed at the next prediction
        else:
            if ordered is not None:
                del ordered[bisect.bisect_left(ordered, samples[self._next])]
            samples[self._next] = sample
            self._next = (self._next + 1) % window
            # No window weighs more than the samples that it holds.
            self.mass = mass + 1.0 if mass + 1.0 < window else float(window)
        self._changes += 1
        if ordered is not None:
            bisect.insort(ordered, sample)

    @property
    def oldest_first(self) -> list[int]:
        """The window in the order in which its samples came."""
        return self.samples[self._next :] + self.samples[: self._next]

    @property
    def mean(self) -> float:
        """Mean of the window, in tokens; 0.0 of an empty one."""
        return sum(self.samples) / len(self.samples) if self.samples else 0.0

    def ordered(self) -> list[int]:
        """Returns the window in ascending order; the caller must not change it."""
        if self._ordered is None:
            self._ordered = sorted(self.samples)
        return self._ordered

    def quantile(self, level: float) -> int:
        """Returns the nearest-rank quantile of the window, in tokens; 0 of an empty one."""
        ordered = self.ordered()
        return ordered[max(0, math.ceil(level * len(ordered)) - 1)] if ordered else 0

    def above(self, tokens: float) -> float:
        """Returns the share of the window above `tokens`, no less than half a sample: unseen is not impossible."""
        ordered = self._ordered or self.ordered()  # mostly sorted already, and then a call would cost the most
        count = len(ordered)
        return (count - bisect.bisect_right(ordered, tokens) or 0.5) / count if count else 1.0

    def sketch(self, after: int = 0) -> Sketch:
        """Returns quantiles at `LEVELS` of what is left `after` tokens later; empty if no sample lasted that long."""
        if after:
            ordered = self._ordered or self.ordered()
            shorter = bisect.bisect_right(ordered, after)
            count = len(ordered) - shorter
            if not count:
                return ()
            return tuple([float(ordered[shorter + max(0, math.ceil(level * count) - 1)] - after) for level in LEVELS])
        # At the start they may lag behind by 1 / 8 of the window, which spares a sort a sample.
        if self.samples and (not self._sketch or self._changes * 8 > len(self.samples)):
            self._changes = 0
            self._sketch = sketch_of(self.ordered())
        return self._sketch


def sketch_of(ordered: Sequence[float]) -> Sketch:
    """Returns the nearest-rank quantiles at `LEVELS` of an ascending sequence that is not empty."""
    count = len(ordered)
    return tuple(float(ordered[max(0, math.ceil(level * count) - 1)]) for level in LEVELS)


@dataclass(eq=False)
class PrefixTree:
    """A tree of `PathNode`s with a cap on their number.

    Attributes:
      window: samples that a node keeps.
      root_window: samples that the root keeps; 0 takes `window`.
      nodes: most nodes, the root included.
      depth: most edges of a path; deeper states are evidence of their ancestors only.
      half_life: trajectories after which evidence that was not renewed weighs half.
      root: the node of the empty path.
      clock: number of trajectories added.
    """

    window: int = 200
    nodes: int = 50_000
    depth: int = 16
    half_life: float = 4096.0
    root_window: int = 0
    root: PathNode = field(default_factory=PathNode, init=False)
    clock: int = field(default_factory=int, init=False)
    # The least recently used first; the root is never evicted.
    _used: OrderedDict[PathNode, None] = field(default_factory=OrderedDict, init=False)

    def __len__(self) -> int:
        return len(self._used) + 1

    def add(self, path: Sequence[Hashable], remaining: Sequence[int]) -> None:
        """Adds one trajectory: `remaining[i]` tokens were left after the first i edges of `path` (i = 0: at the start).

        Args:
          path: edges in order; what lies below the tree's depth is ignored.
          remaining: one more entry than `path` has edges.
        """
        self.clock += 1
        node, window, clock, half_life = self.root, self.window, self.clock, self.half_life
        node.add(remaining[0], self.root_window or window, clock, half_life)
        for edge, sample in zip(path[: self.depth], remaining[1:], strict=False):
            node = self._child(node, edge)
            node.add(sample, window, clock, half_life)
        self.use(node)
        self._shrink()

    def add_below(self, path: Sequence[Hashable], sample: int) -> None:
        """Adds one sample to every node of a path but the root: more evidence of the trajectory added last."""
        node, window, clock, half_life = self.root, self.window, self.clock, self.half_life
        for edge in path[: self.depth]:
            child = node.children.get(edge) if node.children else None
            node = child or self._child(node, edge)
            node.add(sample, window, clock, half_life)
        self.use(node)
        self._shrink()

    def find(self, path: Sequence[Hashable]) -> tuple[PathNode, int]:
        """Returns the deepest known node on the path and its depth; depth 0 is the root. It does not count as used."""
        node, depth = self.root, 0
        for edge in path:
            if not (children := node.children) or (child := children.get(edge)) is None:
                break
            node, depth = child, depth + 1
        return node, depth

    def weight(self, node: PathNode) -> float:
        """Returns the number of samples of the node, each discounted for its age."""
        age = self.clock - node.stamp
        return node.mass * 0.5 ** (age / self.half_life) if age else node.mass

    def merge(self, other: PrefixTree) -> None:
        """Adds another tree's samples, as if they had been seen here first, at the age that they have there.

        A full window keeps our own samples. If there are too many nodes, those that only the other tree has go first.
        Merging the same tree twice counts its samples twice.
        """
        ours, clock = list(self._used), max(self.clock, other.clock)
        for node in [self.root, *ours]:
            node.stamp += clock - self.clock
            node.due = 0
        self.clock = clock
        for node in [*other._used, other.root]:  # the least recently used first, so that the order of use is kept
            path: list[Hashable] = []
            step = node
            while step.parent is not None:
                path.append(step.edge)
                step = step.parent
            path.reverse()
            mine = self.root
            for edge in path[: self.depth]:
                mine = self._child(mine, edge)
            if len(path) <= self.depth:
                weight = min(float(self._window_of(mine)), self.weight(mine) + other.weight(node))
                both = (node.oldest_first + mine.oldest_first)[-self._window_of(mine) :]
                stamp = max(node.stamp + clock - other.clock, mine.stamp)
                self._fill(mine, both, stamp, weight * 2.0 ** ((clock - stamp) / self.half_life))
            self.use(mine)
        # Ours go last, in their former order, so that nodes of the other tree alone are evicted first.
        for node in ours:
            self._used.move_to_end(node)
        self._shrink()

    def snapshot(self) -> dict[str, Any]:
        """Returns JSON-able state: nodes with parents before children, in order of use.

        Each is [place of its parent, edge, samples with the oldest first, stamp, weight then].
        """
        order = list(reversed(self._used))  # the most recently used first, so parents come before their children
        places = {self.root: 0, **{node: place for place, node in enumerate(order, start=1)}}
        nodes: list[Any] = [[-1, None, self.root.oldest_first, self.root.stamp, self.root.mass]]
        for node in order:
            assert node.parent is not None
            edge = list(node.edge) if isinstance(node.edge, tuple) else node.edge
            nodes.append([places[node.parent], edge, node.oldest_first, node.stamp, node.mass])
        return {"clock": self.clock, "nodes": nodes}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replaces the state by a snapshot's; windows and caps stay this tree's."""
        self.root, self.clock = PathNode(), int(snapshot["clock"])
        self._used.clear()
        nodes: list[PathNode] = []
        for parent, edge, samples, stamp, mass in snapshot["nodes"]:
            # JSON has lists where edges are tuples, which a dict needs as keys.
            node = (
                self.root if parent < 0 else self._child(nodes[parent], tuple(edge) if isinstance(edge, list) else edge)
            )
            self._fill(node, samples[-self._window_of(node) :], stamp, mass)
            nodes.append(node)
        # A snapshot lists the most recently used first.
        for node in reversed(nodes[1:]):
            self._used.move_to_end(node)
        self._shrink()

    def _fill(self, node: PathNode, samples: Iterable[int], stamp: int, mass: float) -> None:
        """Replaces a node's samples by these, the oldest first."""
        node.samples, node._next, node._sketch, node._ordered = [], 0, (), None
        window = self._window_of(node)
        for sample in samples:
            node.add(sample, window, stamp, self.half_life)
        node.stamp, node.mass = stamp, mass

    def _window_of(self, node: PathNode) -> int:
        return self.root_window or self.window if node is self.root else self.window

    def _child(self, node: PathNode, edge: Hashable) -> PathNode:
        if node.children is None:
            node.children = {}
        child = node.children.get(edge)
        if child is None:
            child = node.children[edge] = PathNode(edge, node)
            self._used[child] = None
        return child

    def use(self, node: PathNode) -> None:
        """Marks the node and those above it as the most recently used."""
        # From the leaf upwards, so that a parent always counts as used later than its children (`_shrink`).
        move, parent = self._used.move_to_end, node.parent
        while parent is not None:
            move(node)
            node, parent = parent, parent.parent

    def _shrink(self) -> None:
        while len(self._used) >= self.nodes:
            # A leaf: its children would be older still (`use`), and would have gone before.
            node, _ = self._used.popitem(last=False)
            parent = node.parent
            assert parent is not None
            assert parent.children is not None
            del parent.children[node.edge]
