"""C-MLFQ as published (arXiv 2606.03077, section 4): one jump to the bucket on which mean and P90 agree.

A request starts in the narrowest bucket. At a tool return the deepest known node on its path is looked up, in its
prompt's tree first, then in the one of all prompts; if the mean and the 90th percentile of the remaining tokens there
fall into the same bucket, and it is not the present one, the request goes there; else it stays, and waits for the
instance that holds its context. Where the narrowest bucket is full, a new request starts in the nearest that is not: it
has no context yet that a wait could spare. So a slot may idle only while requests wait for their own context, and none
waits longer than `scheduler.ageing_seconds` for one that is free.

"Known" takes `KNOWN_SAMPLES`: of one or two, mean and percentile agree whatever they say, and a request would follow a
single sibling, there and back at each return. The number is ours, set with the published figures for search in view.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.scheduling import buckets, causal, evidence, prefix_tree, slots, state

KNOWN_SAMPLES = 10
"""Samples of a known node: of fewer, the 90th percentile is the largest."""


class CmlfqPaper(slots.SlotScheduler):
    """The published rule and nothing else."""

    by_length = True

    def __init__(self, config: configuration.SchedulerConfig, *, degrees: Sequence[int] = ()) -> None:
        super().__init__(config, bounds=config.max_remaining_tokens, degrees=degrees)
        limits = config.window, config.tree_nodes
        self.by_prompt = prefix_tree.PrefixTree(*limits, config.path_depth + 1, config.half_life)
        self.shared = prefix_tree.PrefixTree(*limits, config.path_depth, config.half_life)

    def arrived(self, request: state.Request, now: float) -> None:
        request.track = evidence.Track(request.prompt_id, evidence.Prompt(), request.generated_tokens)
        request.remaining = float(request.generated_tokens)

    def returned(self, request: state.Request, causal_state: protocols.CausalState) -> None:
        track = request.track
        assert track is not None
        track.path.append(causal.key(causal_state))
        track.marks.append(request.generated_tokens)
        node, depth = _known(self.by_prompt, (track.prompt_id, *track.path))
        if depth < 2:  # the prompt is known at most, nothing of the path
            node, depth = _known(self.shared, track.path)
            if not depth:
                return
        request.remaining = node.mean
        bucket = self.levels.of_length(node.mean)
        if bucket == self.levels.of_length(node.quantile(0.9)):
            request.level = bucket

    def route(self, request: state.Request, now: float) -> int:
        level = min(request.level, len(self.buckets) - 1)
        request.wanted = self.home(request, level)
        return level

    def serves(self, bucket: buckets.Bucket, request: state.Request) -> bool:
        return not request.last

    def seated(self, request: state.Request, server: state.Server) -> None:
        request.level = server.level

    def finished(self, request: state.Request, completed: bool) -> None:
        track, total = request.track, request.generated_tokens
        assert track is not None
        if track.start or not total or not completed:
            return
        remaining = [total, *(total - mark for mark in track.marks)]
        self.by_prompt.add((track.prompt_id, *track.path), (total, *remaining))
        self.shared.add(track.path, remaining)

    def snapshot(self) -> Mapping[str, Any]:
        return {"by_prompt": self.by_prompt.snapshot(), "shared": self.shared.snapshot()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        if "by_prompt" in snapshot:
            self.by_prompt.restore(snapshot["by_prompt"])
        if "shared" in snapshot:  # a run may change its policy, and other policies keep other statistics
            self.shared.restore(snapshot["shared"])

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        other = CmlfqPaper(self.config)
        other.restore(snapshot)
        self.by_prompt.merge(other.by_prompt)
        self.shared.merge(other.shared)


def _known(tree: prefix_tree.PrefixTree, path: Sequence[Hashable]) -> tuple[prefix_tree.Node, int]:
    """The deepest node on the path that has enough samples, and its depth; depth 0 is the root."""
    node, depth = tree.find(path)
    while node.parent is not None and node.count < KNOWN_SAMPLES:
        node, depth = node.parent, depth - 1
    return node, depth
