"""What a run may change when it goes on in its workdir, and what is written down of it."""

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import scripts

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import changes, evaluating, workdirs
from libra_jax.coordinator import checkpoints
from libra_jax.telemetry import files, recorder
from libra_jax.telemetry.report import page, recorded_run, run_report
from libra_jax.utils import checksums, resolving

FASTER = config_lib.OptimizerConfig(learning_rate=0.5)


def settings(**values: Any) -> config_lib.RunConfig:
    return dataclasses.replace(config_lib.RunConfig(), **values)


def history(workdir: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "config_history.jsonl").read_text().splitlines()]


def stored(workdir: pathlib.Path) -> dict[str, Any]:
    return checksums.read_object(workdir / "config.json")


@pytest.fixture(autouse=True)
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock is held until its process ends, and here one process stands for several."""
    monkeypatch.setattr(workdirs, "_lock", lambda workdir: True)


@pytest.fixture
def begun(tmp_path: pathlib.Path) -> pathlib.Path:
    workdir = workdirs.open_workdir(settings(), str(tmp_path / "run"))
    files = checkpoints.Checkpoints(workdir, keep=1)
    files.write(20, checkpoints.encode({"step": 20})).mkdir()
    files.commit(20)
    return workdir


@pytest.mark.parametrize(
    ("name", "after", "values"),
    [
        ("telemetry.port", 8080, {"telemetry": config_lib.TelemetryConfig(port=8080)}),
        ("gateway.port", 8081, {"gateway": config_lib.GatewayConfig(port=8081)}),
        ("deadlines.train_step", 60.0, {"deadlines": config_lib.DeadlineConfig(train_step=60.0)}),
        ("evaluation.every", 5, {"evaluation": config_lib.EvaluationConfig(every=5)}),
        ("checkpoint.every", 7, {"checkpoint": config_lib.CheckpointConfig(every=7)}),
        ("rollout.slots", 8, {"rollout": config_lib.RolloutConfig(slots=8)}),
        ("steps", 400, {"steps": 400}),
    ],
)
def test_what_changes_no_learning_may_change_and_is_recorded(begun, capsys, name, after, values):
    workdirs.open_workdir(settings(**values), str(begun))
    (entry,) = history(begun)
    assert entry["step"] == 20
    assert list(entry["changes"]) == [name]
    assert entry["changes"][name][1] == after
    assert entry["allowed"] == []
    group, _, field = name.partition(".")
    assert (stored(begun)[group][field] if field else stored(begun)[group]) == after
    assert f"config.{name} is " in capsys.readouterr().err
    workdirs.open_workdir(settings(**values), str(begun))
    assert len(history(begun)) == 1, "the same command again changes nothing"


def test_a_line_of_the_history_that_lost_its_end_swallows_no_other(begun):
    for steps in (60, 70, 80):
        workdirs.open_workdir(settings(steps=steps), str(begun))
        with (begun / "config_history.jsonl").open("rb+") as file:
            file.truncate(file.seek(0, 2) - 1)
    assert [entry["changes"]["steps"][1] for entry in history(begun)] == [60, 70, 80]
    (begun / "config_history.jsonl").write_bytes(b"")
    workdirs.open_workdir(settings(steps=90), str(begun))
    (sentence,) = recorder.cut_back(begun, 20)
    assert "config_history.jsonl was damaged, and these lines are removed: line 1 (it is not JSON)" in sentence
    assert len(history(begun)) == 1


def test_what_is_gone_from_the_history_is_said_with_its_numbers(begun):
    """The counts of a run that resumed twice with other steps, as each start has them in status.json."""
    for count, steps in enumerate((60, 70)):
        known = {"run": "aaaa", "counts": {files.CONFIG_HISTORY_FILE: count}}
        (begun / "status.json").write_bytes(files.json_line({"records": known}))
        workdirs.open_workdir(settings(steps=steps), str(begun))
    file, records = begun / files.CONFIG_HISTORY_FILE, {"run": "aaaa", "counts": {files.CONFIG_HISTORY_FILE: 2}}
    whole = file.read_bytes()
    first, last = whole.splitlines(keepends=True)
    for text, sentence in (
        (whole, ""),
        (first, "lacks records 2 to 2"),
        (first + last[:40], "lacks records 2 to 2"),
        (first + last + last, "line 3 (it is record 2, after record 2)"),
        (b"", "lacks records 1 to 2"),
        (None, "lacks records 1 to 2"),
    ):
        file.unlink() if text is None else file.write_bytes(text)
        told = recorder.cut_back(begun, 20, records)
        assert sentence in "".join(told)
        assert bool(told) is bool(sentence)
    (begun / "status.json").write_bytes(files.json_line({"records": records}))
    workdirs.open_workdir(settings(steps=80), str(begun))
    assert history(begun)[-1]["record"] == "config_history.jsonl/aaaa/3", "no number is used twice"


def test_what_changes_the_learning_needs_the_flag_that_the_error_names(begun):
    with pytest.raises(protocols.ConfigError, match=r"--allow_changes=optimizer\.learning_rate$"):
        workdirs.open_workdir(settings(optimizer=FASTER), str(begun))
    assert stored(begun)["optimizer"]["learning_rate"] == 1e-3
    assert not (begun / "config_history.jsonl").exists()
    for _ in range(2):  # the same command has to work when the run is started once more
        workdirs.open_workdir(
            settings(optimizer=FASTER), str(begun), allow_changes=changes.allowed_names("optimizer.learning_rate")
        )
    (entry,) = history(begun)
    assert entry["changes"] == {"optimizer.learning_rate": [1e-3, 0.5]}
    assert entry["allowed"] == ["optimizer.learning_rate"]
    assert stored(begun)["optimizer"]["learning_rate"] == 0.5


def test_a_change_that_was_not_allowed_is_refused_beside_one_that_was(begun):
    both = settings(optimizer=FASTER, seed=3)
    with pytest.raises(protocols.ConfigError, match=r"config\.seed is 0 there and 3 here.*--allow_changes=seed$"):
        workdirs.open_workdir(both, str(begun), allow_changes=changes.allowed_names("optimizer"))


def test_another_models_preset_is_refused_whatever_is_allowed(begun):
    other = settings(model=config_lib.ModelConfig(preset="Qwen3-0.6B"))
    with pytest.raises(protocols.ConfigError, match=r"another model: config\.model\.preset"):
        workdirs.open_workdir(other, str(begun), allow_changes=("model",))


def model_of(folder: pathlib.Path, **values: Any) -> config_lib.RunConfig:
    """Settings whose model is in this folder, of the shape of the shipped preset but for some values."""
    shape = json.loads((scripts.ROOT / "libra_jax/models/presets/libra-tiny.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape | values))
    return settings(model=config_lib.ModelConfig(path=str(folder)))


def test_an_optimizer_of_another_state_is_refused_after_a_checkpoint(begun, tmp_path):
    other = settings(optimizer=config_lib.OptimizerConfig(name="sgd"))
    kept = stored(begun)
    with pytest.raises(protocols.ConfigError, match=r"a checkpoint that cannot follow: config\.optimizer\.name is"):
        workdirs.open_workdir(other, str(begun), allow_changes=("optimizer.name",))
    assert stored(begun) == kept
    assert not (begun / "config_history.jsonl").exists()
    fresh = workdirs.open_workdir(settings(), str(tmp_path / "fresh"))
    workdirs.open_workdir(other, str(fresh), allow_changes=("optimizer.name",))
    assert stored(fresh)["optimizer"]["name"] == "sgd", "before the first checkpoint nothing has to follow"


def test_a_model_of_another_shape_is_refused_after_a_checkpoint(tmp_path):
    first = model_of(tmp_path / "first")
    workdir = workdirs.open_workdir(first, str(tmp_path / "run"))
    files = checkpoints.Checkpoints(workdir, keep=1)
    files.write(20, checkpoints.encode({"step": 20})).mkdir()
    files.commit(20)
    wider = model_of(tmp_path / "wider", vocab_size=256)
    with pytest.raises(protocols.ConfigError, match=r"another shape .* \(vocab_size 128 there and 256 here\)"):
        workdirs.open_workdir(wider, str(workdir), allow_changes=("model.path",))
    assert stored(workdir)["model"]["path"] == first.model.path
    moved = model_of(tmp_path / "moved")
    workdirs.open_workdir(moved, str(workdir), allow_changes=("model.path",))
    assert stored(workdir)["model"]["path"] == moved.model.path


def test_changes_are_allowed_only_where_there_is_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for workdir in (None, "runs/none"):
        with pytest.raises(protocols.ConfigError, match=r"^--allow_changes: runs/\S+ holds no config\.json.*--workdir"):
            workdirs.open_workdir(settings(optimizer=FASTER), workdir, allow_changes=("optimizer.learning_rate",))
    assert not (tmp_path / "runs").exists()


def test_a_new_run_in_its_own_folder_tells_of_the_one_before(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = workdirs.open_workdir(settings(), None)
    workdirs.open_workdir(settings(), None)
    assert capsys.readouterr().err == "", "the first one, and the same again"
    second = workdirs.open_workdir(settings(optimizer=FASTER), None)
    said = f"note: {second} begins a new run; --workdir={first} goes on in the newest.\n"
    assert capsys.readouterr().err == said


def test_names_of_groups_and_of_keys_of_mappings_are_allowed():
    names = changes.allowed_names("optimizer, config.task.arguments.holdout,scheduler.costs.scaling")
    assert names == ("optimizer", "task.arguments.holdout", "scheduler.costs.scaling")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("optimiser.learning_rate", r"no setting 'optimiser.learning_rate'; did you mean optimizer\.learning_rate\?"),
        ("task.nonsense", "no setting 'task.nonsense'"),
        ("optimizer.learning_rate.x", "no setting 'optimizer.learning_rate.x'"),
        ("rollout.bucket_mib", r"no setting 'rollout.bucket_mib'; rollout\.bucket_mib is now rollout\.chunk_mib"),
    ],
)
def test_a_mistyped_name_of_a_change_is_refused(text, problem):
    with pytest.raises(protocols.ConfigError, match=problem):
        changes.allowed_names(text)


def test_a_run_goes_on_whose_config_was_stored_under_former_names(begun):
    values = stored(begun)
    values["rollout"]["bucket_mib"] = values["rollout"].pop("chunk_mib")
    values["coordinator"]["staleness"] = values["coordinator"].pop("max_staleness")
    (begun / "config.json").write_text(json.dumps(values))
    workdirs.open_workdir(settings(), str(begun))
    with pytest.raises(protocols.ConfigError, match=r"config\.coordinator\.max_staleness is 0 there and 1 here"):
        workdirs.open_workdir(settings(coordinator=config_lib.CoordinatorConfig(max_staleness=1)), str(begun))
    values["task"]["reward"] = "mine:reward"
    (begun / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        protocols.ConfigError, match=r"an earlier version wrote .*task\.reward is now reward\.functions"
    ):
        workdirs.open_workdir(settings(), str(begun))


def test_a_run_with_former_names_of_modules_goes_on_as_the_error_says(begun):
    former = "libra_jax.agents.resolving:itself"
    function = {"factory": resolving.ITSELF, "arguments": {"name": "mine:reward"}}
    present = settings(reward=config_lib.RewardConfig(functions={"mine": function}))
    values = stored(begun)
    values["task"]["source"] = "libra_jax.agents.calculator:task_source"
    values["reward"]["functions"] = {"mine": {**function, "factory": former}}
    (begun / "config.json").write_text(json.dumps(values))
    with pytest.raises(protocols.ConfigError, match=r"\.agents\.calculator:task_source' there and ") as refused:
        workdirs.open_workdir(present, str(begun))
    names = changes.allowed_names(str(refused.value).rpartition("--allow_changes=")[2])
    assert set(names) == {"task.source", "reward.functions.mine.factory"}
    workdirs.open_workdir(present, str(begun), allow_changes=names)
    with pytest.raises(protocols.ConfigError, match=r"has moved; name it libra_jax\.utils\.resolving:itself$"):
        resolving.resolve(former, "reward.functions")


def test_a_workdir_of_an_earlier_version_is_read_and_goes_on(begun):
    earlier = (pathlib.Path(__file__).parent / "data" / "config_2026-11-27.json").read_text()
    for former, strict in (("run", False), ("refuse", True)):
        written = earlier.replace('"temperature": "run"', f'"temperature": "{former}"')
        (begun / "config.json").write_text(written)
        read = evaluating.read_config(begun)
        assert read.gateway.strict is strict
        # Settings that have come since need the flag, by the names that the error advises.
        with pytest.raises(protocols.ConfigError) as refused:
            workdirs.open_workdir(read, str(begun))
        names = changes.allowed_names(str(refused.value).rpartition("--allow_changes=")[2])
        workdirs.open_workdir(read, str(begun), allow_changes=names)
        assert stored(begun)["gateway"]["strict"] is strict


def test_the_report_shows_what_changed_and_from_which_step():
    entry = {"step": 20, "changes": {"optimizer.learning_rate": [0.001, 0.5]}, "allowed": []}
    (table,) = run_report.config_changes(recorded_run.RecordedRun(config_history=[entry]))
    assert table.rows == [("20", "optimizer.learning_rate", "0.001", "0.5")]
    assert not page.parts(run_report.config_changes, recorded_run.RecordedRun())
