"""What changes sides or size while a run goes on: plans, the trainer's mesh and its processes, hybrid workers.

The run tells of each step and each pause between two; what has to be decided and carried out is done from here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import (
    dispatch,
    failure,
    handover,
    hybrid,
    instances,
    mesh_moves,
    plan_follower,
    process_set,
    replicas,
    reports,
    resizing,
    saving,
)
from libra_jax.weights import sync

MakeTrainer = Callable[[protocols.MeshSizes | None], process_set.MakeProcess]
"""A mesh, or None for the config's, to how the processes of a trainer on it are made."""


class Elasticity:
    """Made inside the event loop it serves.

    Args:
      config: the run's configuration.
      cluster: makes a trainer's further processes.
      trainer: the one that serves.
      sizes: of its mesh.
      trainer_lock: held by whoever calls it.
      engines: the rollout instances.
      saver: commits a checkpoint before the trainer that writes it hands over.
      publisher: brings engines and members to the trainer's version.
      members: replicas of the hybrid workers; None where there are none.
      dispatcher: serves requests.
      planner: decides on plans; None leaves the layout as it is.
      make_trainer: a trainer's processes on another mesh; None: it stays in its own.
      recorder: gets what changes.
      workdir: the run's folder.
      ending: ends with changes under way.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        cluster: protocols.Cluster,
        trainer: process_set.Serving,
        sizes: protocols.MeshSizes,
        trainer_lock: asyncio.Lock,
        engines: instances.Instances,
        publisher: sync.WeightSync,
        saver: saving.Saver,
        members: replicas.Replicas | None,
        dispatcher: dispatch.Dispatcher,
        planner: plan_follower.Planner | None,
        make_trainer: MakeTrainer | None,
        recorder: protocols.Recorder,
        workdir: Path,
        ending: failure.Ending,
    ) -> None:
        self._limits = config.deadlines
        self._cluster = cluster
        self._trainer = trainer
        self._lock = trainer_lock
        self._engines = engines
        self._publisher = publisher
        self._recorder = recorder
        self._workdir = workdir
        self.resizing = resizing.Resizing(
            config,
            trainer=trainer,
            sizes=sizes,
            recorder=recorder,
            successors=None if make_trainer is None else self._successors(make_trainer),
        )
        self._hybrid: hybrid.HybridWorkers | None = None
        if members is not None:
            self._hybrid = hybrid.HybridWorkers(
                config,
                engines=engines,
                members=members,
                trainer=trainer,
                core_devices=sizes.devices,
                recorder=recorder,
                ending=ending,
            )
            self._hybrid.changed = self._show_pools
        self._follower: plan_follower.PlanFollower | None = None
        if planner is not None:
            self._follower = plan_follower.PlanFollower(
                config,
                planner=planner,
                engines=engines,
                dispatcher=dispatcher,
                resizing=self.resizing,
                recorder=recorder,
                ending=ending,
            )
        self.resizing.changed = self._resized
        self.resizing.moved = self._trainer_moved
        self.resizing.leaving = saver.commit_held
        self._show_pools()

    def take_up_plan(self) -> None:
        """The plan in force is a checkpoint's, and its instances have been started."""
        if self._follower is not None:
            self._follower.begin()

    async def before_step(self, step: int) -> None:
        """Between two steps, with the trainer's lock held. See `Resizing.boundary`."""
        await self.resizing.boundary(step)

    async def take_step(self, batch: protocols.TrainBatch, train: Callable[..., Any]) -> Mapping[str, float]:
        """Takes a training step, members of training their shares; returns the trainer's metrics.

        Args:
          batch: to train on.
          train: awaits the trainer's `train_step` with the arguments given.
        """
        self.resizing.trains(batch)
        if self._hybrid is None:
            metrics: Mapping[str, float] = await train(batch)
        else:
            shares, begin = self._hybrid.shares(batch.policy_version), asyncio.get_running_loop().time()
            self._hybrid.begin(batch, shares)
            try:
                metrics = await train(batch, shares)
            except protocols.TrainerLost:  # who computed a share for it is released
                late = {f"shares/late/{share.member}": 1.0 for share in shares}
                await self._hybrid.finish(shares, late, 0.0)
                raise
            await self._hybrid.finish(shares, metrics, asyncio.get_running_loop().time() - begin)
        return metrics

    def after(self, step: int, report: reports.StepReport) -> dict[str, float]:
        """Decides what is to change; returns the step's metrics of plan and pool."""
        metrics: dict[str, float] = {}
        if self._follower is not None:
            metrics |= self._follower.after(step, report)
        if self._hybrid is not None:
            metrics |= self._hybrid.after(step, report)
        return metrics

    async def close(self) -> None:
        """The run ends."""
        if self._hybrid is not None:
            self._hybrid.close()  # first: it waits for nobody, and a resize's processes may not end in time
        await self.resizing.close()

    def snapshot(self) -> dict[str, Any] | None:
        """Of the hybrid workers, JSON-able; the planner has its own."""
        return None if self._hybrid is None else self._hybrid.snapshot()

    def restore(self, snapshot: Mapping[str, Any] | None) -> None:
        """Goes on after a restart of the run."""
        if self._hybrid is not None and snapshot is not None:
            self._hybrid.restore(snapshot)

    def _successors(self, make: MakeTrainer) -> mesh_moves.Successors:
        """Trainers in other processes, each set with a name of its own."""
        numbers, name = itertools.count(1), self._trainer.set.name

        def successor(sizes: protocols.MeshSizes, processes: int) -> mesh_moves.Outside:
            moving = handover.Handover(self._limits, serving=self._trainer.set, lock=self._lock, workdir=self._workdir)
            made = process_set.ProcessSet(
                self._cluster, make(sizes), processes=processes, name=f"{name}-{next(numbers)}"
            )
            return mesh_moves.Outside(moving, made, sizes, self._trainer, self._limits)

        return successor

    async def trainer_lost(self, step: int) -> None:
        """The trainer is gone, and is to be made anew; with its lock held."""
        if self._follower is not None:
            self._follower.disturb()
        await self.resizing.trainer_lost(step)
        await self._trainer_moved()

    async def _trainer_moved(self) -> None:
        """Other processes train: channels and snapshots of those before go."""
        await self._publisher.release()
        if self._hybrid is not None:
            self._hybrid.trainer_moved()

    def _resized(self) -> None:
        """The trainer has another mesh."""
        if self._hybrid is not None:
            self._hybrid.disturb()
        self._show_pools()

    def _show_pools(self) -> None:
        """Tells the recorder how many devices each pool has now."""
        moving = {} if self._hybrid is None else self._hybrid.devices()
        core = sum(item.devices for item in self._engines.engines.values() if not item.hybrid)
        counts = {"core training": self.resizing.sizes.devices, **moving, "core rollout": core}
        now = asyncio.get_running_loop().time()
        self._recorder.pools(now, {name: counts.get(name, 0) for name in protocols.POOLS})
