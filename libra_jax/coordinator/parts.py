"""Starts a run's workers together, and wires up the parts of its coordinator once they are up."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from libra_jax import deadlines, protocols
from libra_jax.coordinator import (
    checkpoint_store,
    checkpoints,
    context,
    dispatch,
    elasticity,
    instances,
    rollouts,
    saving,
    stopping,
)
from libra_jax.coordinator import groups as groups_lib
from libra_jax.elastic import training_sides
from libra_jax.trainer_control import client, handover, resize
from libra_jax.trainer_control import recovery as recovery_lib
from libra_jax.weights import relay_tree, sync


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

    def __init__(self, run: context.RunContext, specs: context.WorkerSpecs, ending: stopping.Ending) -> None:
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

    def take_up_plan(self, planner: elasticity.Planner | None, workdir: Path, stored: checkpoint_store.Stored) -> bool:
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


@dataclass(frozen=True)
class Parts:
    """The parts of a run.

    Attributes:
      trainer: trains.
      dispatcher: places requests on instances.
      runner: runs rollouts.
      groups: groups in flight and finished groups.
      batches: selects the batches of coming steps.
      publisher: syncs the weights of each version to the engines.
      saver: writes and reads checkpoints.
      elastic: switches hybrid workers and follows plans.
      resizing: changes the trainer's mesh.
      recovery: restarts a lost trainer.
    """

    trainer: protocols.TrainerClient
    dispatcher: dispatch.Dispatcher
    runner: rollouts.Rollouts
    groups: groups_lib.Groups
    batches: groups_lib.Batches
    publisher: sync.WeightSync
    saver: saving.Saver
    elastic: elasticity.Elasticity
    resizing: resize.Resizing
    recovery: recovery_lib.Recovery


def wire(
    run: context.RunContext,
    agent: context.Agent,
    scheduler: protocols.Scheduler,
    planner: elasticity.Planner | None,
    *,
    make_trainer: client.MakeTrainer | None,
    workers: Workers,
    ending: stopping.Ending,
    state: Callable[[], checkpoints.CoordinatorState],
) -> Parts:
    """Makes the parts of a run. Call it inside the event loop that they serve.

    Args:
      run: the run's surroundings.
      agent: what the policy is asked to do.
      scheduler: decides which instance serves a request.
      planner: decides who trains and who rolls out; None leaves everything as it is.
      make_trainer: makes the processes of a trainer that may move to others.
      workers: they have started.
      ending: ends with what goes on beside the run.
      state: the coordinator's part of a checkpoint.
    """
    config, recorder, workdir = run.config, run.recorder, run.workdir
    trainer, engines, members = workers.trainer, workers.engines, workers.members
    events = engines.events
    saver = saving.Saver(
        config, trainer=trainer, workdir=workdir, recorder=recorder, events=events, state=state, epoch=run.fencing
    )
    publisher = sync.WeightSync(
        config,
        trainer=trainer,
        engines=engines,
        recorder=recorder,
        members=members,
        hosts=workers.hosts,
    )
    successors = None
    if make_trainer is not None:
        successors = handover.successors(
            run.cluster, make_trainer, serving=trainer, limits=config.deadlines, workdir=workdir
        )
    resizing = resize.Resizing(
        config,
        trainer=trainer,
        sizes=workers.sizes,
        checkpoint=saver,
        recorder=recorder,
        events=events,
        successors=successors,
    )
    recovery = recovery_lib.Recovery(
        config,
        trainer=trainer,
        checkpoints=saver,
        weights=publisher,
        resizing=resizing,
        recorder=recorder,
        events=events,
        scope=ending,
        fencing=run.fencing,
    )
    dispatcher = dispatch.Dispatcher(config, scheduler=scheduler, engines=engines, recorder=recorder, ending=ending)
    runner = rollouts.Rollouts(
        config,
        dispatcher=dispatcher,
        make_environment=agent.make_environment,
        tokenizer=agent.tokenizer,
        reward=agent.reward,
        make_trajectory=agent.make_trajectory,
        note=recorder.note,
    )
    groups = groups_lib.Groups(config, runner=runner, recorder=recorder, ending=ending, events=events)
    batches = groups_lib.Batches(
        config,
        tasks=agent.tasks,
        groups=groups,
        publisher=publisher,
        saver=saver,
        recovery=recovery,
        recorder=recorder,
        events=events,
    )
    elastic = elasticity.Elasticity(
        config,
        trainer=trainer,
        resizing=resizing,
        engines=engines,
        publisher=publisher,
        members=members,
        dispatcher=dispatcher,
        planner=planner,
        recorder=recorder,
        events=events,
        ending=ending,
    )

    # An engine may come up while the trainer is being restarted, and then waits for the restart.
    async def bring_weights(event: protocols.EngineLoaded) -> None:
        engine = engines.engines[event.name]
        await recovery.through(lambda: publisher.catch_up(engine))

    events.subscribe(protocols.EngineLoaded, bring_weights)
    return Parts(
        trainer=trainer,
        dispatcher=dispatcher,
        runner=runner,
        groups=groups,
        batches=batches,
        publisher=publisher,
        saver=saver,
        elastic=elastic,
        resizing=resizing,
        recovery=recovery,
    )
