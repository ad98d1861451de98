"""A real run (vLLM and JAX) whose planner ends an instance and starts two others in the middle."""

import json
import os

import pytest
import scripts

SETTINGS = (
    "--config.steps=10",
    "--config.coordinator.groups_per_step=16",
    "--config.coordinator.group_size=4",
    "--config.coordinator.max_staleness=1",
    "--config.rollout.slots=8",  # of 64 requests: twice as many slots are worth a move
    "--config.warm_start.steps=20",
    "--config.planner.start_seconds=2",
    "--config.trainer.rows_per_micro_batch=4",
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.drill]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(600)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a wide instance needs two cores")
def test_instances_are_replaced_in_the_middle_of_a_run_and_nothing_is_lost(tmp_path):
    workdir = tmp_path / "run"
    run = scripts.run("train.py", "--config=configs/planned_cpu.py", *SETTINGS, f"--workdir={workdir}", seconds=580)
    assert run.returncode == 0, run.stderr
    steps = [step for step in lines(workdir / "metrics.jsonl") if "loss" in step]
    assert [step["step"] for step in steps] == list(range(1, 11))
    assert all(step["staleness/max"] <= 1 for step in steps)
    assert sum(step["groups/replaced"] for step in steps) == 0
    trained = [record["trajectory_id"] for record in lines(workdir / "trace.jsonl")]
    assert len(trained) == len(set(trained)) == 10 * 16 * 4
    moved = [decision for decision in lines(workdir / "plans.jsonl") if decision["moved"]]
    assert moved, run.stdout
    assert moved[0]["plan"]["rollout"][0]["tensor_parallel"] == 1
    assert moved[0]["plan"]["rollout"][0]["count"] == 2
    assert (workdir / "rollout-1.log").exists()
    assert (workdir / "rollout-2.log").exists()
    report = (workdir / "report.html").read_text()
    assert "Predicted and measured step times" in report
    assert "Looks for a better plan" in report
