"""metrics.jsonl, trace.jsonl and the resume cut: whole records whatever happens."""

import json
import math
import re
import tempfile
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax.protocols import DataError, LibraError
from libra_jax.telemetry import files, metrics, recorder, trace


def no_warning(key: str, sentence: str) -> None:
    pytest.fail(f"unexpected warning {key}: {sentence}")


def strict(line: str) -> dict:
    """Parses as strict parsers do: NaN and Infinity are refused."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not strict JSON")

    record = json.loads(line, parse_constant=refuse)
    record.pop("checksum")
    return record


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


def write_metrics(workdir: Path, steps: range) -> None:
    file = files.LineFile(workdir / metrics.METRICS_FILE, no_warning)
    for step in steps:
        scalars = {"reward/mean": step / 100, "loss": math.nan if step % 3 == 0 else 1.0}
        file.append(metrics.encode(step, scalars))
    file.close()


@given(cut=st.integers(0, 10**6), more=st.integers(0, 3))
@settings(max_examples=60)
def test_metrics_lines_are_whole_after_a_kill_at_any_byte_and_a_restart(folder, cut, more):
    path = folder / metrics.METRICS_FILE
    path.unlink(missing_ok=True)
    write_metrics(folder, range(1, 6))
    data = path.read_bytes()
    path.write_bytes(data[: cut % (len(data) + 1)])
    survived = path.read_bytes().count(b"\n")
    write_metrics(folder, range(survived + 1, survived + 1 + more))
    records = [strict(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, survived + more + 1))
    assert list(metrics.read(path)) == list(range(1, survived + more + 1))


@given(st.dictionaries(st.text(max_size=8), st.floats(), max_size=5), st.integers(0, 10**9))
@settings(max_examples=80)
def test_numbers_survive_the_file_exactly_also_those_that_are_not_finite(scalars, step):
    line = files.json_line(metrics.encode(step, scalars))
    assert strict(line.decode())["step"] == step
    expected = {name: value for name, value in scalars.items() if name not in ("step", "nonfinite")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        path.write_bytes(line)
        back = metrics.read(path)[step]
    assert {name: repr(value) for name, value in back.items() if name in expected} == {
        name: repr(value) for name, value in expected.items()
    }


def test_a_number_that_is_not_finite_is_null_and_named(tmp_path):
    write_metrics(tmp_path, range(3, 4))
    assert strict((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 3,
        "reward/mean": 0.03,
        "loss": None,
        "nonfinite": {"loss": "nan"},
    }


def test_objects_of_one_step_are_merged_when_read(tmp_path):
    file = files.LineFile(tmp_path / "metrics.jsonl", no_warning)
    for step, scalars in ((2, {"loss": 1.0}), (1, {"loss": 2.0}), (2, {"evaluation/reward": 0.5})):
        file.append(metrics.encode(step, scalars))
    file.close()
    assert metrics.read(tmp_path / "metrics.jsonl") == {1: {"loss": 2.0}, 2: {"loss": 1.0, "evaluation/reward": 0.5}}


@given(
    steps=st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=12),
    step=st.integers(-1, 10),
    torn=st.integers(0, 40),
)
@settings(max_examples=40)
def test_cut_back_keeps_what_the_checkpoint_saw_and_is_idempotent(folder, steps, step, torn):
    steps = sorted((s for s in steps if s is not None), key=int) if None not in steps else steps
    names = ("metrics.jsonl", "trace.jsonl", "transitions.jsonl")
    for name in names:
        lines = [json.dumps({"n": n, "step": s} if s is not None else {"n": n}) + "\n" for n, s in enumerate(steps)]
        (folder / name).write_text("".join(lines) + '{"n": 99, "step": 0, "long": "aaaaaaaaaaaaaaaaaa'[:torn])
    recorder.cut_back(folder, step)
    kept, keep = [], True
    for number, recorded in enumerate(steps):
        keep = keep if recorded is None else recorded <= step
        if keep:
            kept.append(number)
    for name in names:
        once = (folder / name).read_text()
        assert [json.loads(line)["n"] for line in once.splitlines()] == kept
        recorder.cut_back(folder, step)
        assert (folder / name).read_text() == once
    assert not list(folder.glob("*.partial"))


def test_a_damaged_line_is_named_and_removed_when_a_run_goes_on(tmp_path):
    write_metrics(tmp_path, range(1, 6))
    path = tmp_path / metrics.METRICS_FILE
    path.write_bytes(path.read_bytes().replace(b'"reward/mean": 0.03', b'"reward/mean": 0.07'))
    assert list(metrics.read(path)) == [1, 2, 4, 5]
    (sentence,) = recorder.cut_back(tmp_path, 4)
    assert sentence.endswith("removed: line 3 (its checksum is not the one it was written with).")
    assert list(metrics.read(path)) == [1, 2, 4]
    assert recorder.cut_back(tmp_path, 4) == []


def test_a_damaged_change_of_settings_is_named_and_no_other_is_cut_back(tmp_path):
    path = tmp_path / files.CONFIG_HISTORY_FILE
    lines = [files.json_line({"step": step, "changes": {"steps": [step, step + 1]}}) for step in (2, 4, 6)]
    path.write_bytes(b"".join([lines[0], lines[1].replace(b"4", b"5", 1), lines[2]]))
    (sentence,) = recorder.cut_back(tmp_path, 3)
    assert sentence.startswith(f"{path} was damaged, and these lines are removed: line 2 (")
    assert path.read_bytes() == lines[0] + lines[2]


@given(bit=st.integers(0, 10**6))
@settings(max_examples=60)
def test_any_flipped_bit_of_a_line_is_damage(bit):
    line = files.json_line({"step": 3, "worker": "rollout-1", "loss": 0.5})[:-1]
    assert not files.damage(line)
    place = bit % (8 * len(line))
    flipped = bytearray(line)
    flipped[place // 8] ^= 1 << place % 8
    assert files.damage(bytes(flipped))


@pytest.mark.parametrize("name", ["trace_id", "sha256", "md5", "digest_1"])
def test_a_hash_at_the_end_of_another_programs_line_is_no_damage(tmp_path, name):
    line = json.dumps({"step": 1, name: "0123456789abcdef" * 2}).encode()
    assert files.damage(line) == ""
    (tmp_path / metrics.METRICS_FILE).write_bytes(line + b"\n")
    assert recorder.cut_back(tmp_path, 1) == []
    assert (tmp_path / metrics.METRICS_FILE).read_bytes() == line + b"\n"


@pytest.mark.parametrize("name", ["checksun", "checksm", "checksuum", "hecksum"])
def test_one_edit_of_the_checksums_name_is_damage(name):
    line = files.json_line({"step": 1})[:-1].replace(b"checksum", name.encode())
    assert files.damage(line) == "its checksum is damaged"


def test_a_removed_file_is_told_of_and_a_new_one_goes_on(tmp_path):
    told = []
    path = tmp_path / metrics.METRICS_FILE
    file = files.LineFile(path, lambda key, sentence: told.append(sentence))
    for step in (1, 2, 3):
        file.append(metrics.encode(step, {"loss": 1.0}))
        file.flush()
        path.unlink()
    file.append(metrics.encode(4, {"loss": 1.0}))
    file.close()
    assert len(told) == 3
    assert "was removed while the run writes it: the run goes on in a new file" in told[0]
    assert list(metrics.read(path)) == [4]


def test_cut_back_of_a_workdir_without_records_does_nothing(tmp_path):
    assert recorder.cut_back(tmp_path, 3) == []
    assert list(tmp_path.iterdir()) == []


def test_records_that_cannot_be_cut_back_are_named(tmp_path):
    (tmp_path / metrics.METRICS_FILE).mkdir()
    with pytest.raises(LibraError, match=r"metrics\.jsonl cannot be cut back to step 3 \(Is a directory\)"):
        recorder.cut_back(tmp_path, 3)


def test_a_kill_inside_cut_back_loses_nothing(tmp_path, monkeypatch):
    write_metrics(tmp_path, range(1, 6))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recorder.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        recorder.cut_back(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    monkeypatch.undo()
    recorder.cut_back(tmp_path, 2)
    assert list(metrics.read(tmp_path / "metrics.jsonl")) == [1, 2]


def record(**changes) -> dict:
    turn = {"generated_tokens": 5, "tool": "calc", "status": "success", "payload_tokens": 3, "tool_seconds": 0.1}
    return {"trajectory_id": "p/0", "prompt_id": "p", "prompt_tokens": 7, "turns": [turn], **changes}


def test_a_trace_round_trips_with_its_unknown_keys(tmp_path):
    sink = files.LineFile(tmp_path / trace.TRACE_FILE, no_warning)
    sink.append(record(colour="blue", reward=math.nan, step=4))
    sink.append(record(turns=[]))
    sink.close()
    first, second = trace.read(tmp_path / "trace.jsonl")
    assert first == record(colour="blue", reward=None, step=4)
    assert second["turns"] == []


def test_values_of_array_libraries_and_odd_ones_are_written_as_plain_json():
    record = {"count": numpy.int64(3), "mean": numpy.float32(0.5), "bad": numpy.float64("inf"), "list": (1, {2: None})}
    assert strict(files.json_line(record | {"path": Path("a/b")}).decode()) == {
        "count": 3,
        "mean": 0.5,
        "bad": None,
        "list": [1, {"2": None}],
        "path": "a/b",
    }


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", r"not JSON \(Expecting property name enclosed in double quotes, column 2\)"),
        ('{"trajectory_id": "0/0"}', "prompt_id"),
        (json.dumps({key: value for key, value in record().items() if key != "turns"}), '"turns" must be a list'),
        ("[]", "object"),
        pytest.param('{"a": ' + "[" * 100_000, "nested too deeply", id="deep"),
        (json.dumps(record(prompt_tokens=10**30)), "prompt_tokens.* at most 1,000,000,000"),
        (json.dumps(record(turns=[record()["turns"][0] | {"tool_seconds": 1e300}])), "tool_seconds.* at most"),
        (json.dumps(record(prompt_id=3)), "prompt_id"),
        (json.dumps(record(prompt_tokens=-1)), "prompt_tokens"),
        (json.dumps(record(turns={})), "turns"),
        (json.dumps(record(turns=[record()["turns"][0] | {"generated_tokens": -2}])), "turn 0.*generated_tokens"),
        (json.dumps(record(turns=[record()["turns"][0] | {"generated_tokens": 2.5}])), "generated_tokens"),
        (json.dumps(record(turns=[record()["turns"][0] | {"status": "odd"}])), "status"),
        (json.dumps(record(turns=[record()["turns"][0] | {"tool_seconds": -0.1}])), "tool_seconds"),
    ],
)
def test_a_malformed_trace_is_refused_with_its_line(tmp_path, line, problem):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(record()) + "\n" + line + "\n")
    with pytest.raises(DataError, match=rf"trace\.jsonl, line 2.*{problem}"):
        trace.read(path)


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(record()).encode() + b'\n{"trajectory_id": "\xff"}\n')
    with pytest.raises(DataError, match=r"trace\.jsonl, line 2: this is not UTF-8 text \(invalid start byte"):
        trace.read(path)


def test_an_empty_and_a_missing_trace_are_refused(tmp_path):
    (tmp_path / "trace.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no trajectory"):
        trace.read(tmp_path / "trace.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        trace.read(tmp_path / "absent.jsonl")


def test_records_wait_out_a_full_disk_whole_and_in_order(tmp_path, monkeypatch):
    warnings: list[str] = []
    file = files.LineFile(tmp_path / "lines", lambda key, sentence: warnings.append(sentence))
    file.write(b"one\n")
    file.flush()
    real_write = files.os.write
    room = [2]

    def full(descriptor: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(28, "No space left on device")
        written = real_write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(files.os, "write", full)
    for line in (b"two\n", b"three\n"):
        file.write(line)
        file.flush()
    assert (tmp_path / "lines").read_bytes() == b"one\n"
    monkeypatch.undo()
    file.write(b"four\n")
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\nthree\nfour\n"
    assert {len(warnings)} <= {1, 2}
    assert "No space left on device" in warnings[0]


def test_a_disk_that_stays_full_costs_bounded_memory(tmp_path, monkeypatch):
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    file = files.LineFile(tmp_path / "lines", lambda key, sentence: None)
    monkeypatch.setattr(files.os, "write", full)
    for _ in range(3000):
        file.write(b"x" * 1023 + b"\n")
    assert file._pending_bytes <= files.KEEP_BYTES + files.FLUSH_BYTES
    file.close()


def test_a_record_that_lost_its_checksum_is_damaged():
    line = files.json_line({"step": 1, "record": "metrics.jsonl/aaaa/1"})
    assert files.damage(line) == ""
    assert files.damage(re.sub(rb', "checksum": "\w*"', b"", line)) == "its checksum is missing"
