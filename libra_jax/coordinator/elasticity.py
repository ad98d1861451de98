"""Manages elastic changes of a run: plans, the trainer's mesh, and hybrid workers.

The run calls this module at each step and between steps. Decisions and their execution start here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import (
    checkpoints,
    dispatch,
    failure,
    hybrid,
    instances,
    plan_follower,
    reports,
)
from libra_jax.elastic import training_sides
from libra_jax.trainer_control import resize
from libra_jax.weights import sync


class Elasticity:
    """Applies elastic changes to a run. Create it inside the event loop that it serves.

    Args:
      config: the run's configuration.
      trainer: trains, alone or with hybrid workers.
      resizing: changes the trainer's mesh.
      engines: the rollout instances.
      publisher: syncs weights from the trainer to engines and hybrid workers.
      members: training sides of the hybrid workers; None if the run has no hybrid workers.
      dispatcher: serves requests.
      planner: decides on plans. None keeps the layout.
      recorder: gets each change.
      events: source of TrainerResized and TrainerReplaced.
      ending: runs changes in the background, and cancels them at the run's end.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        trainer: protocols.TrainerClient,
        resizing: resize.Resizing,
        engines: instances.Instances,
        publisher: sync.WeightSync,
        members: training_sides.TrainingSides | None,
        dispatcher: dispatch.Dispatcher,
        planner: plan_follower.Planner | None,
        recorder: protocols.Recorder,
        events: protocols.Events,
        ending: failure.Ending,
    ) -> None:
        self._trainer = trainer
        self._resizing = resizing
        self._engines = engines
        self._publisher = publisher
        self._recorder = recorder
        self._hybrid: hybrid.HybridWorkers | None = None
        if members is not None:
            self._hybrid = hybrid.HybridWorkers(
                config,
                engines=engines,
                members=members,
                trainer=trainer,
                core_devices=resizing.sizes.devices,
                recorder=recorder,
                ending=ending,
                changed=self._show_pools,
            )
        self._follower: plan_follower.PlanFollower | None = None
        if planner is not None:
            self._follower = plan_follower.PlanFollower(
                config,
                planner=planner,
                engines=engines,
                dispatcher=dispatcher,
                resizing=resizing,
                recorder=recorder,
                ending=ending,
            )
        events.subscribe(protocols.TrainerResized, self._trainer_resized)
        events.subscribe(protocols.TrainerReplaced, self._trainer_replaced)
        self._show_pools()

    def take_up_plan(self) -> None:
        """Adopts a checkpoint's plan, whose instances have been started."""
        if self._follower is not None:
            self._follower.begin()

    async def before_step(self, step: int) -> None:
        """Applies a pending resize between two steps. The caller holds the trainer's lock. See `Resizing.boundary`."""
        await self._resizing.boundary(step)

    async def take_step(self, batch: protocols.TrainBatch) -> Mapping[str, float]:
        """Takes a training step, in which hybrid workers compute their shares. Returns the trainer's metrics."""
        self._resizing.trains(batch)
        if self._hybrid is None:
            return await self._trainer.train_step(batch)
        shares, begin = self._hybrid.shares(batch.policy_version), asyncio.get_running_loop().time()
        self._hybrid.begin(batch, shares)
        try:
            metrics = await self._trainer.train_step(batch, shares)
        except protocols.TrainerLost:  # the step is lost, so hybrid workers with a share switch back to rollout
            late = {f"shares/late/{share.member}": 1.0 for share in shares}
            await self._hybrid.finish(shares, late, 0.0)
            raise
        await self._hybrid.finish(shares, metrics, asyncio.get_running_loop().time() - begin)
        return metrics

    def after(self, step: int, report: reports.StepReport) -> dict[str, float]:
        """Decides on changes after a step. Returns the step's metrics of plan and pool."""
        metrics: dict[str, float] = {}
        if self._follower is not None:
            metrics |= self._follower.after(step, report)
        if self._hybrid is not None:
            metrics |= self._hybrid.after(step, report)
        return metrics

    async def close(self) -> None:
        """Stops all changes at the end of the run."""
        if self._hybrid is not None:
            self._hybrid.close()  # first, because it does not wait, and a resize's processes may not end in time
        await self._resizing.close()

    def snapshot(self) -> checkpoints.HybridState | None:
        """Returns the state of the hybrid workers; None without them. The planner has its own snapshot."""
        return None if self._hybrid is None else self._hybrid.snapshot()

    def restore(self, snapshot: checkpoints.HybridState | None) -> None:
        """Restores the state of the hybrid workers after a restart of the run."""
        if self._hybrid is not None and snapshot is not None:
            self._hybrid.restore(snapshot)

    async def _trainer_replaced(self, event: protocols.TrainerReplaced) -> None:
        # A loss touches the step under way. A planned move is marked by the plan follower itself.
        if event.lost and self._follower is not None:
            self._follower.disturb()
        await self._publisher.release()
        if self._hybrid is not None:
            self._hybrid.trainer_moved()

    def _trainer_resized(self, event: protocols.TrainerResized) -> None:
        if self._hybrid is not None:
            self._hybrid.disturb()
        self._show_pools()

    def _show_pools(self) -> None:
        """Records the present number of devices of each pool."""
        moving = {} if self._hybrid is None else self._hybrid.devices()
        core = sum(item.devices for item in self._engines.engines.values() if not item.hybrid)
        counts = {"core training": self._resizing.sizes.devices, **moving, "core rollout": core}
        now = asyncio.get_running_loop().time()
        self._recorder.pools(now, {name: counts.get(name, 0) for name in protocols.POOLS})
