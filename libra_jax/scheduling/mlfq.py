"""Classic multi-level feedback queue: start at the top, sink by what was used.

The top level is the narrowest bucket. A request that has used up its quantum of tokens there is demoted at that point
to the next: it migrates at once, or gives its place up and waits where the next bucket is full (Corbato, Daggett and
Daley, 1962, with buckets of instances in place of one processor's queues). Until then it stays with the instance that
holds its context. So a slot may idle while requests wait for another, but none waits longer than
`scheduler.ageing_seconds` for one that is free.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.scheduling import slots, state


class Mlfq(slots.SlotScheduler):
    """Levels by attained service; a level's quantum is `scheduler.quanta`, or else its bucket's bound."""

    by_length = True

    def __init__(self, config: configuration.SchedulerConfig, *, degrees: Sequence[int] = ()) -> None:
        super().__init__(config, bounds=config.max_remaining_tokens, degrees=degrees)
        self._quanta = config.quanta or config.max_remaining_tokens

    def on_plan(self, planned: Sequence[protocols.PlannedBucket], now: float) -> list[protocols.Placement]:
        placements = super().on_plan(planned, now)
        if not self.config.quanta:
            self._quanta = self.levels.bounds
        return placements

    def route(self, request: state.Request, now: float) -> int:
        request.remaining = float(request.generated_tokens)
        level = min(request.level, len(self.buckets) - 1)
        request.wanted = self.home(request, level)
        return level

    def on_tool_call(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        request = self.requests[request_id]
        if self._used_up(request, generated_tokens):
            self._demote(request, generated_tokens)
        return super().on_tool_call(request_id, generated_tokens, now)

    def on_progress(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        request = self.requests[request_id]
        request.generated_tokens = generated_tokens
        if request.server is None or not self._used_up(request, generated_tokens):
            return []
        self._demote(request, generated_tokens)
        bucket = self.buckets[request.level]
        if not bucket.slots:  # its instances are lost: it stays where it is, one level lower by account
            return []
        if bucket.free > 0:
            placement = self.move(request, self.pick(request, bucket))
        else:
            placement = self.displace(request, request.level, now)
        return [placement, *self._place(now)]

    def _used_up(self, request: state.Request, generated_tokens: int) -> bool:
        """Whether it has generated its level's quantum since it came there (`request.mark`)."""
        level = request.level
        return (
            level < len(self.buckets) - 1
            and generated_tokens - request.mark >= self._quanta[min(level, len(self._quanta) - 1)]
        )

    @staticmethod
    def _demote(request: state.Request, generated_tokens: int) -> None:
        request.level += 1
        request.mark = generated_tokens
