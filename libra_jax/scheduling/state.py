"""What the schedulers remember of each live request, group and instance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from libra_jax import protocols

if TYPE_CHECKING:
    from libra_jax.scheduling import evidence, ordering


@dataclass(slots=True, eq=False)
class Group:
    """The live members of a group; an evaluation request is its own group."""

    live: int = 0


@dataclass(slots=True, eq=False)
class Server:
    """An instance and how many requests decode there."""

    instance: protocols.Instance
    place: int
    level: int = 0
    load: int = 0
    expected: float = 0.0  # sum over the requests decoding there of the tokens expected when each was placed

    @property
    def name(self) -> str:
        return self.instance.name


@dataclass(slots=True, eq=False)
class Request:
    """A live request.

    Attributes:
      info: what arrived.
      group: its group's live members, itself included.
      arrived: when it arrived, in seconds.
      context_tokens: its context at its arrival or last tool return.
      generated_tokens: over all turns, as last told.
      turn_start: generated tokens at its arrival or last tool return.
      level: the bucket it is meant for.
      remaining: tokens it is expected to generate still, as the ordering sees it.
      queue: where it waits; None while it decodes or is away.
      server: where it decodes; None while it waits or is away.
      last: name of the instance that served it last and may hold its context; empty before the first.
      since: when it began to wait.
      ticket: its turn among all who wait; drawn anew each time it begins to wait.
      mark: generated tokens at which its policy looks at it again, or last did.
      counted: tokens it was expected to generate when it was placed on `server`.
      track: what the evidence knows of its path.
    """

    info: protocols.RequestInfo
    group: Group
    arrived: float
    context_tokens: int
    generated_tokens: int
    turn_start: int = 0
    level: int = 0
    remaining: float = 0.0
    queue: ordering.Queue | None = None
    server: Server | None = None
    last: str = ""
    since: float = 0.0
    ticket: int = 0
    mark: int = 0
    counted: float = 0.0
    dispatch_version: int = 0
    track: evidence.Track | None = None

    @property
    def request_id(self) -> str:
        return self.info.request_id

    @property
    def context_now(self) -> int:
        """Context tokens, those generated in this turn included."""
        return self.context_tokens + self.generated_tokens - self.turn_start
