"""The trainer as an actor: the methods of `protocols.Trainer` around a learner.

A cluster spawns `create`. Most methods are synchronous, because all sync methods of an actor run on one thread of its
own, and JAX's mesh contexts are thread-local.

A trainer of several processes consists of one actor per process, each with its share of the mesh's devices. Every
method is called on all actors at once (`trainer_control.client`); the result of process 0 counts. Arguments are the
same, but of a batch a process may have the tokens of its own rows alone, and outlines of other sequences (`dividing`).
Only process 0 receives `reserve`, `rows`, `listen`, `stage_weights` and `is_saved`.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import contract
from libra_jax.data import batch as batch_lib
from libra_jax.data import packing, world
from libra_jax.data import sequences as sequences_lib
from libra_jax.models import config as model_config
from libra_jax.planning.costs import costs, hardware
from libra_jax.training import checkpoints, optimizer, resize, step, updates
from libra_jax.training import critic as critic_lib
from libra_jax.training import learner as learner_lib
from libra_jax.training import running as running_lib
from libra_jax.training import shares as shares_lib
from libra_jax.utils import machine
from libra_jax.weights import adapter_snapshot
from libra_jax.weights import snapshot as weight_snapshot


def create(config: Mapping[str, Any], workdir: str, process: int = 0) -> TrainerActor:
    """Creates the trainer of a run, or one of its processes. Its `start` is the first to touch devices.

    Args:
      config: a `RunConfig` as plain dicts (`config.to_dict`).
      workdir: directory of the run. The trainer writes only to paths that its methods are given.
      process: index of this process among `trainer.processes`.

    Raises:
      ConfigError: a field has an unusable value.
      DataError: the model directory cannot be read.
    """
    return TrainerActor(config_lib.parse(config_lib.RunConfig, config), process)


class TrainerActor:
    """Implements `protocols.Trainer`, synchronously. Every method raises LibraError with one sentence."""

    def __init__(self, config: config_lib.RunConfig, process: int = 0) -> None:
        self._config = config
        # Without a cluster address, all processes run on this host, so the loopback is enough.
        host = machine.cluster_address(config.cluster.address) if config.cluster.address else machine.LOOPBACK
        self._host = host
        self._world = world.World(process, config.trainer.processes, host)
        self._channels = shares_lib.Channels(config.elastic, config.deadlines.transition, host)
        self._model = running_lib.model_shape(config.model)
        self._running: running_lib.Running | None = None
        self._resize: resize.MeshChange | None = None
        self._version = 0
        self._synced: int | None = None  # the version last synced, while the parameters equal its snapshot
        self._skipped_in_a_row = 0
        self._multiplied = model_config.multiplied_parameter_count(self._model)
        self._schedule = optimizer.schedule(config.optimizer, config.steps)
        # Groups of the next step whose gradients are summed already (`trainer.stream`).
        self._begun: list[batch_lib.Prepared] = []

    def running(self) -> running_lib.Running:
        """Returns the trainer's parts.

        Raises:
          LibraError: the trainer has not been started, or was shut down.
        """
        if self._running is None:
            raise protocols.LibraError("the trainer is not running: call start first.")
        return self._running

    def reserve(self) -> str:
        """Reserves the address at which process 0 (this process) will meet the others."""
        return self._world.reserve()

    def join(self, address: str) -> None:
        """Meets the trainer's other processes, which join at the same time. See `world.World.join`."""
        self._world.join(address, self._config.deadlines.trainer_start)

    def start(self) -> protocols.TrainerInfo:
        """Builds the mesh and the train state, and compiles the steps over the shortest rows of few sequences.

        The programs of other rows and of scoring compile on another thread from then on.
        """
        config, info = self._config, self.stand_by()
        running = self.running()
        learner = running.learner
        running.begin()
        learner.compile(step.POLICY)
        if config.warm_start.steps:
            (running.warming or learner).compile(step.SUPERVISED)
        if running.critic is not None:
            running.critic.compile(step.VALUE)
            running.critic.ahead.begin()
        # From now on, because the trainer is idle until the first groups are finished, and may need any row then.
        learner.ahead.begin()
        return info

    def stand_by(self) -> protocols.TrainerInfo:
        """Builds only the mesh, instead of `start`. `warm` compiles; `restore` loads the state of another trainer."""
        config = self._config
        if config.trainer.cores:
            # Pins this thread; the threads that XLA starts from it inherit the cores.
            config_lib.check_cores(config.trainer.cores, "trainer.cores")
            os.sched_setaffinity(0, config.trainer.cores)
        self._world.check(config.trainer)
        contract.check(config.algorithm)
        self._running = running_lib.create(config, self._model, self._host)
        mesh = self._running.learner.layout.mesh
        return protocols.TrainerInfo(
            policy_version=self._version,
            parameters=model_config.parameter_count(self._model),
            mesh=dict(mesh.shape),
            platform=mesh.devices.flat[0].platform,
            device_kind=mesh.devices.flat[0].device_kind,
            peak_flops=config.trainer.peak_flops or hardware.peak_flops(mesh.devices.flat[0].device_kind),
        )

    def shapes(self) -> list[protocols.ProgramShape]:
        """Returns the shapes that this trainer has compiled programs for, in the order of compilation."""
        return [
            protocols.ProgramShape(name, {key: (tuple(item.shape), str(item.dtype)) for key, item in batch.items()})
            for name, batch in self.running().learner.programs.shapes
        ]

    def warm(self, shapes: Sequence[protocols.ProgramShape]) -> None:
        """Compiles the programs for the `shapes` of another trainer of the same run, if still missing."""
        programs = self.running().learner.programs
        for shape in shapes:
            arrays = {name: jax.ShapeDtypeStruct(*array) for name, array in shape.arrays.items()}
            programs.compile(shape.program, arrays)

    # The next four are async because they touch no JAX: they run on the actor's event loop during a training step.

    async def abort_step(self) -> bool:
        # Each of several processes would abort after a different micro-batch, and the others would wait for it in a
        # collective forever.
        if self._config.trainer.processes > 1:
            return False
        self.running().learner.abort.set()
        return True

    async def listen(self, worker: str, generation: int) -> dict[str, Any]:
        """Opens a gradient channel for a hybrid worker and returns its address. Only for the core's first process."""
        self.running()
        return self._channels.listen(worker, generation)

    async def connect(self, worker: str, generation: int, address: Mapping[str, Any]) -> None:
        """Starts to connect to a hybrid worker's channel and returns at once. Deadline: `deadlines.transition`."""
        self.running()
        self._channels.connect(worker, generation, address)

    async def dismiss(self, worker: str) -> None:
        """Closes the channel of a hybrid worker, if it has one. Not for a channel that the current step waits for."""
        self._channels.dismiss(worker)

    def begin_resize(self, sizes: protocols.MeshSizes) -> protocols.ResizeEstimate:
        learner = self.running().learner
        if self._resize is not None:
            raise protocols.ConfigError(
                f"the trainer's mesh cannot become {sizes} while it becomes {self._resize.sizes}: wait, or cancel that"
            )
        self._resize = resize.MeshChange(learner, sizes, jax.devices())
        return self._resize.estimate

    def resize_progress(self) -> protocols.ResizeProgress:
        return self._resizing().progress

    def finish_resize(self, seconds: float) -> protocols.ResizePhases:
        running, resizing = self.running(), self._resizing()
        former = running.learner
        try:
            running.learner, phases = resizing.take_over(seconds)
        except protocols.DeadlineMissed:
            raise
        except protocols.LibraError:
            self._resize = None
            raise
        self._resize = None
        # Not waited for: its thread holds the programs of the former mesh until the current one is compiled.
        former.ahead.cancel(0.0)
        running.learner.ahead.begin()
        return phases

    def cancel_resize(self) -> None:
        """Cancels a running resize. A compilation that has started ends by itself."""
        if self._resize is not None:
            self._resize.compilation.cancel(0.0)
            self._resize = None

    def open_weights(self, policy_version: int, destinations: Sequence[protocols.WeightDestination] = ()) -> int:
        running = self.running()
        if policy_version != self._version:
            raise protocols.LibraError(f"version {policy_version} cannot be synced: the trainer holds {self._version}.")
        if running.warming is not None:
            # The weights are cast to the compute dtype once, so that engines sample from what training scores.
            self.running().end_warm_start()
        merges = self._model.adapter is not None and self._config.model.lora.sync == "merge"
        learner = running.learner
        sent = learner.merged(self._config.rollout.dtype) if merges else learner.policy
        count = running.weights.open(policy_version, sent, destinations)
        self._synced = policy_version
        return count

    def stage_weights(self, policy_version: int, index: int) -> protocols.WeightChunk:
        return self.running().weights.stage(policy_version, index)

    def close_weights(self, policy_version: int) -> None:
        self.running().weights.close(policy_version)

    def save(self, path: str) -> None:
        """Starts an asynchronous save of the train state to a new directory, which holds no whole checkpoint.

        Ends the warm start.
        """
        self.running().save(self.running().checkpointer, path, {"skipped_in_a_row": self._skipped_in_a_row})

    def wait_saved(self) -> None:
        self.running().checkpointer.wait()

    def restore(self, path: str) -> int:
        """Restores a train state, saved on any mesh, into this mesh's shardings. Returns its policy version."""
        self.running().learner.forget()
        host = self.running().restore(path)
        self._synced, self._version = None, int(self.running().present.train_state().step)
        self._skipped_in_a_row = host.get("skipped_in_a_row", 0)
        return self._version

    def policy_version(self) -> int:
        self.running()
        return self._version

    def snapshot(self, path: str) -> protocols.Snapshot:
        host = {"skipped_in_a_row": self._skipped_in_a_row}
        state = self.running().save(self.running().handover, path, host)
        return protocols.Snapshot(self._version, sum(leaf.nbytes for leaf in jax.tree.leaves(state)))

    def snapshot_saved(self) -> bool:
        handover = self.running().handover
        if handover.saving:
            return False
        handover.wait()
        return True

    def is_saved(self, path: str) -> bool:
        """Returns True if any trainer has durably saved a state at `path`."""
        return (pathlib.Path(path) / checkpoints.SEAL).exists()  # the seal is written last

    def export(self, path: str) -> None:
        """Writes the policy as a Hugging Face directory, sealed with the checksums of its files.

        With an adapter, the directory holds the merged weights, and its folder `running.ADAPTER` the adapter in PEFT's
        format. Its folder `running.BASE` holds the weights under the adapter, if `model.path` does not.
        """
        self.running().export(path, self._version)

    def shutdown(self) -> None:
        """Finishes the last save, frees shared memory, closes all channels and drops the state. Idempotent."""
        self._stop_compiling(0.0)
        self._channels.close()
        if self._running is not None:
            self._running.weights.shutdown()
            self._running.checkpointer.close()
            self._running.handover.close()
            # Dropped before waits that may take seconds: the state is most of the memory.
            self._running.learner.state = self._running.learner.accumulator = self._running.warming = None
            self._running.critic = None
        # A process should not end while XLA compiles. Half of the deadline, because this is not all of the shutdown.
        self._stop_compiling(self._config.deadlines.shutdown / 2)
        self._resize = self._running = None
        self._world.leave()

    def _stop_compiling(self, seconds: float) -> None:
        """Ends compilations on other threads after their current programs, and waits at most `seconds` for them."""
        ends = time.monotonic() + seconds
        if self._resize is not None:
            self._resize.compilation.cancel(seconds)
        if self._running is not None:
            for learner in (self._running.learner, self._running.critic):
                if learner is not None:
                    learner.ahead.cancel(max(0.0, ends - time.monotonic()))

    def _resizing(self) -> resize.MeshChange:
        self.running()
        if self._resize is None:
            raise protocols.ConfigError("the trainer's mesh is not being changed: call begin_resize first")
        return self._resize

    def warm_start_step(self, sequences: Sequence[protocols.Trajectory]) -> dict[str, float]:
        """Takes one supervised step (mean cross entropy of the tokens in the loss mask) at the warm start's rate."""
        running = self.running()
        learner = running.learner if self._model.adapter is None else running.warming
        if self._version or learner is None:
            raise protocols.LibraError(f"a warm start comes before training, and this is version {self._version}.")
        examples = sequences_lib.examples(sequences, self._version, self._model)
        packed = batch_lib.pack(self._config, examples)
        running.warmed = True
        # The parameters change without a new version, so the synced snapshot no longer matches.
        self._synced = None
        rate = self._config.warm_start.learning_rate
        metrics = learner.update(step.SUPERVISED, packed, rate)
        return self._finish(learner, metrics, [packed])

    def train_step(self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share] = ()) -> dict[str, float]:
        """Takes the updates of one step, and skips non-finite ones. Shares are parts of the first update.

        With shares, the metrics include `shares/*` (`shares.Collection.metrics`).
        """
        self._check_version(batch)
        learner, critic = self.running().learner, self.running().critic
        begun, again = self._take_begun(batch)
        prepared = self._prepared(batch.rest)
        parts = [*begun, prepared]
        packed = [part.packed for part in parts]
        core_range, collection = self._collection(prepared, shares) if shares else (None, None)
        batch_lib.check_trained(packed, masked=any(part.sequences.masked_N.any() for part in parts))
        rate = float(self._schedule(self._version))
        if critic is not None and self._version < self._config.critic.warmup_steps:
            metrics = learner.stay()
        else:
            metrics = learner.train(
                prepared.packed, rate, prepared.extras, prepared.packed.minibatches, core_range, collection
            )
        if self._config.trainer.share_prompt or any(part.split() for part in packed):
            metrics = {name: value for name, value in metrics.items() if not f"/{name}".endswith(updates.OF_ROLLOUTS)}
        if critic is not None:
            # After the policy, whose step may be aborted: an aborted step must leave the critic unchanged, too.
            critic_metrics = critic.train(
                prepared.packed, self._config.critic.learning_rate, prepared.targets, prepared.packed.minibatches
            )
            metrics |= critic_lib.report(critic_metrics)
            # Asked for while the critic learnt: too late for this step, and no business of the next one.
            learner.abort.clear()
        # A skipped step counts too: the version is the number of steps taken.
        self._version += 1
        metrics |= batch_lib.statistics(parts)
        if collection is not None:
            metrics |= collection.metrics()
            metrics["shares/of"] = float(len(prepared.packed.micro_batches) + again)
        metrics["train/devices"] = float(learner.layout.mesh.size + len(shares) * self._config.trainer.replica_devices)
        return self._finish(learner, metrics, packed, self._config.algorithm.epochs)

    def _collection(
        self, prepared: batch_lib.Prepared, shares: Sequence[protocols.Share]
    ) -> tuple[range, shares_lib.Collection]:
        """Divides a step's work: returns the micro-batches that this trainer computes, and the collection of others."""
        core_range, *ranges = shares_lib.split(prepared.work, shares)
        weights = self.running().weights
        # Hybrid workers read parameters from host memory: the config refuses any other transport.
        assert isinstance(weights, weight_snapshot.HostSnapshot | adapter_snapshot.AdapterSnapshot)
        # Without a sync of this version, no hybrid worker can hold its parameters. Of several processes, the first
        # alone has the snapshot; it checks for all.
        knows_digest = self._synced == self._version and jax.process_index() == 0
        return core_range, shares_lib.Collection(
            self._channels,
            version=self._version,
            digest=weights.digest(self._version) if knows_digest else None,
            shares=shares,
            ranges=ranges,
            accumulator=self.running().learner.layout.accumulator,
        )

    def rows(self) -> Sequence[Sequence[int]]:
        """Returns the rows of each micro-batch that each process's devices hold. See `protocols.TrainerProcess`."""
        trainer = self._config.trainer
        return self.running().learner.programs.rows((trainer.micro_batch_rows, trainer.row_tokens))

    def accumulate(self, batch: protocols.TrainBatch) -> None:
        """Sums the gradients of some groups of the next step. See `protocols.Trainer.accumulate`.

        Sums do not depend on the order of micro-batches, but for rounding. So a step may begin on finished groups while
        others still roll out, if each group's numbers depend on that group alone: `config.run` refuses settings that
        look at the whole batch. The update divides by the tokens of the whole batch, which only it needs.
        """
        self._check_version(batch)
        self._accumulate(batch)

    def _accumulate(self, batch: protocols.TrainBatch, *, in_step: bool = False) -> int:
        """Sums gradients, within a step or before it. Returns the number of micro-batches."""
        prepared, learner = self._prepared(batch), self.running().learner
        if not learner.has_begun:
            # Sums of earlier groups are gone, if there were any: the step will compute them again.
            self._begun = []
        learner.accumulate(prepared.packed, prepared.extras, in_step=in_step)
        self._begun.append(prepared)
        return len(prepared.packed.micro_batches)

    def _take_begun(self, batch: protocols.TrainBatch) -> tuple[list[batch_lib.Prepared], int]:
        """Returns the groups whose sums the step goes on from; computes these sums first if they are gone.

        Also returns the number of micro-batches that it computed for that.
        """
        learner, again = self.running().learner, 0
        numbers = tuple(group.group_id for part in self._begun for group in part.sequences.groups)
        if numbers != batch.begun or learner.has_begun != bool(batch.begun):
            learner.forget()
            self._begun = []
            if batch.begun:
                again = self._accumulate(batch.of(batch.begun), in_step=True)
        begun, self._begun = self._begun, []
        return begun, again

    def _check_version(self, batch: protocols.TrainBatch) -> None:
        if batch.policy_version != self._version:
            raise protocols.LibraError(
                f"the batch is for policy version {batch.policy_version} and the trainer holds {self._version}."
            )

    def _prepared(self, batch: protocols.TrainBatch) -> batch_lib.Prepared:
        running = self.running()
        running.end_warm_start()
        values = batch_lib.NO_CRITIC if running.critic is None else running.critic.values
        learner = running.learner
        return batch_lib.prepare(
            self._config, batch, self._model, learner.reference_log_probs, values, learner.score_norms
        )

    def _finish(
        self,
        learner: learner_lib.Learner,
        metrics: dict[str, float],
        parts: Sequence[packing.Packed],
        epochs: int = 1,
    ) -> dict[str, float]:
        """Adds the host's metrics of a step that `learner` took, and stops a run whose steps are not finite."""
        # Updates without a trained token are skipped, too, and are no sign of a broken run.
        self._skipped_in_a_row = 0 if updates.is_finite(metrics) else self._skipped_in_a_row + 1
        limit = self._config.trainer.max_skipped_steps
        if self._skipped_in_a_row > limit:
            raise protocols.LibraError(
                f"trainer.max_skipped_steps: {self._skipped_in_a_row} steps in a row had a loss or gradient that was "
                f"not finite (last: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}, critic's loss "
                f"{metrics.get('critic/loss', 'none')}); lower "
                "optimizer.learning_rate or look at the rewards."
            )
        lengths = [place.columns for packed in parts for place in packed.places]
        pairs = sum(layout.pairs for packed in parts for layout in packed.layouts)
        if shared_columns := sum(packed.shared_columns for packed in parts):
            metrics["tokens/shared"] = float(shared_columns)
        # A learner that another trainer or mesh has handed over to may lack programs.
        self.running().learner.ahead.begin()
        waited, learner.programs.waited = learner.programs.waited, 0.0
        return metrics | {
            "tokens/processed": float(sum(lengths)),
            "train/flops": epochs * costs.train_flops(learner.model, self._multiplied, lengths, pairs),
            "padding_fraction": 1.0 - sum(lengths) / sum(packed.size for packed in parts),
            "micro_batches": float(sum(len(packed.micro_batches) for packed in parts)),
            "compiled_shapes": float(len(learner.programs.shapes)),
            "train/compile_seconds": waited,
        }
