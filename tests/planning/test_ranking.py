"""Plans of a run that simulations rank again, beside the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import planner_cases
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.planning import planner, replanning
from libra_jax.planning.forecast import forecast
from libra_jax.planning.search import ranking

MEASURED = planner.Measured(step=400.0, train=30.0, wait=370.0, slots=448)


class Trials:
    """Simulations whose factors on the predictions the test chooses; they end when the test says so."""

    def __init__(self) -> None:
        self.started: list[Sequence[protocols.Plan]] = []
        self.ended: ranking.Outcome | None = None
        self.closed = 0
        self._work: forecast.Work | None = None

    def start(self, work: forecast.Work, plans: Sequence[protocols.Plan]) -> None:
        self.started.append(plans)
        self._work, self.ended = work, None

    def end(self, slow: Sequence[protocols.Plan] = ()) -> None:
        """Ends the simulations; the steps of `slow` plans take ten times as long as predicted."""
        assert self._work is not None
        work = self._work
        predicted = {plan: work.predict(plan, forecast.Levels()).step for plan in self.started[-1]}
        times = [seconds * (10.0 if plan in slow else 1.0) for plan, seconds in predicted.items()]
        self.ended = ranking.Outcome(tuple(times))

    def outcome(self) -> ranking.Outcome | None:
        return self.ended

    def close(self) -> None:
        self.closed += 1


def steps(made: planner.GlobalPlanner, count: int, begin: int, **changes: int) -> list[replanning.Decision]:
    measured = dataclasses.replace(MEASURED, **changes)
    looks = planner_cases.steps(made, measured, 8_000, count, begin=begin)
    return [decision for decision, _ in looks if decision is not None]


def looking(trials: Trials, **changes: float) -> tuple[planner.GlobalPlanner, int]:
    """Returns a planner whose simulations have begun, and the number of its next step."""
    made = planner_cases.make(trials=trials, simulate_top=2, **changes)
    for step in range(1, 20):
        assert not steps(made, 1, step)
        if trials.started:
            return made, step + 1
    raise AssertionError("no look has begun")


def test_a_look_decides_once_the_simulations_have_ended():
    trials = Trials()
    made, step = looking(trials)
    present, plans = made.plan, trials.started[0]
    assert plans[0] == present, "the plan in force is simulated, too"
    assert 2 <= len(plans) <= 3
    assert not steps(made, 3, step), "the run goes on meanwhile"
    assert made.plan == present
    trials.end()
    (decision,) = steps(made, 1, step + 3)
    assert decision.moved
    assert decision.ranked == f"ranked by simulations of {len(plans)} plans"
    assert decision.line().endswith(f"({decision.ranked})")
    assert decision.record()["ranked"] == decision.ranked
    assert len(trials.started) == 1


def test_the_plan_with_the_shortest_simulated_step_wins():
    trials = Trials()
    made, step = looking(trials)
    present, best, *others = trials.started[0]
    trials.end(slow=[best])
    (decision,) = steps(made, 1, step)
    assert decision.plan != best
    assert decision.plan in (present, *others)


def test_no_move_is_made_if_simulations_show_no_gain():
    trials = Trials()
    made, step = looking(trials)
    present = made.plan
    assert present == planner_cases.NARROW
    trials.end(slow=[plan for plan in trials.started[0] if plan != present])
    (decision,) = steps(made, 1, step)
    assert not decision.moved
    assert [(one.tensor_parallel, one.count) for one in made.plan.rollout] == [(1, 14)], "as before"


def test_if_simulations_fail_the_best_prediction_wins():
    trials = Trials()
    made, step = looking(trials)
    plain = planner_cases.make()
    expected = next(decision for decision in steps(plain, step, 1) if decision is not None)
    trials.ended = ranking.Outcome(failure="the simulations took longer than planner.simulate_seconds = 5")
    (decision,) = steps(made, 1, step)
    assert decision.moved
    assert decision.plan == expected.plan
    assert (
        decision.ranked
        == "ranked by predictions, because the simulations took longer than planner.simulate_seconds = 5"
    )


def test_times_that_are_missing_rank_nothing():
    trials = Trials()
    made, step = looking(trials)
    trials.ended = ranking.Outcome((1.0,))
    (decision,) = steps(made, 1, step)
    assert decision.ranked.startswith("ranked by predictions, because simulations of ")


def test_a_lost_instance_waits_for_no_simulation():
    trials = Trials()
    made, step = looking(trials)
    (decision,) = steps(made, 1, step, lost=1)
    assert trials.closed == 1
    assert decision.ranked == "ranked by predictions, because an instance was lost"
    assert decision.moved


def test_the_next_look_simulates_again():
    trials = Trials()
    made, step = looking(trials)
    trials.end()
    assert steps(made, 1, step)
    trials.ended = None
    assert not steps(made, 8, step + 1)
    assert len(trials.started) == 2


def test_the_end_of_a_run_ends_its_simulations():
    trials = Trials()
    made, _ = looking(trials)
    made.close()
    assert trials.closed == 1


@pytest.mark.parametrize("seconds", [0.0, float("inf")])
def test_a_limit_that_x_refused_by_name(seconds):
    with pytest.raises(protocols.ConfigError, match=r"config\.planner\.simulate_seconds"):
        config_lib.PlannerConfig(simulate_seconds=seconds)
