"""Which request waits where, and which decodes where: the places that a scheduler gives.

Slots are never exceeded. Inside a bucket the ordering of the config decides. A request that has waited for
`scheduler.ageing_seconds` goes before all others, to any free slot, so none starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import buckets, levels, requests

AGES_SLACK = 1024
"""Stale entries that the list of waiting times may hold beyond a multiple of the waiting requests."""

# Looked up once: a scheduler makes a decision in a few microseconds.
ENGINE_LOST = protocols.MoveReason.ENGINE_LOST
OVERFLOW, AGING = protocols.MoveReason.OVERFLOW, protocols.MoveReason.AGING

UNPLANNED = (ENGINE_LOST, protocols.MoveReason.PREEMPTED, AGING)
"""Reasons of moves that are no choice of the policy between two instances, so that it expects no gain of them."""


class Places:
    """The requests and instances of a scheduler, with the queues, the slots in use, and the filling of free slots.

    Args:
      order: the ordering that "auto" stands for.
      kinds: kinds of the layout's instances, if they are known.
      busy: maps an instance to how busy it is, to find the least busy of a bucket.

    Attributes:
      by_length: whether the policy tells requests apart by the tokens left to generate, in buckets bounded by
        `scheduler.max_remaining_tokens`; other policies have one bucket always.
      lends: whether a free slot goes to any request that waits elsewhere; `serves` may decide by request instead.
      overflow_every: events with waiting requests between two looks for slots to serve other queues with.
    """

    by_length: bool = False
    lends: bool = False
    overflow_every: int = 1

    def __init__(
        self,
        config: config_lib.SchedulerConfig,
        order: str,
        kinds: Sequence[protocols.Kind],
        busy: Callable[[buckets.InstanceQueue], float],
    ) -> None:
        self.config = config
        self.levels = levels.LevelMap(config.max_remaining_tokens if self.by_length else (), kinds)
        self._order = buckets.ORDERS[order if config.ordering == "auto" else config.ordering]
        self._busy = busy
        self.requests: dict[str, requests.LiveRequest] = {}
        self.servers: dict[str, buckets.InstanceQueue] = {}
        self.buckets: list[buckets.Bucket] = []
        self._tickets = 0  # drawn so far; the next request to wait gets one more
        self._front = 0  # the lowest ticket: displaced requests get tickets below all others
        self._seats = 0
        self._waiting = 0
        self._ages: deque[tuple[float, int, requests.LiveRequest]] = (
            deque()
        )  # (since, ticket, request), the oldest first
        self._touched: list[buckets.InstanceQueue] = []  # a slot came free there, or a request began to wait for it
        self._overflows = 0
        self._near: list[list[buckets.Bucket]] = []  # by level: all buckets, the nearest first
        self._crowds = buckets.Crowds([])
        self._rebuild([])

    # What a policy answers when slots are filled.

    def pick(self, request: requests.LiveRequest, bucket: buckets.Bucket) -> buckets.InstanceQueue:
        """Returns the instance of the bucket that takes the request; it must have a free slot."""
        return bucket.least_busy()

    def admits(self, request: requests.LiveRequest, server: buckets.InstanceQueue) -> bool:
        """Returns whether an instance with a free slot has room for the request; aged requests go in regardless."""
        return True

    def serves(self, bucket: buckets.Bucket, request: requests.LiveRequest) -> bool:
        """Returns whether a free slot of the bucket may go to a request that waits elsewhere.

        Sets `request.gain` if it is true and the policy expects anything of the move.
        """
        return self.lends

    # Changes between waiting, decoding and away.

    def home(self, request: requests.LiveRequest, level: int) -> buckets.InstanceQueue | None:
        """Returns the live instance that may hold the request's context; None if it is not in the bucket."""
        server = self.servers.get(request.context_at)
        return server if server is not None and server.level == level else None

    def seat(
        self, request: requests.LiveRequest, server: buckets.InstanceQueue, reason: protocols.MoveReason
    ) -> protocols.Placement:
        """Lets a request that neither waits nor decodes decode on an instance with a free slot.

        `reason` is the reason of the move, if the request was served elsewhere before.
        """
        source = request.served_by
        self._seats += 1
        request.seated = self._seats
        request.server = server
        request.served_by = request.context_at = server.name
        request.inherited = request.unread = 0
        request.target = None
        server.decoding[request] = None
        self.buckets[server.level].occupy(server)
        # A move is a change of instance, so a request's first placement is none.
        if not source or source == server.name:
            return protocols.Placement(request.request_id, server.name)
        if source not in self.servers:  # that is why it had to leave, no matter what it has waited for since
            reason = ENGINE_LOST
        gain = request.gain
        if gain is not None and reason in UNPLANNED:
            gain = None
        move = protocols.Move(request.request_id, source, server.name, reason, gain)
        return protocols.Placement(request.request_id, server.name, move)

    def withdraw(self, request: requests.LiveRequest) -> None:
        """Ends a request's wait, or frees its slot; does nothing to a request that is away."""
        server = request.server
        if request.queue is not None:
            request.queue.discard(request)
            self._waiting -= 1
        elif server is not None:
            request.server = None
            del server.decoding[request]
            self.buckets[server.level].release(server)
            self._touched.append(server)

    def displace(
        self, request: requests.LiveRequest, level: int, now: float, reason: protocols.MoveReason
    ) -> protocols.Placement:
        """Takes a decoding request's place away, so that it waits again, for the bucket of this level."""
        self.withdraw(request)
        request.reason = reason
        self.wait(request, level, now)
        return protocols.Placement(request.request_id, "")

    def wait(self, request: requests.LiveRequest, level: int, now: float) -> None:
        """Lets a request that neither waits nor decodes wait for a bucket, or for the instance that it wants."""
        self._tickets += 1
        request.ticket = self._tickets
        request.since = now
        request.aged = False
        self._enqueue(request, level)
        self._ages.append((now, request.ticket, request))
        # Placed requests leave stale entries behind; a sweep at a multiple of the live ones costs a constant time each.
        if len(self._ages) > 4 * self._waiting + AGES_SLACK:
            self._ages = deque(entry for entry in self._ages if entry[2].queue and entry[2].ticket == entry[1])

    def _enqueue(self, request: requests.LiveRequest, level: int) -> None:
        self._waiting += 1
        target = request.target
        if target is not None:
            request.level = target.level
            self._touched.append(target)
            target.queue.push(request)
            # After the push, because the queue's size is what is compared.
            self._crowds.joined(target)
            return
        if not self.buckets[level].slots:  # its instances are lost or still to come: the nearest bucket stands in
            served_levels = [bucket.level for bucket in self.buckets if bucket.slots]
            level = min(served_levels, key=lambda candidate: abs(candidate - level), default=level)
        request.level = level
        self.buckets[level].queue.push(request)

    def _rebuild(self, instances: Sequence[protocols.Instance]) -> None:
        """Makes the buckets of the live instances; requests that decode on one of them keep their place."""
        old, self.servers = self.servers, {}
        self.buckets = [
            buckets.Bucket(level, buckets.Queue(self._order), self._busy) for level in range(self.levels.count)
        ]
        self._near = [
            sorted(self.buckets, key=lambda item, level=level: abs(item.level - level))  # type: ignore[misc]
            for level in range(len(self.buckets))
        ]
        for place, instance in enumerate(instances):
            # The same object, if the instance has stayed: its decoding requests and residents refer to it.
            server = old.get(instance.name) or buckets.InstanceQueue(instance, place, buckets.Queue(self._order))
            server.announce(instance, place)
            self.servers[instance.name] = server
            self.buckets[self.levels.of_kind(instance.kind)].add(server)
        self._crowds = buckets.Crowds(list(self.servers.values()))

    # Filling free slots.

    def place(self, now: float) -> list[protocols.Placement]:
        """Gives free slots to waiting requests: to the aged first, then to each queue's own, then to others."""
        placements: list[protocols.Placement] = []
        looked = len(self._touched)
        if self._waiting:
            # The first entry may be stale, and then the look below does no more than remove it.
            if self._ages[0][0] <= now - self.config.ageing_seconds:
                self._place_aged(now, placements)
            # Only instances that were touched by this event can have begun to have both a free slot and a queue.
            for server in self._touched:
                queue = self.buckets[server.level].queue
                while server.load < server.slots and (mine := server.queue.first()) is not None:
                    # Both queues hold requests for this slot, so they compete by rank as if they were one queue. If
                    # the bucket's first request has no room here, another instance can take it.
                    chosen = queue.first()
                    if chosen is None or mine < chosen or not self.admits(chosen[-1], server):
                        if not self.admits(mine[-1], server):
                            # Behind one without room, those whose context is here already have theirs.
                            resident = server.queue.first_resident(server.level, server)
                            if resident is None:
                                break
                            self._take(resident, server, resident.reason, placements)
                            continue
                        chosen = mine
                    self._take(chosen[-1], server, chosen[-1].reason, placements)
            looked = len(self._touched)
            for bucket in self.buckets:
                while bucket.free > 0 and (first := bucket.queue.first()) is not None:
                    request = first[-1]
                    server = self.pick(request, bucket)
                    if not self.admits(request, server):
                        # No one behind overtakes the first, or a large request would starve, but for those whose
                        # context is here: they have their room.
                        resident = bucket.queue.first_resident(bucket.level)
                        if resident is None or resident.home is None:
                            break
                        request, server = resident, resident.home
                    self._take(request, server, request.reason, placements)
            if self._waiting:
                self._overflows += 1
                if self._overflows % self.overflow_every == 0:
                    self._overflow(placements)
            if self._waiting == len(self.requests):
                self._start_oldest(placements)
        # Contexts have left the others since, and the next event looks at them.
        del self._touched[:looked]
        return placements

    def _start_oldest(self, placements: list[protocols.Placement]) -> None:
        """Starts the request that has waited longest, with or without room: all requests wait, so no event will come.

        Requests that wait for room beside each other's contexts would wait forever.
        """
        free = [bucket for bucket in self.buckets if bucket.free > 0]
        for _, ticket, request in self._ages if free else ():
            if request.queue is not None and request.ticket == ticket:
                home, level = request.home, request.level
                if home is None or home.full:
                    bucket = min(free, key=lambda item, level=level: abs(item.level - level))  # type: ignore[misc]
                    home = self.pick(request, bucket)
                self._take(request, home, request.reason, placements)
                return

    def _take(
        self,
        request: requests.LiveRequest,
        server: buckets.InstanceQueue,
        reason: protocols.MoveReason,
        placements: list[protocols.Placement],
    ) -> None:
        """Gives a waiting request a free slot of the instance."""
        queue = request.queue
        assert queue is not None
        queue.discard(request)
        self._waiting -= 1
        placements.append(self.seat(request, server, reason))

    def _place_aged(self, now: float, placements: list[protocols.Placement]) -> None:
        """Gives free slots, those of the nearest buckets first, to the requests that have waited the longest."""
        # Entries are appended as time goes on, so the first is the oldest, and the search ends at the first young one.
        ages, limit = self._ages, now - self.config.ageing_seconds
        while ages:
            since, ticket, request = ages[0]
            if request.queue is not None and request.ticket == ticket:  # else stale: it was placed or left since
                free = [bucket for bucket in self.buckets if bucket.free > 0]
                if since > limit or not free:
                    return
                level = request.level
                bucket = min(free, key=lambda item, level=level: abs(item.level - level))  # type: ignore[misc]
                self._take(request, self.pick(request, bucket), AGING, placements)
                request.aged = True
            ages.popleft()

    def _overflow(self, placements: list[protocols.Placement]) -> None:
        """Gives free slots to requests that wait elsewhere: first for other buckets, then for particular instances.

        The widest slots and the nearest queues come first, then the most crowded instance.
        """
        for bucket in reversed(self.buckets):
            if bucket.free <= 0:
                continue
            for neighbour in self._near[bucket.level]:
                while (
                    bucket.free > 0
                    and (first := neighbour.queue.first()) is not None
                    and self.serves(bucket, first[-1])
                ):
                    server = self.pick(first[-1], bucket)
                    if not self.admits(first[-1], server):
                        break
                    self._take(first[-1], server, OVERFLOW, placements)
        # Last, because these requests give a cache up that the others do not have.
        for bucket in self.buckets:
            while bucket.free > 0 and (crowded := self._crowds.longest()) is not None:
                first = crowded.queue.first()
                if first is None or not self.serves(bucket, first[-1]):
                    break
                server = self.pick(first[-1], bucket)
                if not self.admits(first[-1], server):
                    break
                self._take(first[-1], server, OVERFLOW, placements)
