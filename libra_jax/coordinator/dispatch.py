"""Dispatches requests: tells the scheduler what happens to them, and the streams what the scheduler decides.

Requests are known by name here. Their tokens are with the streams (`rollouts.streams`), wherever the agent loops run.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence
from dataclasses import dataclass, field

from libra_jax import protocols
from libra_jax.coordinator import instances, routing
from libra_jax.utils import run_context

CHECKS = 8
"""Number of looks at waiting requests within their deadline."""


@dataclass
class _Request:
    """A segment between its first request and its rollout's end.

    Attributes:
      sink: the streams that serve it.
      group_id: its group.
      ask: number of its tool returns.
      instance: where it decodes; empty while it waits or its tool runs.
      away: True while its tool runs.
      passed_over_since: start of a wait during which some slot was always free: past its deadline the scheduler is at
        fault.
      decision: the decision on it that is judged.
    """

    sink: protocols.PlacementSink
    group_id: int
    ask: int = 0
    instance: str = ""
    away: bool = False
    passed_over_since: float | None = None
    decision: routing.JudgedRequest = field(default_factory=routing.JudgedRequest)

    def displace(self, name: str) -> None:
        """Takes the request off its instance: it waits for a placement."""
        self.instance = ""
        self.sink.placed(protocols.Placement(name, ""), self.ask)


class Dispatcher(protocols.Dispatch):
    """Places the requests of all streams. Create it inside the event loop that it serves.

    Args:
      run: what the parts of the run share (`scheduler`, `deadlines`).

    Attributes:
      seconds: seconds spent on scheduling decisions and book-keeping, since `take_seconds`.
      routing: judges the decisions.
    """

    def __init__(
        self, run: run_context.RunContext, *, scheduler: protocols.Scheduler, engines: instances.Instances
    ) -> None:
        config = run.config
        self._interval = config.deadlines.first_token / CHECKS
        self._patience = config.scheduler.ageing_seconds + config.deadlines.placement
        self._policy = config.scheduler.policy
        self._scheduler = scheduler
        self._engines = engines
        self._clock = run.clock
        self._requests: dict[str, _Request] = {}
        self.seconds = 0.0
        self.routing = routing.Routing(config)
        run.events.subscribe(protocols.EnginesChanged, lambda event: self._instances_changed(event.serving))
        run.events.subscribe(protocols.EnginesReplanned, lambda event: self.replan(event.rollout))
        run.scope.start(self._watch(), "placement deadlines")

    def take_seconds(self) -> float:
        """Returns `seconds`, and starts again at zero."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def arrived(self, info: protocols.RequestInfo, sink: protocols.PlacementSink) -> None:
        now = self._clock()
        self._requests[info.request_id] = _Request(sink, info.group_id)
        self._apply(self._scheduler.on_arrival(info, now), now)

    def progressed(self, request: str, generated: int) -> None:
        now = self._clock()
        self._apply(self._scheduler.on_progress(request, generated, now), now)

    def tool_called(self, request: str, generated: int) -> None:
        now, entry = self._clock(), self._requests[request]
        entry.instance, entry.away = "", True
        self._apply(self._scheduler.on_tool_call(request, generated, now), now)

    def tool_returned(self, request: str, generated: int, causal_state: protocols.CausalState, context: int) -> None:
        now, entry = self._clock(), self._requests[request]
        entry.away = False
        entry.ask += 1
        self.routing.returned(entry.decision, generated)
        self._apply(self._scheduler.on_tool_return(request, causal_state, context, now), now)

    def finished(self, request: str, generated: int, *, completed: bool) -> None:
        now, entry = self._clock(), self._requests.pop(request)
        if completed and entry.group_id != protocols.EVALUATION_GROUP:
            self.routing.finished(entry.decision, generated)
        self._apply(self._scheduler.on_finish(request, generated, now, completed=completed), now)

    def place_again(self, sink: protocols.PlacementSink, instance: str) -> None:
        """Repeats the placements of a sink's requests on an instance that the sink took for failed."""
        for name, request in self._requests.items():
            if request.sink is sink and request.instance == instance:
                sink.placed(protocols.Placement(name, instance), request.ask)

    def replan(self, rollout: Sequence[protocols.PlannedBucket]) -> None:
        """Switches to a plan's buckets. Requests of instances that ended by the same plan wait for a new placement."""
        self._instances_changed(self._engines.serving())
        now = self._clock()
        self.routing.replan(rollout)
        self._apply(self._scheduler.on_plan(rollout, now), now)

    def _apply(self, placements: Sequence[protocols.Placement], since: float) -> None:
        """Carries out placements. `since` is the time at which the scheduler was called, for `seconds`."""
        for placement in placements:
            request = self._requests[placement.request_id]
            request.instance = placement.instance
            if placement.instance:
                request.passed_over_since = None
                self.routing.decided(request.decision, placement.instance)
            request.sink.placed(placement, request.ask)
        self.seconds += self._clock() - since

    def _instances_changed(self, serving: Sequence[protocols.Instance]) -> None:
        names = {instance.name for instance in serving}
        for name, request in self._requests.items():
            if request.instance and request.instance not in names:
                request.displace(name)
        now = self._clock()
        self.routing.instances(serving)
        self._apply(self._scheduler.on_instance_change(serving, now), now)

    async def _watch(self) -> None:
        """Watches for requests that are passed over beyond their deadline."""
        while True:
            before = self._clock()
            await asyncio.sleep(self._interval)
            now = self._clock()
            # This process stalled, not the scheduler: shift all deadlines by the stall.
            if now - before >= 2 * self._interval:
                for request in self._requests.values():
                    if request.passed_over_since is not None:
                        request.passed_over_since += now - before
                continue
            self._check_waiting(now)

    def _check_waiting(self, now: float) -> None:
        """Ends the run if a request waits beyond its deadline although some instance always had a free slot."""
        free, overdue = self._free(), []
        for name, request in self._requests.items():
            if request.away or request.instance or not free:
                request.passed_over_since = None
            elif request.passed_over_since is None:
                request.passed_over_since = now
            elif now - request.passed_over_since >= self._patience:
                overdue.append((name, request))
        if not overdue:
            return
        # A scheduler updates ageing only at events, and the last event may be long ago: give it one before the verdict.
        self._apply(self._scheduler.on_instance_change(self._engines.serving(), now), now)
        unplaced, free = [item for item in overdue if not item[1].instance], self._free()
        if unplaced and free:
            name, request = unplaced[0]
            raise protocols.DeadlineMissed(
                f"Request {name} was given no place for {now - (request.passed_over_since or now):.0f} s, in "
                f"which {free[0]} or another instance always had a free slot: scheduler.policy {self._policy!r} does "
                "not place it; choose another, or raise config.deadlines.placement (beyond scheduler.ageing_seconds)."
            )

    def _free(self) -> list[str]:
        """Returns the names of the instances with a free slot."""
        used_slots = collections.Counter(request.instance for request in self._requests.values())
        return [instance.name for instance in self._engines.serving() if used_slots[instance.name] < instance.slots]
