"""A run with a hybrid worker whose processes are killed in every state of its transitions, and one with none killed."""

import collections
import functools

import pytest
import real_runs
import scripts
from real_runs import lines

IN_CI = ("fetching:replica", "warming:replica", "joining:replica")
KILLS = ("training:replica", "draining:engine", *IN_CI, "leaving:replica", "activating:engine")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.multiprocess]


run = functools.partial(real_runs.run, "restless_run.py", actors=4)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kills", [pytest.param(IN_CI, id="of_its_replica"), pytest.param(KILLS, id="all", marks=pytest.mark.drill)]
)
def test_whatever_is_killed_in_whatever_state_every_prompt_is_trained_once(tmp_path, kills):
    workdir = tmp_path / "run"
    first = run(workdir, "2000", *kills, "joining:trainer")
    assert first.stdout.count("killed ") == len(kills) + 1, first.stdout + first.stderr
    assert first.returncode == 1
    assert "error: " in first.stdout
    assert "trainer" in first.stdout.splitlines()[-1]
    failed = [item for item in lines(workdir / "transitions.jsonl") if item["outcome"] == "failed"]
    states = {next(reversed(item["phases"]), item["from"]) for item in failed}
    # A member that dies may be told by its weights or by its share, one that leaves is ended anyway, and an engine
    # that dies while its replica is made anew has been started again by the time it is to sleep.
    assert {"fetching", "warming", "joining"} <= states
    taken = max(step["step"] for step in lines(workdir / "metrics.jsonl"))

    # Steps for several switches: where steps are short, a switch takes several of them.
    steps_in_all = taken + 30
    second = run(workdir, str(steps_in_all))
    assert second.returncode == 0, second.stdout + second.stderr
    trace = lines(workdir / "trace.jsonl")
    trained = collections.Counter(record["trajectory_id"] for record in trace)
    assert set(trained.values()) == {1}
    assert len(trained) == steps_in_all * 4 * 2
    steps = [step for step in lines(workdir / "metrics.jsonl") if "loss" in step]
    assert [step["step"] for step in steps] == list(range(1, steps_in_all + 1))
    assert all(step["staleness/max"] <= 1 for step in steps)
    assert sum(step.get("shares/micro_batches", 0) for step in steps) > 0
    assert sum(step.get("shares/refused", 0) for step in steps) == 0
    moved = [item for item in lines(workdir / "transitions.jsonl") if item["outcome"] == "done"]
    assert {item["to"] for item in moved} == {"training", "rollout"}


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_a_trainer_of_two_processes_goes_through_a_whole_run_and_its_resumption(tmp_path):
    settings = (
        "--config=configs/quickstart.py",
        "--config.coordinator.groups_per_step=4",
        "--config.coordinator.group_size=2",
        "--config.rollout.engine=fake",
        "--config.trainer.processes=2",
        "--config.trainer.fsdp=2",
        "--config.trainer.rows_per_micro_batch=2",
        "--config.cluster.backend=ray",
        "--config.warm_start.steps=0",
        "--config.evaluation.every=0",
        "--config.checkpoint.every=1",
        "--config.telemetry.report=False",
        f"--workdir={tmp_path / 'run'}",
    )
    for steps in (2, 3):
        done = scripts.run("train.py", *settings, f"--config.steps={steps}", seconds=140)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "(data 1, fsdp 2, tensor 1, context 1)" in done.stdout
    assert [step["step"] for step in lines(tmp_path / "run" / "metrics.jsonl") if "loss" in step] == [1, 2, 3]
