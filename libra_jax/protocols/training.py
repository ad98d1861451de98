"""The trainer and its partners: hybrid workers, and weight relays that carry weights to other hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from libra_jax.protocols.rollout import WeightChunk
from libra_jax.protocols.trajectories import Group, Trajectory


@dataclass(frozen=True)
class TrainerInfo:
    """Description of the trainer, returned once when the trainer has started.

    Attributes:
      policy_version: version of the state (above 0 after a restore).
      parameters: number of model parameters.
      mesh: size of each mesh axis by name.
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
    """The input of one training step: whole groups, and the version that trains on them."""

    policy_version: int
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class MeshSizes:
    """Axis sizes of a trainer's mesh: copies, ways to shard the state, ways to split a layer's matrices."""

    data: int
    fsdp: int
    tensor: int

    @property
    def devices(self) -> int:
        """The number of devices in the mesh."""
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        return f"data {self.data} x fsdp {self.fsdp} x tensor {self.tensor}"


@dataclass(frozen=True)
class ResizeEstimate:
    """Memory and traffic that moving a train state to another mesh takes, estimated before the move.

    Attributes:
      state_bytes: bytes of the whole state, each leaf once.
      arriving_bytes: bytes that devices must receive because they do not hold them yet, over all devices.
      peak_bytes: most bytes that any device holds at one moment beyond its present bytes, including the gradient sums
        of the next step.
      unchecked: number of devices that do not report their free memory; the fit there is unknown.
      step_bytes: most bytes that any device holds in the first step on the new mesh beyond its present bytes, including
        temporaries of the programs. Until the programs are compiled, their part is scaled from the present programs by
        the device count.
    """

    state_bytes: int
    arriving_bytes: int
    peak_bytes: int
    unchecked: int = 0
    step_bytes: int = 0


@dataclass(frozen=True)
class ResizeProgress:
    """Progress of a resize.

    Attributes:
      programs: number of programs compiled for the new mesh.
      of: number of programs that training has; training may add another shape meanwhile.
      ready: True if a takeover would not have to wait.
    """

    programs: int
    of: int
    ready: bool


@dataclass(frozen=True)
class ResizePhases:
    """Costs of a resize.

    Attributes:
      compile_seconds: seconds of compilation of the new programs, beside training.
      wait_seconds: seconds that the takeover waited for the programs.
      move_seconds: seconds to move the state, between two steps.
      moved_bytes: bytes that arrived on devices.
    """

    compile_seconds: float
    wait_seconds: float
    move_seconds: float
    moved_bytes: int


@dataclass(frozen=True)
class Share:
    """The part of a training step that a hybrid worker computes.

    Every party splits the step's micro-batches by the same shares with the same function (`training.shares`). The split
    itself is never sent.

    Attributes:
      member: name of the hybrid worker.
      epoch: membership generation in which the worker joined; sums of another generation are refused.
      fraction: fraction of the step's work, in (0, 1); the core computes the rest.
    """

    member: str
    epoch: int
    fraction: float


@dataclass(frozen=True)
class ProgramShape:
    """The shape of a micro-batch that training has compiled a program for.

    Attributes:
      program: the trainer's name for the program.
      arrays: shape and dtype of each array of the micro-batch.
    """

    program: str
    arrays: Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Snapshot:
    """A train state that is being saved for another trainer to take over.

    Attributes:
      policy_version: version of the state.
      nbytes: bytes of the state, each leaf once.
    """

    policy_version: int
    nbytes: int


class Trainer(Protocol):
    """The trainer as the coordinator sees it. One call at a time; the caller sets deadlines.

    As exceptions, `give_up_step` may come at any time. `listen`, `connect` and `dismiss` may come during a step, if the
    step gives that hybrid worker no share.
    """

    async def start(self) -> TrainerInfo:
        """Builds the mesh and the train state (from `model` in the config) on its devices."""
        ...

    async def warm_start_step(self, sequences: Sequence[Trajectory]) -> Mapping[str, float]:
        """Takes one supervised step on given token sequences. The policy version does not change."""
        ...

    async def train_step(self, batch: TrainBatch, shares: Sequence[Share] = ()) -> Mapping[str, float]:
        """Takes one step from policy version v to v + 1, even if a non-finite step is skipped. Returns its metrics.

        Args:
          batch: groups to train on.
          shares: parts that hybrid workers compute meanwhile (`Replica.contribute`, with the same arguments). The
            trainer computes a share that is late or unusable, and closes that worker's channel. `shares/late` counts
            these micro-batches, and `shares/late/<member>` exists for each such worker.
        """
        ...

    async def give_up_step(self) -> bool:
        """Asks the current step to abort between two micro-batches with StepGivenUp. Returns False if it will not.

        The trainer's state is then as before the step. Call only during a step: otherwise, the next step is aborted.
        """
        ...

    async def listen(self, member: str, epoch: int) -> Mapping[str, Any]:
        """Opens a gradient channel for a hybrid worker; returns the address for `connect` and `Replica.join`."""
        ...

    async def connect(self, member: str, epoch: int, address: Mapping[str, Any]) -> None:
        """Starts to connect to a hybrid worker's channel and returns at once."""
        ...

    async def dismiss(self, member: str) -> None:
        """Closes a hybrid worker's channel, if the worker has one."""
        ...

    async def begin_resize(self, sizes: MeshSizes) -> ResizeEstimate:
        """Starts to compile for another mesh of this trainer's devices; training continues.

        Raises:
          ConfigError: the sizes are impossible, or a resize is running.
          LibraError: the devices lack memory for the move.
        """
        ...

    async def resize_progress(self) -> ResizeProgress:
        """Returns the progress of the resize. Raises ConfigError if none is running."""
        ...

    async def finish_resize(self, seconds: float) -> ResizePhases:
        """Waits at most `seconds` for the programs, then moves the state. Call between two steps.

        Raises:
          DeadlineMissed: compilation took longer; the resize continues.
          LibraError: the resize failed; training continues on the present mesh.
        """
        ...

    async def cancel_resize(self) -> None:
        """Cancels the running resize, if there is one."""
        ...

    async def open_weights(self, policy_version: int) -> int:
        """Takes a snapshot of the parameters in the wire dtype for a weight sync; returns its number of chunks."""
        ...

    async def stage_weights(self, policy_version: int, index: int) -> WeightChunk:
        """Fills one chunk of the open snapshot; it stays readable until the next snapshot is opened."""
        ...

    async def close_weights(self, policy_version: int) -> None:
        """Frees the snapshot."""
        ...

    async def save(self, path: str) -> None:
        """Starts an asynchronous save of the whole train state to a new directory. The state may change at once."""
        ...

    async def wait_saved(self) -> None:
        """Waits until the last `save` is durable; raises its error if it failed."""
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
        """Builds the mesh in place of `start`, and waits for the state and the shapes of another trainer."""
        ...

    async def shapes(self) -> Sequence[ProgramShape]:
        """Returns the shapes that the trainer has compiled programs for."""
        ...

    async def warm(self, shapes: Sequence[ProgramShape]) -> None:
        """Compiles a program for each shape that still lacks one."""
        ...

    async def snapshot(self, path: str) -> Snapshot:
        """Starts an asynchronous save of the state for another trainer, independent of checkpoints."""
        ...

    async def snapshot_saved(self) -> bool:
        """Returns True if the last snapshot is durable, without waiting; raises its error if it failed."""
        ...

    async def is_saved(self, path: str) -> bool:
        """Returns True if the state that another trainer saves at `path` can be restored."""
        ...


class TrainerProcess(MovableTrainer, Protocol):
    """One process of a trainer: an actor, perhaps one of several that train together."""

    async def reserve(self) -> str:
        """Returns the address at which the trainer's processes will meet. Called on process 0 only."""
        ...

    async def join(self, address: str) -> None:
        """Meets the trainer's other processes at that address. Called on all processes at once."""
        ...

    async def shutdown(self) -> None:
        """Releases devices and shared memory. Idempotent."""
        ...


class WeightSource(Protocol):
    """The trainer as the weight sync calls it: one snapshot at a time, staged chunk by chunk.

    Attributes:
      lock: lock that the caller holds from `open_weights` to `close_weights`.
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
    """The trainer as other rooms call it, independent of the processes that train at the moment.

    Each call has a deadline of `config.deadlines`: DeadlineMissed names the trainer and the call. A call to a dead
    trainer raises TrainerLost.

    Attributes:
      lock: lock that the caller holds during each call, except calls that may come at any time (`Trainer`).
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
    """A hybrid worker's training side: a whole data-parallel copy on its own mesh, without a train state.

    It gets each version's parameters as engines do, and computes the gradient sums of shares. One call at a time.
    """

    async def start(self) -> TrainerInfo:
        """Builds the mesh. Compiles nothing yet and holds no parameters."""
        ...

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        """Opens the transport. First weight verb, called once."""
        ...

    async def start_weight_update(self, policy_version: int) -> None:
        """Drops the version it holds. Second weight verb, called once per version."""
        ...

    async def update_weights(self, chunk: WeightChunk) -> None:
        """Loads a chunk. Third weight verb, called once per chunk."""
        ...

    async def finish_weight_update(self, policy_version: int) -> None:
        """Puts the parameters on the devices and computes their digest. Fourth weight verb, called once per version."""
        ...

    async def warm(self) -> None:
        """Compiles the gradient step for every row length, if still missing."""
        ...

    async def join(self, epoch: int, address: Mapping[str, Any]) -> None:
        """Connects to the core's gradient channel; returns when it is connected."""
        ...

    async def contribute(self, batch: TrainBatch, shares: Sequence[Share]) -> Mapping[str, float]:
        """Computes this worker's share of the step and sends the sums to the core.

        Returns:
          `micro_batches` in the share, `bytes` sent, and `seconds` from the batch's receipt until the core had the
          sums, without the wait for the core to take them.

        Raises:
          LibraError: the worker holds another version, or the channel is gone.
        """
        ...

    async def leave(self) -> None:
        """Closes the channel and frees the parameters' memory. Idempotent."""
        ...


class HybridClient(Replica, Protocol):
    """A hybrid worker's training side as other rooms call it.

    Each call has a deadline of `config.deadlines`: DeadlineMissed names the hybrid worker and the call.
    """

    @property
    def name(self) -> str:
        """The name of the hybrid worker's actor."""
        ...


class Relay(Protocol):
    """A weight relay: passes synced weights from host to host, and keeps the last version for its own host."""

    async def health(self) -> Mapping[str, float]:
        """Returns numbers for telemetry; raises `WorkerLost` if the relay is gone."""
        ...

    async def listen(self, epoch: int) -> Mapping[str, Any]:
        """Opens the link over which it receives from now on; returns its address, plain values."""
        ...

    async def connect(self, child: str, epoch: int, address: Mapping[str, Any]) -> None:
        """Starts to connect to the relay that listens at this address; closes an earlier link to that relay."""
        ...

    async def send(self, chunk: WeightChunk, child: str) -> None:
        """Sends a chunk on this host to a relay that receives it at the same time."""
        ...

    async def receive(self, chunk: WeightChunk) -> WeightChunk:
        """Receives a chunk; returns its address on this host. It stays there until the next chunk with its number.

        Raises:
          LibraError: no chunk, another chunk or a damaged chunk arrived; the link may be closed.
        """
        ...

    async def shutdown(self) -> None:
        """Closes its links and frees its memory. Idempotent."""
        ...


class RelayClient(Relay, Protocol):
    """A weight relay as other rooms call it.

    Each call has a deadline of `config.deadlines`: DeadlineMissed names the relay and the call.
    """

    @property
    def name(self) -> str:
        """The name of the relay."""
        ...
