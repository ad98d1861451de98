"""Simple policies that C-MLFQ is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import buckets, requests, residents

BUDGET_OUTRUN = protocols.MoveReason.BUDGET_OUTRUN


class LeastLoaded(residents.ResidentScheduler):
    """Sends a request to the instance with the smallest share of its slots in use, of any degree.

    Ties go to the instance with more slots, then to the first named.
    """


class RoundRobin(residents.ResidentScheduler):
    """Lets instances take turns, blind to their load; an instance without a free slot misses its turn."""

    _last = ""
    _turn = 0
    _cycle: Sequence[buckets.InstanceQueue] = ()
    _cycle_of: buckets.Bucket | None = None

    def pick(self, request: requests.LiveRequest, bucket: buckets.Bucket) -> buckets.InstanceQueue:
        # Each change of instances makes another bucket, so an unknown bucket means that the instances changed.
        if bucket is not self._cycle_of:
            self._cycle_of = bucket
            # By name, so that an instance that comes back after a restart keeps its place in the cycle.
            servers = sorted(bucket.servers, key=lambda server: server.name)
            first = next((place for place, server in enumerate(servers) if server.name > self._last), 0)
            self._cycle = servers[first:] + servers[:first]
            self._turn = 0
        server = self._cycle[self._turn]
        # Ends: `pick` is called only if the bucket has a free slot.
        while server.load >= server.slots:
            self._turn = (self._turn + 1) % len(self._cycle)
            server = self._cycle[self._turn]
        self._turn = (self._turn + 1) % len(self._cycle)
        self._last = server.name
        return server


class Sticky(residents.ResidentScheduler):
    """Sends a request back to the instance that holds its cache, unless that one is much busier than another.

    A request gives its cache up when its instance's share of slots exceeds the least busy one's by the threshold;
    requests that wait for an instance count as its load. So a slot may idle while
    requests wait for their caches, up to the threshold, and none waits longer than `scheduler.ageing_seconds` for a
    free one. A new segment is sent to its parent's cache if that holds half of its context and no instance is
    less busy.

    Args:
      threshold: excess share of slots in use that makes a request leave its cache.
    """

    def __init__(self, config: config_lib.SchedulerConfig | None = None, *, threshold: float = 0.1) -> None:
        super().__init__(config)
        self._threshold = threshold

    def route(self, request: requests.LiveRequest, now: float, *, returned: bool = False) -> int:
        home = self.servers.get(request.context_at)
        request.remaining = float(request.generated_tokens)
        # A parent's cache is followed for most of the context alone, and while no instance is less busy: to follow it
        # at any price crowds a rollout's segments on one instance, and is slower.
        allowed = 0.0 if request.inherited else self._threshold
        if home is not None and (0 < 2 * request.inherited < request.context_tokens or self._excess(home) > allowed):
            home = None
        request.target = home
        return 0

    def serves(self, bucket: buckets.Bucket, request: requests.LiveRequest) -> bool:
        return request.target is None or self._excess(request.target) > self._threshold

    def _excess(self, home: buckets.InstanceQueue) -> float:
        """Returns how much busier the instance is than the least busy one, in shares of their slots."""
        bucket = self.buckets[0]
        # Without a free slot anywhere, the least busy instance is as full as all others.
        lowest_share = buckets.share_in_use(bucket.least_busy()) if bucket.free > 0 else 1.0
        return (home.load + home.queue.size) / home.slots - lowest_share


class StickyCache(residents.ResidentScheduler):
    """Sends a new request to the instance whose cache has the most room, and keeps it there: no prediction, no buckets.

    A request whose instance has no free slot waits for it, `scheduler.ageing_seconds` at most. If the residents have
    outgrown the cache, a request that comes back from a tool waits for room on any instance.
    """

    by_cache = True
    counts_residents = True

    def route(self, request: requests.LiveRequest, now: float, *, returned: bool = False) -> int:
        request.remaining = float(request.generated_tokens)
        if returned:
            self.leave_full(request)
        request.target = request.home or request.anchor
        return 0


class Mlfq(residents.ResidentScheduler):
    """The classic multi-level feedback queue (Corbato, Daggett and Daley, 1962), with buckets for processor queues.

    The top level is the narrowest bucket. A level's quantum is the argument, or its bucket's bound. A request
    that has used up its quantum is demoted to the next level at that point: it moves at once, or, if that bucket is
    full, gives its place up and waits. Until then it stays with the instance that holds its context. So a slot may idle
    while requests wait for another, but none waits longer than `scheduler.ageing_seconds` for a free one.

    Args:
      kinds: kinds of the layout's instances, if they are known.
      quantum: tokens that each level but the last serves a request; 0: its bucket's bound.
    """

    by_length = True

    def __init__(
        self,
        config: config_lib.SchedulerConfig | None = None,
        *,
        kinds: Sequence[protocols.Kind] = (),
        quantum: int = 0,
    ) -> None:
        super().__init__(config, kinds=kinds)
        self._quantum = quantum

    def route(self, request: requests.LiveRequest, now: float, *, returned: bool = False) -> int:
        request.remaining = float(request.generated_tokens)
        if returned and request.level and request.mark == request.generated_tokens:  # demoted at the tool call
            request.reason = BUDGET_OUTRUN
        level = min(request.level, len(self.buckets) - 1)
        request.target = self.home(request, level)
        return level

    def on_tool_call(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        self._demoted(self.requests[request_id], generated_tokens)
        return super().on_tool_call(request_id, generated_tokens, now)

    def on_progress(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        request = self.requests[request_id]
        request.generated_tokens = generated_tokens
        if request.server is None or not self._demoted(request, generated_tokens):
            return []
        bucket = self.buckets[request.level]
        if not bucket.slots:  # its instances are lost: the request stays where it is, one level lower by account
            return []
        if bucket.free > 0:
            server = self.pick(request, bucket)
            self.withdraw(request)
            placement = self.seat(request, server, BUDGET_OUTRUN)
        else:
            placement = self.displace(request, request.level, now, BUDGET_OUTRUN)
        return [placement, *self.place(now)]

    def _demoted(self, request: requests.LiveRequest, generated_tokens: int) -> bool:
        """Demotes a request that has generated its level's quantum since it came there, at `request.mark`."""
        level = request.level
        if level >= len(self.buckets) - 1:
            return False
        # A user's quantum holds for any layout; bounds follow the plan, so they are read at each decision.
        if generated_tokens - request.mark < (self._quantum or self.levels.bounds[level]):
            return False
        # One level at a time, as in the classic queue, no matter how far the request has outrun its quantum.
        request.level += 1
        request.mark = generated_tokens
        return True
