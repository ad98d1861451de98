"""Agents of other packages against a scripted model: their loops, tools and scores, each under its own interpreter."""

import json
from pathlib import Path

import harness_doubles
import harness_interpreters
import openenv_server
import pytest

from libra_jax import protocols
from libra_jax.examples import calculator, planted

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

HERE = str(Path(__file__).parents[1] / "common")
OUTSIDE = "libra_jax.examples.outside"
SECONDS = 120.0


def call(name, **arguments):
    """An assistant message that calls one tool."""
    return {"tool_calls": [(name, arguments)]}


# OpenAI Agents SDK ----------------------------------------------------------------------------------------------------


def sdk(write, task):
    python = harness_interpreters.python("openai_agents")
    with harness_doubles.model(write) as model:
        outcome = harness_doubles.run(
            task,
            model,
            callable=f"{OUTSIDE}.agents_sdk:solve",
            python=python,
            fields=["expression", "max_characters"],
            score=f"{OUTSIDE}.agents_sdk:score",
            seconds=SECONDS,
        )
    return outcome, model.asked


def test_an_agent_of_openais_sdk_calls_its_tool_and_answers():
    task = calculator.task_source(levels=["plain"]).task(0)

    def write(messages):
        if messages[-1]["role"] == "user":
            return call("calculator", expression=messages[-1]["content"].strip())
        return messages[-1]["content"]

    outcome, asked = sdk(write, task)
    assert outcome.reward == 1.0
    assert asked[0]["tools"] == ["calculator"]
    assert asked[0]["messages"][0]["content"] == task.payload["expression"].ljust(20)
    assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "tool"]
    assert asked[1]["messages"][-1]["content"] == task.payload["answer"]


def test_a_model_that_never_answers_the_sdk_is_judged_and_no_crash():
    task = calculator.task_source(levels=["plain"]).task(0)
    outcome, asked = sdk(lambda messages: call("calculator", expression="1+1"), task)
    assert (outcome.reward, outcome.metrics["out_of_turns"]) == (0.0, 1.0)
    assert len(asked) == 4
    outcome, _ = sdk(lambda messages: call("no_such_tool"), task)
    assert (outcome.reward, outcome.metrics["misbehaved"]) == (0.0, 1.0)


# mini-swe-agent -------------------------------------------------------------------------------------------------------

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.mark.parametrize("text", [False, True])
def test_mini_swe_agent_repairs_a_planted_bug(text):
    python = harness_interpreters.python("mini_swe_agent")
    task = planted.task_source(level="easy").task(0)
    fix = task.payload["fix"]
    commands = [
        f"cat {fix['path']}",
        f"sed -i 's/{fix['old'].replace('*', chr(92) + '*')}/{fix['new']}/' {fix['path']}",
    ]

    def write(messages):
        done = sum(message["role"] == "assistant" for message in messages)
        command = [*commands, SUBMIT][done]
        if not text:
            return call("bash", command=command)
        return f"THOUGHT: go on\n\n```mswea_bash_command\n{command}\n```"

    with harness_doubles.model(write) as model:
        outcome = harness_doubles.run_with_tools(
            task,
            model,
            callable=f"{OUTSIDE}.mini_swe:solve",
            python=python,
            arguments={"text": text},
            files="files",
            score="tests",
            seconds=SECONDS,
        )
    assert outcome.reward == 1.0
    assert outcome.metrics["agent_steps"] == 3.0
    assert outcome.metrics["submitted"] == 1.0
    assert task.payload["issue"] in json.dumps(model.asked[0]["messages"])
    assert fix["old"] in json.dumps(model.asked[1]["messages"][-1])


# verifiers ------------------------------------------------------------------------------------------------------------


def verifiers(write, seed=1, **arguments):
    python = harness_interpreters.python("verifiers")
    given = {"taskset": {"id": "taskset_of_sums"}, "tasks": 4, "agent": {"harness": {"id": "null"}}, **arguments}
    with harness_doubles.model(write) as model:
        outcome = harness_doubles.run(
            harness_doubles.task(seed=seed),
            model,
            callable=f"{OUTSIDE}.verifiers_v1:solve",
            fields=["seed"],
            python=python,
            search=[HERE],
            arguments=given,
            seconds=SECONDS,
        )
    return outcome, model.asked


def test_a_taskset_of_verifiers_poses_and_scores_its_tasks():
    outcome, asked = verifiers(lambda messages: str(eval(messages[-1]["content"])), seed=7)
    assert outcome.reward == 1.0
    assert outcome.metrics["verifiers/letters"] == 2.0
    assert asked[0]["messages"][-1]["content"] == "3+10"
    outcome, _ = verifiers(lambda messages: "no idea")
    assert outcome.reward == 0.0


def test_an_episode_of_verifiers_that_fails_is_a_crash():
    with pytest.raises(protocols.EnvironmentCrashed, match="could not finish the episode"):
        verifiers(lambda messages: protocols.Refused("limit", "the rollout has used all its turns"))


# OpenEnv --------------------------------------------------------------------------------------------------------------


def test_openenvs_own_client_plays_an_episode():
    python = harness_interpreters.python("openenv")
    words = ["hello", "end"]

    def write(messages):
        return words[sum(message["role"] == "assistant" for message in messages)]

    with openenv_server.echo(python) as url, harness_doubles.model(write) as model:
        outcome = harness_doubles.run(
            harness_doubles.task(seed=3),
            model,
            callable=f"{OUTSIDE}.openenv_client:play",
            fields=["seed"],
            python=python,
            arguments={"url": url, "field": "message", "observe": "text"},
            seconds=SECONDS,
        )
    assert outcome.reward == pytest.approx(0.8)
    assert outcome.metrics["episode_steps"] == 2.0
    assert [message["content"] for message in model.asked[1]["messages"]] == ["ready 3", "hello", "hello"]
