"""Sticky: a request goes back to the instance that holds its cache, unless that one is much busier than another."""

from __future__ import annotations

from libra_jax.scheduling import buckets, slots, state


class Sticky(slots.SlotScheduler):
    """Cache affinity up to `scheduler.sticky_threshold`: the excess share of slots at which it is given up.

    Who waits for an instance counts as one of its load. So a slot may idle while requests wait for their caches, up to
    the threshold, and none waits longer than `scheduler.ageing_seconds` for one that is free.
    """

    def route(self, request: state.Request, now: float) -> int:
        home = self.servers.get(request.last)
        request.remaining = float(request.generated_tokens)
        request.wanted = None if home is None or self._excess(home) > self.config.sticky_threshold else home
        return 0

    def serves(self, bucket: buckets.Bucket, request: state.Request) -> bool:
        return request.wanted is None or self._excess(request.wanted) > self.config.sticky_threshold

    def _excess(self, home: state.Server) -> float:
        """How much busier the instance is than the least busy one, in shares of their slots."""
        bucket = self.buckets[0]
        least = buckets.share_in_use(bucket.least()) if bucket.free > 0 else 1.0
        return (home.load + home.queue.size) / home.slots - least
