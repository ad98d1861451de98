"""The hybrid pool: the state of every hybrid worker, and the set of workers in training.

The pool only decides over events. It says what a worker's work is now; another object does the work and reports its
end. Each piece of work has a `Ticket`. A late answer, from a past state or life, carries an old ticket and is ignored.
So the order in which a deadline, a failure and an answer arrive does not matter.

The membership generation is a number that grows whenever the set of training workers changes. A worker draws
a generation of its own as it begins to join. Its gradient channel is opened under this generation, and it trains under
it. No other worker and no other life of this worker ever has the same, so leftover gradient sums are refused.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from libra_jax import protocols


class WorkerState(enum.StrEnum):
    """State of a worker, or the work in progress on it.

    Attributes:
      ROLLOUT: its engine serves requests.
      DRAINING: its requests move to other instances, then its engine frees the devices.
      FETCHING: its training side receives the parameters of the present version.
      WARMING: its training side compiles the programs that it lacks.
      JOINING: training side and core open the gradient channel.
      TRAINING: its training side computes a share of every step.
      LEAVING: the gradient channel is closed, and the training side frees the devices.
      ACTIVATING: the engine wakes or restarts, and receives the weights of the present version.
      FAILED: neither engine nor training side can be relied on.
    """

    ROLLOUT = "rollout"
    DRAINING = "draining"
    FETCHING = "fetching"
    WARMING = "warming"
    JOINING = "joining"
    TRAINING = "training"
    LEAVING = "leaving"
    ACTIVATING = "activating"
    FAILED = "failed"


AT_REST = frozenset({WorkerState.ROLLOUT, WorkerState.TRAINING, WorkerState.FAILED})
"""States in which a worker stays until it is asked to change."""

TO_TRAINING = (WorkerState.DRAINING, WorkerState.FETCHING, WorkerState.WARMING, WorkerState.JOINING)
"""States on the way to training, in which the switch can still be aborted."""

UNDER_WAY = (*TO_TRAINING, WorkerState.LEAVING, WorkerState.ACTIVATING)
"""States with work in progress, each with its deadline."""

_ROUND = (
    WorkerState.ROLLOUT,
    *TO_TRAINING,
    WorkerState.TRAINING,
    WorkerState.LEAVING,
    WorkerState.ACTIVATING,
    WorkerState.ROLLOUT,
)

NEXT: Mapping[WorkerState, WorkerState] = {
    **dict(itertools.pairwise(_ROUND)),
    WorkerState.FAILED: WorkerState.ACTIVATING,
}
"""The next state once a state's work is done or, at rest, once the worker is asked to change."""

LEGAL: Mapping[WorkerState, frozenset[WorkerState]] = {
    state: frozenset(
        {NEXT[state]}
        | ({WorkerState.LEAVING} if state in TO_TRAINING else set())
        | ({WorkerState.FAILED} if state is not WorkerState.FAILED else set())
    )
    for state in WorkerState
}
"""All legal transitions."""


NO_GENERATION = 0
"""Membership generation of a worker that neither joins nor trains."""


TransitionRecord = TypedDict(
    "TransitionRecord",
    {
        "worker": str,
        "from": str,
        "to": str,
        "reason": str,
        "start": float,
        "end": float,
        "phases": dict[str, float],
    },
)
"""What the pool knows of a line of `transitions.jsonl`. Times are event-loop seconds."""


class PoolState(TypedDict):
    """The part of the pool that outlives the run."""

    generation: int
    """Membership generation."""


@dataclass(frozen=True)
class Ticket:
    """A piece of a worker's work: the work of one state in one of its lives.

    Attributes:
      worker: name of the worker.
      state: state whose work it is.
      serial: number of the worker's states so far, over all its lives.
    """

    worker: str
    state: WorkerState
    serial: int


@dataclass(frozen=True)
class HybridWorker:
    """A worker as it is now, with its present transition or, at rest, its last one.

    Attributes:
      name: name of the worker.
      state: present state.
      since: time in seconds at which it entered the state.
      limit: seconds that the state's work may take; infinite at rest. The object that does the work enforces the limit.
      serial: number of its states so far.
      generation: membership generation under which it joins or trains, else `NO_GENERATION`.
      restarts: number of restarts after a failure.
      lost: True if it has failed and is not restarted again.
      reason: reason of the transition, plus the reason of a turn or failure on the way.
      origin: state at rest in which the transition began.
      began: time in seconds at which the transition began.
      phases: states passed since, with the seconds spent in each.
    """

    name: str
    state: WorkerState
    since: float
    limit: float = math.inf
    serial: int = 0
    generation: int = NO_GENERATION
    restarts: int = 0
    lost: bool = False
    reason: str = ""
    origin: WorkerState = WorkerState.ROLLOUT
    began: float = 0.0
    phases: tuple[tuple[WorkerState, float], ...] = ()

    @property
    def ticket(self) -> Ticket:
        """Ticket of the present state."""
        return Ticket(self.name, self.state, self.serial)

    @property
    def at_rest(self) -> bool:
        """True if no transition is under way."""
        return self.state in AT_REST

    @property
    def idle_seconds(self) -> float:
        """Seconds of the transition in which its devices served neither side. A draining engine still serves."""
        return sum(seconds for state, seconds in self.phases if state is not WorkerState.DRAINING)

    def record(self) -> TransitionRecord:
        """Returns the worker's part of a line of `transitions.jsonl`, once it is at rest. The log adds the bytes."""
        return {
            "worker": self.name,
            "from": self.origin.value,
            "to": self.state.value,
            "reason": self.reason,
            "start": self.began,
            "end": self.since,
            "phases": {state.value: seconds for state, seconds in self.phases},
        }


class HybridPool:
    """All hybrid workers of a run. Each starts in rollout and makes at most one transition at a time.

    Not thread-safe: the pool belongs to one event loop. `now` is that loop's time in seconds, and never goes back.

    Args:
      workers: names of the workers.
      limits: deadline in seconds of each state in `UNDER_WAY`.
      restarts: number of restarts after a failure, before a worker counts as lost.
      now: present time in seconds.

    Raises:
      LibraError: two workers share a name, or a limit is missing, not positive, or of a state at rest.

    Attributes:
      generation: present membership generation; only the pool changes it.
    """

    def __init__(
        self, workers: Sequence[str], limits: Mapping[WorkerState, float], restarts: int, *, now: float = 0.0
    ) -> None:
        if len(set(workers)) < len(workers):
            raise protocols.LibraError(f"hybrid workers need names of their own, not {', '.join(workers)}")
        if wrong := sorted(set(limits) ^ set(UNDER_WAY)):
            raise protocols.LibraError(
                f"exactly the states {', '.join(UNDER_WAY)} have a deadline; see to {', '.join(wrong)}"
            )
        if brief := sorted(state for state in limits if not limits[state] > 0):
            raise protocols.LibraError(f"the deadline of {', '.join(brief)} must be positive")
        self._limits = dict(limits)
        self._restarts = restarts
        self.generation = NO_GENERATION
        self._workers = {name: HybridWorker(name, WorkerState.ROLLOUT, now, began=now) for name in workers}

    @property
    def workers(self) -> tuple[HybridWorker, ...]:
        """All workers, in the given order."""
        return tuple(self._workers.values())

    def worker(self, name: str) -> HybridWorker:
        """Returns the worker as it is now. Later changes do not show in the result.

        Raises:
          LibraError: no worker has this name.
        """
        if name not in self._workers:
            raise protocols.LibraError(
                f"there is no hybrid worker {name}; there are {', '.join(self._workers) or 'none at all'}"
            )
        return self._workers[name]

    def training(self) -> dict[str, int]:
        """Returns the workers in training, with the membership generation of each."""
        return {worker.name: worker.generation for worker in self.workers if worker.state is WorkerState.TRAINING}

    # Requests to a worker. Each method returns the worker with the ticket of its first work. It raises LibraError, and
    # changes nothing, if the worker's state does not allow the request.

    def switch_to_training(self, name: str, reason: str, now: float) -> HybridWorker:
        """Switches a worker from rollout to training."""
        return self._enter(
            self._found(name, "switch to training", WorkerState.ROLLOUT), WorkerState.DRAINING, reason, now
        )

    def switch_to_rollout(self, name: str, reason: str, now: float) -> HybridWorker:
        """Switches a worker to rollout: from training, or on its way there, which aborts that switch."""
        worker = self._found(name, "switch to rollout", *TO_TRAINING, WorkerState.TRAINING)
        if worker.state is not WorkerState.TRAINING:
            # The same transition goes on, so its record tells both reasons.
            reason = f"{worker.reason}; aborted: {reason}"
        return self._enter(worker, WorkerState.LEAVING, reason, now)

    def recover(self, name: str, now: float) -> HybridWorker:
        """Restarts a failed worker into rollout."""
        worker = self._found(name, "be restarted", WorkerState.FAILED)
        if worker.lost:
            raise protocols.LibraError(
                f"{name} is lost: it was brought back {worker.restarts} times, as often as elastic.restarts allows, "
                f"and failed again: {worker.reason}"
            )
        # Counted at the restart, so that a worker at its limit is lost at its next failure.
        worker = dataclasses.replace(worker, restarts=worker.restarts + 1)
        return self._enter(worker, WorkerState.ACTIVATING, f"restart {worker.restarts} of {self._restarts}", now)

    # Outcomes of a piece of work.

    def advance(self, ticket: Ticket, now: float) -> HybridWorker | None:
        """Reports that the work is done.

        Returns:
          The worker in its next state, with the ticket of the next work. None for an old ticket, whose holder has
          nothing more to do.

        Raises:
          LibraError: no such worker exists, or it is at rest and had no work.
        """
        worker = self.worker(ticket.worker)
        # An old ticket: another task drives the worker by now, or the worker has failed since.
        if worker.ticket != ticket:
            return None
        if worker.at_rest:
            raise protocols.LibraError(
                f"{worker.name} is at rest in {worker.state}, where nothing can be done; switch or restart it"
            )
        return self._enter(worker, NEXT[worker.state], worker.reason, now)

    def fail(self, ticket: Ticket, why: str, now: float) -> HybridWorker | None:
        """Reports that the work failed or missed its deadline, or that a worker at rest broke.

        Returns:
          The worker, failed. None for an old ticket, which changes nothing.

        Raises:
          LibraError: no such worker exists, or it has failed already.
        """
        worker = self.worker(ticket.worker)
        # An old ticket: another task drives the worker by now, or the worker has failed since.
        if worker.ticket != ticket:
            return None
        return self._enter(worker, WorkerState.FAILED, why if worker.at_rest else f"{worker.reason}; {why}", now)

    def restore(self, snapshot: PoolState) -> None:
        """Restores a new pool after a restart of the run: every worker is in rollout, and none has failed.

        The earlier run's processes are gone, with all their work, and all engines are restarted. The workers in
        training are gone too, so the generation grows.
        """
        self.generation = max(self.generation, snapshot["generation"]) + 1

    def _found(self, name: str, verb: str, *possible: WorkerState) -> HybridWorker:
        """Returns the worker if its state allows the request."""
        worker = self.worker(name)
        if worker.state not in possible:
            raise protocols.LibraError(
                f"{name} cannot {verb}: it is in {worker.state}, and would have to be in {' or '.join(possible)}"
            )
        return worker

    def _enter(self, worker: HybridWorker, state: WorkerState, reason: str, now: float) -> HybridWorker:
        before = worker.state
        if state not in LEGAL[before]:
            raise protocols.LibraError(f"{worker.name} cannot go from {before} to {state}")
        # A worker draws its generation before it trains. The start and the end of training both change the set.
        if state is WorkerState.JOINING or WorkerState.TRAINING in (before, state):
            self.generation += 1
        # Kept from joining to the end of training: the channel was opened under it.
        kept = worker.generation if state is WorkerState.TRAINING else NO_GENERATION
        entered = dataclasses.replace(
            worker,
            state=state,
            since=now,
            limit=self._limits.get(state, math.inf),
            # With the serial, every ticket of a former state or life is an old one.
            serial=worker.serial + 1,
            generation=self.generation if state is WorkerState.JOINING else kept,
            lost=state is WorkerState.FAILED and worker.restarts >= self._restarts,
            reason=reason,
            origin=before if worker.at_rest else worker.origin,
            began=now if worker.at_rest else worker.began,
            phases=() if worker.at_rest else (*worker.phases, (before, now - worker.since)),
        )
        self._workers[worker.name] = entered
        return entered
