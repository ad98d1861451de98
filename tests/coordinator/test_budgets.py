"""`algorithm.budget`: how the rollouts of a step are divided among its prompts."""

from __future__ import annotations

import itertools
import json
import math

import coordinator_doubles as doubles
import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.coordinator import budgets, success

RATES = st.floats(0.0, 1.0) | st.sampled_from([0.0, 1.0, 0.5, 1 / 3])


@hypothesis.given(success_rate=RATES, rollouts=st.integers(1, 40))
def test_the_value_is_the_chance_of_a_gradient_times_its_gain(success_rate, rollouts):
    p = success_rate
    mixed = sum(math.comb(rollouts, k) * p**k * (1 - p) ** (rollouts - k) for k in range(1, rollouts))
    assert budgets.value(rollouts, p) == pytest.approx(mixed * p * (1 - p) ** 2, abs=1e-12)


def worth(sizes, rates):
    return math.fsum(budgets.value(size, rate) for size, rate in zip(sizes, rates, strict=True))


@hypothesis.settings(max_examples=200)
@hypothesis.given(rates=st.lists(RATES, min_size=1, max_size=4), least=st.integers(1, 3), data=st.data())
def test_no_other_division_of_a_small_budget_is_worth_more(rates, least, data):
    most = data.draw(st.integers(least, 7))
    total = data.draw(st.integers(least * len(rates), most * len(rates)))
    sizes = budgets.knapsack(rates, total, least, most)
    assert sum(sizes) == total
    assert all(least <= size <= most for size in sizes)
    possible = itertools.product(range(least, most + 1), repeat=len(rates))
    best = max(worth(one, rates) for one in possible if sum(one) == total)
    assert worth(sizes, rates) == pytest.approx(best, abs=1e-12)


@hypothesis.settings(max_examples=30)
@hypothesis.given(rates=st.lists(RATES, min_size=5, max_size=20), mean=st.integers(2, 10))
def test_dynamic_programming_finds_nothing_better_for_a_step(rates, mean):
    least, most, total = 2, 4 * mean, mean * len(rates)
    best = {0: 0.0}
    for rate in rates:
        values = {size: budgets.value(size, rate) for size in range(least, most + 1)}
        further: dict[int, float] = {}
        for (spent, found), (size, one) in itertools.product(best.items(), values.items()):
            if spent + size <= total:
                further[spent + size] = max(further.get(spent + size, 0.0), found + one)
        best = further
    assert worth(budgets.knapsack(rates, total, least, most), rates) == pytest.approx(best[total], abs=1e-12)


def test_solved_and_hopeless_prompts_pay_for_the_others():
    sizes = budgets.knapsack([0.0, 1.0, 0.1, 0.5], 32, 2, 32)
    assert sizes[:2] == [2, 2]
    assert sizes[2] > sizes[3] > 2, "a rare success needs more rollouts than a frequent one"
    # What the others cannot take goes to both alike, and the odd one to the harder prompt.
    assert budgets.knapsack([1.0, 0.0, 0.5], 17, 2, 8) == [4, 5, 8]


def config(**algorithm):
    return doubles.make_config(algorithm=algorithm, coordinator={"group_size": 4, "groups_per_step": 3})


def test_prompts_without_past_rollouts_keep_the_group_size():
    made = budgets.make(config(budget="knapsack"))
    known = [budgets.PromptBudget("a", 1.0, 4.0), budgets.PromptBudget("new"), budgets.PromptBudget("b", 0.4, 4.0)]
    assert made(known) == [2, 4, 6]
    assert made([budgets.PromptBudget("new")] * 3) == [4, 4, 4]
    assert budgets.make(config())(known) == [4, 4, 4]


def test_a_budget_of_ones_own_gets_total_and_bounds():
    name = "group_functions:all_to_the_first"
    made = budgets.make(config(budget=name, budget_most=7, budget_arguments={"first": 6}))
    assert made([budgets.PromptBudget("a"), budgets.PromptBudget("b"), budgets.PromptBudget("c")]) == [6, 4, 2]


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"budget": "knapsak"}, r"algorithm\.budget: .*did you mean 'knapsack'"),
        (
            {"budget": "group_functions:one_too_few"},
            r"algorithm\.budget: .*returned \[4, 4\] for 3 prompts; .* 12 in all",
        ),
        (
            {"budget": "group_functions:dividing_by_zero"},
            r"algorithm\.budget: the call of .*ZeroDivisionError: .* \(.*group_functions\.py, line \d+\)",
        ),
        (
            {"budget": "group_functions:all_to_the_first", "budget_arguments": {"fist": 1}},
            r"algorithm\.budget_arguments: .*did you mean 'first'",
        ),
        ({"budget": "knapsack", "budget_arguments": {"first": 1}}, r"budget_arguments: .*takes none"),
        ({"budget_least": 1}, r"budget_least: 1 has no effect with algorithm\.budget=uniform"),
        ({"budget": "knapsack", "budget_least": 5}, r"coordinator\.group_size: 4 is the mean .* gives 5 to 16"),
        ({"budget": "knapsack", "budget_least": 3, "budget_most": 2}, r"budget_most: must be 0 .* or at least"),
        ({"success_window": 8}, r"success_window: has no effect: nothing looks at success rates"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_at_the_start(algorithm, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        budgets.make(config(**algorithm))


def group(number, prompt, rewards, **changes):
    rollouts = [
        protocols.Trajectory(f"{prompt}/{sample}", prompt, reward=9.0, environment_reward=reward, finish="answered")
        for sample, reward in enumerate(rewards)
    ]
    for rollout in rollouts:
        for name, value in changes.items():
            setattr(rollout, name, value)
    return protocols.Group(number, protocols.Task(f"{prompt}-epoch{number}", {}, repeats=prompt), 0, rollouts)


def test_rates_count_the_environments_reward_in_a_window():
    rates = success.SuccessRates(config(budget="knapsack", success_window=2))
    rates.add(group(1, "a", [0.0, 0.0]))
    rates.add(group(0, "a", [1.0, 1.0]))
    rates.add(group(2, "b", [1.0], finish="max_seconds"))  # masked by task.cut_off
    assert rates.rate("a") is None
    rates.advance(1)
    assert rates.rate("a") == 1.0
    rates.advance(3)
    # The two successes of group 0 weigh (1 - 1/2)^2 each after two more rollouts.
    assert rates.rate("a") == pytest.approx(0.5 / 2.5)
    assert (rates.rate("b"), rates.rollouts("a")) == (None, 2.5)


@hypothesis.given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(1, 5)), max_size=12))
def test_rates_survive_a_checkpoint_bit_for_bit(settled):
    made = config(budget="knapsack", success_window=7)
    rates, kept = success.SuccessRates(made), success.SuccessRates(made)
    for number, (prompt, solved, size) in enumerate(settled):
        rates.add(group(number, prompt, [1.0] * min(solved, size) + [0.0] * max(0, size - solved)))
    rates.advance(len(settled) // 2)
    kept.restore(json.loads(json.dumps(rates.state())))
    assert kept.state() == rates.state()
    for one in (rates, kept):
        one.advance(len(settled))
    assert [kept.rate(prompt) for prompt in "abc"] == [rates.rate(prompt) for prompt in "abc"]


def test_a_run_that_looks_at_no_rate_keeps_none():
    rates = success.SuccessRates(config())
    rates.add(group(0, "a", [1.0]))
    assert rates.state() == {"counts": {}, "later": {}}
