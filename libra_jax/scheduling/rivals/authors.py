"""C-MLFQ as its authors' code applies it (github.com/NetX-lab/Libra, commit c51bf84).

- A request starts in the first bucket. It goes to the instance of the bucket with the fewest live requests, if that
  has fewer than `max_residents`. Otherwise it goes to such an instance of another bucket, and otherwise to
  the instance with the fewest live requests of all. Tools do not interrupt a life. So the limit sends requests
  elsewhere and never makes one wait.
- Every turn goes to the request's instance, at any load. There it waits for a slot, first come, first served.
- At a tool return the path of causal states is looked up in the tree of the prompt if one of its rollouts has finished,
  otherwise in the tree of all prompts. The deepest known node counts, the root included, from one sample on. If the
  buckets of mean and P90 agree and are not the present one, the request is routed to that bucket at once.
- A path's lengths count what tools returned. Payloads have three sizes.

Published limits of live requests an instance: 3 (48 accelerators), 64 (most configs), 100 (default), 256. Different
here: the rollouts in all have no limit of their own, the engine's slots are those of the config, a request that has
waited for `scheduler.ageing_seconds` goes to any free slot, held-out rollouts do not teach, paths are known up to
`MOST_STATES` states, and trees are not built again from the latest 5,000 rollouts.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import buckets, requests, residents
from libra_jax.scheduling.prediction import paths

SMALL, MEDIUM = 500, 5_000
"""Largest payloads, in tokens, of the first two sizes (defaults of `cmlfq_tool_state.py`)."""

WINDOW = 200
"""Latest samples whose P90 counts."""

MOST_STATES = 64
"""Causal states of a path that the trees distinguish."""

MOST_PROMPTS = 4096
"""Prompts whose trees are kept; a run's oldest are dropped."""


@dataclass(slots=True, eq=False)
class Node:
    """What was left after one path: `count` and `total` of all samples, the latest `WINDOW`, and longer paths."""

    count: int = 0
    total: int = 0
    latest: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    children: dict[paths.Key, Node] = field(default_factory=dict)

    def add(self, sample: int) -> None:
        """Adds a sample."""
        self.count += 1
        self.total += sample
        self.latest.append(sample)

    @property
    def mean(self) -> float:
        """Mean of all samples."""
        return self.total / self.count

    @property
    def p90(self) -> float:
        """P90 of the latest samples, linear between neighbours."""
        if len(self.latest) == 1:
            return float(self.latest[0])
        return statistics.quantiles(self.latest, n=10, method="inclusive")[-1]

    def learn(self, path: Sequence[paths.Key], remaining: Sequence[int]) -> None:
        """Adds what was left at the start, and after each state of a path."""
        node = self
        node.add(remaining[0])
        for key, sample in zip(path[:MOST_STATES], remaining[1:], strict=False):
            node = node.children.setdefault(key, Node())
            node.add(sample)

    def deepest(self, path: Sequence[paths.Key]) -> Node:
        """Returns the node of the longest known beginning of a path."""
        node = self
        for key in path:
            if key not in node.children:
                break
            node = node.children[key]
        return node

    def snapshot(self) -> list[Any]:
        """Returns JSON-able statistics."""
        children = [[list(key), child.snapshot()] for key, child in self.children.items()]
        return [self.count, self.total, list(self.latest), children]

    def merge(self, snapshot: Sequence[Any]) -> None:
        """Adds the statistics of a snapshot."""
        count, total, latest, children = snapshot
        self.count += count
        self.total += total
        # Its own samples count as the latest.
        self.latest = deque([*latest, *self.latest], maxlen=WINDOW)
        for (tool, size, status), child in children:
            self.children.setdefault((tool, size, status), Node()).merge(child)


@dataclass(slots=True, eq=False)
class Track(paths.RequestTrack):
    """A path whose `marks` count what tools returned.

    Attributes:
      payload: tokens that tools have returned so far.
      level: bucket that the request is meant for, no matter which instance took it.
    """

    payload: int = 0
    level: int = 0


class Statistics:
    """The trees of each prompt and of all prompts: a `learning.PredictionLearner`."""

    def __init__(self) -> None:
        self.shared = Node()
        self.by_prompt: dict[str, Node] = {}

    def start(self, prompt_id: str, generated_tokens: int, segment: int = 0) -> paths.RequestTrack:
        """Returns the empty path of a request that has arrived. The segments of a rollout are requests like others."""
        return Track(prompt_id, paths.PromptPaths(), generated_tokens)

    def observe(self, track: paths.RequestTrack, causal_state: protocols.CausalState, generated_tokens: int) -> None:
        assert isinstance(track, Track)
        payload = causal_state.payload_tokens
        track.path.append((causal_state.tool, (payload > SMALL) + (payload > MEDIUM), causal_state.status))
        track.payload += payload
        track.marks.append(generated_tokens + track.payload)

    def finish(self, track: paths.RequestTrack, generated_tokens: int, *, learn: bool) -> None:
        """Ends a path; its length is evidence for others if `learn` and if a tool returned."""
        assert isinstance(track, Track)
        if track.start or not track.path or not learn:
            return
        remaining = track.remaining(generated_tokens + track.payload)
        self.shared.learn(track.path, remaining)
        prompt = str(track.place)
        tree = self.by_prompt.setdefault(prompt, Node())
        tree.learn(track.path, remaining)
        while len(self.by_prompt) > MOST_PROMPTS:
            del self.by_prompt[next(iter(self.by_prompt))]

    def deepest_node(self, track: paths.RequestTrack) -> Node | None:
        """Returns the deepest known node of the path; None if nothing has finished."""
        node = self.by_prompt.get(str(track.place), self.shared).deepest(track.path)
        return node if node.count else None

    def snapshot(self) -> Mapping[str, Any]:
        prompts = {name: tree.snapshot() for name, tree in self.by_prompt.items()}
        return {"authors_shared": self.shared.snapshot(), "authors_prompts": prompts}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        if "authors_shared" in snapshot:  # a run may change its policy, and other policies keep other statistics
            self.shared, self.by_prompt = Node(), {}
            self.merge(snapshot)

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        if "authors_shared" in snapshot:
            self.shared.merge(snapshot["authors_shared"])
            for name, tree in snapshot["authors_prompts"].items():
                self.by_prompt.setdefault(name, Node()).merge(tree)


class CmlfqAuthors(residents.ResidentScheduler):
    """See the module.

    Args:
      config: `max_remaining_tokens` applies here.
      kinds: kinds of the layout's instances, if they are known.
      max_residents: live requests at which an instance is full, those whose tools run included; 0: no limit.
    """

    by_length = True
    counts_residents = True

    def __init__(
        self, config: config_lib.SchedulerConfig, *, kinds: Sequence[protocols.Kind] = (), max_residents: int = 0
    ) -> None:
        self.statistics = Statistics()
        self._max_residents = max_residents
        super().__init__(config, kinds=kinds, learner=self.statistics)

    def route(self, request: requests.LiveRequest, now: float, *, returned: bool = False) -> int:
        track = request.track
        assert isinstance(track, Track)
        level = min(track.level, len(self.buckets) - 1)
        target = request.home
        if returned and (node := self.statistics.deepest_node(track)) is not None:
            request.remaining = node.mean
            meant = self.levels.of_length(node.mean)
            if meant == self.levels.of_length(node.p90) != level:
                level, target = meant, None
                track.level = level
        if target is None:
            target = self._least_live(level)
        if target is not None and target is not request.home:
            self.account(request, target)  # at once: its next turn, which may have to wait, counts there
        request.target = target
        return level

    def admits(self, request: requests.LiveRequest, server: buckets.InstanceQueue) -> bool:
        return True  # under any admission: the limit of residents, which `route` keeps, is its own

    def _least_live(self, level: int) -> buckets.InstanceQueue | None:
        """Returns the instance that a request meant for a bucket goes to; None without instances."""
        limit = self._max_residents
        other_buckets = [bucket for bucket in self.buckets if bucket.level != level]
        for bucket in [self.buckets[level], *other_buckets]:
            roomy = [server for server in bucket.servers if not limit or server.residents < limit]
            if roomy:
                return min(roomy, key=lambda server: (server.residents, server.place))
        return min(self.servers.values(), key=lambda server: (server.residents, server.place), default=None)
