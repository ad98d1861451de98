"""Trajectories: tokens in, tokens out. Sampled tokens are never decoded and tokenized again."""

from __future__ import annotations

import copyreg
import enum
import itertools
import pickle
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NotRequired, SupportsIndex, TypedDict

from libra_jax.protocols.rollout import NO_VERSION, TokenDelta
from libra_jax.protocols.tasks import Message, Task


class MoveReason(enum.StrEnum):
    """Why a request goes on on another instance."""

    TOOL_RETURN = "tool_return"
    """A tool returned, and the policy chose the other instance."""

    BUDGET_OUTRUN = "budget_outrun"
    """It generated more tokens than its bucket is for."""

    ENGINE_LOST = "engine_lost"
    """The instance that served it is no longer live: it failed, ended by a plan, or switched to training."""

    PREEMPTED = "preempted"
    """It gave its place up to a longer request."""

    OVERFLOW = "overflow"
    """Its own queue had no free slot, and the other instance had one that would have idled."""

    AGING = "aging"
    """It had waited for `scheduler.ageing_seconds`, and the other instance had the first free slot."""


class Move(NamedTuple):  # a tuple is made in a third of a frozen dataclass's time, and decisions are many
    """A request's move between instances: the new one has to prefill its context, or to be given it.

    Attributes:
      request: id of the request.
      source: name of the instance that served it before.
      target: name of the instance that serves it from now on.
      reason: why it moves.
      expected_gain: seconds that the policy expects the move to save, its cost taken off; None if it made no estimate.
    """

    request: str
    source: str
    target: str
    reason: MoveReason
    expected_gain: float | None = None


class MoveRecord(TypedDict):
    """A move as `trace.jsonl` holds it; its turn's record names the request."""

    source: str
    target: str
    reason: MoveReason
    expected_gain: float | None


class TokenSource(enum.IntEnum):
    """The writer of a token."""

    PROMPT = 0
    MODEL = 1
    TOOL = 2


ToolStatus = Literal["success", "failure", "timeout"]
LIMITS = ("length", "max_turns", "max_tokens", "max_seconds", "max_context")
"""Limits that may end a rollout; `length` is the limit of one output (`rollout.max_tokens`)."""

FINISHES = ("answered", *LIMITS)
"""Reasons for the end of a rollout: the environment ended it, or an output or the rollout reached a limit."""


@dataclass(frozen=True)
class CausalState:
    """The part of a tool return that predicts what comes next (C-MLFQ, arXiv 2606.03077 section 4).

    Attributes:
      tool: name of the tool.
      payload_tokens: tokens that the return appended to the context.
      status: outcome of the call.
      call: what the call did, such as "edit" or "test", where a tool's name does not tell; empty if unknown.
      error: class of the error that the return names, such as "ImportError" or "exit 1"; empty if none is known.
    """

    tool: str
    payload_tokens: int
    status: ToolStatus
    call: str = ""
    error: str = ""


@dataclass
class Turn:
    """One model output and the tool return after it, as the trace records them.

    Attributes:
      generated_tokens: tokens the policy sampled in this turn, its stop token included.
      tool: name of the tool called, or None for a turn without a call; of several at once, all, sorted and joined by
        "+".
      status: outcome of the call, or None without a call; of several, the worst.
      payload_tokens: tokens that the tool returns appended to the context.
      tool_seconds: time the tool took after the output had ended, or several together, without the wait for what they
        need (`Queued`); after one that calls none, the environment's step, scoring for example.
      start_seconds: event-loop time at which the turn's generation was asked for.
      call: what the call did (`CausalState.call`); of several, all that are known, joined by "+".
      error: class of the error that the return names (`CausalState.error`); of several, the first that is known.
      moves: moves after which other instances went on with the output, in order.
    """

    generated_tokens: int
    tool: str | None = None
    status: ToolStatus | None = None
    payload_tokens: int = 0
    tool_seconds: float = 0.0
    start_seconds: float = 0.0
    moves: tuple[Move, ...] = ()
    call: str = ""
    error: str = ""


@dataclass(frozen=True)
class RolloutSnapshot:
    """A point from which a rollout can resume without replaying its past.

    Attributes:
      state: the environment's state (`Resumable.snapshot`); JSON-able.
      position: number of the trajectory's tokens up to this point.
      turn: number of outputs up to this point.
      metrics: metrics that the environment had reported by then.
      messages: dialogue up to this point.
    """

    state: Mapping[str, Any]
    position: int
    turn: int
    metrics: Mapping[str, float]
    messages: Sequence[Message] = ()


BUFFERS = 5
"""First protocol of pickle that knows buffers (PEP 574)."""

COLUMNS = {
    "token_ids": "i",
    "sources": "b",
    "loss_mask": "b",
    "log_probs": "f",
    "policy_versions": "i",
    "teacher_log_probs": "f",
}
"""The columns of a segment, with the type codes of their arrays: 32-bit integers and floats, and bytes."""


@dataclass
class Segment:
    """A run of tokens of one rollout: the context of one or more model outputs.

    A rollout has one segment as long as each request extends the last one. A history that is summarised or rewritten,
    and a sub-agent, begin another segment. Tokens that a segment shares with the beginning of another are kept there
    alone, and are trained there alone. A segment's first own token is never trained.

    The five columns `token_ids` to `policy_versions` hold the segment's own tokens, and always have the same length.
    Columns are C arrays: 14 bytes a token, a single copy where they cross processes, and numpy reads them in place.
    Other sequences of numbers are converted. A column equals arrays alone, never a list. It cannot grow while numpy
    views of it are alive, and `bytes` gives its memory instead of its numbers.

    Attributes:
      trajectory_id: id of the rollout, `<prompt_id>/<sample index>`, unique in a run.
      prompt_id: id of the task.
      token_ids: own tokens, in order.
      sources: a `TokenSource` for each token.
      loss_mask: 1 for each trained token (the model's own, including stop tokens), 0 for others.
      log_probs: behaviour log-probability of each sampled token at the sampling temperature, in single precision; 0.0
        for other tokens.
      policy_versions: version that sampled each token; `NO_VERSION` for other tokens.
      routing: experts that each token took in the engine, for the first own tokens and at most for all but the last
        one; empty without routing replay. An entry holds an unsigned integer for each layer and each of the token's
        experts, layers first: 1 byte up to 256 experts, else 2, little-endian.
      teacher_log_probs: log-probability of each token under a teacher behind an endpoint, at temperature 1; 0.0 for the
        first one. Empty without such a teacher, and until it has scored the rollout.
      turns: one entry per model output.
      index: number of the segment in its rollout, from 0.
      parent: segment with whose context this one begins; None if it shares no token.
      shared: number of tokens shared with `parent`: the first ones of the parent's context.
      reward: reward of the segment's tokens, compared with the group's rollouts instead of the rollout's reward; None:
        the rollout's reward.
      revision: number of times that own tokens were dropped or changed, rather than appended.
    """

    trajectory_id: str
    prompt_id: str
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    sources: array[int] = field(default_factory=lambda: array("b"))
    loss_mask: array[int] = field(default_factory=lambda: array("b"))
    log_probs: array[float] = field(default_factory=lambda: array("f"))
    policy_versions: array[int] = field(default_factory=lambda: array("i"))
    routing: list[bytes] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    teacher_log_probs: array[float] = field(default_factory=lambda: array("f"))
    index: int = 0
    # Compared and shown by its number alone, or each segment would hold its rollout once more.
    parent: Segment | None = field(default=None, repr=False, compare=False)
    shared: int = 0
    reward: float | None = None
    revision: int = field(default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, code in COLUMNS.items():
            values = getattr(self, name)
            if not isinstance(values, array) or values.typecode != code:
                setattr(self, name, array(code, values))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickles the columns as buffers, which a transport like Ray's store copies once and never scans."""
        if int(protocol) < BUFFERS:
            return super().__reduce_ex__(protocol)  # type: ignore[return-value]
        state = dict(vars(self))
        for name in COLUMNS:
            state[name] = pickle.PickleBuffer(state[name])
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        for name, code in COLUMNS.items():
            if not isinstance(state[name], array):
                column = array(code)
                column.frombytes(memoryview(state[name]).cast("B"))
                setattr(self, name, column)

    @property
    def name(self) -> str:
        """Id of the segment's request: the rollout's id, and from the second segment on its number."""
        return f"{self.trajectory_id}+{self.index}" if self.index else self.trajectory_id

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yields the source, begin and end of each run of own tokens of one source, in order."""
        end = 0
        for source, run in itertools.groupby(self.sources):
            start, end = end, end + sum(1 for _ in run)
            yield source, start, end

    def append_text(self, token_ids: Sequence[int], source: TokenSource) -> None:
        """Appends tokens that no policy sampled (prompt or tool return)."""
        count = len(token_ids)
        self.token_ids.extend(token_ids)
        self.sources.extend(array("b", (source,)) * count)
        # No policy sampled these tokens, so they are not trained and have no log-probability.
        self.loss_mask.extend(array("b", (0,)) * count)
        self.log_probs.extend(array("f", (0.0,)) * count)
        self.policy_versions.extend(array("i", (NO_VERSION,)) * count)

    def append_sampled(self, delta: TokenDelta) -> None:
        """Appends sampled tokens with their behaviour log-probabilities and versions."""
        count = len(delta.token_ids)
        self.token_ids.extend(delta.token_ids)
        self.sources.extend(array("b", (TokenSource.MODEL,)) * count)
        self.loss_mask.extend(array("b", (1,)) * count)
        self.log_probs.extend(delta.log_probs)
        self.policy_versions.extend(delta.policy_versions)
        self.routing.extend(delta.routing)

    def cut(self, length: int) -> None:
        """Drops all own tokens from position `length` on, and their experts. Leaves the turns to the caller."""
        self.revision += length < len(self.token_ids)
        for name in COLUMNS:
            del getattr(self, name)[length:]
        del self.routing[length:]

    def disown(self, first: int, last: int) -> None:
        """Turns own tokens from position `first` to before `last` into a prompt, which is not trained."""
        self.revision += first < last
        for at in range(first, last):
            self.loss_mask[at], self.log_probs[at] = 0, 0.0
            self.sources[at], self.policy_versions[at] = int(TokenSource.PROMPT), NO_VERSION

    def context(self) -> Sequence[int]:
        """Returns a copy of the current tokens for an engine to continue; later changes do not affect the copy.

        The shared tokens come first.
        """
        if self.parent is None:
            return self.token_ids[:]
        return array("i", self.parent.context()[: self.shared]) + self.token_ids

    @property
    def context_tokens(self) -> int:
        """Number of tokens of `context`."""
        return self.shared + len(self.token_ids)

    @property
    def routed_tokens(self) -> int:
        """Number of first tokens of `context` whose experts are known."""
        return self.shared + len(self.routing)

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens at the beginning of the own tokens."""
        return next(
            (at for at, source in enumerate(self.sources) if source != TokenSource.PROMPT),
            len(self.sources),
        )

    @property
    def generated_tokens(self) -> int:
        """Number of own tokens that the policy sampled, over all turns."""
        return sum(self.loss_mask)


class Outline(NamedTuple):
    """What a process of the trainer knows of a rollout of one segment whose tokens it does not train.

    Attributes:
      columns: predictions up to the last trained one; 0 without any.
      trained: trained predictions.
      routed: True if experts of some of its tokens are known.
    """

    columns: int
    trained: int
    routed: bool = False


@dataclass
class Trajectory(Segment):
    """One rollout, token by token. It is its own first segment; `branches` are further ones.

    Attributes:
      replayed: True for a stored success of earlier groups (`algorithm.replay`). It is trained and counts as no rollout
        of its group anywhere else.
      reward: scalar reward of the rollout; None until the environment has scored it.
      environment_reward: the environment's own part of `reward`, before weights and reward functions. 0 if a limit
        ended the rollout, None if the environment gave no finite number.
      finish: reason for the end, one of `FINISHES`.
      metrics: numbers that the environment reports, averaged into the step's metrics under `agent/`; `moves`, the
        number of moves to another instance; and numbers of reward functions under their own names (`reward.../...`).
      start_seconds: event-loop time at which the rollout began.
      seconds: seconds since the first token, including tools and waits, over all runs that took part. Counted only if
        they are limited, or if the environment hears outputs.
      snapshot: latest snapshot from the environment.
      branches: the segments after the first one, by `index`, which is their position plus 1.
      outline: counts instead of tokens, in a part of a batch (`BatchPart`); None: the tokens are here.
    """

    finish: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    start_seconds: float = 0.0
    seconds: float = 0.0
    snapshot: RolloutSnapshot | None = None
    environment_reward: float | None = None
    replayed: bool = False
    branches: list[Segment] = field(default_factory=list)
    outline: Outline | None = None

    @property
    def segments(self) -> Sequence[Segment]:
        """All segments, by `index`. A parent comes before its children."""
        return [self, *self.branches]

    def branch(self, parent: Segment | None, shared: int) -> Segment:
        """Begins and returns another segment.

        Args:
          parent: segment with whose context the new one begins; None if it shares no token.
          shared: number of first tokens of the parent's context that it shares.
        """
        # Tokens shared with the parent's own beginning belong to the segment that holds them.
        while parent is not None and shared <= parent.shared:
            parent = parent.parent
        if parent is None:
            shared = 0
        elif parent.routing:
            # The engine reports experts from the first token on that has none here, and these belong to one segment.
            shared = min(shared, parent.routed_tokens)
        made = Segment(self.trajectory_id, self.prompt_id, index=len(self.branches) + 1, parent=parent, shared=shared)
        self.branches.append(made)
        return made

    def clear(self) -> None:
        """Drops all tokens and turns, the seconds and the snapshot; keeps name, metrics and outcome."""
        self.seconds, self.snapshot = 0.0, None
        self.cut(0)
        self.turns.clear()
        self.branches.clear()

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled, over all segments."""
        return sum(segment.generated_tokens for segment in self.segments)

    @property
    def all_turns(self) -> Sequence[Turn]:
        """The turns of all segments, in the order in which they began."""
        if not self.branches:
            return self.turns
        return sorted((turn for each in self.segments for turn in each.turns), key=lambda turn: turn.start_seconds)

    def shift(self, seconds: float) -> None:
        """Moves all event-loop times, to the clock of another process."""
        self.start_seconds += seconds
        for turn in (turn for segment in self.segments for turn in segment.turns):
            turn.start_seconds += seconds

    def goes_on_at(self, now: float) -> None:
        """Moves all times back if the latest lies after `now`: a rollout may go on where the clock is younger."""
        late = max((turn.start_seconds for each in self.segments for turn in each.turns), default=now) - now
        if late > 0:
            self.shift(-late)


@dataclass
class Group:
    """The rollouts of one prompt that are compared with each other and trained together.

    Attributes:
      group_id: admission number, unique and increasing in a run.
      task: the task of all rollouts.
      dispatch_version: policy version at the group's first dispatch; the group's staleness is counted from here.
      trajectories: finished rollouts, in sample order; then the replayed one, if there is one.
      replay: stored success of the prompt that joins the rollouts if none of them succeeds; None once they are scored.
    """

    group_id: int
    task: Task
    dispatch_version: int
    trajectories: list[Trajectory] = field(default_factory=list)
    replay: Trajectory | None = None

    @property
    def rollouts(self) -> list[Trajectory]:
        """The group's own rollouts: all trajectories that are not replayed."""
        return [trajectory for trajectory in self.trajectories if not trajectory.replayed]


REWARD_ROUNDING = 5e-7
"""Largest difference of rewards, relative to the largest reward, that counts as rounding: a few units of float32."""


def equal_rewards(rewards: Sequence[float]) -> bool:
    """Returns True if rewards differ by rounding alone, or not at all. The trainer compares rewards in float32."""
    return max(rewards) - min(rewards) <= REWARD_ROUNDING * max(map(abs, rewards)) if rewards else True


class TurnRecord(TypedDict):
    """A `Turn` as `trace.jsonl` holds it."""

    generated_tokens: int
    tool: str | None
    status: ToolStatus | None
    payload_tokens: int
    tool_seconds: float
    start_seconds: float
    call: NotRequired[str]
    """Left out if unknown, like `error`."""
    error: NotRequired[str]
    moves: NotRequired[list[MoveRecord]]
    """Left out if the request did not move."""
    segment: NotRequired[int]
    """Segment that holds the turn; left out if the rollout has one segment."""


class SegmentRecord(TypedDict):
    """A `Segment` as `trace.jsonl` holds it."""

    parent: int | None
    """Segment with whose context this one begins."""
    shared_tokens: int
    """Number of tokens shared with the parent."""
    prompt_tokens: int
    """Number of own prompt tokens at the beginning."""


class TraceRecord(TypedDict):
    """One line of `trace.jsonl`: a trained rollout, which the simulator can replay."""

    trajectory_id: str
    prompt_id: str
    prompt_tokens: int
    turns: list[TurnRecord]
    group_id: int
    step: int
    """Training step that trained it, from 1."""
    policy_version: int
    """Policy version at its group's first dispatch."""
    reward: float | None
    finish: str | None
    start_seconds: float
    segments: NotRequired[list[SegmentRecord]]
    """Left out if the rollout has one segment."""
