"""Least loaded: a request goes to the instance with the smallest share of its slots in use."""

from __future__ import annotations

from collections.abc import Sequence

from libra_jax import protocols
from libra_jax.scheduling import slots


class LeastLoaded(slots.SlotScheduler):
    """Evens out the load; ties go to the instance with more slots, then to the first named."""

    def choose(self, free: Sequence[protocols.Instance]) -> protocols.Instance:
        return min(free, key=lambda instance: (self.load(instance.name) / instance.slots, -instance.slots))
