"""launch/evaluate.py's work with the fake engine: a run's checkpoint, a file of tasks, intervals, and refusals."""

import dataclasses
import itertools
import json
import shutil
import statistics

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from matplotlib import figure
from matplotlib.backends import backend_agg

import libra_jax
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import evaluating
from libra_jax.coordinator import scores
from libra_jax.telemetry import metrics

SETTINGS = config_lib.EvaluationConfig(attempts=4, temperature=1.0)


def small(**evaluation) -> config_lib.RunConfig:
    run = config_lib.RunConfig(name="mine", steps=1)
    run.rollout.engine, run.rollout.max_context, run.rollout.max_tokens = "fake", 128, 16
    run.trainer.platform, run.trainer.row_tokens = "cpu", 128
    run.coordinator.groups_per_step, run.coordinator.group_size = 2, 4
    run.telemetry.tensorboard, run.telemetry.report = False, False
    run.evaluation = dataclasses.replace(SETTINGS, **{"every": 1, "tasks": 3, **evaluation})
    run.reward.functions = {"letters": {"factory": f"{__name__}:letters"}}
    return run


def letters():
    """A reward that is 1 for about half of all outputs, whatever the policy has learnt."""
    return lambda task, text: float(len(text) % 2)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    place = tmp_path_factory.mktemp("evaluating") / "run"
    libra_jax.train(small(), workdir=place)
    return place


def test_a_run_with_several_attempts_reports_pass_at_k(workdir):
    rows = metrics.read(workdir / metrics.METRICS_FILE)
    for step in (0, 1):
        assert {"evaluation/pass_at_1", "evaluation/pass_at_2", "evaluation/pass_at_4"} <= rows[step].keys()
        assert rows[step]["evaluation/pass_at_4"] >= rows[step]["evaluation/pass_at_1"]


def test_no_two_labels_of_the_picture_overlap(tmp_path, monkeypatch):
    k = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
    tasks = [scores.TaskScores(str(task), tuple(float(place < 40 * task) for place in range(128))) for task in range(3)]
    estimate = evaluating.Estimate(0.5, 0.4, 0.6)
    made = evaluating.EvaluationReport("mine", tasks, 128, 1.0, 1.0, estimate, dict.fromkeys(k, estimate), {})
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda picture, *_, **__: drawn.append(picture))
    evaluating.write_picture(made, tmp_path / "picture.svg")
    canvas = backend_agg.FigureCanvasAgg(drawn[0])
    canvas.draw()
    for axes in drawn[0].axes:
        for axis in (axes.xaxis, axes.yaxis):
            boxes = [label.get_window_extent(canvas.get_renderer()) for label in axis.get_ticklabels()]
            assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))
    assert [label.get_text() for label in drawn[0].axes[0].get_xticklabels()][:3] == ["1", "3", "5"]


def test_the_newest_checkpoint_is_evaluated_and_a_step_is_chosen(workdir, tmp_path):
    made = evaluating.evaluate(evaluating.EvaluationRequest(workdir=workdir, attempts=6, k=(1, 3), most_tasks=2), None)
    assert made.source == "mine, step 1"
    assert [len(one.rewards) for one in made.tasks] == [6, 6]
    assert list(made.pass_at) == [1, 3]
    evaluating.write(made, tmp_path / "out")
    written = json.loads((tmp_path / "out" / evaluating.FILE).read_text())
    assert written["reward"]["value"] == pytest.approx(
        statistics.fmean(r for t in written["tasks"] for r in t["rewards"])
    )
    assert written["pass_at"]["1"]["value"] == pytest.approx(written["reward"]["value"], abs=1), (
        "rewards are 0 and more"
    )
    assert "</svg>" in (tmp_path / "out" / evaluating.PICTURE).read_text()
    assert made.tasks[0].task in evaluating.table(made)
    with pytest.raises(protocols.ConfigError, match=r"^--step=7: .* has checkpoints of steps 1$"):
        evaluating.evaluate(evaluating.EvaluationRequest(workdir=workdir, step=7), None)


def test_a_damaged_newest_checkpoint_is_said_with_the_step_that_takes_its_place(workdir, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(workdir, run)
    further = small()
    further.steps = 2
    libra_jax.train(further, workdir=run)
    file = max((run / "checkpoints/step-00000002").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    capsys.readouterr()
    _, stored, source = evaluating.chosen(evaluating.EvaluationRequest(workdir=run), None)
    said = capsys.readouterr().err
    assert (stored.step, source) == (1, "mine, step 1")
    assert "step-00000002 is skipped" in said
    assert "is damaged" in said
    assert "step 1 takes its place" in said


def test_a_run_without_checkpoints_is_evaluated_by_its_export(workdir, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(workdir / evaluating.CONFIG_FILE, run)
    with pytest.raises(protocols.DataError, match=r"holds no checkpoint and no exported model yet"):
        evaluating.evaluate(evaluating.EvaluationRequest(workdir=run), None)
    shutil.copytree(workdir / "model", run / "model")
    made = evaluating.evaluate(evaluating.EvaluationRequest(workdir=run, most_tasks=1), None)
    assert (made.source, len(made.tasks), len(made.tasks[0].rewards)) == ("mine, exported model", 1, 4)
    assert "has no checkpoint, so its export" in capsys.readouterr().err


def test_every_task_of_a_file_is_evaluated_once(workdir, tmp_path):
    rows = [{"prompt": f"say {number % 4}", "answer": str(number % 4)} for number in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = small()
    run.task.source = "libra_jax.environments.datasets:task_source"
    run.task.environment = "libra_jax.environments.question:environment"
    run.task.path = "missing.jsonl"
    asked = evaluating.EvaluationRequest(model=str(workdir / "model"), tasks=str(tmp_path / "tasks.jsonl"), attempts=2)
    made = evaluating.evaluate(asked, config_lib.checked(run))
    assert len({one.task for one in made.tasks}) == len(made.tasks) == 4, "of equal tasks, one counts"


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_an_interval_holds_the_mean_and_lies_among_the_values(values):
    found = evaluating.interval(values)
    assert found.value == pytest.approx(statistics.fmean(values))
    assert min(values) - 1e-9 <= found.low <= found.value + 1e-9
    assert found.value - 1e-9 <= found.high <= max(values) + 1e-9


def test_intervals_hold_the_true_value_about_as_often_as_they_say(monkeypatch):
    monkeypatch.setattr(evaluating, "RESAMPLES", 400)
    generator, held = np.random.default_rng(0), 0
    for _ in range(60):
        chances = generator.beta(2, 1, size=100)  # of tasks; the mean chance of all such tasks is 2/3
        tasks = [
            scores.TaskScores(str(index), tuple(map(float, generator.random(4) < chance)))
            for index, chance in enumerate(chances)
        ]
        made = evaluating.estimated(tasks, SETTINGS, (1,), "", {})
        held += made.pass_at[1].low <= 2 / 3 <= made.pass_at[1].high
    assert held >= 51


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({}, r"^--workdir: give either --workdir=RUN, or --model=DIR with --config=FILE"),
        ({"model": "some/model"}, r"^--model: needs --config=FILE"),
        ({"workdir": "nowhere"}, r"^--workdir=.*nowhere: holds no config\.json \(No such file or directory\)"),
        ({"workdir": ".", "k": (8,)}, r"^--k=8: 4 attempts a task give no estimate of pass@8; set --attempts to 8"),
        ({"workdir": ".", "k": (0, 1)}, r"^--k=0: must be positive"),
        ({"workdir": ".", "attempts": 0}, r"^--attempts: must be positive, not 0"),
        (
            {"workdir": ".", "temperature": 0.0},
            r"^--attempts: 4 greedy attempts would be alike; set --temperature above 0",
        ),
        ({"workdir": ".", "most_tasks": 0}, r"^--most_tasks=0: must be positive"),
        (
            {"workdir": ".", "tasks": "tasks.jsonl"},
            r"^--tasks=tasks\.jsonl: the calculator reads no file; set task\.source",
        ),
    ],
)
def test_bad_flags_are_one_sentence_with_the_fix(workdir, asked, sentence):
    if "workdir" in asked:
        asked = {**asked, "workdir": workdir / asked["workdir"]}
    with pytest.raises(protocols.LibraError, match=sentence):
        evaluating.evaluate(evaluating.EvaluationRequest(**asked), None)


@pytest.mark.parametrize(("text", "sentence"), [("", "holds no tasks"), (None, "no such file of tasks")])
def test_a_file_without_tasks_is_refused_by_the_flag(tmp_path, workdir, text, sentence):
    run = small()
    run.task.source = "libra_jax.environments.datasets:task_source"
    run.task.environment = "libra_jax.environments.question:environment"
    file = tmp_path / "tasks.jsonl"
    if text is not None:
        file.write_text(text)
    asked = evaluating.EvaluationRequest(model=str(workdir / "model"), tasks=str(file))
    with pytest.raises(protocols.DataError, match=rf"^--tasks={file}: .*{sentence}"):
        evaluating.evaluate(asked, config_lib.checked(run))


@pytest.mark.parametrize(
    ("name", "problem"), [("none", "there is no such directory"), ("", "holds no \\*.safetensors")]
)
def test_a_model_that_is_not_there_is_refused_by_the_flag(tmp_path, name, problem):
    with pytest.raises(
        protocols.DataError, match=rf"^--model={tmp_path / name}: {problem}; give a directory of weights"
    ):
        evaluating.evaluate(evaluating.EvaluationRequest(model=str(tmp_path / name)), config_lib.checked(small()))


def test_a_run_that_holds_no_tasks_out_is_told_to_name_some(tmp_path, workdir):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    run = small()
    run.task.source = "libra_jax.environments.datasets:task_source"
    run.task.environment = "libra_jax.environments.question:environment"
    run.task.path, run.task.arguments = str(tmp_path / "tasks.jsonl"), {"holdout": 0.0}
    with pytest.raises(protocols.DataError, match=r"^--tasks: none is given, and the run holds no task out .*=FILE$"):
        evaluating.evaluate(evaluating.EvaluationRequest(model=str(workdir / "model")), config_lib.checked(run))


def test_a_checkpoint_of_another_run_or_with_other_weights_is_refused(workdir, tmp_path):
    """Each of its files is as the other run wrote it."""
    run = shutil.copytree(workdir, tmp_path / "run")
    other = tmp_path / "other"
    libra_jax.train(dataclasses.replace(small(), seed=1), workdir=other)
    name = "checkpoints/step-00000001"
    shutil.rmtree(run / name / "trainer")
    shutil.copytree(other / name / "trainer", run / name / "trainer")
    with pytest.raises(protocols.DataError, match=rf"{name} cannot be used: trainer/"):
        evaluating.chosen(evaluating.EvaluationRequest(workdir=run, step=1), None)
    shutil.rmtree(run / name)
    shutil.copytree(other / name, run / name)
    for step in (1, None):
        with pytest.raises(protocols.DataError, match=rf"{name} cannot be used: it is of the run .* instead of "):
            evaluating.chosen(evaluating.EvaluationRequest(workdir=run, step=step), None)
    with pytest.raises(protocols.DataError, match=r"it is of the run .* instead of "):
        libra_jax.evaluate(small(), model=run)
