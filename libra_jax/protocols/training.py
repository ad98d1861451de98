"""The trainer, and hybrid workers, which compute shares of its steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from libra_jax.protocols.trajectories import Group, Trajectory
from libra_jax.protocols.weights import WeightReceiver, WeightSource, WeightStager


@dataclass(frozen=True)
class TrainerInfo:
    """Description of the trainer, returned once when the trainer has started.

    Attributes:
      policy_version: version of the state (above 0 after a restore).
      parameters: number of model parameters.
      mesh: size of each mesh axis by name.
      platform: "cpu", "gpu" or "tpu".
      device_kind: maker's name of a device.
      peak_flops: peak FLOP/s of a device; None if unknown, as on CPU.
    """

    policy_version: int
    parameters: int
    # By name, because a mesh may have further axes of size 1.
    mesh: Mapping[str, int]
    platform: str
    device_kind: str = ""
    peak_flops: float | None = None

    @property
    def sizes(self) -> MeshSizes:
        """The sizes of the mesh's axes."""
        return MeshSizes(self.mesh["data"], *(self.mesh.get(name, 1) for name in ("fsdp", "tensor", "context")))


@dataclass(frozen=True)
class TrainBatch:
    """The input of one training step: whole groups, and the version that trains on them.

    Attributes:
      policy_version: version that trains.
      groups: groups of the step.
      begun: numbers of the groups that `Trainer.accumulate` was given before, in that order; never of all groups.
    """

    policy_version: int
    groups: tuple[Group, ...]
    begun: tuple[int, ...] = ()

    @property
    def rest(self) -> TrainBatch:
        """The groups that are not begun. Hybrid workers help with these."""
        return self.of([one.group_id for one in self.groups if one.group_id not in self.begun])

    def of(self, numbers: Sequence[int]) -> TrainBatch:
        """Returns the groups with these numbers, in their order, as a batch in which none is begun."""
        by_number = {group.group_id: group for group in self.groups}
        return TrainBatch(self.policy_version, tuple(by_number[number] for number in numbers))


@dataclass(frozen=True)
class BatchPart:
    """A `TrainBatch` for one process of a trainer: outlines of all rollouts, and those whose tokens it trains.

    Attributes:
      outlines: the batch with outlines alone, the same object for all processes.
      held: whole rollouts by their number in the batch: groups in order, and their trajectories in order.
    """

    outlines: TrainBatch
    held: Mapping[int, Trajectory]

    def joined(self) -> TrainBatch:
        """Returns the batch with the whole rollouts in their places. Other rollouts have an outline alone."""
        numbers, groups = itertools.count(), []
        for group in self.outlines.groups:
            rollouts = [self.held.get(next(numbers), rollout) for rollout in group.trajectories]
            groups.append(dataclasses.replace(group, trajectories=rollouts))
        return dataclasses.replace(self.outlines, groups=tuple(groups))


DivideBatch = Callable[[TrainBatch, Sequence[Sequence[int]]], "Sequence[BatchPart] | None"]
"""Divides a batch among a trainer's processes, from the rows of each micro-batch that each holds
(`TrainerProcess.rows`). Returns a part for each; None if each needs the tokens of all rollouts."""


@dataclass(frozen=True)
class MeshSizes:
    """Axis sizes of a trainer's mesh: copies, ways to shard the state, to split a layer's matrices, to split rows."""

    data: int
    fsdp: int
    tensor: int
    context: int = 1

    @property
    def devices(self) -> int:
        """The number of devices in the mesh."""
        return self.data * self.fsdp * self.tensor * self.context

    def __str__(self) -> str:
        over_context = f" x context {self.context}" if self.context > 1 else ""
        return f"data {self.data} x fsdp {self.fsdp} x tensor {self.tensor}{over_context}"


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
      worker: name of the hybrid worker.
      generation: membership generation in which the worker joined; sums of another generation are refused.
      fraction: fraction of the step's work, in (0, 1); the core computes the rest.
    """

    worker: str
    generation: int
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


class Trainer(WeightStager, Protocol):
    """The trainer as the coordinator sees it. One call at a time; the caller sets deadlines.

    As exceptions, `abort_step` may come at any time. `listen`, `connect` and `dismiss` may come during a step, if the
    step gives that hybrid worker no share.
    """

    async def start(self) -> TrainerInfo:
        """Builds the mesh and the train state (from `model` in the config) on its devices.

        Raises:
          ConfigError: too few devices, a CPU core that does not exist, or the model is not divisible over the mesh.
          DataError: the model directory cannot be used.
        """
        ...

    async def warm_start_step(self, sequences: Sequence[Trajectory]) -> Mapping[str, float]:
        """Takes one supervised step on given token sequences. The policy version does not change.

        Returns:
          Metrics of the step.

        Raises:
          LibraError: training has begun, or no token is under the loss mask.
        """
        ...

    async def accumulate(self, batch: TrainBatch) -> None:
        """Sums the gradients of some groups of the next step, while others of it still roll out.

        Several calls add up. The step's `TrainBatch.begun` names these groups. A trainer that does not hold their sums,
        because it was restarted or moved to another mesh, computes them in the step.

        Raises:
          DataError: a trajectory holds a number that cannot be trained on; the message names the trajectory.
          LibraError: the batch is for another version.
          StepAborted: `abort_step` came meanwhile; the sums are dropped.
        """
        ...

    async def train_step(self, batch: TrainBatch, shares: Sequence[Share] = ()) -> Mapping[str, float]:
        """Takes one step from policy version v to v + 1, even if it is skipped. Returns its metrics.

        A step is skipped if it is not finite or trains no token.

        Args:
          batch: groups to train on.
          shares: parts of `batch.rest` that hybrid workers compute meanwhile (`TrainingSide.contribute`, with the same
            arguments). The trainer computes a share that is late or unusable, and closes that worker's channel.
            `shares/late` counts these micro-batches, and `shares/late/<worker>` exists for each such worker.

        Raises:
          DataError: a trajectory holds a number that cannot be trained on; the message names the trajectory.
          ConfigError: the shares leave the core nothing.
          LibraError: the batch is for another version, or too many steps in a row were not finite.
          StepAborted: `abort_step` aborted the step; version and state are unchanged.
        """
        ...

    async def abort_step(self) -> bool:
        """Asks the current step, or `accumulate`, to abort between two micro-batches with StepAborted. Returns False if
        it will not.

        The trainer's state is then as before the step. Call only during one: otherwise, the next step is aborted.
        """
        ...

    async def listen(self, worker: str, generation: int) -> Mapping[str, Any]:
        """Opens a gradient channel for a hybrid worker.

        Args:
          worker: name of the hybrid worker.
          generation: membership generation in which the worker joins.

        Returns:
          The channel's address, as plain values for `connect` and `TrainingSide.join`.
        """
        ...

    async def connect(self, worker: str, generation: int, address: Mapping[str, Any]) -> None:
        """Starts to connect to a hybrid worker's channel and returns at once.

        Raises:
          LibraError: the address belongs to another hybrid worker, membership generation or trainer.
        """
        ...

    async def dismiss(self, worker: str) -> None:
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

    async def save(self, path: str) -> None:
        """Starts an asynchronous save of the whole train state to a new directory. The state may change at once.

        Raises:
          CheckpointFailed: the directory cannot be written, or the state holds numbers that are not finite.
        """
        ...

    async def wait_saved(self) -> None:
        """Waits until the last `save` is durable.

        Raises:
          CheckpointFailed: the disk refused a write.
          PeerLost: another process of the trainer is gone.
        """
        ...

    async def restore(self, path: str) -> int:
        """Restores the train state into this mesh's shardings; returns its policy version.

        Raises:
          DataError: the state is missing, incomplete, damaged, or of another model or optimizer.
        """
        ...

    async def export(self, path: str) -> None:
        """Writes the parameters as a Hugging Face directory. Raises LibraError instead if one is not finite."""
        ...

    async def policy_version(self) -> int:
        """Returns the version of the state."""
        ...


class MovableTrainer(Trainer, Protocol):
    """A trainer whose state other processes can take over (`trainer_control.handover`)."""

    async def stand_by(self) -> TrainerInfo:
        """Builds the mesh instead of `start`, and waits for the state and the shapes of another trainer."""
        ...

    async def shapes(self) -> Sequence[ProgramShape]:
        """Returns the shapes that the trainer has compiled programs for."""
        ...

    async def warm(self, shapes: Sequence[ProgramShape]) -> None:
        """Compiles a program for each shape that still lacks one."""
        ...

    async def snapshot(self, path: str) -> Snapshot:
        """Starts an asynchronous save of the state for another trainer, independent of checkpoints.

        Raises CheckpointFailed as `save`.
        """
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

    async def rows(self) -> Sequence[Sequence[int]]:
        """Returns the rows of each micro-batch that each process's devices hold, by process. Called on process 0 only.

        They change with the mesh.
        """
        ...

    async def shutdown(self) -> None:
        """Releases devices and shared memory. Idempotent."""
        ...


class TrainerClient(MovableTrainer, WeightSource, Protocol):
    """The trainer as other rooms call it, independent of the processes that train at the moment.

    Each call has a deadline of `config.deadlines`: DeadlineMissed names the trainer and the call. A call to a dead
    trainer raises TrainerLost.

    Attributes:
      lock: lock that the caller holds during each call, except calls that may come at any time (`Trainer`).
    """

    @property
    def name(self) -> str:
        """The name of the processes that train."""
        ...

    @property
    def processes(self) -> int:
        """The number of processes that train."""
        ...


class TrainingSide(WeightReceiver, Protocol):
    """A hybrid worker's training side: a whole data-parallel copy on its own mesh, without a train state.

    It gets each version's parameters as engines do, and computes the gradient sums of shares. One call at a time. An
    update drops the version that it holds, and `finish_weight_update` puts the new one on the devices.
    """

    async def start(self) -> TrainerInfo:
        """Builds the mesh. Compiles nothing yet and holds no parameters. Raises ConfigError as `Trainer.start`."""
        ...

    async def warm(self) -> None:
        """Compiles the gradient step for every row length, if still missing."""
        ...

    async def join(self, generation: int, address: Mapping[str, Any]) -> None:
        """Connects to the core's gradient channel; returns when it is connected.

        Raises:
          LibraError: no connection in time, or the address belongs to another hybrid worker or membership generation.
        """
        ...

    async def contribute(self, batch: TrainBatch, shares: Sequence[Share]) -> Mapping[str, float]:
        """Computes this worker's share of the step and sends the sums to the core.

        Returns:
          `micro_batches` in the share, `bytes` sent, and `seconds` from the batch's receipt until the core had the
          sums, without the wait for the core to take them.

        Raises:
          DataError: a trajectory holds a number that cannot be trained on.
          LibraError: the worker holds another version, has no such share, or the channel is gone.
        """
        ...

    async def leave(self) -> None:
        """Closes the channel and frees the parameters' memory. Idempotent."""
        ...


class HybridClient(TrainingSide, Protocol):
    """A hybrid worker's training side as other rooms call it.

    Each call has a deadline of `config.deadlines`: DeadlineMissed names the hybrid worker and the call.
    """

    @property
    def name(self) -> str:
        """The name of the hybrid worker's actor."""
        ...
