"""The trainer, and who works with it: replicas of hybrid workers, and relays that carry weights to other hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from libra_jax.protocols.rollout import WeightChunk
from libra_jax.protocols.trajectories import Group, Trajectory


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

    @property
    def sizes(self) -> MeshSizes:
        """The sizes of the mesh's axes."""
        return MeshSizes(self.mesh["data"], self.mesh.get("fsdp", 1), self.mesh.get("tensor", 1))


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
        """Opens a gradient channel for a replica; returns the address to `connect` and `Replica.join`."""
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
        """Takes a snapshot of the parameters in the wire dtype for publication; returns its number of chunks."""
        ...

    async def stage_weights(self, policy_version: int, index: int) -> WeightChunk:
        """Fills one chunk of the open snapshot; it stays readable until the next snapshot is opened."""
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

    async def policy_version(self) -> int:
        """Returns the version of the state."""
        ...


class MovableTrainer(Trainer, Protocol):
    """A trainer whose state other processes can take over (`trainer_control.handover`)."""

    async def stand_by(self) -> TrainerInfo:
        """Instead of `start`: builds the mesh, and waits for the state and the shapes of another trainer."""
        ...

    async def shapes(self) -> Sequence[ProgramShape]:
        """Returns the shapes that the trainer has compiled programs for."""
        ...

    async def warm(self, shapes: Sequence[ProgramShape]) -> None:
        """Compiles a program for each shape that has none yet."""
        ...

    async def snapshot(self, path: str) -> Snapshot:
        """Begins an asynchronous save of the state for another trainer, beside checkpoints."""
        ...

    async def snapshot_saved(self) -> bool:
        """Returns at once whether the last snapshot is durable; raises what went wrong."""
        ...

    async def is_saved(self, path: str) -> bool:
        """Returns whether the state that another trainer saves at `path` can be restored."""
        ...


class TrainerProcess(MovableTrainer, Protocol):
    """One process of a trainer: an actor, which may be one of several that train together."""

    async def reserve(self) -> str:
        """Returns the address where the trainer's processes are to meet; asked of process 0."""
        ...

    async def join(self, address: str) -> None:
        """Meets the trainer's other processes at that address; asked of all of them at once."""
        ...

    async def shutdown(self) -> None:
        """Releases devices and shared memory. Idempotent."""
        ...


class WeightSource(Protocol):
    """The trainer as weight sync calls it: it takes one snapshot at a time and stages it chunk by chunk.

    Attributes:
      lock: held by the caller from `open_weights` to `close_weights`.
    """

    lock: asyncio.Lock

    async def open_weights(self, policy_version: int) -> int:
        """Takes a snapshot of the parameters in the wire dtype; returns its number of chunks."""
        ...

    async def stage_weights(self, policy_version: int, index: int) -> WeightChunk:
        """Fills one chunk of the open snapshot; it stays readable until the next snapshot is opened."""
        ...

    async def close_weights(self, policy_version: int) -> None:
        """Frees the snapshot."""
        ...


class TrainerClient(MovableTrainer, Protocol):
    """The trainer as other rooms call it, whichever processes train at the moment.

    Each call has a deadline of `config.deadlines`: DeadlineMissed names the trainer and the call. A call to a trainer
    that is gone raises TrainerLost.

    Attributes:
      lock: held by the caller during each call, save those that may come at any time (`Trainer`).
    """

    lock: asyncio.Lock

    @property
    def name(self) -> str:
        """The name of the processes that train."""
        ...

    @property
    def processes(self) -> int:
        """The number of processes that train."""
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

    async def update_weights(self, chunk: WeightChunk) -> None:
        """Third weight verb, once a chunk: loads it."""
        ...

    async def finish_weight_update(self, policy_version: int) -> None:
        """Fourth weight verb: the parameters are on the devices, their digest known."""
        ...

    async def warm(self) -> None:
        """Compiles the gradient step for every row length, where it has not yet."""
        ...

    async def join(self, epoch: int, address: Mapping[str, Any]) -> None:
        """Connects to the core's gradient channel; returns when it stands."""
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


class HybridClient(Replica, Protocol):
    """A hybrid worker's training side as other rooms call it.

    Each call has a deadline of `config.deadlines`: DeadlineMissed names the replica and the call.
    """

    @property
    def name(self) -> str:
        """The name of the replica's actor."""
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

    async def send(self, chunk: WeightChunk, child: str) -> None:
        """Sends a chunk that lies on its host to a relay that receives it at the same time."""
        ...

    async def receive(self, chunk: WeightChunk) -> WeightChunk:
        """Receives a chunk; returns it as it is reached on this host, where it stays until the next of its number.

        Raises:
          LibraError: it did not come, is another one, or is damaged; the link may be closed.
        """
        ...

    async def shutdown(self) -> None:
        """Closes its links and gives its memory back. Idempotent."""
        ...


class RelayClient(Relay, Protocol):
    """A weight relay as other rooms call it.

    Each call has a deadline of `config.deadlines`: DeadlineMissed names the relay and the call.
    """

    @property
    def name(self) -> str:
        """The relay's name."""
        ...
