"""What a run may change when it goes on in its workdir, and what is written down of it."""

import dataclasses
import json
import pathlib
from typing import Any

import changes
import pytest

import workdirs
from libra_jax import config, protocols
from libra_jax.telemetry import changes_section

FASTER = config.OptimizerConfig(learning_rate=0.5)


def settings(**values: Any) -> config.RunConfig:
    return dataclasses.replace(config.RunConfig(), **values)


def history(workdir: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "config_history.jsonl").read_text().splitlines()]


def stored(workdir: pathlib.Path) -> dict[str, Any]:
    return json.loads((workdir / "config.json").read_text())


@pytest.fixture(autouse=True)
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock is held until its process ends, and here one process stands for several."""
    monkeypatch.setattr(workdirs, "_lock", lambda workdir: True)


@pytest.fixture
def begun(tmp_path: pathlib.Path) -> pathlib.Path:
    workdir = workdirs.open_workdir(settings(), str(tmp_path / "run"))
    (workdir / "checkpoints" / "step-00000020").mkdir(parents=True)
    (workdir / "checkpoints" / "step-00000020" / "manifest.json").write_text("{}")
    return workdir


@pytest.mark.parametrize(
    ("name", "after", "values"),
    [
        ("telemetry.port", 8080, {"telemetry": config.TelemetryConfig(port=8080)}),
        ("deadlines.train_step", 60.0, {"deadlines": config.DeadlineConfig(train_step=60.0)}),
        ("evaluation.every", 5, {"evaluation": config.EvaluationConfig(every=5)}),
        ("checkpoint.every", 7, {"checkpoint": config.CheckpointConfig(every=7)}),
        ("rollout.slots", 8, {"rollout": config.RolloutConfig(slots=8)}),
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
    other = settings(model=config.ModelConfig(preset="Qwen3-0.6B"))
    with pytest.raises(protocols.ConfigError, match=r"another model: config\.model\.preset"):
        workdirs.open_workdir(other, str(begun), allow_changes=("model",))


def test_names_of_groups_and_of_keys_of_mappings_are_allowed():
    names = changes.allowed_names("optimizer, config.task.arguments.holdout,scheduler.costs.scaling")
    assert names == ("optimizer", "task.arguments.holdout", "scheduler.costs.scaling")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("optimiser.learning_rate", r"no setting 'optimiser.learning_rate'; did you mean optimizer\.learning_rate\?"),
        ("task.nonsense", "no setting 'task.nonsense'"),
        ("optimizer.learning_rate.x", "no setting 'optimizer.learning_rate.x'"),
    ],
)
def test_a_mistyped_name_of_a_change_is_refused(text, problem):
    with pytest.raises(protocols.ConfigError, match=problem):
        changes.allowed_names(text)


def test_the_report_shows_what_changed_and_from_which_step():
    entry = {"step": 20, "changes": {"optimizer.learning_rate": [0.001, 0.5]}, "allowed": []}
    (section,) = changes_section.sections([entry])
    assert "<td>20</td><td>optimizer.learning_rate</td><td>0.001</td><td>0.5</td>" in section.body
    assert changes_section.sections([]) == []
