"""Creates and starts a run's workers together: trainer, engines, training sides and weight relays."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from libra_jax import deadlines, protocols
from libra_jax.coordinator import (
    checkpoint_store,
    checkpoints,
    context,
    failure,
    instances,
    plan_follower,
)
from libra_jax.elastic import training_sides
from libra_jax.trainer_control import client
from libra_jax.weights import relay_tree


class Workers:
    """The workers of a run. `start` sets the attributes. Create it inside the event loop that it serves.

    Args:
      run: the run's surroundings.
      specs: what the workers are made from.
      ending: ends with what goes on beside the run.

    Attributes:
      trainer: trains.
      sizes: sizes of the trainer's mesh.
      engines: the rollout instances.
      members: training sides of the hybrid workers; None if the run has no hybrid workers.
      hosts: the weight relays; None if the trainer's host is the only one.
    """

    trainer: client.TrainerClient
    sizes: protocols.MeshSizes
    engines: instances.Instances
    members: training_sides.TrainingSides | None = None
    hosts: relay_tree.RelayTree | None = None

    def __init__(self, run: context.RunContext, specs: context.WorkerSpecs, ending: failure.Ending) -> None:
        self._config = run.config
        self._cluster = run.cluster
        self._recorder = run.recorder
        self._trainer_spec = specs.trainer
        self._engine_specs = specs.engines
        self._replica_specs = specs.hybrid
        self._relay_specs = specs.relays
        self._make_engine = specs.make_engine
        self._make_trainer = specs.make_trainer
        self._ending = ending

    @property
    def count(self) -> int:
        """Number of workers, started or planned."""
        engines = getattr(self, "engines", None)
        made = 0 if engines is None else len(engines.engines)
        return 1 + len(self._replica_specs) + len(self._relay_specs) + max(len(self._engine_specs), made)

    def take_up_plan(
        self, planner: plan_follower.Planner | None, workdir: Path, stored: checkpoint_store.Stored
    ) -> bool:
        """Adopts a checkpoint's plan and its instances, before `start`. Returns False if it is the config's plan.

        Args:
          planner: also adopts the plan.
          workdir: the run's folder.
          stored: the checkpoint.
        """
        if planner is None or self._make_engine is None:
            return False
        kept, before = checkpoints.Checkpoints(workdir, keep=1).load(stored).get("planner"), planner.plan
        if kept is None:
            return False
        planner.restore(kept)
        if planner.plan == before:
            return False
        plan, hybrid = planner.plan, self._config.elastic.hybrid
        # The hybrid workers' engines are the last ones of the config, and plans leave them alone.
        specs = list(self._engine_specs[len(self._engine_specs) - hybrid :]) if hybrid else []
        trainer = dataclasses.replace(self._trainer_spec, devices=tuple(range(plan.train_devices)))
        numbers = itertools.count()
        for bucket in plan.rollout:
            for _ in range(bucket.count):
                specs.append(instances.make(self._make_engine, numbers, bucket.tensor_parallel, [*specs, trainer]))
        self._engine_specs = specs
        return True

    async def start(self) -> None:
        """Creates and starts all workers. Returns once all are up.

        Raises:
          LibraError: a worker did not start.
        """
        self.engines = instances.Instances(
            self._config,
            cluster=self._cluster,
            specs=self._engine_specs,
            recorder=self._recorder,
            ending=self._ending,
            make_spec=self._make_engine,
            hybrid=tuple(self._replica_specs),
        )
        self.engines.trainer_holds(len(self._trainer_spec.devices))
        starting = [self._start_trainer(), self.engines.start()]
        if self._replica_specs:
            self.members = training_sides.TrainingSides(
                self._config, cluster=self._cluster, specs=self._replica_specs, recorder=self._recorder
            )
            starting.append(self.members.start())
        if self._relay_specs:
            self.hosts = relay_tree.RelayTree(
                self._config, cluster=self._cluster, specs=self._relay_specs, recorder=self._recorder
            )
            starting.append(self.hosts.start(self._remote_hosts(self.hosts)))
        await deadlines.together(*starting)

    def _remote_hosts(self, hosts: relay_tree.RelayTree) -> set[int]:
        """Returns the hosts whose engines or training sides read a weight relay's copy."""
        specs = (*self._engine_specs, *self._replica_specs.values())
        return {spec.host for spec in specs if spec.host is not None and hosts.serve(spec.host)}

    async def shut_down(self, most: float) -> None:
        """Ends all workers within at most `most` seconds. Notes each unclean end."""
        seconds = min(most, self._config.deadlines.shutdown * self.count)
        try:
            ending = self._cluster.shutdown()
            await deadlines.within(seconds, ending, "The shutdown of the workers", "shutdown")
        except protocols.LibraError as error:
            self._recorder.note(f"Not everything ended cleanly: {error}")

    async def _start_trainer(self) -> None:
        name = self._trainer_spec.name
        self._recorder.status(name, "starting its process")
        make = self._make_trainer(None) if self._make_trainer is not None else lambda *_: self._trainer_spec
        processes = client.TrainerProcesses(self._cluster, make, count=self._config.trainer.processes, name=name)
        self.trainer = client.TrainerClient(processes, self._config.deadlines)
        await self.trainer.make()
        self._recorder.status(name, "loading the model and making the optimizer's state")
        info = await self.trainer.start()
        mesh = ", ".join(f"{axis} {size}" for axis, size in info.mesh.items())
        self._recorder.note(f"The trainer holds {info.parameters:,} parameters on {info.platform} ({mesh}).")
        self._recorder.status(name, "idle")
        self.sizes = info.sizes
