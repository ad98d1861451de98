"""Round robin: instances take turns, those without a free slot being passed over."""

from __future__ import annotations

from collections.abc import Sequence

from libra_jax import protocols
from libra_jax.scheduling import slots


class RoundRobin(slots.SlotScheduler):
    """Blind to load, save that a full instance misses its turn."""

    def __init__(self) -> None:
        super().__init__()
        self._last = ""

    def choose(self, free: Sequence[protocols.Instance]) -> protocols.Instance:
        # By name, so that an instance that comes back after a restart keeps its place in the cycle.
        ordered = sorted(free, key=lambda instance: instance.name)
        following = [instance for instance in ordered if instance.name > self._last]
        chosen = (following or ordered)[0]
        self._last = chosen.name
        return chosen
