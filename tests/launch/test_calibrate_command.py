"""`launch/calibrate.py` on recorded runs: its table, its profile, and one sentence where a run is of no use."""

import json
import pathlib
import subprocess
from typing import Any

import pytest
import scripts

from configs import calibrate
from libra_jax import config as config_lib
from libra_jax.planning.costs import profiles


def command(*arguments: str, script: str = "calibrate") -> subprocess.CompletedProcess[str]:
    return scripts.run_forked(f"{script}.py", *arguments, environment={"COLUMNS": "160"})


@pytest.fixture
def record(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(scripts.ROOT / "tests/simulator"))
    import recorded_runs

    def make(name: str, degree: int, staleness: int = 0, **changes: Any) -> pathlib.Path:
        (tmp_path / name).mkdir()
        changes |= {"coordinator": {"max_staleness": staleness}, "rollout": {"tensor_parallel": (degree,)}}
        changes["scheduler"] = {"max_remaining_tokens": ()}
        recorded_runs.record(tmp_path / name, **changes)
        return tmp_path / name

    return make


def test_a_run_whose_model_is_an_id_is_read_from_the_cache(record, tmp_path, monkeypatch):
    folder = record("run", 1, model={"path": "acme/tiny"})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    arguments = (f"--workdirs={folder}", f"--output={tmp_path / 'profile.json'}")
    assert "config.model.path: acme/tiny is no folder here; as a Hugging Face id" in command(*arguments).stderr
    repository = tmp_path / "hub/models--acme--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0123")
    (repository / "snapshots/0123").mkdir(parents=True)
    shape = (scripts.ROOT / "libra_jax/models/presets/libra-tiny.json").read_text()
    (repository / "snapshots/0123/config.json").write_text(shape)
    result = command(*arguments)
    assert "rollout: mean error" in result.stdout, result.stderr


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
    assert "weight sync: " in result.stdout
    assert output.with_suffix(".svg").read_text().startswith("<?xml")
    plan = planned(folders[0], output, tmp_path / "plan.json")
    assert plan["calibrated"] is True
    assert {bucket["tensor_parallel"] for bucket in plan["rollout"]} <= {1, 2}
    assert plan["uncertainty"]["rollout_seconds"] == pytest.approx(profile.errors["rollout"])


def planned(folder: pathlib.Path, profile: pathlib.Path, output: pathlib.Path) -> dict[str, Any]:
    """The plan of a recorded run, by the profile."""
    result = command(
        "--config=configs/calibrate.py",
        f"--trace={folder / 'trace.jsonl'}",
        f"--config.planner.profile={profile}",
        "--config.trainer.row_tokens=8192",
        "--config.rollout.max_context=8192",
        f"--output={output}",
        "--accelerators=4",
        script="plan",
    )
    assert result.returncode == 0, result.stderr
    assert "by what was measured" in result.stdout
    return json.loads(output.read_text())


def test_a_mesh_of_its_own_is_predicted_from_the_others(record, tmp_path):
    output = tmp_path / "profile.json"
    folders = record("one", 1), record("two", 1, trainer={"rows_per_micro_batch": 2, "data": 2})
    result = command(f"--workdirs={folders[0]},{folders[1]},{folders[0]}", f"--output={output}")
    assert result.returncode == 0, result.stderr
    assert "error of training on a mesh that only the others were fitted to: 1 x 1 x 1" in result.stdout


@pytest.mark.parametrize("variant", list(calibrate.VARIANTS))
def test_the_configs_that_are_recorded_are_runs_with_their_stages_apart(variant):
    run = config_lib.checked(calibrate.get_config(variant))
    assert run.coordinator.max_staleness == 0
    assert len(run.rollout.tensor_parallel) == 1


def test_a_run_whose_stages_overlap_is_refused(record, tmp_path):
    result = command(f"--workdirs={record('overlapped', 1, staleness=1)}", f"--output={tmp_path / 'profile.json'}")
    assert result.returncode == 1
    assert "error: " in result.stderr
    assert "plans are calibrated by runs with coordinator.max_staleness=0" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_empty_list_of_folders_is_refused_instead_of_recording():
    result = command("--workdirs=")
    assert result.returncode == 2
    assert "--workdirs: names no folder" in result.stderr


def test_a_folder_that_is_not_there_is_refused_and_not_made(tmp_path):
    result = command(f"--workdirs={tmp_path / 'nothing'}")
    assert result.returncode == 1
    assert "nothing/config.json: cannot be read" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_run_is_refused(tmp_path):
    result = command(f"--workdirs={tmp_path / 'nothing'}", f"--output={tmp_path / 'profile.json'}")
    assert result.returncode == 1
    assert "nothing/config.json: cannot be read" in result.stderr
