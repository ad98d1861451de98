"""The trainer as an actor: the methods of `protocols.Trainer` around a learner.

`create` is what a cluster spawns. The methods are synchronous, because an actor's sync methods all run on one thread of
its own, as JAX's thread-local mesh contexts require.

A trainer of several processes is as many actors, each with its share of the mesh's devices, and every method is called
on all of them at once with the same arguments (`trainer_control.client`); what process 0 returns counts. `reserve`,
`listen`, `stage_weights`, `close_weights` and `is_saved` are asked of process 0 alone.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from libra_jax import checksums, protocols
from libra_jax import config as config_lib
from libra_jax.models import config as model_config
from libra_jax.models import hf
from libra_jax.training import batch as batch_lib
from libra_jax.training import checkpoints, members, optimizer, packing, prepare, resize, world
from libra_jax.training import learner as learner_lib
from libra_jax.training import mesh as mesh_lib
from libra_jax.training import shares as shares_lib
from libra_jax.training import state as state_lib
from libra_jax.weights import addresses
from libra_jax.weights import snapshot as weight_snapshot

MIB = 2**20


def create(config: Mapping[str, Any], workdir: str, process: int = 0) -> TrainerActor:
    """The trainer of a run, or one process of it; devices are first touched by its `start`.

    Args:
      config: a `RunConfig` as plain dicts (`config.to_dict`).
      workdir: the run's directory. The trainer writes only to paths that its methods are given.
      process: which of `trainer.processes` this is.

    Raises:
      ConfigError: a field cannot be used.
      DataError: the model directory cannot be read.
    """
    return TrainerActor(config_lib.parse(config_lib.RunConfig, config), process)


def model_shape(config: config_lib.ModelConfig) -> model_config.TransformerConfig:
    """The model's shape: that of the directory if there is one, else the preset's."""
    return model_config.read_directory(config.path) if config.path else model_config.load_preset(config.preset)


class TrainerActor:
    """Implements `protocols.Trainer`, synchronously. Every method raises LibraError with one sentence."""

    def __init__(self, config: config_lib.RunConfig, process: int = 0) -> None:
        self._config = config
        host = addresses.in_cluster(config.cluster.address) if config.cluster.address else addresses.LOOPBACK
        self._world = world.World(process, config.trainer.processes, host)
        self._model = model_shape(config.model)
        self._schedule = optimizer.schedule(config.optimizer, config.steps)
        self._learner: learner_lib.Learner | None = None
        self._weights: weight_snapshot.Snapshot | None = None
        self._checkpointer: checkpoints.Checkpointer | None = None
        self._resize: resize.Resize | None = None
        self._snapshots: checkpoints.Checkpointer | None = None
        # Replicas on other hosts come over the network, and over the loopback alone where there are none.
        self._members = members.Members(config.elastic, config.deadlines.transition, host)
        self._version = 0
        self._published: int | None = None  # the version published, while the parameters are those of its snapshot
        self._warm = False  # the optimizer's moments are the warm start's
        self._skipped_in_a_row = 0

    def reserve(self) -> str:
        """The address at which process 0, which this is, will meet the others."""
        return self._world.reserve()

    def join(self, address: str) -> None:
        """Meets the trainer's other processes, which join at the same time; see `world.World.join`."""
        self._world.join(address, self._config.deadlines.trainer_start)

    def start(self) -> protocols.TrainerInfo:
        """Builds mesh and train state and compiles the steps over the shortest rows.

        Raises:
          ConfigError: too few devices, a core that does not exist, or the model does not divide over the mesh.
          DataError: the model directory cannot be used.
        """
        config, learner = self._config, self._open()
        where = learner.layout
        if config.model.path:
            shardings = state_lib.shardings_of(where.state.params)
            params = hf.load(config.model.path, self._model, config.model.param_dtype, shardings)
        else:
            params = state_lib.random_params(self._model, where, config.seed)
        learner.begin(params)
        learner.compile(learner_lib.POLICY)
        if config.warm_start.steps:
            learner.compile(learner_lib.SUPERVISED)
        return self._begin(learner)

    def stand_by(self) -> protocols.TrainerInfo:
        """Instead of `start`: builds the mesh alone. `warm` compiles, `restore` brings the state of another trainer.

        Raises:
          ConfigError: as `start` does.
        """
        return self._begin(self._open())

    def shapes(self) -> list[protocols.ProgramShape]:
        """What this trainer has compiled programs for, in the order in which it met it."""
        return [
            protocols.ProgramShape(name, {key: (tuple(item.shape), str(item.dtype)) for key, item in batch.items()})
            for name, batch in self._started().programs.shapes()
        ]

    def warm(self, shapes: Sequence[protocols.ProgramShape]) -> None:
        """Compiles the programs for what another trainer of the same run has met (`shapes`), where it has not yet."""
        programs = self._started().programs
        for shape in shapes:
            arrays = {name: jax.ShapeDtypeStruct(*array) for name, array in shape.arrays.items()}
            programs.compile_like((shape.program, arrays))

    def _open(self) -> learner_lib.Learner:
        config = self._config
        if config.trainer.cores:
            # Of this thread, and so of those that XLA makes from it.
            config_lib.check_cores(config.trainer.cores, "trainer.cores")
            os.sched_setaffinity(0, config.trainer.cores)
        self._world.check(config.trainer)
        return learner_lib.Learner(config, self._model, jax.devices())

    def _begin(self, learner: learner_lib.Learner) -> protocols.TrainerInfo:
        config, where = self._config, learner.layout
        rollout = config.rollout
        self._weights = weight_snapshot.create(
            self._model,
            rollout.dtype,
            rollout.bucket_mib * MIB,
            rollout.transport,
            # A replica's digest is made of them, and relays tell by them what came.
            rollout.checksum or config.elastic.hybrid > 0 or config.cluster.accelerators_per_host > 0,
            rollout.tensor_parallel,
            config.deadlines.publish,
        )
        self._checkpointer, self._snapshots = checkpoints.Checkpointer(), checkpoints.Checkpointer(compress=False)
        self._learner = learner
        return protocols.TrainerInfo(
            policy_version=self._version,
            parameters=model_config.parameter_count(self._model),
            mesh=mesh_lib.sizes(where.mesh),
            platform=where.mesh.devices.flat[0].platform,
        )

    def warm_start_step(self, sequences: Sequence[protocols.Trajectory]) -> dict[str, float]:
        """One supervised step (mean cross entropy of the tokens under the loss mask) at the warm start's own rate.

        Raises:
          LibraError: training has begun, or nothing in `sequences` is under the loss mask.
        """
        learner = self._started()
        if self._version:
            raise protocols.LibraError(f"a warm start comes before training, and this is version {self._version}.")
        examples = batch_lib.examples(sequences, self._version, self._model.vocab_size)
        packed = prepare.pack(self._config, examples)
        self._warm = True
        self._published = None
        rate = self._config.warm_start.learning_rate
        metrics = learner.update(learner_lib.SUPERVISED, packed, rate)
        return self._finish(metrics, packed, rate)

    def train_step(self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share] = ()) -> dict[str, float]:
        """One policy update, version v -> v + 1, a skipped (non-finite) one included. Returns the step's metrics.

        Args:
          batch: what to train on.
          shares: parts that replicas compute meanwhile. Those that do not come are computed here, and their replica is
            dismissed. With any the metrics have `shares/*` (`members.Collection.metrics`).

        Raises:
          DataError: a trajectory holds a number that cannot be trained on; the message names it.
          ConfigError: the shares leave the core nothing.
          LibraError: the batch is another version's, or `trainer.max_skipped_steps` steps in a row were not finite.
          StepGivenUp: `give_up_step` asked for it; the version and the state are as before.
        """
        learner = self._started()
        if batch.policy_version != self._version:
            raise protocols.LibraError(
                f"the batch is for policy version {batch.policy_version} and the trainer holds {self._version}."
            )
        self._end_warm_start()
        prepared = prepare.prepare(self._config, batch, self._model.vocab_size, learner.reference_log_probs)
        rate = float(self._schedule(self._version))
        own, collection = self._collection(prepared, shares) if shares else (None, None)
        metrics = learner.update(learner_lib.POLICY, prepared.packed, rate, prepared.extras, own, collection)
        self._version += 1
        metrics |= batch_lib.statistics(prepared.advantages, prepared.examples, batch.groups)
        if collection is not None:
            metrics |= collection.metrics()
        return self._finish(metrics, prepared.packed, rate)

    # These four are async: they touch no JAX, so they run on the actor's event loop, beside a training step.

    async def give_up_step(self) -> bool:
        """Asks the step under way to end between two micro-batches, with StepGivenUp; the state is as before it then.

        Returns False where it will not: several processes would each end it after another micro-batch, and those that
        went on would wait for the others in a collective for ever.
        """
        if self._config.trainer.processes > 1:
            return False
        self._started().give_up.set()
        return True

    async def listen(self, member: str, epoch: int) -> dict[str, Any]:
        """Opens a gradient channel for a replica; returns its address. In the core's first process only."""
        self._started()
        return self._members.listen(member, epoch)

    async def connect(self, member: str, epoch: int, address: Mapping[str, Any]) -> None:
        """Begins to connect to a replica's channel, and returns at once; it has `deadlines.transition` to stand.

        Raises:
          LibraError: the address is another member's, epoch's or trainer's.
        """
        self._started()
        self._members.connect(member, epoch, address)

    async def dismiss(self, member: str) -> None:
        """Closes a replica's channel; nothing happens if there is none. Not one that a step under way waits for."""
        self._members.dismiss(member)

    def begin_resize(self, sizes: protocols.MeshSizes) -> protocols.ResizeEstimate:
        """Begins to compile for another mesh of this process's devices; training goes on.

        Raises:
          ConfigError: the sizes are no mesh of this model, batch and number of devices, or a resize is under way.
          LibraError: a device has no room for the move.
        """
        learner = self._started()
        if self._resize is not None:
            raise protocols.ConfigError(
                f"the trainer's mesh cannot become {sizes} while it becomes {self._resize.sizes}: wait, or cancel that"
            )
        self._resize = resize.Resize(learner, sizes, jax.devices())
        return self._resize.estimate

    def resize_progress(self) -> protocols.ResizeProgress:
        """How far the resize is."""
        return self._resizing().progress

    def finish_resize(self, seconds: float) -> protocols.ResizePhases:
        """Between two steps: waits at most `seconds` for the programs, then moves the state.

        Raises:
          DeadlineMissed: they took longer; the resize goes on.
          LibraError: it cannot be; training goes on on the mesh it has.
        """
        resizing = self._resizing()
        try:
            self._learner, phases = resizing.take_over(seconds)
        except protocols.DeadlineMissed:
            raise
        except protocols.LibraError:
            self._resize = None
            raise
        self._resize = None
        return phases

    def cancel_resize(self) -> None:
        """Gives up a resize that is under way; a program that is being compiled is left to end by itself."""
        if self._resize is not None:
            self._resize.cancel(0.0)
            self._resize = None

    def open_weights(self, policy_version: int) -> int:
        """Takes a snapshot of the parameters in the wire dtype; returns its number of chunks."""
        learner, weights = self._started(), self._weights
        assert weights is not None
        if policy_version != self._version:
            raise protocols.LibraError(f"version {policy_version} cannot be synced: the trainer holds {self._version}.")
        count = weights.open(policy_version, learner.params)
        self._published = policy_version
        return count

    def stage_weights(self, policy_version: int, index: int) -> protocols.WeightChunk:
        """Fills one chunk of the open snapshot; it stays readable until the next snapshot is opened."""
        self._started()
        assert self._weights is not None
        return self._weights.stage(policy_version, index)

    def close_weights(self, policy_version: int) -> None:
        """Frees the snapshot."""
        self._started()
        assert self._weights is not None
        self._weights.close(policy_version)

    def save(self, path: str) -> None:
        """Begins an asynchronous save of the train state to a new directory; ends the warm start."""
        learner = self._started()
        self._end_warm_start()
        assert self._checkpointer is not None
        assert learner.state is not None
        self._checkpointer.save(path, learner.state, self._host_state())

    def wait_saved(self) -> None:
        """Returns when the last `save` is durable."""
        self._started()
        assert self._checkpointer is not None
        self._checkpointer.wait()

    def restore(self, path: str) -> int:
        """Restores the train state, saved on any mesh, into this mesh's shardings; returns its policy version."""
        learner = self._started()
        assert self._checkpointer is not None
        learner.state = self._checkpointer.restore(path, learner.layout.state)
        self._version = int(learner.state.step)
        self._warm, self._published = False, None
        self._skipped_in_a_row = checkpoints.host_state(path).get("skipped_in_a_row", 0)
        return self._version

    def policy_version(self) -> int:
        """The version of the state."""
        self._started()
        return self._version

    def snapshot(self, path: str) -> protocols.Snapshot:
        """Like `save`, for another trainer to take over from: beside checkpoints, whose saves know nothing of it."""
        learner = self._started()
        self._end_warm_start()
        assert self._snapshots is not None
        assert learner.state is not None
        self._snapshots.save(path, learner.state, self._host_state())
        return protocols.Snapshot(self._version, sum(leaf.nbytes for leaf in jax.tree.leaves(learner.state)))

    def snapshot_saved(self) -> bool:
        """Whether the last snapshot is durable. Never waits for it.

        Raises:
          LibraError: it could not be written.
        """
        self._started()
        assert self._snapshots is not None
        if self._snapshots.saving:
            return False
        self._snapshots.wait()
        return True

    def is_saved(self, path: str) -> bool:
        """Whether a state that any trainer saves at `path` is there to be restored."""
        return checkpoints.is_sealed(path)

    def _host_state(self) -> dict[str, Any]:
        """What a step depends on and the train state does not hold; the warm start has ended by then."""
        return {"skipped_in_a_row": self._skipped_in_a_row}

    def export(self, path: str) -> None:
        """Writes the parameters as a Hugging Face directory, sealed with its files' checksums.

        Raises:
          LibraError: a parameter is not finite; nothing is written.
        """
        params = self._started().params
        if not checkpoints.is_finite(params):
            raise protocols.LibraError(
                f"{path}: not written, because version {self._version} of the policy {checkpoints.NOT_FINITE}: go back "
                "to an earlier checkpoint, and lower optimizer.learning_rate or look at the rewards."
            )
        hf.save(params, self._model, path)
        if jax.process_index() == 0:
            try:
                checksums.seal_folder(pathlib.Path(path))
            except OSError as error:
                raise protocols.LibraError(f"{path}: cannot be written ({error.strerror or error})") from error

    def shutdown(self) -> None:
        """Finishes the last save, gives shared memory back, closes all channels and drops the state. Idempotent."""
        self.cancel_resize()
        self._members.close()
        if self._weights is not None:
            self._weights.shutdown()
        for checkpointer in (self._checkpointer, self._snapshots):
            if checkpointer is not None:
                checkpointer.close()
        self._learner = self._weights = self._checkpointer = self._snapshots = None
        self._world.leave()

    def _started(self) -> learner_lib.Learner:
        if self._learner is None:
            raise protocols.LibraError("the trainer is not running: call start first.")
        return self._learner

    def _resizing(self) -> resize.Resize:
        self._started()
        if self._resize is None:
            raise protocols.ConfigError("the trainer's mesh is not being changed: call begin_resize first")
        return self._resize

    def _end_warm_start(self) -> None:
        """Training begins with an optimizer of its own, and with the warmed policy as its reference."""
        if self._warm:
            self._started().restart()
            self._warm = False

    def _collection(
        self, prepared: prepare.Prepared, shares: Sequence[protocols.Share]
    ) -> tuple[range, members.Collection]:
        """The core's own micro-batches, and what will bring the others' sums."""
        own, *ranges = shares_lib.split(prepared.work, shares)
        known = self._published == self._version
        wanted = members.Wanted(
            version=self._version,
            # The first process alone holds what was published, and checks for all (`members.everywhere`).
            digest=self._host_snapshot().digest(self._version) if known and jax.process_index() == 0 else None,
            shares=shares,
            ranges=ranges,
            arrays=members.array_kinds(self._started().layout.accumulator),
        )
        return own, members.Collection(self._members, wanted)

    def _host_snapshot(self) -> weight_snapshot.HostSnapshot:
        # The config refuses hybrid workers with any other transport: they read parameters from host memory.
        assert isinstance(self._weights, weight_snapshot.HostSnapshot)
        return self._weights

    def _finish(self, metrics: dict[str, float], packed: packing.Packed, rate: float) -> dict[str, float]:
        """Adds what the host knows of the step, and stops a run whose steps are not finite."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if metrics["skipped"] else 0
        limit = self._config.trainer.max_skipped_steps
        if self._skipped_in_a_row > limit:
            raise protocols.LibraError(
                f"trainer.max_skipped_steps: {self._skipped_in_a_row} steps in a row had a loss or gradient that was "
                f"not finite (last: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}); lower "
                "optimizer.learning_rate or look at the rewards."
            )
        return metrics | {
            "learning_rate": rate,
            "tokens/processed": float(sum(place.columns for place in packed.places if place is not None)),
            "padding_fraction": packed.padding_fraction,
            "micro_batches": float(len(packed.micro_batches)),
            "compiled_shapes": float(self._started().programs.compiled_shapes),
        }
