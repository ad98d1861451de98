"""Tasks of reasoning-gym: posed, scored and held out, with tools and without."""

import asyncio
import json
import sys

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import reasoning_gym as gym
from libra_jax.tools import toolkit


def test_reasoning_gym_poses_scores_and_holds_out():
    pytest.importorskip("reasoning_gym")
    source = gym.task_source(seed=3, name="chain_sum", max_terms=3)
    trained = [source.task(index) for index in range(60)]
    held_out = [source.evaluation_task(index) for index in range(60)]
    asked = [{task.payload["question"] for task in tasks} for tasks in (trained, held_out)]
    assert not asked[0] & asked[1]
    assert trained == [gym.task_source(seed=3, name="chain_sum", max_terms=3).task(index) for index in range(60)]
    json.dumps([dict(task.payload) for task in trained])

    async def attempt(task, output):
        environment = gym.environment(toolkit.Toolkit(config_lib.ToolsConfig(), config_lib.SandboxConfig()))
        (opening,) = await environment.reset(task)
        return opening.content, (await environment.step(output)).reward

    for task in trained[:5]:
        sums = task.payload["question"].rpartition(":")[2].strip(" =")
        assert asyncio.run(attempt(task, f"<think>1</think>{eval(sums)}")) == (task.payload["question"], 1.0)
        assert asyncio.run(attempt(task, "no idea"))[1] < 1.0


def test_reasoning_gym_names_and_arguments_are_checked():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(protocols.ConfigError, match="no task 'chain_sums'; did you mean 'chain_sum'"):
        gym.task_source(name="chain_sums")
    with pytest.raises(protocols.ConfigError, match=r"refuses these for 'chain_sum' .*max_term"):
        gym.task_source(name="chain_sum", max_term=3)


def test_what_reasoning_gym_says_as_it_is_compiled_is_not_shown(tmp_path, monkeypatch, recwarn):
    (tmp_path / "reasoning_gym.py").write_text('KIND = "is"\nif KIND is "literal":\n    pass\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    gym.package.cache_clear()
    try:
        assert gym.package().KIND == "is"
    finally:
        gym.package.cache_clear()
        sys.modules.pop("reasoning_gym")
    assert not [warning for warning in recwarn if issubclass(warning.category, SyntaxWarning)]


def test_a_question_may_be_answered_after_using_a_tool():
    pytest.importorskip("reasoning_gym")
    task = gym.task_source(seed=3, name="chain_sum", max_terms=3).task(0)
    sums = task.payload["question"].rpartition(":")[2].strip(" =")

    async def attempt():
        async with toolkit.Toolkit(config_lib.ToolsConfig(use=("calculator",)), config_lib.SandboxConfig()) as tools:
            environment = gym.environment(tools, system="Be brief.")
            opening = await environment.reset(task)
            call = tools.format.write("calculator", {"expression": sums})
            first = await environment.step(call)
            (returned,) = first.tool_returns
            last = await environment.step(f"<answer>{returned.content}</answer>")
            await environment.close()
            return opening, first, returned, last

    opening, first, returned, last = asyncio.run(attempt())
    assert opening[0].role == "system"
    assert opening[0].content.startswith("Be brief.")
    assert '"calculator"' in opening[0].content
    assert opening[1] == protocols.Message("user", task.payload["question"])
    assert (first.done, returned.tool, returned.status, returned.content) == (
        False,
        "calculator",
        "success",
        str(eval(sums)),
    )
    assert (last.done, last.reward) == (True, 1.0)


def test_without_tools_an_output_that_looks_like_a_call_is_the_answer():
    pytest.importorskip("reasoning_gym")
    task = gym.task_source(name="chain_sum").task(0)

    async def attempt():
        environment = gym.environment(toolkit.Toolkit(config_lib.ToolsConfig(), config_lib.SandboxConfig()))
        await environment.reset(task)
        return await environment.step('<tool_call>{"name": "python", "arguments": {}}</tool_call>')

    result = asyncio.run(attempt())
    assert result.done
    assert result.reward < 1.0
