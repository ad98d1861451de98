"""`algorithm.filter`: which finished groups are replaced, by a user's own function too."""

from __future__ import annotations

import asyncio

import coordinator_doubles as doubles
import pytest

from libra_jax import protocols
from libra_jax.coordinator import filters, success


def bench(tmp_path, name, **arguments):
    config = doubles.make_config(algorithm={"filter": f"group_functions:{name}", "filter_arguments": arguments})
    return doubles.Bench(config, tmp_path)


def test_a_filter_of_ones_own_replaces_groups_and_says_why(tmp_path):
    made = bench(tmp_path, "without_task", index=2)
    summary = made.run()
    assert summary.replaced == {"filter": 1}
    assert sorted(made.trained["prompts"]) == sorted(f"task-{index}" for index in range(13) if index != 2)
    assert sum(scalars.get("groups/replaced_filter", 0) for _, scalars in made.recorder.steps) == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "broken",
            r"config\.algorithm\.filter: the call for task-\d of .* KeyError: .*group_functions\.py, line \d+\)",
        ),
        ("talkative", r"config\.algorithm\.filter: .*talkative returned True for task-\d; return None"),
    ],
)
def test_a_filter_that_fails_ends_the_run_with_its_line(tmp_path, name, sentence):
    with pytest.raises(protocols.LibraError, match=sentence):
        bench(tmp_path, name).run()


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"filter": "zero_varianse"}, r"algorithm\.filter: .*did you mean 'zero_variance'"),
        ({"filter": "group_functions:brokn"}, r"algorithm\.filter: group_functions has no 'brokn'; did you mean"),
        (
            {"filter": "group_functions:without_task", "filter_arguments": {"indx": 1}},
            r"algorithm\.filter_arguments: .*did you mean 'index'",
        ),
        ({"filter": "zero_variance", "filter_arguments": {"index": 1}}, r"filter_arguments: .*takes none"),
    ],
)
def test_a_filter_that_cannot_be_called_is_refused_at_the_start(algorithm, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        filters.make(doubles.make_config(algorithm=algorithm))


@pytest.mark.parametrize(("reward", "succeeds"), [(0.7 + 0.2 + 0.1, True), (0.999, False), (1.5, True)])
def test_a_success_may_miss_its_reward_by_rounding(reward, succeeds):
    config = doubles.make_config()
    rollout = protocols.Trajectory("task-0/0", "task-0", reward=reward, finish="answered")
    group = protocols.Group(0, protocols.Task("task-0", {}), 0, [rollout])
    assert success.outcomes(config, group) == [(rollout, succeeds)]


def test_zero_variance_looks_at_the_environments_reward_alone():
    config = doubles.make_config(algorithm={"filter": "zero_variance"})
    name, zero_variance = filters.make(config)
    rollouts = [
        protocols.Trajectory(
            f"task-0/{sample}", "task-0", reward=1.0 + sample, environment_reward=1.0, finish="answered"
        )
        for sample in range(2)
    ]
    group = protocols.Group(0, protocols.Task("task-0", {}), 0, rollouts)
    assert name == "zero_variance"
    assert zero_variance(group) == "the environment gave every rollout of task-0 the same reward"
    rollouts[0].environment_reward, rollouts[1].environment_reward = 0.1 + 0.2, 0.3
    assert zero_variance(group) is not None, "sums that differ by rounding alone are one reward"
    for other in (0.0, 0.299):
        rollouts[1].environment_reward = other
        assert zero_variance(group) is None


class Exits(doubles.TwoTurns):
    """Raises, for one of the tasks, what would end a task or an event loop."""

    error: BaseException

    async def step(self, output):
        if self._index == 2:
            raise self.error
        return await super().step(output)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(0), GeneratorExit()], ids=repr)
def test_a_group_whose_environment_exits_is_replaced_not_waited_for(tmp_path, monkeypatch, error):
    monkeypatch.setattr(Exits, "error", error, raising=False)
    made = doubles.Bench(doubles.make_config(), tmp_path, make_environment=Exits)
    assert made.run().replaced == {"environment": 1}
    assert any(type(error).__name__ in note for note in made.recorder.notes)
