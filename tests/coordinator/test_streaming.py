"""Steps that the trainer begins while groups of theirs still roll out (`trainer.stream`)."""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import signal

import coordinator_doubles as doubles
import mortal_trainers
import pytest

STEPS = 6


class Uneven(doubles.TwoTurns):
    """Every third task's tools take very long."""

    tool_seconds = staticmethod(lambda index: 5.0 if index % 3 == 2 else 0.01)


def run(tmp_path, staleness: int, **trainer):
    """Returns the bench after its run, and for each call of the trainer what it was given."""
    calls = []

    class Watching(doubles.RecordingTrainer):
        async def accumulate(self, batch):
            running = set(bench.coordinator._parts.groups.running)
            calls.append(("accumulate", batch.policy_version, [one.group_id for one in batch.groups], running))
            await super().accumulate(batch)

        async def train_step(self, batch, shares=()):
            calls.append(("train_step", batch.policy_version, [one.group_id for one in batch.groups], batch.begun))
            return await super().train_step(batch, shares)

    config = doubles.make_config(steps=STEPS, coordinator={"max_staleness": staleness}, trainer=trainer)
    bench = doubles.Bench(config, tmp_path, make_environment=Uneven)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "make_trainer", lambda log: Watching(0.05, 3, log))
        bench.run()
    return bench, calls


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_trainer_begins_on_finished_groups_while_others_of_the_step_still_run(tmp_path, staleness):
    bench, calls = run(tmp_path, staleness, stream="group")
    begun = collections.defaultdict(list)
    for call, version, groups, running in calls:
        if call == "accumulate":
            assert running, "there was nothing to wait for"
            begun[version] += groups
    steps = {version: (groups, told) for call, version, groups, told in calls if call == "train_step"}
    assert list(steps) == list(range(STEPS))
    assert begun, "no step began early"
    for version, (groups, told) in steps.items():
        assert list(told) == begun[version]
        assert set(told) < set(groups)
    assert sorted(itertools.chain.from_iterable(groups for groups, _ in steps.values())) == list(range(3 * STEPS))
    assert max(bench.trained["staleness"]) <= staleness


def test_at_staleness_zero_each_step_trains_what_it_would_train_without_streams(tmp_path):
    _, calls = run(tmp_path / "streamed", 0, stream="group")
    _, whole = run(tmp_path / "whole", 0)
    assert [call for call, *_ in whole] == ["train_step"] * STEPS
    trained = [(version, sorted(groups)) for call, version, groups, _ in calls if call == "train_step"]
    assert trained == [(version, sorted(groups)) for _, version, groups, _ in whole]


def test_waits_are_counted_without_what_was_trained_meanwhile(tmp_path):
    streamed, calls = run(tmp_path / "streamed", 0, stream="group")
    whole, _ = run(tmp_path / "whole", 0)
    ahead = 0.05 * sum(call == "accumulate" for call, *_ in calls)

    def total(bench, name):
        return sum(metrics[name] for _, metrics in bench.recorder.steps if name in metrics)

    assert total(streamed, "train/seconds") == pytest.approx(total(whole, "train/seconds") + ahead)
    assert total(streamed, "rollout/wait_seconds") == pytest.approx(total(whole, "rollout/wait_seconds") - ahead)


def test_groups_wait_until_they_fill_a_micro_batch(tmp_path):
    _, calls = run(
        tmp_path / "small", 0, stream="micro_batch", row_tokens=8, row_buckets=(256,), rows_per_micro_batch=1
    )
    assert any(call == "accumulate" for call, *_ in calls)
    _, calls = run(tmp_path / "large", 0, stream="micro_batch", row_tokens=4_096, rows_per_micro_batch=8)
    assert all(call == "train_step" for call, *_ in calls)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_trainer_that_dies_with_its_sums_loses_no_group_and_trains_none_twice(tmp_path, when):
    fate = mortal_trainers.Fate(mortal_trainers.at(("accumulate", 3, when)))
    bench = mortal_trainers.bench(
        tmp_path, fate, {"make_environment": Uneven}, trainer={"stream": "group"}, coordinator={"max_staleness": 0}
    )
    bench.run()
    assert fate.lives == 2
    assert len(bench.trained["prompts"]) == len(set(bench.trained["prompts"])) == 3 * 7
    assert all(len(found) == 1 for found in fate.policies.values()), "a step was trained in two ways"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_the_trainer_begins_on_groups_saves_at_once_and_trains_them_later(tmp_path, number):
    seconds = []

    class OneThread(doubles.RecordingTrainer):
        """The run is stopped while it sums groups of the step from version 2 on. That takes 1,000 s; then it saves."""

        def __init__(self, *args):
            super().__init__(*args)
            self.free = asyncio.Event()
            self.free.set()

        async def accumulate(self, batch):
            if self.state["version"] == 2 and self.free.is_set():
                self.free.clear()
                self.began = asyncio.get_running_loop().time()
                asyncio.get_running_loop().call_later(1000.0, self.free.set)
                os.kill(os.getpid(), number)
                await self.free.wait()
            await super().accumulate(batch)

        async def abort_step(self):
            self.free.set()
            return True

        async def save(self, path):
            await self.free.wait()
            seconds.append(asyncio.get_running_loop().time() - self.began)
            await super().save(path)

    config = doubles.make_config(
        steps=STEPS,
        coordinator={"max_staleness": 0},
        trainer={"stream": "group"},
        checkpoint={"every": 100},
        deadlines={"grace": 20.0},
    )
    bench = doubles.Bench(config, tmp_path, make_environment=Uneven)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "make_trainer", lambda log: OneThread(0.05, 3, log))
        summary = bench.run()
    assert summary.sentence == "Stopped at step 2; the same command goes on from the checkpoint there."
    assert seconds[0] < 1.0
    resumed = doubles.Bench(config, tmp_path, make_environment=Uneven)
    assert resumed.run().steps == STEPS
    assert sorted(resumed.trained["prompts"]) == sorted(f"task-{index}" for index in range(STEPS * 3))
