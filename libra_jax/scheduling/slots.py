"""The base of every scheduler: which request waits where, which decodes where, which is away.

A policy answers four questions, each with a default here:
- `route`: which bucket is a request meant for, and which instance if it is to be a particular one?
- `pick`: which of the bucket's free instances takes it?
- `admits`: has an instance with a free slot room for it?
- `serves`: may a bucket whose own queue is empty serve a request that waits for another?
A policy that keeps accounts may extend the events and `seat`, calling the base class's own. What a policy knows of
lengths is a part of its own, a `learning.PredictionLearner`.

The rest is the same for all policies: the events here, and `places`, which fills the slots.

From an event to its moves is a short way: `on_tool_return` -> `route` (what is the request meant for?) -> `wait` ->
`place` -> `seat`, which makes the `protocols.Move`.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import buckets, levels, places, requests
from libra_jax.scheduling.prediction import learning

# Looked up once: a scheduler makes a decision in a few microseconds.
TOOL_RETURN, ENGINE_LOST = protocols.MoveReason.TOOL_RETURN, protocols.MoveReason.ENGINE_LOST


class SlotScheduler(places.Places):
    """A `protocols.Scheduler`. Without a policy it has one bucket, first come, first served, least loaded.

    Not thread-safe: it belongs to one event loop. An event costs time logarithmic in the live requests and instances;
    only a change of instances looks at all of them.

    Args:
      order: the ordering that "auto" stands for.
      kinds: kinds of the layout's instances, if they are known.
      learner: what the policy learns from finished requests; None learns nothing.
      busy: maps an instance to how busy it is, to find the least busy of a bucket.
    """

    def __init__(
        self,
        config: config_lib.SchedulerConfig | None = None,
        *,
        order: str = "fcfs",
        kinds: Sequence[protocols.Kind] = (),
        learner: learning.PredictionLearner | None = None,
        busy: Callable[[buckets.InstanceQueue], float] = buckets.share_in_use,
    ) -> None:
        super().__init__(config or config_lib.SchedulerConfig(), order, kinds, busy)
        self.learner = learner
        self._groups: dict[int, requests.LiveGroup] = {}
        self._rollouts: dict[str, requests.LiveRollout] = {}

    # What a policy answers, beside `pick`, `admits` and `serves`.

    def route(self, request: requests.LiveRequest, now: float, *, returned: bool = False) -> int:
        """Returns the level that a request is meant for when it begins to wait.

        Sets `request.target` if the request is to go to one instance, `request.remaining` if the policy expects
        anything of its length, and `request.gain` if it expects anything of a move.

        Args:
          request: the request.
          now: event-loop time in seconds.
          returned: a tool of it has just returned, so that the policy knows more than at its last decision.
        """
        request.remaining = float(request.generated_tokens)
        return 0

    def begins(self, request: requests.LiveRequest) -> None:
        """Takes in that a request is about to wait, having arrived or come back from a tool. Comes before `route`."""

    # Events (`protocols.Scheduler`).

    def on_instance_change(self, instances: Sequence[protocols.Instance], now: float) -> list[protocols.Placement]:
        live = {instance.name for instance in instances}
        lost = [request for server in self.servers.values() if server.name not in live for request in server.decoding]
        # In the order in which they were placed, which their tickets of long ago no longer tell.
        displaced = sorted(lost, key=lambda item: item.seated)
        waiting = [item for item in self.requests.values() if item.queue is not None]
        for request in [*displaced, *waiting]:
            self.withdraw(request)
            request.target = None  # that instance may be lost; `route` decides again below
        # Some of these instances are lost, and `_enqueue` below notes the others again.
        self._touched.clear()
        self.levels.learn(instances)
        self._rebuild(instances)
        # The displaced have waited once already, so they go ahead of those that have not been served yet.
        self._front -= len(displaced)
        for place, request in enumerate(displaced):
            request.ticket = self._front + place
            request.since = now
            request.reason = ENGINE_LOST
        for request in sorted([*displaced, *waiting], key=lambda item: item.ticket):
            self._enqueue(request, self.route(request, now))
        # Tickets have changed, and an entry under an old ticket counts as stale.
        self._ages = deque(sorted((item.since, item.ticket, item) for item in [*displaced, *waiting]))
        return self.place(now)

    def on_plan(self, planned: Sequence[protocols.PlannedBucket], now: float) -> list[protocols.Placement]:
        if not self.by_length:
            return []
        before, self.levels = self.levels, levels.LevelMap.planned(planned)
        # A plan may add or drop degrees, which shifts the numbers of the levels: a request keeps its degree, or else
        # gets the next wider, or else the widest.
        for request in self.requests.values():
            level = request.level
            if before.bounds and before.kinds:
                level = bisect.bisect_left(self.levels.kinds, before.kinds[level])
            request.level = min(level, self.levels.count - 1)
        return self.on_instance_change([server.instance for server in self.servers.values()], now)

    def on_arrival(self, request: protocols.RequestInfo, now: float) -> list[protocols.Placement]:
        if self.config.segments == "independent":
            request = dataclasses.replace(request, parent="", rollout_id="", segment=0)
        rollout_id = request.rollout_id or request.request_id
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            rollout = self._rollouts[rollout_id] = requests.LiveRollout(rollout_id, self._group(request.group_id), now)
            rollout.group.live += 1
        # After a resume, or a failure, a request brings tokens along: turn and budget count from there.
        generated = request.generated_tokens
        item = requests.LiveRequest(
            request.request_id,
            request.prompt_id,
            request.group_id,
            request.dispatch_version,
            rollout,
            request.context_tokens,
            generated,
            turn_start=generated,
            input_tokens=request.context_tokens - generated,
            unread=request.context_tokens - request.shared_tokens,
            remaining=float(generated),
            mark=generated,
        )
        # Unknown after a restart, a parent leaves no trace: the request is placed as one that shares nothing.
        parent = self.requests.get(request.parent)
        if parent is not None and parent.context_at and request.shared_tokens:
            item.context_at, item.inherited = parent.context_at, request.shared_tokens
        self.requests[request.request_id] = item
        if self.learner is not None:
            item.track = self.learner.start(item.prompt_id, generated, request.segment)
        rollout.requests.append(item)
        self.begins(item)
        self.wait(item, self.route(item, now), now)
        return self.place(now)

    def _group(self, group_id: int) -> requests.LiveGroup:
        # Evaluation requests share one group id, but no step waits for them together: each rollout is a group of its
        # own, which is in no table.
        if group_id == protocols.EVALUATION_GROUP:
            return requests.LiveGroup()
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = requests.LiveGroup()
        return group

    def on_tool_call(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        request = self.requests[request_id]
        request.generated_tokens = generated_tokens
        self.withdraw(request)
        return self.place(now)  # the slot that came free

    def on_tool_return(
        self, request_id: str, causal_state: protocols.CausalState, context_tokens: int, now: float
    ) -> list[protocols.Placement]:
        request = self.requests[request_id]
        request.unread = max(0, context_tokens - request.context_now)
        request.context_tokens = context_tokens
        request.turn_start = request.generated_tokens  # `context_now` counts from here
        request.reason = TOOL_RETURN
        if self.learner is not None:
            assert request.track is not None
            self.learner.observe(request.track, causal_state, request.generated_tokens)
        self.begins(request)
        self.wait(request, self.route(request, now, returned=True), now)
        return self.place(now)

    def on_progress(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        self.requests[request_id].generated_tokens = generated_tokens
        return []  # no slot came free

    def on_finish(
        self, request_id: str, generated_tokens: int, now: float, *, completed: bool = True
    ) -> list[protocols.Placement]:
        request = self.requests.pop(request_id)
        request.generated_tokens = generated_tokens
        self.withdraw(request)
        self._left(request)
        if self.learner is not None:
            assert request.track is not None
            # Held-out tasks must not teach: what is learnt steers training.
            learn = completed and request.group_id != protocols.EVALUATION_GROUP
            self.learner.finish(request.track, generated_tokens, learn=learn)
        return self.place(now)

    def _left(self, request: requests.LiveRequest) -> None:
        """Takes a request off its rollout, and the rollout off its group when the last one is gone."""
        rollout = request.rollout
        rollout.requests.remove(request)
        if rollout.requests:
            return
        del self._rollouts[rollout.rollout_id]
        rollout.group.live -= 1
        if not rollout.group.live:
            self._groups.pop(request.group_id, None)  # groups of evaluation rollouts are not in the table

    def snapshot(self) -> Mapping[str, Any]:
        return self.learner.snapshot() if self.learner is not None else {}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replaces what has been learnt by a snapshot's statistics."""
        if self.learner is not None:
            self.learner.restore(snapshot)

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        """Adds what another coordinator has learnt."""
        if self.learner is not None:
            self.learner.merge(snapshot)
