"""What every scheduler shares: who waits where, who decodes where, who is away.

A policy says which bucket a request is meant for (`route`), which of a bucket's instances takes it (`pick`) and whose
requests a bucket may serve when its own queue is empty (`serves`). The rest is here, the same for all: slots are never
exceeded; inside a bucket the ordering of config decides; a request that has waited for `scheduler.ageing_seconds` goes
before all others, to whatever slot is free, so that none starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.scheduling import buckets, ordering, state


class SlotScheduler:
    """A `protocols.Scheduler` over one bucket, first come, first served, least loaded: policies change what they must.

    Not thread-safe: it belongs to one event loop. An event costs time logarithmic in the live requests and instances;
    only a change of instances looks at all of them.

    Args:
      config: the policy's settings.
      bounds: bounds of the buckets; empty makes one bucket of all instances.
      order: the ordering that "auto" stands for.
      degrees: tensor-parallel degrees of the layout, if known.

    Attributes:
      by_length: the policy tells requests apart by the tokens they have to generate; others have one bucket always.
    """

    by_length: bool = False

    def __init__(
        self,
        config: configuration.SchedulerConfig | None = None,
        *,
        bounds: Sequence[int] = (),
        order: str = "fcfs",
        degrees: Sequence[int] = (),
    ) -> None:
        self.config = config = config or configuration.SchedulerConfig()
        self.levels = buckets.Levels(bounds, degrees)
        self._order = ordering.ORDERS[order if config.ordering == "auto" else config.ordering]
        self.requests: dict[str, state.Request] = {}
        self.decoding: dict[state.Request, None] = {}  # in the order in which they were placed
        self.servers: dict[str, state.Server] = {}
        self.buckets: list[buckets.Bucket] = []
        self._groups: dict[int, state.Group] = {}
        self._tickets = 0
        self._front = 0
        self._waiting = 0
        self._ages: deque[tuple[float, int, state.Request]] = deque()
        self._touched: list[state.Server] = []  # a slot came free, or someone began to wait for it in particular
        self._rebuild([])

    # What a policy decides.

    def route(self, request: state.Request, now: float) -> int:
        """The bucket a request that begins to wait is meant for; sets `request.remaining` if it expects anything."""
        request.remaining = float(request.generated_tokens)
        return 0

    def pick(self, request: state.Request, bucket: buckets.Bucket) -> state.Server:
        """The instance of the bucket, which has a free slot, that takes the request."""
        return bucket.least()

    def admits(self, request: state.Request, server: state.Server) -> bool:
        """Whether an instance with a free slot has room for the request; who has aged is not asked."""
        return True

    @staticmethod
    def busy(server: state.Server) -> float:
        """How busy an instance is, to find the least busy of a bucket."""
        return buckets.share_in_use(server)

    def serves(self, bucket: buckets.Bucket, request: state.Request) -> bool:
        """Whether a free slot of the bucket may go to a request that waits for another, none waiting for it."""
        return False

    def returned(self, request: state.Request, causal_state: protocols.CausalState) -> None:
        """A tool returned; called before `route`."""

    def finished(self, request: state.Request, completed: bool) -> None:
        """The request is over; called when it holds nothing any more. Its length is a whole one if it `completed`."""

    def seated(self, request: state.Request, server: state.Server) -> None:
        """The request begins to decode on the instance."""

    def left(self, request: state.Request, server: state.Server) -> None:
        """The request no longer decodes on the instance."""

    def overflow(self, placements: list[protocols.Placement]) -> None:
        """Gives free slots to requests that wait for others: for other buckets, then for instances of their own.

        The widest slots and the nearest buckets come first, then the most crowded instance.
        """
        for bucket in reversed(self.buckets):
            if bucket.free <= 0:
                continue
            for other in self._near[bucket.level]:
                while bucket.free > 0 and (request := other.queue.head()) is not None and self.serves(bucket, request):
                    self.take(request, self.pick(request, bucket), placements)
        for bucket in self.buckets:
            while bucket.free > 0 and (crowded := self._crowds.longest()) is not None:
                request = crowded.queue.head()
                if request is None or not self.serves(bucket, request):
                    break
                self.take(request, self.pick(request, bucket), placements)

    # Events.

    def on_instance_change(self, instances: Sequence[protocols.Instance], now: float) -> list[protocols.Placement]:
        live = {instance.name: instance for instance in instances}
        displaced = [item for item in self.decoding if item.server is not None and item.server.name not in live]
        waiting = [item for item in self.requests.values() if item.queue is not None]
        for request in displaced:
            self._vacate(request)
        for request in waiting:
            self._unwait(request)
            request.wanted = None
        self._touched.clear()
        self.levels.learn(instances)
        self._rebuild(instances)
        # The displaced have waited once already, so they go ahead of those that have not been served yet.
        self._front -= len(displaced)
        for place, request in enumerate(displaced):
            request.ticket = self._front + place
            request.since = now
        for request in sorted([*displaced, *waiting], key=lambda item: item.ticket):
            self._enqueue(request, self.route(request, now))
        self._ages = deque(sorted((item.since, item.ticket, item) for item in [*displaced, *waiting]))
        return self._place(now)

    def on_plan(self, planned: Sequence[protocols.PlannedBucket], now: float) -> list[protocols.Placement]:
        if not self.by_length:
            return []
        before, self.levels = self.levels, buckets.Levels.planned(planned)
        for request in self.requests.values():
            request.level = self.levels.nearest(before, request.level)
        return self.on_instance_change([server.instance for server in self.servers.values()], now)

    def on_arrival(self, request: protocols.RequestInfo, now: float) -> list[protocols.Placement]:
        group = state.Group() if request.group_id == protocols.EVALUATION_GROUP else self._groups.get(request.group_id)
        if group is None:
            group = self._groups[request.group_id] = state.Group()
        group.live += 1
        item = state.Request(
            request.request_id,
            request.prompt_id,
            request.group_id,
            request.dispatch_version,
            group,
            now,
            request.context_tokens,
            request.generated_tokens,
            turn_start=request.generated_tokens,
            mark=request.generated_tokens,
        )
        self.requests[request.request_id] = item
        self.arrived(item, now)
        self._wait(item, self.route(item, now), now)
        return self._place(now)

    def arrived(self, request: state.Request, now: float) -> None:
        """A request is new; called before `route`."""

    def on_tool_call(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        request = self.requests[request_id]
        request.generated_tokens = generated_tokens
        self._leave(request)
        return self._place(now)

    def on_tool_return(
        self, request_id: str, causal_state: protocols.CausalState, context_tokens: int, now: float
    ) -> list[protocols.Placement]:
        request = self.requests[request_id]
        request.context_tokens = context_tokens
        request.turn_start = request.generated_tokens
        self.returned(request, causal_state)
        self._wait(request, self.route(request, now), now)
        return self._place(now)

    def on_progress(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        self.requests[request_id].generated_tokens = generated_tokens
        return []

    def on_finish(
        self, request_id: str, generated_tokens: int, now: float, *, completed: bool = True
    ) -> list[protocols.Placement]:
        request = self.requests.pop(request_id)
        request.generated_tokens = generated_tokens
        self._leave(request)
        request.group.live -= 1
        if not request.group.live:
            self._groups.pop(request.group_id, None)
        self.finished(request, completed and request.group_id != protocols.EVALUATION_GROUP)
        return self._place(now)

    def snapshot(self) -> Mapping[str, Any]:
        return {}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Nothing is learnt, so nothing is restored."""
        del snapshot

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        """Nor is anything learnt from others."""
        del snapshot

    # Moves between waiting, decoding and away.

    def move(self, request: state.Request, server: state.Server) -> protocols.Placement:
        """A decoding request goes on at once on another instance, which has a free slot."""
        self._vacate(request)
        return self._seat(request, server)

    def displace(self, request: state.Request, level: int, now: float) -> protocols.Placement:
        """Takes a decoding request's place away: it waits again, for the bucket given."""
        self._vacate(request)
        self._wait(request, level, now)
        return protocols.Placement(request.request_id, "")

    def home(self, request: state.Request, level: int) -> state.Server | None:
        """The live instance that served the request last, if it is in the bucket."""
        server = self.servers.get(request.last)
        return server if server is not None and server.level == level else None

    def _wait(self, request: state.Request, level: int, now: float) -> None:
        self._tickets += 1
        request.ticket = self._tickets
        request.since = now
        request.aged = False
        self._enqueue(request, level)
        self._ages.append((now, request.ticket, request))
        if len(self._ages) > 4 * self._waiting + 1024:
            self._ages = deque(entry for entry in self._ages if entry[2].queue and entry[2].ticket == entry[1])

    def _enqueue(self, request: state.Request, level: int) -> None:
        wanted = request.wanted
        if wanted is not None:
            request.level = wanted.level
            self._waiting += 1
            self._touched.append(wanted)
            wanted.queue.push(request)
            self._crowds.joined(wanted)
            return
        if not self.buckets[level].slots:  # its instances are lost or still to come: the nearest bucket stands in
            served = [bucket.level for bucket in self.buckets if bucket.slots]
            level = min(served, key=lambda other: abs(other - level), default=level)
        request.level = level
        self._waiting += 1
        self.buckets[level].queue.push(request)

    def _unwait(self, request: state.Request) -> None:
        if request.queue is not None:
            request.queue.discard(request)
            self._waiting -= 1

    def _vacate(self, request: state.Request) -> None:
        server = request.server
        if server is not None:
            request.server = None
            del self.decoding[request]
            self.buckets[server.level].release(server)
            self._touched.append(server)
            self.left(request, server)

    def _leave(self, request: state.Request) -> None:
        if request.queue is not None:
            self._unwait(request)
        else:
            self._vacate(request)

    def _seat(self, request: state.Request, server: state.Server) -> protocols.Placement:
        request.server = server
        request.last = server.name
        request.wanted = None
        self.decoding[request] = None
        self.buckets[server.level].occupy(server)
        self.seated(request, server)
        return protocols.Placement(request.request_id, server.name)

    # Filling free slots.

    def _rebuild(self, instances: Sequence[protocols.Instance]) -> None:
        """New buckets of the live instances; requests that decode on one keep their place."""
        old, self.servers = self.servers, {}
        self.buckets = [
            buckets.Bucket(level, ordering.Queue(self._order), self.busy) for level in range(self.levels.count)
        ]
        self._near = [
            sorted(self.buckets, key=lambda item, level=level: abs(item.level - level))  # type: ignore[misc]
            for level in range(len(self.buckets))
        ]
        for place, instance in enumerate(instances):
            server = old.get(instance.name) or state.Server(instance, place, ordering.Queue(self._order))
            server.announce(instance, place)
            self.servers[instance.name] = server
            self.buckets[self.levels.of_degree(instance.tensor_parallel)].add(server)
        self._crowds = buckets.Crowds(list(self.servers.values()))

    def take(self, request: state.Request, server: state.Server, placements: list[protocols.Placement]) -> None:
        """A waiting request gets a free slot of the instance."""
        self._unwait(request)
        placements.append(self._seat(request, server))

    def _place(self, now: float) -> list[protocols.Placement]:
        placements: list[protocols.Placement] = []
        if self._waiting:
            if self._ages[0][0] <= now - self.config.ageing_seconds:
                self._place_aged(now, placements)
            for server in self._touched:
                if server.queue.size and server.load < server.slots:
                    self._serve_own(server, placements)
            for bucket in self.buckets:
                while bucket.free > 0 and bucket.queue.size:
                    request = bucket.queue.head()
                    assert request is not None
                    server = self.pick(request, bucket)
                    if not self.admits(request, server):
                        break
                    self.take(request, server, placements)
            if self._waiting:
                self.overflow(placements)
        self._touched.clear()
        return placements

    def _serve_own(self, server: state.Server, placements: list[protocols.Placement]) -> None:
        """Fills an instance's free slots while anyone waits for it in particular; the rest of its bucket competes."""
        queue = self.buckets[server.level].queue
        while server.queue.size and server.load < server.slots:
            mine, other = server.queue.first(), queue.first() if queue.size else None
            assert mine is not None
            if other is None or mine < other or not self.admits(other[-1], server):
                if not self.admits(mine[-1], server):
                    return
                other = mine
            self.take(other[-1], server, placements)

    def _place_aged(self, now: float, placements: list[protocols.Placement]) -> None:
        ages, limit = self._ages, now - self.config.ageing_seconds
        while ages:
            since, ticket, request = ages[0]
            if request.queue is not None and request.ticket == ticket:
                if since > limit:
                    return
                bucket = self._nearest_free(request.level)
                if bucket is None:
                    return
                self.take(request, self.pick(request, bucket), placements)
                request.aged = True
            ages.popleft()

    def _nearest_free(self, level: int) -> buckets.Bucket | None:
        free = [bucket for bucket in self.buckets if bucket.free > 0]
        return min(free, key=lambda bucket: abs(bucket.level - level), default=None)
