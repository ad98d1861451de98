"""Carries out transitions of hybrid workers: `hybrid.pool` decides the next state, and a task does its work.

Each state has a deadline, and each wait inside it has its own. Every error leads back to rollout.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from dataclasses import dataclass, field
from typing import Any, Protocol

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.hybrid import pool, training_sides, worker_shares
from libra_jax.hybrid.pool import WorkerState
from libra_jax.utils import deadlines, run_context, turns


@dataclass
class TransitionLog:
    """Collects the data of each worker's transition, and writes them.

    A line is written at the first training step or token after the transition. It is written earlier if the worker
    fails or starts another transition, or if the run ends.

    Attributes:
      recorder: gets the lines, and a span for each transition.
    """

    recorder: protocols.Recorder
    _pending: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)

    def rested(self, worker: pool.HybridWorker, step: int, outcome: str, why: str, nbytes: int) -> float:
        """Records that the worker is at rest. Returns the seconds of its transition.

        Args:
          worker: the worker, at rest.
          step: number of training steps taken.
          outcome: "done" or "failed".
          why: reason of the failure.
          nbytes: bytes of parameters that the worker received on its way.
        """
        self.write(worker.name)
        record = worker.record()
        turned = worker.state is WorkerState.ROLLOUT and worker.origin is WorkerState.ROLLOUT
        start, end = record["start"], record["end"]
        self._pending[worker.name] = {
            **record,
            "step": step,
            "outcome": "cancelled" if turned else outcome,
            "why": why,
            # A worker that failed at rest made no transition.
            "bytes": nbytes if worker.phases else 0,
            "stall": {"training": 0.0, "rollout": worker.idle_seconds},
        }
        self.recorder.span(worker.name, f"{record['from']} to {record['to']}", start, end, record["phases"])
        if outcome == "failed":
            self.write(worker.name)
        return end - start

    def waiting(self, state: WorkerState) -> list[str]:
        """Returns the workers in this state that wait for their first step or token."""
        return [name for name, record in self._pending.items() if record["to"] == state]

    def useful(self, name: str, what: str, now: float, stall: float = 0.0) -> None:
        """Records the worker's first step or token after its transition.

        Args:
          name: name of the worker.
          what: "first_step" or "first_token".
          now: event-loop time in seconds.
          stall: seconds in which training stood still for it.
        """
        record = self._pending.get(name)
        if record is not None:
            record["phases"] = {**record["phases"], what: now - record["end"]}
            record["stall"]["training"] = stall
            self.write(name)

    def write(self, *names: str) -> None:
        """Writes the pending lines of these workers; all pending lines if no worker is named."""
        for name in names or tuple(self._pending):
            record = self._pending.pop(name, None)
            if record is not None:
                self.recorder.transition(record)


KNOWN_CHANGES = 3
"""Number of past switches from which the cost of the next one is estimated."""

MARGIN_SECONDS = 10.0
"""Seconds by which a state's deadline exceeds the sum of the deadlines inside it."""


class TransitionEngines(Protocol):
    """The rollout engines, as transitions call them."""

    async def sleep(self, name: str) -> None:
        """Takes a serving engine out of service and puts it to sleep."""
        ...

    async def wake(self, name: str) -> None:
        """Brings a sleeping engine back to service, with current weights."""
        ...

    def await_first_token(self, name: str) -> None:
        """Records when the engine's next token comes (`transitions.jsonl`)."""
        ...


class Transitions:
    """Carries out the pool's decisions. Create it inside the event loop that it serves.

    Args:
      run: what the parts of the run share (`deadlines`). The recorder gets each worker's status and errors, and events
        get a PoolsChanged after a worker has entered another state.
      pool: the workers' states.
      engines: the rollout instances, including the workers' engines.
      sides: the workers' training sides.
      shares: the shares that the workers compute.
      trainer: opens and closes the core's ends of the gradient channels.

    Attributes:
      log: gets each transition.
      step: number of training steps taken, for the log.
      ready_seconds: seconds of the last switch to training, including a restart of the training side if one was needed.
      idle_seconds: seconds in which a switching worker serves neither side: the minimum of the last switches.
    """

    def __init__(
        self,
        run: run_context.RunContext,
        *,
        pool: pool.HybridPool,
        engines: TransitionEngines,
        sides: training_sides.TrainingSides,
        shares: worker_shares.Shares,
        trainer: protocols.TrainerClient,
    ) -> None:
        self.log = TransitionLog(run.recorder)
        self._recorder = run.recorder
        self._scope = run.scope
        self._events = run.events
        self._clock = run.clock
        self._pool = pool
        self._engines = engines
        self._sides = sides
        self._shares = shares
        self._trainer = trainer
        self._drivers: dict[str, asyncio.Task[None]] = {}
        self.step = 0
        self.ready_seconds = self.idle_seconds = 0.0
        # Bytes of parameters that each worker has received in its present transition.
        self._received: dict[str, int] = {}
        self._idle: collections.deque[float] = collections.deque(maxlen=KNOWN_CHANGES)

    def begin(self, worker: pool.HybridWorker) -> None:
        """Starts a transition, and aborts the one from which the worker turns round."""
        before = self._drivers.get(worker.name)
        # A failed driver starts the next transition itself, and must not abandon itself.
        if before is not None and before is not asyncio.current_task():
            deadlines.abandon(before)
        self.log.write(worker.name)
        self._received[worker.name] = 0
        self._events.announce(protocols.PoolsChanged())
        driver = self._scope.start(self._drive(worker), f"transition of {worker.name}")
        self._drivers[worker.name] = driver

    async def _drive(self, worker: pool.HybridWorker) -> None:
        """Does the worker's work, state by state, until it is at rest."""
        while not worker.at_rest:
            name, ticket = worker.name, worker.ticket
            self._recorder.status(name, f"hybrid worker: {worker.state}")
            try:
                await deadlines.within(
                    worker.limit, self._work(worker), f"Hybrid worker {name}, {worker.state},", "transition"
                )
            # The trainer died, which is no fault of the worker and costs no restart.
            except protocols.TrainerLost as error:
                if self._pool.worker(name).ticket == ticket:
                    self.begin(self._pool.switch_to_rollout(name, str(error), self._clock()))
                return
            except protocols.LibraError as error:
                await self._broken(ticket, error)
                return
            entered = self._pool.advance(ticket, self._clock())
            # Another task drives the worker by now.
            if entered is None:
                return
            worker = entered
            self._events.announce(protocols.PoolsChanged())
        self._rested(worker, "done", "")

    async def _work(self, worker: pool.HybridWorker) -> None:
        """Does the work of the worker's state."""
        name = worker.name
        match worker.state:
            case WorkerState.DRAINING:
                # First, while its engine still serves.
                await self._sides.ensure(name)
                await self._engines.sleep(name)
            case WorkerState.FETCHING:
                self._received[name] += await self._sides.fetch(name)
            case WorkerState.WARMING:
                await self._sides.warm(name)
            case WorkerState.JOINING:
                # From here on the worker reads every version, the one that came out while it compiled included.
                self._sides.follow(name)
                address = await self._trainer.listen(name, worker.generation)
                await self._trainer.connect(name, worker.generation, address)
                await self._sides.join(name, worker.generation, address)
            case WorkerState.LEAVING:
                # A step under way waits for its share.
                with turns.queued():
                    await self._shares.wait(name)
                await self._dismiss(name)
                await self._sides.leave(name)
            case WorkerState.ACTIVATING:
                # A failed worker's training side may still hold the devices.
                if worker.origin is WorkerState.FAILED:
                    await self._dismiss(name)
                    await self._sides.end(name)
                await self._engines.wake(name)

    async def _dismiss(self, name: str) -> None:
        """Closes the core's end of the worker's gradient channel."""
        # The channels of a lost trainer ended with it.
        with contextlib.suppress(protocols.TrainerLost):
            await self._trainer.dismiss(name)

    # Failures ---------------------------------------------------------------------------------------------------

    def failed(self, ticket: pool.Ticket, why: str) -> None:
        """Fails the worker if it is still in the state of the ticket."""
        self._scope.start(self._broken(ticket, protocols.WorkerLost(why)), f"failure of {ticket.worker}")

    async def _broken(self, ticket: pool.Ticket, error: protocols.LibraError) -> None:
        """Fails the worker, and restarts it into rollout unless `elastic.restarts` is used up."""
        worker = self._pool.fail(ticket, str(error), self._clock())
        if worker is None:
            return
        self._events.announce(protocols.PoolsChanged())
        self._rested(worker, "failed", str(error))
        if worker.lost:
            self._recorder.note(
                f"Hybrid worker {worker.name} is lost: it failed {worker.restarts + 1} times (elastic.restarts), the "
                f"last time: {error} From now on it only rolls out."
            )
            # No one restarts it any more, so each part is ended on its own, no matter whether the others fail.
            name = worker.name
            try:
                await self._dismiss(name)
            except protocols.LibraError as dismissal:
                self._recorder.note(
                    f"The gradient channel of {name} stays open, and nothing that comes over it counts: {dismissal}"
                )
            await self._sides.end(name)
            try:
                await self._engines.wake(name)
            except protocols.LibraError as waking:
                self._recorder.note(f"Hybrid worker {name} does not roll out either: {waking}")
            self._events.announce(protocols.PoolsChanged())
            return
        self._recorder.note(
            f"Hybrid worker {worker.name} failed while {ticket.state}, and goes back to rollout: {error}"
        )
        self.begin(self._pool.recover(worker.name, self._clock()))

    def _rested(self, worker: pool.HybridWorker, outcome: str, why: str) -> None:
        took = self.log.rested(worker, self.step, outcome, why, self._received.get(worker.name, 0))
        self._recorder.status(worker.name, f"hybrid worker: {worker.state}")
        if worker.state is WorkerState.TRAINING:
            self.ready_seconds = took
        # Only complete switches measure the cost; turns and failures do not.
        if outcome == "done" and {worker.origin, worker.state} == {WorkerState.ROLLOUT, WorkerState.TRAINING}:
            self._idle.append(worker.idle_seconds)
            self.idle_seconds = min(self._idle)
        if worker.state is WorkerState.ROLLOUT:
            self._engines.await_first_token(worker.name)


def limits(deadline: config_lib.DeadlineConfig) -> dict[WorkerState, float]:
    """Returns each state's deadline. It exceeds the sum of the waits inside, so that their errors come first."""
    restart = 2 * deadline.trainer_start + deadline.weight_sync + deadline.shutdown  # of a training side
    return {
        WorkerState.DRAINING: restart + 2 * deadline.transition + MARGIN_SECONDS,
        WorkerState.FETCHING: training_sides.LOAD_VERBS * deadline.weight_sync + deadline.train_step + MARGIN_SECONDS,
        WorkerState.WARMING: deadline.trainer_start + MARGIN_SECONDS,
        WorkerState.JOINING: 2 * deadline.weight_sync + deadline.transition + MARGIN_SECONDS,
        WorkerState.LEAVING: deadline.weight_sync + deadline.transition + deadline.shutdown + MARGIN_SECONDS,
        WorkerState.ACTIVATING: 3 * deadline.weight_sync
        + 2 * deadline.shutdown
        + 2 * deadline.transition
        + 2 * deadline.engine_start
        + MARGIN_SECONDS,
    }
