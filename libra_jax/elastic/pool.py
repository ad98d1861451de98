"""The hybrid pool: the state of every worker that may change sides, and who is a member of training.

Pure decisions over events: the pool says what a worker's work is now, somebody else does it and tells the pool how it
ended. Each piece of work has a `Ticket`. An answer that comes late, from a state or a life that is over, carries the
ticket of then and is ignored; so it does not matter in which order a deadline, a failure and an answer arrive.

The *membership epoch* is a number that grows whenever the set of training workers changes. A worker draws one of its
own as it begins to join, because the channel for its gradient sums is opened under it, and trains under that one: no
other worker and no other life of this one ever has the same, so sums that are left over from one are refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import protocols
from libra_jax.elastic import states
from libra_jax.elastic.states import State

NO_EPOCH = 0
"""Membership epoch of a worker that neither joins nor trains."""


@dataclass(frozen=True)
class Ticket:
    """A piece of a worker's work: what is to be done in one state of one of its lives.

    Attributes:
      worker: its name.
      state: the state.
      serial: the worker's states so far, over all its lives.
    """

    worker: str
    state: State
    serial: int


@dataclass(frozen=True)
class Worker:
    """A worker as it is now, and the transition that it is in, or, at rest, has made last.

    Attributes:
      name: the worker's.
      state: its state.
      since: seconds; when it came into the state.
      limit: seconds that the state's work may take; infinite at rest. Who does it sees to that, and fails the worker.
      serial: its states so far.
      epoch: the membership epoch that it joins or trains under, else `NO_EPOCH`.
      restarts: times that it was brought back after a failure.
      lost: it has failed, and is not brought back again.
      reason: why it set out, and, if it turned round or failed on the way, why.
      origin: the state at rest that it set out from.
      began: seconds; when it did.
      phases: the states that it has been through since, with the seconds spent in each.
    """

    name: str
    state: State
    since: float
    limit: float = math.inf
    serial: int = 0
    epoch: int = NO_EPOCH
    restarts: int = 0
    lost: bool = False
    reason: str = ""
    origin: State = State.ROLLOUT
    began: float = 0.0
    phases: tuple[tuple[State, float], ...] = ()

    @property
    def ticket(self) -> Ticket:
        """Of its present state."""
        return Ticket(self.name, self.state, self.serial)

    @property
    def at_rest(self) -> bool:
        """Nothing is under way."""
        return self.state in states.AT_REST

    @property
    def idle_seconds(self) -> float:
        """Of its transition, those in which its devices served neither side; while it drains, its engine does."""
        return sum(seconds for state, seconds in self.phases if state is not State.DRAINING)

    def record(self) -> dict[str, Any]:
        """For `transitions.jsonl`, once the worker is at rest: what it knows of the transition; bytes are others'."""
        return {
            "worker": self.name,
            "from": self.origin.value,
            "to": self.state.value,
            "reason": self.reason,
            "start": self.began,
            "end": self.since,
            "phases": {state.value: seconds for state, seconds in self.phases},
        }


class Pool:
    """All hybrid workers of a run; each starts in rollout, and is in one transition at most.

    Not thread-safe: it belongs to one event loop. `now` is that loop's time, in seconds, and never goes back.

    Args:
      workers: their names.
      limits: seconds that the work of each state of `states.UNDER_WAY` may take.
      restarts: times that a worker is brought back after a failure; then it is lost.
      now: seconds.

    Raises:
      LibraError: two workers have one name, a limit is missing, of a state at rest, or not positive.
    """

    def __init__(
        self, workers: Sequence[str], limits: Mapping[State, float], restarts: int, *, now: float = 0.0
    ) -> None:
        if len(set(workers)) < len(workers):
            raise protocols.LibraError(f"hybrid workers need names of their own, not {', '.join(workers)}")
        if wrong := sorted(set(limits) ^ set(states.UNDER_WAY)):
            raise protocols.LibraError(
                f"exactly the states {', '.join(states.UNDER_WAY)} have a deadline; see to {', '.join(wrong)}"
            )
        if brief := sorted(state for state in limits if not limits[state] > 0):
            raise protocols.LibraError(f"the deadline of {', '.join(brief)} must be positive")
        self._limits = dict(limits)
        self._restarts = restarts
        self._epoch = NO_EPOCH
        self._workers = {name: Worker(name, State.ROLLOUT, now, began=now) for name in workers}

    @property
    def epoch(self) -> int:
        """The present membership epoch."""
        return self._epoch

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All of them, in the order given."""
        return tuple(self._workers.values())

    def worker(self, name: str) -> Worker:
        """The worker as it is now; later changes do not show.

        Raises:
          LibraError: there is none of this name.
        """
        if name not in self._workers:
            raise protocols.LibraError(
                f"there is no hybrid worker {name}; there are {', '.join(self._workers) or 'none at all'}"
            )
        return self._workers[name]

    def members(self) -> dict[str, int]:
        """The workers that train, with the epoch in which each joined."""
        return {worker.name: worker.epoch for worker in self.workers if worker.state is State.TRAINING}

    # What a worker is asked to do. Each call returns the worker with the ticket of what is to be done first, and raises
    # LibraError, with everything left as it was, if the worker cannot do it from where it is.

    def borrow(self, name: str, reason: str, now: float) -> Worker:
        """A worker that rolls out is to train."""
        return self._enter(self._found(name, "borrowed", State.ROLLOUT), State.DRAINING, reason, now)

    def release(self, name: str, reason: str, now: float) -> Worker:
        """A worker that trains is to roll out."""
        return self._enter(self._found(name, "released", State.TRAINING), State.LEAVING, reason, now)

    def cancel(self, name: str, reason: str, now: float) -> Worker:
        """A worker that was borrowed and does not train yet is to roll out again."""
        worker = self._found(name, "given back before it trains", *states.BORROWED)
        return self._enter(worker, State.LEAVING, f"{worker.reason}; given up: {reason}", now)

    def recover(self, name: str, now: float) -> Worker:
        """A worker that has failed is to roll out again: a restart."""
        worker = self._found(name, "recovered", State.FAILED)
        if worker.lost:
            raise protocols.LibraError(
                f"{name} is lost: it was brought back {worker.restarts} times, as often as elastic.restarts allows, "
                f"and failed again: {worker.reason}"
            )
        worker = dataclasses.replace(worker, restarts=worker.restarts + 1)
        return self._enter(worker, State.ACTIVATING, f"restart {worker.restarts} of {self._restarts}", now)

    # What became of a piece of work.

    def advance(self, ticket: Ticket, now: float) -> Worker | None:
        """The work is done.

        Returns:
          The worker in its next state, with the ticket of what is to be done there; None if the ticket is an old one:
          who holds it has nothing more to do.

        Raises:
          LibraError: there is no such worker, or it is at rest and was asked for nothing.
        """
        worker = self._of(ticket)
        if worker is None:
            return None
        if worker.at_rest:
            raise protocols.LibraError(
                f"{worker.name} is at rest in {worker.state}, where nothing can be done; borrow, release or recover it"
            )
        return self._enter(worker, states.NEXT[worker.state], worker.reason, now)

    def fail(self, ticket: Ticket, why: str, now: float) -> Worker | None:
        """The work went wrong, or was not done in time; or a worker broke that was at rest.

        Returns:
          The worker, failed; None if the ticket is an old one: the worker is as it was.

        Raises:
          LibraError: there is no such worker, or it has failed already.
        """
        worker = self._of(ticket)
        if worker is None:
            return None
        return self._enter(worker, State.FAILED, why if worker.at_rest else f"{worker.reason}; {why}", now)

    def snapshot(self) -> dict[str, Any]:
        """What outlives the run; JSON-able. Only the epoch does: see `restore`."""
        return {"epoch": self._epoch}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Goes on after a restart of the run, in a pool just made: every worker is in rollout, none has failed yet.

        The processes of the earlier run are gone, whatever was under way in them, and all engines are started anew. Its
        members are gone too, so the epoch grows.
        """
        self._epoch = max(self._epoch, snapshot["epoch"]) + 1

    def _of(self, ticket: Ticket) -> Worker | None:
        """The worker, if the ticket is that of its present state."""
        worker = self.worker(ticket.worker)
        return worker if worker.ticket == ticket else None

    def _found(self, name: str, verb: str, *possible: State) -> Worker:
        """The worker, if it is in a state from which it can do what it is asked."""
        worker = self.worker(name)
        if worker.state not in possible:
            raise protocols.LibraError(
                f"{name} cannot be {verb}: it is in {worker.state}, and would have to be in {' or '.join(possible)}"
            )
        return worker

    def _enter(self, worker: Worker, state: State, reason: str, now: float) -> Worker:
        before = worker.state
        if state not in states.LEGAL[before]:
            raise protocols.LibraError(f"{worker.name} cannot go from {before} to {state}")
        # Joining draws its number before the worker is a member; becoming one and ceasing to be one change the set.
        if state is State.JOINING or State.TRAINING in (before, state):
            self._epoch += 1
        kept = worker.epoch if state is State.TRAINING else NO_EPOCH
        entered = dataclasses.replace(
            worker,
            state=state,
            since=now,
            limit=self._limits.get(state, math.inf),
            serial=worker.serial + 1,
            epoch=self._epoch if state is State.JOINING else kept,
            lost=state is State.FAILED and worker.restarts >= self._restarts,
            reason=reason,
            origin=before if worker.at_rest else worker.origin,
            began=now if worker.at_rest else worker.began,
            phases=() if worker.at_rest else (*worker.phases, (before, now - worker.since)),
        )
        self._workers[worker.name] = entered
        return entered
