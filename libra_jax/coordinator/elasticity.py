"""Manages elastic changes of a run: plans, the trainer's mesh, and hybrid workers.

The run calls this module at each step and between steps. A move to a new plan happens in the background and loses
nothing. Requests of stopped instances resume elsewhere from their tokens, or wait for started instances. The trainer
continues meanwhile, except while its own mesh changes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from libra_jax import protocols
from libra_jax.coordinator import dispatch, instances, reports
from libra_jax.coordinator import weight_sync as sync
from libra_jax.hybrid import hybrid, training_sides
from libra_jax.planning import planner as planner_lib
from libra_jax.planning import replanning
from libra_jax.trainer_control import resize
from libra_jax.utils import run_context


class Planner(Protocol):
    """Decides on plans (`planning.planner.GlobalPlanner`)."""

    @property
    def plan(self) -> protocols.Plan:
        """The plan in force."""
        ...

    @property
    def calibrated(self) -> bool:
        """True if the planner's times are measured, not taken from a hardware sheet alone."""
        ...

    def after(
        self,
        step: int,
        measured: planner_lib.ObservedStep,
        trained: Sequence[protocols.Trajectory],
        *,
        may_move: bool = True,
    ) -> tuple[replanning.Decision[protocols.Plan] | None, dict[str, float]]:
        """Returns the decision after a training step (None without a look) and its metrics. Updates `plan`."""
        ...

    def refuse(self, plan: protocols.Plan) -> None:
        """Rejects the last decision, which could not be carried out. `plan` becomes the plan in force."""
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """Returns the state to keep across a restart; JSON-able."""
        ...

    def restore(self, snapshot: Mapping[str, Any]) -> None: ...


class ElasticWorkers(Protocol):
    """The workers that elastic changes concern (`coordinator.parts.RunWorkers`)."""

    @property
    def trainer(self) -> protocols.TrainerClient: ...
    @property
    def engines(self) -> instances.Instances: ...
    @property
    def sides(self) -> training_sides.TrainingSides | None:
        """Training sides of the hybrid workers; None if the run has no hybrid workers."""
        ...


class PlanFollower:
    """Asks the planner and carries out its decisions. Create it inside the event loop that it serves.

    Args:
      run: what the parts of the run share. The recorder gets each decision, and a span for each move.
      dispatcher: dispatches requests to the instances.
      resizing: changes the trainer's mesh.

    Attributes:
      disturbed: True if the step under way predicts no later steps; also set by the run.
    """

    def __init__(
        self,
        run: run_context.RunContext,
        *,
        planner: Planner,
        engines: instances.Instances,
        dispatcher: dispatch.Dispatcher,
        resizing: resize.Resizing,
    ) -> None:
        self._shadow = run.config.planner.shadow
        self._synchronous = run.config.coordinator.max_staleness == 0
        self._steps = run.config.steps
        self._recorder = run.recorder
        self._scope = run.scope
        self._clock = run.clock
        self._planner = planner
        self._engines = engines
        self._dispatcher = dispatcher
        self._resizing = resizing
        self._followed = planner.plan
        self._move: asyncio.Task[None] | None = None
        self._losses = 0
        self.disturbed = False
        self._failed = ""

    def begin(self) -> None:
        """Adopts a checkpoint's plan: its instances have been started, and the trainer's mesh follows."""
        plan = self._planner.plan
        self._dispatcher.replan(self._engines.with_hybrid(plan.rollout))
        self._engines.trainer_holds(plan.train_devices)

        async def take_up() -> None:
            try:
                await self._resizing.resize(_mesh(plan), "the plan in force at the checkpoint").done
            except protocols.LibraError as error:
                self._stay(plan, str(error))

        if _mesh(plan) != self._resizing.sizes:
            self._move = self._scope.start(take_up(), "going on with a plan's mesh")

    def after(self, step: int, report: reports.StepReport) -> Mapping[str, float]:
        """Asks the planner after a step. Returns the step's metrics of the plan.

        Nothing is decided during a move or in a run that is to end. If the planner cannot make a plan, its reason is
        noted once and the layout stays.
        """
        if self._scope.called or step >= self._steps:
            return {}
        moving = (self._move is not None and not self._move.done()) or not self._engines.settled
        times = report.times
        # Without the evaluation, which only some steps have: plans are judged by steps that are alike.
        step_seconds = times.step - report.evaluation.get("evaluation/seconds", 0.0)
        # Reported until the planner may act on the loss.
        lost = self._engines.losses - self._losses
        measured = planner_lib.ObservedStep(
            step=step_seconds,
            train=times.train,
            sync=times.sync,
            # Groups begin right after the weight sync, before an evaluation and a checkpoint, during which no one waits
            # for them.
            wait=times.rollout if self._synchronous else times.wait,
            waiting=report.streams.waited_seconds / step_seconds if step_seconds > 0 else 0.0,
            slots=sum(instance.slots for instance in self._engines.serving()),
            lost=lost,
            disturbed=moving or self.disturbed or lost > 0,
        )
        if not moving:
            self._losses = self._engines.losses
        # A move that ends later touches the step after this one too.
        self.disturbed = moving
        trained = [trajectory for group in report.groups for trajectory in group.rollouts]
        try:
            decision, metrics = self._planner.after(step, measured, trained, may_move=not moving)
        except protocols.LibraError as error:
            if str(error) != self._failed:
                self._failed = str(error)
                self._recorder.note(f"No plan could be made, and everything stays as it is: {error}.")
            return {}
        if decision is not None:
            calibrated = self._planner.calibrated
            self._recorder.decision({"step": step, "calibrated": calibrated, **decision.record()})
            unsure = "" if calibrated else " (times of the hardware sheet: not both stages have been measured yet)"
            self._recorder.note(f"Plan, {decision.line()}{unsure}.")
        if moving:
            return metrics
        plan, before, dead = self._planner.plan, self._followed, self._engines.dead
        if plan != before or (decision is not None and dead and not self._shadow):
            self._followed = plan
            # A plan that only has other buckets applies at once, all others in the background.
            if _counts(plan) == _counts(before) and _mesh(plan) == _mesh(before) and not dead:
                self._dispatcher.replan(self._engines.with_hybrid(plan.rollout))
            else:
                self.disturbed = True
                self._move = self._scope.start(self._carry_out(before, plan), "moving to a new plan")
        return metrics

    async def _carry_out(self, before: protocols.Plan, plan: protocols.Plan) -> None:
        """Moves from one plan to another. Devices are freed before they are taken.

        A growing trainer compiles its programs before engines free their devices.
        """
        begin = self._clock()
        grows = plan.train_devices > before.train_devices
        handle = None
        try:
            if _mesh(plan) != self._resizing.sizes:
                # With `hold`, a growing trainer waits until the engines have left its new devices.
                handle = self._resizing.resize(_mesh(plan), "a plan", hold=grows)
        except protocols.ConfigError as error:
            self._stay(before, str(error))
            return
        try:
            if handle is not None:
                await (handle.compiled if grows else handle.done)
            self._engines.trainer_holds(plan.train_devices)
            if _counts(plan) == _counts(before) and not self._engines.dead:
                self._dispatcher.replan(self._engines.with_hybrid(plan.rollout))
            else:
                await self._engines.follow(plan.rollout)
            if handle is not None and grows:
                occupants = [
                    name
                    for name, engine in self._engines.engines.items()
                    if any(device < plan.train_devices for device in engine.spec.devices)
                ]
                if occupants:
                    handle.cancel(f"{', '.join(occupants)} still roll out on its devices")
                handle.held = False
                # The engines have moved: if the mesh fails now, only the mesh stays as before.
                before = dataclasses.replace(before, rollout=plan.rollout)
                await handle.done
        except instances.NoRoom as error:
            if handle is not None and grows:
                handle.cancel(str(error))
            self._stay(before, str(error))
            return
        except protocols.LibraError as error:
            # An error of the engines, not of the resize, ends the run.
            if handle is None or not handle.done.done() or handle.done.exception() is not error:
                raise
            self._stay(before, "as far as the trainer's mesh goes")
            return
        end = self._clock()
        self._recorder.span("coordinator", "move to a new plan", begin, end, dataclasses.asdict(plan))

    def _stay(self, plan: protocols.Plan, why: str) -> None:
        """Keeps `plan` in force, on the trainer's present mesh, because the decision could not be carried out."""
        present = self._resizing.sizes
        plan = dataclasses.replace(plan, **dataclasses.asdict(present))
        self._followed = plan
        self._engines.trainer_holds(plan.train_devices)
        self._planner.refuse(plan)
        self._recorder.note(f"The plan is aborted: {why}")


def _counts(plan: protocols.Plan) -> dict[int, int]:
    return {bucket.tensor_parallel: bucket.count for bucket in plan.rollout}


def _mesh(plan: protocols.Plan) -> protocols.MeshSizes:
    return protocols.MeshSizes(plan.data, plan.fsdp, plan.tensor, plan.context)


class Elasticity:
    """Applies elastic changes to a run. Create it inside the event loop that it serves.

    Args:
      run: what the parts of the run share. The recorder gets each change.
      workers: the trainer, the rollout instances and the training sides of hybrid workers.
      dispatcher: serves requests.
      resizing: changes the trainer's mesh.
      weight_sync: syncs weights from the trainer to engines and hybrid workers.
      planner: decides on plans. None keeps the layout.

    Attributes:
      hybrid: the hybrid workers; None without them.
      follower: follows the planner's plans; None without a planner.
    """

    def __init__(
        self,
        run: run_context.RunContext,
        workers: ElasticWorkers,
        *,
        dispatcher: dispatch.Dispatcher,
        resizing: resize.Resizing,
        weight_sync: sync.WeightSync,
        planner: Planner | None,
    ) -> None:
        self._recorder = run.recorder
        self._clock = run.clock
        self._trainer: protocols.TrainerClient = workers.trainer
        self._engines = workers.engines
        self._resizing = resizing
        self._weight_sync = weight_sync
        self.hybrid: hybrid.HybridWorkers | None = None
        if workers.sides is not None:
            self.hybrid = hybrid.HybridWorkers(
                run,
                engines=workers.engines,
                sides=workers.sides,
                trainer=workers.trainer,
                core_devices=resizing.sizes.devices,
            )
        self.follower: PlanFollower | None = None
        if planner is not None:
            self.follower = PlanFollower(
                run, planner=planner, engines=workers.engines, dispatcher=dispatcher, resizing=resizing
            )
        if (workers_in_both := self.hybrid) is not None:
            run.events.subscribe(protocols.TrainerResized, lambda _: workers_in_both.disturb())
        run.events.subscribe(protocols.TrainerResized, lambda _: self._show_pools())
        run.events.subscribe(protocols.TrainerReplaced, self._trainer_replaced)
        run.events.subscribe(protocols.PoolsChanged, lambda _: self._show_pools())
        self._show_pools()

    def begin_step(self, batch: protocols.TrainBatch) -> Sequence[protocols.Share]:
        """Returns the shares that hybrid workers compute of a training step, and lets them begin."""
        self._resizing.trains(batch)
        if self.hybrid is None:
            return ()
        return self.hybrid.begin(batch)

    async def end_step(
        self, shares: Sequence[protocols.Share], metrics: Mapping[str, float] | None, seconds: float
    ) -> None:
        """Ends the shares of a training step.

        Args:
          shares: the result of `begin_step`.
          metrics: the trainer's metrics; None if the trainer was lost, and the step with it.
          seconds: seconds of the trainer's step.
        """
        if self.hybrid is None:
            return
        # As if all shares were late, so that their workers switch back to rollout.
        if metrics is None:
            metrics, seconds = {f"shares/late/{share.worker}": 1.0 for share in shares}, 0.0
        await self.hybrid.finish(shares, metrics, seconds)

    def after(self, step: int, report: reports.StepReport) -> dict[str, float]:
        """Decides on changes after a step. Returns the step's metrics of plan and pool."""
        metrics: dict[str, float] = {}
        if self.follower is not None:
            metrics |= self.follower.after(step, report)
        if self.hybrid is not None:
            times, evaluation = report.times, report.evaluation.get("evaluation/seconds", 0.0)
            streams = report.streams.stream_seconds
            took = hybrid.StepSeconds(
                times.step - evaluation, times.train, times.wait, times.rollout, streams, times.ahead
            )
            metrics |= self.hybrid.after(step, took)
        return metrics

    async def close(self) -> None:
        """Stops all changes at the end of the run."""
        if self.hybrid is not None:
            # First, because it does not wait, and a resize's processes may not end in time.
            self.hybrid.close()
        await self._resizing.close()

    async def _trainer_replaced(self, event: protocols.TrainerReplaced) -> None:
        # A loss touches the step under way. A planned move is marked by the plan follower itself.
        if event.lost and self.follower is not None:
            self.follower.disturbed = True
        await self._weight_sync.release()
        if self.hybrid is not None:
            self.hybrid.trainer_moved()

    def _show_pools(self) -> None:
        """Records the present number of devices of each pool."""
        moving = {} if self.hybrid is None else self.hybrid.devices()
        core = sum(item.devices for item in self._engines.engines.values() if not item.hybrid)
        counts = {"core training": self._resizing.sizes.devices, **moving, "core rollout": core}
        now = self._clock()
        self._recorder.pools(now, {name: counts.get(name, 0) for name in protocols.POOLS})
