"""Scheduling: assigns requests to rollout instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from libra_jax.protocols.rollout import FinishReason, SamplingParams
from libra_jax.protocols.trajectories import CausalState, Move, Segment

Kind: TypeAlias = tuple[int, str]
"""What tells instances apart: their tensor-parallel degree, and their accelerator (empty if all have the same)."""


@dataclass(frozen=True)
class Instance:
    """A rollout instance as the scheduler sees it.

    Attributes:
      name: name of the instance.
      tensor_parallel: number of devices that share one copy of the weights.
      slots: maximum number of requests that decode at once (vLLM's max_num_seqs).
      cache_tokens: capacity of the key-value cache in tokens of context; 0 if unknown.
      accelerator: name of its accelerator's hardware sheet; empty if all instances have the same.
    """

    name: str
    tensor_parallel: int
    slots: int
    cache_tokens: int = 0
    accelerator: str = ""

    @property
    def kind(self) -> Kind:
        """Degree and accelerator."""
        return self.tensor_parallel, self.accelerator


@dataclass(frozen=True)
class PlannedBucket:
    """The rollout instances of one tensor-parallel degree, and their purpose.

    Attributes:
      tensor_parallel: degree of these instances.
      count: number of instances.
      max_remaining_tokens: longest request in tokens that they serve; the widest instances also serve longer requests.
    """

    tensor_parallel: int
    count: int
    max_remaining_tokens: int


@dataclass(frozen=True)
class Plan:
    """The division of devices between training and rollout.

    Attributes:
      data: number of copies in the trainer's mesh.
      fsdp: number of ways to shard the trainer's state.
      tensor: number of ways to split its layers' matrices.
      rollout: rollout instances, the narrowest first.
      context: number of ways to split the tokens of a row; plans keep that of the config.
    """

    data: int
    fsdp: int
    tensor: int
    rollout: tuple[PlannedBucket, ...]
    context: int = 1

    @property
    def train_devices(self) -> int:
        """Number of devices in the trainer's mesh."""
        return self.data * self.fsdp * self.tensor * self.context

    @property
    def rollout_devices(self) -> int:
        """Number of devices of all instances."""
        return sum(bucket.tensor_parallel * bucket.count for bucket in self.rollout)


@dataclass(frozen=True)
class RequestInfo:
    """A segment of a rollout that asks for tokens.

    Attributes:
      request_id: name of the segment.
      prompt_id: id of its prompt; siblings share it.
      group_id: id of its group.
      context_tokens: number of tokens in its context now.
      generated_tokens: number of its own tokens generated so far, over all turns.
      dispatch_version: policy version at its group's first dispatch; the group's staleness is counted from here.
      parent: name of the segment that its context begins with; empty if there is none. The instance that holds the
        parent's context holds the beginning of this one.
      shared_tokens: number of first tokens of the context that are shared with `parent`.
      rollout_id: id of its rollout; empty if the request is a rollout of its own.
      segment: number of the segment in its rollout, from 0.
    """

    request_id: str
    prompt_id: str
    group_id: int
    context_tokens: int
    generated_tokens: int = 0
    dispatch_version: int = 0
    parent: str = ""
    shared_tokens: int = 0
    rollout_id: str = ""
    segment: int = 0


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
    # Decided together with the placement: comparing instance names later would miss the reason.
    move: Move | None = None


EVALUATION_GROUP = -1
"""Group id of requests outside every training group; the scheduler treats each as its own group."""


class Scheduler(Protocol):
    """Makes pure decisions over events. Each call returns its placements, of any waiting request.

    A request *waits* from `on_arrival` or `on_tool_return` until it is placed. It *decodes*, and holds a slot, until
    `on_tool_call` or `on_finish`. It is *away*, and holds no slot, while its tool runs. A request whose rollout has run
    out of time may go away, or finish, while it waits. `now` is event-loop time in seconds, and never decreases.
    """

    def on_instance_change(self, instances: Sequence[Instance], now: float) -> list[Placement]:
        """Sets the live instances. Requests that decode on a lost instance wait again."""
        ...

    def on_plan(self, planned: Sequence[PlannedBucket], now: float) -> list[Placement]:
        """Replaces the buckets of the config: from now on every live instance's degree has one of these buckets."""
        ...

    def on_arrival(self, request: RequestInfo, now: float) -> list[Placement]:
        """Admits a request, which waits from now on."""
        ...

    def on_tool_call(self, request_id: str, generated_tokens: int, now: float) -> list[Placement]:
        """Sends a request away and frees its slot. `generated_tokens`: tokens over all turns so far."""
        ...

    def on_tool_return(
        self, request_id: str, causal_state: CausalState, context_tokens: int, now: float
    ) -> list[Placement]:
        """Lets a request wait again, perhaps for another instance.

        Args:
          request_id: id of the request.
          causal_state: what the tool returned; it predicts the tokens that remain.
          context_tokens: number of tokens in the context, the return included.
          now: event-loop time in seconds.
        """
        ...

    def on_progress(self, request_id: str, generated_tokens: int, now: float) -> list[Placement]:
        """Notes that a decoding request has `generated_tokens` over all turns; it may have outrun its bucket."""
        ...

    def on_finish(
        self, request_id: str, generated_tokens: int, now: float, *, completed: bool = True
    ) -> list[Placement]:
        """Ends a request. It never comes back under this id without a new arrival.

        Args:
          request_id: id of the request.
          generated_tokens: its length in tokens; the whole length only if `completed`.
          now: event-loop time in seconds.
          completed: True if it reached its own end, so that its length is informative; False if it failed or was
            aborted.
        """
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """Returns statistics to keep across a restart; JSON-able."""
        ...

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restores the statistics of a snapshot, at a restart."""
        ...

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        """Adds the statistics of another coordinator's snapshot. If space is short, its own count as later."""
        ...


class Sampler(Protocol):
    """The coordinator's side of a rollout: gets tokens for the agent loop (instance choice, retries, telemetry)."""

    async def sample(
        self, segment: Segment, sampling: SamplingParams, on_tokens: Callable[[], None] | None = None
    ) -> FinishReason:
        """Appends one model output to the segment, from any instances that serve it; never returns "abort".

        A failed engine is invisible here: the request resumes elsewhere from the segment's tokens. `on_tokens` is
        called after tokens have been appended; it returns at once and never raises. If `sample` is cancelled, the
        tokens received so far stay, and nothing more is appended.
        """
        ...

    async def tool_called(self, segment: Segment) -> None:
        """Frees the request's slot after its output has ended, or after its `sample` was cancelled.

        Then a tool runs, or the rollout is scored and closed.
        """
        ...

    async def tool_returned(self, segment: Segment, causal_state: CausalState) -> None:
        """Announces that the tool return has been appended and a `sample` follows, perhaps on another instance."""
        ...
