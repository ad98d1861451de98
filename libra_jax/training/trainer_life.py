"""The life of the trainer actor beside its steps: its start, mesh, weight snapshots, checkpoints and end."""

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
from libra_jax.data import world
from libra_jax.models import config as model_config
from libra_jax.models.adapters import adapters
from libra_jax.planning.costs import hardware
from libra_jax.training import checkpoints, program_cache, resize, step
from libra_jax.training import learner as learner_lib
from libra_jax.training import running as running_lib
from libra_jax.training import shares as shares_lib
from libra_jax.utils import checksums, machine, turns
from libra_jax.weights import create as weights_create

MIB = 2**20


def model_shape(config: config_lib.ModelConfig) -> model_config.TransformerConfig:
    """Returns the model's shape with its adapter: from the model directory if the config names one, else the preset."""
    if config.path:
        checksums.check_sealed(pathlib.Path(config.path), weights=False)
    shape = model_config.read_directory(config.path) if config.path else model_config.load_preset(config.preset)
    return adapters.adapted(shape, config.lora)


class TrainerLife:
    """The methods of `protocols.Trainer` that take no step. Every method raises LibraError with one sentence."""

    def __init__(self, config: config_lib.RunConfig, process: int = 0) -> None:
        self._config = config
        # Without a cluster address, all processes run on this host, so the loopback is enough.
        host = machine.cluster_address(config.cluster.address) if config.cluster.address else machine.LOOPBACK
        self._host = host
        self._world = world.World(process, config.trainer.processes, host)
        self._channels = shares_lib.Channels(config.elastic, config.deadlines.transition, host)
        self._model = model_shape(config.model)
        self._running: running_lib.Running | None = None
        self._resize: resize.Resize | None = None
        self._version = 0
        self._synced: int | None = None  # the version last synced, while the parameters equal its snapshot
        self._skipped_in_a_row = 0

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
        """Builds only the mesh, in place of `start`. `warm` compiles; `restore` loads the state of another trainer."""
        config = self._config
        if config.trainer.cores:
            # Pins this thread; the threads that XLA starts from it inherit the cores.
            config_lib.check_cores(config.trainer.cores, "trainer.cores")
            os.sched_setaffinity(0, config.trainer.cores)
        self._world.check(config.trainer)
        contract.check(config.algorithm)
        learner = learner_lib.Learner(config, self._model, jax.devices())
        program_cache.use(config.trainer.compilation_cache, learner.layout.mesh.devices.flat[0].platform)
        # JAX has read its environment variables: engines may start while this trainer loads and compiles.
        turns.ending()()
        weights = weights_create.create(
            self._model,
            config.rollout.dtype,
            config.rollout.chunk_mib * MIB,
            config.rollout.transport,
            # The digest that hybrid workers send is made of the checksums, and weight relays verify chunks with them.
            config.rollout.checksum or config.elastic.hybrid > 0 or config.cluster.accelerators_per_host > 0,
            config.deadlines.weight_sync,
            self._host,
            adapter=self._model.adapter is not None and config.model.lora.sync == "adapter",
        )
        # The next trainer reads a snapshot once, so speed matters more than size: no compression.
        handover = checkpoints.Checkpointer(compress=False)
        critic = learner_lib.Learner(config, self._model, jax.devices(), critic=True) if config.critic.enabled else None
        self._running = running_lib.Running(
            config, self._model, learner, weights, checkpoints.Checkpointer(), handover, critic
        )
        mesh = learner.layout.mesh
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
        self._resize = resize.Resize(learner, sizes, jax.devices())
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

    def _resizing(self) -> resize.Resize:
        self.running()
        if self._resize is None:
            raise protocols.ConfigError("the trainer's mesh is not being changed: call begin_resize first")
        return self._resize
