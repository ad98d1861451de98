"""What the schedulers remember of each live request, group and instance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libra_jax import protocols

if TYPE_CHECKING:
    from libra_jax.scheduling import evidence, ordering


@dataclass(slots=True, eq=False)
class Group:
    """The live members of a group; an evaluation request is its own group."""

    live: int = 0


class Server:
    """An instance and what decodes there.

    Args:
      instance: as it was announced.
      place: its place among the instances.
      queue: requests that wait for this very instance.

    Attributes:
      name: the instance's.
      slots: the instance's.
      degree: its tensor-parallel degree.
      level: its bucket.
      load: requests decoding there.
      residents: requests whose context is there, decoding or away (`cmlfq`).
      context: their context tokens.
      urgency: sum of their urgencies.
      urgent_tokens: sum of urgency times expected tokens.
      footprint: sum of what they may come to hold of the cache, in tokens.
      noted: the least value under which its bucket's heap has it; infinite if it is not there.
      crowd: the longest queue under which the heap of crowded instances has it; 0 if it is not there.
    """

    __slots__ = (
        "context",
        "crowd",
        "degree",
        "footprint",
        "instance",
        "level",
        "load",
        "name",
        "noted",
        "place",
        "queue",
        "residents",
        "slots",
        "urgency",
        "urgent_tokens",
    )

    def __init__(self, instance: protocols.Instance, place: int, queue: ordering.Queue) -> None:
        self.queue = queue
        self.level = 0
        self.load = 0
        self.residents = 0
        self.context = 0
        self.urgency = 0.0
        self.urgent_tokens = 0.0
        self.footprint = 0.0
        self.noted = math.inf
        self.crowd = 0
        self.announce(instance, place)

    def announce(self, instance: protocols.Instance, place: int) -> None:
        """The instance is live, at this place among the others."""
        self.instance, self.place = instance, place
        self.name, self.slots, self.degree = instance.name, instance.slots, instance.tensor_parallel

    @property
    def full(self) -> bool:
        """No slot is free."""
        return self.load >= self.slots


@dataclass(slots=True, eq=False)
class Request:
    """A live request.

    Attributes:
      request_id: its name.
      prompt_id: its prompt's.
      group_id: its group's.
      dispatch_version: its group's.
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
      aged: it was placed for having waited so long.
      mark: generated tokens at which its policy looks at it again, or last did.
      wanted: the instance it waits for, if not any of its bucket.
      urgency: what a second costs that it loses, as of its last decision (`cmlfq`).
      home: the instance that counts it among its residents (`cmlfq`).
      held: its context, urgency, remaining tokens and footprint as `home` counts them.
      track: what the evidence knows of its path.
    """

    request_id: str
    prompt_id: str
    group_id: int
    dispatch_version: int
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
    aged: bool = False
    mark: int = 0
    wanted: Server | None = None
    urgency: float = 0.0
    home: Server | None = None
    held: tuple[int, float, float, float] = (0, 0.0, 0.0, 0.0)
    track: evidence.Track | None = None

    @property
    def context_now(self) -> int:
        """Context tokens, those generated in this turn included."""
        return self.context_tokens + self.generated_tokens - self.turn_start
