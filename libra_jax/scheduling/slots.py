"""What every slot-keeping scheduler shares: who waits, who decodes where, who is away.

Decisions are left to `choose`; requests that wait are served first come, first served.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax import protocols


class SlotScheduler(abc.ABC):
    """A `protocols.Scheduler` that never lets more requests decode on an instance than it has slots.

    Not thread-safe: it belongs to one event loop.
    """

    def __init__(self) -> None:
        self._instances: dict[str, protocols.Instance] = {}
        self._load: dict[str, int] = {}
        self._decoding: dict[str, str] = {}
        self._waiting: dict[str, None] = {}
        self._away: set[str] = set()

    @abc.abstractmethod
    def choose(self, free: Sequence[protocols.Instance]) -> protocols.Instance:
        """Picks the instance that serves the next waiting request; `free` (never empty) have a slot left."""

    def load(self, instance: str) -> int:
        """Requests decoding on the instance now."""
        return self._load[instance]

    def on_instance_change(self, instances: Sequence[protocols.Instance], now: float) -> list[protocols.Placement]:
        live = {instance.name: instance for instance in instances}
        displaced = [request for request, name in self._decoding.items() if name not in live]
        for request in displaced:
            del self._decoding[request]
        # They have waited once already, so they go ahead of those that have not been served yet.
        self._waiting = {**dict.fromkeys(displaced), **self._waiting}
        self._instances = live
        self._load = dict.fromkeys(live, 0)
        for name in self._decoding.values():
            self._load[name] += 1
        return self._place()

    def on_arrival(self, request: protocols.RequestInfo, now: float) -> list[protocols.Placement]:
        return self._wait(request.request_id)

    def on_tool_call(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        self._leave(request_id)
        self._away.add(request_id)
        return self._place()

    def on_tool_return(
        self, request_id: str, causal_state: protocols.CausalState, context_tokens: int, now: float
    ) -> list[protocols.Placement]:
        self._away.remove(request_id)
        return self._wait(request_id)

    def on_progress(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        return []

    def on_finish(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        self._leave(request_id)
        self._away.discard(request_id)
        return self._place()

    def snapshot(self) -> Mapping[str, Any]:
        return {}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Nothing is learnt, so nothing is restored."""
        del snapshot

    def _wait(self, request_id: str) -> list[protocols.Placement]:
        self._waiting[request_id] = None
        return self._place()

    def _leave(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        instance = self._decoding.pop(request_id, None)
        if instance is not None:
            self._load[instance] -= 1

    def _place(self) -> list[protocols.Placement]:
        placements = []
        while self._waiting:
            free = [item for name, item in self._instances.items() if self._load[name] < item.slots]
            if not free:
                break
            request_id = next(iter(self._waiting))
            del self._waiting[request_id]
            instance = self.choose(free)
            self._decoding[request_id] = instance.name
            self._load[instance.name] += 1
            placements.append(protocols.Placement(request_id, instance.name))
        return placements
