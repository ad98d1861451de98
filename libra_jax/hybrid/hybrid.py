"""Decides when hybrid workers switch between training and rollout.

A hybrid worker is an engine and a training side that share devices; one of the two sleeps. After each training step,
`switching` looks at what the step took and decides whether a worker switches. `transitions` carries the switch out
while training and rollout continue. The core never waits for a transition, because gradient channels open and close
beside its steps. If a hybrid worker misses its deadline, the core computes its share.
"""

from __future__ import annotations

import asyncio
import collections
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypedDict

from libra_jax import protocols
from libra_jax.hybrid import pool, switching, training_sides, transitions, worker_shares
from libra_jax.hybrid.pool import WorkerState
from libra_jax.utils import run_context

READY_MARGIN, READY_SHARE = 1.5, 0.1
"""Lead of a worker that joins the next step: READY_MARGIN times its last switch, plus READY_SHARE of a step."""


class HybridState(TypedDict):
    """The state of the hybrid workers that outlives the run."""

    pool: pool.PoolState
    speed: dict[str, float]
    """Measured speed of each worker relative to the core."""


class InstanceView(Protocol):
    """One rollout instance, as far as hybrid workers look at it (`coordinator.instances.RolloutInstance`)."""

    @property
    def name(self) -> str: ...
    @property
    def hybrid(self) -> bool: ...
    @property
    def state(self) -> str: ...
    @property
    def info(self) -> protocols.EngineInfo | None: ...
    @property
    def answered(self) -> float | None: ...
    @property
    def devices(self) -> int: ...


class InstancesView(transitions.TransitionEngines, Protocol):
    """All rollout instances, the workers' engines included (`coordinator.instances.Instances`)."""

    @property
    def engines(self) -> Mapping[str, InstanceView]: ...
    def serving(self) -> Sequence[protocols.Instance]:
        """Returns the instances on which requests may be placed."""
        ...


@dataclass(frozen=True)
class StepSeconds:
    """What a training step took, in seconds.

    Attributes:
      total: from the end of the step before to the end of this step, without an evaluation.
      train: of the trainer's step, with what it had begun before its batch was complete.
      ahead: of `train` before the batch was complete.
      wait: in which the trainer waited for its batch.
      rollout: in which at least one group ran.
      streams: in which slots were in use, summed over the slots.
    """

    total: float
    train: float
    wait: float
    rollout: float
    streams: float
    ahead: float = 0.0


class StepMeans(NamedTuple):
    """Seconds of a step: in total, of training, of waiting for its batch, and of rollout on the present slots."""

    step: float
    train: float
    wait: float
    rollout: float


class MeasuredSteps:
    """The last steps under the present arrangement of workers.

    Args:
      staleness: the max staleness. After a change, the trainer still trains for this many steps on groups begun before
        it, and does not wait for present rollout. Long and short steps also alternate.

    Attributes:
      call_seconds: seconds of the last measured step from its complete batch on; None if no step was measured.
    """

    def __init__(self, staleness: int) -> None:
        self._synchronous = staleness == 0
        self._taken: collections.deque[StepMeans] = collections.deque(maxlen=staleness + 1)
        self.call_seconds: float | None = None

    def after(self, step: StepSeconds, slots: int, *, disturbed: bool) -> tuple[StepMeans, bool]:
        """Takes a step in. Returns the mean of the measured steps, and whether enough were measured.

        Enough were measured if the newest step trained only on groups begun under the present arrangement. The mean is
        zero if no step was measured.

        Args:
          step: what the step took.
          slots: number of slots of all instances that served.
          disturbed: True if the arrangement changed, or is changing.
        """
        if disturbed:
            # Steps under the former arrangement would distort the mean.
            self._taken.clear()
        elif self._synchronous:
            # Training and rollout wait for each other.
            self._taken.append(StepMeans(step.total, step.train, step.rollout, step.rollout))
        else:
            # Slot seconds over slots: the seconds that rollout needs if every slot is always in use.
            busy = step.streams / slots if slots else step.rollout
            self._taken.append(StepMeans(step.total, step.train, step.wait, busy))
        self.call_seconds = step.train - step.ahead if self._taken else None
        if not self._taken:
            return StepMeans(0.0, 0.0, 0.0, 0.0), False
        mean = StepMeans(*map(statistics.fmean, zip(*self._taken, strict=True)))
        return mean, len(self._taken) == self._taken.maxlen


@dataclass
class _Coming:
    """The workers that switch to training during the next training step.

    Attributes:
      workers: their names.
      why: reason of the switch.
      timer: starts the switch; None before that step begins.
    """

    workers: Sequence[str]
    why: str
    timer: asyncio.TimerHandle | None = None


class HybridWorkers:
    """All hybrid workers of a run. Create it inside the event loop that it serves.

    Args:
      run: what the parts of the run share (`elastic`, `deadlines`). The recorder gets each transition, and events get a
        PoolsChanged for each worker that moved to another pool.
      engines: the rollout instances, including the workers' engines.
      sides: the workers' training sides.
      trainer: the trainer whose steps the workers share.
      core_devices: number of the trainer's devices. Until a worker's speed is measured, its share is by devices.

    Attributes:
      pool: the workers' states.
    """

    def __init__(
        self,
        run: run_context.RunContext,
        *,
        engines: InstancesView,
        sides: training_sides.TrainingSides,
        trainer: protocols.TrainerClient,
        core_devices: int,
    ) -> None:
        config = run.config
        self._loop = asyncio.get_running_loop()
        self._clock = run.clock
        self._recorder = run.recorder
        self._scope = run.scope
        self._engines = engines
        self._sides = sides
        self._steps = config.steps
        self._synchronous = config.coordinator.max_staleness == 0
        self._names = [engine.name for engine in engines.engines.values() if engine.hybrid]
        self._floor = config.elastic.floor
        limits = transitions.limits(config.deadlines)
        self.pool = pool.HybridPool(self._names, limits, config.elastic.restarts, now=run.clock())
        self._switching = switching.Switching(
            config.elastic, horizon=config.planner.horizon, synchronous=self._synchronous
        )
        speeds = {name: engines.engines[name].devices / core_devices for name in self._names}
        self._shares = worker_shares.Shares(sides, speeds)
        self._transitions = transitions.Transitions(
            run, pool=self.pool, engines=engines, sides=sides, shares=self._shares, trainer=trainer
        )
        self._log = self._transitions.log
        run.events.subscribe(protocols.EngineLost, self._lost)
        self._coming: _Coming | None = None
        # The first step compiles and starts up, unlike later steps.
        self._disturbed = True
        # Instances of the core that served after the last step.
        self._core: frozenset[str] = frozenset()
        self._measured = MeasuredSteps(config.coordinator.max_staleness)

    # Shares -----------------------------------------------------------------------------------------------------

    def begin(self, batch: protocols.TrainBatch) -> tuple[protocols.Share, ...]:
        """Splits a step into shares of the hybrid workers in training, and starts them.

        Also starts the timer of workers that switch to training for the next step.
        """
        shares = self._shares.split(self.pool.training(), batch.policy_version)
        coming, step = self._coming, self._measured.call_seconds
        if coming is not None and coming.timer is None:
            seconds = 0.0
            # Synchronous workers are idle during training. Without a measured step, nothing can be timed.
            if not self._synchronous and step is not None:
                seconds = step - READY_MARGIN * self._transitions.ready_seconds - READY_SHARE * step
            coming.timer = self._loop.call_later(max(0.0, seconds), self._switch_to_training, coming)
        self._shares.begin(batch, shares)
        return shares

    async def finish(self, shares: Sequence[protocols.Share], metrics: Mapping[str, float], seconds: float) -> None:
        """Ends the shares of a step. A worker that did not deliver switches to rollout, or counts as failed.

        Args:
          shares: shares of the step.
          metrics: the trainer's metrics.
          seconds: seconds of the trainer's step.
        """
        if not shares:
            return
        outcomes, now = await self._shares.finish(shares, metrics, seconds), self._clock()
        for outcome in outcomes:
            name, error = outcome.worker, outcome.error
            worker = self.pool.worker(name)
            if outcome.counted:
                self._log.useful(name, "first_step", now, stall=metrics.get("shares/wait_seconds", 0.0))
            elif isinstance(error, protocols.WorkerLost | protocols.DeadlineMissed):
                self._transitions.failed(worker.ticket, str(error))
            elif worker.state is WorkerState.TRAINING:
                why = (
                    f"its share of step {self._transitions.step + 1} was not there in time"
                    if error is None
                    else str(error)
                )
                self._transitions.begin(self.pool.switch_to_rollout(name, why, now))

    # Decisions --------------------------------------------------------------------------------------------------

    def after(self, step: int, took: StepSeconds) -> Mapping[str, float]:
        """Decides whether workers switch after a step. Returns the step's metrics of the pool."""
        self._transitions.step = step
        # The first token of each engine that has returned to rollout ends the record of its transition.
        for name in self._log.waiting(WorkerState.ROLLOUT):
            answered = self._engines.engines[name].answered
            if answered is not None:
                self._log.useful(name, "first_token", answered)
        for worker in self.pool.workers:
            if worker.state is WorkerState.TRAINING and not self._sides.follows(worker.name):
                self._transitions.failed(worker.ticket, "it could not be given the parameters that are out.")
        moving = self._coming is not None or any(not worker.at_rest for worker in self.pool.workers)
        # A switch, or an engine of the core that came or went, makes this step useless as a prediction of later steps.
        core = frozenset(instance.name for instance in self._engines.serving()) - set(self._names)
        before, self._core = self._core, core
        self._disturbed = self._disturbed or self._core != before
        disturbed, self._disturbed = self._disturbed or moving, moving
        training = self.pool.training()
        metrics = {"hybrid/training": float(len(training)), "hybrid/generation": float(self.pool.generation)}
        if self._scope.called or step >= self._steps:
            return metrics
        decision = self._switching.look(self._sight(step, took, disturbed=disturbed))
        metrics |= {"hybrid/now_seconds": decision.now_seconds, "hybrid/then_seconds": decision.then_seconds}
        # One change at a time: its effect is measured before the next.
        if decision.kind == "stay" or moving:
            return metrics
        side = "training" if decision.kind == "to_training" else "rollout"
        self._recorder.note(f"Hybrid workers switch to {side} ({', '.join(decision.workers)}): {decision.why}.")
        self._disturbed = True
        if decision.kind == "to_training":
            self._coming = _Coming(decision.workers, decision.why)
            return metrics
        for name in decision.workers:
            self._transitions.begin(self.pool.switch_to_rollout(name, decision.why, self._clock()))
        return metrics

    def _switch_to_training(self, coming: _Coming) -> None:
        """Switches the chosen workers to training, unless the floor of rollout instances forbids it by now."""
        self._coming = None
        for name in coming.workers:
            staying = self._staying()
            rolls_out = self.pool.worker(name).state is WorkerState.ROLLOUT and name in staying
            if rolls_out and len(staying) > self._floor and not self._scope.called:
                self._transitions.begin(self.pool.switch_to_training(name, coming.why, self._clock()))

    def _call_off(self) -> None:
        """Cancels the planned switch to training."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.timer is not None:
            coming.timer.cancel()

    def _lost(self, event: protocols.EngineLost) -> None:
        """Switches workers back to rollout if fewer than `elastic.floor` instances are left to roll out.

        If no more than the floor are left, planned switches to training are cancelled.
        """
        self._disturbed = True
        if self._scope.called:
            return
        returning = [
            worker for worker in self.pool.workers if worker.state in (WorkerState.LEAVING, WorkerState.ACTIVATING)
        ]
        short, now = self._floor - len(self._staying()) - len(returning), self._clock()
        if short >= 0:
            self._call_off()
        why = f"fewer than elastic.floor = {self._floor} instances are left to roll out"
        for worker in self.pool.workers:
            if short <= 0 or worker.state not in (*pool.TO_TRAINING, WorkerState.TRAINING):
                continue
            self._recorder.note(f"Hybrid workers, {worker.name} comes back: {why}.")
            self._transitions.begin(self.pool.switch_to_rollout(worker.name, why, now))
            short -= 1

    def _staying(self) -> list[str]:
        """Returns the names of serving instances that are not about to stop."""
        going = [worker.name for worker in self.pool.workers if worker.state is WorkerState.DRAINING]
        return [instance.name for instance in self._engines.serving() if instance.name not in going]

    def disturb(self) -> None:
        """Marks the step under way as no prediction of later steps, for instance because the trainer moves."""
        self._disturbed = True

    def _sight(self, step: int, took: StepSeconds, *, disturbed: bool) -> switching.Sight:
        """Returns what `switching` decides by: means of the last undisturbed steps under the present arrangement."""
        serving = self._engines.serving()
        slots = {instance.name: instance.slots for instance in serving}
        asleep = {name: self._engines.engines[name].info for name in self._names}
        hybrid = tuple(
            switching.Hybrid(
                worker.name,
                slots.get(worker.name) or (info.slots if (info := asleep[worker.name]) is not None else 0),
                self._shares.speed[worker.name],
                worker.state is WorkerState.TRAINING,
            )
            for worker in self.pool.workers
            if worker.state is WorkerState.TRAINING or (worker.state is WorkerState.ROLLOUT and worker.name in slots)
        )
        # A lost worker can only roll out, so it counts as part of the core.
        changing = {worker.name for worker in hybrid}
        core = {name: count for name, count in slots.items() if name not in changing}
        taken, enough = self._measured.after(took, sum(slots.values()), disturbed=disturbed)
        return switching.Sight(
            step=step,
            step_seconds=taken.step,
            train_seconds=taken.train,
            wait_seconds=taken.wait,
            rollout_seconds=taken.rollout,
            core_instances=len(core),
            core_slots=sum(core.values()),
            workers=hybrid,
            move_seconds=self._transitions.idle_seconds,
            disturbed=not enough,
        )

    def trainer_moved(self) -> None:
        """Switches workers back to rollout after the trainer has moved to other processes.

        Workers in training had joined the previous processes, and joining workers were about to.
        """
        # That decision used times of the previous processes.
        self._call_off()
        self._disturbed = True
        why, now = "the trainer moved to other processes", self._clock()
        for worker in self.pool.workers:
            if worker.state in (WorkerState.JOINING, WorkerState.TRAINING):
                self._transitions.begin(self.pool.switch_to_rollout(worker.name, why, now))

    # Records ----------------------------------------------------------------------------------------------------

    def devices(self) -> dict[str, int]:
        """Returns the devices of the workers, by their present pool."""
        counts = {"hybrid in training": 0, "hybrid in transition": 0, "hybrid in rollout": 0}
        where = {WorkerState.TRAINING: "hybrid in training", WorkerState.ROLLOUT: "hybrid in rollout"}
        for worker in self.pool.workers:
            pool_name = where.get(worker.state, "hybrid in transition")
            # A worker without a training side still rolls out.
            if worker.lost and self._engines.engines[worker.name].state == "serving":
                pool_name = "hybrid in rollout"
            counts[pool_name] += self._engines.engines[worker.name].devices
        return counts

    def close(self) -> None:
        """Stops timers, shares and records at the end of the run."""
        self._call_off()
        self._shares.close()
        self._log.write()

    def snapshot(self) -> HybridState:
        """Returns the state to keep across a restart."""
        return {"pool": {"generation": self.pool.generation}, "speed": dict(self._shares.speed)}

    def restore(self, snapshot: HybridState) -> None:
        """Restores the state after a restart, with every worker in rollout."""
        self.pool.restore(snapshot["pool"])
        speed = self._shares.speed
        speed |= {name: known for name, known in snapshot["speed"].items() if name in speed}
