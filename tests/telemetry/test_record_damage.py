"""A record knows its file, its run and its number: what is gone or foreign is said by every reader, and at a resume."""

import random

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.telemetry import files, metrics, recorder, samples, status, trace
from libra_jax.telemetry.report import recorded_run, timeline

QUIET = config_lib.TelemetryConfig(console=False, tensorboard=False)
NAMES = (metrics.METRICS_FILE, trace.TRACE_FILE, samples.SAMPLES_FILE)
STEPS = 12


def record(workdir, steps, records=None):
    """Records some steps as a run does, and leaves the status file of a run. Returns what a checkpoint would hold."""
    run = status.RunStatus("demo", STEPS, 1, lambda: 0.0)
    config = config_lib.RunConfig(name="demo", telemetry=QUIET)
    made = recorder.create(config, workdir, lambda: 0.0, watcher=run, records=records)
    run.recorder = made
    for step in steps:
        for rollout in range(3):
            turns = [{"generated_tokens": 3, "tool": None, "status": None, "payload_tokens": 0, "tool_seconds": 0.0}]
            name = {"trajectory_id": f"{step}/{rollout}", "prompt_id": "p", "prompt_tokens": 4}
            made.trajectory({**name, "step": step, "turns": turns})
        made.sample({"step": step, "prompt": "?", "turns": [], "reward": 1.0, "rank": 1, "of": 1})
        made.span("trainer", "train step", step, step + 0.5)
        made.metrics(step, {"loss": 0.5})
    (workdir / status.STATUS_FILE).write_bytes(files.json_line(run.view()))
    held = made.records()
    made.close()
    return held


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The records of another run."""
    folder = tmp_path_factory.mktemp("other") / "run"
    record(folder, range(1, STEPS + 1))
    return folder


def swapped(lines, chance):
    at = chance.randrange(len(lines) - 1)
    return [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]


LINES = {
    "two thirds": lambda lines, chance: lines[: len(lines) * 2 // 3],
    "the last third": lambda lines, chance: lines[len(lines) // 3 :],
    "the last line gone": lambda lines, chance: lines[:-1],
    "a line gone": lambda lines, chance: [line for at, line in enumerate(lines) if at != len(lines) // 2],
    "a line twice": lambda lines, chance: [*lines[:5], lines[chance.randrange(5)], *lines[5:]],
    "two lines swapped": swapped,
    "emptied": lambda lines, chance: [],
}
"""Damages after which each line is as a run wrote it."""


def damages(other):
    """Names of damages, each with a function of the file's path and its lines."""
    found = {
        how: lambda path, lines, edit=edit: path.write_bytes(b"".join(edit(lines, random.Random(7))))
        for how, edit in LINES.items()
    }
    found["deleted"] = lambda path, lines: path.unlink()
    found["cut inside a line"] = lambda path, lines: path.write_bytes(b"".join(lines)[: len(b"".join(lines)) * 2 // 3])
    found["another run's"] = lambda path, lines: path.write_bytes((other / path.name).read_bytes())
    found["a line of another run"] = lambda path, lines: path.write_bytes(
        b"".join([*lines[:4], (other / path.name).read_bytes().splitlines(True)[4], *lines[4:]])
    )
    for name in NAMES:
        found[f"{name}'s lines"] = lambda path, lines, name=name: path.write_bytes((path.parent / name).read_bytes())
        found[f"a line of {name}"] = lambda path, lines, name=name: path.write_bytes(
            b"".join([*lines[:4], (path.parent / name).read_bytes().splitlines(True)[4], *lines[4:]])
        )
    return found


READERS = {
    metrics.METRICS_FILE: lambda workdir: metrics.read(workdir / metrics.METRICS_FILE),
    trace.TRACE_FILE: lambda workdir: list(files.whole_json_lines(workdir / trace.TRACE_FILE)),
    samples.SAMPLES_FILE: lambda workdir: list(samples.read(workdir / samples.SAMPLES_FILE)),
}


@pytest.mark.parametrize("name", NAMES)
def test_no_damage_to_records_is_silent_at_a_resume_or_to_a_reader(name, other, tmp_path, caplog):
    for number, (how, damage) in enumerate(damages(other).items()):
        if how in (f"{name}'s lines", f"a line of {name}"):
            continue
        workdir = tmp_path / str(number)
        held = record(workdir, range(1, STEPS + 1))
        lines = (workdir / name).read_bytes().splitlines(True)
        caplog.clear()
        READERS[name](workdir)
        assert recorder.cut_back(workdir, STEPS, held, look=True) == []
        assert caplog.text == "", how
        damage(workdir / name, lines)
        READERS[name](workdir)
        assert name in caplog.text, how
        recorded_run.load(workdir)
        looked = recorder.cut_back(workdir, STEPS, held, look=True)
        told = recorder.cut_back(workdir, STEPS, held)
        assert any(name in sentence for sentence in told), how
        assert len(looked) == len(told), how
        kept = (workdir / name).read_bytes().splitlines(True) if (workdir / name).exists() else []
        assert set(kept) <= set(lines), "what is kept is what the run wrote"
        caplog.clear()
        record(workdir, range(STEPS + 1, STEPS + 3), held)
        READERS[name](workdir)
        if set(kept) != set(lines):
            assert f"{name} lacks records" in caplog.text, "what is gone stays said"
        assert (workdir / name).read_bytes().splitlines(True)[: len(kept)] == kept


def test_a_resume_says_which_steps_records_are_gone(tmp_path):
    held = record(tmp_path, range(1, STEPS + 1))
    for name in NAMES[:2]:
        lines = (tmp_path / name).read_bytes().splitlines(True)
        (tmp_path / name).write_bytes(b"".join([*lines[: len(lines) // 3], *lines[len(lines) // 2 : -2]]))
    assert recorder.cut_back(tmp_path, STEPS, held) == [
        f"{tmp_path}/metrics.jsonl lacks records 5 to 6, of step 5 to step 6.",
        f"{tmp_path}/metrics.jsonl lacks records 11 to 12, of step 11 to step 12.",
        f"{tmp_path}/trace.jsonl lacks records 13 to 18, of step 4 to step 7.",
        f"{tmp_path}/trace.jsonl lacks records 35 to 36, of step 12 to step 12.",
    ]


@pytest.mark.parametrize("how", ["emptied", "cut", "replaced", "appended"])
def test_a_file_that_changes_while_the_run_writes_it_is_said(how, tmp_path):
    told = []
    path = tmp_path / trace.TRACE_FILE
    file = files.LineFile(path, lambda key, sentence: told.append(sentence))
    for step in (1, 2, 3):
        file.append({"step": step})
        file.flush()
    data = path.read_bytes()
    if how == "replaced":
        (tmp_path / "new").write_bytes(data)
        (tmp_path / "new").rename(path)
    else:
        path.write_bytes({"emptied": b"", "cut": data[: len(data) * 2 // 3 - 3], "appended": data + data}[how])
    file.append({"step": 4})
    file.flush()
    file.append({"step": 5})
    file.close()
    assert len(told) == 1
    assert "trace.jsonl was " in told[0]
    steps = [record["step"] for record in files.whole_json_lines(path)]
    assert steps[-2:] == [4, 5], "no record is glued to a torn one"


def test_a_foreign_trace_is_refused_and_a_selection_of_a_copy_is_not(other, tmp_path):
    workdir = tmp_path / "run"
    record(workdir, range(1, STEPS + 1))
    path = workdir / trace.TRACE_FILE
    lines = path.read_bytes().splitlines(True)
    chosen = tmp_path / "chosen.jsonl"
    chosen.write_bytes(b"".join([*lines[5:2:-1], *(other / trace.TRACE_FILE).read_bytes().splitlines(True)]))
    assert len(trace.read(chosen)) == 3 + len(lines)
    path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(protocols.DataError, match=r"holds 35 of the 36 records"):
        trace.read(path)
    path.write_bytes((other / trace.TRACE_FILE).read_bytes())
    with pytest.raises(protocols.DataError, match=r"line 1: it is a record of another run"):
        trace.read(path)


def test_line_ends_of_another_system_hide_no_damage(tmp_path, caplog):
    record(tmp_path, range(1, 4))
    path = tmp_path / metrics.METRICS_FILE
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert [numbers["loss"] for numbers in metrics.read(path).values()] == [0.5] * 3
    assert caplog.text == ""
    path.write_bytes(path.read_bytes().replace(b'"loss": 0.5', b'"loss": 0.7', 1))
    assert list(metrics.read(path)) == [2, 3]
    assert "line 1 is left out: its checksum is not the one it was written with" in caplog.text


def test_a_record_that_is_twice_in_a_trace_is_refused(tmp_path):
    record(tmp_path, range(1, 4))
    path = tmp_path / trace.TRACE_FILE
    lines = path.read_bytes().splitlines(True)
    path.write_bytes(b"".join([*lines[:2], *lines[1:]]))
    with pytest.raises(protocols.DataError, match=r"line 3: its record is in the file twice"):
        trace.read(path)


@pytest.mark.parametrize("name", [*NAMES, timeline.TIMELINE_FILE])
def test_what_is_no_file_is_named_in_a_sentence(name, tmp_path):
    record(tmp_path, range(1, 4))
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(protocols.DataError, match=rf"{name} cannot be read"):
        recorded_run.load(tmp_path)


@pytest.mark.parametrize("how", ["digit", "no JSON", "end"])
def test_no_damage_to_a_timeline_is_silent_to_a_reader(how, tmp_path, caplog):
    record(tmp_path, range(1, STEPS + 1))
    path = tmp_path / timeline.TIMELINE_FILE
    whole, data = list(timeline.read(path)), path.read_bytes()
    assert caplog.text == ""
    place = data.index(b'"dur": 500000') + 7
    damaged = {
        "digit": data[:place] + b"9" + data[place + 1 :],
        "no JSON": data[:place] + b"x" + data[place + 1 :],
        "end": data[: len(data) * 2 // 3],
    }
    path.write_bytes(damaged[how])
    spans = list(timeline.read(path))
    assert ("timeline.json lacks events" if how == "end" else "is left out: it is damaged") in caplog.text
    assert spans == (whole[: len(spans)] if how == "end" else whole[1:]), "the events after a damaged one are read"


@pytest.mark.parametrize("how", ["cut", "deleted"])
def test_a_timeline_that_lost_events_is_said_at_a_resume(how, tmp_path):
    held = record(tmp_path, range(1, STEPS + 1))
    path = tmp_path / timeline.TIMELINE_FILE
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3]) if how == "cut" else path.unlink()
    (sentence,) = recorder.cut_back(tmp_path, STEPS, held)
    assert "timeline.json lacks events" in sentence
