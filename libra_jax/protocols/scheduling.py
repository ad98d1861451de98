"""Scheduling: which instance serves a request next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from libra_jax.protocols.generation import FinishReason, SamplingParams
from libra_jax.protocols.moves import Move
from libra_jax.protocols.trajectories import CausalState, Trajectory


@dataclass(frozen=True)
class Instance:
    """A rollout instance as the scheduler sees it.

    Attributes:
      name: the instance's.
      tensor_parallel: devices that share one copy of the weights.
      slots: most requests that decode at once.
      cache_tokens: tokens of context that its key-value cache holds; 0 if that is not known.
    """

    name: str
    tensor_parallel: int
    slots: int
    cache_tokens: int = 0


@dataclass(frozen=True)
class PlannedBucket:
    """The rollout instances of one tensor-parallel degree, and what they are for.

    Attributes:
      tensor_parallel: their degree.
      count: how many.
      max_remaining_tokens: the longest request that they serve; the widest serve whatever is longer too.
    """

    tensor_parallel: int
    count: int
    max_remaining_tokens: int


@dataclass(frozen=True)
class Plan:
    """Who trains and who rolls out.

    Attributes:
      data: replicas of the trainer's mesh.
      fsdp: ways its state is sharded.
      tensor: ways its layers' matrices are split.
      rollout: the instances, the narrowest first.
    """

    data: int
    fsdp: int
    tensor: int
    rollout: tuple[PlannedBucket, ...]

    @property
    def train_devices(self) -> int:
        """Devices in the trainer's mesh."""
        return self.data * self.fsdp * self.tensor

    @property
    def rollout_devices(self) -> int:
        """Devices of all instances."""
        return sum(bucket.tensor_parallel * bucket.count for bucket in self.rollout)


@dataclass(frozen=True)
class RequestInfo:
    """A trajectory that asks for tokens.

    Attributes:
      request_id: the trajectory's id.
      prompt_id: its prompt; siblings share it.
      group_id: its group.
      context_tokens: tokens in its context now.
      generated_tokens: tokens generated so far, over all turns.
      dispatch_version: policy version at its group's first dispatch; the group's staleness is counted from here.
    """

    request_id: str
    prompt_id: str
    group_id: int
    context_tokens: int
    generated_tokens: int = 0
    dispatch_version: int = 0


class Placement(NamedTuple):
    """The scheduler's decision: from now on this instance serves this request.

    An empty instance takes a decoding request's place away: it keeps its tokens and waits again.

    Attributes:
      request_id: id of the request.
      instance: name of the instance, or empty.
      move: the move that the decision makes; None if the request stays where it was served, or was served nowhere yet.
    """

    request_id: str
    instance: str
    move: Move | None = None


EVALUATION_GROUP = -1
"""Group id of requests that belong to no training group; to a scheduler each is a group of its own."""


class Scheduler(Protocol):
    """Pure decisions over events. Each call returns the placements it makes, of any waiting request.

    A request *waits* from `on_arrival` or `on_tool_return` until it is placed, *decodes* (and holds a slot) until
    `on_tool_call` or `on_finish`, and is *away* (holds none) while its tool runs. One whose attempt is out of time
    may go away, or finish, while it waits.
    """

    def on_instance_change(self, instances: Sequence[Instance], now: float) -> list[Placement]:
        """The set of live instances; requests decoding on one that is gone wait again."""
        ...

    def on_plan(self, planned: Sequence[PlannedBucket], now: float) -> list[Placement]:
        """Other buckets than config's: every live instance's degree has one from now on."""
        ...

    def on_arrival(self, request: RequestInfo, now: float) -> list[Placement]: ...

    def on_tool_call(self, request_id: str, generated_tokens: int, now: float) -> list[Placement]: ...

    def on_tool_return(
        self, request_id: str, causal_state: CausalState, context_tokens: int, now: float
    ) -> list[Placement]: ...

    def on_progress(self, request_id: str, generated_tokens: int, now: float) -> list[Placement]: ...

    def on_finish(
        self, request_id: str, generated_tokens: int, now: float, *, completed: bool = True
    ) -> list[Placement]:
        """The request never comes back under this id unless it arrives anew.

        Args:
          request_id: which.
          generated_tokens: its length; `completed` says if that is the whole one, or it failed or was given up.
          now: seconds.
          completed: it came to its own end, so its length teaches something.
        """
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """Statistics worth keeping across a restart; JSON-able."""
        ...

    def restore(self, snapshot: Mapping[str, Any]) -> None: ...

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        """Adds the statistics of another coordinator's snapshot; where room is short, its own count as the later."""
        ...


class Sampler(Protocol):
    """How the agent loop gets tokens: the coordinator's side of an attempt (instance choice, retries, telemetry)."""

    async def sample(
        self, trajectory: Trajectory, sampling: SamplingParams, heard: Callable[[], None] | None = None
    ) -> FinishReason:
        """Appends one model output to the trajectory, from whichever instances serve it; never returns "abort".

        A failed engine is invisible here: the request resumes elsewhere from the tokens the trajectory holds. `heard`
        is called whenever tokens have been appended; it returns at once and never raises. Cancelled, it leaves the
        tokens that have come, and nothing is appended any more.
        """
        ...

    async def tool_called(self, trajectory: Trajectory) -> None:
        """The output has ended, or its `sample` was cancelled: the request gives its slot back.

        A tool runs, or the attempt is scored and closed.
        """
        ...

    async def tool_returned(self, trajectory: Trajectory, causal_state: CausalState) -> None:
        """The tool return has been appended, and a `sample` follows, which may go to another instance."""
        ...
