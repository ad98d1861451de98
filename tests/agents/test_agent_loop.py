"""The multi-turn loop: what the policy sees, how attempts end, and that a cut attempt goes on where it stood."""

import asyncio
import contextlib
import copy
import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.agents import calculator, demonstrations, loop, tokenizers

TOKENIZER = tokenizers.CharacterTokenizer()
STOP = TOKENIZER.stop_token_ids[0]
LIMITS = loop.Limits(max_turns=4, max_tokens=40, max_context=200, tool_seconds=5.0, temperature=1.0)


class ScriptedSampler:
    """Plays model outputs by turn, however much of a turn is already there; the log-prob of a token tells its place."""

    def __init__(self, outputs: list[str], stop: bool = True) -> None:
        self.outputs = [[*TOKENIZER.encode(text), *([STOP] if stop else [])] for text in outputs]
        self.events: list[object] = []
        self.requests: list[protocols.SamplingParams] = []

    async def sample(self, trajectory, sampling):
        self.requests.append(sampling)
        start = len(trajectory.token_ids)
        while start and trajectory.sources[start - 1] == protocols.TokenSource.MODEL:
            start -= 1
        turn = sum(
            source != protocols.TokenSource.MODEL and after == protocols.TokenSource.MODEL
            for source, after in zip(trajectory.sources[:start], trajectory.sources[1:start], strict=False)
        )
        have = len(trajectory.token_ids) - start
        tokens = self.outputs[turn][have : have + sampling.max_tokens]
        self.events.append("sample")
        await asyncio.sleep(0)
        places = range(len(trajectory.token_ids), len(trajectory.token_ids) + len(tokens))
        ended = bool(tokens) and tokens[-1] == STOP
        reason = "stop" if ended else "length"
        delta = protocols.TokenDelta(
            tuple(tokens), tuple(-0.01 * place for place in places), (7,) * len(tokens), reason
        )
        trajectory.append_sampled(delta)
        return reason

    async def tool_called(self, trajectory):
        self.events.append("called")

    async def tool_returned(self, trajectory, causal_state):
        self.events.append(causal_state)


def task_of(expression="12*34", answer="408"):
    return protocols.Task("t", {"expression": expression, "answer": answer, "max_characters": 18})


def attempt(outputs, *, task=None, environment=None, limits=LIMITS, trajectory=None, sampler=None, **arguments):
    sampler = sampler or ScriptedSampler(outputs)
    trajectory = trajectory if trajectory is not None else protocols.Trajectory("t/0", "t")
    result = asyncio.run(
        loop.run_attempt(
            trajectory=trajectory,
            task=task or task_of(),
            environment=environment or calculator.environment(prompt_width=0, return_width=0),
            tokenizer=TOKENIZER,
            sampler=sampler,
            limits=limits,
            **arguments,
        )
    )
    assert result is trajectory
    return result, sampler


def check_books(trajectory):
    """Per-token lists agree with each other and with the turns."""
    lengths = {
        len(values)
        for values in (
            trajectory.token_ids,
            trajectory.sources,
            trajectory.loss_mask,
            trajectory.log_probs,
            trajectory.policy_versions,
        )
    }
    assert len(lengths) == 1
    sampled = [source == protocols.TokenSource.MODEL for source in trajectory.sources]
    assert sampled == trajectory.loss_mask
    assert [version != protocols.NO_VERSION for version in trajectory.policy_versions] == sampled
    assert sum(turn.generated_tokens for turn in trajectory.turns) == trajectory.generated_tokens
    shown = sum(source == protocols.TokenSource.TOOL for source in trajectory.sources)
    assert sum(turn.payload_tokens for turn in trajectory.turns) == shown


def test_calling_the_tool_and_copying_its_return_is_rewarded():
    trajectory, sampler = attempt(["<tool_call>12*34</tool_call>", "408"])
    assert TOKENIZER.decode(trajectory.token_ids) == (
        "<|user|>12*34<|im_end|><|assistant|><tool_call>12*34</tool_call><|im_end|>"
        "<|tool|>408<|im_end|><|assistant|>408<|im_end|>"
    )
    assert (trajectory.reward, trajectory.finish) == (1.0, "answered")
    assert trajectory.metrics["tool_success"] == trajectory.metrics["rewarded_after_tool"] == 1.0
    assert sampler.events == ["sample", "called", protocols.CausalState("calculator", 6, "success"), "sample", "called"]
    assert [(turn.tool, turn.status) for turn in trajectory.turns] == [("calculator", "success"), (None, None)]
    check_books(trajectory)


def tool_text(trajectory):
    """What the policy was shown after its outputs."""
    pairs = zip(trajectory.token_ids, trajectory.sources, strict=True)
    return TOKENIZER.decode([token for token, source in pairs if source == protocols.TokenSource.TOOL])


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>12*34",
        "12*34</tool_call>",
        "<tool_call>12*</tool_call>",
        "<tool_call>1</tool_call><tool_call>2</tool_call>",
        "<tool_call>print(1)</tool_call>",
        "<tool_call></tool_call>",
    ],
)
def test_a_malformed_call_is_a_failure_that_the_policy_sees_and_may_mend(call):
    trajectory, sampler = attempt([call, "<tool_call>12*34</tool_call>", "408"])
    assert "<|tool|>error: " in tool_text(trajectory)
    assert [turn.status for turn in trajectory.turns] == ["failure", "success", None]
    assert sampler.events[2].status == "failure"
    assert trajectory.reward == 1.0
    check_books(trajectory)


def test_a_division_by_zero_fails_and_is_answered_with_the_word_error():
    task = task_of("982/(96-96)", "error")
    trajectory, _ = attempt(["<tool_call>982/(96-96)</tool_call>", "error"], task=task)
    assert "error: division by zero" in tool_text(trajectory)
    assert trajectory.reward == 1.0
    assert trajectory.metrics["tool_success"] == trajectory.metrics["rewarded_after_tool"] == 0.0


def test_an_answer_without_a_call_is_scored_but_not_counted_as_after_a_tool():
    trajectory, _ = attempt(["408"])
    assert trajectory.reward == 1.0
    assert trajectory.metrics["rewarded_after_tool"] == trajectory.metrics["tool_calls"] == 0.0


def test_a_wrong_answer_after_a_successful_call_is_not_rewarded():
    trajectory, _ = attempt(["<tool_call>12*34</tool_call>", "409"])
    assert (trajectory.reward, trajectory.finish) == (0.0, "answered")
    assert trajectory.metrics["tool_success"] == 1.0
    assert trajectory.metrics["rewarded_after_tool"] == 0.0


class Probe:
    """An environment whose parts can be replaced; remembers what was called."""

    def __init__(self, step=None, reset=None, close=None):
        self._step, self._reset, self._close = step, reset, close
        self.closed = self.resets = self.cancelled = 0

    async def reset(self, task):
        self.resets += 1
        if self._reset:
            return await self._reset(task)
        return [protocols.Message("user", "q")]

    async def step(self, output):
        try:
            return await self._step(output)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def close(self):
        self.closed += 1
        if self._close:
            await self._close()


async def forever(*_):
    await asyncio.Event().wait()


SHORT = loop.Limits(max_turns=4, max_tokens=40, max_context=200, tool_seconds=0.02, temperature=1.0, reset_seconds=0.05)


def test_a_tool_that_hangs_returns_timeout_to_the_policy_and_is_cancelled():
    async def step(output):
        if output == "slow":
            await forever()
        return protocols.StepResult(done=True, reward=0.5)

    environment = Probe(step)
    environment.running_tool = "search"
    trajectory, sampler = attempt(["slow", "answer"], environment=environment, limits=SHORT)
    assert tool_text(trajectory) == "<|tool|>timeout<|im_end|><|assistant|>"
    assert trajectory.turns[0].status == sampler.events[2].status == "timeout"
    assert trajectory.turns[0].tool_seconds >= SHORT.tool_seconds
    assert (trajectory.reward, environment.cancelled, environment.closed) == (0.5, 1, 1)


def test_a_step_that_hangs_without_running_a_tool_is_a_crash_not_a_reward_of_zero():
    async def score(_):
        await forever()

    with pytest.raises(protocols.EnvironmentCrashed, match=r"config\.task\.tool_seconds.*running_tool"):
        attempt(["answer"], environment=Probe(score), limits=SHORT)


def test_a_hung_calculator_names_itself_in_the_causal_state():
    environment = calculator.environment(delay=60.0)
    trajectory, sampler = attempt(["<tool_call>1+1</tool_call>", "408"], environment=environment, limits=SHORT)
    assert (sampler.events[2].tool, sampler.events[2].status) == ("calculator", "timeout")
    assert trajectory.metrics["rewarded_after_tool"] == 0.0


def test_a_step_deaf_to_cancellation_is_a_crash(monkeypatch):
    monkeypatch.setattr("libra_jax.agents.deadlines.REAP_SECONDS", 0.02)

    async def step(output):
        with contextlib.suppress(asyncio.CancelledError):
            await forever()
        await forever()  # ends when the test's event loop does

    environment = Probe(step)
    with pytest.raises(protocols.EnvironmentCrashed, match="did not end when it was cancelled"):
        attempt(["x"], environment=environment, limits=SHORT)
    assert environment.closed == 1


def test_a_reset_that_hangs_is_a_crash():
    environment = Probe(reset=forever)
    with pytest.raises(protocols.EnvironmentCrashed, match=r"Probe, task t: reset took more than 0\.05 s"):
        attempt(["x"], environment=environment, limits=SHORT)
    assert environment.closed == 1


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, -math.inf, "1", [1.0]])
def test_a_reward_that_is_no_finite_number_is_a_crash_that_names_environment_and_task(reward):
    async def step(output):
        return protocols.StepResult(done=True, reward=reward)

    trajectory = protocols.Trajectory("t/0", "t")
    environment = Probe(step)
    with pytest.raises(protocols.EnvironmentCrashed, match=r"Probe, task t: step gave the reward .* not a finite"):
        attempt(["x"], environment=environment, trajectory=trajectory)
    assert trajectory.reward is None
    assert environment.closed == 1


def test_an_environment_that_raises_is_a_crash_never_a_reward():
    async def step(output):
        raise KeyError("lost")

    trajectory = protocols.Trajectory("t/0", "t")
    environment = Probe(step)
    with pytest.raises(protocols.EnvironmentCrashed, match="step raised KeyError: 'lost'"):
        attempt(["x"], environment=environment, trajectory=trajectory)
    assert trajectory.reward is None
    assert environment.closed == 1


def test_a_step_that_answers_nothing_is_a_crash():
    async def step(output):
        return None

    with pytest.raises(protocols.EnvironmentCrashed, match="NoneType instead of a StepResult"):
        attempt(["x"], environment=Probe(step))


def test_a_timeout_error_of_the_environments_own_is_a_crash_not_a_deadline():
    async def step(output):
        raise TimeoutError("database")

    with pytest.raises(protocols.EnvironmentCrashed, match="raised TimeoutError: database"):
        attempt(["x"], environment=Probe(step))


def test_a_close_that_fails_is_counted_and_the_attempt_stands():
    async def step(output):
        return protocols.StepResult(done=True, reward=1.0, metrics={"score": 3.0})

    async def close():
        raise OSError("gone")

    trajectory, _ = attempt(["x"], environment=Probe(step, close=close))
    assert trajectory.reward == 1.0
    assert trajectory.metrics["close_failures"] == 1.0
    assert trajectory.metrics["score"] == 3.0


def test_a_plain_step_that_blocks_times_out_without_blocking_other_attempts():
    blocked = threading.Event()

    class Blocking(Probe):
        running_tool = "search"

        def step(self, output):
            if output == "slow":
                blocked.wait()
            return protocols.StepResult(done=True, reward=1.0)

    try:
        trajectory, _ = attempt(["slow", "x"], environment=Blocking(), limits=SHORT)
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

    assert attempt(["x"], environment=Plain())[0].reward == 1.0


# Limits ---------------------------------------------------------------------------------------------------------------


def test_an_output_without_a_stop_token_ends_the_attempt_with_reward_zero():
    trajectory, sampler = attempt(["9" * 60])
    assert (trajectory.reward, trajectory.finish) == (0.0, "length")
    assert trajectory.turns[0].generated_tokens == LIMITS.max_tokens
    assert sampler.events == ["sample"]
    check_books(trajectory)


def test_calling_the_tool_until_the_turns_are_used_up_has_reward_zero():
    trajectory, _ = attempt(["<tool_call>1+1</tool_call>"] * 4)
    assert (trajectory.reward, trajectory.finish, len(trajectory.turns)) == (0.0, "max_turns", 4)
    assert trajectory.metrics["answered"] == 0.0
    check_books(trajectory)


@given(st.integers(9, 60))
@settings(max_examples=60, deadline=None)
def test_no_context_outgrows_its_limit(max_context):
    limits = loop.Limits(max_turns=4, max_tokens=40, max_context=max_context, tool_seconds=5.0, temperature=1.0)
    trajectory, sampler = attempt(["<tool_call>12*34</tool_call>", "408"], limits=limits)
    assert len(trajectory.token_ids) <= max_context
    assert all(sampling.max_tokens >= 1 for sampling in sampler.requests)
    whole, _ = attempt(["<tool_call>12*34</tool_call>", "408"])
    assert trajectory.token_ids == whole.token_ids[: len(trajectory.token_ids)]
    fits = max_context >= len(whole.token_ids)
    assert (trajectory.finish, trajectory.reward) == (("answered", 1.0) if fits else ("max_context", 0.0))


def test_a_prompt_that_leaves_no_room_is_never_scored():
    limits = loop.Limits(max_turns=4, max_tokens=40, max_context=8, tool_seconds=5.0, temperature=1.0)
    with pytest.raises(protocols.EnvironmentCrashed, match=r"task t: its prompt of 8 tokens .*max_context = 8"):
        attempt(["x"], limits=limits)


def test_an_engine_that_stops_on_a_foreign_token_is_named():
    class Foreign(ScriptedSampler):
        async def sample(self, trajectory, sampling):
            trajectory.append_sampled(protocols.TokenDelta((99,), (-1.0,), (0,), "stop"))
            return "stop"

    with pytest.raises(protocols.LibraError, match="token 99, which is no stop token"):
        attempt([], sampler=Foreign([]))


# Reward functions -----------------------------------------------------------------------------------------------------


def test_a_reward_function_replaces_the_environments_reward_whether_plain_or_async():
    def plain(task, text):
        return len(text) / 1000 + task.payload["answer"].count("4")

    async def later(task, text):
        await asyncio.sleep(0)
        return plain(task, text)

    text = "<|user|>12*34<|im_end|><|assistant|>no<|im_end|>"
    for function in (plain, later):
        trajectory, _ = attempt(["no"], reward=function)
        assert trajectory.reward == len(text) / 1000 + 1


def test_a_reward_function_scores_attempts_that_never_answered():
    trajectory, _ = attempt(["9" * 60], reward=lambda task, text: 0.25)
    assert (trajectory.reward, trajectory.finish) == (0.25, "length")


def test_a_reward_function_that_raises_or_gives_nonsense_or_hangs_is_a_crash_that_names_it():
    def raises(task, text):
        raise ZeroDivisionError("oops")

    def nonsense(task, text):
        return math.nan

    with pytest.raises(
        protocols.EnvironmentCrashed, match=r"reward .*raises, task t: it raised ZeroDivisionError: oops"
    ):
        attempt(["no"], reward=raises)
    with pytest.raises(protocols.EnvironmentCrashed, match=r"reward .*nonsense, task t: it gave nan"):
        attempt(["no"], reward=nonsense)
    with pytest.raises(protocols.EnvironmentCrashed, match=r"reward .*forever, task t: it took more than 0\.05 s"):
        attempt(["no"], reward=forever, limits=SHORT)


# Resuming -------------------------------------------------------------------------------------------------------------

OUTPUTS = ["<tool_call>12*</tool_call>", "<tool_call>12*34</tool_call>", "408"]
WHOLE, _ = attempt(OUTPUTS)


def cut(trajectory, count):
    """What a kill leaves: the first `count` tokens, and the turns that had been recorded by then."""
    left = copy.deepcopy(trajectory)
    for name in ("token_ids", "sources", "loss_mask", "log_probs", "policy_versions"):
        setattr(left, name, getattr(left, name)[:count])
    left.reward = left.finish = None
    left.metrics = {}
    ends, seen = [], 0
    for place, (token, source) in enumerate(zip(left.token_ids, left.sources, strict=True)):
        if source == protocols.TokenSource.MODEL and token == STOP:
            seen += 1
            ends.append(place)
    left.turns = left.turns[:seen]
    return left


def same(one, two):
    for name in ("token_ids", "sources", "loss_mask", "log_probs", "policy_versions", "reward", "finish", "metrics"):
        assert getattr(one, name) == getattr(two, name), name
    for ours, theirs in zip(one.turns, two.turns, strict=True):
        assert (ours.generated_tokens, ours.tool, ours.status, ours.payload_tokens) == (
            theirs.generated_tokens,
            theirs.tool,
            theirs.status,
            theirs.payload_tokens,
        )


@given(st.integers(0, len(WHOLE.token_ids)))
@settings(max_examples=150, deadline=None)
def test_an_attempt_cut_anywhere_goes_on_to_the_same_end(count):
    left = cut(WHOLE, count)
    resumed, sampler = attempt(OUTPUTS, trajectory=left)
    same(resumed, WHOLE)
    check_books(resumed)
    assert resumed.metrics["replay_differs"] == 0.0
    kept = sum(WHOLE.loss_mask[:count])
    assert sum(sampling.max_tokens for sampling in sampler.requests[:1]) <= LIMITS.max_tokens
    assert sampler.events.count("sample") == sum(
        turn_end > kept for turn_end in [sum(turn.generated_tokens for turn in WHOLE.turns[: k + 1]) for k in range(3)]
    )


@given(st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_retained_tokens_count_against_the_turns_limit(count, max_tokens):
    limits = loop.Limits(max_turns=4, max_tokens=max_tokens, max_context=200, tool_seconds=5.0, temperature=1.0)
    whole, _ = attempt(["9" * 100], limits=limits)
    resumed, _ = attempt(["9" * 100], limits=limits, trajectory=cut(whole, min(count, len(whole.token_ids))))
    same(resumed, whole)
    assert resumed.turns[0].generated_tokens == max_tokens


def test_a_finished_attempt_is_left_as_it_is():
    done = copy.deepcopy(WHOLE)
    resumed, sampler = attempt([], trajectory=done)
    assert resumed == WHOLE
    assert sampler.events == []


def test_a_replay_that_differs_starts_over_and_says_so():
    left = cut(WHOLE, len(WHOLE.token_ids) - 3)
    place = left.sources.index(protocols.TokenSource.TOOL)
    left.token_ids[place + 2] += 1
    resumed, sampler = attempt(OUTPUTS, trajectory=left)
    assert resumed.metrics.pop("replay_differs") == 1.0
    assert resumed.token_ids == WHOLE.token_ids
    assert resumed.reward == 1.0
    assert sampler.events.count("sample") == 3
    check_books(resumed)


def test_retained_tokens_past_the_end_of_the_replayed_attempt_start_it_over():
    async def step(output):
        return protocols.StepResult(done=True, reward=1.0)

    environment = Probe(step)
    limits = loop.Limits(max_turns=4, max_tokens=40, max_context=200, tool_seconds=5.0, temperature=1.0)
    left = protocols.Trajectory("t/0", "t")
    left.append_text(TOKENIZER.render([protocols.Message("user", "q")], first=True, generation_prompt=True), 0)
    left.append_sampled(protocols.TokenDelta((65, STOP), (0.0, 0.0), (1, 1), "stop"))
    left.append_text([5, 66, 1, 4], protocols.TokenSource.TOOL)
    resumed, _ = attempt(["A"], environment=environment, limits=limits, trajectory=left)
    assert resumed.metrics["replay_differs"] == 1.0
    assert environment.resets == 2
    assert TOKENIZER.decode(resumed.token_ids) == "<|user|>q<|im_end|><|assistant|>A<|im_end|>"


def test_the_sampler_is_told_of_calls_only_for_outputs_it_sampled():
    first_end = WHOLE.token_ids.index(STOP, WHOLE.sources.index(protocols.TokenSource.MODEL)) + 1
    _, sampler = attempt(OUTPUTS, trajectory=cut(WHOLE, first_end))
    assert sampler.events[0] == "sample"
    assert sampler.events.count("called") == 2
    assert sum(isinstance(event, protocols.CausalState) for event in sampler.events) == 1


def test_cancelling_an_attempt_closes_its_environment_and_ends_its_step():
    environment = Probe(forever)

    async def main():
        running = asyncio.create_task(
            loop.run_attempt(
                trajectory=protocols.Trajectory("t/0", "t"),
                task=task_of(),
                environment=environment,
                tokenizer=TOKENIZER,
                sampler=ScriptedSampler(["x"]),
                limits=LIMITS,
            )
        )
        for _ in range(20):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1
    assert (environment.cancelled, environment.closed) == (1, 1)


# Demonstrations -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_a_demonstration_is_token_for_token_a_perfect_policys_attempt(index):
    task = calculator.task_source(seed=3).task(index)
    environment = calculator.environment()
    shown = demonstrations.demonstration_trajectory(task, environment, TOKENIZER)
    outputs = [message.content for message in environment.demonstration(task) if message.role == "assistant"]
    live, _ = attempt(outputs, task=task, environment=environment)
    assert (shown.token_ids, shown.sources, shown.loss_mask) == (live.token_ids, live.sources, live.loss_mask)
    assert live.reward == 1.0
    assert len(live.token_ids) <= 100


def test_a_demonstration_that_does_not_end_with_an_answer_is_refused():
    class Mute:
        def demonstration(self, task):
            return [protocols.Message("user", "q"), protocols.Message("assistant", "c"), protocols.Message("tool", "r")]

    with pytest.raises(protocols.EnvironmentCrashed, match="task t: its demonstration must"):
        demonstrations.demonstration_trajectory(task_of(), Mute(), TOKENIZER)
