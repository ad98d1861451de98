"""Wires up the parts of a run's coordinator once its workers are up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from libra_jax import protocols
from libra_jax.coordinator import (
    attempts,
    checkpoints,
    context,
    dispatch,
    elasticity,
    failure,
    plan_follower,
    saving,
)
from libra_jax.coordinator import batches as batches_lib
from libra_jax.coordinator import groups as groups_lib
from libra_jax.coordinator import workers as workers_lib
from libra_jax.trainer_control import client, handover, resize
from libra_jax.trainer_control import recovery as recovery_lib
from libra_jax.weights import sync


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
    runner: attempts.Attempts
    groups: groups_lib.Groups
    batches: batches_lib.Batches
    publisher: sync.WeightSync
    saver: saving.Saver
    elastic: elasticity.Elasticity
    resizing: resize.Resizing
    recovery: recovery_lib.Recovery


def wire(
    run: context.RunContext,
    agent: context.Agent,
    scheduler: protocols.Scheduler,
    planner: plan_follower.Planner | None,
    *,
    make_trainer: client.MakeTrainer | None,
    workers: workers_lib.Workers,
    ending: failure.Ending,
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
    runner = attempts.Attempts(
        config,
        dispatcher=dispatcher,
        make_environment=agent.make_environment,
        tokenizer=agent.tokenizer,
        reward=agent.reward,
        make_trajectory=agent.make_trajectory,
        note=recorder.note,
    )
    groups = groups_lib.Groups(config, runner=runner, recorder=recorder, ending=ending, events=events)
    batches = batches_lib.Batches(
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
