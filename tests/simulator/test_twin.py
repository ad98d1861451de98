"""Twins of simulated runs, whose costs are known; and a sentence for each recording that cannot be replayed."""

import dataclasses
import json
import pathlib
import re
import shutil

import pytest
import recorded_runs
import simulator_doubles as doubles
from hypothesis import given
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.simulator import recording, scripts, traces, twin


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Workdirs of a synchronous and an overlapped run."""
    workdirs = []
    for staleness in (0, 1):
        workdirs.append(tmp_path_factory.mktemp(f"eta{staleness}"))
        limits = {"max_staleness": staleness, "groups_per_step": 4, "group_size": 8}
        recorded_runs.record(workdirs[-1], coordinator=limits, rollout={"slots": 8})
    return workdirs


@pytest.fixture(params=[0, 1], ids=["synchronous", "overlapped"])
def run(request, runs):
    return runs[request.param]


@pytest.fixture
def copy(runs, tmp_path):
    return pathlib.Path(shutil.copytree(runs[0], tmp_path / "copy"))


def test_a_twin_finds_the_costs_again_and_predicts_the_steps(run):
    made = twin.make(recording.read(run))
    assert made.calibrated == 4
    assert made.error() < (0.1 if recording.read(run).config.coordinator.max_staleness else 0.01)
    assert made.met
    assert made.constant_error > 4 * made.error()
    held_out = [sum(parts.total for parts in side[4:]) for side in (made.measured, made.predicted)]
    assert held_out[1] == pytest.approx(held_out[0], rel=0.01)  # overlapped, a group more in one step is one less later
    assert made.error("train") < 0.01
    assert made.level == pytest.approx(1.0, abs=0.02)
    for degree, truth in recorded_runs.ENGINES.items():
        fitted = made.model.engines[degree]
        assert fitted.step == pytest.approx(truth.step, rel=0.05)
        mean = 6, 6 * 500  # a step as they were
        assert made.model.step_seconds(degree, *mean) == pytest.approx(
            recorded_runs.MODEL.step_seconds(degree, *mean), rel=0.05
        )
    assert made.model.train.column == pytest.approx(recorded_runs.TRAIN.column, rel=0.02)
    assert made.model.update.load + made.model.update.gather == pytest.approx(0.08, rel=0.05)


def test_with_the_true_costs_the_replay_is_the_run(run):
    recorded = recording.read(run)
    model = dataclasses.replace(recorded_runs.MODEL, rows=twin.calibrate(recorded, 4).rows)
    for step, parts in zip(recorded.steps, twin.replay(recorded, model, 8), strict=True):
        assert parts.total == pytest.approx(step.parts.total, rel=0.01)
        assert parts.train == pytest.approx(step.parts.train, rel=1e-3)


def test_nothing_of_the_second_half_is_fitted_to(run):
    whole = recording.read(run)
    altered = dataclasses.replace(
        whole,
        steps=whole.steps[:4]
        + tuple(
            dataclasses.replace(step, parts=recording.RecordedSeconds(1e3, 1e3, 1e3, 1e3), lengths=(9,))
            for step in whole.steps[4:]
        ),
        streams=tuple(
            stream
            if stream.end <= whole.ends[3]
            else dataclasses.replace(stream, end=stream.end + 99.0, tokens=1, usable=True)
            for stream in whole.streams
            if stream.start < whole.ends[3]
        ),
    )
    ours, theirs = twin.calibrate(whole, 4), twin.calibrate(altered, 4)
    assert ours.train == theirs.train
    assert ours.update == theirs.update
    for degree, engine in ours.engines.items():  # a stream under way at the cut is a load on its instance until then
        assert theirs.engines[degree].step == pytest.approx(engine.step, rel=0.02)


def test_groups_are_replayed_in_the_order_of_their_dispatch(run):
    recorded, workload = recording.read(run), doubles.SeededWorkload()
    assert len(recorded.groups) == 8 * 4
    for group, attempts in enumerate(recorded.groups):
        for sample, attempt in enumerate(attempts):
            truth = workload.script(group, sample)
            assert attempt.prompt_tokens == truth.prompt_tokens
            assert [turn.generated_tokens for turn in attempt.turns] == [turn.generated_tokens for turn in truth.turns]
            for turn, true_turn in zip(attempt.turns, truth.turns, strict=True):
                assert turn.tool_seconds == pytest.approx(true_turn.tool_seconds, abs=1e-6)
    assert recorded.script(5, 3) == recorded.groups[5][3]


def test_rollouts_that_were_masked_take_no_time_of_training(copy):
    def cut_off(record: dict) -> dict:
        masked = record["trajectory_id"].endswith("/0")
        return {**record, "finish": "max_context" if masked else "answered"}

    whole = recording.read(copy)
    edit(copy / "trace.jsonl", lambda lines: [cut_off(line) for line in lines])
    masked = recording.read(copy)
    for step, before in zip(masked.steps, whole.steps, strict=True):
        assert len(step.lengths) == len(before.lengths) * 7 // 8
        assert len(step.scripts) == len(before.scripts)  # rolled out all the same
    model = dataclasses.replace(recorded_runs.MODEL, rows=twin.calibrate(whole, 4).rows)
    replayed = [sum(parts.train for parts in twin.replay(run, model, 8)) for run in (masked, whole)]
    assert replayed[0] < 0.95 * replayed[1]
    config = json.loads((copy / "config.json").read_text())
    config["task"]["cut_off"] = "zero"
    (copy / "config.json").write_text(json.dumps(config))
    assert [step.lengths for step in recording.read(copy).steps] == [step.lengths for step in whole.steps]


def test_the_order_of_the_file_does_not_matter(runs, copy):
    run = runs[0]
    lines = (run / "trace.jsonl").read_text().splitlines()
    (copy / "trace.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    assert recording.read(copy).groups == recording.read(run).groups
    assert [step.work for step in recording.read(copy).steps] == [step.work for step in recording.read(run).steps]
    assert traces.read(copy / "trace.jsonl") != traces.read(run / "trace.jsonl")


@dataclasses.dataclass(frozen=True)
class Repeating:
    """The work of every third step is the same."""

    def script(self, task_index: int, sample: int) -> scripts.Script:
        return doubles.SeededWorkload(turns=2, tokens=20).script(task_index % 9, sample)


def test_a_checkpoint_written_while_groups_run_makes_no_step_shorter_than_its_stages(copy):
    metrics = copy / "metrics.jsonl"
    lines = records(metrics)
    assert recording.read(copy).config.coordinator.max_staleness == 0
    for line in lines:
        if "step/seconds" in line:
            line["checkpoint/seconds"] = 0.9 * line["step/seconds"]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in recording.read(copy).steps:
        parts = step.parts
        assert parts.total >= 0.999 * (parts.rollout + parts.train + parts.sync)


def test_steps_that_repeat_are_recognised_and_last_as_long(tmp_path):
    recorded_runs.record(tmp_path, Repeating(), steps=12, coordinator={"max_staleness": 0})
    made = twin.make(recording.read(tmp_path))
    assert (made.repeated, made.kinds) == (6, 3)
    assert made.spread == pytest.approx(0.0, abs=0.02)
    assert twin.target(made.spread) == twin.TARGET


def work(kind: int) -> recording.Work:
    return ((kind, ((1, 0, None),)),)


def test_the_spread_is_pooled_over_kinds_relative_to_each_ones_mean():
    assert twin.spread([(work(1), 9.0), (work(2), 1.0), (work(1), 11.0)]) == (pytest.approx(0.02**0.5), 2, 1)
    pooled, repeated, kinds = twin.spread(
        [(work(1), 9.0), (work(1), 11.0), (work(2), 80.0), (work(2), 100.0), (work(2), 120.0), (work(3), 7.0)]
    )
    assert (repeated, kinds) == (5, 2)
    assert pooled == pytest.approx(((0.01 + 0.01 + 0.04 + 0.0 + 0.04) / 3) ** 0.5)
    assert twin.spread([(work(1), 1.0), (work(2), 2.0)]) == (None, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 10.0)), max_size=20), st.floats(0.1, 10.0))
def test_the_spread_has_no_unit(steps, factor):
    deviation, repeated, kinds = twin.spread([(work(kind), seconds) for kind, seconds in steps])
    scaled, *counts = twin.spread([(work(kind), factor * seconds) for kind, seconds in steps])
    assert counts == [repeated, kinds]
    assert scaled == (None if deviation is None else pytest.approx(deviation, abs=1e-9))


def hand_made(spread: float | None, predicted: float) -> twin.Twin:
    parts = [recording.RecordedSeconds(total, total / 2, total / 2, 0.0) for total in (8.0, 12.0, 10.0, 10.0)]
    replayed = [*parts[:2], *[recording.RecordedSeconds(predicted, 5.0, 5.0, 0.0)] * 2]
    return twin.Twin(recorded_runs.MODEL, 1.0, tuple(parts), tuple(replayed), 2, spread, 2, 1)


def test_the_target_is_a_tenth_or_the_spread_of_the_machine():
    assert hand_made(None, 10.9).met
    assert not hand_made(0.01, 11.1).met
    assert twin.target(hand_made(0.1, 11.1).spread) == pytest.approx(0.15)
    assert hand_made(0.1, 11.1).met
    assert hand_made(0.1, 11.1).error() == pytest.approx(0.11)
    assert hand_made(0.1, 11.1).constant_error == pytest.approx(0.0)
    assert "10.0%: NOT met with 11.0%" in twin.table(hand_made(0.01, 11.1))
    assert "no two of the predicted steps did" in twin.table(hand_made(None, 10.0))


def test_a_mean_of_few_steps_is_called_one():
    made = hand_made(None, 10.0)
    longer = dataclasses.replace(made, measured=5 * made.measured, predicted=5 * made.predicted, calibrated=10)
    assert "This is the mean of 2 steps" in twin.table(made)
    assert "This is the mean of" not in twin.table(longer)


# What cannot be replayed ------------------------------------------------------------------------------------------


def refused(workdir: pathlib.Path, sentence: str) -> None:
    with pytest.raises(protocols.DataError, match=sentence) as caught:
        twin.make(recording.read(workdir))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("config.json", r"config\.json: cannot be read .*give the --workdir of a finished run"),
        ("metrics.jsonl", r"metrics\.jsonl: holds no training step"),
        ("trace.jsonl", r"trace\.jsonl: the trace cannot be read"),
        ("timeline.json", r"timeline\.json: no stream of tokens is in it"),
    ],
)
def test_a_missing_file_is_named(copy, name, sentence):
    (copy / name).unlink()
    refused(copy, sentence)


def records(path: pathlib.Path) -> list[dict]:
    """The records of a file without their checksums and numbers, which those that are changed no longer have."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("checksum", "record")} for line in lines]


def edit(path: pathlib.Path, change) -> None:
    lines = records(path)
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines) if line))


def without(key: str):
    return lambda lines: [{name: value for name, value in line.items() if name != key} for line in lines]


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("metrics.jsonl", lambda lines: lines[:5], r"5 of the run's 8 steps are recorded; let it finish"),
        (
            "metrics.jsonl",
            lambda lines: [{**line, "groups/replaced": 1} for line in lines],
            r"8 groups were replaced, .*filter=none",
        ),
        ("metrics.jsonl", without("train/seconds"), r'step 1 has no "train/seconds"'),
        ("trace.jsonl", without("group_id"), r'/0 has no "group_id"'),
        ("trace.jsonl", lambda lines: lines[:-1], r"holds 255 trajectories of 32 groups, .*trained 32 groups of 8"),
    ],
)
def test_files_that_do_not_tell_the_whole_run_are_refused(copy, name, change, sentence):
    edit(copy / name, change)
    refused(copy, sentence)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('{"step": 3}', '{"step": 2}', r"step 2 was taken twice, because the run was resumed"),
        ('"train step"', '"training"', r"shows 0 training steps of the run's 8"),
        ('"name": "engine-1"', '"name": "engine-7"', r"tokens came from 'engine-7', .* has 3 instances"),
        ('"request"', '"asked"', "no stream of tokens is in it"),
    ],
)
def test_a_timeline_of_something_else_is_refused(copy, old, new, sentence):
    path = copy / "timeline.json"
    recording.read(copy)  # as it is, it can be used
    # Another file's lines, and no damaged ones.
    path.write_text(re.sub(r', "checksum": "\w+"', "", path.read_text()).replace(old, new))
    refused(copy, sentence)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda values: [1, 2], r"config\.json: is not the config of a run of this version"),
        (lambda values: {**values, "stepz": 3}, r"config\.stepz: no such field; did you mean steps"),
        (lambda values: {**values, "steps": 4}, r"8 of the run's 4 steps are recorded"),
        (
            lambda values: {**values, "algorithm": {**values["algorithm"], "budget": "knapsack"}},
            r"the run has algorithm\.budget=knapsack; record one with algorithm\.budget=uniform",
        ),
        (lambda values: {**values, "task": {**values["task"], "order": "success"}}, r"the run has task\.order=success"),
        (
            lambda values: {
                **values,
                "rollout": {
                    **values["rollout"],
                    "accelerators": ["h20"] * len(values["rollout"]["tensor_parallel"]),
                },
            },
            r"fitted by tensor-parallel degree, and the run has unlike accelerators",
        ),
    ],
)
def test_another_config_is_refused(copy, change, sentence):
    path = copy / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    refused(copy, sentence)


def test_a_run_that_moved_to_another_plan_is_refused_and_one_that_only_looked_is_not(copy):
    (copy / "plans.jsonl").write_text('{"step": 2, "moved": false}\n')
    recording.read(copy)
    (copy / "plans.jsonl").write_text('{"step": 2, "moved": false}\n{"step": 4, "moved": true}\n')
    refused(copy, r"plans.jsonl: the run moved to another plan, and a twin has one layout")


def test_too_few_steps_are_refused(tmp_path):
    recorded_runs.record(tmp_path, steps=3)
    refused(tmp_path, r"3 steps are too few, .*record at least 4")


def test_an_instance_that_served_nothing_is_refused(tmp_path):
    recorded_runs.record(
        tmp_path, steps=4, coordinator={"groups_per_step": 1, "group_size": 1}, scheduler={"policy": "sticky"}
    )
    refused(tmp_path, r"streams of tokens are too few to calibrate an engine by")
