"""What a workdir lets go on in it: the same run, with as many steps or more."""

import dataclasses
import json
import os
import pathlib
from typing import Any

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import evaluating, preflight, records, workdirs
from libra_jax.cluster import placement, resolved_run
from libra_jax.coordinator import checkpoint_store, checkpoints
from libra_jax.models import config as model_config
from libra_jax.simulator import recording
from libra_jax.telemetry import files
from libra_jax.telemetry.report import recorded_run

FOREIGN = json.dumps({f"a{number}": number for number in range(100)})


def with_checkpoint(workdir: pathlib.Path, step: int) -> None:
    files = checkpoints.Checkpoints(workdir, keep=9)
    files.write(step, checkpoints.encode({"step": step})).mkdir()
    files.commit(step)


def settings(**changes: Any) -> config_lib.RunConfig:
    return dataclasses.replace(config_lib.RunConfig(), **changes)


@pytest.fixture(autouse=True)
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock is held until its process ends, and here one process stands for several."""
    monkeypatch.setattr(workdirs, "_lock", lambda workdir: True)


def test_cores_go_to_the_instances_in_order_and_ones_that_are_not_there_are_refused_early(tmp_path):
    rollout = config_lib.RolloutConfig(tensor_parallel=(1, 2), cores=(3, 0, 1))
    shape = model_config.load_preset("libra-tiny")
    specs = placement.EngineSpecs(resolved_run.ResolvedRun(settings(rollout=rollout), shape), tmp_path).specs()
    assert [spec.arguments["cpu_cores"] for spec in specs] == ["3", "0|1"]
    unpinned = placement.EngineSpecs(resolved_run.ResolvedRun(settings(), shape), tmp_path).specs()
    assert [spec.arguments["cpu_cores"] for spec in unpinned] == ["auto"]
    with pytest.raises(protocols.ConfigError, match=r"config\.rollout\.cores: has 2 entries for the 1 workers"):
        config_lib.RolloutConfig(cores=(0, 1))
    with pytest.raises(protocols.ConfigError, match=r"config\.trainer\.cores: there is no core 4095"):
        preflight.validate(settings(trainer=config_lib.TrainerConfig(cores=(4095,))), need_weights=False)


def test_an_engine_that_a_plan_adds_gets_the_devices_that_the_others_leave(tmp_path):
    rollout = config_lib.RolloutConfig(tensor_parallel=(1, 2), cores=(3, 0, 1), slots_by_instance=(16, 48))
    trainer = config_lib.TrainerConfig(platform="cuda")
    engines = placement.EngineSpecs(
        resolved_run.ResolvedRun(settings(rollout=rollout, trainer=trainer), model_config.load_preset("libra-tiny")),
        tmp_path,
    )
    narrow, wide = engines.specs()
    assert (narrow.devices, wide.devices) == ((1,), (2, 3))
    trainer = protocols.ActorSpec("trainer", "", {}, devices=(0,))
    added = engines.add(2, 1, [narrow, trainer])
    assert (added.name, added.devices, added.gpus) == ("rollout-2", (3,), 1)
    assert added.environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert (added.arguments["cpu_cores"], added.arguments["rollout"]["slots"]) == ("1", 16)
    assert engines.add(3, 2, [narrow, trainer]).arguments["rollout"]["slots"] == 48
    with pytest.raises(protocols.LibraError, match="of degree 2, and 1 devices are free"):
        engines.add(4, 2, [narrow, added, trainer])


@pytest.mark.parametrize("steps", [5, 7, 100])
def test_a_run_may_be_given_other_steps_than_it_began_with(tmp_path, steps):
    workdirs.open_workdir(settings(steps=50), str(tmp_path))
    with_checkpoint(tmp_path, 5)
    workdirs.open_workdir(settings(steps=steps), str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == steps


def test_a_run_goes_on_at_another_address_of_its_cluster_and_nothing_else_of_that(tmp_path):
    def on(address: str, each: int = 1) -> config_lib.RunConfig:
        return settings(cluster=config_lib.ClusterConfig(backend="ray", address=address, accelerators_per_host=each))

    workdirs.open_workdir(on("10.0.0.1:6379"), str(tmp_path))
    workdirs.open_workdir(on("10.0.0.9:41000"), str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["cluster"]["address"] == "10.0.0.9:41000"
    assert config_lib.digest(on("10.0.0.1:6379")) == config_lib.digest(on("10.0.0.9:41000"))
    with pytest.raises(protocols.ConfigError, match=r"config\.cluster\.accelerators_per_host is 1 there and 2 here"):
        workdirs.open_workdir(on("10.0.0.1:6379", each=2), str(tmp_path))


def test_fewer_steps_than_a_run_has_taken_are_refused(tmp_path):
    workdirs.open_workdir(settings(steps=5), str(tmp_path))
    with_checkpoint(tmp_path, 5)
    with pytest.raises(protocols.ConfigError, match=r"config\.steps: 3 is fewer than the 5 steps.*another --workdir"):
        workdirs.open_workdir(settings(steps=3), str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 5


@pytest.mark.parametrize(
    "content", ["", '{"name": "ru', "[]", "\xff", FOREIGN], ids=["empty", "cut", "a_list", "no_text", "foreign"]
)
def test_a_workdir_whose_settings_cannot_be_read_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    problem = r"its config\.json is not the settings of a run.*another workdir"
    with pytest.raises(protocols.ConfigError, match=problem) as caught:
        workdirs.open_workdir(settings(), str(tmp_path))
    assert len(str(caught.value)) < len(str(tmp_path)) + 240
    assert (tmp_path / "config.json").read_bytes() == content.encode("latin-1")


@pytest.mark.parametrize("depth", [0, 600, 100_000], ids=["pipe", "nested", "deeply_nested"])
def test_settings_that_nothing_can_read_are_a_sentence_in_a_dry_run(tmp_path, depth):
    file = tmp_path / "config.json"
    if not depth:
        os.mkfifo(file)
    else:
        file.write_text('{"rollout": {}, "task": ' + "[" * depth + "]" * depth + "}")
    for look in (workdirs.foreseen, workdirs.open_workdir):
        with pytest.raises(protocols.ConfigError, match=r"its config\.json is not the settings .*another workdir"):
            look(settings(), str(tmp_path))


def test_a_dry_run_looks_for_checkpoints_once(tmp_path, monkeypatch):
    workdirs.open_workdir(settings(steps=50), str(tmp_path))
    with_checkpoint(tmp_path, 5)
    calls, find = [], checkpoint_store.find
    monkeypatch.setattr(checkpoint_store, "find", lambda workdir: calls.append(workdir) or find(workdir))
    assert "goes on from step 5" in workdirs.foreseen(settings(steps=50), str(tmp_path))
    assert calls == [tmp_path]


def test_a_changed_number_of_the_settings_is_told_by_every_reader(tmp_path, caplog):
    workdirs.open_workdir(settings(steps=50), str(tmp_path))
    (tmp_path / "metrics.jsonl").write_bytes(files.json_line({"step": 1}))
    assert evaluating.read_config(tmp_path).steps == 50
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"steps": 50', '"steps": 58'))
    for read in (
        evaluating.read_config,
        records.load,
        recording.read,
        lambda folder: workdirs.open_workdir(settings(steps=58), str(folder)),
    ):
        with pytest.raises(protocols.LibraError, match=r"config\.json.*its checksum is not the one"):
            read(tmp_path)
    assert recorded_run.load(tmp_path).config == {}
    assert "config.json is left out (its checksum is not the one" in caplog.text


def test_checkpoints_without_the_settings_of_their_run_are_said(tmp_path, capsys):
    workdirs.open_workdir(settings(steps=50), str(tmp_path))
    with_checkpoint(tmp_path, 5)
    workdirs.open_workdir(settings(steps=50), str(tmp_path))
    assert capsys.readouterr().err == ""
    (tmp_path / "config.json").unlink()
    workdirs.open_workdir(settings(steps=50, seed=7), str(tmp_path))
    assert "has checkpoints and no config.json; its settings are not compared" in capsys.readouterr().err


def test_records_that_will_be_repeated_for_want_of_a_checkpoint_are_said(tmp_path, capsys):
    workdirs.open_workdir(settings(steps=50), str(tmp_path))
    (tmp_path / "metrics.jsonl").write_bytes(files.json_line({"step": 3}))
    workdirs.open_workdir(settings(steps=50), str(tmp_path))
    assert "has no checkpoint; the run repeats its 3 recorded steps" in capsys.readouterr().err
    with_checkpoint(tmp_path, 3)
    workdirs.open_workdir(settings(steps=50), str(tmp_path))
    assert capsys.readouterr().err == ""


def test_any_other_field_makes_it_another_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = workdirs.open_workdir(settings(steps=5), None)
    assert workdirs.open_workdir(settings(steps=9), None) == first
    assert workdirs.open_workdir(settings(steps=9, seed=1), None) != first
    with pytest.raises(protocols.ConfigError, match=r"another config: config\.seed is 0 there and 1 here\."):
        workdirs.open_workdir(settings(steps=9, seed=1), str(first))


def test_a_run_that_saves_nothing_is_not_overwritten_by_the_same_command(tmp_path):
    unsaved = settings(checkpoint=config_lib.CheckpointConfig(every=0))
    workdir = workdirs.open_workdir(unsaved, str(tmp_path / "run"))
    (workdir / "metrics.jsonl").write_text('{"step": 0}\n')
    workdirs.open_workdir(unsaved, str(workdir))  # nothing has been trained yet
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1}\n{"step": 2}\n')
    with pytest.raises(protocols.ConfigError, match=r"holds 2 steps of a run that saves nothing .*another --workdir"):
        workdirs.open_workdir(unsaved, str(workdir))
    assert len((workdir / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_setting_that_is_a_list_of_names_takes_names():
    parsed = config_lib.parse(config_lib.RunConfig, {"scheduler": {"learnt_from": ("runs/a", "runs/b")}})
    assert parsed.scheduler.learnt_from == ("runs/a", "runs/b")
    with pytest.raises(protocols.ConfigError, match=r"config\.scheduler\.learnt_from: must hold strings, not \(1,\)"):
        config_lib.parse(config_lib.RunConfig, {"scheduler": {"learnt_from": (1,)}})
    with pytest.raises(protocols.ConfigError, match=r"config\.planner\.degrees: must hold integers"):
        config_lib.parse(config_lib.RunConfig, {"planner": {"degrees": ("1",)}})


def test_a_dry_run_foresees_the_workdir_and_leaves_nothing_in_it(tmp_path):
    run = tmp_path / "run"
    assert workdirs.foreseen(settings(), str(run)) == f"{run}, new"
    assert not run.exists()
    workdirs.open_workdir(settings(), str(run))
    before = sorted(run.iterdir())
    with pytest.raises(protocols.ConfigError, match=r"another config: config\.seed is 0 there and 1 here\."):
        workdirs.foreseen(settings(seed=1), str(run))
    with_checkpoint(run, 3)
    told = workdirs.foreseen(settings(seed=1), str(run), allow_changes=("seed",))
    assert told == f"{run}, goes on from step 3, with other settings: config.seed is 0 there and 1 here"
    assert json.loads((run / "config.json").read_text())["seed"] == 0
    assert {file.name for file in set(run.iterdir()) - set(before)} == {"checkpoints"}
