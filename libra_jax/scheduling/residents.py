"""Counts whose contexts each instance holds, and admits requests by that count.

A request is a *resident* of the instance that holds its context, its home, from its first token there until it moves or
finishes: while its tool runs too, because it comes back. `scheduler.admission` decides which instance with a free slot
has room for a new resident:
- `slots`: any.
- `cache`: one whose key-value cache is expected to hold it beside its residents. What does not fit is evicted while
  tools run and prefilled again at each turn, which costs more than waiting. Each request counts with its context and
  half of what it has yet to grow, since requests are at all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import buckets, requests, slots
from libra_jax.scheduling.prediction import learning

GROWN = 0.5
"""Share of the context that a request has yet to grow with which it is counted."""

GROWTH, FINISHED_SHARE = 2.0, 0.01
"""Tokens of context a generated token, before any request has finished, and the weight of the latest in the mean."""


def filled(server: buckets.InstanceQueue) -> float:
    """Returns the share of an instance's cache that its residents are expected to fill; of its slots, if the cache is
    of unknown size."""
    room = server.instance.cache_tokens
    return server.footprint / room if room else buckets.share_in_use(server)


class ResidentScheduler(slots.SlotScheduler):
    """See the module. The arguments are those of `slots.SlotScheduler`.

    Attributes:
      by_cache: whether admission `auto` means `cache`.
      counts_residents: whether the policy itself needs residents, no matter how requests are admitted.
      predicts: whether `Request.remaining` is a prediction; otherwise all requests are expected to grow to the mean
        context of finished ones.
      accounts: whether residents are counted.
    """

    by_cache: bool = False
    counts_residents: bool = False
    predicts: bool = False

    def __init__(
        self,
        config: config_lib.SchedulerConfig | None = None,
        *,
        order: str = "fcfs",
        kinds: Sequence[protocols.Kind] = (),
        learner: learning.PredictionLearner | None = None,
        busy: Callable[[buckets.InstanceQueue], float] | None = None,
    ) -> None:
        config = config or config_lib.SchedulerConfig()
        by_cache = self.by_cache if config.admission == "auto" else config.admission == "cache"
        self._room_share = config.cache_share if by_cache else 0.0
        self.accounts = by_cache or self.counts_residents
        self._final_context = 0.0  # mean context of finished requests; 0 before the first
        self._growth = GROWTH
        if busy is None:
            busy = filled if by_cache else buckets.share_in_use
        super().__init__(config, order=order, kinds=kinds, learner=learner, busy=busy)

    def admits(self, request: requests.LiveRequest, server: buckets.InstanceQueue) -> bool:
        # A resident is counted already. An empty instance takes any request, or one larger than its cache never ran.
        if request.home is server or not server.residents:
            return True
        room = self._room_share * server.instance.cache_tokens
        return not room or server.footprint + self.footprint(request) <= room

    def footprint(self, request: requests.LiveRequest) -> float:
        """Returns the tokens of the cache with which the request is counted."""
        context = request.context_now
        if self.predicts:
            return context + GROWN * self._growth * request.remaining
        return context + GROWN * max(0.0, self._final_context - context)

    def on_instance_change(self, instances: Sequence[protocols.Instance], now: float) -> list[protocols.Placement]:
        live = {instance.name for instance in instances}
        # Before the buckets are made again, because an account is closed with the bucket that it was kept in.
        for request in self.requests.values():
            if request.home is not None and request.home.name not in live:
                self.evict(request)
            if request.anchor is not None and request.anchor.name not in live:
                request.anchor = None
        return super().on_instance_change(instances, now)

    def on_finish(
        self, request_id: str, generated_tokens: int, now: float, *, completed: bool = True
    ) -> list[protocols.Placement]:
        request = self.requests[request_id]
        if self.accounts:
            request.generated_tokens = generated_tokens
            # Held-out tasks must not teach, as in `slots`; an aborted request has not grown to its end.
            if completed and generated_tokens and request.group_id != protocols.EVALUATION_GROUP:
                context = request.context_now
                self._growth += FINISHED_SHARE * (context / generated_tokens - self._growth)
                share = FINISHED_SHARE if self._final_context else 1.0
                self._final_context += share * (context - self._final_context)
            self.evict(request)
        return super().on_finish(request_id, generated_tokens, now, completed=completed)

    def seat(
        self, request: requests.LiveRequest, server: buckets.InstanceQueue, reason: protocols.MoveReason
    ) -> protocols.Placement:
        placement = super().seat(request, server, reason)
        if self.accounts:
            self.account(request, server)
        return placement

    def begins(self, request: requests.LiveRequest) -> None:
        """Takes its rollout's other segments that are away off their instances' accounts.

        A segment waits for its sub-agents, and one whose history was summarised never comes back. Their contexts stay
        where they are, and draw them back there.
        """
        if len(request.rollout.requests) > 1:
            for segment in request.rollout.requests:
                if segment is not request and segment.home is not None and segment.away:
                    segment.anchor = segment.home
                    self.evict(segment)
        if request.inherited:
            request.anchor = self.servers.get(request.context_at)

    def account(self, request: requests.LiveRequest, server: buckets.InstanceQueue) -> None:
        """Makes the request a resident of the instance, or brings its account there up to date."""
        context, urgency, remaining = request.context_now, request.urgency, request.remaining
        footprint = self.footprint(request)
        if request.home is server:
            context_then, urgency_then, remaining_then, footprint_then = request.home_account
            server.footprint += footprint - footprint_then
            server.context += context - context_then
            server.urgency += urgency - urgency_then
            server.urgent_tokens += urgency * remaining - urgency_then * remaining_then
            # Tells the bucket's heap that the instance is less busy. It corrects growth when the entry comes up
            # (`Bucket`).
            if context < context_then or footprint < footprint_then:
                self.buckets[server.level].eased(server)
        else:
            self.evict(request)
            request.home, request.anchor = server, None
            server.residents += 1
            server.footprint += footprint
            server.context += context
            server.urgency += urgency
            server.urgent_tokens += urgency * remaining
        request.home_account = context, urgency, remaining, footprint

    def leave_full(self, request: requests.LiveRequest) -> None:
        """Takes a request whose tool has returned off a home whose residents have outgrown the cache.

        The engine has evicted its context, or another's in its place. So it waits for room on any instance.
        """
        home = request.home
        if home is not None and self._room_share and 0 < home.instance.cache_tokens < home.context:
            self.evict(request)
            request.context_at = ""

    def evict(self, request: requests.LiveRequest) -> None:
        """Takes the request off its home's account."""
        server = request.home
        if server is None:
            return
        request.home = None
        context, urgency, remaining, footprint = request.home_account
        server.residents -= 1
        server.footprint -= footprint
        server.context -= context
        server.urgency -= urgency
        server.urgent_tokens -= urgency * remaining
        if not server.residents:  # so that rounding errors do not add up
            server.context, server.urgency, server.urgent_tokens, server.footprint = 0, 0.0, 0.0, 0.0
        self.buckets[server.level].eased(server)
        self._touched.append(server)  # who waits for this instance may have room now
