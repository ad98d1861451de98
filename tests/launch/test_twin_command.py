"""`launch/twin.py` as a user meets it: its table and files, and one sentence where there is no run."""

import functools
import json
import pathlib

import pytest
import scripts

command = functools.partial(scripts.run_forked, "twin.py")


@pytest.fixture
def workdir(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.syspath_prepend(str(scripts.ROOT / "tests/simulator"))
    import recorded_runs

    recorded_runs.record(tmp_path)
    return tmp_path


def test_it_prints_the_verdict_and_writes_json_and_a_picture(workdir):
    result = command(f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    assert "calibrated on steps 1-4, predicted steps 5-8" in result.stdout
    assert "max(10%, 1.5 x spread) = 10.0%: met" in result.stdout
    assert "error of predicting the mean of steps 1-4 for each" in result.stdout
    written = json.loads((workdir / "twin.json").read_text())
    assert written["met"] is True
    assert len(written["steps"]) == 8
    assert set(written["error"]) == {"total", "rollout", "train", "sync"}
    assert (workdir / "twin.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--workdir=/nowhere/run",), "/nowhere/run/config.json: cannot be read"),
        ((), "no --workdir is given"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence):
    result = command(*arguments)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert sentence in error
