"""Composite checkpoints: killed at any write, what is left is the old newest checkpoint or the new one."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import shutil
import tempfile
import threading
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import coordinator_doubles as doubles
import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.coordinator import checkpoint_store, checkpoints, fencing, records, saving
from libra_jax.coordinator import run as run_module
from libra_jax.utils import checksums

TOKENS = st.integers(0, 2**31 - 1)
PROBABILITIES = st.floats(allow_nan=False, width=32)
MOVES = st.builds(
    protocols.Move,
    st.just("task-1/0"),
    st.just("narrow"),
    st.just("wide"),
    st.sampled_from(protocols.MoveReason),
    st.none() | st.floats(0, 1e6),
)


@st.composite
def trajectories(draw) -> protocols.Trajectory:
    trajectory = protocols.Trajectory("task-1/0", "task-1", start_seconds=draw(st.floats(0, 1e6)))
    trajectory.append_text(draw(st.lists(TOKENS, max_size=5)), protocols.TokenSource.PROMPT)
    for tokens in draw(st.lists(st.lists(st.tuples(TOKENS, PROBABILITIES, st.integers(0, 9)), max_size=5), max_size=3)):
        columns = tuple(zip(*tokens, strict=True)) or ((), (), ())
        # Two bytes a token: the experts that tokens took, for none of them or for all but the last.
        routing = tuple(bytes([n, 255]) for n in range(len(tokens) - 1)) if draw(st.booleans()) else ()
        trajectory.append_sampled(protocols.TokenDelta(*columns, routing=routing))
        moves = tuple(draw(st.lists(MOVES, max_size=2)))
        trajectory.turns.append(protocols.Turn(len(tokens), "calculator", "failure", 3, 0.25, 1.5, moves))
        trajectory.append_text(draw(st.lists(TOKENS, max_size=3)), protocols.TokenSource.TOOL)
    trajectory.teacher_log_probs.extend(draw(st.just([]) | st.just([-0.5] * len(trajectory.token_ids))))
    trajectory.reward = draw(st.none() | st.floats(-1, 1))
    trajectory.seconds = draw(st.floats(0, 1e6))
    states = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)
    made = st.builds(protocols.RolloutSnapshot, states, st.integers(0, 9), st.integers(0, 9), st.just({"f1": 0.5}))
    trajectory.snapshot = draw(st.none() | made)
    trajectory.metrics = draw(st.dictionaries(st.sampled_from(["odd", "turns"]), st.floats(0, 1)))
    return trajectory


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.lists(trajectories(), max_size=2))
def test_groups_survive_the_round_trip_bit_for_bit(members):
    group = protocols.Group(7, protocols.Task("task-1", {"question": "1 + 1", "n": [1, 2]}, "task-0"), 3, members)
    record = records.encode_group(group)
    with tempfile.TemporaryDirectory() as folder:
        files = checkpoints.Checkpoints(Path(folder), keep=1)
        files.write(1, checkpoints.encode({"groups": {"finished": [record], "running": [record]}})).mkdir()
        files.commit(1)
        assert (files.trainer_path(1).parent / "routing.bin").exists() == any(item.routing for item in members)
        groups = files.load(1)["groups"]
    assert [records.decode_group(item) for item in groups["finished"] + groups["running"]] == [group, group]


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs, save for what Python cannot help."""


def kill_at(monkeypatch: pytest.MonkeyPatch, operation: int) -> list[str]:
    """Every file operation of the module counts; the chosen one and all after it do not happen."""
    calls: list[str] = []

    def guarded(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) > operation:
                raise Killed
            return function(*args, **kwargs)

        return call

    for name in ("replace", "fsync"):
        monkeypatch.setattr(checkpoints.os, name, guarded(name, getattr(os, name)))
    monkeypatch.setattr(checkpoint_store.shutil, "rmtree", guarded("rmtree", checkpoint_store.shutil.rmtree))
    monkeypatch.setattr(checkpoints.Path, "unlink", guarded("unlink", checkpoints.Path.unlink))
    monkeypatch.setattr(checkpoints.Path, "mkdir", guarded("mkdir", checkpoints.Path.mkdir))
    return calls


def routed(step: int) -> protocols.Group:
    """A group whose tokens have experts."""
    trajectory = protocols.Trajectory("task-1/0", "task-1", routing=[bytes([step, n]) for n in range(3)])
    return protocols.Group(7, protocols.Task("task-1", {}), 3, [trajectory])


def save(files: checkpoints.Checkpoints, step: int) -> None:
    record = records.encode_group(routed(step))
    path = files.write(step, checkpoints.encode({"step": step, "groups": {"finished": [], "running": [record]}}))
    path.mkdir()
    (path / "state.json").write_text(str(step))
    files.commit(step)


def is_whole(files: checkpoints.Checkpoints, step: int) -> bool:
    (record,) = files.load(step)["groups"]["running"]
    trained = (files.trainer_path(step) / "state.json").read_text()
    return records.decode_group(record) == routed(step) and trained == str(step)


def test_killed_at_any_write_the_newest_checkpoint_is_whole(tmp_path):
    outcomes = set()
    for operation in range(100):
        workdir = tmp_path / str(operation)
        files = checkpoints.Checkpoints(workdir, keep=1)
        save(files, 1)
        with pytest.MonkeyPatch.context() as patch:
            calls = kill_at(patch, operation)
            try:
                save(files, 2)
            except Killed:
                outcomes.add(checkpoints.newest_step(workdir))
        assert checkpoints.newest_step(workdir) in (1, 2)
        assert is_whole(files, files.newest())
        save(files, 3)
        assert is_whole(files, 3)
        assert [directory.name for directory in (workdir / "checkpoints").iterdir()] == ["step-00000003"]
        if len(calls) < operation:
            break
    else:
        pytest.fail("the save never ran to its end")
    assert outcomes == {1, 2}


def test_killed_at_any_write_a_checkpoint_that_is_being_replaced_is_whole(tmp_path):
    def save(files: checkpoints.Checkpoints, content: str) -> None:
        path = files.write(1, checkpoints.encode({"content": content}))
        path.mkdir()
        (path / "state.json").write_text(content)
        files.commit(1)

    def held(files: checkpoints.Checkpoints) -> str:
        content = files.load(1)["content"]
        assert (files.trainer_path(1) / "state.json").read_text() == content
        return content

    outcomes = set()
    for operation in range(100):
        workdir = tmp_path / str(operation)
        files = checkpoints.Checkpoints(workdir, keep=1)
        save(files, "old")
        with pytest.MonkeyPatch.context() as patch:
            calls = kill_at(patch, operation)
            try:
                save(files, "new")
            except Killed:
                outcomes.add(held(files))
        for content in ("newer", "newest"):
            save(files, content)
            assert held(files) == content
            assert len(list(workdir.glob("checkpoints/*/*"))) == 3
        if len(calls) < operation:
            break
    else:
        pytest.fail("the save never ran to its end")
    assert outcomes == {"old", "new"}


def test_the_newest_checkpoints_are_kept(tmp_path):
    files = checkpoints.Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15, 20):
        save(files, step)
    assert sorted(directory.name for directory in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000015",
        "step-00000020",
    ]
    assert checkpoints.newest_step(tmp_path) == 20
    assert checkpoints.newest_step(tmp_path / "elsewhere") == -1


def test_what_others_put_beside_checkpoints_stays(tmp_path):
    files = checkpoints.Checkpoints(tmp_path, keep=1)
    save(files, 4)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-00000004", folder / "step-00000004.bak")
    (folder / "mine").mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "step-00000004" / "why.txt").write_text("mine")
    assert checkpoints.newest_step(tmp_path) == 4
    save(files, 6)
    assert sorted(path.name for path in folder.iterdir()) == [
        "mine",
        "notes.txt",
        "step-00000004",
        "step-00000004.bak",
        "step-00000006",
    ]
    assert [path.name for path in (folder / "step-00000004").iterdir()] == ["why.txt"]
    assert len(list((folder / "step-00000004.bak").iterdir())) == 4
    assert checkpoint_store.find(tmp_path).step == 6
    (folder / "step-00000008").write_text("mine")
    assert checkpoint_store.find(tmp_path).step == 6
    assert checkpoint_store.counting(tmp_path).keys() == {6}


@pytest.mark.parametrize("tokens", [False, True])
def test_a_run_that_fell_back_keeps_what_it_writes(tmp_path, tokens):
    def take() -> fencing.Token | None:
        return fencing.take(tmp_path, lambda: checkpoint_store.find(tmp_path).step) if tokens else None

    first = checkpoints.Checkpoints(tmp_path, keep=2, fencing=take())
    for step in (2, 4, 6):
        save(first, step)
    (tmp_path / "checkpoints" / "step-00000006" / "trainer" / "state.json").write_text("7")
    second = checkpoints.Checkpoints(tmp_path, keep=1, fencing=take())
    found = checkpoint_store.find(tmp_path)
    assert found.step == 4
    assert len(found.skipped) == 1
    assert "step-00000006 is skipped: trainer/state.json is damaged" in found.skipped[0]
    assert found.seconds > 0.0
    timed = dataclasses.replace(found, seconds=1.234, nbytes=56_780_000)
    assert timed.sentence() == "The checkpoint at step 4 verifies: 56.8 MB in 1.23 s."
    second.go_on_from(found.stored)
    assert second.newest() == 4
    save(second, 5)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
    assert checkpoint_store.find(tmp_path).step == 5


@pytest.mark.parametrize("part", ["coordinator", "trainer"])
def test_a_damaged_second_manifest_of_a_step_leaves_the_first_usable(tmp_path, part):
    """A kill between the second manifest and the removal of the first leaves both, and the second's parts break."""
    doubles.Bench(doubles.make_config(steps=4, checkpoint={"every": 2}), tmp_path).run()
    folder = checkpoint_store.directory(tmp_path, 4)
    record = checksums.unsealed((folder / "manifest.json").read_bytes())
    shutil.copy(folder / "coordinator.json", folder / "coordinator-2.json")
    shutil.copytree(folder / "trainer", folder / "trainer-2")
    again = {**record, "coordinator": "coordinator-2.json", "trainer": "trainer-2", "fencing_token": 2}
    names = {name: name.replace("coordinator.", "coordinator-2.", 1) for name in record["files"]}
    names = {name: other.replace("trainer/", "trainer-2/", 1) for name, other in names.items()}
    again["files"] = {names[name]: item for name, item in record["files"].items()}
    (folder / "manifest-2.json").write_bytes(checksums.sealed(json.dumps(again).encode()))
    assert checkpoint_store.counting(tmp_path)[4].fencing_token == 2
    name = next(name for name in again["files"] if name.startswith(part))
    (folder / name).write_text("damaged")
    found = checkpoint_store.find(tmp_path)
    assert (found.step, len(found.skipped)) == (4, 1)
    bench = doubles.Bench(doubles.make_config(steps=6, checkpoint={"every": 2}), tmp_path)
    assert bench.run().steps == 6
    assert any(note == "Going on from the checkpoint at step 4." for note in bench.recorder.notes)
    files = checkpoints.Checkpoints(tmp_path, keep=2)
    files.go_on_from(found.stored)
    assert files.trainer_path(4).name == "trainer"


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_folder_that_vanishes_hides_no_other_checkpoint(tmp_path, monkeypatch, gone):
    files = checkpoints.Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        save(files, step)
    listdir = os.listdir

    def removed_meanwhile(folder: Path) -> list[str]:
        if Path(folder).name == f"step-{gone:08d}":
            shutil.rmtree(folder, ignore_errors=True)
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", removed_meanwhile)
    assert set(checkpoint_store.counting(tmp_path)) == {1, 2, 3} - {gone}


def test_an_emptied_folder_is_said_if_an_older_checkpoint_takes_its_place(tmp_path):
    (tmp_path / "checkpoints/step-00000002").mkdir(parents=True)
    assert checkpoint_store.find(tmp_path).step == -1, "killed at its first save"
    save(checkpoints.Checkpoints(tmp_path, keep=3), 1)
    (tmp_path / "checkpoints/step-00000002").mkdir()
    found = checkpoint_store.find(tmp_path)
    assert found.step == 1
    assert "step-00000002 is skipped: it is empty" in found.skipped[0]


@pytest.mark.parametrize("name", ["checkpoints", "fencing"])
def test_a_folder_that_cannot_be_listed_is_a_sentence(tmp_path, name):
    (tmp_path / name).symlink_to(name)
    with pytest.raises(protocols.DataError, match=rf"/{name} cannot be listed \(Too many levels of symbolic links\)"):
        checkpoint_store.find(tmp_path)


@pytest.fixture
def hung():
    """A disk that does not answer, on threads that end with the test."""
    release = threading.Event()
    yield lambda *_, **__: release.wait(60.0)
    release.set()


def test_a_run_ends_without_waiting_for_the_check_of_older_checkpoints(tmp_path, monkeypatch):
    release, began = threading.Event(), threading.Event()

    def hang(*_: Any) -> list[str]:
        began.set()
        release.wait(60.0)
        return []

    monkeypatch.setattr(checkpoint_store, "damaged", hang)
    run: Any = types.SimpleNamespace(_workdir=tmp_path)

    async def end_meanwhile() -> None:
        checking = asyncio.create_task(run_module.Coordinator._verify_older(run, 4))
        await asyncio.to_thread(began.wait)
        checking.cancel()

    rescue = threading.Timer(5.0, release.set)
    rescue.start()
    try:
        asyncio.run(end_meanwhile())
        assert not release.is_set(), "the end of the event loop waited for the check"
    finally:
        rescue.cancel()
        release.set()


def test_a_disk_that_does_not_answer_at_the_start_is_named(tmp_path, monkeypatch, hung):
    monkeypatch.setattr(checkpoint_store, "find", hung)
    bench = doubles.Bench(doubles.make_config(deadlines={"checkpoint": 0.1}), tmp_path)
    with pytest.raises(
        protocols.DeadlineMissed, match=r"/checkpoints did not finish within 0\.1 s: see whether its disk"
    ):
        asyncio.run(bench.coordinator.run())


def test_a_disk_that_does_not_answer_a_lost_trainer_is_named(tmp_path, monkeypatch, hung):
    monkeypatch.setattr(checkpoint_store, "find", hung)

    async def verify() -> None:
        unused: Any = None
        run = doubles.run_context(doubles.make_config(deadlines={"checkpoint": 0.1}), workdir=tmp_path)
        await saving.Saver(run, trainer=unused, state=unused).verified()

    with pytest.raises(protocols.DeadlineMissed, match=r"/checkpoints did not finish .*config\.deadlines\.checkpoint"):
        asyncio.run(verify())


def test_a_disk_that_does_not_answer_a_checkpoint_is_named(tmp_path, monkeypatch, hung):
    monkeypatch.setattr(checkpoints.Checkpoints, "write", hung)
    bench = doubles.Bench(doubles.make_config(deadlines={"checkpoint": 0.1}, checkpoint={"every": 1}), tmp_path)
    with pytest.raises(
        protocols.DeadlineMissed,
        match=r"Writing the checkpoint of step \d+ into .*/checkpoints did not finish within 0\.1 s: see whether its",
    ):
        asyncio.run(bench.coordinator.run())


def test_a_lost_record_of_a_token_lets_no_superseded_checkpoint_count(tmp_path, monkeypatch):
    old = fencing.take(tmp_path, lambda: -1)
    save(checkpoints.Checkpoints(tmp_path, 9, old), 1)
    save(checkpoints.Checkpoints(tmp_path, 9, fencing.take(tmp_path, lambda: 1)), 2)
    monkeypatch.setattr(old, "check", lambda: None)
    save(checkpoints.Checkpoints(tmp_path, 9, old), 7)
    assert checkpoints.newest_step(tmp_path) == 2
    file = tmp_path / "fencing" / "token-00000002.json"
    file.write_text(file.read_text().replace('"step": 1', '"step": 9'))
    assert checkpoints.newest_step(tmp_path) == 2
    assert fencing.damaged(tmp_path) == [f"{file} is damaged and is not used: it says which run held the workdir."]


def test_an_earlier_format_is_refused_and_damage_is_not_taken_for_it(tmp_path):
    files = checkpoints.Checkpoints(tmp_path, keep=2)
    save(files, 2)
    save(files, 4)
    manifest = tmp_path / "checkpoints" / "step-00000004" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 7', '"format": 4'))
    found = checkpoint_store.find(tmp_path)
    assert (found.step, len(found.skipped)) == (2, 1)
    manifest.write_text(json.dumps({"format": 4, "step": 4, "coordinator": "coordinator.json", "trainer": "trainer"}))
    with pytest.raises(protocols.DataError, match="has format 4, this program reads 7"):
        checkpoint_store.find(tmp_path)


def test_a_checkpoint_with_damaged_experts_is_passed_over(tmp_path):
    files = checkpoints.Checkpoints(tmp_path, keep=2)
    save(files, 5)
    save(files, 6)
    path = tmp_path / "checkpoints" / "step-00000006" / "routing.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    found = checkpoint_store.find(tmp_path)
    assert found.step == 5
    assert "routing.bin is damaged" in found.skipped[0]
    # No one reads experts to learn what the scheduler has learnt.
    assert files.load(6, routing=False)["step"] == 6


def test_another_sealed_file_in_the_place_of_a_manifest_is_passed_over(tmp_path):
    files = checkpoints.Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        files.write(step, checkpoints.encode({"step": step})).mkdir()
        files.commit(step)
    path = checkpoint_store.directory(tmp_path, 2) / "manifest.json"
    path.write_bytes(checksums.sealed(b'{"number": 1, "pid": 7}'))
    found = checkpoint_store.find(tmp_path)
    assert found.step == 1
    assert "manifest.json cannot be used" in found.skipped[0]


def test_a_damaged_checkpoint_is_named_with_the_way_out(tmp_path):
    files = checkpoints.Checkpoints(tmp_path, keep=2)
    save(files, 5)
    path = tmp_path / "checkpoints" / "step-00000005" / "coordinator.json"
    path.write_text(path.read_text()[:3])
    with pytest.raises(protocols.DataError, match=r"step-00000005 cannot be read.* has 3 bytes instead of \d+"):
        files.load(5)


def test_a_folder_that_cannot_hold_checkpoints_ends_the_run_with_a_sentence_when_it_needs_the_last_one(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    bench = doubles.Bench(doubles.make_config(checkpoint={"every": 2}), tmp_path)
    with pytest.raises(
        protocols.CheckpointFailed, match=r"checkpoints/step-00000004 cannot be written \(Not a directory\)"
    ):
        bench.run()
    assert [step for step, _ in bench.recorder.steps] == [1, 2, 3, 4]
    assert any(note.startswith("The checkpoint at step 2 failed, and the run goes on") for note in bench.recorder.notes)


def refusing(patch: pytest.MonkeyPatch, part: str, steps: set[int]) -> None:
    """A disk that is full whenever this part of one of these checkpoints is written; what had begun is left there."""
    write = checkpoints._write_durably

    def refuse(path: Path, pieces: Iterable[bytes], **further: Any) -> None:
        if path.name == part and int(path.parent.name.removeprefix("step-")) in steps:
            path.with_suffix(".partial").write_bytes(b"".join(pieces)[:3])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, pieces, **further)

    patch.setattr(checkpoints, "_write_durably", refuse)


@pytest.mark.parametrize("part", [checkpoint_store.COORDINATOR, "manifest.json"])
def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch, part):
    config = doubles.make_config(steps=6, checkpoint={"every": 2, "keep": 5})
    refusing(monkeypatch, part, {4})
    bench = doubles.Bench(config, tmp_path)
    assert bench.run().steps == 6
    assert sorted(item.name for item in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000006"]
    (failed,) = (note for note in bench.recorder.notes if "failed" in note)
    assert failed.startswith(
        "The checkpoint at step 4 failed, and the run goes on without it; killed before the next one, it would begin "
        "from the one at step 2. "
    )
    assert "No space left on device" in failed
    assert sorted(bench.trained["prompts"]) == sorted(f"task-{index}" for index in range(18))


def test_a_disk_that_goes_on_refusing_is_told_once_and_then_now_and_then(tmp_path, monkeypatch):
    config = doubles.make_config(steps=26, checkpoint={"every": 1})
    refusing(monkeypatch, checkpoint_store.COORDINATOR, set(range(2, 14)) | set(range(15, 26)))
    bench = doubles.Bench(config, tmp_path)
    assert bench.run().steps == 26
    failed = [note.split()[4] for note in bench.recorder.notes if "failed" in note]
    assert failed == ["2", "12", "15", "25"], "the first of each row, and one of ten after it"
    assert any("number 11 in a row" in note for note in bench.recorder.notes)


@pytest.mark.parametrize("part", [checkpoint_store.COORDINATOR, "manifest.json"])
def test_a_last_checkpoint_that_the_disk_refuses_ends_the_run_with_a_sentence_and_the_good_one_stays(
    tmp_path, monkeypatch, part
):
    config = doubles.make_config(checkpoint={"every": 2})
    with monkeypatch.context() as patch:
        refusing(patch, part, {4})
        with pytest.raises(protocols.CheckpointFailed, match=r"step-0+4 cannot be written \(No space left"):
            doubles.Bench(config, tmp_path).run()
    assert [item.name for item in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    resumed = doubles.Bench(config, tmp_path)
    assert resumed.run().steps == 4
    assert [step for step, _ in resumed.recorder.steps] == [3, 4]


def test_a_trainer_whose_save_fails_is_asked_again_at_the_next_one(tmp_path, monkeypatch):
    class Full(doubles.RecordingTrainer):
        saves = 0

        async def wait_saved(self):
            self.saves += 1
            if self.saves == 2:
                raise protocols.CheckpointFailed("the trainer's disk is full")
            await super().wait_saved()

    monkeypatch.setattr(doubles, "make_trainer", lambda log: Full(0.05, 3, log))
    bench = doubles.Bench(doubles.make_config(steps=6, checkpoint={"every": 1, "keep": 9}), tmp_path)
    assert bench.run().steps == 6
    assert sorted(item.name[-1] for item in (tmp_path / "checkpoints").iterdir()) == ["1", "3", "4", "5", "6"]
    assert sum("the trainer's disk is full" in note for note in bench.recorder.notes) == 1


class DiesInStep(doubles.RecordingTrainer):
    """Ends the run, as a kill would, in the training step after `last`."""

    last = 0

    async def train_step(self, batch: protocols.TrainBatch, shares: Any = ()):
        if self.state["version"] == self.last:
            raise protocols.WorkerLost("killed")
        return await super().train_step(batch, shares)


@hypothesis.settings(max_examples=6)
@hypothesis.given(
    staleness=st.integers(0, 2),
    every=st.integers(1, 3),
    dies_at=st.lists(st.integers(1, 7), max_size=4).map(sorted),
    tool_seconds=st.lists(st.floats(0.0, 2.0), min_size=3, max_size=9),
)
def test_wherever_it_dies_it_trains_the_same_set_of_prompts(tmp_path_factory, staleness, every, dies_at, tool_seconds):
    class Varied(doubles.TwoTurns):
        @staticmethod
        def tool_seconds(index: int) -> float:
            return tool_seconds[index % len(tool_seconds)]

    workdir = tmp_path_factory.mktemp("run")
    config = doubles.make_config(
        steps=8,
        coordinator={"max_staleness": staleness},
        checkpoint={"every": every, "keep": 1},
        warm_start={"steps": 1, "batch_size": 1},
    )
    for last in [*dies_at, 1000]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DiesInStep, "last", last)
            patch.setattr(doubles, "make_trainer", lambda log: DiesInStep(0.3, 3, log))
            bench = doubles.Bench(config, workdir, make_environment=Varied)
            if last < 8:
                with pytest.raises(protocols.WorkerLost, match="killed"):
                    bench.run()
            else:
                bench.run()
    assert sorted(bench.trained["prompts"]) == sorted(f"task-{index}" for index in range(24))
    assert max(bench.trained["staleness"]) <= staleness
    assert bench.trained["warm"] == 1


def test_groups_in_flight_go_on_from_their_tokens(tmp_path):
    """A long tool call is under way when the run ends; what was generated before it is not generated again."""
    config = doubles.make_config(
        steps=3, coordinator={"max_staleness": 2}, checkpoint={"every": 1}, task={"tool_seconds": 500.0}
    )

    class Slow(doubles.TwoTurns):
        tool_seconds = staticmethod(lambda index: 100.0 if index == 8 else 0.01)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiesInStep, "last", 2)
        patch.setattr(doubles, "make_trainer", lambda log: DiesInStep(0.3, 3, log))
        with pytest.raises(protocols.WorkerLost):
            doubles.Bench(config, tmp_path, make_environment=Slow).run()
    resumed = doubles.Bench(config, tmp_path, make_environment=Slow)
    before = checkpoints.Checkpoints(tmp_path, 2).load(checkpoints.newest_step(tmp_path))["groups"]
    resumed.run()
    held = [records.decode_group(record) for record in before["running"]]
    assert [group.task.prompt_id for group in held] == ["task-8"]
    kept = sum(trajectory.generated_tokens for group in held for trajectory in group.trajectories)
    kept += sum(
        trajectory.generated_tokens
        for record in before["finished"]
        for trajectory in records.decode_group(record).trajectories
    )
    trained = sum(scalars["tokens/trained"] for _, scalars in resumed.recorder.steps)
    generated = sum(scalars["tokens/generated"] for _, scalars in resumed.recorder.steps)
    assert kept > 0
    assert generated == trained - kept
