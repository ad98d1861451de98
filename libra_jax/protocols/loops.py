"""Agent loops: what the streams of a rollout and the dispatcher of the run promise each other.

Streams fill the segments of rollouts with tokens, where the agent loops run. The dispatcher places their requests on
instances, in the coordinator. Both live in one process, or messages pass between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

from libra_jax.protocols.rollout import EngineClient
from libra_jax.protocols.scheduling import Placement, RequestInfo
from libra_jax.protocols.trajectories import CausalState


@dataclass
class Waits:
    """Waits from asking an instance for tokens to its first token: total seconds, and their number."""

    seconds: float = 0.0
    count: int = 0


@dataclass
class StreamCounts:
    """Counts of streams since they were last taken.

    Attributes:
      tokens: tokens sampled for training groups.
      requests: segments of rollouts that made their first request.
      resumed: streams that failed and resumed.
      waited_seconds: seconds that requests of training groups waited for a slot, summed.
      stream_seconds: seconds that slots were in use, summed.
      moves: requests that moved to another instance.
      moved_tokens: context tokens of moved requests, whose keys and values the new instance lacked.
      moved: waits for first tokens after a move: the new instance first prefills the context.
      stayed: waits for first tokens without a move: the prefix cache may hold the context.
    """

    tokens: int = 0
    requests: int = 0
    resumed: int = 0
    waited_seconds: float = 0.0
    stream_seconds: float = 0.0
    moves: int = 0
    moved_tokens: int = 0
    moved: Waits = field(default_factory=Waits)
    stayed: Waits = field(default_factory=Waits)

    def add(self, other: StreamCounts) -> None:
        """Adds the counts of other streams."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, Waits):
                mine.seconds += theirs.seconds
                mine.count += theirs.count
            else:
                setattr(self, item.name, mine + theirs)


class StreamEngine(Protocol):
    """A rollout instance, as streams see it."""

    @property
    def name(self) -> str:
        """Name of the instance."""
        ...

    @property
    def client(self) -> EngineClient | None:
        """Calls its present process; None while it has none."""
        ...

    @property
    def life(self) -> int:
        """Number of its present life, so that a late error of an earlier life is ignored."""
        ...

    @property
    def paused(self) -> bool:
        """True while decoding is frozen for a weight update."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of its weights."""
        ...


class StreamEngines(Protocol):
    """The rollout instances, as streams see them."""

    @property
    def engines(self) -> Mapping[str, StreamEngine]:
        """The instances by name; those that a plan has ended are gone."""
        ...

    def answered(self, name: str, life: int) -> None:
        """Takes in that a life of an instance has sent a first token of a stream."""
        ...

    def failed(self, name: str, life: int, error: BaseException) -> None:
        """Takes an instance out of service, at once or as soon as the dispatcher hears of it. Ignores earlier lives."""
        ...


class PlacementSink(Protocol):
    """Streams, as the dispatcher sees them."""

    def placed(self, placement: Placement, ask: int) -> None:
        """Carries out a placement.

        Args:
          placement: the placement. It is ignored if the request has ended, or asks no more for that turn.
          ask: number of tool returns of the request at the decision.
        """
        ...


class Dispatch(Protocol):
    """The dispatcher, as streams see it. Placements come by `PlacementSink.placed`, perhaps before a call returns."""

    def arrived(self, info: RequestInfo, sink: PlacementSink) -> None:
        """Admits a request, which waits from now on. `sink` takes its placements."""
        ...

    def progressed(self, request: str, generated: int) -> None:
        """Notes the tokens that a decoding request has generated, over all turns."""
        ...

    def tool_called(self, request: str, generated: int) -> None:
        """Sends a request away: it holds no slot until its tool returns."""
        ...

    def tool_returned(self, request: str, generated: int, causal_state: CausalState, context: int) -> None:
        """Lets a request wait again. `context`: tokens of its context, the return included."""
        ...

    def finished(self, request: str, generated: int, *, completed: bool) -> None:
        """Ends a request. `completed`: its rollout reached its own end."""
        ...
