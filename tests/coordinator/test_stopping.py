"""A scheduler's SIGTERM: whatever the trainer does, the run is over within its grace and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import coordinator_doubles as doubles
import pytest

from libra_jax import protocols
from libra_jax.coordinator import checkpoints, records, stopping

GRACE, STEPS, GROUPS = 20.0, 5, 3


class Stepping(doubles.RecordingTrainer):
    """In the step from version 2 on, SIGTERM arrives; that step takes `step_seconds`, and a save `save_seconds`.

    Asked to give the step up, it does so after `answer_seconds`; None: it does not hear.
    """

    step_seconds = 1.0
    answer_seconds: float | None = 0.5
    save_seconds = 0.1
    signals = (signal.SIGTERM,)
    asked: asyncio.Event

    async def train_step(self, batch: protocols.TrainBatch, shares: Any = ()) -> Any:
        if self.state["version"] != 2:
            return await super().train_step(batch, shares)
        self.asked, stepping = asyncio.Event(), asyncio.ensure_future(asyncio.sleep(self.step_seconds))
        for number in self.signals:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
        giving_up = asyncio.ensure_future(self.asked.wait())
        await asyncio.wait({stepping, giving_up}, return_when=asyncio.FIRST_COMPLETED)
        giving_up.cancel()
        if not stepping.done():
            stepping.cancel()
            await asyncio.sleep(self.answer_seconds)
            raise protocols.StepAborted("given up")
        return await super().train_step(batch, shares)

    async def abort_step(self) -> bool:
        if self.answer_seconds is None:
            return False
        self.asked.set()
        return True

    async def wait_saved(self) -> None:
        await asyncio.sleep(self.save_seconds)
        await super().wait_saved()


def stopped(workdir: Path, **trainer: Any) -> tuple[doubles.Bench, float]:
    """A run that is stopped in its third step, and the seconds from then to its end."""
    config = make_config()
    seconds = [0.0]

    class Timed(Stepping):
        async def train_step(self, batch, shares=()):
            if self.state["version"] == 2:
                seconds[0] = asyncio.get_running_loop().time()
            return await super().train_step(batch, shares)

        async def shutdown(self):
            seconds[0] = asyncio.get_running_loop().time() - seconds[0]
            await super().shutdown()

    for name, value in trainer.items():
        setattr(Timed, name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "make_trainer", lambda log: Timed(0.05, 3, log))
        bench = doubles.Bench(config, workdir)
        bench.summary = bench.run()
    assert (bench.summary.stopped, bench.summary.terminated) == (True, signal.SIGTERM in Stepping.signals)
    return bench, seconds[0]


def make_config() -> Any:
    return doubles.make_config(
        steps=STEPS,
        coordinator={"groups_per_step": GROUPS, "max_staleness": 1},
        checkpoint={"every": 1},
        deadlines={"grace": GRACE},
    )


def assert_goes_on(workdir: Path, first: int) -> None:
    """The same command trains the rest: every prompt once, in all."""
    resumed = doubles.Bench(make_config(), workdir)
    assert resumed.run().steps == STEPS
    assert [step for step, _ in resumed.recorder.steps] == list(range(first, STEPS + 1))
    assert sorted(resumed.trained["prompts"]) == sorted(f"task-{index}" for index in range(STEPS * GROUPS))


def test_a_step_that_ends_in_time_is_taken_to_its_end(tmp_path):
    bench, seconds = stopped(tmp_path, step_seconds=9.0)
    assert bench.summary.sentence == "Stopped at step 3; the same command goes on from the checkpoint there."
    assert 9.0 < seconds < 10.0
    assert_goes_on(tmp_path, first=4)


def test_a_step_that_would_not_end_in_time_is_given_up_and_its_groups_wait_in_the_checkpoint(tmp_path):
    bench, seconds = stopped(tmp_path, step_seconds=1000.0)
    assert bench.summary.sentence == "Stopped at step 2; the same command goes on from the checkpoint there."
    assert "The step after 2 was aborted: its 3 groups wait again." in bench.recorder.notes
    assert 10.0 < seconds < 11.0
    state = checkpoints.Checkpoints(tmp_path, 1).load(2)["groups"]
    held = [records.decode_group(record).task.prompt_id for record in state["finished"]]
    assert held[:GROUPS] == ["task-6", "task-7", "task-8"]
    assert not set(held) & set(bench.trained["prompts"])
    assert_goes_on(tmp_path, first=3)


def test_a_trainer_that_does_not_hear_is_left_behind_and_the_checkpoint_before_counts(tmp_path):
    bench, seconds = stopped(tmp_path, step_seconds=1000.0, answer_seconds=None)
    assert bench.summary.sentence == (
        "Stopped at step 2, whose checkpoint did not fit into config.deadlines.grace = 20 s; the same command goes on "
        "from the checkpoint at step 1."
    )
    assert seconds < GRACE
    assert_goes_on(tmp_path, first=2)


def test_a_checkpoint_that_is_not_durable_in_time_is_left_behind_and_the_one_before_counts(tmp_path):
    bench, seconds = stopped(tmp_path, step_seconds=5.0, save_seconds=1000.0)
    assert bench.summary.sentence == (
        "Stopped at step 3, whose checkpoint did not fit into config.deadlines.grace = 20 s; the same command goes on "
        "from the checkpoint at step 1."
    )
    assert seconds < GRACE
    assert_goes_on(tmp_path, first=2)


def test_a_second_sigterm_says_nothing_new(tmp_path):
    bench, _ = stopped(tmp_path, step_seconds=5.0, signals=(signal.SIGTERM, signal.SIGTERM, signal.SIGTERM))
    assert bench.summary.sentence == "Stopped at step 3; the same command goes on from the checkpoint there."
    assert sum(note.startswith("SIGTERM: stopping, with a checkpoint") for note in bench.recorder.notes) == 1


def test_a_closed_terminal_saves_as_a_scheduler_does(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        bench, _ = stopped(tmp_path, step_seconds=5.0, signals=(signal.SIGHUP, signal.SIGTERM))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert bench.summary.sentence == "Stopped at step 3; the same command goes on from the checkpoint there."
    assert [note for note in bench.recorder.notes if note.startswith("SIG")] == [
        "SIGHUP: stopping, with a checkpoint, within config.deadlines.grace = 20 s."
    ]


def test_a_process_started_with_nohup_ignores_a_closed_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stopping.caught_ends() == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_person_is_not_hurried(tmp_path):
    class Interrupted(Stepping):
        step_seconds, signals = 500.0, (signal.SIGINT,)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "make_trainer", lambda log: Interrupted(0.05, 3, log))
        summary = doubles.Bench(make_config(), tmp_path).run()
    assert (summary.stopped, summary.terminated, summary.steps) == (True, False, 3)
