"""What a run's coordinator is made of, wired up once its workers are there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.agents.rewards import scoring
from libra_jax.coordinator import (
    attempts,
    dispatch,
    elasticity,
    failure,
    fencing,
    instances,
    plan_follower,
    process_set,
    saving,
)
from libra_jax.coordinator import batches as batches_lib
from libra_jax.coordinator import groups as groups_lib
from libra_jax.coordinator import recovery as recovery_lib
from libra_jax.coordinator import workers as workers_lib
from libra_jax.weights import sync


@dataclass(frozen=True)
class Parts:
    """The parts, from tokens to checkpoints.

    Attributes:
      trainer: whichever serves.
      trainer_lock: held by who asks it for something, as it takes one call at a time.
      dispatcher: places requests on instances.
      runner: runs attempts.
      groups: those in flight and those that are done.
      batches: what the steps to come train on.
      publisher: brings each version to the engines.
      saver: writes and reads checkpoints.
      elastic: who trains and who rolls out.
      recovery: makes a lost trainer anew, below whatever asks it.
    """

    trainer: process_set.Serving
    trainer_lock: asyncio.Lock
    dispatcher: dispatch.Dispatcher
    runner: attempts.Attempts
    groups: groups_lib.Groups
    batches: batches_lib.Batches
    publisher: sync.WeightSync
    saver: saving.Saver
    elastic: elasticity.Elasticity
    recovery: recovery_lib.Recovery


def wire(
    config: configuration.RunConfig,
    *,
    cluster: protocols.Cluster,
    tasks: protocols.TaskSource,
    make_environment: Callable[[], protocols.Environment],
    tokenizer: protocols.Tokenizer,
    scheduler: protocols.Scheduler,
    recorder: protocols.Recorder,
    workdir: Path,
    reward: scoring.Scorer | None,
    make_trajectory: attempts.MakeTrajectory,
    planner: plan_follower.Planner | None,
    make_trainer: elasticity.MakeTrainer | None,
    epoch: fencing.Epoch | None,
    workers: workers_lib.Workers,
    ending: failure.Ending,
    state: Callable[[], dict[str, Any]],
    step: Callable[[], int],
) -> Parts:
    """Makes the parts of a run, inside the event loop they serve.

    Args:
      config, cluster, tasks, make_environment, tokenizer, scheduler, recorder, workdir, reward, make_trajectory,
        planner, make_trainer, epoch: as the coordinator was given them.
      workers: they have started.
      ending: ends with what goes on beside the run.
      state: the coordinator's part of a checkpoint.
      step: training steps taken.
    """
    trainer, engines, members = workers.trainer, workers.engines, workers.members
    trainer_lock = asyncio.Lock()
    saver = saving.Saver(
        config,
        trainer=trainer,
        trainer_lock=trainer_lock,
        workdir=workdir,
        recorder=recorder,
        state=state,
        epoch=epoch,
    )
    publisher = sync.WeightSync(
        config,
        trainer=trainer,
        trainer_lock=trainer_lock,
        engines=engines,
        recorder=recorder,
        members=members,
        hosts=workers.hosts,
    )
    dispatcher = dispatch.Dispatcher(config, scheduler=scheduler, engines=engines, recorder=recorder, ending=ending)
    runner = attempts.Attempts(
        config,
        dispatcher=dispatcher,
        make_environment=make_environment,
        tokenizer=tokenizer,
        reward=reward,
        make_trajectory=make_trajectory,
        note=recorder.note,
    )
    groups = groups_lib.Groups(
        config, runner=runner, recorder=recorder, ending=ending, settled=lambda: batches.settled()
    )
    batches = batches_lib.Batches(
        config,
        tasks=tasks,
        groups=groups,
        publisher=publisher,
        commit=lambda: recovery.through(saver.commit),
        recorder=recorder,
    )
    elastic = elasticity.Elasticity(
        config,
        cluster=cluster,
        trainer=trainer,
        sizes=workers.sizes,
        trainer_lock=trainer_lock,
        engines=engines,
        publisher=publisher,
        saver=saver,
        members=members,
        dispatcher=dispatcher,
        planner=planner,
        make_trainer=make_trainer,
        recorder=recorder,
        workdir=workdir,
        ending=ending,
    )
    recovery = recovery_lib.Recovery(
        config,
        trainer=trainer,
        trainer_lock=trainer_lock,
        saver=saver,
        publisher=publisher,
        sizes=lambda: elastic.resizing.sizes,
        lost=lambda: elastic.trainer_lost(step()),
        recorder=recorder,
        ending=ending,
        epoch=epoch,
    )

    async def load_weights(engine: instances.Engine) -> None:
        await recovery.through(lambda: publisher.catch_up(engine))

    engines.load_weights = load_weights
    return Parts(
        trainer=trainer,
        trainer_lock=trainer_lock,
        dispatcher=dispatcher,
        runner=runner,
        groups=groups,
        batches=batches,
        publisher=publisher,
        saver=saver,
        elastic=elastic,
        recovery=recovery,
    )
