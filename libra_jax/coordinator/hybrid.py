"""Hybrid workers in a run: what the elastic rooms decide is carried out here, one worker's transition at a time.

A worker is an engine and a replica that share devices; one of them sleeps. After each training step `borrowing` sees
what the step took and says whether a worker should change sides; `pool` says what has to be done next; a task for each
worker does it, each piece with its deadline, while training and rollout go on. The core waits for no transition:
channels open and close beside its steps. What a member does not deliver in time the core computes.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from libra_jax import config as configuration
from libra_jax import protocols, turns
from libra_jax.coordinator import deadlines, failure, instances, replicas, reports, transition_log
from libra_jax.elastic import borrowing, pool, states
from libra_jax.elastic.states import State

SMOOTHING = 0.5
"""Weight of the last step in what is known of a replica's speed."""

READY_MARGIN, READY_SHARE = 1.5, 0.1
"""To join the next step, a worker sets out so many times its last way before it, and that share of a step earlier."""

MARGIN_SECONDS = 10.0
"""By which a state's deadline exceeds those of what is done in it."""

ANSWER_SECONDS = 0.2
"""For a member's answer to come in after the trainer's."""

LEAST_SPEED, MOST_SPEED = 0.05, 20.0
"""Of a replica, as a multiple of the core's: beyond, a measurement is taken for an accident."""


class _Taken(NamedTuple):
    """Seconds of a step: in all, of training, of waiting for its batch, and that rollout needs on the present slots."""

    step: float
    train: float
    wait: float
    rollout: float


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
      trainer: the trainer's proxy.
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
        members: replicas.Replicas,
        trainer: Any,
        core_devices: int,
        recorder: protocols.Recorder,
        ending: failure.Ending,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = config.deadlines.transition
        self._publish_limit = config.deadlines.publish
        self._engines = engines
        self._members = members
        self._trainer = trainer
        self._recorder = recorder
        self._ending = ending
        self._steps = config.steps
        self._synchronous = config.coordinator.staleness == 0
        self._names = [engine.name for engine in engines.engines.values() if engine.hybrid]
        self._floor = config.elastic.floor
        self.pool = pool.Pool(self._names, _limits(config.deadlines), config.elastic.restarts, now=self._loop.time())
        engines.fewer = self._keep_floor
        self.changed: Callable[[], None] = lambda: None
        self._borrowing = borrowing.Borrowing(
            config.elastic, horizon=config.planner.horizon, synchronous=self._synchronous
        )
        self._speed = {name: engines.engines[name].devices / core_devices for name in self._names}
        self._step = 0
        self._work: dict[str, asyncio.Task[Mapping[str, float]]] = {}  # shares that are being computed
        self._drivers: dict[str, asyncio.Task[None]] = {}
        self._coming: _Coming | None = None
        self._ready_seconds = 0.0  # of the last way to training
        self._log = transition_log.TransitionLog(recorder)
        self._disturbed = True  # the first step is not like those to come
        # At eta > 0 long steps and short ones take turns, so that none tells alone.
        self._taken: collections.deque[_Taken] = collections.deque(maxlen=config.coordinator.staleness + 1)
        self._least = min(2, config.coordinator.staleness + 1)

    # Shares -----------------------------------------------------------------------------------------------------

    def shares(self, version: int) -> tuple[protocols.Share, ...]:
        """Who computes which part of the step of this version: the members that hold it, by their speed."""
        ready = {name: epoch for name, epoch in self.pool.members().items() if self._members.holds(name, version)}
        ready = {name: epoch for name, epoch in ready.items() if name not in self._work}  # one still answers
        whole = 1.0 + sum(self._speed[name] for name in ready)
        return tuple(protocols.Share(name, epoch, self._speed[name] / whole) for name, epoch in ready.items())

    def begin(self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share]) -> None:
        """The members begin to compute, and who is borrowed sets out in time for the next step."""
        if self._coming is not None and self._coming.timer is None:
            self._coming.timer = self._loop.call_later(self._in_time(), self._borrow, self._coming)
        for share in shares:
            work = self._loop.create_task(self._members.contribute(share.member, batch, shares))
            work.add_done_callback(_looked_at)
            self._work[share.member] = work

    async def finish(self, shares: Sequence[protocols.Share], metrics: Mapping[str, float], seconds: float) -> None:
        """The step is over: a member that did not deliver is released, and the others' speed is measured.

        Args:
          shares: of the step.
          metrics: the trainer's.
          seconds: that the trainer took.
        """
        if not shares:
            return
        work = {share.member: self._work[share.member] for share in shares}
        # Sums go straight to the trainer, which may be done before the members' answers come here.
        await asyncio.wait(work.values(), timeout=ANSWER_SECONDS)
        now = self._loop.time()
        told: dict[str, Mapping[str, float]] = {}
        for share in shares:
            name, task = share.member, work[share.member]
            cancelled = task.done() and task.cancelled()  # the run ends
            error = task.exception() if task.done() and not cancelled else None
            if error is None and not cancelled and f"shares/late/{name}" not in metrics:
                self._log.useful(name, "first_step", now, stall=metrics.get("shares/wait_seconds", 0.0))
                if task.done():
                    told[name] = self._work.pop(name).result()
                else:
                    task.add_done_callback(functools.partial(self._answered, name))
                continue
            del self._work[name]
            deadlines.abandon(task)
            worker = self.pool.worker(name)
            if isinstance(error, protocols.WorkerLost | protocols.DeadlineMissed):
                self._failed(worker.ticket, str(error))
            elif worker.state is State.TRAINING:
                why = f"its share of step {self._step + 1} was not there in time" if error is None else str(error)
                self._go(self.pool.release(name, why, now))
        if len(told) == len(shares):
            self._measure(told, metrics, seconds)

    def _answered(self, name: str, _: asyncio.Task[Mapping[str, float]]) -> None:
        self._work.pop(name, None)

    def _measure(self, told: Mapping[str, Mapping[str, float]], metrics: Mapping[str, float], seconds: float) -> None:
        """Speeds: micro-batches a second of each member, over those of the core in the same step."""
        core = metrics.get("micro_batches", 0.0) - metrics.get("shares/micro_batches", 0.0)
        taken = seconds - metrics.get("shares/wait_seconds", 0.0)
        for name, said in told.items():
            if said.get("micro_batches", 0) and said.get("seconds", 0) and core > 0 and taken > 0:
                speed = said["micro_batches"] / said["seconds"] / (core / taken)
                speed = min(MOST_SPEED, max(LEAST_SPEED, speed))
                self._speed[name] += SMOOTHING * (speed - self._speed[name])

    # Decisions --------------------------------------------------------------------------------------------------

    def after(self, step: int, report: reports.StepReport) -> Mapping[str, float]:
        """Looks at what the step took and lets a worker change sides; returns the step's metrics of the pool."""
        self._step = step
        self._serving()
        for worker in self.pool.workers:
            if worker.state is State.TRAINING and not self._members.follows(worker.name):
                self._failed(worker.ticket, "it could not be given the parameters that are out.")
        moving = self._coming is not None or any(not worker.at_rest for worker in self.pool.workers)
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
            self._go(self.pool.release(name, decision.why, self._loop.time()))
        return metrics

    def _in_time(self) -> float:
        """Seconds into a training step until a worker has to set out to join the next one: till then it rolls out."""
        if self._synchronous or not self._taken:  # it has nothing to do, or nothing is known of the step
            return 0.0
        step = self._taken[-1].train
        return max(0.0, step - READY_MARGIN * self._ready_seconds - READY_SHARE * step)

    def _borrow(self, coming: _Coming) -> None:
        """Who was to come sets out, unless things have changed since."""
        self._coming = None
        for name in coming.workers:
            staying = self._staying()
            rolls_out = self.pool.worker(name).state is State.ROLLOUT and name in staying
            if rolls_out and len(staying) > self._floor and not self._ending.called:
                self._go(self.pool.borrow(name, coming.why, self._loop.time()))

    def _call_off(self) -> None:
        """Who was to come stays in rollout."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.timer is not None:
            coming.timer.cancel()

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
            self._go(gives_back(worker.name, why, now))
            short -= 1

    def _staying(self) -> list[str]:
        """The instances that serve and are not about to stop."""
        going = [worker.name for worker in self.pool.workers if worker.state is State.DRAINING]
        return [instance.name for instance in self._engines.serving() if instance.name not in going]

    def _sight(self, step: int, report: reports.StepReport, *, disturbed: bool) -> borrowing.Sight:
        """The mean of the last undisturbed steps under the present arrangement."""
        serving = self._engines.serving()
        slots = {instance.name: instance.slots for instance in serving}
        asleep = {name: self._engines.engines[name].info for name in self._names}
        hybrid = tuple(
            borrowing.Hybrid(
                worker.name,
                slots.get(worker.name) or (info.slots if (info := asleep[worker.name]) is not None else 0),
                self._speed[worker.name],
                worker.state is State.TRAINING,
            )
            for worker in self.pool.workers
            if worker.state is State.TRAINING or (worker.state is State.ROLLOUT and worker.name in slots)
        )
        changing = {worker.name for worker in hybrid}  # one that is lost only rolls out
        core = {name: count for name, count in slots.items() if name not in changing}
        every = sum(slots.values())
        if disturbed:
            self._taken.clear()
        else:
            self._taken.append(self._measured(report, every))
        step_seconds, train, wait, rollout = (
            statistics.fmean(values) for values in zip(*(self._taken or [_Taken(0.0, 0.0, 0.0, 0.0)]), strict=True)
        )
        return borrowing.Sight(
            step=step,
            step_seconds=step_seconds,
            train_seconds=train,
            wait_seconds=wait,
            rollout_seconds=rollout,
            core_instances=len(core),
            core_slots=sum(core.values()),
            workers=hybrid,
            move_seconds=self._ready_seconds,  # in which the devices serve nobody
            disturbed=len(self._taken) < self._least,
        )

    def _measured(self, report: reports.StepReport, slots: int) -> _Taken:
        times = report.times
        step = times.step - report.evaluation.get("evaluation/seconds", 0.0)
        if self._synchronous:  # one stage waits for the other
            return _Taken(step, times.train, times.rollout, times.rollout)
        busy = report.counts.stream_seconds / slots if slots else times.rollout
        return _Taken(step, times.train, times.wait, busy)

    def trainer_moved(self) -> None:
        """Other processes train now: who joined those before, or was about to, goes back to rollout or stays there."""
        self._call_off()  # it was decided by the times of those before
        why, now = "the trainer moved to other processes", self._loop.time()
        for worker in self.pool.workers:
            if worker.state is State.TRAINING:
                self._go(self.pool.release(worker.name, why, now))
            elif worker.state is State.JOINING:
                self._go(self.pool.cancel(worker.name, why, now))

    # Transitions ------------------------------------------------------------------------------------------------

    def _go(self, worker: pool.Worker) -> None:
        """Begins a transition; one that the worker turns round from is given up, whatever it waits for."""
        before = self._drivers.get(worker.name)
        if before is not None and before is not asyncio.current_task():
            deadlines.abandon(before)
        self._log.begin(worker.name)
        self.changed()
        driver = self._ending.start(self._drive(worker), f"transition of {worker.name}")
        self._drivers[worker.name] = driver

    async def _drive(self, worker: pool.Worker) -> None:
        """Does the worker's work, state by state, until it is at rest."""
        while not worker.at_rest:
            name, ticket = worker.name, worker.ticket
            self._recorder.status(name, f"hybrid worker: {worker.state}")
            work = self._in_state(worker)
            try:
                await deadlines.within(worker.limit, work, f"Hybrid worker {name}, {worker.state},", "transition")
            except protocols.LibraError as error:
                await self._broken(ticket, error)
                return
            entered = self.pool.advance(ticket, self._loop.time())
            if entered is None:  # another has taken it over
                return
            worker = entered
            self.changed()
        self._rested(worker, "done", "")

    def _in_state(self, worker: pool.Worker) -> Awaitable[None]:
        work = {
            State.DRAINING: self._drain,
            State.FETCHING: self._fetch,
            State.WARMING: self._warm,
            State.JOINING: self._join,
            State.LEAVING: self._leave,
            State.ACTIVATING: self._activate,
        }[worker.state]
        return work(worker)

    async def _drain(self, worker: pool.Worker) -> None:
        await self._members.ensure(worker.name)  # while its engine still serves
        await self._engines.sleep(worker.name, self._limit)

    async def _fetch(self, worker: pool.Worker) -> None:
        self._log.moved(worker.name, await self._members.fetch(worker.name))

    async def _warm(self, worker: pool.Worker) -> None:
        await self._members.warm(worker.name)

    async def _join(self, worker: pool.Worker) -> None:
        """Opens the channel; what was published while the replica compiled, it reads meanwhile."""
        self._members.follow(worker.name)
        address = await self._ask(self._trainer.listen(worker.name, worker.epoch), "open a channel")
        await self._ask(self._trainer.connect(worker.name, worker.epoch, address), "connect to a channel")
        await self._members.join(worker.name, worker.epoch, address)

    async def _leave(self, worker: pool.Worker) -> None:
        if (share := self._work.get(worker.name)) is not None:  # of a step under way, which waits for it
            with turns.queued():
                await asyncio.wait({share})
        await self._dismiss(worker.name)
        await self._members.leave(worker.name)

    async def _activate(self, worker: pool.Worker) -> None:
        if worker.origin is State.FAILED:  # nothing is known of the replica, so it goes before its devices are used
            await self._dismiss(worker.name)
            await self._members.end(worker.name)
        await self._engines.wake(worker.name, self._limit)

    async def _dismiss(self, name: str) -> None:
        await self._ask(self._trainer.dismiss(name), "close a channel")

    async def _ask(self, work: Any, what: str) -> Any:
        return await deadlines.within(self._publish_limit, work, f"The trainer, asked to {what},", "publish")

    # Failures ---------------------------------------------------------------------------------------------------

    def _failed(self, ticket: pool.Ticket, why: str) -> None:
        self._ending.start(self._broken(ticket, protocols.WorkerLost(why)), f"failure of {ticket.worker}")

    async def _broken(self, ticket: pool.Ticket, error: protocols.LibraError) -> None:
        """The worker failed in the state of the ticket: it is brought back to rollout, as often as it may be."""
        worker = self.pool.fail(ticket, str(error), self._loop.time())
        if worker is None:
            return
        self.changed()
        self._rested(worker, "failed", str(error))
        if worker.lost:
            self._recorder.note(
                f"Hybrid worker {worker.name} is lost: it failed {worker.restarts + 1} times (elastic.restarts), the "
                f"last time: {error} From now on it only rolls out."
            )
            await self._dismiss(worker.name)
            await self._members.end(worker.name)
            await self._wake_lost(worker.name)
            self.changed()
            return
        self._recorder.note(
            f"Hybrid worker {worker.name} failed while {ticket.state}, and goes back to rollout: {error}"
        )
        self._go(self.pool.recover(worker.name, self._loop.time()))

    async def _wake_lost(self, name: str) -> None:
        try:
            await self._engines.wake(name, self._limit)
        except protocols.LibraError as error:
            self._recorder.note(f"Hybrid worker {name} does not roll out either: {error}")

    # Records ----------------------------------------------------------------------------------------------------

    def _rested(self, worker: pool.Worker, outcome: str, why: str) -> None:
        took = self._log.rested(worker, self._step, outcome, why)
        self._recorder.status(worker.name, f"hybrid worker: {worker.state}")
        if worker.state is State.TRAINING:
            self._ready_seconds = took
        if worker.state is State.ROLLOUT:
            self._engines.engines[worker.name].answered = None

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
        for share in self._work.values():
            deadlines.abandon(share)
        self._log.close()

    def snapshot(self) -> dict[str, Any]:
        """What to keep across a restart; JSON-able."""
        return {"pool": self.pool.snapshot(), "speed": dict(self._speed)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Goes on after a restart: every worker rolls out."""
        self.pool.restore(snapshot["pool"])
        self._speed |= {name: speed for name, speed in snapshot["speed"].items() if name in self._speed}


def _limits(deadline: configuration.DeadlineConfig) -> dict[State, float]:
    """Of each state's work: longer than the waits inside it take together, so that those say what was late."""
    replica = 2 * deadline.trainer_start + deadline.publish + deadline.shutdown  # made anew
    return {
        State.DRAINING: replica + 2 * deadline.transition + MARGIN_SECONDS,
        State.FETCHING: replicas.LOAD_VERBS * deadline.publish + deadline.train_step + MARGIN_SECONDS,
        State.WARMING: deadline.trainer_start + MARGIN_SECONDS,
        State.JOINING: 2 * deadline.publish + deadline.transition + MARGIN_SECONDS,
        State.LEAVING: deadline.publish + deadline.transition + deadline.shutdown + MARGIN_SECONDS,
        State.ACTIVATING: 3 * deadline.publish
        + 2 * deadline.shutdown
        + 2 * deadline.transition
        + 2 * deadline.engine_start
        + MARGIN_SECONDS,
    }


def _looked_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
