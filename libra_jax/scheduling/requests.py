"""Requests that a scheduler follows, and the rollouts and groups that they belong to.

A training step waits for whole groups: a group has rollouts, and a rollout has a live request for each of its segments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from libra_jax import protocols

if TYPE_CHECKING:
    from libra_jax.scheduling import buckets
    from libra_jax.scheduling.prediction import paths


@dataclass(slots=True, eq=False)
class LiveGroup:
    """The number of live rollouts of a group. Each evaluation rollout is a group of its own."""

    live: int = 0


@dataclass(slots=True, eq=False)
class LiveRollout:
    """A rollout with live requests: one for each of its segments.

    Attributes:
      arrived: time of its first arrival, in seconds.
      requests: its live requests, in the order of their arrival.
    """

    rollout_id: str
    group: LiveGroup
    arrived: float
    requests: list[LiveRequest] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A live request.

    Attributes:
      dispatch_version: policy version at its group's first dispatch.
      rollout: its rollout, for which a training step waits as a whole.
      context_tokens: tokens of its context at its arrival or last tool return.
      generated_tokens: tokens generated over all turns, as last reported.
      turn_start: generated tokens at its arrival or last tool return.
      input_tokens: tokens of its context at its arrival that it had not generated.
      unread: tokens of its context that no instance has seen: its prompt, or what its tool has just returned.
      level: bucket that the request is meant for.
      remaining: tokens that the policy expects it to generate still; the ordering reads this.
      queue: queue in which it waits; None while it decodes or is away.
      server: instance on which it decodes; None while it waits or is away.
      served_by: name of the instance that it decoded on last; empty before the first.
      context_at: name of the instance that may hold its context, or the part that it shares with its parent; empty if
        there is none, or after an eviction.
      inherited: tokens of the context that it shares with its parent, until it has been served itself.
      reason: why it waits, or waited last: the reason of a move that follows.
      gain: seconds that its policy expects to save by its last decision; None if that was no move, or not estimated.
      since: time at which it began to wait.
      ticket: its turn among all waiting requests; drawn each time that it begins to wait.
      seated: its turn among all placements; drawn each time that it begins to decode.
      aged: it was placed because it had waited for `scheduler.ageing_seconds`.
      mark: generated tokens at which the policy judges it next, or judged it last.
      target: the instance that it waits for; None if any instance of its bucket will do.
      urgency: cost of one second that it loses, as of its last decision (`cmlfq`).
      home: instance that counts it among its residents (`residents`).
      anchor: instance that may hold its context, or its parent's, and does not count it (`residents`).
      home_account: its context, urgency, remaining tokens and footprint as `home` counts them.
      track: its causal path, as the policy's learner follows it.
    """

    request_id: str
    prompt_id: str
    group_id: int
    dispatch_version: int
    rollout: LiveRollout
    context_tokens: int
    generated_tokens: int
    turn_start: int = 0
    input_tokens: int = 0
    unread: int = 0
    level: int = 0
    remaining: float = 0.0
    queue: buckets.Queue | None = None
    server: buckets.InstanceQueue | None = None
    served_by: str = ""
    context_at: str = ""
    inherited: int = 0
    reason: protocols.MoveReason = protocols.MoveReason.TOOL_RETURN
    gain: float | None = None
    since: float = 0.0
    ticket: int = 0
    seated: int = 0
    aged: bool = False
    mark: int = 0
    target: buckets.InstanceQueue | None = None
    urgency: float = 0.0
    home: buckets.InstanceQueue | None = None
    anchor: buckets.InstanceQueue | None = None
    home_account: tuple[int, float, float, float] = (0, 0.0, 0.0, 0.0)
    track: paths.RequestTrack | None = None

    @property
    def context_now(self) -> int:
        """Context tokens, including the tokens generated in this turn."""
        return self.context_tokens + self.generated_tokens - self.turn_start

    @property
    def read_tokens(self) -> int:
        """Tokens that tools have returned since its arrival."""
        return self.context_tokens - self.turn_start - self.input_tokens

    @property
    def away(self) -> bool:
        """Whether it neither waits nor decodes."""
        return self.queue is None and self.server is None
