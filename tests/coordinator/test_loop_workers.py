"""Rollouts on loop workers: what they train, what a loss costs, and what the run reports of them."""

from __future__ import annotations

import asyncio
import collections
import os
import pathlib
import tempfile
import time
import types
import typing

import coordinator_doubles as doubles
import hypothesis
import loop_worker_doubles as workers
import pytest
from hypothesis import strategies

from libra_jax import protocols
from libra_jax.coordinator import loop_workers
from libra_jax.engines import fake_engine
from libra_jax.utils import deadlines

ALL = sorted(f"task-{index}" for index in range(12))


def test_loop_workers_train_the_same_tokens_as_the_coordinators_own_process(tmp_path):
    bench = workers.Bench(doubles.make_config(), tmp_path / "workers")
    bench.run()
    assert doubles.turns_of(bench) == doubles.reference_tokens(tmp_path)


def test_a_run_reports_of_workers_what_it_reports_of_its_own_process(tmp_path):
    config = doubles.make_config(scheduler={"policy": "round_robin"})
    engines = doubles.engine_specs(config, count=3)
    here = doubles.Bench(config, tmp_path / "here", specs=engines)
    there = workers.Bench(config, tmp_path / "there", specs=engines)
    for bench in (here, there):
        bench.run()
    names = (
        "tokens/generated",
        "agent/moves",
        "routing/moves",
        "routing/moved_tokens",
        "routing/judged",
        "reward/mean",
    )

    def total(bench, name):
        return sum(scalars[name] for _, scalars in bench.recorder.steps)

    for name in names:
        assert total(there, name) == pytest.approx(total(here, name)), name
    tracks = [collections.Counter((track, name) for track, name, *_ in bench.recorder.spans) for bench in (here, there)]
    assert {key for key, _ in tracks[0].items()} == {key for key, _ in tracks[1].items()}


def test_rollouts_are_shared_out_evenly(tmp_path):
    bench = workers.Bench(doubles.make_config(), tmp_path, count=3)
    bench.run()
    begun = [made.begun for made in workers.MADE]
    assert sum(begun) == 4 * 3 * 2
    assert max(begun) - min(begun) <= 4


lives = strategies.lists(strategies.floats(0.001, 0.5), max_size=6)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Tokens of every rollout in a run where nothing dies."""
    return doubles.reference_tokens(tmp_path_factory.mktemp("reference"))


EXAMPLES = int(os.environ.get("LIBRA_JAX_LOOP_WORKER_RUNS", "40"))
"""Runs in which workers or engines die, over all tests; with more of them, a drill."""


@hypothesis.settings(max_examples=EXAMPLES // 2)
@hypothesis.given(
    lives=lives,
    staleness=strategies.integers(0, 2),
    stream=strategies.sampled_from(["off", "off", "group"]),
    count=strategies.integers(1, 3),
)
def test_lost_workers_lose_no_group_and_change_no_token(tmp_path_factory, reference, lives, staleness, stream, count):
    config = doubles.make_config(
        coordinator={"max_staleness": staleness},
        rollout={"restarts": 8},
        task={"environment_retries": 50},
        trainer={"stream": stream},
    )
    folder = pathlib.Path(tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp()))
    bench = workers.Bench(config, folder, count=count, lives=lives)
    summary = bench.run()
    assert sorted(bench.trained["prompts"]) == ALL
    assert summary.replaced == {}
    traced = collections.Counter(record["trajectory_id"] for record in bench.recorder.trajectories)
    assert set(traced.values()) == {1}
    assert len(traced) == 24
    assert doubles.turns_of(bench) == reference


@hypothesis.settings(max_examples=EXAMPLES // 2)
@hypothesis.given(
    lives=lives, tokens=strategies.integers(20, 200), stream=strategies.sampled_from(["off", "off", "group"])
)
def test_engines_and_workers_that_die_together_lose_no_group(tmp_path_factory, reference, lives, tokens, stream):
    folder = pathlib.Path(tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp()))
    config = doubles.make_config(
        rollout={"restarts": 20, "generation_retries": 50},
        task={"environment_retries": 50},
        trainer={"stream": stream},
    )
    engines = doubles.engine_specs(config, count=2, fail_after_tokens=tokens)
    bench = workers.Bench(config, folder, lives=lives, specs=engines)
    summary = bench.run()
    assert sorted(bench.trained["prompts"]) == ALL
    assert summary.replaced == {}
    assert doubles.turns_of(bench) == reference


class CrashesOnce(doubles.TwoTurns):
    """Of each task, the first environments break at their first step."""

    crashed: typing.ClassVar[collections.Counter[int]] = collections.Counter()

    async def step(self, output):
        if self.crashed[self._index] < 3:
            self.crashed[self._index] += 1
            raise OSError("injected")
        return await super().step(output)


@hypothesis.settings(max_examples=20)
@hypothesis.given(lives=lives)
def test_environments_that_crash_on_workers_that_die_lose_no_group(tmp_path_factory, lives):
    CrashesOnce.crashed.clear()
    config = doubles.make_config(task={"environment_retries": 50, "retry_seconds": 0.01}, rollout={"restarts": 8})
    bench = workers.Bench(config, tmp_path_factory.mktemp("run"), make_environment=CrashesOnce, lives=lives)
    summary = bench.run()
    assert sorted(bench.trained["prompts"]) == ALL
    assert summary.replaced == {}


def test_a_rollout_that_ends_every_worker_is_replaced(tmp_path):
    class Deadly(doubles.TwoTurns):
        async def step(self, output):
            if self._index == 1:
                for made in workers.MADE:
                    made.die()
                await asyncio.sleep(1.0)
            return await super().step(output)

    config = doubles.make_config(rollout={"restarts": 50}, task={"environment_retries": 2})
    bench = workers.Bench(config, tmp_path, count=2, make_environment=Deadly)
    summary = bench.run()
    assert "task-1" not in bench.trained["prompts"]
    assert summary.replaced["environment"] >= 1
    assert any("loop workers were lost while they ran it" in note for note in bench.recorder.notes)


def test_an_instance_that_others_hear_from_survives_a_silent_stream_of_one_worker(tmp_path):
    class SkipsOne(fake_engine.FakeEngine):
        skipped = False

        async def generate(self, request):
            if request.request_id.startswith("task-0/0") and not SkipsOne.skipped:
                SkipsOne.skipped = True
                await asyncio.sleep(1e6)
            async for delta in super().generate(request):
                yield delta

    def make(**arguments):
        return fake_engine.create(**arguments, kind=SkipsOne)

    class Slow(doubles.TwoTurns):
        tool_seconds = staticmethod(lambda index: 20.0)

    doubles.make_skipping = make
    config = doubles.make_config(deadlines={"first_token": 50.0}, coordinator={"max_staleness": 1})
    specs = [
        protocols.ActorSpec(spec.name, "coordinator_doubles:make_skipping", spec.arguments)
        for spec in doubles.engine_specs(config, count=1)
    ]
    bench = workers.Bench(config, tmp_path, count=3, specs=specs, make_environment=Slow)
    bench.run()
    assert SkipsOne.skipped
    assert sorted(bench.trained["prompts"]) == ALL
    assert not any("engine-0 was lost" in note for note in bench.recorder.notes)


@pytest.mark.parametrize("moved", [False, True])
def test_a_worker_is_not_told_of_new_weights_of_an_instance_that_its_requests_have_left(moved):
    source, target = (types.SimpleNamespace(life=1, client=None, policy_version=0, paused=False) for _ in range(2))
    engines = types.SimpleNamespace(engines={"source": source, "target": target})
    worker = loop_workers._Worker(engines, protocols.ActorSpec("loops-0", "", {}))
    move = protocols.Move("task-0/0", "source", "target", protocols.MoveReason.TOOL_RETURN)
    worker.placed(protocols.Placement("task-0/0", "source"), 1)
    worker.placed(protocols.Placement("task-0/0", "target", move if moved else None), 2)
    worker.commands.clear()
    source.policy_version = 1
    worker.updated("source")
    told = [(each.name, each.policy_version) for each in worker.commands if isinstance(each, protocols.EngineEntry)]
    assert told == []
    worker.clear_place("task-0/0")
    source.policy_version = 2
    worker.updated("source")
    assert len(worker.commands) == len(told)


def test_a_rollout_of_a_lost_worker_goes_on_after_its_last_whole_output(tmp_path):
    stepped = collections.Counter()

    class Slow(doubles.TwoTurns):
        async def step(self, output):
            stepped[self._index, self._turns] += 1
            if self._turns == 0:
                await asyncio.sleep(5.0)  # the worker dies while the tool runs
            return await super().step(output)

    config = doubles.make_config(steps=1, coordinator={"groups_per_step": 1, "group_size": 1})
    bench = workers.Bench(config, tmp_path, count=1, make_environment=Slow, lives=[2.0])
    bench.run()
    (asked,) = [record["turns"][0]["generated_tokens"] for record in bench.recorder.trajectories]
    # The first output was stepped again in a fresh environment, and not sampled again.
    assert stepped[0, 0] == 2
    assert bench.recorder.steps[0][1]["tokens/generated"] == sum(
        turn["generated_tokens"] for turn in bench.recorder.trajectories[0]["turns"]
    )
    assert asked > 0
    assert any("loops-0 was lost" in note and "1 rollouts go on elsewhere" in note for note in bench.recorder.notes)


def test_a_crash_of_an_environment_is_retried_on_its_worker_and_then_replaces_the_group(tmp_path):
    class Crashing(doubles.TwoTurns):
        async def step(self, output):
            if self._index == 1:
                raise OSError("injected")
            return await super().step(output)

    bench = workers.Bench(doubles.make_config(), tmp_path, make_environment=Crashing)
    summary = bench.run()
    assert summary.replaced == {"environment": 1}
    assert "task-1" not in bench.trained["prompts"]
    assert sum(scalars["voids/rollouts"] for _, scalars in bench.recorder.steps) > 0


def test_a_frozen_worker_is_said_while_its_rollouts_wait_and_the_status_agrees(tmp_path, monkeypatch):
    thawed = asyncio.Event()

    async def health(worker):
        if not thawed.is_set():
            await asyncio.sleep(0.5)
        thawed.set()

    async def tell(worker, commands, real=workers.Mortal.tell):
        await thawed.wait()
        await real(worker, commands)

    monkeypatch.setattr(workers.Mortal, "health", health)
    monkeypatch.setattr(workers.Mortal, "tell", tell)
    monkeypatch.setattr(deadlines, "SILENT_SECONDS", 0.2)
    bench = workers.Bench(doubles.make_config(rollout={"health_seconds": 0.05}), tmp_path, count=1)
    bench.run()
    assert any("loops-0 has not answered for 0.2 s" in note for note in bench.recorder.notes), bench.recorder.notes
    assert ("loops-0", "does not answer") in bench.recorder.statuses
    assert [text for name, text in bench.recorder.statuses if name == "loops-0"][-1] != "does not answer"


def test_a_stall_of_the_event_loop_is_no_silence(monkeypatch):
    monkeypatch.setattr(deadlines, "SILENT_SECONDS", 0.2)
    silences = []

    async def body(stall, wait):
        with deadlines.noticing(lambda: silences.append((stall, wait))):
            answer = asyncio.get_running_loop().run_in_executor(None, time.sleep, wait)
            time.sleep(stall)  # noqa: ASYNC251  # user code that blocks the event loop
            await answer

    asyncio.run(body(0.6, 0.3))
    assert silences == []
    asyncio.run(body(0.0, 3.0))
    assert silences == [(0.0, 3.0)]


def test_when_no_worker_can_be_started_again_the_run_ends_with_a_sentence(tmp_path):
    config = doubles.make_config(rollout={"restarts": 1})
    bench = workers.Bench(config, tmp_path, count=1, lives=[0.01, 0.01])
    with pytest.raises(protocols.WorkerLost, match=r"No loop worker is left: the last was loops-0.*restarts"):
        bench.run()


def test_a_stopped_run_goes_on_from_its_checkpoint_with_its_rollouts_on_workers(tmp_path):
    config = doubles.make_config(checkpoint={"every": 1})
    first = workers.Bench(config, tmp_path, lives=[], trainer={})
    original = first.coordinator._train_one_step
    taken = 0

    async def stopping():
        nonlocal taken
        await original()
        taken += 1
        if taken == 2:
            raise protocols.LibraError("stopped by the test")

    first.coordinator._train_one_step = stopping
    with pytest.raises(protocols.LibraError, match="stopped by the test"):
        first.run()
    second = workers.Bench(config, tmp_path)
    second.run()
    assert sorted(second.trained["prompts"]) == ALL


def test_a_run_that_ends_with_rollouts_under_way_waits_for_nothing(tmp_path):
    class Slow(doubles.TwoTurns):
        async def step(self, output):
            await asyncio.sleep(1000.0 if self._index > 5 else 0.1)
            return await super().step(output)

    config = doubles.make_config(steps=2, coordinator={"max_staleness": 1}, deadlines={"shutdown": 500.0})
    bench = workers.Bench(config, tmp_path, make_environment=Slow)
    original = bench.coordinator._train_one_step

    async def failing():
        await original()
        raise protocols.LibraError("stopped by the test")

    bench.coordinator._train_one_step = failing

    async def timed():
        with pytest.raises(protocols.LibraError, match="stopped by the test"):
            await bench.coordinator.run()
        return asyncio.get_running_loop().time()

    assert doubles.run_on_clock(timed()) < 100.0


def test_an_environment_is_closed_on_its_worker_when_its_group_is_dropped(tmp_path):
    closed = collections.Counter()

    class Closing(doubles.TwoTurns):
        async def close(self):
            await asyncio.sleep(0.1)
            closed["closed"] += 1

        async def reset(self, task):
            closed["opened"] += 1
            return await super().reset(task)

    config = doubles.make_config(
        steps=3, coordinator={"groups_per_step": 2, "group_size": 2, "max_staleness": 0, "redundancy": 0.5}
    )
    bench = workers.Bench(config, tmp_path, make_environment=Closing)
    bench.run()
    assert closed["closed"] == closed["opened"] > 12
