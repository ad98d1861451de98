"""Least loaded: a request goes to the instance with the smallest share of its slots in use, whatever its degree."""

from __future__ import annotations

from libra_jax.scheduling import slots


class LeastLoaded(slots.SlotScheduler):
    """Evens out the load; ties go to the instance with more slots, then to the first named."""
