"""Follows plans in a run: asks the planner after each training step, and moves to its plan in the background.

A move loses nothing. Requests of stopped instances resume elsewhere from their tokens, or wait for started instances.
The trainer continues meanwhile, except while its own mesh changes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import dispatch, failure, instances, reports
from libra_jax.planning import planner
from libra_jax.trainer_control import resize


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
        measured: planner.Measured,
        trained: Sequence[protocols.Trajectory],
        *,
        may_move: bool = True,
    ) -> tuple[planner.Decision[protocols.Plan] | None, dict[str, float]]:
        """Returns the decision after a training step (None without a look) and its metrics. Updates `plan`."""
        ...

    def refuse(self, plan: protocols.Plan) -> None:
        """Rejects the last decision, which could not be carried out. `plan` becomes the plan in force."""
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """Returns the state to keep across a restart; JSON-able."""
        ...

    def restore(self, snapshot: Mapping[str, Any]) -> None: ...


class PlanFollower:
    """Asks the planner and carries out its decisions. Create it inside the event loop that it serves.

    Args:
      config: the run's configuration (`deadlines`).
      planner: decides on plans.
      engines: the rollout instances.
      dispatcher: dispatches requests to the instances.
      resizing: changes the trainer's mesh.
      recorder: gets each decision, and a span for each move.
      ending: runs a move in the background, and cancels it at the run's end.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        planner: Planner,
        engines: instances.Instances,
        dispatcher: dispatch.Dispatcher,
        resizing: resize.Resizing,
        recorder: protocols.Recorder,
        ending: failure.Ending,
    ) -> None:
        self._shadow = config.planner.shadow
        self._synchronous = config.coordinator.max_staleness == 0
        self._steps = config.steps
        self._planner = planner
        self._engines = engines
        self._dispatcher = dispatcher
        self._resizing = resizing
        self._recorder = recorder
        self._ending = ending
        self._followed = planner.plan
        self._move: asyncio.Task[None] | None = None
        self._losses = 0
        self._disturbed = False
        self._failed = ""

    def begin(self) -> None:
        """Adopts a checkpoint's plan: its instances have been started, and the trainer's mesh follows."""
        plan = self._planner.plan
        self._dispatcher.replan(self._engines.with_hybrid(plan.rollout))
        self._engines.trainer_holds(plan.train_devices)
        if _mesh(plan) != self._resizing.sizes:
            self._move = self._ending.start(self._take_up(plan), "going on with a plan's mesh")

    def disturb(self) -> None:
        """Marks the step under way as no prediction of later steps."""
        self._disturbed = True

    def after(self, step: int, report: reports.StepReport) -> Mapping[str, float]:
        """Asks the planner after a step. Returns the step's metrics of the plan.

        Nothing is decided during a move or in a run that is to end. If the planner cannot make a plan, its reason is
        noted once and the layout stays.
        """
        if self._ending.called or step >= self._steps:
            return {}
        moving = self._moving()
        times = report.times
        step_seconds = times.step - report.evaluation.get("evaluation/seconds", 0.0)
        lost = self._engines.losses - self._losses  # reported until the planner may act on the loss
        measured = planner.Measured(
            step=step_seconds,
            train=times.train,
            sync=times.sync,
            # Groups begin right after the weight sync, before an evaluation and a checkpoint, during which nobody waits
            # for them.
            wait=times.rollout if self._synchronous else times.wait,
            waiting=report.counts.waited_seconds / step_seconds if step_seconds > 0 else 0.0,
            slots=sum(instance.slots for instance in self._engines.serving()),
            lost=lost,
            disturbed=moving or self._disturbed or lost > 0,
        )
        if not moving:
            self._losses = self._engines.losses
        self._disturbed = moving  # a move that ends later touches the step after this one too
        trained = [trajectory for group in report.groups for trajectory in group.trajectories]
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
        replaces = decision is not None and self._engines.dead and not self._shadow
        if self._planner.plan != self._followed or replaces:
            self._follow(self._planner.plan)
        return metrics

    def _moving(self) -> bool:
        return (self._move is not None and not self._move.done()) or not self._engines.settled

    def _follow(self, plan: protocols.Plan) -> None:
        before, self._followed = self._followed, plan
        if _counts(plan) == _counts(before) and _mesh(plan) == _mesh(before) and not self._engines.dead:
            self._dispatcher.replan(self._engines.with_hybrid(plan.rollout))
            return
        self._disturbed = True
        self._move = self._ending.start(self._carry_out(before, plan), "moving to a new plan")

    async def _carry_out(self, before: protocols.Plan, plan: protocols.Plan) -> None:
        """Moves from one plan to another. Devices are freed before they are taken.

        A growing trainer compiles its programs before engines free their devices.
        """
        begin = asyncio.get_running_loop().time()
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
                if occupants := self._engines.on_devices(plan.train_devices):
                    handle.cancel(f"{', '.join(occupants)} still roll out on its devices")
                handle.go()
                # The engines have moved: if the mesh fails now, only the mesh stays as before.
                before = dataclasses.replace(before, rollout=plan.rollout)
                await handle.done
        except instances.NoRoom as error:
            if handle is not None and grows:
                handle.cancel(str(error))
            self._stay(self._with_present_mesh(before), str(error))
            return
        except protocols.LibraError as error:
            if handle is None or not handle.done.done() or handle.done.exception() is not error:
                raise  # an error of the engines, not of the resize
            self._stay(before, "as far as the trainer's mesh goes")
            return
        end = asyncio.get_running_loop().time()
        self._recorder.span("coordinator", "move to a new plan", begin, end, dataclasses.asdict(plan))

    async def _take_up(self, plan: protocols.Plan) -> None:
        try:
            await self._resizing.resize(_mesh(plan), "the plan in force at the checkpoint").done
        except protocols.LibraError as error:
            self._stay(self._with_present_mesh(plan), str(error))

    def _with_present_mesh(self, plan: protocols.Plan) -> protocols.Plan:
        present = self._resizing.sizes
        return dataclasses.replace(plan, data=present.data, fsdp=present.fsdp, tensor=present.tensor)

    def _stay(self, plan: protocols.Plan, why: str) -> None:
        """Keeps `plan` in force, because the decision could not be carried out."""
        self._followed = plan
        self._engines.trainer_holds(plan.train_devices)
        self._planner.refuse(plan)
        self._recorder.note(f"The plan is given up: {why}")


def _counts(plan: protocols.Plan) -> dict[int, int]:
    return {bucket.tensor_parallel: bucket.count for bucket in plan.rollout}


def _mesh(plan: protocols.Plan) -> protocols.MeshSizes:
    return protocols.MeshSizes(plan.data, plan.fsdp, plan.tensor)
