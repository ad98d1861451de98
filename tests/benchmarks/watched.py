"""Watches a scheduler: which instances decode a band's tokens (planning/forecast/confusion.py), and waits."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import protocols


@dataclass(frozen=True)
class Shares:
    """Shares of tokens that the widest instances decode.

    Attributes:
      longest: share of the tokens of the longest band's requests.
      others: share of the tokens of all other requests.
    """

    longest: float
    others: float

    @property
    def recognised(self) -> float:
        """Share of the longest band's requests that are brought to the widest instances; free slots serve the rest, as
        they serve the other requests."""
        return (self.longest - self.others) / (1.0 - self.others) if self.others < 1.0 else 0.0


class Watched:
    """A scheduler that counts the tokens of each request by the degree of the instance that decodes them.

    Args:
      scheduler: makes the decisions.
      versions: dispatch versions of the counted requests.

    Attributes:
      waits: seconds that each placed request had waited, at each of its turns.
    """

    def __init__(self, scheduler: protocols.Scheduler, versions: range) -> None:
        self._scheduler = scheduler
        self._versions = versions
        self._degrees: dict[str, int] = {}
        self._on: dict[str, int] = {}  # degree of the instance that serves each request
        self._begun: dict[str, int] = {}  # tokens of each counted request until now
        self._counts: dict[str, collections.Counter[int]] = {}
        self._finished: list[collections.Counter[int]] = []
        self._waiting: dict[str, float] = {}  # time since which a counted request waits
        self.waits: list[float] = []

    def shares(self, bound: int) -> Shares:
        """Returns the shares of the finished requests; those of more than `bound` tokens are the longest band."""
        widest = max(self._degrees.values())
        wide, all_of = [0, 0], [0, 0]
        for tokens in self._finished:
            short = tokens.total() <= bound
            wide[short] += tokens[widest]
            all_of[short] += tokens.total()
        return Shares(*(part / max(1, whole) for part, whole in zip(wide, all_of, strict=True)))

    def on_instance_change(self, instances: Sequence[protocols.Instance], now: float) -> list[protocols.Placement]:
        self._degrees |= {instance.name: instance.tensor_parallel for instance in instances}
        return self._placed(self._scheduler.on_instance_change(instances, now), now)

    def on_plan(self, planned: Sequence[protocols.PlannedBucket], now: float) -> list[protocols.Placement]:
        return self._placed(self._scheduler.on_plan(planned, now), now)

    def on_arrival(self, request: protocols.RequestInfo, now: float) -> list[protocols.Placement]:
        if request.dispatch_version in self._versions:
            self._begun[request.request_id] = request.generated_tokens
            self._counts[request.request_id] = collections.Counter()
            self._waiting[request.request_id] = now
        return self._placed(self._scheduler.on_arrival(request, now), now)

    def on_tool_call(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        self._count(request_id, generated_tokens)
        return self._placed(self._scheduler.on_tool_call(request_id, generated_tokens, now), now)

    def on_tool_return(
        self, request_id: str, causal_state: protocols.CausalState, context_tokens: int, now: float
    ) -> list[protocols.Placement]:
        if request_id in self._counts:
            self._waiting[request_id] = now
        return self._placed(self._scheduler.on_tool_return(request_id, causal_state, context_tokens, now), now)

    def on_progress(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        self._count(request_id, generated_tokens)
        return self._placed(self._scheduler.on_progress(request_id, generated_tokens, now), now)

    def on_finish(
        self, request_id: str, generated_tokens: int, now: float, *, completed: bool = True
    ) -> list[protocols.Placement]:
        self._count(request_id, generated_tokens)
        tokens = self._counts.pop(request_id, None)
        if tokens is not None and completed:
            self._finished.append(tokens)
        return self._placed(self._scheduler.on_finish(request_id, generated_tokens, now, completed=completed), now)

    def snapshot(self) -> Mapping[str, Any]:
        return self._scheduler.snapshot()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._scheduler.restore(snapshot)

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        self._scheduler.merge(snapshot)

    def _placed(self, placements: list[protocols.Placement], now: float) -> list[protocols.Placement]:
        for placement in placements:
            if placement.instance:
                since = self._waiting.pop(placement.request_id, None)
                if since is not None:
                    self.waits.append(now - since)
                self._on[placement.request_id] = self._degrees[placement.instance]
        return placements

    def _count(self, request_id: str, generated_tokens: int) -> None:
        if request_id in self._counts:
            self._counts[request_id][self._on[request_id]] += generated_tokens - self._begun[request_id]
            self._begun[request_id] = generated_tokens
