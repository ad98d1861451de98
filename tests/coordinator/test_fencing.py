"""Fencing tokens: a run that another has taken over writes nothing more, whatever its clock or its disk says."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from pathlib import Path

import coordinator_doubles as doubles
import pytest

from libra_jax import protocols
from libra_jax.coordinator import checkpoints, fencing
from libra_jax.telemetry import memory, recorder
from libra_jax.utils import processes

CONFIG = doubles.make_config(steps=6, checkpoint={"every": 1, "keep": 9}, coordinator={"max_staleness": 1})


def take(workdir: Path) -> fencing.Token:
    return fencing.take(workdir, lambda: checkpoints.newest_step(workdir))


def save(files: checkpoints.Checkpoints, step: int, content: str = "") -> None:
    path = files.write(step, checkpoints.encode({"step": step, "content": content}))
    path.mkdir()
    (path / "state.json").write_text(content)
    files.commit(step)


def test_each_start_takes_the_next_token_and_ends_those_before(tmp_path):
    first = take(tmp_path)
    first.check()
    assert (first.number, first.may_write()) == (1, True)
    second = take(tmp_path)
    assert (second.number, first.may_write(), second.may_write()) == (2, False, True)
    holder = fencing.newest(tmp_path)
    assert (holder.number, holder.step) == (2, -1)
    with pytest.raises(fencing.Superseded, match=rf"taken over by the run of process {holder.pid} on {holder.host} "):
        first.check()


def _take_many(workdir: str) -> list[int]:
    return [take(Path(workdir)).number for _ in range(20)]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_no_two_processes_get_the_same_token(tmp_path):
    with processes.pool(3) as pool:
        taken = list(pool.map(_take_many, [str(tmp_path)] * 3, timeout=120))
    assert sorted(itertools.chain(*taken)) == list(range(1, 61))


@pytest.mark.parametrize("links", [True, False])
def test_a_token_says_who_took_it_from_its_first_moment_and_is_taken_once(tmp_path, monkeypatch, links):
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)

    def killed() -> int:
        raise KeyboardInterrupt  # before it knows where it goes on

    with pytest.raises(KeyboardInterrupt):
        fencing.take(tmp_path, killed)
    assert (fencing.newest(tmp_path).number, fencing.newest(tmp_path).pid) == (1, os.getpid())
    assert take(tmp_path).number == 2
    monkeypatch.setattr(fencing, "_numbers", lambda workdir: [])  # it looked before the other two were there
    assert take(tmp_path).number == 3
    assert sorted(path.name for path in (tmp_path / fencing.FOLDER).iterdir()) == [
        f"token-0000000{number}.json" for number in (1, 2, 3)
    ]


def test_a_superseded_run_neither_begins_nor_commits_a_checkpoint(tmp_path):
    files = checkpoints.Checkpoints(tmp_path, 9, take(tmp_path))
    save(files, 1)
    (files.write(2, checkpoints.encode({"step": 2}))).mkdir()
    take(tmp_path)
    with pytest.raises(fencing.Superseded):
        files.commit(2)
    with pytest.raises(fencing.Superseded):
        files.write(3, checkpoints.encode({}))
    files.discard(2)
    assert (tmp_path / "checkpoints" / "step-00000002").exists(), "nor removes what may be the other's"
    assert checkpoints.newest_step(tmp_path) == 1


def test_a_manifest_renamed_after_its_run_was_superseded_is_void(tmp_path, monkeypatch):
    """The process was stopped between its last look and the renaming, for as long as its successor took to start."""
    old = take(tmp_path)
    files = checkpoints.Checkpoints(tmp_path, 9, old)
    save(files, 4, "old")
    new = take(tmp_path)
    assert fencing.newest(tmp_path).step == 4
    monkeypatch.setattr(old, "check", lambda: None)
    save(files, 5, "old")
    assert checkpoints.newest_step(tmp_path) == 4
    successor = checkpoints.Checkpoints(tmp_path, 9, new)
    save(successor, 5, "new")
    assert checkpoints.newest_step(tmp_path) == 5
    assert successor.load(5)["content"] == "new"
    assert (successor.trainer_path(5) / "state.json").read_text() == "new"


@pytest.mark.parametrize("keep", [1, 2])
def test_a_commit_that_comes_late_costs_its_successor_nothing(tmp_path, monkeypatch, keep):
    """The old process hangs inside its commit, at the disk, until its successor has come further."""
    old = take(tmp_path)
    files = checkpoints.Checkpoints(tmp_path, keep, old)
    save(files, 4, "old")
    (files.write(5, checkpoints.encode({"content": "old"}))).mkdir()
    successors = []

    def late(path: Path, flags: int, *mode: int, real=os.open) -> int:
        if not Path(path).is_dir():
            return real(path, flags, *mode)
        monkeypatch.undo()
        successors.append(checkpoints.Checkpoints(tmp_path, keep, take(tmp_path)))
        save(successors[0], 6, "new")
        (successors[0].write(7, checkpoints.encode({"content": "new"}))).mkdir()
        return os.open(tmp_path, flags)

    # The manifest has been renamed, and its folder is opened to make the rename durable.
    monkeypatch.setattr(os, "open", late)
    with pytest.raises(fencing.Superseded):
        files.commit(5)
    assert successors[0].load(6)["content"] == "new"
    successors[0].commit(7)
    assert checkpoints.newest_step(tmp_path) == 7
    assert successors[0].load(7)["content"] == "new"


def test_what_a_superseded_trainer_still_writes_lands_beside_its_successors_part(tmp_path):
    take(tmp_path)
    new = take(tmp_path)
    files = checkpoints.Checkpoints(tmp_path, 9, new)
    path = files.write(1, checkpoints.encode({}))
    assert path.name == f"trainer-{new.number}"
    (path.parent / "trainer").mkdir()  # the old one's asynchronous save, come late
    path.mkdir()
    files.commit(1)
    assert files.trainer_path(1) == path
    assert not (path.parent / "trainer").exists()


def test_a_workdir_of_an_earlier_version_is_refused(tmp_path):
    (tmp_path / "epochs").mkdir()
    with pytest.raises(protocols.DataError, match="earlier version of this program, which kept its fencing tokens in"):
        take(tmp_path)
    assert not (tmp_path / "fencing").exists()


def test_checkpoints_without_a_fencing_token_count(tmp_path):
    save(checkpoints.Checkpoints(tmp_path, 9), 3)
    take(tmp_path)
    assert checkpoints.newest_step(tmp_path) == 3


def test_a_checkpoint_that_a_person_removed_leaves_the_ones_before_it_in_force(tmp_path):
    files = checkpoints.Checkpoints(tmp_path, 9, take(tmp_path))
    save(files, 1)
    save(files, 2)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000002")
    again = checkpoints.Checkpoints(tmp_path, 9, take(tmp_path))
    save(again, 2)
    assert checkpoints.newest_step(tmp_path) == 2


def test_records_that_may_not_be_written_any_more_are_dropped_without_a_word(tmp_path, caplog):
    config = doubles.make_config(telemetry={"console": False})
    token = take(tmp_path)
    record = recorder.create(config, tmp_path, lambda: 0.0, guard=token.may_write)
    record.metrics(1, {"loss": 1.0})
    record.flush()
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    take(tmp_path)
    record.metrics(2, {"loss": 2.0})
    record.trajectory({"step": 2})
    record.span("trainer", "train step", 0.0, 1.0)
    record.close()
    assert {path: path.read_bytes() for path in written} == written
    assert not caplog.records


def test_a_run_that_is_taken_over_stops_with_a_sentence_and_its_successor_trains_every_prompt_once(tmp_path):
    """The first run goes on for as long as it can: its successor has begun when it notices."""
    token = take(tmp_path)

    class TakenOver(doubles.RecordingTrainer):
        async def train_step(self, batch, shares=()):
            if self.state["version"] == 3:
                take(tmp_path)
            return await super().train_step(batch, shares)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "make_trainer", lambda log: TakenOver(0.05, 3, log))
        bench = doubles.Bench(CONFIG, tmp_path, fencing=token)
        with pytest.raises(fencing.Superseded, match="this one stops and writes nothing more; nothing is lost"):
            bench.run()
    newest = checkpoints.newest_step(tmp_path)
    assert newest in (2, 3)
    successor = doubles.Bench(CONFIG, tmp_path, fencing=take(tmp_path), recorder=memory.MemoryRecorder())
    assert successor.run().steps == 6
    assert [step for step, _ in successor.recorder.steps] == list(range(newest + 1, 7))
    assert sorted(successor.trained["prompts"]) == sorted(f"task-{index}" for index in range(18))
    manifests = sorted((tmp_path / "checkpoints").glob("*/manifest*.json"))
    assert [json.loads(file.read_text())["fencing_token"] for file in manifests][-3:] == [3, 3, 3]


def test_a_workdir_that_cannot_be_reached_for_a_while_ends_nothing(tmp_path, monkeypatch):
    token = take(tmp_path)

    def unreachable(path: Path) -> list[str]:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(fencing.os, "listdir", unreachable)
        assert token.may_write()
        with pytest.raises(protocols.CheckpointFailed, match="Input/output error"):
            checkpoints.Checkpoints(tmp_path, 1, token).write(1, checkpoints.encode({}))
    token.check()
