"""What the schedulers remember of each live request, group and instance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libra_jax import protocols

if TYPE_CHECKING:
    from libra_jax.scheduling import buckets, evidence


@dataclass(slots=True, eq=False)
class Group:
    """The number of live requests of a group. Each evaluation request is a group of its own."""

    live: int = 0


class Server:
    """An instance, the requests that decode there and the requests that wait for exactly this instance.

    Args:
      instance: the instance as it was announced.
      place: its place among the live instances, which breaks ties.
      queue: requests that wait for this instance.

    Attributes:
      name: name of the instance.
      slots: slots of the instance.
      degree: tensor-parallel degree of the instance.
      level: level of its bucket.
      load: requests that decode there.
      decoding: those requests, in the order in which they were placed.
      residents: requests whose context is there, decoding or away (`cmlfq`).
      context: context tokens of the residents.
      urgency: sum of the residents' urgencies.
      urgent_tokens: sum of the residents' urgency times expected tokens.
      footprint: tokens of the key-value cache that the residents are expected to hold.
      noted: smallest value under which its bucket's heap lists it; infinite if the heap does not list it.
      crowd: longest queue under which the heap of crowded instances lists it; 0 if that heap does not list it.
    """

    __slots__ = (
        "context",
        "crowd",
        "decoding",
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

    def __init__(self, instance: protocols.Instance, place: int, queue: buckets.Queue) -> None:
        self.queue = queue
        self.level = 0
        self.load = 0
        self.decoding: dict[Request, None] = {}
        self.residents = 0
        self.context = 0
        self.urgency = 0.0
        self.urgent_tokens = 0.0
        self.footprint = 0.0
        self.noted = math.inf
        self.crowd = 0
        self.announce(instance, place)

    def announce(self, instance: protocols.Instance, place: int) -> None:
        """Takes the instance's present description and its place among the live instances."""
        self.instance, self.place = instance, place
        # Copies: the hot paths read these attributes for every decision.
        self.name, self.slots, self.degree = instance.name, instance.slots, instance.tensor_parallel

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return self.load >= self.slots


@dataclass(slots=True, eq=False)
class Request:
    """A live request.

    Attributes:
      request_id: id of the request.
      prompt_id: id of its prompt.
      group_id: id of its group.
      dispatch_version: policy version at its group's first dispatch.
      group: live requests of its group, this one included.
      arrived: time of its arrival, in seconds.
      context_tokens: tokens of its context at its arrival or last tool return.
      generated_tokens: tokens generated over all turns, as last reported.
      turn_start: generated tokens at its arrival or last tool return.
      level: bucket that the request is meant for.
      remaining: tokens that the policy expects it to generate still; the ordering reads this.
      queue: queue in which it waits; None while it decodes or is away.
      server: instance on which it decodes; None while it waits or is away.
      served_by: name of the instance that it decoded on last; empty before the first.
      context_at: name of the instance that may hold its context; empty before the first and after an eviction.
      reason: why it waits, or waited last: the reason of a move that follows.
      gain: seconds that its policy expects to save by its last decision; None if that was no move, or not estimated.
      since: time at which it began to wait.
      ticket: its turn among all waiting requests; drawn each time that it begins to wait.
      seated: its turn among all placements; drawn each time that it begins to decode.
      aged: it was placed because it had waited for `scheduler.ageing_seconds`.
      mark: generated tokens at which the policy judges it next, or judged it last.
      wanted: the instance that it waits for; None if any instance of its bucket will do.
      urgency: cost of one second that it loses, as of its last decision (`cmlfq`).
      home: instance that counts it among its residents (`cmlfq`).
      held: its context, urgency, remaining tokens and footprint as `home` counts them.
      track: its causal path, as the policy's learner follows it.
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
    queue: buckets.Queue | None = None
    server: Server | None = None
    served_by: str = ""
    context_at: str = ""
    reason: protocols.MoveReason = protocols.MoveReason.TOOL_RETURN
    gain: float | None = None
    since: float = 0.0
    ticket: int = 0
    seated: int = 0
    aged: bool = False
    mark: int = 0
    wanted: Server | None = None
    urgency: float = 0.0
    home: Server | None = None
    held: tuple[int, float, float, float] = (0, 0.0, 0.0, 0.0)
    track: evidence.Track | None = None

    @property
    def context_now(self) -> int:
        """Context tokens, including the tokens generated in this turn."""
        return self.context_tokens + self.generated_tokens - self.turn_start
