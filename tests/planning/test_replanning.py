"""A planner that follows what changes, moves only when it pays, and stays where only noise moves."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax.planning import replanning

RULES = replanning.Rules(period=5, horizon=20, cooldown=5, least_gain=0.05)
EVEN = replanning.Signs(train_seconds=10.0, rollout_seconds=10.0)
PLANS = range(1, 48)
"""Devices that train, of 48."""


class World:
    """Training takes `train` device-seconds, rollout `rollout`; predictions err by `noise`, which the test draws."""

    def __init__(self, train: float = 480.0, rollout: float = 480.0, move: float = 20.0) -> None:
        self.train, self.rollout, self.move = train, rollout, move
        self.noise = dict.fromkeys(PLANS, 1.0)

    def true_seconds(self, plan: int) -> float:
        return max(self.train / plan, self.rollout / (48 - plan))

    def seconds(self, plan: int) -> float:
        return self.true_seconds(plan) * self.noise[plan]

    def best(self) -> int:
        return min(PLANS, key=self.seconds)

    def replanner(self, present: int, rules: replanning.Rules = RULES) -> replanning.Replanner[int]:
        return replanning.Replanner(
            rules, present, best=self.best, seconds=self.seconds, move=lambda first, second: self.move
        )


def signs(world: World, plan: int, **more) -> replanning.Signs:
    return replanning.Signs(world.train / plan, world.rollout / (48 - plan), **more)


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.data(), st.integers(1, 47))
def test_noise_below_the_least_gain_moves_it_once_at_most(data, start):
    world = World()
    made, moves = world.replanner(start), 0
    errors = st.floats(0.98, 1.02)
    for step in range(1, 101):
        if step % RULES.period == 0:
            world.noise = {plan: data.draw(errors) if abs(plan - 24) < 4 or plan == start else 1.02 for plan in PLANS}
        decision = made.after(step, signs(world, made.present))
        moves += decision is not None and decision.moved
    assert moves <= 1
    assert world.true_seconds(made.present) <= 1.1 * min(map(world.true_seconds, PLANS))


def test_it_follows_lengths_that_drift_and_every_move_pays():
    world = World(train=400.0, rollout=200.0)
    made = world.replanner(world.best())
    spent, free, saved, moves = 0.0, 0.0, 0.0, 0
    for step in range(1, 101):
        world.rollout = 200.0 + 18.0 * step
        world.train = 400.0 + 2.0 * step
        spent += world.true_seconds(made.present)
        free += min(map(world.true_seconds, PLANS))
        decision = made.after(step, signs(world, made.present))
        if decision is not None and decision.moved:
            saved += (decision.present_seconds - decision.best_seconds) * RULES.horizon - decision.move_seconds
            moves += 1
    assert 2 <= moves <= 100 / RULES.cooldown
    assert saved > 0
    assert spent <= 1.05 * free
    assert world.true_seconds(made.present) <= 1.05 * min(map(world.true_seconds, PLANS))


def test_a_move_that_would_not_pay_within_the_horizon_is_not_made():
    world = World(move=1e6)
    decision = world.replanner(40).after(5, signs(world, 40))
    assert decision is not None
    assert not decision.moved
    assert decision.line() == (
        "step 5 (every 5 steps): stays: 60.0 s a step now, 20.0 s at best, 1000000.0 s to get there: "
        "20 steps would not pay for the move"
    )


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (replanning.Signs(10.0, 10.0, waiting=50.0, slots=20), "50 requests wait for 20 slots"),
        (replanning.Signs(10.0, 31.0), "rollout takes 3.1 times as long"),
        (replanning.Signs(10.0, 4.0), "training takes 2.5 times as long"),
        (replanning.Signs(10.0, 10.0, lost=2), "2 instances lost"),
    ],
)
def test_it_looks_early_when_something_says_that_the_plan_no_longer_fits(seen, why):
    made = World().replanner(24, replanning.Rules(period=0))
    assert made.after(7, EVEN) is None
    decision = made.after(8, seen)
    assert decision is not None
    assert decision.why.startswith(why)


def test_it_waits_between_moves_unless_an_instance_is_lost():
    world = World()
    made = world.replanner(40)
    first = made.after(5, signs(world, 40))
    assert first is not None
    assert first.moved
    world.rollout = 2_000.0
    assert made.after(6, signs(world, made.present)) is None
    lost = made.after(7, signs(world, made.present, lost=1))
    assert lost is not None
    assert lost.moved


def test_a_cooldown_longer_than_the_period_is_kept_across_a_restart():
    rules, world = replanning.Rules(period=2, cooldown=10), World()
    made, moved = world.replanner(40, rules), []
    for step in range(1, 31):
        if step == 7:
            again = world.replanner(1, rules)
            again.restore(made.present, made.snapshot())
            made = again
        world.train, world.rollout = (480.0, 4_800.0) if step % 4 == 0 else (4_800.0, 480.0)  # never the same for long
        decision = made.after(step, signs(world, made.present))
        assert (decision is not None) == (step % 2 == 0)
        if decision is not None and decision.moved:
            moved.append(step)
    assert moved == [2, 12, 22]


def test_an_imbalance_that_the_last_look_could_not_mend_makes_it_look_no_more():
    made = World().replanner(24, replanning.Rules(period=50))
    slow = replanning.Signs(10.0, 30.0)
    assert [step for step in range(1, 101) if made.after(step, slow)] == [5, 55]
    made = World().replanner(24, replanning.Rules(period=50))
    turned = [made.after(step, slow if step < 20 else replanning.Signs(30.0, 10.0)) for step in range(1, 40)]
    assert [decision.step for decision in turned if decision is not None] == [5, 20]


def test_a_shadow_says_what_it_would_do_and_does_nothing():
    world = World()
    made = world.replanner(40, replanning.Rules(period=5, shadow=True))
    decision = made.after(5, signs(world, 40))
    assert decision is not None
    assert not decision.moved
    assert "would move, as it saves" in decision.reason
    assert made.present == 40
