"""Dialogues with tools: calls run side by side, in the order they were written; an output without one is scored."""

import asyncio
from typing import ClassVar

import loop_doubles as doubles
import pytest
import sandboxes

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import dialogue
from libra_jax.rollouts import loop
from libra_jax.tools import toolkit

TASK = protocols.Task("one", {"question": "What is it?", "answer": "42"})


class Slow:
    """Answers after the seconds it is told."""

    name = "slow"
    description = "Answers late."
    parameters: ClassVar = {"type": "object", "properties": {"seconds": {"type": "number"}}, "required": ["seconds"]}
    seen: ClassVar = []

    async def call(self, arguments):
        self.seen.append("begun")
        await asyncio.sleep(arguments["seconds"])
        self.seen.append("done")
        return protocols.ToolReturn(self.name, "success", f"after {arguments['seconds']}")


async def pose(task, box):
    return [protocols.Message("user", task.payload["question"])]


async def score(task, output, box):
    return dialogue.Verdict(float(output == task.payload["answer"]), {"length": len(output)})


def make(**further):
    tools = toolkit.Toolkit(config_lib.ToolsConfig(use=(f"{__name__}:Slow",), **further), config_lib.SandboxConfig())
    return dialogue.Dialogue(tools, pose, score, system="Be brief."), tools


def stepped(*outputs, **further):
    """The first messages, and what each output came to."""

    async def body():
        environment, tools = make(**further)
        async with tools:
            opening = await environment.reset(TASK)
            results = [await environment.step(output) for output in outputs]
            await environment.close()
            return opening, results

    return asyncio.run(body())


def call(seconds):
    return f'<tool_call>{{"name": "slow", "arguments": {{"seconds": {seconds}}}}}</tool_call>'


def test_the_policy_is_told_of_the_tools_in_the_system_message():
    (system, question), _ = stepped()
    assert system.role == "system"
    assert system.content.startswith("Be brief.\n\n# Tools")
    assert '"name": "slow"' in system.content
    assert question == protocols.Message("user", "What is it?")


def test_a_policy_that_knows_the_tools_is_told_nothing_of_them():
    (system, _), _ = stepped(describe=False)
    assert system.content == "Be brief."


def test_an_output_without_a_call_is_scored_with_metrics():
    _, (result,) = stepped("42")
    assert (result.done, result.reward, result.metrics) == (True, 1.0, {"length": 2})


def test_calls_of_one_output_run_side_by_side_and_are_answered_in_order():
    Slow.seen.clear()
    _, (result,) = stepped(call(0.4) + "and" + call(0.3) + call(0.35))
    assert [answer.content for answer in result.tool_returns] == ["after 0.4", "after 0.3", "after 0.35"]
    assert Slow.seen == ["begun"] * 3 + ["done"] * 3
    assert not result.done


def test_what_is_no_call_and_what_is_one_too_many_are_failures_that_the_policy_sees():
    _, (result,) = stepped("<tool_call>{oops</tool_call>" + call(0) + call(0), parallel=2)
    assert [answer.status for answer in result.tool_returns] == ["failure", "success", "failure"]
    assert "no JSON" in result.tool_returns[0].content
    assert "no more than 2 calls" in result.tool_returns[2].content


def test_attempts_beyond_the_sandboxes_wait_for_one_and_see_no_time_out():
    sandboxes.skip_without_bubblewrap()
    limits = loop.Limits(max_turns=3, max_tokens=200, max_context=600, tool_seconds=3.0, temperature=1.0)
    run = '<tool_call>{"name": "python", "arguments": {"code": "import time; time.sleep(1); 42"}}</tool_call>'

    async def attempt(tools):
        return await loop.run_rollout(
            loop.RolloutSetup(
                trajectory=protocols.Trajectory("t", "one"),
                task=TASK,
                tokenizer=doubles.TOKENIZER,
                sampler=doubles.ScriptedSampler([run, "42"]),
                limits=limits,
            ),
            dialogue.Dialogue(tools, pose, score),
        )

    async def body():
        one = config_lib.SandboxConfig(warm=1, most=1, seconds=2.5, start_seconds=20.0, memory_mib=256)
        async with toolkit.Toolkit(config_lib.ToolsConfig(use=("python",), describe=False), one, 2.9) as tools:
            return await asyncio.gather(*(attempt(tools) for _ in range(4)))

    for trajectory in asyncio.run(body()):
        assert (trajectory.turns[0].status, trajectory.reward) == ("success", 1.0)
        assert trajectory.turns[0].tool_seconds < 2.5


def test_an_output_that_calls_nothing_in_the_sandbox_takes_none():
    sandboxes.skip_without_bubblewrap()

    async def body():
        one = config_lib.SandboxConfig(warm=1, most=1, memory_mib=256)
        async with toolkit.Toolkit(config_lib.ToolsConfig(use=("python", f"{__name__}:Slow")), one) as tools:
            environment = dialogue.Dialogue(tools, pose, score)
            await environment.reset(TASK)
            for output in (call(0), "<tool_call>{oops</tool_call>", "42"):
                await environment.ready(output)
                assert not (await tools.sandbox())._places.locked()
            await environment.ready('<tool_call>{"name": "python", "arguments": {}}</tool_call>')
            assert (await tools.sandbox())._places.locked()
            await environment.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("output", "tool", "status"),
    [
        (call(0), "slow", "success"),
        (call(0) + call(9), "slow", "timeout"),
        (call(0) + "<tool_call>x</tool_call>", "call+slow", "failure"),
    ],
    ids=["one", "hangs", "one of two malformed"],
)
def test_a_turn_has_all_its_tools_names_and_the_worst_of_what_came_of_them(output, tool, status):
    async def body():
        environment, tools = make(describe=False)
        sampler = doubles.ScriptedSampler([output, "42"])
        limits = loop.Limits(max_turns=3, max_tokens=200, max_context=600, tool_seconds=0.5, temperature=1.0)
        async with tools:
            trajectory = await loop.run_rollout(
                loop.RolloutSetup(
                    trajectory=protocols.Trajectory("t", "one"),
                    task=TASK,
                    tokenizer=doubles.TOKENIZER,
                    sampler=sampler,
                    limits=limits,
                ),
                environment,
            )
        return trajectory, [event for event in sampler.events if isinstance(event, protocols.CausalState)]

    trajectory, (causal,) = asyncio.run(body())
    assert (trajectory.turns[0].tool, trajectory.turns[0].status) == (tool, status)
    assert (causal.tool, causal.status) == (tool, status)
    assert trajectory.reward == 1.0


def scored(pose, score):
    async def body():
        async with toolkit.Toolkit(config_lib.ToolsConfig(), config_lib.SandboxConfig()) as tools:
            environment = dialogue.Dialogue(tools, pose, score)
            await environment.reset(TASK)
            return await environment.step("42")

    return asyncio.run(body())


async def bare(task, output, box):
    return 0.5


async def unscored(task, output, box):
    return "right"


async def text_posed(task, box):
    return task.payload["question"]


def test_a_score_may_be_a_bare_number_of_an_async_or_a_plain_function():
    assert scored(pose, bare).reward == 0.5
    assert scored(pose, lambda task, output, box: 1).reward == 1.0


def test_a_wrong_score_or_question_names_the_users_function():
    with pytest.raises(
        protocols.EnvironmentCrashed, match=r":unscored, task one: returned 'right'; return dialogue\.V"
    ):
        scored(pose, unscored)
    with pytest.raises(protocols.EnvironmentCrashed, match=r":text_posed, task one: returned str instead of a list"):
        scored(text_posed, bare)
