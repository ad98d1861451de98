"""Hybrid workers in a run: who changes sides, and when.

A worker is an engine and a replica that share devices; one of them sleeps. After each training step `borrowing` sees
what the step took and says whether a worker should change sides; `transitions` carries it out, while training and
rollout go on. The core waits for no transition: channels open and close beside its steps. What a member does not
deliver in time the core computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import (
    failure,
    instances,
    measured_steps,
    reports,
)
from libra_jax.elastic import borrowing, pool, states, training_sides, transition_log, transitions, worker_shares
from libra_jax.elastic.states import State

READY_MARGIN, READY_SHARE = 1.5, 0.1
"""To join the next step, a worker sets out so many times its last way before it, and that share of a step earlier."""


@dataclass
class _Coming:
    """Who is to be borrowed during the next training step.

    Attributes:
      workers: their names.
      why: they are.
      timer: at which they set out; None before that step begins.
    """

    workers: Sequence[str]
    why: str
    timer: asyncio.TimerHandle | None = None


class HybridWorkers:
    """All hybrid workers of a run. Made inside the event loop it serves.

    Args:
      config: the run's configuration (`elastic`, `deadlines`).
      engines: the rollout instances, the workers' among them.
      members: the workers' replicas.
      trainer: the workers train with it.
      core_devices: that it has: until replicas have shown their speed, they count by theirs.
      recorder: gets each transition, and the devices of each pool.
      ending: ends with transitions under way.

    Attributes:
      pool: the workers' states.
      changed: called when a worker has come to another pool.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        engines: instances.Instances,
        members: training_sides.TrainingSides,
        trainer: protocols.TrainerClient,
        core_devices: int,
        recorder: protocols.Recorder,
        ending: failure.Ending,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._engines = engines
        self._members = members
        self._recorder = recorder
        self._ending = ending
        self._steps = config.steps
        self._synchronous = config.coordinator.staleness == 0
        self._names = [engine.name for engine in engines.engines.values() if engine.hybrid]
        self._floor = config.elastic.floor
        limits = transitions.limits(config.deadlines)
        self.pool = pool.Pool(self._names, limits, config.elastic.restarts, now=self._loop.time())
        engines.fewer = self._lost
        self.changed: Callable[[], None] = lambda: None
        self._borrowing = borrowing.Borrowing(
            config.elastic, horizon=config.planner.horizon, synchronous=self._synchronous
        )
        self._shares = worker_shares.Shares(
            members, {name: engines.engines[name].devices / core_devices for name in self._names}
        )
        self._log = transition_log.TransitionLog(recorder)
        self._transitions = transitions.Transitions(
            config.deadlines,
            pool=self.pool,
            engines=engines,
            members=members,
            shares=self._shares,
            trainer=trainer,
            recorder=recorder,
            log=self._log,
            ending=ending,
            changed=lambda: self.changed(),
        )
        self._coming: _Coming | None = None
        self._disturbed = True  # the first step is not like those to come
        self._core: frozenset[str] = frozenset()  # instances that served after the last step
        self._measured = measured_steps.MeasuredSteps(config.coordinator.staleness)

    # Shares -----------------------------------------------------------------------------------------------------

    def shares(self, version: int) -> tuple[protocols.Share, ...]:
        """Who computes which part of the step of this version."""
        return self._shares.split(self.pool.members(), version)

    def begin(self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share]) -> None:
        """The members begin to compute, and who is borrowed sets out in time for the next step."""
        if self._coming is not None and self._coming.timer is None:
            self._coming.timer = self._loop.call_later(self._in_time(), self._borrow, self._coming)
        self._shares.begin(batch, shares)

    async def finish(self, shares: Sequence[protocols.Share], metrics: Mapping[str, float], seconds: float) -> None:
        """The step is over: a member that did not deliver is released, or has failed.

        Args:
          shares: of the step.
          metrics: the trainer's.
          seconds: that the trainer took.
        """
        if not shares:
            return
        outcomes, now = await self._shares.finish(shares, metrics, seconds), self._loop.time()
        for outcome in outcomes:
            name, error = outcome.member, outcome.error
            worker = self.pool.worker(name)
            if outcome.counted:
                self._log.useful(name, "first_step", now, stall=metrics.get("shares/wait_seconds", 0.0))
            elif isinstance(error, protocols.WorkerLost | protocols.DeadlineMissed):
                self._transitions.failed(worker.ticket, str(error))
            elif worker.state is State.TRAINING:
                why = (
                    f"its share of step {self._transitions.step + 1} was not there in time"
                    if error is None
                    else str(error)
                )
                self._transitions.begin(self.pool.release(name, why, now))

    # Decisions --------------------------------------------------------------------------------------------------

    def after(self, step: int, report: reports.StepReport) -> Mapping[str, float]:
        """Looks at what the step took and lets a worker change sides; returns the step's metrics of the pool."""
        self._transitions.step = step
        self._serving()
        for worker in self.pool.workers:
            if worker.state is State.TRAINING and not self._members.follows(worker.name):
                self._transitions.failed(worker.ticket, "it could not be given the parameters that are out.")
        moving = self._coming is not None or any(not worker.at_rest for worker in self.pool.workers)
        before, self._core = self._core, self._serving_core()
        self._disturbed = self._disturbed or self._core != before
        disturbed, self._disturbed = self._disturbed or moving, moving
        training = self.pool.members()
        metrics = {"hybrid/training": float(len(training)), "hybrid/epoch": float(self.pool.epoch)}
        if self._ending.called or step >= self._steps:
            return metrics
        decision = self._borrowing.look(self._sight(step, report, disturbed=disturbed))
        metrics |= {"hybrid/now_seconds": decision.now_seconds, "hybrid/then_seconds": decision.then_seconds}
        if decision.kind == "stay" or moving:
            return metrics
        self._recorder.note(f"Hybrid workers, {decision.kind} {', '.join(decision.workers)}: {decision.why}.")
        self._disturbed = True
        if decision.kind == "borrow":
            self._coming = _Coming(decision.workers, decision.why)
            return metrics
        for name in decision.workers:
            self._transitions.begin(self.pool.release(name, decision.why, self._loop.time()))
        return metrics

    def _in_time(self) -> float:
        """Seconds into a training step until a worker has to set out to join the next one: till then it rolls out."""
        step = self._measured.train_seconds
        if self._synchronous or step is None:  # it has nothing to do, or nothing is known of the step
            return 0.0
        return max(0.0, step - READY_MARGIN * self._transitions.ready_seconds - READY_SHARE * step)

    def _borrow(self, coming: _Coming) -> None:
        """Who was to come sets out, unless things have changed since."""
        self._coming = None
        for name in coming.workers:
            staying = self._staying()
            rolls_out = self.pool.worker(name).state is State.ROLLOUT and name in staying
            if rolls_out and len(staying) > self._floor and not self._ending.called:
                self._transitions.begin(self.pool.borrow(name, coming.why, self._loop.time()))

    def _call_off(self) -> None:
        """Who was to come stays in rollout."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.timer is not None:
            coming.timer.cancel()

    def _lost(self) -> None:
        """An instance was."""
        self._disturbed = True
        self._keep_floor()

    def _keep_floor(self) -> None:
        """Where too few are left to roll out, who trains or is about to comes back, whatever training does.

        Where no more than enough are left, nobody sets out.
        """
        if self._ending.called:
            return
        returning = [worker for worker in self.pool.workers if worker.state in (State.LEAVING, State.ACTIVATING)]
        short, now = self._floor - len(self._staying()) - len(returning), self._loop.time()
        if short >= 0:
            self._call_off()
        why = f"fewer than elastic.floor = {self._floor} instances are left to roll out"
        for worker in self.pool.workers:
            if short <= 0 or worker.state not in (*states.BORROWED, State.TRAINING):
                continue
            self._recorder.note(f"Hybrid workers, {worker.name} comes back: {why}.")
            gives_back = self.pool.release if worker.state is State.TRAINING else self.pool.cancel
            self._transitions.begin(gives_back(worker.name, why, now))
            short -= 1

    def _staying(self) -> list[str]:
        """The instances that serve and are not about to stop."""
        going = [worker.name for worker in self.pool.workers if worker.state is State.DRAINING]
        return [instance.name for instance in self._engines.serving() if instance.name not in going]

    def _serving_core(self) -> frozenset[str]:
        """The instances of the core that serve now; plans change them, and losses do."""
        return frozenset(instance.name for instance in self._engines.serving()) - set(self._names)

    def disturb(self) -> None:
        """Something else touches the step under way, so that it says nothing of those to come: the trainer moves."""
        self._disturbed = True

    def _sight(self, step: int, report: reports.StepReport, *, disturbed: bool) -> borrowing.Sight:
        """The mean of the last undisturbed steps under the present arrangement."""
        serving = self._engines.serving()
        slots = {instance.name: instance.slots for instance in serving}
        asleep = {name: self._engines.engines[name].info for name in self._names}
        hybrid = tuple(
            borrowing.Hybrid(
                worker.name,
                slots.get(worker.name) or (info.slots if (info := asleep[worker.name]) is not None else 0),
                self._shares.speed[worker.name],
                worker.state is State.TRAINING,
            )
            for worker in self.pool.workers
            if worker.state is State.TRAINING or (worker.state is State.ROLLOUT and worker.name in slots)
        )
        changing = {worker.name for worker in hybrid}  # one that is lost only rolls out
        core = {name: count for name, count in slots.items() if name not in changing}
        if disturbed:
            self._measured.forget()
        else:
            self._measured.add(report, sum(slots.values()))
        taken = self._measured.mean()
        return borrowing.Sight(
            step=step,
            step_seconds=taken.step,
            train_seconds=taken.train,
            wait_seconds=taken.wait,
            rollout_seconds=taken.rollout,
            core_instances=len(core),
            core_slots=sum(core.values()),
            workers=hybrid,
            move_seconds=self._transitions.idle_seconds,
            disturbed=not self._measured.enough,
        )

    def trainer_moved(self) -> None:
        """Other processes train now: who joined those before, or was about to, goes back to rollout or stays there."""
        self._call_off()  # it was decided by the times of those before
        self.disturb()
        why, now = "the trainer moved to other processes", self._loop.time()
        for worker in self.pool.workers:
            if worker.state is State.TRAINING:
                self._transitions.begin(self.pool.release(worker.name, why, now))
            elif worker.state is State.JOINING:
                self._transitions.begin(self.pool.cancel(worker.name, why, now))

    # Records ----------------------------------------------------------------------------------------------------

    def _serving(self) -> None:
        """Engines that have come back and sent a token since."""
        for name in self._log.waiting(State.ROLLOUT):
            answered = self._engines.engines[name].answered
            if answered is not None:
                self._log.useful(name, "first_token", answered)

    def devices(self) -> dict[str, int]:
        """Devices of the workers, by the pool that they are in now."""
        counts = {"hybrid in training": 0, "hybrid in transition": 0, "hybrid in rollout": 0}
        where = {State.TRAINING: "hybrid in training", State.ROLLOUT: "hybrid in rollout"}
        for worker in self.pool.workers:
            pool_name = where.get(worker.state, "hybrid in transition")
            if worker.lost and self._engines.engines[worker.name].state == "serving":
                pool_name = "hybrid in rollout"
            counts[pool_name] += self._engines.engines[worker.name].devices
        return counts

    def close(self) -> None:
        """The run ends."""
        self._call_off()
        self._shares.close()
        self._log.close()

    def snapshot(self) -> dict[str, Any]:
        """What to keep across a restart; JSON-able."""
        return {"pool": self.pool.snapshot(), "speed": dict(self._shares.speed)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Goes on after a restart: every worker rolls out."""
        self.pool.restore(snapshot["pool"])
        speed = self._shares.speed
        speed |= {name: known for name, known in snapshot["speed"].items() if name in speed}
