"""The loop of rollouts that a harness drives: outcomes, limits, crashes, and what is left of the trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import types

import pytest
import session_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rewards import scoring
from libra_jax.rollouts import harness_loop, loop, rollouts
from libra_jax.simulator import clock
from libra_jax.utils import turns

LIMITS = loop.Limits(max_turns=4, max_tokens=40, max_context=200, tool_seconds=50.0, temperature=1.0)
TASK = protocols.Task("task", {"question": "how many"})


class Asking:
    """A harness that runs a function over its gateway's conversation."""

    def __init__(self, gateway: doubles.Directly, body) -> None:
        self._gateway, self._body = gateway, body
        self.closed = 0

    async def run(self, task: protocols.Task, endpoint: protocols.Endpoint) -> protocols.Outcome:
        conversation = self._gateway.open_now[endpoint.secret]

        async def ask(*messages: protocols.Message) -> protocols.Message:
            last = None
            async for item in conversation.reply(protocols.ChatRequest(messages)):
                last = item
            return last.message

        return await self._body(ask)

    async def close(self) -> None:
        self.closed += 1


def run(body, *, writer=None, trajectory=None, reward=None, make=Asking, **limits):
    gateway = doubles.Directly()
    harness = make(gateway, body)
    trajectory = trajectory if trajectory is not None else protocols.Trajectory("task/0", "task")

    async def main() -> None:
        await harness_loop.run_harness(
            loop.RolloutSetup(
                trajectory=trajectory,
                task=TASK,
                tokenizer=doubles.CHARACTERS,
                sampler=writer() if writer else doubles.Writer(lambda context: "seven"),
                limits=dataclasses.replace(LIMITS, **limits),
                reward=reward,
            ),
            harness,
            harness_loop.SessionResources(gateway, doubles.Characters),
        )

    try:
        clock.run(main())
    finally:
        assert harness.closed == 1
        assert not gateway.open_now
    return trajectory


def user(text: str) -> protocols.Message:
    return protocols.Message("user", text)


async def answers(ask) -> protocols.Outcome:
    first = await ask(user("how many"))
    await ask(user("how many"), first, protocols.Message("tool", "7"))
    return protocols.Outcome(0.5, {"tries": 2})


def test_a_finished_harness_gives_the_rollout_its_reward():
    made = run(answers)
    assert (made.reward, made.finish, made.environment_reward) == (0.5, "answered", 0.5)
    assert made.metrics["tries"] == 2
    assert (made.metrics["agent_failed"], made.metrics["hints"]) == (0.0, 0.0), "counted in all, or a mean were 1"
    assert (made.metrics["turns"], made.metrics["tool_calls"], made.metrics["tool_success"]) == (2, 1, 1)


def test_a_harness_that_meets_a_limit_is_scored_zero_under_its_name():
    async def goes_on(ask) -> protocols.Outcome:
        messages = [user("how many")]
        while True:
            messages += [await ask(*messages), user("again")]

    made = run(goes_on)
    assert (made.reward, made.finish, len(made.turns)) == (0.0, "max_turns", 4)


def test_time_that_is_up_ends_the_rollout_by_name():
    async def waits(ask) -> protocols.Outcome:
        await ask(user("how many"))
        await asyncio.sleep(30.0)
        return protocols.Outcome(1.0)

    made = run(waits, rollout_seconds=10.0)
    assert (made.reward, made.finish) == (0.0, "max_seconds")
    assert 10.0 <= made.seconds < 12.0


async def _result() -> protocols.Outcome:
    return protocols.Outcome(1.0)


async def _error() -> protocols.Outcome:
    raise KeyError("gold")


async def _silence() -> protocols.Outcome:
    await asyncio.sleep(10_000.0)
    return protocols.Outcome(1.0)


@pytest.mark.parametrize("reply", [_result, _error, _silence])
def test_time_that_is_up_counts_whatever_the_harness_makes_of_it(reply):
    async def stays(ask) -> protocols.Outcome:
        await ask(user("how many"))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30.0)
        return await reply()

    made = run(stays, rollout_seconds=10.0, reset_seconds=20.0)
    assert (made.reward, made.finish) == (0.0, "max_seconds")


@pytest.mark.parametrize(("before", "setting"), [(False, "tool_seconds"), (True, "reset_seconds")])
def test_a_harness_that_is_silent_for_too_long_has_crashed(before, setting):
    async def hangs(ask) -> protocols.Outcome:
        if not before:
            await ask(user("how many"))
        await asyncio.sleep(10_000.0)
        return protocols.Outcome(1.0)

    with pytest.raises(protocols.EnvironmentCrashed, match=setting):
        run(hangs)


def _raising(error):
    async def raises(ask) -> protocols.Outcome:
        raise error

    return raises


def _returning(value):
    async def returns(ask):
        await ask(user("how many"))
        return value

    return returns


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (_raising(KeyError("gold")), "KeyError: 'gold'"),
        (_raising(protocols.WorkerLost("the sandbox is gone")), "lost a worker"),
        (_returning(1.0), "returned float instead of an Outcome"),
        (_returning(protocols.Outcome(float("nan"))), "not a finite number"),
        (_returning(protocols.Outcome(1.0, {"a metric!": 1.0})), "a metric the name"),
        (_returning(protocols.Outcome(1.0, segment_rewards={5: 1.0})), "segment 5 of 1"),
        (_returning(protocols.Outcome(1.0, segment_rewards={0: float("inf")})), "not a finite number"),
        (_returning(protocols.Outcome(1.0, segment_rewards={0: 0.5})), "the first segment has the rollout's reward"),
    ],
)
def test_a_broken_harness_crashes_by_name(body, says):
    with pytest.raises(protocols.EnvironmentCrashed) as crash:
        run(body)
    assert says in str(crash.value)
    assert "task task" in str(crash.value)


def test_a_wait_for_what_other_rollouts_hold_is_no_silence():
    async def queues(ask) -> protocols.Outcome:
        with turns.queued():
            await asyncio.sleep(500.0)
        await asyncio.sleep(100.0)
        await ask(user("how many"))
        return protocols.Outcome(1.0)

    assert run(queues, reset_seconds=120.0, wait_seconds=600.0).reward == 1.0
    with pytest.raises(protocols.EnvironmentCrashed, match="wait_seconds"):
        run(queues, reset_seconds=120.0, wait_seconds=300.0)


def test_a_harness_whose_requests_cannot_arrive_is_not_silent():
    class Unreachable(Asking):
        """A harness whose gateway is away from the first second to the 99th."""

        async def run(self, task: protocols.Task, endpoint: protocols.Endpoint) -> protocols.Outcome:
            for second, reachable in ((1.0, False), (99.0, True)):
                asyncio.get_running_loop().call_later(second, self._gateway.reachable[endpoint.secret], reachable)
            return await super().run(task, endpoint)

    async def waits(ask) -> protocols.Outcome:
        await ask(user("how many"))
        await asyncio.sleep(99.0 + LIMITS.tool_seconds - 20.0)
        return protocols.Outcome(1.0)

    async def waits_longer(ask) -> protocols.Outcome:
        await ask(user("how many"))
        await asyncio.sleep(99.0 + LIMITS.tool_seconds + 20.0)
        return protocols.Outcome(1.0)

    assert run(waits, make=Unreachable).reward == 1.0
    for body, make in ((waits, Asking), (waits_longer, Unreachable)):
        with pytest.raises(protocols.EnvironmentCrashed, match="tool_seconds"):
            run(body, make=make)


def test_a_harness_that_asks_for_nothing_has_crashed():
    async def silent(ask) -> protocols.Outcome:
        return protocols.Outcome(1.0)

    with pytest.raises(protocols.EnvironmentCrashed, match="without a request to its endpoint"):
        run(silent)


def test_an_error_of_the_engines_is_not_the_harness_fault():
    class Broken(doubles.Writer):
        async def sample(self, segment, sampling, on_tokens=None):
            raise protocols.WorkerLost("no engine is left")

    async def swallows(ask) -> protocols.Outcome:
        try:
            await ask(user("how many"))
        except protocols.WorkerLost:
            return protocols.Outcome(1.0)
        raise AssertionError

    with pytest.raises(protocols.WorkerLost, match="no engine is left"):
        run(swallows, writer=lambda: Broken(lambda context: ""))


def test_a_status_that_breaks_crashes_a_harness_that_goes_on():
    class Reading(Asking):
        def status(self, call, message):
            raise KeyError("returncode")

    async def swallows(ask) -> protocols.Outcome:
        first = await ask(user("how many"))
        try:
            await ask(user("how many"), first, protocols.Message("tool", "7"))
        except protocols.LibraError:
            return protocols.Outcome(0.0)
        raise AssertionError

    with pytest.raises(protocols.EnvironmentCrashed, match="status raised KeyError: 'returncode'"):
        run(swallows, make=Reading)


def test_a_reward_function_sees_the_dialogue_and_replaces_the_reward():
    seen = []

    async def scorer(task: protocols.Task, transcript: scoring.Transcript) -> scoring.Score:
        seen.append(transcript)
        return scoring.Score(0.25, {"reward.own/length": 3.0})

    made = run(answers, reward=scorer)
    (transcript,) = seen
    assert (made.reward, made.environment_reward) == (0.25, 0.5)
    assert [message.role for message in transcript.messages] == ["user", "assistant", "tool", "assistant"]
    assert transcript.answer == "seven"
    assert "how many" in transcript.dialogue
    assert transcript.text.splitlines()[-1] == "seven"
    assert "how many" not in transcript.text
    assert transcript.tools == (protocols.CausalState("tool", made.turns[0].payload_tokens, "success"),)


def test_segments_may_have_rewards_of_their_own():
    async def delegates(ask) -> protocols.Outcome:
        await ask(user("how many"))
        await ask(user("a sub task"))
        return protocols.Outcome(1.0, segment_rewards={1: 0.5})

    made = run(delegates)
    assert [segment.reward for segment in made.segments] == [1.0, 0.5]


def test_segment_rewards_beside_a_reward_function_are_refused():
    async def scorer(task: protocols.Task, transcript: scoring.Transcript) -> scoring.Score:
        return scoring.Score(0.25)

    body = _returning(protocols.Outcome(1.0, segment_rewards={0: 1.0}))
    with pytest.raises(protocols.EnvironmentCrashed, match=r"config\.reward\.functions"):
        run(body, reward=scorer)


def test_a_rollout_that_had_ended_only_closes_its_harness():
    trajectory = protocols.Trajectory("task/0", "task", reward=1.0, finish="answered")
    assert run(_raising(AssertionError("it has ended")), trajectory=trajectory).reward == 1.0


# Voided attempts ----------------------------------------------------------------------------------------------------


class Streams(doubles.Writer):
    """A sampler that also opens and finishes rollouts."""

    def open(self, trajectory, group, version) -> None:
        pass

    def finish(self, trajectory) -> None:
        pass


def attempts(body, retries=3, notes=None):
    """Runs a rollout with its retries. Returns the trajectory and the number of attempts."""
    gateway, made, notes = doubles.Directly(), [], [] if notes is None else notes

    def make():
        made.append(Asking(gateway, body))
        return made[-1]

    run_config = config_lib.RunConfig()
    run_config.task.environment_retries, run_config.task.tool_seconds = retries, 5.0
    context = types.SimpleNamespace(
        config=run_config, clock=lambda: 0.0, recorder=types.SimpleNamespace(note=notes.append)
    )
    agent = rollouts.RolloutAgent(
        make_environment=make,
        tokenizer=doubles.CHARACTERS,
        host=harness_loop.SessionResources(gateway, doubles.Characters),
    )
    trajectory = protocols.Trajectory("task/0", "task")
    order = protocols.RolloutOrder(trajectory, TASK, "group", 0, 1.0)
    clock.run(rollouts.Rollouts(context, agent, Streams(lambda context: "seven")).run(order))
    return trajectory, len(made)


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError(), GeneratorExit()], ids=repr)
def test_an_exit_of_a_harness_is_a_crash_of_it(error):
    async def body(ask) -> protocols.Outcome:
        await ask(user("how many"))
        raise error

    with pytest.raises(protocols.EnvironmentCrashed, match=f"run raised {type(error).__name__}"):
        attempts(body, retries=1)


async def voids(ask) -> protocols.Outcome:
    await ask(user("how many"))
    raise protocols.AttemptVoided("it was killed")


async def hangs(ask) -> protocols.Outcome:
    await ask(user("how many"))
    await asyncio.sleep(10_000)
    return protocols.Outcome(1.0)


@pytest.mark.parametrize("body", [voids, hangs])
@pytest.mark.parametrize(("retries", "expected"), [(3, 2), (1, 2), (0, 1)])
def test_a_second_void_is_scored(body, retries, expected):
    trajectory, made = attempts(body, retries)
    assert (made, trajectory.reward, trajectory.metrics["agent_voided"]) == (expected, 0.0, 1.0)
    assert [turn for segment in trajectory.segments for turn in segment.turns]


def test_the_note_of_a_scored_void_names_its_reason():
    async def unscored(ask) -> protocols.Outcome:
        await ask(user("how many"))
        raise protocols.AttemptVoided(f"the scorer judge, task {TASK.prompt_id}: raised KeyError: 'gold'")

    notes = []
    attempts(unscored, notes=notes)
    assert "the scorer judge, a task: raised KeyError: 'gold'" in notes[-1]


def test_a_void_before_any_output_is_infrastructure():
    async def dies(ask) -> protocols.Outcome:
        raise protocols.AttemptVoided("no such library")

    with pytest.raises(protocols.EnvironmentCrashed, match="no such library"):
        attempts(dies)


def test_a_void_that_happens_once_is_repeated():
    calls = []

    async def once(ask) -> protocols.Outcome:
        calls.append(1)
        return await (voids if len(calls) == 1 else answers)(ask)

    trajectory, made = attempts(once)
    assert (made, trajectory.reward) == (2, 0.5)
    assert trajectory.metrics["agent_voided"] == 0.0, "counted in all, or a mean were 1"
