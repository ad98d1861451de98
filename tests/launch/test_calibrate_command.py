"""`launch/calibrate.py` on recorded runs: its table, its profile, and one sentence where a run is of no use."""

import os
import pathlib
import subprocess
import sys

import pytest

from libra_jax.planning import profiles

ROOT = pathlib.Path(__file__).resolve().parents[2]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "launch/calibrate.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def record(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests/simulator"))
    import recorded_runs

    def make(name: str, degree: int, **coordinator: int) -> pathlib.Path:
        (tmp_path / name).mkdir()
        changes = {"coordinator": {"staleness": 0, **coordinator}, "rollout": {"tensor_parallel": (degree,)}}
        changes["scheduler"] = {"max_remaining_tokens": ()}
        recorded_runs.record(tmp_path / name, **changes)
        return tmp_path / name

    return make


def test_it_fits_runs_of_two_degrees_and_tells_what_they_are_off_by(record, tmp_path):
    folders = record("narrow", 1), record("wide", 2)
    output = tmp_path / "profile.json"
    result = command(f"--workdirs={','.join(map(str, folders))}", f"--output={output}")
    assert result.returncode == 0, result.stderr
    for stage in ("rollout", "train", "step"):
        assert f"{stage}: mean error" in result.stdout
    assert "train_flops_share: 0.4 by default" in result.stdout
    profile = profiles.read(output)
    assert set(profile.engines) == {1, 2}
    assert profile.engines[2].step < profile.engines[1].step
    assert profile.errors["rollout"] < 0.1
    assert set(profile.errors) == {"rollout", "train", "total"}
    assert output.with_suffix(".svg").read_text().startswith("<?xml")


def test_a_run_whose_stages_overlap_is_refused(record, tmp_path):
    result = command(f"--workdirs={record('overlapped', 1, staleness=1)}", f"--output={tmp_path / 'profile.json'}")
    assert result.returncode == 1
    assert "error: " in result.stderr
    assert "plans are calibrated by runs with coordinator.staleness=0" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_folder_without_a_run_is_refused(tmp_path):
    result = command(f"--workdirs={tmp_path / 'nothing'}", f"--output={tmp_path / 'profile.json'}")
    assert result.returncode == 1
    assert "nothing/config.json: cannot be read" in result.stderr
