"""Several calls of one output: side by side, told apart for the policy, one causal state for the scheduler."""

import asyncio
import dataclasses

import dialogue_doubles
import loop_doubles as doubles
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import reports
from libra_jax.scheduling import registry
from libra_jax.simulator import traces
from libra_jax.telemetry import files, trace

BOTH = "<look>a</look><find>b</find>"


def pair(**find):
    return dialogue_doubles.Clocked(seconds=1.0), dialogue_doubles.Clocked("find", **{"seconds": 2.0, **find})


def test_calls_of_one_output_run_side_by_side_and_are_answered_in_their_order():
    tools = pair()
    trajectory, sampler = dialogue_doubles.attempt([BOTH, "done"], dialogue_doubles.make(*tools), seconds=0.0)
    assert [tool.began for tool in tools] == [[0.0], [0.0]]
    assert doubles.tool_text(trajectory) == "<|tool|>a<|im_end|><|tool|>b<|im_end|><|assistant|>"
    turn = trajectory.turns[0]
    assert (turn.tool, turn.status, turn.payload_tokens) == ("find+look", "success", 7)
    assert turn.tool_seconds == pytest.approx(2.0)
    assert sampler.events[2] == protocols.CausalState("find+look", 7, "success")


def test_the_worst_outcome_is_the_turns():
    trajectory, sampler = dialogue_doubles.attempt(
        ["<look>a</look><find></find><find><text>b</text><c>1</c></find><look>c", "done"],
        dialogue_doubles.make(*pair()),
        limits=dataclasses.replace(doubles.LIMITS, max_tokens=100, max_context=400),
    )
    assert (trajectory.turns[0].tool, trajectory.turns[0].status) == ("call+find+look", "failure")
    assert "error: the call was not closed with </look>" in doubles.tool_text(trajectory)
    assert sampler.events[2].status == "failure"


def test_calls_beyond_the_most_that_run_are_failures():
    trajectory, _ = dialogue_doubles.attempt(
        [BOTH, "done"], dialogue_doubles.make(*pair(), parallel=1), seconds=0.0, limits=doubles.LIMITS
    )
    assert "<|tool|>a<|im_end|><|tool|>error: no more than 1 calls run at once<" in doubles.tool_text(trajectory)


def test_a_call_that_crashes_cancels_the_others_and_leaves_none_behind():
    look, find = pair(error=protocols.WorkerLost("the disk is gone"), seconds=0.5)
    with pytest.raises(protocols.EnvironmentCrashed, match="lost a worker: the disk is gone"):
        dialogue_doubles.attempt([BOTH], dialogue_doubles.make(look, find), seconds=0.0)
    assert (look.ended, find.ended) == (["cancelled"], ["b"])


def test_a_call_that_raises_is_a_failure_beside_what_the_others_returned():
    look, find = pair(error=KeyError("b"), seconds=0.5)
    trajectory, sampler = dialogue_doubles.attempt(
        [BOTH, "done"], dialogue_doubles.make(look, find), seconds=0.0, limits=doubles.LIMITS
    )
    assert "<|tool|>a<|im_end|><|tool|>error: KeyError: 'b'<" in doubles.tool_text(trajectory)
    assert (trajectory.turns[0].status, sampler.events[2].status) == ("failure", "failure")
    assert (trajectory.metrics["raised_calls"], trajectory.reward) == (1.0, 1.0)


def test_a_time_out_names_the_calls_that_had_not_returned():
    look, find = pair(seconds=1000.0)
    trajectory, sampler = dialogue_doubles.attempt([BOTH, "done"], dialogue_doubles.make(look, find), seconds=0.0)
    assert (trajectory.turns[0].tool, trajectory.turns[0].status) == ("find", "timeout")
    assert (look.ended, find.ended) == (["a"], ["cancelled"])
    assert sampler.events[2].tool == "find"


def test_a_call_that_overruns_leaves_what_the_others_returned():
    look, find = pair(seconds=1000.0)
    environment = dialogue_doubles.make(look, find, call_seconds=4.5)
    trajectory, sampler = dialogue_doubles.attempt([BOTH, "done"], environment, seconds=0.0)
    assert doubles.tool_text(trajectory) == "<|tool|>a<|im_end|><|tool|>timeout<|im_end|><|assistant|>"
    turn = trajectory.turns[0]
    assert (turn.tool, turn.status, turn.tool_seconds) == ("find+look", "timeout", pytest.approx(4.5))
    assert (look.ended, find.ended) == (["a"], ["cancelled"])
    assert sampler.events[2] == protocols.CausalState("find+look", turn.payload_tokens, "timeout")
    assert trajectory.reward == 1.0


def test_calls_that_run_one_after_another_took_the_seconds_of_all():
    class Single(dialogue_doubles.Clocked):
        turn = asyncio.Lock()

        async def call(self, arguments):
            async with self.turn:
                answer = await super().call(arguments)
                return dataclasses.replace(answer, seconds=self.seconds)

    tools = Single(seconds=1.0), Single("find", seconds=2.0)
    trajectory, _ = dialogue_doubles.attempt([BOTH, "done"], dialogue_doubles.make(*tools), seconds=0.0)
    assert trajectory.turns[0].tool_seconds == pytest.approx(3.0)


@pytest.mark.parametrize("policy", ["cmlfq", "cmlfq_paper"])
def test_a_trace_of_parallel_calls_replays_and_schedules(tmp_path, policy):
    trajectory, sampler = dialogue_doubles.attempt([BOTH, "done"], dialogue_doubles.make(*pair()))
    trajectory.turns[0].call, trajectory.turns[0].error = "test", "ImportError"
    group = protocols.Group(0, doubles.task_of(), 0, [trajectory])
    file = files.LineFile(tmp_path / trace.TRACE_FILE, pytest.fail)
    file.append(reports.trace_record(trajectory, group, 1))
    file.close()
    replay = traces.load(tmp_path / "trace.jsonl", seed=0, sigma=0.0, max_context=1000)
    (first, last) = replay.script(0, 0).turns
    assert (first.tool, first.status, first.tool_seconds) == ("find+look", "success", pytest.approx(2.0))
    assert (first.call, first.error) == ("test", "ImportError")
    assert (last.tool, last.call, last.error) == (None, "", "")

    scheduler = registry.create(config_lib.SchedulerConfig(policy=policy))
    scheduler.on_instance_change([protocols.Instance("a", 1, 4)], 0.0)
    scheduler.on_arrival(protocols.RequestInfo("t/0", "t", 0, 10, 0, 0), 0.0)
    scheduler.on_tool_call("t/0", 29, 1.0)
    (placed,) = scheduler.on_tool_return("t/0", sampler.events[2], 40, 2.0)
    assert placed.instance == "a"
    scheduler.on_finish("t/0", 34, 3.0)
    assert "find+look" in str(scheduler.snapshot())
