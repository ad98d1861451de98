"""Runs whose rewards are functions: one that hangs or fails delays its own group, and nothing is scored as zero."""

from __future__ import annotations

import asyncio

import coordinator_doubles as doubles
import pytest
import reward_functions

from libra_jax import protocols
from libra_jax.cluster import inprocess
from libra_jax.coordinator import records
from libra_jax.rewards import composition


def run(tmp_path, functions, *, reward=None, make_environment=doubles.TwoTurns, **changes):
    """A whole run on doubles, on the real clock, since functions run on threads; its bench and summary."""
    config = doubles.make_config(reward={"functions": functions, "seconds": 0.3, **(reward or {})}, **changes)

    async def main():
        actors, notes = inprocess.InProcessCluster(shutdown_seconds=5), []
        try:
            async with composition.open_scorer(config.reward, actors, note=notes.append, start_seconds=30) as scorer:
                bench = doubles.Bench(config, tmp_path, reward=scorer, make_environment=make_environment)
                return bench, await bench.coordinator.run()
        finally:
            await actors.shutdown()

    reward_functions.RELEASE.clear()
    try:
        return asyncio.run(main())
    finally:
        reward_functions.let_go()


def of(factory, weight=1.0, **arguments):
    return {"factory": f"reward_functions:{factory}", "weight": weight, "arguments": arguments}


def test_a_function_that_hangs_for_one_prompt_costs_that_group_alone(tmp_path):
    functions = {"slow": of("hanging", prompts=["task-5"]), "length": of("later", 0.001)}
    bench, summary = run(tmp_path, functions, coordinator={"max_staleness": 1}, steps=4)
    assert summary.replaced == {"reward": 1}
    assert sorted(bench.trained["prompts"]) == sorted(f"task-{index}" for index in range(13) if index != 5)
    (note,) = [note for note in bench.recorder.notes if note.startswith("Prompt ")]
    assert note.startswith(
        "Prompt task-5 was replaced (reward): config.reward.functions.slow (reward_functions:hanging), "
    )
    assert "task task-5: it took more than 0.3 s" in note
    assert summary.sentence == (
        "Trained 4 steps on 12 groups. 1 group was replaced (reward 1): config.coordinator.max_replacements = 1 allows "
        "1 x (12 trained + 3 of a step) = 15."
    )
    for _, scalars in bench.recorder.steps:
        assert scalars["reward/slow"] == 0.25
        expected = scalars["agent/odd"] + 0.25 + 0.001 * scalars["reward/length"]
        assert scalars["reward/mean"] == pytest.approx(expected)
        assert scalars["reward/environment"] == scalars["agent/odd"]


def test_an_attempt_whose_reward_failed_is_not_made_anew(tmp_path):
    bench, summary = run(tmp_path, {"bad": of("hanging", prompts=["task-1"])}, reward={"retries": 0, "seconds": 0.2})
    assert summary.replaced == {"reward": 1}
    scalars = [scalars for _, scalars in bench.recorder.steps]
    assert 0 < sum(step["tokens/replaced"] for step in scalars) < 2 * 2 * 32  # two attempts of two outputs, once each


def test_a_reward_that_fails_everywhere_ends_the_run_and_names_the_function(tmp_path):
    with pytest.raises(protocols.LibraError, match=r"ZeroDivisionError: oops.*\(reward 4\).*reward_functions:failing"):
        run(tmp_path, {"bad": of("failing")})


def test_held_out_tasks_are_scored_by_the_same_functions(tmp_path):
    bench, _ = run(
        tmp_path,
        {"length": of("constant", 2.0, value=0.5)},
        reward={"environment_weight": 0.0},
        evaluation={"every": 4, "tasks": 3},
    )
    evaluated = [scalars for _, scalars in bench.recorder.steps if "evaluation/accuracy" in scalars]
    assert [scalars["evaluation/accuracy"] for scalars in evaluated] == [1.0, 1.0]
    assert [scalars["evaluation/reward/length"] for scalars in evaluated] == [0.5, 0.5]


class Solved(doubles.TwoTurns):
    """Every answer is right, however long it is."""

    async def step(self, output: str) -> protocols.StepResult:
        result = await super().step(output)
        return protocols.StepResult(done=True, reward=1.0) if result.done else result


def test_the_filter_compares_rewards_without_their_shaping(tmp_path):
    functions = {"ever_more": of("rising", 0.001)}
    with pytest.raises(protocols.ConfigError, match=r"algorithm\.filter: zero_variance replaces every group of one"):
        doubles.make_config(algorithm={"filter": "zero_variance"}, coordinator={"group_size": 1})
    changes = {"algorithm": {"filter": "zero_variance"}, "make_environment": Solved}
    with pytest.raises(protocols.LibraError, match=r"environment gave.*\(zero_variance 4\) and 0 trained"):
        run(tmp_path / "sum", functions, **changes)
    # Where the functions alone count, the environment's reward says nothing of what a group teaches.
    _, summary = run(tmp_path / "alone", functions, reward={"environment_weight": 0.0}, **changes)
    assert summary.trained == 12


def test_a_checkpoint_keeps_the_environments_own_reward():
    attempt = protocols.Trajectory("task-0/0", "task-0", reward=1.25, environment_reward=1.0, finish="max_seconds")
    group = protocols.Group(0, protocols.Task("task-0", {}), 0, [attempt])
    record = records.encode_group(group)
    kept = records.decode_group(record).trajectories[0]
    assert (kept.environment_reward, kept.finish) == (1.0, "max_seconds"), "what filter and mask go by"
    del record["trajectories"][0]["environment_reward"]  # as checkpoints were before
    assert records.decode_group(record).trajectories[0].environment_reward is None
