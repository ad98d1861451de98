"""The hybrid pool against a model of it: nothing illegal, nothing stuck, and a late answer changes nothing."""

from __future__ import annotations

import copy
import itertools
import json

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.hybrid import pool
from libra_jax.hybrid.pool import WorkerState

NAMES = ("engine-1", "engine-2", "engine-3")
LIMITS = {state: 10.0 * place for place, state in enumerate(pool.UNDER_WAY, start=1)}
RESTARTS = 2

WAY = ["rollout", "draining", "fetching", "warming", "joining", "training", "leaving", "activating", "rollout"]
TO_TRAINING = ("draining", "fetching", "warming", "joining")
TRANSITIONS = {
    *itertools.pairwise(WAY),
    *((state, "failed") for state in WAY),
    *((state, "leaving") for state in TO_TRAINING),
    ("failed", "activating"),
}
POSSIBLE = {
    "to_training": ("rollout",),
    "to_rollout": (*TO_TRAINING, "training"),
    "recover": ("failed",),
    "advance": (*TO_TRAINING, "leaving", "activating"),
    "fail": tuple(WAY),
}
"""The rules, written down a second time and by hand; which states a worker may be asked what in."""


def make(names: tuple[str, ...] = NAMES, restarts: int = RESTARTS) -> pool.HybridPool:
    return pool.HybridPool(names, LIMITS, restarts)


def brought_to(state: WorkerState, made: pool.HybridPool, name: str = NAMES[0]) -> pool.HybridWorker:
    """The worker, led from rollout to a state by the shortest way."""
    if state is WorkerState.FAILED:
        made.fail(made.worker(name).ticket, "broke", 0.0)
        return made.worker(name)
    if state in (*pool.TO_TRAINING, WorkerState.TRAINING):
        made.switch_to_training(name, "training is slow", 0.0)
    elif state is not WorkerState.ROLLOUT:
        made.switch_to_training(name, "training is slow", 0.0)
        made.switch_to_rollout(name, "changed its mind", 0.0)
    while made.worker(name).state is not state:
        made.advance(made.worker(name).ticket, 0.0)
    return made.worker(name)


def every_ask(made: pool.HybridPool, name: str, now: float):
    """All that can be said of a worker with its present ticket."""
    ticket = made.worker(name).ticket
    return {
        "to_training": lambda: made.switch_to_training(name, "why", now),
        "to_rollout": lambda: made.switch_to_rollout(name, "why", now),
        "recover": lambda: made.recover(name, now),
        "advance": lambda: made.advance(ticket, now),
        "fail": lambda: made.fail(ticket, "why", now),
    }


def test_the_table_has_every_transition_and_no_other():
    assert {(before.value, after.value) for before in WorkerState for after in pool.LEGAL[before]} == TRANSITIONS
    assert set(pool.UNDER_WAY) | pool.AT_REST == set(WorkerState)
    assert not set(pool.UNDER_WAY) & pool.AT_REST


@pytest.mark.parametrize("ask", POSSIBLE)
@pytest.mark.parametrize("state", WorkerState)
def test_what_is_asked_in_a_state_is_a_transition_of_the_table_or_refused(state, ask):
    made = make()
    before, generation = brought_to(state, made), made.generation
    if state.value in POSSIBLE[ask]:
        after = every_ask(made, NAMES[0], 0.0)[ask]()
        assert after == made.worker(NAMES[0])
        assert (before.state.value, after.state.value) in TRANSITIONS
    else:
        with pytest.raises(protocols.LibraError, match=NAMES[0]):
            every_ask(made, NAMES[0], 0.0)[ask]()
        assert (made.worker(NAMES[0]), made.generation) == (before, generation)


class PoolMachine(stateful.RuleBasedStateMachine):
    """Random events against a model that knows the table and which ticket of each worker is the last."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make()
        self.now = 0.0
        self.state = dict.fromkeys(NAMES, "rollout")
        self.began = dict.fromkeys(NAMES, 0.0)
        self.restarts = dict.fromkeys(NAMES, 0)
        self.tickets = {name: [self.pool.worker(name).ticket] for name in NAMES}
        self.generations = [self.pool.generation]
        self.drawn: set[int] = set()

    def entered(self, worker: pool.HybridWorker, state: str) -> None:
        """The worker has gone to this state; no one else has moved."""
        before, self.state[worker.name] = self.state[worker.name], state
        assert (before, state) in TRANSITIONS
        assert worker.ticket not in self.tickets[worker.name]
        self.tickets[worker.name].append(worker.ticket)
        grown = "training" in (before, state)
        assert self.pool.generation > self.generations[-1] if grown else self.pool.generation >= self.generations[-1]
        self.generations.append(self.pool.generation)
        if state == "joining":
            assert worker.generation not in self.drawn
            self.drawn.add(worker.generation)
        assert (worker.generation != pool.NO_GENERATION) == (state in ("joining", "training"))
        if before in ("rollout", "training", "failed"):
            self.began[worker.name] = self.now
        assert (worker.began, worker.since) == (self.began[worker.name], self.now)
        assert sum(seconds for _, seconds in worker.phases) == pytest.approx(worker.since - worker.began)

    def asked(self, ask: str, name: str, state: str, *, allowed: bool = True) -> None:
        """The pool does it if it is possible, and else refuses with a sentence."""
        if allowed and self.state[name] in POSSIBLE[ask]:
            self.entered(every_ask(self.pool, name, self.now)[ask](), state)
            return
        before = self.pool.workers, self.pool.generation
        with pytest.raises(protocols.LibraError, match=name):
            every_ask(self.pool, name, self.now)[ask]()
        assert (self.pool.workers, self.pool.generation) == before

    @stateful.rule(seconds=st.floats(0.0, 8.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @stateful.rule(name=st.sampled_from(NAMES))
    def switch_to_training(self, name: str) -> None:
        self.asked("to_training", name, "draining")

    @stateful.rule(name=st.sampled_from(NAMES))
    def switch_to_rollout(self, name: str) -> None:
        self.asked("to_rollout", name, "leaving")

    @stateful.rule(name=st.sampled_from(NAMES))
    def recover(self, name: str) -> None:
        allowed = self.restarts[name] < RESTARTS
        self.restarts[name] += allowed and self.state[name] == "failed"
        self.asked("recover", name, "activating", allowed=allowed)
        assert self.pool.worker(name).restarts == self.restarts[name]

    @stateful.rule(name=st.sampled_from(NAMES))
    def advance(self, name: str) -> None:
        state = self.state[name]
        self.asked("advance", name, WAY[WAY.index(state) + 1] if state in POSSIBLE["advance"] else "")

    @stateful.rule(name=st.sampled_from(NAMES), times=st.integers(1, 6))
    def work(self, name: str, times: int) -> None:
        """All goes well for a while: most workers would never train otherwise."""
        for _ in range(times):
            {"rollout": self.switch_to_training, "failed": self.recover}.get(self.state[name], self.advance)(name)

    @stateful.rule(name=st.sampled_from(NAMES), unlucky=st.integers(0, 4))
    def fail(self, name: str, unlucky: int) -> None:
        if not unlucky:
            self.asked("fail", name, "failed")

    @stateful.precondition(lambda self: any(len(tickets) > 1 for tickets in self.tickets.values()))
    @stateful.rule(data=st.data(), advances=st.booleans())
    def answer_late(self, data: st.DataObject, advances: bool) -> None:
        ticket = data.draw(st.sampled_from([old for tickets in self.tickets.values() for old in tickets[:-1]]))
        before = self.pool.workers, self.pool.generation
        if advances:
            assert self.pool.advance(ticket, self.now) is None
        else:
            assert self.pool.fail(ticket, "late", self.now) is None
        assert (self.pool.workers, self.pool.generation) == before

    @stateful.rule()
    def enforce_deadlines(self) -> None:
        for worker in self.pool.workers:
            if self.now - worker.since > worker.limit:
                self.entered(self.pool.fail(worker.ticket, "too late", self.now), "failed")

    @stateful.invariant()
    def each_worker_is_where_the_model_has_it(self) -> None:
        assert {worker.name: worker.state.value for worker in self.pool.workers} == self.state
        training = {name for name, state in self.state.items() if state == "training"}
        assert set(self.pool.training()) == training
        assert set(self.pool.training().values()) <= self.drawn
        for worker in self.pool.workers:
            assert worker.lost == (worker.state is WorkerState.FAILED and self.restarts[worker.name] == RESTARTS)
            assert len(worker.phases) <= len(pool.UNDER_WAY)
            assert worker.limit == LIMITS.get(worker.state, float("inf"))

    def teardown(self) -> None:
        """From wherever they are, workers come to rest: if all answer, and if none ever does."""
        willing = copy.deepcopy(self.pool)
        for worker in willing.workers:
            for _ in pool.UNDER_WAY:
                if not willing.worker(worker.name).at_rest:
                    willing.advance(willing.worker(worker.name).ticket, self.now)
        assert all(worker.at_rest for worker in willing.workers)
        for _ in range(RESTARTS + 1):
            self.now += max(LIMITS.values()) + 1.0
            self.enforce_deadlines()
            assert all(worker.at_rest for worker in self.pool.workers)
            for worker in self.pool.workers:
                if worker.state is WorkerState.FAILED and not worker.lost:
                    self.recover(worker.name)
        assert all(worker.at_rest for worker in self.pool.workers)


PoolMachine.TestCase.settings = hypothesis.settings(max_examples=200, stateful_step_count=60)
TestHybridPool = PoolMachine.TestCase


def test_a_worker_goes_round_and_leaves_a_record_of_each_way():
    made, now = make(), 0.0
    made.switch_to_training("engine-2", "training takes 20.0 s", now)
    while not (worker := made.worker("engine-2")).at_rest:
        now += 1.5
        worker = made.advance(worker.ticket, now)
    record = worker.record()
    assert record == {
        "worker": "engine-2",
        "from": "rollout",
        "to": "training",
        "reason": "training takes 20.0 s",
        "start": 0.0,
        "end": 6.0,
        "phases": {"draining": 1.5, "fetching": 1.5, "warming": 1.5, "joining": 1.5},
    }
    assert json.loads(json.dumps(record)) == record
    assert made.training() == {"engine-2": worker.generation}
    made.switch_to_rollout("engine-2", "rollout takes 20.0 s", 10.0)
    for now in (11.0, 13.0):
        worker = made.advance(made.worker("engine-2").ticket, now)
    assert worker.record()["phases"] == {"leaving": 1.0, "activating": 2.0}
    assert (worker.record()["from"], worker.record()["to"]) == ("training", "rollout")
    assert made.training() == {}


def test_a_switch_given_up_or_broken_says_why_in_its_record():
    made = make()
    brought_to(WorkerState.WARMING, made)
    made.switch_to_rollout(NAMES[0], "rollout is slow now", 1.0)
    made.fail(made.worker(NAMES[0]).ticket, "the replica was killed", 2.0)
    record = made.worker(NAMES[0]).record()
    assert record["reason"] == "training is slow; aborted: rollout is slow now; the replica was killed"
    assert record["to"] == "failed"
    assert record["phases"] == {"draining": 0.0, "fetching": 0.0, "warming": 1.0, "leaving": 1.0}


def test_two_workers_that_join_at_once_have_epochs_of_their_own_from_joining_to_leaving():
    made = make()
    drawn = [brought_to(WorkerState.JOINING, made, name).generation for name in NAMES[:2]]
    assert len(set(drawn)) == 2
    for name in reversed(NAMES[:2]):
        made.advance(made.worker(name).ticket, 0.0)
    assert made.training() == dict(zip(NAMES, drawn, strict=False))


def test_a_worker_is_brought_back_so_often_and_then_lost():
    made = make(restarts=1)
    brought_to(WorkerState.FAILED, made)
    worker = made.recover(NAMES[0], 1.0)
    assert worker.reason == "restart 1 of 1"
    assert made.fail(worker.ticket, "no device", 2.0).lost
    with pytest.raises(protocols.LibraError, match=r"engine-1 is lost: it was brought back 1 times.*no device"):
        made.recover(NAMES[0], 3.0)


def test_after_a_restart_of_the_run_all_are_in_rollout_and_no_epoch_comes_again():
    made = make()
    brought_to(WorkerState.TRAINING, made)
    brought_to(WorkerState.FAILED, made, NAMES[1])
    again = make()
    again.restore({"generation": made.generation})
    assert {worker.state for worker in again.workers} == {WorkerState.ROLLOUT}
    assert again.generation > made.generation
    assert brought_to(WorkerState.TRAINING, again).generation > made.generation


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((("a", "a"), LIMITS, 1), "names of their own, not a, a"),
        ((("a",), {**LIMITS, WorkerState.TRAINING: 1.0}, 1), "see to training"),
        ((("a",), {WorkerState.DRAINING: 1.0}, 1), "see to activating, fetching, joining, leaving, warming"),
        ((("a",), {**LIMITS, WorkerState.LEAVING: 0.0}, 1), "deadline of leaving must be positive"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(arguments, problem):
    with pytest.raises(protocols.LibraError, match=problem):
        pool.HybridPool(*arguments)


def test_nonsense_is_refused_with_a_sentence():
    made = make()
    made.switch_to_training(NAMES[0], "why", 0.0)
    with pytest.raises(
        protocols.LibraError, match="engine-1 cannot switch to training: it is in draining, and would have to"
    ):
        made.switch_to_training(NAMES[0], "why", 0.0)
    with pytest.raises(protocols.LibraError, match="there is no hybrid worker engine-9; there are engine-1, engine-2"):
        made.switch_to_training("engine-9", "why", 0.0)
