"""Switching and releasing against a world whose true times are known: the slower stage is helped, and changes end."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax.hybrid import switching

RULES = config_lib.ElasticConfig(gain=0.05, patience=2, cooldown=4, floor=1)


@dataclass
class World:
    """True times: `train` seconds by the core alone, `rollout` seconds on one slot, `beside` that no one shortens."""

    train: float = 20.0
    rollout: float = 40.0
    beside: float = 0.0
    hybrids: tuple[tuple[int, float], ...] = ((4, 1.0),)
    core_instances: int = 1
    core_slots: int = 4
    synchronous: bool = False
    move: float = 1.0
    training: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        return [f"engine-{number}" for number in range(len(self.hybrids))]

    def stages(self, training: frozenset[str]) -> tuple[float, float]:
        """Seconds of training and of rollout."""
        sides = [
            (slots, speed, name in training) for name, (slots, speed) in zip(self.names, self.hybrids, strict=True)
        ]
        speed = 1.0 + sum(speed for _, speed, trains in sides if trains)
        return self.train / speed, self.rollout / (
            self.core_slots + sum(slots for slots, _, trains in sides if not trains)
        )

    def whole(self, train: float, rollout: float) -> float:
        return train + self.beside + rollout if self.synchronous else max(train + self.beside, rollout)

    def seconds(self, training: frozenset[str]) -> float:
        """Of a step."""
        return self.whole(*self.stages(training))

    def sight(self, step: int = 1, *, errors: tuple[float, float] = (1.0, 1.0), **more) -> switching.Sight:
        """A step under the present arrangement, its two stages longer or shorter by chance."""
        train, rollout = (stage * error for stage, error in zip(self.stages(self.training), errors, strict=True))
        whole = self.whole(train, rollout)
        workers = tuple(
            switching.Hybrid(name, slots, speed, name in self.training)
            for name, (slots, speed) in zip(self.names, self.hybrids, strict=True)
        )
        seen = switching.Sight(
            step=step,
            step_seconds=whole,
            train_seconds=train,
            wait_seconds=0.7 * rollout if self.synchronous else whole - train - self.beside,
            rollout_seconds=rollout,
            core_instances=self.core_instances,
            core_slots=self.core_slots,
            workers=workers,
            move_seconds=self.move,
        )
        return dataclasses.replace(seen, **more)

    def follow(self, decision: switching.SwitchDecision) -> bool:
        """Does what was decided; whether that was anything."""
        if decision.kind == "stay":
            assert decision.workers == ()
            return False
        assert all((worker in self.training) == (decision.kind == "to_rollout") for worker in decision.workers)
        self.training ^= set(decision.workers)
        return True


def decider(world: World, rules: config_lib.ElasticConfig = RULES, horizon: int = 20) -> switching.Switching:
    return switching.Switching(rules, horizon=horizon, synchronous=world.synchronous)


def kinds(world: World, made: switching.Switching, steps: int, first: int = 1, **more) -> list[str]:
    """What it decides over some steps, all of which is done at once."""
    decided = []
    for step in range(first, first + steps):
        decision = made.look(world.sight(step, **more))
        world.follow(decision)
        decided.append(decision.kind)
    return decided


def test_a_run_that_waits_for_training_switches_and_says_why():
    world = World(train=20.0, rollout=40.0, beside=1.0)
    made = decider(world)
    first, second = made.look(world.sight(1)), made.look(world.sight(2))
    assert first.kind == "stay"
    assert first.why.endswith("so say 1 looks in a row, of elastic.patience = 2")
    assert second == switching.SwitchDecision(
        2,
        "to_training",
        ("engine-0",),
        "training takes 20.0 s, rollout 5.0 s, and the trainer waits 0.0 s; with engine-0 in training a step takes "
        "11.0 s instead of 21.0 s, 47.6% less",
        pytest.approx(21.0),
        pytest.approx(11.0),
    )


def test_a_run_that_waits_for_rollout_releases():
    world = World(train=10.0, rollout=80.0, training=frozenset({"engine-0"}))
    assert kinds(world, decider(world), 3) == ["stay", "to_rollout", "stay"]
    assert world.training == frozenset()


def test_of_a_step_as_long_as_rollout_made_it_only_the_time_in_slots_becomes_shorter_with_more():
    sight = dataclasses.replace(World(training=frozenset({"engine-0"})).sight(), rollout_seconds=3.0)
    waits = dataclasses.replace(sight, step_seconds=40.0, wait_seconds=30.0)
    assert switching.predict(sight, {"engine-0"}, synchronous=False) == 10.0
    assert switching.predict(waits, {"engine-0"}, synchronous=False) == 40.0
    assert switching.predict(waits, {}, synchronous=False) == 38.5  # for 37 s, requests used tools or few slots
    full = dataclasses.replace(waits, rollout_seconds=60.0)
    assert switching.predict(full, {}, synchronous=False) == 20.0


def test_stages_that_take_turns_are_weighed_by_their_sum():
    world = World(train=20.0, rollout=40.0, synchronous=True)  # 20 + 5 s; with the worker 10 + 10 s
    assert kinds(world, decider(world), 2) == ["stay", "to_training"]
    world = World(train=20.0, rollout=100.0, synchronous=True)  # 20 + 12.5 s; with the worker 10 + 25 s
    assert kinds(world, decider(world), 5) == ["stay"] * 5


def test_of_several_workers_the_one_switches_first_that_helps_most_and_as_many_as_help():
    world = World(train=20.0, rollout=150.0, hybrids=((8, 0.5), (2, 1.0), (8, 1.0)))  # 20 s; 10 and 7.5 s with one
    assert [made for made in kinds(world, decider(world), 2) if made != "stay"] == ["to_training"]
    assert world.training == {"engine-1"}
    world = World(train=100.0, rollout=40.0, hybrids=((8, 0.5), (2, 1.0), (8, 1.0)), core_slots=100)
    kinds(world, decider(world), 2)
    assert world.training == {"engine-0", "engine-1", "engine-2"}


@pytest.mark.parametrize(("slots", "together"), [(90, 3), (89, 2), (60, 2), (59, 1), (19, 1)])
def test_a_fifth_of_the_slots_at_most_change_sides_together_and_one_worker_always_may(slots, together):
    rules, hybrids = dataclasses.replace(RULES, patience=1), ((6, 1.0),) * 3
    slow_training = World(1_000.0, 1.0, hybrids=hybrids, core_slots=slots - 18)
    slow_rollout = World(1.0, 1e6, hybrids=hybrids, core_slots=slots, training=frozenset(slow_training.names))
    for world, kind in ((slow_training, "to_training"), (slow_rollout, "to_rollout")):
        decision = decider(world, rules).look(world.sight())
        assert (decision.kind, len(decision.workers)) == (kind, together)


def test_a_floor_of_instances_always_rolls_out():
    world = World(train=100.0, rollout=1.0, hybrids=((4, 1.0),) * 3, core_instances=1)
    kinds(world, decider(world, dataclasses.replace(RULES, floor=2)), 30)
    assert len(world.training) == 2
    world = World(train=100.0, rollout=1.0, hybrids=((4, 1.0),) * 3, core_instances=0, core_slots=0)
    kinds(world, decider(world), 30)
    assert len(world.training) == 2


def test_below_the_floor_a_worker_is_released_at_once():
    world = World(train=100.0, rollout=1.0, hybrids=((4, 1.0), (8, 1.0)), training=frozenset({"engine-0", "engine-1"}))
    made = decider(world)
    decision = made.look(world.sight(1, core_instances=0, core_slots=0, disturbed=True))
    assert (decision.kind, decision.workers) == ("to_rollout", ("engine-1",))
    assert decision.why == "0 instances roll out, fewer than elastic.floor = 1"
    world.follow(decision)
    assert kinds(world, made, 1, first=2, core_instances=0, core_slots=0, disturbed=True) == ["stay"]


def test_looks_that_do_not_agree_begin_to_count_anew():
    world = World()
    made = decider(world, dataclasses.replace(RULES, patience=3))
    assert kinds(world, made, 2) == ["stay"] * 2
    assert made.look(world.sight(3, errors=(0.1, 1.0))).kind == "stay"
    assert kinds(world, made, 3, first=4) == ["stay", "stay", "to_training"]


def test_a_look_that_says_the_opposite_begins_to_count_anew():
    world = World(train=20.0, rollout=160.0, hybrids=((4, 1.0),) * 3, training=frozenset({"engine-0"}))
    made = decider(world)
    slow_training, slow_rollout = (10.0, 1.0), (1.0, 10.0)
    for step, errors in enumerate((slow_training, slow_rollout) * 5):
        assert made.look(world.sight(step, errors=errors)).kind == "stay"
    assert made.look(world.sight(10, errors=slow_rollout)).kind == "to_rollout"


def test_looks_at_disturbed_steps_do_not_count_either_way():
    world = World()
    made = decider(world)
    assert kinds(world, made, 5, disturbed=True) == ["stay"] * 5
    assert kinds(world, made, 1, first=6) == ["stay"]
    assert kinds(world, made, 1, first=7, disturbed=True) == ["stay"]
    assert kinds(world, made, 1, first=8) == ["to_training"]


def test_a_worker_that_has_changed_stays_for_the_cooldown():
    world = World()
    made = decider(world, dataclasses.replace(RULES, cooldown=6))
    assert kinds(world, made, 2) == ["stay", "to_training"]
    world.rollout = 1_000.0  # now it were better back
    assert kinds(world, made, 7, first=3) == ["stay"] * 6 + ["to_rollout"]


def test_a_change_has_to_pay_within_the_horizon():
    world = World(move=201.0)  # 10 s saved a step
    decision = [decider(world).look(world.sight(step)) for step in (1, 2)][-1]
    assert decision.kind == "stay"
    assert decision.why.endswith("20 steps would save 200.0 s, and the change costs 201.0 s")
    assert kinds(world, decider(world, horizon=21), 2) == ["stay", "to_training"]


def test_with_nobody_at_rest_all_stay():
    world = World(hybrids=())
    assert "no worker may switch" in decider(world).look(world.sight()).why


def test_each_of_several_changes_is_waited_for_anew():
    world = World(train=20.0, rollout=100.0, hybrids=((4, 1.0),) * 2)  # one trains
    made = decider(world)
    assert kinds(world, made, 2) == ["stay", "to_training"]
    world.train = 100.0  # both
    assert kinds(world, made, 3, first=3) == ["stay", "to_training", "stay"]
    assert len(world.training) == 2


def test_a_switch_that_failed_is_tried_again_after_the_cooldown():
    world = World()
    made = decider(world)
    decided = [made.look(world.sight(step)).kind for step in range(1, 9)]  # nothing of which is done
    assert decided == ["stay", "to_training", "stay", "stay", "stay", "stay", "to_training", "stay"]


SIDES = st.lists(st.tuples(st.integers(1, 8), st.floats(0.1, 2.0)), min_size=1, max_size=4)


@st.composite
def worlds(draw: st.DrawFn, *, alike: bool) -> World:
    hybrids = draw(SIDES)
    if alike:
        hybrids = [hybrids[0]] * len(hybrids)
    made = World(
        train=draw(st.floats(1.0, 100.0)),
        rollout=draw(st.floats(1.0, 1_000.0)),
        beside=draw(st.floats(0.0, 10.0)),
        hybrids=tuple(hybrids),
        core_slots=draw(st.integers(1, 16)),
        synchronous=draw(st.booleans()),
        move=draw(st.sampled_from([0.0, 1.0])),
    )
    made.training = frozenset(draw(st.sets(st.sampled_from(made.names))))
    return made


@hypothesis.given(world=worlds(alike=False))
def test_what_is_predicted_of_another_arrangement_is_what_it_takes(world):
    for size in range(len(world.names) + 1):
        for training in map(frozenset, itertools.combinations(world.names, size)):
            predicted = switching.predict(world.sight(), training, synchronous=world.synchronous)
            assert predicted == pytest.approx(world.seconds(training))


RULES_OF_ANY_KIND = st.builds(
    config_lib.ElasticConfig,
    gain=st.floats(0.01, 0.3),
    patience=st.integers(1, 3),
    cooldown=st.integers(0, 5),
)


@hypothesis.settings(max_examples=150)
@hypothesis.given(world=worlds(alike=True), rules=RULES_OF_ANY_KIND, rng=st.randoms(use_true_random=False))
def test_noise_below_half_the_gain_moves_each_worker_once_at_most(world, rules, rng):
    made, changes = decider(world, rules), 0
    for step in range(1, 81):
        before, error = world.seconds(world.training), 0.49 * rules.gain
        errors = (rng.choice((1 - error, 1 + error)), rng.choice((1 - error, 1 + error)))
        if world.follow(made.look(world.sight(step, errors=errors))):
            assert world.seconds(world.training) < before
            changes += 1
    assert changes <= len(world.names)


@hypothesis.settings(max_examples=100)
@hypothesis.given(world=worlds(alike=False), rules=RULES_OF_ANY_KIND)
@hypothesis.example(  # the worker that would help is not the one that trains most for its slots
    world=World(train=5.0, rollout=128.0, beside=6.0, hybrids=((1, 1.0), (1, 0.25), (2, 1.0)), core_slots=14),
    rules=dataclasses.replace(RULES, gain=0.03125, patience=1, cooldown=0),
)
def test_without_noise_it_ends_where_no_single_change_would_be_worth_it(world, rules):
    world.move = 0.0
    kinds(world, decider(world, rules), 100)
    here = world.seconds(world.training)
    for name in world.names:
        assert world.seconds(world.training ^ {name}) >= here * (1.0 - rules.gain) * (1.0 - 1e-9)


@dataclass
class Deceptive(World):
    """A world whose stages take what a table says, not what slots and speeds promise."""

    table: dict[frozenset[str], tuple[float, float]] = dataclasses.field(default_factory=dict)

    def stages(self, training: frozenset[str]) -> tuple[float, float]:
        return self.table[training]


@hypothesis.settings(max_examples=40)  # 1,200 steps each
@hypothesis.given(
    stages=st.lists(st.tuples(st.floats(1.0, 100.0), st.floats(1.0, 100.0)), min_size=4, max_size=4),
    hybrids=st.lists(st.tuples(st.integers(1, 8), st.floats(0.1, 2.0)), min_size=2, max_size=2),
    synchronous=st.booleans(),
    rules=RULES_OF_ANY_KIND,
)
def test_changes_that_keep_less_than_they_promise_become_ever_rarer(stages, hybrids, synchronous, rules):
    sets = [frozenset(), frozenset({"engine-0"}), frozenset({"engine-1"}), frozenset({"engine-0", "engine-1"})]
    world = Deceptive(
        hybrids=tuple(hybrids), synchronous=synchronous, move=0.0, table=dict(zip(sets, stages, strict=True))
    )
    made = decider(world, rules)
    changes = [sum(kind != "stay" for kind in kinds(world, made, 600, first=first)) for first in (1, 601)]
    assert changes[1] <= min(changes[0], 10)


def test_what_a_change_did_not_keep_under_other_work_is_forgotten():
    world = World(rollout=8.0)
    made = decider(world, dataclasses.replace(RULES, patience=1))
    assert kinds(world, made, 1) == ["to_training"]
    assert kinds(world, made, 1, first=2, errors=(20.0, 20.0)) == ["stay"]  # work has become twenty times as much
    world.rollout = 1_000.0
    assert "to_rollout" in kinds(world, made, 6, first=3)
    world.rollout = 8.0
    assert set(kinds(world, made, 10, first=9)) == {"stay"}
    assert "to_training" in kinds(world, made, 150, first=19)


def test_one_long_step_after_a_change_is_not_held_against_it():
    world = World(rollout=8.0)
    made = decider(world)
    assert kinds(world, made, 2) == ["stay", "to_training"]
    assert kinds(world, made, 1, first=3, errors=(5.0, 1.0)) == ["stay"]
    kinds(world, made, 5, first=4)
    world.rollout = 100.0
    assert "to_rollout" in kinds(world, made, 5, first=9)
    world.rollout = 8.0
    assert "to_training" in kinds(world, made, 9, first=14)


def drift(world: World, step: int) -> None:
    """Rollout's work grows and shrinks again, twice in 200 steps."""
    world.rollout = 40.0 + 200.0 * (1.0 - abs(step % 100 - 50) / 50.0)


def test_it_follows_work_that_drifts_to_and_fro_and_beats_every_fixed_split():
    world = World(hybrids=((4, 1.0),) * 2, beside=1.0)
    sets = [frozenset(some) for size in range(3) for some in itertools.combinations(world.names, size)]
    fixed = dict.fromkeys(sets, 0.0)
    made, spent, best, decided = decider(world), 0.0, 0.0, []
    for step in range(1, 201):
        drift(world, step)
        for training in sets:
            fixed[training] += world.seconds(training)
        spent += world.seconds(world.training)
        best += min(map(world.seconds, sets))
        decided += kinds(world, made, 1, first=step)
    assert decided.count("to_training") >= 2
    assert decided.count("to_rollout") >= 2
    assert spent <= 1.05 * best
    assert spent < min(fixed.values())


@pytest.mark.parametrize(
    ("train", "wait", "whole", "speed", "gain"),
    [(1.07, 2.04, 3.18, 1.78, "4.1%"), (1.15, 1.85, 3.06, 1.60, "0.3%"), (1.08, 1.99, 3.13, 1.84, "0.2%")],
    ids=["step 43", "step 47", "step 50"],
)
def test_a_worker_stays_in_training_if_the_core_alone_would_train_as_long(train, wait, whole, speed, gain):
    """The last phase of configs/elastic_cpu.py: measured steps, all slots in use, and the replica's speed."""
    config = config_lib.ElasticConfig(gain=0.05, patience=1, cooldown=3)
    worker = switching.Hybrid("rollout-1", 16, speed, trains=True)
    made = switching.Switching(config, horizon=10, synchronous=False)
    decision = made.look(switching.Sight(43, whole, train, wait, whole, 1, 16, (worker,)))
    assert decision.kind == "stay"
    assert "elastic.gain = 5% is not reached" in decision.why
    assert decision.then_seconds == pytest.approx(whole * (1 - float(gain.rstrip("%")) / 100), rel=0.01)
