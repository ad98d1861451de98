"""Deterministic simulation testing: a hybrid pool alone, whose work dies, hangs, comes late or twice in any state.

See `seeds` for how many there are, and for how to repeat one.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest
import seeds

from libra_jax import protocols
from libra_jax.hybrid import pool
from libra_jax.hybrid.pool import WorkerState

QUIET = 300.0
"""Virtual seconds after which no one is asked for anything any more."""

WATCH = 1.0
"""Virtual seconds between two looks at who is overdue."""


class Simulation:
    """Whoever does the workers' work, on a virtual clock, with faults.

    Attributes:
      seen: how often each fault hit each state.
      lives: the generations under which anybody has trained.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.limits = {state: rng.uniform(2.0, 20.0) for state in pool.UNDER_WAY}
        names = [f"engine-{number}" for number in range(rng.randint(1, 4))]
        self.pool = pool.HybridPool(names, self.limits, rng.choice((0, 3, 1_000)))
        self.faults = {name: rng.choice((0.0, 0.05, 0.2)) for name in ("dies", "hangs", "late", "twice")}
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.seen: Counter[tuple[str, WorkerState]] = Counter()
        self.generation = self.pool.generation
        self.members: dict[str, int] = {}
        self.lives: set[int] = set()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), event))

    def run(self) -> None:
        self.after(0.0, self.direct)
        self.after(WATCH, self.watch)
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            before = {worker.name: worker for worker in self.pool.workers}
            event()
            self.check(before)

    def work(self, worker: pool.HybridWorker | None) -> None:
        """Begins what the worker's state asks for; it ends well, or meets a fault."""
        if worker is None or worker.at_rest:
            return
        ticket, limit = worker.ticket, self.limits[worker.state]
        fault = next((name for name, share in self.faults.items() if self.rng.random() < share), "")
        self.seen[fault, worker.state] += 1
        done = limit * self.rng.random()
        if fault == "dies":
            self.after(done, lambda: self.work(self.pool.fail(ticket, "killed", self.now)))
        elif fault != "hangs":
            self.after(done + 2.0 * limit * (fault == "late"), lambda: self.work(self.pool.advance(ticket, self.now)))
        if fault == "twice":
            self.after(3.0 * limit * self.rng.random(), lambda: self.work(self.pool.advance(ticket, self.now)))

    def direct(self) -> None:
        """Asks somebody for something, sensible or not; or an engine, or a replica that trains, dies."""
        if self.now > QUIET:
            return
        worker = self.rng.choice(self.pool.workers)
        ask = self.rng.choice((self.pool.switch_to_training, self.pool.switch_to_rollout))
        try:
            if worker.state in (WorkerState.ROLLOUT, WorkerState.TRAINING) and self.rng.random() < 0.05:
                self.seen["dies", worker.state] += 1
                self.pool.fail(worker.ticket, "died at rest", self.now)
            else:
                self.work(ask(worker.name, "as asked", self.now))
                self.seen[ask.__name__, worker.state] += 1
        except protocols.LibraError:
            assert self.pool.worker(worker.name) == worker
        self.after(self.rng.expovariate(0.5), self.direct)

    def watch(self) -> None:
        """Fails who is overdue, and brings back who has failed."""
        for worker in self.pool.workers:
            if self.now > worker.since + worker.limit:
                self.pool.fail(worker.ticket, "overdue", self.now)
        for worker in self.pool.workers:
            if worker.state is WorkerState.FAILED and not worker.lost and self.rng.random() < 0.5:
                self.work(self.pool.recover(worker.name, self.now))
        if self.now < QUIET or any(not worker.at_rest for worker in self.pool.workers):
            self.after(WATCH, self.watch)

    def check(self, before: dict[str, pool.HybridWorker]) -> None:
        """Nothing illegal happened; whoever is on the way has not been for longer than its states' deadlines allow."""
        for worker in self.pool.workers:
            old = before[worker.name]
            if worker.serial == old.serial + 1:
                assert worker.state in pool.LEGAL[old.state]
            assert worker.at_rest or self.now - worker.began <= self.bound(), f"{worker} is stuck at {self.now}"
        members = {
            worker.name: worker.generation for worker in self.pool.workers if worker.state is WorkerState.TRAINING
        }
        assert self.pool.training() == members
        assert (
            self.pool.generation > self.generation
            if members != self.members
            else self.pool.generation >= self.generation
        )
        new = set(members.values()) - set(self.members.values())
        assert not new & self.lives
        self.lives |= new
        self.generation, self.members = self.pool.generation, members

    def bound(self) -> float:
        """Seconds within which a worker that set out is at rest: each state's deadline, found out at the next look."""
        return sum(self.limits.values()) + WATCH


def simulate(seed: int) -> Simulation:
    simulation = Simulation(seed)
    simulation.run()
    return simulation


@pytest.mark.parametrize("batch", seeds.batches(500), ids=str)
def test_no_transition_is_ever_stuck(batch):
    """Whatever faults meet it, each worker is at rest again within the deadlines of the states on its way."""

    def check(seed: int) -> None:
        assert all(worker.at_rest for worker in simulate(seed).pool.workers)

    seeds.each(batch, check)


def test_the_simulations_reach_every_state_with_every_fault():
    seen: Counter[tuple[str, WorkerState]] = Counter()
    for seed in range(200):
        seen += simulate(seed).seen
    for state in pool.UNDER_WAY:
        assert all(seen[fault, state] >= 5 for fault in ("", "dies", "hangs", "late", "twice")), (state, seen)
    assert all(seen["switch_to_rollout", state] >= 5 for state in (*pool.TO_TRAINING, WorkerState.TRAINING)), seen
    assert min(seen["dies", WorkerState.ROLLOUT], seen["dies", WorkerState.TRAINING]) >= 5, seen
