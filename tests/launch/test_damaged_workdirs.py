"""A run whose folder is damaged goes on from a good checkpoint with a sentence, or ends with one; never silently."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import shutil
from pathlib import Path

import damage
import jax
import pytest

from libra_jax import protocols
from libra_jax.coordinator import fencing
from libra_jax.telemetry import files, metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A workdir, which no test changes."""
    workdir = tmp_path_factory.mktemp("base") / "run"
    damage.prepare(workdir)
    return workdir


@pytest.fixture(scope="module")
def good(base, tmp_path_factory):
    found = damage.good(base, tmp_path_factory.mktemp("good"))
    assert len({outcome.weights for outcome in found.values()}) == damage.STEPS, "else one passes for another"
    return found


@pytest.fixture
def workdir(base, tmp_path):
    return Path(shutil.copytree(base, tmp_path / "run"))


def check(outcome: damage.Outcome, good: dict[int, damage.Outcome], workdir: Path) -> None:
    """Nothing is lost without a sentence, and what a run goes on from is what it had written, bit for bit."""
    said = f"{outcome.file}, {outcome.how}:\n{outcome.error}\n{outcome.said}"
    assert not outcome.crashed, said
    if outcome.step is None:
        assert outcome.error, said
        assert outcome.told or outcome.file == "config.json", said  # that sentence names the field
        return
    assert outcome.state == good[outcome.step].state, said
    newest_is_damaged = outcome.file.startswith(f"checkpoints/step-{damage.STEPS:08d}/")
    assert (outcome.step < damage.STEPS) == newest_is_damaged, said
    for name, lines in outcome.records.items():
        expected = good[outcome.step].records[name]
        if name == files.CONFIG_HISTORY_FILE:  # the last line is this start's own, of another time, if it changes steps
            lines, expected = lines if outcome.file.startswith("model/") else lines[:-1], expected[:-1]
        if name == "timeline.json":  # it has this start's events, too
            events = [line.rstrip(b"\n,") for line in lines]
            assert all(event in (b"[", b"]", b"") or not files.damage(event) for event in events), said
        elif outcome.file == name:
            assert set(lines) <= set(expected), said
        else:
            assert lines == expected, said
    if outcome.file == "config.json":  # what may differ from start to start is taken from the command
        assert outcome.told or json.loads((workdir / "config.json").read_text())["steps"] == damage.STEPS + 1, said
    elif Path(outcome.file).parts[0] not in damage.UNREAD:
        assert outcome.told, said


def drill(base: Path, good: dict[int, damage.Outcome], scratch: Path, count: int, seed: int) -> str:
    """Runs trials, checks each, and returns the table of what came of them."""
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for outcome in damage.trials(base, scratch, count, seed):
        check(outcome, good, scratch / "trial")
        table[damage.kind(outcome.file)][outcome.what] += 1
    rows = [
        f"{kind}: {', '.join(f'{what} {many}' for what, many in sorted(table[kind].items()))}" for kind in sorted(table)
    ]
    return "\n".join(rows)


@pytest.mark.drill
def test_two_hundred_damages_of_every_file_are_never_silent(base, good, tmp_path):
    told = drill(base, good, tmp_path, 200, seed=int(os.environ.get("LIBRA_DRILL_SEED", "0")))
    print(f"\n{told}")


def test_a_sample_of_damaged_files_is_never_silent(base, good, tmp_path):
    drill(base, good, tmp_path, 8, seed=22)


@pytest.mark.parametrize("part", ["coordinator-2.json", "manifest-2.json", "trainer-2"])
def test_a_missing_part_falls_back_to_the_checkpoint_before(workdir, good, part):
    path = workdir / "checkpoints" / f"step-{damage.STEPS:08d}" / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    outcome = damage.go_on(damage.settings(damage.STEPS + 1), workdir, damage.Outcome("", ""))
    assert (outcome.step, outcome.error) == (damage.STEPS - 1, ""), outcome
    assert outcome.state == good[damage.STEPS - 1].state
    assert f"step-{damage.STEPS:08d} is skipped: " in outcome.said
    assert max(metrics.read(workdir / "metrics.jsonl")) == damage.STEPS - 1
    assert fencing.newest(workdir).step == damage.STEPS - 1


def test_a_run_that_fell_back_trains_each_step_once(workdir):
    array = max(
        (workdir / "checkpoints" / f"step-{damage.STEPS:08d}").rglob("d/*"), key=lambda file: file.stat().st_size
    )
    data = bytearray(array.read_bytes())
    data[len(data) // 2] ^= 4
    array.write_bytes(data)
    damage.run(damage.settings(damage.STEPS + 1), workdir)
    lines = [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, damage.STEPS + 2))


def test_an_edited_data_position_is_not_believed(workdir, good):
    path = workdir / "checkpoints" / f"step-{damage.STEPS:08d}" / "coordinator-2.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "data_position": state["data_position"] + 1}))
    outcome = damage.go_on(damage.settings(damage.STEPS + 1), workdir, damage.Outcome("", ""))
    assert (outcome.step, outcome.state) == (damage.STEPS - 1, good[damage.STEPS - 1].state)


def test_a_run_without_a_good_checkpoint_ends_and_removes_nothing(workdir):
    for file in workdir.glob("checkpoints/*/coordinator*.json"):
        file.write_text(file.read_text().replace("data_position", "data_positiom"))
    before = damage.files(workdir)
    outcome = damage.go_on(damage.settings(damage.STEPS + 1), workdir, damage.Outcome("", ""))
    assert "can be used, and nothing has been removed" in outcome.error
    assert not outcome.crashed
    assert damage.files(workdir) == before


def test_a_loss_that_stays_nan_ends_the_run(workdir, monkeypatch):
    restore = damage.trainer.TrainerActor.restore

    def spoil(actor, path):
        version = restore(actor, path)
        state = actor.running().learner.state
        spoilt = jax.tree.map(lambda leaf: leaf * float("nan"), state.params)
        actor.running().learner.state = dataclasses.replace(state, params=spoilt)
        return version

    monkeypatch.setattr(damage.trainer.TrainerActor, "restore", spoil)
    with pytest.raises(protocols.LibraError, match=r"max_skipped_steps: 3 steps in a row .* loss nan"):
        damage.run(damage.settings(damage.STEPS + 9), workdir)
    assert max(metrics.read(workdir / "metrics.jsonl")) == damage.STEPS + 2


def test_weights_that_are_not_finite_are_never_exported(workdir, monkeypatch):
    finish = damage.trainer.TrainerActor.train_step

    def spoil(actor, batch, *more):
        told = finish(actor, batch, *more)
        state = actor.running().learner.state
        spoilt = jax.tree.map(lambda leaf: leaf * float("nan"), state.params)
        actor.running().learner.state = dataclasses.replace(state, params=spoilt)
        return told

    monkeypatch.setattr(damage.trainer.TrainerActor, "train_step", spoil)
    before = (workdir / "model" / "model.safetensors").read_bytes()
    with pytest.raises(protocols.LibraError, match=r"not written, because .* not finite"):
        damage.run(damage.settings(damage.STEPS + 1), workdir)
    assert (workdir / "model" / "model.safetensors").read_bytes() == before
    assert not (workdir / "checkpoints" / f"step-{damage.STEPS + 1:08d}").exists()
