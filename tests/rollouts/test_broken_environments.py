"""Environments that hang, raise or answer nonsense: a tool's time-out is data, all else a crash, never a reward."""

import asyncio
import contextlib
import math
import re
import threading

import loop_doubles as doubles
import pytest

from libra_jax import protocols
from libra_jax.examples import calculator
from libra_jax.rollouts import loop
from libra_jax.simulator import clock
from libra_jax.tools import toolbox


def test_a_tool_that_hangs_returns_timeout_to_the_policy_and_is_cancelled():
    async def step(output):
        if output == "slow":
            await doubles.forever()
        return protocols.StepResult(done=True, reward=0.5)

    environment = doubles.Probe(step)
    environment.running_tool = "search"
    trajectory, sampler = doubles.attempt(["slow", "answer"], environment=environment, limits=doubles.SHORT)
    assert doubles.tool_text(trajectory) == "<|tool|>timeout<|im_end|><|assistant|>"
    assert trajectory.turns[0].status == sampler.events[2].status == "timeout"
    assert trajectory.turns[0].tool_seconds >= doubles.SHORT.tool_seconds
    assert (trajectory.reward, environment.cancelled, environment.closed) == (0.5, 1, 1)


def test_a_step_that_hangs_without_running_a_tool_is_a_crash_not_a_reward_of_zero():
    async def score(_):
        await doubles.forever()

    with pytest.raises(protocols.EnvironmentCrashed, match=r"config\.task\.tool_seconds.*running_tool"):
        doubles.attempt(["answer"], environment=doubles.Probe(score), limits=doubles.SHORT)


class Queueing(doubles.Probe):
    """Waits before each step, which takes a moment."""

    running_tool = "python"

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.waited_for = seconds, []

    async def ready(self, output):
        self.waited_for.append(output)
        await asyncio.sleep(self.seconds)

    async def step(self, output):
        if output == "answer":
            return protocols.StepResult(done=True, reward=1.0)
        return protocols.StepResult(tool_returns=[protocols.ToolReturn("python", "success", "1")])


def test_the_wait_for_what_a_step_needs_is_neither_a_time_out_nor_the_tools_time():
    environment, sampler = Queueing(300.0), doubles.ScriptedSampler(["code", "answer"])
    trajectory = clock.run(doubles.run(sampler=sampler, environment=environment))
    assert environment.waited_for == ["code", "answer"]
    assert (trajectory.turns[0].status, trajectory.turns[0].tool_seconds) == ("success", pytest.approx(0.0))
    assert trajectory.reward == 1.0
    assert sampler.events[:3] == ["sample", "called", protocols.CausalState("python", 4, "success")]


def test_a_wait_past_its_own_deadline_is_a_crash_that_names_the_field():
    environment, sampler = Queueing(700.0), doubles.ScriptedSampler(["code", "answer"])
    with pytest.raises(protocols.EnvironmentCrashed, match=r"waited more than 600 s \(config\.task\.wait_seconds\)"):
        clock.run(doubles.run(sampler=sampler, environment=environment))
    assert environment.closed == 1


def test_a_hung_calculator_names_itself_in_the_causal_state():
    environment = calculator.environment(delay=60.0)
    trajectory, sampler = doubles.attempt(
        ["<tool_call>1+1</tool_call>", "408"], environment=environment, limits=doubles.SHORT
    )
    assert (sampler.events[2].tool, sampler.events[2].status) == ("calculator", "timeout")
    assert trajectory.metrics["rewarded_after_tool"] == 0.0


def test_a_step_deaf_to_cancellation_is_a_crash(monkeypatch):
    monkeypatch.setattr("libra_jax.utils.deadlines.REAP_SECONDS", 0.02)

    async def step(output):
        with contextlib.suppress(asyncio.CancelledError):
            await doubles.forever()
        await doubles.forever()  # ends when the test's event loop does

    environment = doubles.Probe(step)
    with pytest.raises(protocols.EnvironmentCrashed, match="did not end when it was cancelled"):
        doubles.attempt(["x"], environment=environment, limits=doubles.SHORT)
    assert environment.closed == 1


def test_a_reset_that_hangs_is_a_crash():
    environment = doubles.Probe(reset=doubles.forever)
    with pytest.raises(protocols.EnvironmentCrashed, match=r"Probe, task t: reset took more than 0\.05 s"):
        doubles.attempt(["x"], environment=environment, limits=doubles.SHORT)
    assert environment.closed == 1


@pytest.mark.parametrize(
    "reward", [None, math.nan, math.inf, -math.inf, "1", [1.0], 10**400, -(10**5000)], ids=lambda _: ""
)
def test_a_reward_that_is_no_finite_number_is_a_crash_that_names_environment_and_task(reward):
    async def step(output):
        return protocols.StepResult(done=True, reward=reward)

    trajectory = protocols.Trajectory("t/0", "t")
    environment = doubles.Probe(step)
    with pytest.raises(protocols.EnvironmentCrashed, match=r"Probe, task t: step gave the reward .* not a finite"):
        doubles.attempt(["x"], environment=environment, trajectory=trajectory)
    assert trajectory.reward is None
    assert environment.closed == 1


@pytest.mark.parametrize("reward", [1.0, -0.5, True, math.nan, "1", [0.0], 10**400], ids=lambda _: "")
def test_a_reward_before_the_end_of_the_rollout_is_a_crash_not_lost(reward):
    async def step(output):
        return protocols.StepResult(messages=[protocols.Message("user", "go on")], reward=reward)

    with pytest.raises(protocols.EnvironmentCrashed, match=r"step gave the reward .* with done=False; .* add up"):
        doubles.attempt(["x", "y"], environment=doubles.Probe(step))


@pytest.mark.parametrize("reward", [None, 0, 0.0, False])
def test_no_reward_before_the_end_of_the_rollout_may_be_a_zero(reward):
    async def step(output):
        done = output == "y"
        messages = [] if done else [protocols.Message("user", "go on")]
        return protocols.StepResult(messages=messages, done=done, reward=1.0 if done else reward)

    trajectory, _ = doubles.attempt(["x", "y"], environment=doubles.Probe(step))
    assert trajectory.reward == 1.0


@pytest.mark.parametrize("value", ["3", None, [1.0], math.nan, math.inf, 10**400, 10**5000], ids=lambda _: "")
def test_a_metric_that_is_no_finite_number_is_a_crash_that_names_it(value):
    async def step(output):
        return protocols.StepResult(done=True, reward=1.0, metrics={"good": 1.0, "score": value})

    why = r"Probe, task t: step gave the metric 'score' = .*, which is not a finite number$"
    with pytest.raises(protocols.EnvironmentCrashed, match=why):
        doubles.attempt(["x"], environment=doubles.Probe(step))


@pytest.mark.parametrize("metrics", [None, ["score"]])
def test_metrics_that_are_no_mapping_are_a_crash_that_names_environment_and_task(metrics):
    async def step(output):
        return protocols.StepResult(done=True, reward=1.0, metrics=metrics)

    with pytest.raises(protocols.EnvironmentCrashed, match=r"Probe, task t: step gave the metrics .* are no mapping"):
        doubles.attempt(["x"], environment=doubles.Probe(step))


@pytest.mark.parametrize("name", ["", "f1 score", "top-5", "a.b", 'say"', "größe", "line\nbreak", 7])
def test_a_metric_with_an_odd_name_is_a_crash_that_says_what_names_are_made_of(name):
    async def step(output):
        return protocols.StepResult(done=True, reward=1.0, metrics={"good/f1_5": 1.0, name: 1.0})

    why = f"Probe, task t: step gave a metric the name {name!r}; use only letters, digits, _ and /"
    with pytest.raises(protocols.EnvironmentCrashed, match=re.escape(why)):
        doubles.attempt(["x"], environment=doubles.Probe(step))


def returned(**fields):
    return [protocols.ToolReturn(**{"tool": "a", "status": "success", "content": "x", **fields})]


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        (returned(status="great"), "the status 'great'; a status is success, failure, timeout"),
        (returned(status=None), "the status None"),
        (returned(status=["success"]), "the status"),
        (returned(content=5), "whose content is of type int"),
        (returned(tool=None), "whose tool is of type NoneType"),
        (returned(call=1), "whose call is of type int"),
        (returned(error=1), "whose error is of type int"),
        (returned(seconds=math.nan), "whose seconds are nan"),
        ("text", "str instead of a list of protocols.ToolReturn"),
        (None, "NoneType instead of a list"),
        (["text"], "a list of str instead of protocols.ToolReturn"),
    ],
)
def test_returns_that_no_record_can_hold_are_a_crash_of_their_environment(answers, problem):
    async def step(output):
        return protocols.StepResult(tool_returns=answers)

    with pytest.raises(protocols.EnvironmentCrashed, match=f"step gave the StepResult.tool_returns .*{problem}"):
        doubles.attempt(["x"], environment=doubles.Probe(step))


@pytest.mark.parametrize("empty", [[], ()])
def test_a_reset_without_a_message_is_a_crash_not_an_empty_prompt(empty):
    async def reset(task):
        return empty

    with pytest.raises(protocols.EnvironmentCrashed, match="Probe, task t: reset returned no message"):
        doubles.attempt(["x"], environment=doubles.Probe(reset=reset))


class CallsItself(doubles.Probe):
    """Calls a tool that raises, by a toolbox that it makes at its reset."""

    async def reset(self, task):
        self.box = toolbox.Toolbox([Raising()])
        return await super().reset(task)

    async def step(self, output):
        if output == "answer":
            return protocols.StepResult(done=True, reward=1.0)
        return protocols.StepResult(tool_returns=[await self.box.call("raising", {})])


class CallsInAThread(CallsItself):
    """Makes its toolbox in a plain method, which runs on a thread."""

    def reset(self, task):
        self.box = toolbox.Toolbox([Raising()])
        return [protocols.Message("user", "question")]


class Raising:
    name, description, parameters = "raising", "Raises.", {"type": "object"}

    async def call(self, arguments):
        raise OSError("gone")


@pytest.mark.parametrize("kind", [CallsItself, CallsInAThread])
def test_calls_that_raise_are_counted_for_an_environment_that_calls_its_toolbox(kind):
    trajectory, _ = doubles.attempt(["call", "call", "answer"], environment=kind())
    assert trajectory.metrics["raised_calls"] == 2.0
    assert "raised_calls" not in doubles.attempt(["answer"], environment=kind())[0].metrics


def test_an_environment_that_raises_is_a_crash_never_a_reward():
    async def step(output):
        raise KeyError("lost")

    trajectory = protocols.Trajectory("t/0", "t")
    environment = doubles.Probe(step)
    with pytest.raises(
        protocols.EnvironmentCrashed,
        match=r"step raised KeyError: 'lost' \(\S*test_broken_environments\.py, line \d+\)$",
    ):
        doubles.attempt(["x"], environment=environment, trajectory=trajectory)
    assert trajectory.reward is None
    assert environment.closed == 1


def test_a_step_that_answers_nothing_is_a_crash():
    async def step(output):
        return None

    with pytest.raises(protocols.EnvironmentCrashed, match="NoneType instead of a StepResult"):
        doubles.attempt(["x"], environment=doubles.Probe(step))


def test_a_timeout_error_of_the_environments_own_is_a_crash_not_a_deadline():
    async def step(output):
        raise TimeoutError("database")

    with pytest.raises(protocols.EnvironmentCrashed, match="raised TimeoutError: database"):
        doubles.attempt(["x"], environment=doubles.Probe(step))


def test_a_close_that_fails_is_counted_and_the_attempt_stands():
    async def step(output):
        return protocols.StepResult(done=True, reward=1.0, metrics={"score": 3.0})

    async def close():
        raise OSError("gone")

    trajectory, _ = doubles.attempt(["x"], environment=doubles.Probe(step, close=close))
    assert trajectory.reward == 1.0
    assert trajectory.metrics["close_failures"] == 1.0
    assert trajectory.metrics["score"] == 3.0


def test_a_plain_step_that_blocks_times_out_without_blocking_other_attempts():
    blocked = threading.Event()

    class Blocking(doubles.Probe):
        running_tool = "search"

        def step(self, output):
            if output == "slow":
                blocked.wait()
            return protocols.StepResult(done=True, reward=1.0)

    try:
        trajectory, _ = doubles.attempt(["slow", "x"], environment=Blocking(), limits=doubles.SHORT)
    finally:
        blocked.set()
    assert [turn.status for turn in trajectory.turns] == ["timeout", None]
    assert trajectory.reward == 1.0


def test_an_environment_whose_methods_are_plain_functions_works():
    class Plain:
        def reset(self, task):
            return [protocols.Message("user", "q")]

        def step(self, output):
            return protocols.StepResult(done=True, reward=True)

        def close(self):
            pass

    assert doubles.attempt(["x"], environment=Plain())[0].reward == 1.0


@pytest.mark.parametrize("cancels", [1, 2])
def test_what_closes_an_environment_is_cut_off_by_a_second_cancellation_only(cancels):
    closed = []

    async def body():
        stepping, closing, may_close = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def step(output):
            stepping.set()
            await doubles.forever(output)

        async def close():
            closing.set()
            try:
                await may_close.wait()
                closed.append("whole")
            except asyncio.CancelledError:
                closed.append("cut off")
                raise

        environment = doubles.Probe(step, close=close)
        environment.running_tool = "search"
        attempt = asyncio.ensure_future(
            loop.run_rollout(
                loop.RolloutSetup(
                    trajectory=protocols.Trajectory("t/0", "t"),
                    task=doubles.task_of(),
                    tokenizer=doubles.TOKENIZER,
                    sampler=doubles.ScriptedSampler(["slow"]),
                    limits=doubles.LIMITS,
                ),
                environment,
            )
        )
        await stepping.wait()
        attempt.cancel()
        await closing.wait()
        for _ in range(cancels):
            attempt.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        may_close.set()
        await asyncio.wait({attempt})
        assert attempt.cancelled()

    asyncio.run(body())
    assert closed == ["whole" if cancels == 1 else "cut off"]


@pytest.mark.parametrize("error", [protocols.WorkerLost, protocols.DeadlineMissed])
def test_a_sandbox_or_a_server_that_is_lost_is_a_crash_of_the_environment(error):
    async def step(output):
        raise error("the sandbox did not start")

    with pytest.raises(protocols.EnvironmentCrashed, match="Probe, task t: step lost a worker: the sandbox"):
        doubles.attempt(["x"], environment=doubles.Probe(step))


def chat(content):
    return [protocols.Message("user", content)]


WRONG_MESSAGES = {
    "text": ("What is 2+2?", r"str instead of a list of protocols\.Message"),
    "nothing": (None, r"NoneType instead of a list of protocols\.Message"),
    "dicts": ([{"role": "user", "content": "q"}], r"a list of dict instead of a list of protocols\.Message"),
    "chat": (
        chat([{"role": "user"}]),
        "a message whose content is of type list and not a string; if the data set's prompt is a chat",
    ),
    "number": (chat(7), "a message whose content is of type int and not a string$"),
    "role": ([protocols.Message(1, "q")], "a message with the role 1; a role is a string"),
}


@pytest.mark.parametrize(("messages", "problem"), WRONG_MESSAGES.values(), ids=WRONG_MESSAGES)
def test_messages_that_are_none_are_a_crash_that_says_what_to_return(messages, problem):
    async def reset(task):
        return messages

    async def step(output):
        return protocols.StepResult(messages=messages)

    with pytest.raises(protocols.EnvironmentCrashed, match=f":Probe, task t: reset returned {problem}"):
        doubles.attempt(["x"], environment=doubles.Probe(reset=reset))
    with pytest.raises(protocols.EnvironmentCrashed, match=rf"task t: step gave the StepResult\.messages {problem}"):
        doubles.attempt(["x"], environment=doubles.Probe(step))
