"""Loop workers: processes that run agent loops, and the messages between them and the coordinator.

A loop worker runs rollouts: agents, tools, tokenizer, rewards, and streams from engines. The coordinator keeps
admission, scheduling, versions, groups and checkpoints. It sends *commands* and gets *events*, both in order. Tokens
come with the events of tool calls and returns, so the coordinator holds each rollout up to its last model output.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from libra_jax.protocols.cluster import ActorAddress
from libra_jax.protocols.errors import LibraError
from libra_jax.protocols.loops import StreamCounts
from libra_jax.protocols.scheduling import Placement, RequestInfo
from libra_jax.protocols.tasks import Task
from libra_jax.protocols.telemetry import Span
from libra_jax.protocols.trajectories import CausalState, RolloutSnapshot, Trajectory, Turn

# Commands -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutOrder:
    """A rollout to run, from the present state of its trajectory.

    Attributes:
      trajectory: the rollout's tokens so far.
      task: its task.
      group_id: its group.
      dispatch_version: policy version at the group's first dispatch.
      temperature: sampling temperature.
    """

    trajectory: Trajectory
    task: Task
    group_id: int
    dispatch_version: int
    temperature: float


@dataclass(frozen=True)
class CancelRollout:
    """Abort a rollout and close its environment. A `RolloutLeft` follows."""

    trajectory_id: str


@dataclass(frozen=True)
class Place:
    """Carry out a placement (`PlacementSink.placed`)."""

    placement: Placement
    ask: int


@dataclass(frozen=True)
class EngineEntry:
    """What streams know of an instance (`StreamEngine`). It comes before the first placement there.

    Attributes:
      name: name of the instance.
      life: number of its present life.
      address: where it can be called; None while it is out of service.
      policy_version: version of its weights.
      paused: True while decoding is frozen for a weight update.
    """

    name: str
    life: int
    address: ActorAddress | None
    policy_version: int
    paused: bool


WorkerCommand = RolloutOrder | CancelRollout | Place | EngineEntry

# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SegmentUpdate:
    """What is new in a segment since the update before.

    Attributes:
      index: number of the segment in its rollout.
      parent: number of the segment with whose context it begins; None if it shares no token.
      shared: number of tokens shared with the parent.
      kept: number of first own tokens that have not changed.
      columns: own tokens after these, by the names of `COLUMNS`.
      routed: number of first entries of `Segment.routing` that have not changed.
      routing: the entries after these.
      turns_kept: number of first turns that have not changed.
      turns: the turns after these.
      reward: reward of the segment.
    """

    index: int
    parent: int | None
    shared: int
    kept: int
    columns: Mapping[str, array[int] | array[float]]
    routed: int
    routing: Sequence[bytes]
    turns_kept: int
    turns: Sequence[Turn]
    reward: float | None


@dataclass(frozen=True)
class RolloutUpdate:
    """What is new in a rollout since the update before. Other fields of `Trajectory` do not change.

    Attributes:
      trajectory_id: id of the rollout.
      segments: segments that have changed, by index.
      count: number of segments.
      finish: reason for the end, as it is now (`Trajectory`, like the fields below).
      metrics: numbers that the environment reports.
      start_seconds: time at which the rollout began.
      seconds: seconds since its first token.
      snapshot: latest snapshot of its environment.
      environment_reward: the environment's own part of the reward.
    """

    trajectory_id: str
    segments: Sequence[SegmentUpdate]
    count: int
    finish: str | None
    metrics: Mapping[str, float]
    start_seconds: float
    seconds: float
    snapshot: RolloutSnapshot | None
    environment_reward: float | None


@dataclass(frozen=True)
class RequestArrived:
    """A segment asks for its first tokens (`Dispatch.arrived`)."""

    info: RequestInfo


@dataclass(frozen=True)
class RequestProgressed:
    """A request has generated these tokens (`Dispatch.progressed`). Not every delta is told."""

    request: str
    generated: int


@dataclass(frozen=True)
class ToolCalled:
    """An output has ended (`Dispatch.tool_called`)."""

    request: str
    generated: int
    update: RolloutUpdate


@dataclass(frozen=True)
class ToolReturned:
    """A tool has returned (`Dispatch.tool_returned`)."""

    request: str
    generated: int
    causal_state: CausalState
    context: int
    update: RolloutUpdate


@dataclass(frozen=True)
class RequestFinished:
    """A request has ended (`Dispatch.finished`)."""

    request: str
    generated: int
    completed: bool


@dataclass(frozen=True)
class RolloutLeft:
    """A rollout has ended or was aborted, and its environment is closed.

    Attributes:
      update: the rest of the rollout.
      error: what ended the rollout; None if it has a reward, or was cancelled.
    """

    update: RolloutUpdate
    error: LibraError | None


@dataclass(frozen=True)
class EngineAnswered:
    """A life of an instance has sent a first token (`StreamEngines.answered`); told once by each worker."""

    name: str
    life: int


@dataclass(frozen=True)
class EngineFailed:
    """A life of an instance has failed (`StreamEngines.failed`)."""

    name: str
    life: int
    error: LibraError


@dataclass(frozen=True)
class WorkerCounted:
    """Counts since the event of this kind before.

    Attributes:
      streams: counts of the streams.
      voids: number of rollouts that crashed, by prompt id.
    """

    streams: StreamCounts
    voids: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerNoted:
    """A sentence for the person who watches (`Recorder.note`)."""

    text: str


@dataclass(frozen=True)
class WorkerSpans:
    """Spans of streams and tools, with event-loop seconds of the coordinator."""

    spans: Sequence[Span]


@dataclass(frozen=True)
class WorkerBroke:
    """Something other than a rollout failed on the worker, and the run ends with this error."""

    error: LibraError


WorkerEvent = (
    RequestArrived
    | RequestProgressed
    | ToolCalled
    | ToolReturned
    | RequestFinished
    | RolloutLeft
    | EngineAnswered
    | EngineFailed
    | WorkerCounted
    | WorkerNoted
    | WorkerSpans
    | WorkerBroke
)


@dataclass(frozen=True)
class WorkerAddress:
    """Where a loop worker listens for the coordinator.

    Attributes:
      host: address of its machine.
      port: its port.
      secret: key that both ends prove to know.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)


class LoopWorker(Protocol):
    """A process that runs rollouts."""

    async def start(self, now: float) -> None:
        """Makes the worker's agent.

        Args:
          now: event-loop time of the coordinator. All times in events are on that clock.

        Raises:
          LibraError: the agent, its tools or its reward cannot be made.
        """
        ...

    async def listen(self) -> WorkerAddress | None:
        """Opens the worker's channel, by which commands and events travel from then on.

        Returns:
          The channel's address. None: there is no channel, and `tell` and `events` are called.

        Raises:
          LibraError: the worker cannot listen.
        """
        ...

    async def health(self) -> None:
        """Returns at once, if the worker still answers."""
        ...

    async def tell(self, commands: Sequence[WorkerCommand]) -> None:
        """Takes commands, in order. Returns at once."""
        ...

    def events(self) -> AsyncIterator[Sequence[WorkerEvent]]:
        """Yields the events, in order. Those that happen within milliseconds come together."""
        ...

    async def shutdown(self) -> None:
        """Aborts all rollouts and closes their environments, tools and rewards."""
        ...
