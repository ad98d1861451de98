"""Which task comes next and how many rollouts it gets, also after a kill at any moment."""

from __future__ import annotations

import collections
import itertools
import json
import random
from typing import Any

import coordinator_doubles as doubles
import prompt_doubles
import pytest

from libra_jax import protocols
from libra_jax.coordinator import prompts, success
from libra_jax.environments import datasets

TASKS = prompt_doubles.TASKS


def make_config(order: str, budget: str, staleness: int, **changes: Any):
    algorithm = {} if budget == "uniform" else {"budget": budget, "success_window": 8}
    return doubles.make_config(
        steps=8,
        task={"order": order, "tool_seconds": 5.0},
        algorithm=algorithm,
        coordinator={"group_size": 4, "max_staleness": staleness},
        checkpoint={"every": 1},
        **changes,
    )


OWN = "group_functions:all_to_the_first"


@pytest.mark.parametrize(
    ("order", "budget", "staleness"),
    [
        ("sequential", "knapsack", 0),
        ("sequential", "knapsack", 2),
        ("sequential", OWN, 1),
        ("success", "uniform", 1),
        ("success", "knapsack", 0),
        ("success", "knapsack", 2),
    ],
)
def test_killed_at_any_moment_a_run_trains_the_same_groups_as_never_killed(tmp_path, order, budget, staleness):
    config, moments = make_config(order, budget, staleness), random.Random(f"{order}/{budget}/{staleness}")
    whole = prompt_doubles.make_bench(config, tmp_path / "whole")
    assert prompt_doubles.run_for(whole, 1e6)
    seconds = sum(scalars["step/seconds"] for _, scalars in whole.recorder.steps)
    bench = prompt_doubles.run_killed(config, tmp_path / "killed", seconds, moments)
    sizes = bench.trained["sizes"]
    assert sizes == whole.trained["sizes"]
    by_number = [size for _, size in sorted(sizes.values())]
    assert [sum(by_number[first : first + 3]) for first in range(0, 24, 3)] == [12] * 8
    assert (set(by_number) == {4}) == (budget == "uniform")


def test_a_group_in_flight_keeps_its_size(tmp_path):
    config = make_config("sequential", OWN, 1)
    first = prompt_doubles.make_bench(config, tmp_path)
    # The third task's tool takes 1 s, and training 0.5 s.
    assert not prompt_doubles.run_for(first, 2.9)
    (path,) = sorted(tmp_path.glob("checkpoints/*/coordinator.json"))[-1:]
    state = json.loads(path.read_text())
    running = {record["group_id"]: len(record["trajectories"]) for record in state["groups"]["running"]}
    pending = state["prompts"]["pending"]
    assert running
    assert set(running.values()) | {size for _, size in pending} > {2}
    second = prompt_doubles.make_bench(config, tmp_path)
    assert prompt_doubles.run_for(second, 1e6)
    trained = dict(second.trained["sizes"].values())
    assert {number: trained[number] for number in running} == running


def test_knapsack_spends_rollouts_where_results_differ(tmp_path):
    bench = prompt_doubles.make_bench(make_config("sequential", "knapsack", 0), tmp_path)
    assert prompt_doubles.run_for(bench, 1e6)
    steps = [scalars for _, scalars in bench.recorder.steps]
    # The first pass knows nothing, so all groups have the same size.
    assert [(step["groups/rollouts_least"], step["groups/rollouts_most"]) for step in steps[:2]] == [(4, 4)] * 2
    assert max(step["groups/rollouts_most"] for step in steps) > 4


def chosen(config, steps: int, solved: dict[str, float]) -> list[list[str]]:
    """Prompts of each step, where each prompt always has the same share of solved rollouts."""
    rates = success.SuccessRates(config)
    made = prompts.Prompts(config, prompt_doubles.Passes(), rates)
    found, size = [], config.coordinator.groups_per_step
    for position in range(steps * size):
        task, count = made.next(position)
        rollouts = [
            protocols.Trajectory(str(sample), "", reward=float(sample < solved[task.prompt] * count), finish="answered")
            for sample in range(count)
        ]
        rates.add(protocols.Group(position, task, 0, rollouts))
        found += [[]] if position % size == 0 else []
        found[-1].append(task.prompt)
    return found


def with_order(**task: Any):
    return doubles.make_config(coordinator={"group_size": 4}, task={"order": "success", **task})


def flat(steps: list[list[str]]) -> list[str]:
    return list(itertools.chain.from_iterable(steps))


SOLVED = {f"task-{index}-pass0": rate for index, rate in enumerate((0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 0.0))}


def test_tasks_near_the_target_come_most_often_and_every_task_comes_again():
    counts = collections.Counter(flat(chosen(with_order(), 200, SOLVED)))
    assert set(counts) == set(SOLVED)
    assert counts["task-2-pass0"] > counts["task-1-pass0"] > counts["task-0-pass0"]
    assert abs(counts["task-0-pass0"] - counts["task-4-pass0"]) < 20, "these come by exploration alone"
    hard = collections.Counter(flat(chosen(with_order(target_success=0.0, exploration=0.05), 200, SOLVED)))
    assert min(hard["task-0-pass0"], hard["task-6-pass0"]) > hard["task-2-pass0"] > hard["task-4-pass0"]


def test_exploration_alone_is_the_order_of_the_source():
    steps = chosen(with_order(exploration=1.0), 7, SOLVED)
    assert flat(steps) == [f"task-{index % TASKS}-pass0" for index in range(21)]


def test_the_seed_decides_the_choice():
    config = with_order()
    assert chosen(config, 30, SOLVED) == chosen(config, 30, SOLVED)
    other = doubles.make_config(coordinator={"group_size": 4}, task={"order": "success"}, seed=1)
    assert chosen(config, 30, SOLVED) != chosen(other, 30, SOLVED)


def test_steps_larger_than_the_source_pose_tasks_twice():
    config = doubles.make_config(coordinator={"groups_per_step": 10}, task={"order": "success"})
    for step in chosen(config, 5, SOLVED):
        assert set(step) == set(SOLVED)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"task": {"order": "success"}},
            r"task\.order: success .* libra_jax\.examples\.calculator:task_source has no end",
        ),
        ({"algorithm": {"budget": "knapsack"}}, r"algorithm\.budget: knapsack .* has no end, .*; take uniform, or"),
    ],
)
def test_a_source_without_an_end_is_refused_by_its_name(changes, sentence):
    config = doubles.make_config(**changes)
    with pytest.raises(protocols.ConfigError, match=sentence):
        prompts.Prompts(config, doubles.Tasks(), success.SuccessRates(config))


def test_a_stream_whose_length_is_an_error_is_taken_in_its_order():
    class Stream(doubles.Tasks):
        def __len__(self):
            raise TypeError("a stream has no length")

    prompts.check(doubles.make_config(), Stream())


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ({"order": "sucess"}, r"task\.order: .*did you mean 'success'"),
        ({"target_success": 0.7}, r"target_success: 0\.7 has no effect with task\.order=sequential"),
        ({"order": "success", "exploration": 1.5}, r"exploration: must lie in \[0, 1\]"),
    ],
)
def test_settings_of_the_order_are_checked(task, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        doubles.make_config(task=task)


def test_a_table_knows_its_prompts_in_every_pass():
    tasks = datasets.of_rows([{"prompt": str(number)} for number in range(5)], holdout=0.2)
    count = len(tasks)
    first, second = ([tasks.task(index) for index in range(start, start + count)] for start in (0, count))
    assert {task.prompt for task in first} == {task.prompt for task in second} == {task.prompt_id for task in first}
    assert len({task.prompt_id for task in [*first, *second]}) == 2 * count
