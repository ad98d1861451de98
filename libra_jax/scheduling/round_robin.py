"""Round robin: instances take turns, those without a free slot being passed over."""

from __future__ import annotations

from collections.abc import Sequence

from libra_jax import protocols
from libra_jax.scheduling import buckets, slots, state


class RoundRobin(slots.SlotScheduler):
    """Blind to load, save that a full instance misses its turn."""

    _last = ""
    _cycle: Sequence[state.Server] = ()

    def on_instance_change(self, instances: Sequence[protocols.Instance], now: float) -> list[protocols.Placement]:
        self._cycle = ()
        return super().on_instance_change(instances, now)

    def pick(self, request: state.Request, bucket: buckets.Bucket) -> state.Server:
        if not self._cycle:
            # By name, so that an instance that comes back after a restart keeps its place in the cycle.
            servers = sorted(bucket.servers, key=lambda server: server.name)
            first = next((place for place, server in enumerate(servers) if server.name > self._last), 0)
            self._cycle = servers[first:] + servers[:first]
            self._turn = 0
        server = self._cycle[self._turn]
        while server.load >= server.slots:
            self._turn = (self._turn + 1) % len(self._cycle)
            server = self._cycle[self._turn]
        self._turn = (self._turn + 1) % len(self._cycle)
        self._last = server.name
        return server
