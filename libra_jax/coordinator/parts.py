"""What a run is made from: its context, its workers, and the parts of its coordinator, wired up once workers are up."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libra_jax import protocols
from libra_jax.coordinator import (
    checkpoint_store,
    checkpoints,
    dispatch,
    elasticity,
    instances,
    loop_workers,
    replay,
    saving,
    stopping,
    streaming,
    success,
)
from libra_jax.coordinator import groups as groups_lib
from libra_jax.coordinator import prompts as prompts_lib
from libra_jax.coordinator import weight_sync as sync
from libra_jax.hybrid import training_sides
from libra_jax.rollouts import rollouts, streams
from libra_jax.rollouts import samples as samples_lib
from libra_jax.trainer_control import client, handover, resize
from libra_jax.trainer_control import recovery as recovery_lib
from libra_jax.utils import deadlines, run_context
from libra_jax.weights import relay_tree


@dataclass(frozen=True)
class CoordinatorContext(run_context.RunContext):
    """What the parts of a run share, with what only its coordinator uses.

    Attributes:
      scope: the run's end, and the background tasks that end with it.
      samples: picks the rollouts that are written as text; None writes none.
      export: directory of the trained parameters in Hugging Face's format; None exports none.
    """

    scope: stopping.RunScope = field(default_factory=stopping.RunScope)
    samples: samples_lib.Samples | None = None
    export: Path | None = None


@dataclass(frozen=True)
class WorkerSpecs:
    """What the workers of a run are made from.

    Attributes:
      trainer: makes a `protocols.Trainer`.
      engines: each makes a `protocols.RolloutEngine`.
      training_sides: each makes the training side of a hybrid worker (`protocols.TrainingSide`). The last engines are
        the rollout sides, in the same order.
      relays: by host, what makes its weight relay; empty on a single host.
      loop_workers: each makes a `protocols.LoopWorker`; empty: rollouts run in the coordinator's process.
      make_engine: makes the engines that a plan adds; needed with a planner.
      make_trainer: makes the processes of a trainer that may have several or move to others; None: `trainer` alone.
      divide: gives each of several processes of a trainer its part of a batch; None: each takes whole batches.
    """

    trainer: protocols.ActorSpec
    engines: Sequence[protocols.ActorSpec]
    training_sides: Sequence[protocols.ActorSpec] = ()
    relays: Mapping[int, protocols.ActorSpec] = field(default_factory=dict)
    loop_workers: Sequence[protocols.ActorSpec] = ()
    make_engine: instances.MakeSpec | None = None
    make_trainer: client.MakeTrainer | None = None
    divide: protocols.DivideBatch | None = None


class RunWorkers:
    """The workers of a run. `start` sets the attributes. Create it inside the event loop that it serves.

    Attributes:
      sizes: sizes of the trainer's mesh.
      peak_flops: peak FLOP/s of one of the trainer's devices; None if unknown.
      sides: training sides of the hybrid workers; None if the run has no hybrid workers.
      hosts: the weight relays; None if the trainer's host is the only one.
    """

    trainer: client.TrainerActorClient
    sizes: protocols.MeshSizes
    peak_flops: float | None
    engines: instances.Instances
    sides: training_sides.TrainingSides | None = None
    hosts: relay_tree.RelayTree | None = None

    def __init__(self, run: run_context.RunContext, specs: WorkerSpecs) -> None:
        self._run = run
        self.specs = specs
        self._engine_specs = specs.engines

    def take_up_plan(self, planner: elasticity.Planner | None, stored: checkpoint_store.Stored) -> bool:
        """Adopts a checkpoint's plan and its instances, before `start`. Returns False if it is the config's plan.

        Args:
          planner: also adopts the plan.
        """
        specs = self.specs
        if planner is None or specs.make_engine is None:
            return False
        state = checkpoints.Checkpoints(self._run.workdir, keep=1).load(stored, routing=False)
        planner_state, before = state.get("planner"), planner.plan
        if planner_state is None:
            return False
        planner.restore(planner_state)
        if planner.plan == before:
            return False
        plan, hybrid = planner.plan, self._run.config.elastic.hybrid
        # The hybrid workers' engines are the last ones of the config, and plans leave them alone.
        engines = list(specs.engines[len(specs.engines) - hybrid :]) if hybrid else []
        trainer = dataclasses.replace(specs.trainer, devices=tuple(range(plan.train_devices)))
        numbers = itertools.count()
        for bucket in plan.rollout:
            for _ in range(bucket.count):
                other_specs = [*engines, trainer]
                engines.append(instances.make(specs.make_engine, numbers, bucket.tensor_parallel, other_specs))
        # The trainer itself starts on the config's mesh, and moves once it runs (`PlanFollower.begin`).
        self._engine_specs = engines
        return True

    async def start(self) -> None:
        """Creates and starts all workers. Returns once all are up.

        Raises:
          LibraError: a worker did not start.
        """
        run, specs = self._run, self.specs
        # Training sides by the name of their worker's engine.
        names = [spec.name for spec in specs.engines[len(specs.engines) - len(specs.training_sides) :]]
        hybrid = dict(zip(names, specs.training_sides, strict=True))
        self.engines = instances.Instances(run, self._engine_specs, make_spec=specs.make_engine, hybrid=tuple(hybrid))
        self.engines.trainer_holds(len(specs.trainer.devices))
        # All at once: a trainer and engines of a real model each take minutes to start.
        starting = [self._start_trainer(), self.engines.start()]
        if hybrid:
            self.sides = training_sides.TrainingSides(run, hybrid)
            starting.append(self.sides.start())
        if specs.relays:
            self.hosts = hosts = relay_tree.RelayTree(
                run.config, cluster=run.cluster, specs=specs.relays, recorder=run.recorder
            )
            # Only hosts whose engines or training sides read a relay's copy need one.
            readers = {spec.host for spec in (*self._engine_specs, *hybrid.values()) if spec.host is not None}
            starting.append(hosts.start({host for host in readers if hosts.serve(host)}))
        await deadlines.together(*starting)

    async def _start_trainer(self) -> None:
        run, spec, make_trainer = self._run, self.specs.trainer, self.specs.make_trainer
        run.recorder.status(spec.name, "starting")
        make = make_trainer(None) if make_trainer is not None else lambda *_: spec
        processes = client.TrainerProcesses(
            run.cluster, make, count=run.config.trainer.processes, name=spec.name, divide=self.specs.divide
        )
        self.trainer = client.TrainerActorClient(processes, run.config.deadlines)
        await self.trainer.make()
        run.recorder.status(spec.name, "loading the model and making the optimizer's state")
        info = await self.trainer.start()
        mesh = ", ".join(f"{axis} {size}" for axis, size in info.mesh.items())
        kind = f" {info.device_kind}" if info.device_kind not in ("", info.platform) else ""
        run.recorder.note(f"The trainer holds {info.parameters:,} parameters on {info.platform}{kind} ({mesh}).")
        run.recorder.status(spec.name, "idle")
        self.sizes, self.peak_flops = info.sizes, info.peak_flops

    async def shut_down(self, max_seconds: float) -> None:
        """Ends all workers within `max_seconds` seconds. Notes each unclean end."""
        # Without `start`, there are no engines yet.
        specs, engines = self.specs, getattr(self, "engines", None)
        # A plan may have started more engines than the config has. Each worker has its own time to end.
        started = max(len(self._engine_specs), 0 if engines is None else len(engines.engines))
        count = 1 + len(specs.training_sides) + len(specs.relays) + len(specs.loop_workers) + started
        seconds = min(max_seconds, self._run.config.deadlines.shutdown * count)
        try:
            ending = self._run.cluster.shutdown()
            await deadlines.within(seconds, ending, "The shutdown of the workers", "shutdown")
        except protocols.LibraError as error:
            self._run.recorder.note(f"Not everything ended cleanly: {error}")


@dataclass(frozen=True)
class RunParts:
    """The parts of a run.

    Attributes:
      dispatcher: places requests on instances.
      streams: samples tokens for rollouts of this process.
      groups: groups in flight and finished groups.
      prompts: chooses tasks and the sizes of their groups.
      replays: stores successful rollouts for later groups of their prompts.
      batches: selects the batches of coming steps.
      stream: begins steps on their first groups.
      weight_sync: syncs the weights of each version to the engines.
      saver: writes and reads checkpoints.
      elastic: switches hybrid workers and follows plans.
      resizing: changes the trainer's mesh.
      recovery: restarts a lost trainer.
    """

    trainer: protocols.TrainerClient
    dispatcher: dispatch.Dispatcher
    streams: streams.Streams
    runner: rollouts.RolloutRunner
    groups: groups_lib.Groups
    prompts: prompts_lib.Prompts
    replays: replay.SuccessReplay
    batches: groups_lib.Batches
    stream: streaming.StreamedGroups
    weight_sync: sync.WeightSync
    saver: saving.Saver
    elastic: elasticity.Elasticity
    resizing: resize.Resizing
    recovery: recovery_lib.Recovery


def wire(
    run: run_context.RunContext,
    agent: rollouts.Agent,
    scheduler: protocols.Scheduler,
    planner: elasticity.Planner | None,
    *,
    workers: RunWorkers,
    state: Callable[[], checkpoints.CoordinatorState],
) -> RunParts:
    """Makes the parts of a run. Call it inside the event loop that they serve.

    Args:
      planner: decides who trains and who rolls out; None leaves everything as it is.
      workers: they have started.
      state: returns the coordinator's part of a checkpoint.
    """
    trainer, engines = workers.trainer, workers.engines
    saver = saving.Saver(run, trainer=trainer, state=state)
    weight_sync = sync.WeightSync(
        run.config,
        trainer=trainer,
        engines=engines,
        recorder=run.recorder,
        sides=workers.sides,
        hosts=workers.hosts,
    )
    successors = None
    specs = workers.specs
    if specs.make_trainer is not None:
        successors = handover.successors(run, specs.make_trainer, serving=trainer, divide=specs.divide)
    resizing = resize.Resizing(run, trainer=trainer, sizes=workers.sizes, checkpoint=saver, successors=successors)
    recovery = recovery_lib.Recovery(run, trainer=trainer, checkpoints=saver, weights=weight_sync, resizing=resizing)
    dispatcher = dispatch.Dispatcher(run, scheduler=scheduler, engines=engines)
    tokens = streams.Streams(run, dispatcher=dispatcher, engines=engines)
    runner: rollouts.RolloutRunner = rollouts.Rollouts(run, agent, tokens)
    if workers.specs.loop_workers:
        runner = loop_workers.LoopWorkers(
            run, agent, workers.specs.loop_workers, dispatcher=dispatcher, engines=engines
        )
    rates = success.SuccessRates(run.config)
    replays = replay.SuccessReplay(run.config)
    groups = groups_lib.Groups(run, runner, rates, replays)
    prompts = prompts_lib.Prompts(run.config, agent.tasks, rates)
    stream = streaming.StreamedGroups(run, workers.trainer, recovery)
    batches = groups_lib.Batches(
        run,
        prompts=prompts,
        replays=replays,
        groups=groups,
        runner=runner,
        weight_sync=weight_sync,
        saver=saver,
        recovery=recovery,
        stream=stream,
    )
    elastic = elasticity.Elasticity(
        run, workers, dispatcher=dispatcher, resizing=resizing, weight_sync=weight_sync, planner=planner
    )

    # An engine may come up while the trainer is being restarted, and then waits for the restart.
    run.events.subscribe(
        protocols.EngineLoaded,
        lambda event: recovery.through(functools.partial(weight_sync.catch_up, engines.engines[event.name])),
    )
    return RunParts(
        trainer=trainer,
        dispatcher=dispatcher,
        streams=tokens,
        runner=runner,
        groups=groups,
        prompts=prompts,
        replays=replays,
        batches=batches,
        stream=stream,
        weight_sync=weight_sync,
        saver=saver,
        elastic=elastic,
        resizing=resizing,
        recovery=recovery,
    )
