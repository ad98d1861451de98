"""The loop around an `openai` client: the native environment's prompts, returns and rewards, token for token."""

import asyncio
import dataclasses

import harness_gateway
import pytest
import session_doubles

from libra_jax import harness, protocols
from libra_jax.chat import tokenizers
from libra_jax.examples import calculator
from libra_jax.rollouts import loop

pytest.importorskip("openai")
LOOP = "libra_jax.harness.openai_loop"


def contents(context):
    """The messages of a context, as pairs of a role's mark and a text."""
    parts = [part for part in context.replace("<|im_end|>", "\n\0").split("\0") if part]
    return [part.rstrip("\n") for part in parts]


def asks_then_copies(context):
    """Calls the calculator with the question, and answers with what it returned."""
    *said, last = contents(context)[:-1]
    if not said:
        return f"<tool_call>{last.removeprefix('<|user|>').strip()}</tool_call>"
    returned = last.removeprefix("<|tool|>").strip()
    return "error" if returned.startswith("error") else returned


POLICIES = {
    "asks": asks_then_copies,
    "guesses": lambda context: "42",
    "calls badly": lambda context: "<tool_call>1+<tool_call>",
    "never ends": lambda context: "<tool_call>1+1</tool_call>",
    "rambles": lambda context: "x" * 200,
    "fails": lambda context: "<tool_call>1/0</tool_call>" if "1/0" not in context else "error",
}


async def native(task, write, limits, **arguments):
    trajectory = protocols.Trajectory(f"{task.prompt_id}/0", task.prompt_id)
    return await loop.run_rollout(
        loop.RolloutSetup(
            trajectory=trajectory,
            task=task,
            tokenizer=tokenizers.CharacterTokenizer(),
            sampler=session_doubles.Writer(write),
            limits=limits,
        ),
        calculator.environment(**arguments),
    )


def seen(trajectory):
    """What is trained and scheduled by: everything but times.

    At a limit the native loop still runs the last tool, whose return no one reads. A session never hears of that one.
    """
    turns = [dataclasses.replace(turn, tool_seconds=0.0, start_seconds=0.0) for turn in trajectory.turns]
    if trajectory.finish == "max_turns":
        turns[-1] = dataclasses.replace(turns[-1], tool=None, status=None, payload_tokens=0)
    end = max(at for at, trained in enumerate(trajectory.loss_mask) if trained) + 1
    names = ("token_ids", "sources", "loss_mask", "log_probs", "policy_versions")
    tokens = [getattr(trajectory, name)[:end] for name in names]
    # An output that was cut off is the client's to judge, so the rollout counts as answered.
    finish = trajectory.finish if trajectory.finish != "length" else "answered"
    return (*tokens, turns, trajectory.reward, finish, trajectory.metrics["turns"], trajectory.branches)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stepwise", [False, True])
def test_a_loop_of_a_client_trains_on_the_native_environments_tokens(policy, stepwise):
    arguments = {"stepwise": stepwise, "return_width": 20 if stepwise else 8}
    tasks = calculator.task_source()

    async def body():
        async with harness_gateway.serving() as host:
            for index in (0, 1, 5, 15, 31):  # the last two are calculations that fail
                task = tasks.task(index)
                made = harness.environment(
                    callable=f"{LOOP}:agent",
                    fields=["*"],
                    status=f"{LOOP}:status",
                    arguments={"environment_arguments": arguments},
                )
                found = await harness_gateway.play(made, task, host, POLICIES[policy])
                expected = await native(task, POLICIES[policy], harness_gateway.LIMITS, **arguments)
                assert seen(found) == seen(expected)

    asyncio.run(body())


def test_the_warm_start_demonstrates_the_native_dialogue():
    made = harness.environment(callable=f"{LOOP}:agent", demonstrate=f"{LOOP}:demonstration")
    task = calculator.task_source().task(0)
    assert made.demonstration(task) == calculator.environment().demonstration(task)
    assert not hasattr(harness.environment(callable=f"{LOOP}:agent"), "demonstration")


def test_many_loops_share_one_process():
    async def body():
        async with harness_gateway.serving() as host:
            tasks = [calculator.task_source().task(index) for index in range(64)]
            plays = []
            for task in tasks:
                made = harness.environment(callable=f"{LOOP}:agent", fields=["*"], most=64)
                plays.append(harness_gateway.play(made, task, host, asks_then_copies))
            return await asyncio.gather(*plays)

    assert {trajectory.reward for trajectory in asyncio.run(body())} == {1.0}
