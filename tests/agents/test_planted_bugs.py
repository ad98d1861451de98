"""Planted bugs: the calls that judge them, their fix, its demonstration, and levels that cannot be."""

import collections
import functools
import json

import pytest
import repairs
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.agents.environments import repo_repair
from libra_jax.agents.repair import planted


def payloads(level, way, count):
    return [payload(level, way, index) for index in range(count)]


@functools.cache  # drawing one takes some milliseconds
def payload(level, way, index):
    return getattr(planted.task_source(level=level), way)(index).payload


@pytest.mark.parametrize("level", planted.LEVELS)
def test_a_demonstration_is_what_the_environment_says_and_is_rewarded(level):
    task = planted.task_source(level=level).task(3)

    async def work(tools):
        environment = repo_repair.environment(tools, prompt="{issue}")
        said = list(await environment.reset(task))
        demonstration = list(environment.demonstration(task))
        for message in demonstration[1::2]:
            result = await environment.step(message.content)
            said.append(message)
            said += [protocols.Message("tool", answer.content) for answer in result.tool_returns]
        await environment.close()
        return said, demonstration, result

    said, demonstration, result = repairs.with_tools(work)
    assert said == demonstration
    assert (result.done, result.reward) == (True, 1.0)


@given(st.integers(0, 10**6), st.sampled_from(planted.LEVELS), st.integers(0, 10**6))
@settings(max_examples=60)
def test_a_planted_bug_is_the_same_each_time_and_its_fix_applies_once(seed, level, index):
    source = planted.task_source(level=level, seed=seed)
    made = source.task(index).payload
    assert made == planted.task_source(level=level, seed=seed).task(index).payload == json.loads(json.dumps(made))
    fix = made["fix"]
    assert made["files"][fix["path"]].count(fix["old"]) == 1
    assert len(made["calls"]) >= 24
    assert made["kind"] in planted.KINDS


def test_every_kind_of_bug_is_planted_and_evaluation_shares_no_repository_with_training():
    for level in planted.LEVELS:
        training, evaluation = (payloads(level, way, 80) for way in ("task", "evaluation_task"))
        solved = [{one["issue"] + one["fix"]["new"] for one in tasks} for tasks in (training, evaluation)]
        assert not solved[0] & solved[1]
        kinds = {one["kind"] for one in training}
        assert kinds == (set(planted._EASY_KINDS) if level == "easy" else {recipe.kind for recipe in planted.RECIPES})


def test_an_easy_bug_has_widths_that_never_change():
    source = planted.task_source(level="easy")
    made = [source.task(index).payload for index in range(50)]
    texts = [(one["issue"], one["files"]["m.py"], one["fix"]["old"], one["fix"]["new"]) for one in made]
    assert len({tuple(map(len, text)) for text in texts}) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"level": "eazy"}, r"task\.arguments\.level: 'eazy'.*did you mean 'easy'"),
        ({"kinds": ("wrong_constnat",)}, r"task\.arguments\.kinds.*did you mean 'wrong_constant'"),
        ({"level": "easy", "kinds": ("missing_case",)}, r"task\.arguments\.kinds: level 'easy' has only"),
        ({"path": "tasks.jsonl"}, r"task\.path"),
    ],
)
def test_bugs_that_cannot_be_planted_are_refused_by_name(arguments, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        planted.task_source(**arguments)


NARROW = {
    "if _starts(text, prefix)": "if prefix != 'zz'",
    "range(len(values) - size + 1)": "range(len(values) - {1: 0, 2: 1, 3: 2}.get(size, 0))",
    "return score >= ": "return score + 0.99 >= ",
}


def test_repairs_that_fit_few_inputs_fail_a_call():
    tried = collections.Counter()
    for payload in payloads("module", "task", 150):
        fixed = payload["fix"]["new"]
        for right in filter(fixed.__contains__, NARROW):
            namespace: dict = {}
            exec(fixed.replace(right, NARROW[right]), namespace)  # our own recipes
            broken = payload["issue"].split("(")[0].strip("`")
            calls = [call for call in payload["calls"] if call["function"].endswith(f":{broken}")]
            assert any(namespace[broken](*call["arguments"]) != call["value"] for call in calls), payload["issue"]
            tried[right] += 1
    assert min(tried[right] for right in NARROW) > 3
