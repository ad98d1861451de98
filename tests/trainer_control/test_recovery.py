"""A trainer that is lost in the middle of a run: made anew, it comes to the same parameters, and rollouts go on."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Mapping, Sequence

import mortal_trainers as doubles
import pytest

from libra_jax import protocols
from libra_jax.telemetry import memory

STEPS, EACH = 7, 3
ALL = sorted(f"task-{index}" for index in range(STEPS * EACH))
SYNCHRONOUS = {"coordinator": {"max_staleness": 0}}


def trained_once(bench, fate: doubles.Fate) -> None:
    """Each prompt is once in the final state, in the records and in each version, which never names two policies."""
    summary = bench.run()
    assert summary.steps == STEPS
    assert sorted(bench.trained["prompts"]) == ALL
    assert [step for step, _ in bench.recorder.steps][-STEPS:] == list(range(1, STEPS + 1))
    assert sorted({record["prompt_id"] for record in bench.recorder.trajectories}) == ALL
    assert len(bench.recorder.trajectories) == 2 * len(ALL)
    assert {version: len(known) for version, known in fate.policies.items()} == dict.fromkeys(range(STEPS + 1), 1)
    for version, given in fate.given.items():
        assert given == fate.policies[version], "engines hold what the trainer published"


def undisturbed(tmp_path) -> dict:
    fate = doubles.Fate()
    bench = doubles.bench(tmp_path / "undisturbed", fate, **SYNCHRONOUS)
    trained_once(bench, fate)
    assert fate.lives == 1
    return bench.trained | {"calls": len(fate.calls)}


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("seed", range(12))
def test_lost_at_any_moments_each_prompt_is_trained_once_and_no_version_names_two_policies(tmp_path, seed, staleness):
    reference, rng = undisturbed(tmp_path), random.Random(f"{seed}/{staleness}")
    moments = {rng.randrange(2, reference["calls"]): rng.choice(["before", "after"]) for _ in range(rng.randint(1, 3))}
    fate = doubles.Fate(lambda number, method, of_method: moments.get(number))
    bench = doubles.bench(tmp_path / "lost", fate, coordinator={"max_staleness": staleness})
    trained_once(bench, fate)
    assert fate.lives > 1
    assert max(scalars["staleness/max"] for _, scalars in bench.recorder.steps) <= staleness
    if staleness == 0:  # the same batches whatever took how long
        assert bench.trained["parameters"] == reference["parameters"]


def lost(tmp_path, *deaths: tuple[str, int, str], **changes):
    fate = doubles.Fate(doubles.at(*deaths))
    return doubles.bench(tmp_path, fate, **changes), fate


def test_the_next_one_begins_with_the_last_checkpoint_and_takes_the_steps_since_and_no_more(tmp_path):
    bench, fate = lost(tmp_path, ("train_step", 6, "after"))  # step 6, of which no one heard
    trained_once(bench, fate)
    assert fate.lives == 2
    asked = doubles.methods(fate, 1)
    assert asked[:3] == ["stand_by", "restore", "train_step"]  # step 5, for checkpoint 4 counts
    assert asked.count("train_step") == STEPS - 4
    (told,) = [scalars for _, scalars in bench.recorder.steps if "trainer/restarts" in scalars]
    assert (told["trainer/restarts"], told["trainer/replayed_steps"]) == (1.0, 1.0)
    assert any("began with the checkpoint at step 4 and trained 1 steps again" in note for note in bench.recorder.notes)


def test_lost_with_a_damaged_checkpoint_it_goes_on_from_the_one_before(tmp_path):
    def dies(number: int, method: str, of_method: int) -> str | None:
        if (method, of_method) != ("train_step", 6):
            return None
        state = tmp_path / "checkpoints" / "step-00000004" / "trainer" / "state.json"
        state.write_text(state.read_text().replace("version", "verzion"))
        return "before"

    bench = doubles.bench(tmp_path, doubles.Fate(dies))
    with pytest.raises(
        protocols.WorkerLost, match=r"step-00000004 is skipped: .* goes on from the checkpoint at step 2"
    ):
        bench.run()
    again = doubles.bench(tmp_path, doubles.Fate())
    assert again.run().steps == STEPS
    assert sorted(again.trained["prompts"]) == ALL
    assert [step for step, _ in again.recorder.steps] == list(range(3, STEPS + 1))


def test_before_the_first_checkpoint_it_begins_as_a_run_does(tmp_path):
    bench, fate = lost(tmp_path, ("train_step", 2, "before"), warm_start={"steps": 0})
    trained_once(bench, fate)
    assert doubles.methods(fate, 1)[:2] == ["start", "train_step"]


@pytest.mark.parametrize("number", [1, 3, 4])
def test_lost_in_the_warm_start_it_takes_the_steps_of_that_again(tmp_path, number):
    reference = doubles.bench(tmp_path / "undisturbed", doubles.Fate(), warm_start={"steps": 4}, **SYNCHRONOUS)
    reference.run()
    bench, fate = lost(tmp_path / "lost", ("warm_start_step", number, "after"), warm_start={"steps": 4}, **SYNCHRONOUS)
    trained_once(bench, fate)
    assert bench.trained["warm"] == 4
    assert bench.trained["parameters"] == reference.trained["parameters"]


def test_rollouts_go_on_while_it_is_made_anew(tmp_path):
    seconds = 5.0
    bench, fate = lost(tmp_path, ("train_step", 3, "before"), coordinator={"max_staleness": 2})
    fate.restore_seconds, fate.tokens_per_second = seconds, 4.0
    trained_once(bench, fate)
    (span,) = [span for span in bench.recorder.spans if span[1] == "restart"]
    assert span[3] - span[2] >= seconds
    meanwhile = [
        arguments["tokens"]
        for track, name, start, _, arguments in bench.recorder.spans
        if name == "generate" and track.startswith("engine") and span[2] < start < span[3]
    ]
    assert sum(meanwhile) > 0
    assert not any("was lost" in note for note in bench.recorder.notes if note.startswith("Engine"))


def test_lost_while_it_waits_for_a_batch_it_is_back_before_that_is_there(tmp_path):
    rollout = {"checksum": True, "restarts": 9, "health_seconds": 0.5}
    bench, fate = lost(tmp_path, ("policy_version", 3, "before"), rollout=rollout, **SYNCHRONOUS)
    fate.restore_seconds, fate.tokens_per_second = 0.5, 2.0
    trained_once(bench, fate)
    assert fate.lives == 2
    (span,) = [span for span in bench.recorder.spans if span[1] == "restart"]
    assert not [step for step in bench.recorder.spans if step[1] == "train step" and step[2] < span[3] < step[3]]


def test_a_batch_that_comes_while_it_is_made_anew_is_not_trained_in_less_than_no_time(tmp_path):
    rollout = {"checksum": True, "restarts": 9, "health_seconds": 0.5}
    bench, fate = lost(tmp_path, ("policy_version", 30, "before"), rollout=rollout, **SYNCHRONOUS)
    fate.restore_seconds, fate.tokens_per_second = 60.0, 2.0
    trained_once(bench, fate)
    (made,) = [span for span in bench.recorder.spans if span[1] == "restart"]
    steps = [span for span in bench.recorder.spans if span[1] == "train step"]
    assert any(made[2] < begin < made[3] < end for _, _, begin, end, _ in steps)
    assert [scalars["train/seconds"] for _, scalars in bench.recorder.steps] == [pytest.approx(0.05)] * STEPS


def test_steps_taken_again_beyond_the_end_of_the_step_that_it_was_lost_in_are_told_with_the_next(tmp_path):
    changes = {"rollout": {"checksum": True, "restarts": 9, "health_seconds": 0.5}, "checkpoint": {"every": 1}}
    bench, fate = lost(tmp_path, ("policy_version", 380, "before"), evaluation={"every": 1}, **changes, **SYNCHRONOUS)
    fate.restore_seconds, fate.tokens_per_second = 100.0, 2.0  # an evaluation, in which it is lost, takes 60
    bench.run()
    (made,) = [span for span in bench.recorder.spans if span[1] == "restart"]
    told = [scalars["trainer/replayed_steps"] for _, scalars in bench.recorder.steps if "trainer/restarts" in scalars]
    assert told == [0.0, made[4]["replayed"]]
    assert told[1] > 0


@pytest.mark.parametrize(
    ("method", "number", "when"),
    [("save", 2, "before"), ("save", 2, "after"), ("wait_saved", 2, "before"), ("wait_saved", 1, "before")],
)
def test_lost_in_a_checkpoint_that_one_does_not_count_and_the_next_one_does(tmp_path, method, number, when):
    bench, fate = lost(tmp_path, (method, number, when))
    trained_once(bench, fate)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["step-00000006", "step-00000007"]
    for folder in (tmp_path / "checkpoints").iterdir():
        assert (folder / "manifest.json").exists()
        assert len(list(folder.iterdir())) == 3, "nothing of what the lost one wrote is left"


@pytest.mark.parametrize(
    ("method", "number"),
    [("open_weights", 3), ("stage_weights", 7), ("stage_weights", 9), ("close_weights", 1), ("close_weights", 3)],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_lost_in_a_publication_no_engine_keeps_half_of_a_version(tmp_path, method, number, when):
    bench, fate = lost(tmp_path, (method, number, when))
    trained_once(bench, fate)


def test_lost_more_often_than_it_may_be_the_run_ends_with_a_sentence_and_the_same_command_goes_on(tmp_path):
    def dies(number: int, method: str, of_method: int) -> str | None:
        return "before" if method == "train_step" and len(fate.policies) > 3 else None  # from step 4 on, always

    fate = doubles.Fate(dies)
    bench = doubles.bench(tmp_path, fate, trainer={"restarts": 2})
    with pytest.raises(protocols.WorkerLost, match=r"once more than config.trainer.restarts = 2 allows.*at step 2\.$"):
        bench.run()
    assert fate.lives == 3
    again = doubles.Fate()
    resumed = doubles.bench(tmp_path, again)
    resumed.run()
    assert sorted(resumed.trained["prompts"]) == ALL


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"trainer": {"restarts": 0}}, r"config\.trainer\.restarts is 0"),
        ({"checkpoint": {"every": 0}}, r"config\.checkpoint\.every is 0"),
    ],
)
def test_one_that_is_not_to_be_made_anew_ends_the_run_with_the_reason(tmp_path, changes, why):
    bench, fate = lost(tmp_path, ("train_step", 4, "before"), **changes)
    with pytest.raises(protocols.WorkerLost, match=rf"its process 7 died.*It is not restarted: {why}"):
        bench.run()
    assert fate.lives == 1


class Full(doubles.Trainer):
    """Its disk takes checkpoints no more, from the third to the one before `until`."""

    until = 99

    async def wait_saved(self) -> None:
        if 3 <= self.state["version"] < self.until:
            raise protocols.CheckpointFailed("the disk is full")
        await super().wait_saved()


@pytest.mark.parametrize(("number", "until", "kept"), [(7, 99, True), (8, 99, False), (8, 6, True)])
def test_while_checkpoints_fail_so_many_steps_are_kept_and_no_more(tmp_path, monkeypatch, number, until, kept):
    monkeypatch.setattr(doubles, "Trainer", Full)
    monkeypatch.setattr(Full, "until", until)
    bench, fate = lost(tmp_path, ("train_step", number, "before"), checkpoint={"every": 1}, steps=9)

    def freed(step: int, scalars: Mapping[str, float]) -> None:  # there is room for the last one
        if step == 9:
            monkeypatch.setattr(Full, "until", 9)
        record(step, scalars)

    record, bench.recorder.metrics = bench.recorder.metrics, freed
    if not kept:
        with pytest.raises(protocols.WorkerLost, match=r"of the last 4 alone are kept.*goes on from the .* step 2\.$"):
            bench.run()
        assert fate.lives == 1
        return
    bench.run()
    assert fate.lives == 2
    assert sorted(bench.trained["prompts"]) == sorted(f"task-{index}" for index in range(9 * EACH))


@pytest.mark.parametrize("method", ["stand_by", "restore", "train_step", "stage_weights"])
def test_lost_again_while_it_is_made_anew_it_is_made_once_more(tmp_path, method):
    first = {0: "train_step", 1: method}

    def dies(number: int, asked: str, of_method: int) -> str | None:
        life = fate.lives - 1
        return "before" if first.get(life) == asked and (life or of_method == 4) else None

    fate = doubles.Fate(dies)
    bench = doubles.bench(tmp_path, fate)
    trained_once(bench, fate)
    assert fate.lives == 3
    assert sum("restart 2 of 3" in note for note in bench.recorder.notes) == 1


def test_while_it_catches_up_nobody_opens_or_closes_a_channel_of_it(tmp_path, monkeypatch):
    dismissed: list[int] = []

    class Catching(doubles.Trainer):
        async def restore(self, path: str) -> int:
            trainer = bench.coordinator._parts.trainer
            for ask in (trainer.listen("worker", 1), trainer.connect("worker", 1, {}), trainer.dismiss("worker")):
                with pytest.raises(protocols.TrainerLost, match="trainer was lost, and is being restarted"):
                    await ask
            return await super().restore(path)

        async def dismiss(self, worker: str) -> None:
            dismissed.append(self._life)

        async def save(self, path: str) -> None:
            await bench.coordinator._parts.trainer.dismiss("worker")
            await super().save(path)

    monkeypatch.setattr(doubles, "Trainer", Catching)
    bench, fate = lost(tmp_path, ("train_step", 4, "before"))
    trained_once(bench, fate)
    assert set(dismissed) == {0, 1}


class Asking(memory.MemoryRecorder):
    """Asks for another mesh after a step."""

    def __init__(self, step: int, sizes: protocols.MeshSizes) -> None:
        super().__init__()
        self._step, self._sizes = step, sizes

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        super().metrics(step, scalars)
        if step == self._step:
            self.handle = self.bench.coordinator._parts.resizing.resize(self._sizes, "it is told to")


def test_lost_after_its_mesh_has_changed_it_is_made_on_the_mesh_that_it_had(tmp_path):
    asking = Asking(2, protocols.MeshSizes(2, 1, 1))
    asking.bench, fate = lost(tmp_path, ("train_step", 5, "before"), further={"recorder": asking})
    trained_once(asking.bench, fate)
    asked = doubles.methods(fate, 1)
    assert asked[:4] == ["stand_by", "restore", "begin_resize", "finish_resize"]
    assert asking.bench.coordinator._parts.resizing.sizes == protocols.MeshSizes(2, 1, 1)


@pytest.mark.parametrize("method", ["train_step", "resize_progress", "begin_resize"])
def test_lost_while_its_mesh_changes_it_stays_on_the_one_it_has(tmp_path, method):
    never_ready = protocols.MeshSizes(1, 1, 8)
    asking = Asking(2, never_ready)
    number = 4 if method == "train_step" else 1
    asking.bench, fate = lost(tmp_path, (method, number, "before"), further={"recorder": asking})
    trained_once(asking.bench, fate)
    assert fate.lives == 2
    assert "lost meanwhile" in str(asking.handle.done.exception())
    assert asking.bench.coordinator._parts.resizing.sizes == protocols.MeshSizes(1, 1, 1)
    assert asking.transitions[-1]["outcome"] == "failed"


@pytest.mark.parametrize(("method", "number", "step", "newest"), [("train_step", 6, 5, 4), ("wait_saved", 2, 4, 2)])
def test_terminated_while_it_is_lost_for_good_the_run_is_stopped_and_the_same_command_goes_on(
    tmp_path, method, number, step, newest
):
    def dies(_: int, asked: str, of_method: int) -> str | None:
        if (asked, of_method) != (method, number):
            return None
        bench.coordinator.request_stop(signal.SIGTERM)
        return "before"

    fate = doubles.Fate(dies)
    bench = doubles.bench(tmp_path, fate, trainer={"restarts": 0})
    summary = bench.run()
    assert (summary.stopped, summary.terminated) == (True, True)
    assert summary.sentence == (
        f"Stopped at step {step}, whose checkpoint was not taken, because the trainer is lost or does not answer; "
        f"the same command goes on from the checkpoint at step {newest}."
    )
    assert any(
        "Lost while the run was being stopped" in note and "process 7 died" in note for note in bench.recorder.notes
    )
    resumed = doubles.bench(tmp_path, doubles.Fate())
    resumed.run()
    assert sorted(resumed.trained["prompts"]) == ALL


class GivingUp(doubles.Trainer):
    """Its second life takes its time for a step, unless it is asked to give it up."""

    asked = False

    async def train_step(
        self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share] = ()
    ) -> Mapping[str, float]:
        for _ in range(35 * self._life):
            await asyncio.sleep(1.0)
            if self.asked:
                raise protocols.StepAborted("given up")
        return await super().train_step(batch, shares)

    async def abort_step(self) -> bool:
        self.asked = True
        return True


def test_terminated_while_it_takes_steps_again_it_takes_them_to_their_end_and_gives_up_the_next(tmp_path, monkeypatch):
    def dies(number: int, method: str, of_method: int) -> str | None:
        if method == "restore":
            bench.coordinator.request_stop(signal.SIGTERM)
        return "before" if (method, of_method, fate.lives) == ("train_step", 6, 1) else None

    monkeypatch.setattr(doubles, "Trainer", GivingUp)
    fate = doubles.Fate(dies)
    bench = doubles.bench(tmp_path, fate, deadlines={"grace": 60.0})  # half of it is over in the middle of step 5
    summary = bench.run()
    assert fate.lives == 2
    assert summary.sentence == "Stopped at step 5; the same command goes on from the checkpoint there."
    assert "The step after 5 was aborted: its 3 groups wait again." in bench.recorder.notes
    monkeypatch.undo()
    resumed = doubles.bench(tmp_path, doubles.Fate())
    resumed.run()
    assert sorted(resumed.trained["prompts"]) == ALL


@pytest.mark.parametrize(
    ("how", "restore_seconds", "step"),
    [(signal.SIGINT, 1.0, 6), (signal.SIGTERM, 1.0, 6), (signal.SIGTERM, 1000.0, 5)],
    ids=str,
)
def test_stopped_while_it_is_made_anew_the_run_saves_if_there_is_time_and_nothing_is_lost(
    tmp_path, how, restore_seconds, step
):
    def dies(number: int, method: str, of_method: int) -> str | None:
        if method == "restore":
            bench.coordinator.request_stop(how)
        return "before" if (method, of_method, fate.lives) == ("train_step", 6, 1) else None

    fate = doubles.Fate(dies)
    fate.restore_seconds = restore_seconds
    bench = doubles.bench(tmp_path, fate)
    summary = bench.run()
    assert (summary.stopped, summary.steps) == (True, step)
    assert ("did not fit" in summary.sentence) == (step == 5)
    resumed = doubles.bench(tmp_path, doubles.Fate())
    resumed.run()
    assert sorted(resumed.trained["prompts"]) == ALL
