"""Attempts that end at a limit or after a kill, as a whole run sees them: places, shares of endings, notes."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import coordinator_doubles as doubles
import pytest
import test_coordinator_checkpoints as kills
from test_coordinator_dispatch import LONG, engine, trajectory, with_dispatcher

from libra_jax import protocols

# Outputs that are cut off ---------------------------------------------------------------------------------------------


def test_a_sampled_output_tells_of_its_tokens_as_they_come():
    seen = []

    async def test(sampler, live):
        made = trajectory()
        await sampler.sample(made, LONG, lambda: seen.append(made.generated_tokens))
        return made

    assert with_dispatcher(test, [engine()]).generated_tokens == 40
    assert seen == list(range(2, 41, 2))


def test_an_output_that_is_cut_off_keeps_its_tokens_gets_no_more_and_frees_its_place():
    serving = engine(slots=1)

    async def test(sampler, live):
        first, second = trajectory("task-0/0"), trajectory("task-1/1")
        cut = asyncio.ensure_future(sampler.sample(first, LONG))
        waiting = asyncio.ensure_future(sampler.sample(second, LONG))
        await asyncio.sleep(0.11)
        cut.cancel()
        await asyncio.wait({cut})
        kept = first.generated_tokens
        await sampler.tool_called(first)
        assert await waiting == "length"
        assert first.generated_tokens == kept == 10
        sampler.finish("task-0/0")

    with_dispatcher(test, [serving])
    assert serving.most == 1


def test_a_request_that_is_cut_off_while_it_waits_is_not_taken_for_one_passed_over():
    async def test(sampler, live):
        busy, given_up = trajectory("task-0/0"), trajectory("task-1/1")
        held = asyncio.ensure_future(sampler.sample(busy, LONG))
        waits = asyncio.ensure_future(sampler.sample(given_up, LONG))
        await asyncio.sleep(0.05)
        waits.cancel()
        await asyncio.wait({waits})
        await sampler.tool_called(given_up)
        assert await held == "length"
        await sampler.tool_called(busy)
        await asyncio.sleep(5000.0)  # far past every patience with requests that wait beside a free slot
        assert given_up.generated_tokens == 0
        sampler.finish("task-1/1")

    with_dispatcher(test, [engine(slots=1)])


# How attempts end, in a run's metrics ---------------------------------------------------------------------------------


def shares(task, tmp_path, **arguments):
    """The share of each ending in a run of slow engines that never stop but for tasks that end in 3."""
    config = doubles.make_config(task=task)
    specs = doubles.engine_specs(config, script="coordinator_doubles:rambling", **arguments)
    bench = doubles.Bench(config, tmp_path, specs=specs)
    bench.run()
    scalars = [{key: value for key, value in step.items() if "finish/" in key} for _, step in bench.recorder.steps]
    assert len(bench.trained["prompts"]) == 12
    assert all(sum(step.values()) == pytest.approx(1.0) for step in scalars)
    assert all(set(step) == {f"finish/{name}" for name in protocols.FINISHES} for step in scalars)
    return {name: sum(step[f"finish/{name}"] for step in scalars) / len(scalars) for name in protocols.FINISHES}


@pytest.mark.parametrize(
    ("task", "ending"),
    [({}, "length"), ({"max_tokens": 20}, "max_tokens"), ({"max_seconds": 0.2}, "max_seconds")],
)
def test_a_run_reports_the_share_of_each_ending(tmp_path, task, ending):
    found = shares(task, tmp_path, tokens_per_second=100.0)
    assert found == pytest.approx({**dict.fromkeys(protocols.FINISHES, 0.0), "answered": 1 / 12, ending: 11 / 12})


@pytest.mark.parametrize(("task", "masked"), [({}, 11 / 12), ({"cut_off": "zero"}, 0.0)])
def test_a_run_counts_rollouts_that_its_limits_masked(tmp_path, task, masked):
    config = doubles.make_config(task={"max_seconds": 0.2, **task})
    specs = doubles.engine_specs(config, script="coordinator_doubles:rambling", tokens_per_second=100.0)
    bench = doubles.Bench(config, tmp_path, specs=specs)
    bench.run()
    steps = [scalars for _, scalars in bench.recorder.steps]
    assert sum(step["rollout/masked"] for step in steps) / len(steps) == pytest.approx(masked)
    answered = [record for record in bench.recorder.trajectories if record["finish"] == "answered" or not masked]
    trained = sum(turn["generated_tokens"] for record in answered for turn in record["turns"])
    assert sum(step["tokens/trained"] for step in steps) == trained


def test_the_variance_filter_replaces_groups_that_limits_left_nothing_of(tmp_path):
    config = doubles.make_config(task={"max_seconds": 0.2}, algorithm={"filter": "zero_variance"})
    specs = doubles.engine_specs(config, script="coordinator_doubles:rambling", tokens_per_second=100.0)
    with pytest.raises(
        protocols.LibraError, match=r"2 of 2 rollouts of task-\d were cut off .*cut_off=zero.*zero_variance 4"
    ):
        doubles.Bench(config, tmp_path, specs=specs).run()


# Attempts in flight, after a kill -------------------------------------------------------------------------------------


def killed_and_resumed(make_environment, tmp_path):
    """A run that is killed while the last attempts' tools run, and gone on with; the second part of it."""
    config = doubles.make_config(
        steps=3, coordinator={"max_staleness": 2}, checkpoint={"every": 1}, task={"tool_seconds": 500.0}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kills.DiesInStep, "last", 2)
        patch.setattr(doubles, "make_trainer", lambda log: kills.DiesInStep(0.3, 3, log))
        with pytest.raises(protocols.WorkerLost):
            doubles.Bench(config, tmp_path, make_environment=make_environment).run()
    resumed = doubles.Bench(config, tmp_path, make_environment=make_environment)
    resumed.run()
    assert sorted(resumed.trained["prompts"]) == sorted(f"task-{index}" for index in range(9))
    return resumed


class TwoTools(doubles.TwoTurns):
    """Two tool calls, the second one slow for the last task; what the first returns, and from where, is noted."""

    calls: ClassVar[list[int]]

    async def step(self, output: str) -> protocols.StepResult:
        self._turns += 1
        if self._turns > 2:
            return protocols.StepResult(done=True, reward=float(self._turns % 2))
        if self._turns == 1:
            self.calls.append(self._index)
            return protocols.StepResult(tool_returns=[protocols.ToolReturn("look", "success", self.found())])
        await asyncio.sleep(100.0 if self._index == 8 else 0.01)
        return protocols.StepResult(tool_returns=[protocols.ToolReturn("look", "success", "52")])

    def found(self) -> str:
        return "50 51"


def test_attempts_that_answer_otherwise_after_a_kill_begin_anew_and_are_reported(tmp_path):
    class Fickle(TwoTools):
        calls: ClassVar[list[int]] = []

        def found(self) -> str:
            return f"{50 + len(self.calls) % 40} 51"

    resumed = killed_and_resumed(Fickle, tmp_path)
    differs = [scalars["agent/replay_differs"] for _, scalars in resumed.recorder.steps]
    assert max(differs) > 0
    (note,) = [note for note in resumed.recorder.notes if "began again" in note]
    assert note.startswith("Rollout task-8/")
    assert Fickle.calls.count(8) == 4, "two attempts, each before the kill and after it"


def test_attempts_whose_environment_gave_a_snapshot_are_taken_up_without_a_note(tmp_path):
    class Kept(TwoTools):
        calls: ClassVar[list[int]] = []

        async def snapshot(self):
            return {"turns": self._turns}

        async def restore(self, task, state):
            await self.reset(task)
            self._turns = state["turns"]

    resumed = killed_and_resumed(Kept, tmp_path)
    assert all(scalars["agent/replay_differs"] == 0 for _, scalars in resumed.recorder.steps)
    assert not [note for note in resumed.recorder.notes if "began again" in note]
    assert Kept.calls.count(8) == 2, "each of the two attempts called it once, before the kill"
