"""Sticky: a request goes back to the instance that holds its cache, unless that one is much busier than another."""

from __future__ import annotations

from libra_jax.scheduling import buckets, slots, state


class Sticky(slots.SlotScheduler):
    """Cache affinity up to `scheduler.sticky_threshold`: the excess share of slots in use at which it is given up."""

    def pick(self, request: state.Request, bucket: buckets.Bucket) -> state.Server:
        least, home = bucket.least(), self.servers.get(request.last)
        if home is None or home.load >= home.slots:
            return least
        excess = home.load / home.slots - least.load / least.slots
        return home if excess <= self.config.sticky_threshold else least
