"""What the rooms promise each other: the vocabulary of a run, and the protocols of its workers.

Standard library only, so that every room may import this file. A *trajectory* is one agent's attempt at a task; the
*group* is the trajectories of one prompt that are compared with each other; a *request* is the part of a trajectory's
life that asks for tokens. *Policy version* v is the parameters after v training steps; version 0 is what the run
starts from. Seconds are those of the running event loop's clock.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

# --------------------------------------------------------------------------------------------------------------------
# Errors. Each carries one sentence a user can act on; nothing else is shown to them.
# --------------------------------------------------------------------------------------------------------------------


class LibraError(Exception):
    """An error whose message is one sentence that names what is wrong and how to mend it."""


class ConfigError(LibraError):
    """A configuration value that cannot be used; the message names the field."""


class DataError(LibraError):
    """A file of tasks, a trace or a model directory that cannot be used; the message names the file and line."""


class DeadlineMissed(LibraError):
    """A wait that outlasted its deadline; the message names the worker."""


class WorkerLost(LibraError):
    """An actor or engine process that died or became unreachable; what it was doing may be retried elsewhere."""


class PeerLost(WorkerLost):
    """What a process says that works together with a lost one and cannot tell which it was."""


class TrainerLost(WorkerLost):
    """The trainer that serves is gone, one of its processes or all: what it was asked is asked again of the next."""


class CheckpointFailed(LibraError):
    """A checkpoint that a disk does not take; the one before it still counts."""


class StepGivenUp(LibraError):
    """A training step that was given up when asked to, because the run has to end; the state is as before it."""


class EnvironmentCrashed(LibraError):
    """The environment itself broke (not a tool that returned a failure): infrastructure, never a reward of zero."""


class RewardFailed(EnvironmentCrashed):
    """A reward function broke again and again: infrastructure as well, but the attempt is whole: none is made anew."""


# --------------------------------------------------------------------------------------------------------------------
# Trajectories: token in, token out. What was sampled is never decoded and tokenized again.
# --------------------------------------------------------------------------------------------------------------------


class TokenSource(enum.IntEnum):
    """Who wrote a token."""

    PROMPT = 0
    MODEL = 1
    TOOL = 2


ToolStatus = Literal["success", "failure", "timeout"]
FinishReason = Literal["stop", "length", "abort"]

FINISHES = ("answered", "length", "max_turns", "max_tokens", "max_seconds", "max_context")
"""Why an attempt ended: the environment ended it, or an output, or the attempt, met a limit."""

NO_VERSION = -1
"""Policy version of a token that no policy sampled."""


@dataclass(frozen=True)
class CausalState:
    """What a tool return says about what comes next (C-MLFQ, arXiv 2606.03077 section 4)."""

    tool: str
    payload_tokens: int
    status: ToolStatus


@dataclass
class Turn:
    """One model output and the tool return that followed it, as the trace records them.

    Attributes:
      generated_tokens: tokens the policy sampled in this turn, its stop token included.
      tool: name of the tool called, or None for a turn without a call; of several at once, all, sorted and joined by
        "+".
      status: outcome of the call, or None without a call; of several, the worst.
      payload_tokens: tokens that the tool returns appended to the context.
      tool_seconds: time the tool took after the output had ended, or several together, without the wait for what they
        need (`Queued`); after one that calls none, the environment's step, scoring for example.
      start_seconds: event-loop time at which the turn's generation was asked for.
    """

    generated_tokens: int
    tool: str | None = None
    status: ToolStatus | None = None
    payload_tokens: int = 0
    tool_seconds: float = 0.0
    start_seconds: float = 0.0


@dataclass(frozen=True)
class AttemptSnapshot:
    """Where an attempt can be taken up without its past being replayed.

    Attributes:
      state: what the environment needs for it (`Resumable.snapshot`); JSON-able.
      position: tokens of the trajectory up to there.
      turn: outputs up to there.
      metrics: that the environment had reported by then.
      messages: the dialogue up to there.
    """

    state: Mapping[str, Any]
    position: int
    turn: int
    metrics: Mapping[str, float]
    messages: Sequence[Message] = ()


@dataclass
class Trajectory:
    """One agent's attempt, token by token. The five per-token lists always have the same length.

    Attributes:
      trajectory_id: `<prompt_id>/<sample index>`, unique in a run.
      prompt_id: the task this attempts.
      token_ids: every token of the context, in order.
      sources: a `TokenSource` for each token.
      loss_mask: True for each token that is trained on (the model's own, stop tokens included).
      log_probs: behaviour log-probability of each sampled token at the sampling temperature; 0.0 elsewhere.
      policy_versions: version that sampled each token; `NO_VERSION` elsewhere.
      turns: one entry a model output.
      reward: scalar reward, None until the environment has scored the attempt.
      finish: why it ended, one of `FINISHES`.
      metrics: numbers the environment reports, averaged into the step's metrics under `agent/`; `moves`, the times that
        another instance went on with it; and what reward functions report, under names of their own (`reward.../...`).
      start_seconds: event-loop time at which the attempt began.
      seconds: from its first token on, tools and waits included, over all runs that had a part in it; counted only
        where they are limited, or the environment hears outputs.
      snapshot: the latest that its environment gave.
    """

    trajectory_id: str
    prompt_id: str
    token_ids: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    finish: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    start_seconds: float = 0.0
    seconds: float = 0.0
    snapshot: AttemptSnapshot | None = None

    def append_text(self, token_ids: Sequence[int], source: TokenSource) -> None:
        """Appends tokens that no policy sampled (prompt or tool return)."""
        count = len(token_ids)
        self.token_ids.extend(token_ids)
        self.sources.extend([int(source)] * count)
        self.loss_mask.extend([False] * count)
        self.log_probs.extend([0.0] * count)
        self.policy_versions.extend([NO_VERSION] * count)

    def append_sampled(self, delta: TokenDelta) -> None:
        """Appends sampled tokens with their behaviour log-probabilities and versions."""
        count = len(delta.token_ids)
        self.token_ids.extend(delta.token_ids)
        self.sources.extend([int(TokenSource.MODEL)] * count)
        self.loss_mask.extend([True] * count)
        self.log_probs.extend(delta.log_probs)
        self.policy_versions.extend(delta.policy_versions)

    def clear(self) -> None:
        """Drops every token and turn, and what it took to get there; name, metrics and outcome stay."""
        self.seconds, self.snapshot = 0.0, None
        for values in (
            self.token_ids,
            self.sources,
            self.loss_mask,
            self.log_probs,
            self.policy_versions,
            self.turns,
        ):
            values.clear()

    def context(self) -> Sequence[int]:
        """The tokens as they are now, for an engine to continue: later changes of the trajectory do not show."""
        return tuple(self.token_ids)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, which comes first."""
        return next(
            (at for at, source in enumerate(self.sources) if source != TokenSource.PROMPT),
            len(self.sources),
        )

    @property
    def generated_tokens(self) -> int:
        """Tokens the policy sampled, over all turns."""
        return sum(self.loss_mask)


@dataclass
class Group:
    """The attempts at one prompt that are compared with each other and trained together.

    Attributes:
      group_id: admission number, unique and increasing in a run.
      task: what is attempted.
      dispatch_version: policy version at the group's first dispatch; its staleness is counted from here.
      trajectories: finished attempts, in sample order.
    """

    group_id: int
    task: Task
    dispatch_version: int
    trajectories: list[Trajectory] = field(default_factory=list)


# --------------------------------------------------------------------------------------------------------------------
# Tasks and environments.
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One problem to attempt.

    Attributes:
      prompt_id: unique in the run, stable across restarts.
      payload: what the environment needs to pose and score it; JSON-able.
    """

    prompt_id: str
    payload: Mapping[str, Any]


class TaskSource(Protocol):
    """Tasks by position, so that a data position is one integer and a resume re-reads nothing."""

    def task(self, index: int) -> Task:
        """The index-th training task; any index >= 0 is valid (finite sources reshuffle by epoch)."""
        ...

    def evaluation_task(self, index: int) -> Task:
        """The index-th held-out task; never among the training tasks."""
        ...


@dataclass(frozen=True)
class Message:
    """A chat message; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str


@dataclass(frozen=True)
class ToolReturn:
    """What a tool gave back: data that the policy sees, its failure or time-out included."""

    tool: str
    status: ToolStatus
    content: str
    seconds: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """What the environment answers to one model output.

    Attributes:
      tool_returns: the returns of the tools called, in the calls' order, each shown to the policy as a tool message.
      messages: further messages shown to the policy.
      done: the attempt is over.
      reward: the attempt's reward; required when `done`.
      metrics: numbers to report, such as `tool_success`.
    """

    tool_returns: Sequence[ToolReturn] = ()
    messages: Sequence[Message] = ()
    done: bool = False
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One attempt's world. Named in config as `"package.module:factory"`; the factory returns a fresh environment."""

    async def reset(self, task: Task) -> Sequence[Message]:
        """Opens the attempt and returns the first messages shown to the policy.

        Called again on the same object, it opens the attempt anew (a resumed attempt whose replay came out different).
        """
        ...

    async def step(self, output: str) -> StepResult:
        """Reads one model output (decoded text, stop token removed), runs what it asks for, and answers."""
        ...

    async def close(self) -> None:
        """Releases what the attempt holds; called once, also after a crash."""
        ...


class Listener(Protocol):
    """An environment's optional companion: hears an output while it is generated, to begin with what it asks for."""

    def hear(self, text: str) -> None:
        """The next piece of the output under way.

        A plain function that returns at once. It decides nothing: `step` gets the output whole, and an output may be
        stepped that was heard in part or not at all (a resumed attempt's), or heard and never stepped (one cut off).
        """
        ...


class Queued(Protocol):
    """An environment's optional companion: waits, before a step, for what it needs and other attempts hold."""

    async def ready(self, output: str) -> None:
        """Returns once `step` of this output finds what it needs, a sandbox for example.

        The wait is no tool's time: its deadline is `task.wait_seconds`, past which the environment has crashed. No
        instance's place is held meanwhile.
        """
        ...


class Resumable(Protocol):
    """An environment's optional companion: its attempts are taken up after a restart without running its tools again.

    Where it is not, or gives no snapshot, a fresh environment is stepped through the retained outputs.
    """

    async def snapshot(self) -> Mapping[str, Any] | None:
        """What `restore` needs to go on from here, JSON-able; None: from where the last one was taken. After a step."""
        ...

    async def restore(self, task: Task, state: Mapping[str, Any]) -> None:
        """Opens the attempt where a snapshot was taken, instead of `reset`. The policy has seen all up to there."""
        ...


class Demonstrator(Protocol):
    """An environment factory's optional companion: solved attempts for the warm start."""

    def demonstration(self, task: Task) -> Sequence[Message]:
        """The whole dialogue of a solved attempt: `reset`'s messages, then assistant and tool messages in turn."""
        ...


class Tokenizer(Protocol):
    """Text to tokens and back, with the chat template applied to increments only."""

    vocab_size: int
    stop_token_ids: tuple[int, ...]
    pad_token_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def render(self, messages: Sequence[Message], *, first: bool, generation_prompt: bool) -> list[int]:
        """Tokens that `messages` add to the context.

        Args:
          messages: the increment only, never the dialogue so far.
          first: True at the start of the context (begin-of-text and the like belong there only).
          generation_prompt: append the header after which the assistant writes.
        """
        ...


# --------------------------------------------------------------------------------------------------------------------
# Rollout engines.
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Temperature only: the log-prob contract (rollout/logprob_contract.py) says why.

    Attributes:
      temperature: 0 means greedy.
      max_tokens: at most this many tokens are generated.
      stop_token_ids: generation ends with, and returns, the first of these.
    """

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class GenerationRequest:
    """Tokens to continue.

    Attributes:
      request_id: unique among the engine's requests.
      token_ids: the whole context, retained tokens of a failed attempt included.
      sampling: how tokens are drawn.
      kv_source: what `RolloutEngine.hand_over` of another engine returned for this context; None: it is prefilled.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    kv_source: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TokenDelta:
    """Tokens that streamed in since the last delta; the three tuples have the same length.

    Attributes:
      token_ids: the new tokens.
      log_probs: their log-probability at the sampling temperature (processed log-probs), natural log.
      policy_versions: the version whose weights sampled each.
      finish_reason: set on the last delta only.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is: told once, when it has started.

    Attributes:
      name: the instance's name, as errors and the timeline show it.
      tensor_parallel: devices that share one copy of the weights.
      slots: most requests that decode at once.
      max_context: longest context, in tokens.
      process_ids: the processes the engine runs in.
      cache_tokens: tokens of context that its key-value cache holds; 0 if it does not say.
    """

    name: str
    tensor_parallel: int
    slots: int
    max_context: int
    process_ids: tuple[int, ...]
    cache_tokens: int = 0


@dataclass(frozen=True)
class WeightEntry:
    """One tensor inside a bucket, under its Hugging Face name; `offset` and `nbytes` are in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class WeightBucket:
    """A contiguous piece of a published snapshot, and how its bytes are reached.

    Attributes:
      policy_version: the version whose snapshot this is.
      index: position among the snapshot's buckets.
      count: buckets in the snapshot.
      entries: tensors in the bucket, in order.
      nbytes: bytes in use.
      transport: transport-specific address, e.g. {"kind": "memfd", "pid": 1, "fd": 7}; plain values only.
      checksum: digest of the bytes, or None where checksums are off.
    """

    policy_version: int
    index: int
    count: int
    entries: tuple[WeightEntry, ...]
    nbytes: int
    transport: Mapping[str, Any]
    checksum: str | None = None


class RolloutEngine(Protocol):
    """A rollout instance. Every method may raise `WorkerLost`; the caller sets deadlines."""

    async def start(self) -> EngineInfo:
        """Starts the engine's processes. It holds no useful weights until its first `finish_weight_update`."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Streams the continuation; the last delta has a finish reason. Closing the iterator aborts the request."""
        ...

    async def hand_over(self, request: GenerationRequest) -> Mapping[str, Any]:
        """Keeps the keys and values of the context for another engine; returns the other's `kv_source`.

        Called only where `rollout.kv_transfer` says that engines can.
        """
        ...

    async def pause(self) -> None:
        """Freezes decoding with requests kept; returns when no step is running and all tokens so far are stamped."""
        ...

    async def resume(self) -> None:
        """Goes on decoding; KV computed under older weights has been dropped and is recomputed."""
        ...

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        """First weight verb, once: opens the transport."""
        ...

    async def start_weight_update(self, policy_version: int) -> None:
        """Second weight verb, once a version: prepares the model for new weights."""
        ...

    async def update_weights(self, bucket: WeightBucket) -> None:
        """Third weight verb, once a bucket: loads it."""
        ...

    async def finish_weight_update(self, policy_version: int) -> None:
        """Fourth weight verb, once a version: the engine now serves `policy_version`."""
        ...

    async def sleep(self) -> None:
        """Gives its devices up: no request runs, and weights and cache are dropped where the platform can."""
        ...

    async def wake(self) -> None:
        """Takes its devices again. Like one just started, it holds no useful weights until they are updated."""
        ...

    async def health(self) -> Mapping[str, float]:
        """Raises `WorkerLost` if the engine is not serving; else numbers such as `running` and `waiting`."""
        ...

    async def shutdown(self) -> None:
        """Ends and reaps every process of the engine. Idempotent."""
        ...


# --------------------------------------------------------------------------------------------------------------------
# The trainer.
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainerInfo:
    """What the trainer is: told once, when it has started.

    Attributes:
      policy_version: the version its state holds (above 0 after a restore).
      parameters: number of model parameters.
      mesh: axis name to size.
      platform: "cpu", "gpu" or "tpu".
    """

    policy_version: int
    parameters: int
    mesh: Mapping[str, int]
    platform: str


@dataclass(frozen=True)
class TrainBatch:
    """What one training step sees: whole groups, and the version that trains on them."""

    policy_version: int
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of a trainer's mesh: replicas, ways the state is sharded, ways a layer's matrices are split."""

    data: int
    fsdp: int
    tensor: int

    @property
    def devices(self) -> int:
        """In the mesh."""
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        return f"data {self.data} x fsdp {self.fsdp} x tensor {self.tensor}"


@dataclass(frozen=True)
class ResizeEstimate:
    """What moving a train state to another mesh takes, known before it begins.

    Attributes:
      state_bytes: of the whole state, each leaf once.
      arriving_bytes: over all devices, what each has to get that it does not hold.
      peak_bytes: most that any device holds at one moment, the gradient sums of the next step included, on top of what
        it held before.
      unchecked: devices that do not say what they have room for: whether it fits there is not known.
      step_bytes: most that any device holds in the first step there, what its programs take for themselves included, on
        top of what it held between two steps. Until they are compiled, that is scaled from those that train by the
        count of devices.
    """

    state_bytes: int
    arriving_bytes: int
    peak_bytes: int
    unchecked: int = 0
    step_bytes: int = 0


@dataclass(frozen=True)
class ResizeProgress:
    """How far a resize is.

    Attributes:
      programs: compiled for the new mesh.
      of: programs that training has; it may meet another shape meanwhile.
      ready: taking over would wait for nothing.
    """

    programs: int
    of: int
    ready: bool


@dataclass(frozen=True)
class ResizePhases:
    """What a resize took.

    Attributes:
      compile_seconds: of the new programs, beside training.
      wait_seconds: that the take-over waited for them.
      move_seconds: of the state, between two steps.
      moved_bytes: that arrived on devices.
    """

    compile_seconds: float
    wait_seconds: float
    move_seconds: float
    moved_bytes: int


@dataclass(frozen=True)
class Share:
    """A part of a training step that a hybrid replica computes.

    Every party splits the step's micro-batches by the same shares in the same way (`training.shares`), so nobody has to
    be told which are whose.

    Attributes:
      member: the replica's name.
      epoch: the membership epoch in which it joined; sums that come from another are refused.
      fraction: of the step's work, in (0, 1); what the shares leave over is the core's.
    """

    member: str
    epoch: int
    fraction: float


@dataclass(frozen=True)
class ProgramShape:
    """A kind of micro-batch that training has compiled a program for.

    Attributes:
      program: the trainer's name of it.
      arrays: shape and dtype of each array of the micro-batch.
    """

    program: str
    arrays: Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Snapshot:
    """A train state that is being saved for another trainer to take over.

    Attributes:
      policy_version: its version.
      nbytes: of the state, each leaf once.
    """

    policy_version: int
    nbytes: int


class Trainer(Protocol):
    """The trainer as the coordinator sees it. One call at a time; the caller sets deadlines.

    Only `give_up_step` may come at any time, and `listen`, `connect` and `dismiss` for members that a step under way
    has no share of.
    """

    async def start(self) -> TrainerInfo:
        """Builds the mesh and the train state (from `model` in the config) on its devices."""
        ...

    async def warm_start_step(self, sequences: Sequence[Trajectory]) -> Mapping[str, float]:
        """One supervised step on given token sequences; does not change the policy version."""
        ...

    async def train_step(self, batch: TrainBatch, shares: Sequence[Share] = ()) -> Mapping[str, float]:
        """One step: policy version v -> v + 1, a skipped (non-finite) step included. Returns the step's metrics.

        Args:
          batch: what to train on.
          shares: parts that replicas compute meanwhile (`Replica.contribute`, with the same arguments). A share that
            is not there in time, or cannot be used, is computed here, and the member's channel is closed: `shares/late`
            counts these, and `shares/late/<member>` is there for each.
        """
        ...

    async def give_up_step(self) -> bool:
        """Asks the step under way to end between two micro-batches, raising StepGivenUp; False: it will not.

        The trainer's state is then as before the step. Without a step under way the next one ends so: ask only in one.
        """
        ...

    async def listen(self, member: str, epoch: int) -> Mapping[str, Any]:
        """Opens a side channel for a replica's gradient sums; returns the address to `connect` and `Replica.join`."""
        ...

    async def connect(self, member: str, epoch: int, address: Mapping[str, Any]) -> None:
        """Begins to connect to a replica's channel, and returns at once."""
        ...

    async def dismiss(self, member: str) -> None:
        """Closes a replica's channel; nothing happens if there is none."""
        ...

    async def begin_resize(self, sizes: MeshSizes) -> ResizeEstimate:
        """Begins to compile for another mesh of this trainer's devices; training goes on.

        Raises:
          ConfigError: the sizes cannot be, or a resize is under way.
          LibraError: there is no room for the move.
        """
        ...

    async def resize_progress(self) -> ResizeProgress:
        """How far the resize is. Raises ConfigError if none is under way."""
        ...

    async def finish_resize(self, seconds: float) -> ResizePhases:
        """Between two steps: waits at most `seconds` for the programs, then moves the state.

        Raises:
          DeadlineMissed: they took longer; the resize goes on.
          LibraError: it cannot be; training goes on on the mesh it has.
        """
        ...

    async def cancel_resize(self) -> None:
        """Gives up a resize that is under way; nothing happens if none is."""
        ...

    async def open_weights(self, policy_version: int) -> int:
        """Takes a snapshot of the parameters in the wire dtype for publication; returns its number of buckets."""
        ...

    async def stage_weights(self, policy_version: int, index: int) -> WeightBucket:
        """Fills one bucket of the open snapshot; it stays readable until the next snapshot is opened."""
        ...

    async def close_weights(self, policy_version: int) -> None:
        """Frees the snapshot."""
        ...

    async def save(self, path: str) -> None:
        """Begins an asynchronous save of the whole train state to a new directory; the state may change at once."""
        ...

    async def wait_saved(self) -> None:
        """Returns when the last `save` is durable; raises what went wrong."""
        ...

    async def restore(self, path: str) -> int:
        """Restores the train state into this mesh's shardings; returns its policy version."""
        ...

    async def export(self, path: str) -> None:
        """Writes the parameters as a Hugging Face directory."""
        ...

    async def shutdown(self) -> None:
        """Releases devices and shared memory. Idempotent."""
        ...


class MovableTrainer(Trainer, Protocol):
    """A trainer whose state another one, of other processes, can take over (`coordinator.handover`)."""

    async def stand_by(self) -> TrainerInfo:
        """Instead of `start`: builds the mesh, and waits for the state and the shapes of another trainer."""
        ...

    async def shapes(self) -> Sequence[ProgramShape]:
        """What it has compiled programs for."""
        ...

    async def warm(self, shapes: Sequence[ProgramShape]) -> None:
        """Compiles for what another trainer has met, where it has not yet."""
        ...

    async def snapshot(self, path: str) -> Snapshot:
        """Begins an asynchronous save of the state for another trainer, beside checkpoints."""
        ...

    async def snapshot_saved(self) -> bool:
        """Whether the last snapshot is durable; waits for nothing, and raises what went wrong."""
        ...

    async def is_saved(self, path: str) -> bool:
        """Whether the state that another trainer saves at `path` is there to be restored."""
        ...

    async def policy_version(self) -> int:
        """The version of the state."""
        ...


class Replica(Protocol):
    """A hybrid worker's training side: a whole data-parallel replica on a mesh of its own, which keeps no state.

    It gets each version's parameters as engines do, and computes gradient sums of shares. One call at a time.
    """

    async def start(self) -> TrainerInfo:
        """Builds the mesh and compiles nothing yet; it holds no parameters."""
        ...

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        """First weight verb, once: opens the transport."""
        ...

    async def start_weight_update(self, policy_version: int) -> None:
        """Second weight verb, once a version: what it held is given up."""
        ...

    async def update_weights(self, bucket: WeightBucket) -> None:
        """Third weight verb, once a bucket: loads it."""
        ...

    async def finish_weight_update(self, policy_version: int) -> None:
        """Fourth weight verb: the parameters are on the devices, their digest known."""
        ...

    async def warm(self) -> None:
        """Compiles the gradient step for every row length, where it has not yet."""
        ...

    async def join(self, epoch: int, address: Mapping[str, Any]) -> None:
        """Connects to the core's side channel; returns when it stands."""
        ...

    async def contribute(self, batch: TrainBatch, shares: Sequence[Share]) -> Mapping[str, float]:
        """Computes its share of the step and sends the sums to the core.

        Returns:
          `micro_batches` of its share, `bytes` sent, and `seconds` from the batch's receipt until the core had the
          sums, without the wait for the core to take them.

        Raises:
          LibraError: it holds another version, or the channel is gone.
        """
        ...

    async def leave(self) -> None:
        """Closes the channel and gives the parameters' memory back. Idempotent."""
        ...

    async def shutdown(self) -> None:
        """Releases everything. Idempotent."""
        ...


class Relay(Protocol):
    """Passes published weights on, from one host to the next, and keeps the last version for its own."""

    async def health(self) -> Mapping[str, float]:
        """Figures for telemetry; raises `WorkerLost` if the relay is gone."""
        ...

    async def listen(self, epoch: int) -> Mapping[str, Any]:
        """Opens the link over which it receives from now on; returns its address, plain values."""
        ...

    async def connect(self, child: str, epoch: int, address: Mapping[str, Any]) -> None:
        """Begins to connect to the relay that listens at this address; an earlier link to it is closed."""
        ...

    async def send(self, bucket: WeightBucket, child: str) -> None:
        """Sends a bucket that lies on its host to a relay that receives it at the same time."""
        ...

    async def receive(self, bucket: WeightBucket) -> WeightBucket:
        """Receives a bucket; returns it as it is reached on this host, where it stays until the next of its number.

        Raises:
          LibraError: it did not come, is another one, or is damaged; the link may be closed.
        """
        ...

    async def shutdown(self) -> None:
        """Closes its links and gives its memory back. Idempotent."""
        ...


# --------------------------------------------------------------------------------------------------------------------
# Scheduling: which instance serves a request next.
# --------------------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Placement:
    """The scheduler's decision: from now on this instance serves this request (again, anew, or instead of another).

    An empty instance takes a decoding request's place away: it keeps its tokens and waits again.
    """

    request_id: str
    instance: str


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


# --------------------------------------------------------------------------------------------------------------------
# Cluster: where actors live.
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActorSpec:
    """How to make an actor.

    Attributes:
      name: unique in the cluster; errors name it.
      factory: `"package.module:callable"`; the result's public methods are the actor's.
      arguments: keyword arguments of the factory; picklable.
      cpus: CPU cores reserved (ray backend).
      gpus: accelerators reserved (ray backend).
      environment: environment variables the actor's process starts with (ray backend; set in place when embedded).
      devices: of the run's devices, those that the actor has.
      cores: CPU cores that the actor's process keeps to (ray backend); empty: all. Those that are not there are left to
        the factory to complain of.
      host: number of the run's host that the actor is on (ray backend; `cluster.hosts`); None: wherever there is room.
    """

    name: str
    factory: str
    arguments: Mapping[str, Any]
    cpus: float = 1.0
    gpus: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    host: int | None = None


class Cluster(Protocol):
    """Makes actors. A proxy has the methods of the factory's result: `await proxy.method(...)`, whether the method is
    sync or async there; async generators stay async iterators. A dead actor raises `WorkerLost` from every call."""

    async def spawn(self, spec: ActorSpec) -> Any:
        """Makes the actor and returns its proxy."""
        ...

    async def stop(self, name: str) -> None:
        """Ends the actor (its `shutdown` is called first, with a deadline) and reaps its processes."""
        ...

    async def kill(self, name: str) -> None:
        """Ends the actor without asking it, where that can be done, and reaps its processes: what it holds is lost."""
        ...

    async def shutdown(self) -> None:
        """Stops every actor, last made first. Idempotent."""
        ...


# --------------------------------------------------------------------------------------------------------------------
# Telemetry.
# --------------------------------------------------------------------------------------------------------------------


POOLS = ("core training", "hybrid in training", "hybrid in transition", "hybrid in rollout", "core rollout")
"""Names of the pools of devices, in the order in which pictures stack them."""


LOST = "lost"
"""The status of a worker that has failed and is out of service."""


class Recorder(Protocol):
    """Where a run writes what happened. Never raises for a full disk or a lost viewer: it warns once and goes on."""

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """One training step's numbers; keys as in `metrics.jsonl`."""
        ...

    def span(self, track: str, name: str, start: float, end: float, arguments: Mapping[str, Any] | None = None) -> None:
        """Something that took from `start` to `end` (event-loop seconds) on a named track of the timeline."""
        ...

    def trajectory(self, record: Mapping[str, Any]) -> None:
        """One line of `trace.jsonl`."""
        ...

    def decision(self, record: Mapping[str, Any]) -> None:
        """One line of `plans.jsonl`: a look for a better plan."""
        ...

    def transition(self, record: Mapping[str, Any]) -> None:
        """One line of `transitions.jsonl`: a worker that changed sides, or a mesh that changed its size.

        Its `start` and `end` are event-loop seconds; in the file they are seconds since the run's first session began.
        """
        ...

    def pools(self, now: float, devices: Mapping[str, int]) -> None:
        """From `now` on (event-loop seconds) each pool has so many devices; names are those of `POOLS`, all of them."""
        ...

    def status(self, worker: str, text: str) -> None:
        """What a worker is doing now, for the console."""
        ...

    def note(self, text: str) -> None:
        """A sentence for the person watching."""
        ...
