"""A run whose trainer moves between process sets and whose hybrid worker changes sides, against one that stays."""

import collections
import json

import numpy as np
import pytest
import real_runs
from real_runs import lines

# With the drills: CI moves a trainer between process sets in tests/cluster/test_trainer_processes.py, and its other
# whole runs have plans that move, hybrid workers and several nodes one at a time.
pytestmark = [pytest.mark.drill, pytest.mark.ray, pytest.mark.slow, pytest.mark.multiprocess]

SAME = ("trajectory_id", "prompt_id", "group_id", "step", "policy_version", "reward", "prompt_tokens")


def trained(workdir):
    """What each step was trained on, in order."""
    return [
        ({name: record[name] for name in SAME}, [turn["generated_tokens"] for turn in record["turns"]])
        for record in lines(workdir / "trace.jsonl")
    ]


@pytest.mark.timeout(600)
def test_a_plan_moves_the_trainer_over_two_nodes_and_every_step_is_that_of_a_run_which_stays(tmp_path):
    workdir = tmp_path / "moved"
    moved = real_runs.run("moving_run.py", workdir, actors=8)
    assert moved.returncode == 0, moved.stdout + moved.stderr
    steps = [step for step in lines(workdir / "metrics.jsonl") if "loss" in step]
    taken = len(steps)
    assert [step["step"] for step in steps] == list(range(1, taken + 1))

    transitions = lines(workdir / "transitions.jsonl")
    there, back = [item for item in transitions if item["worker"] == "trainer"]
    assert [(item["outcome"], item["reason"]) for item in (there, back)] == [("done", "a plan")] * 2, (there, back)
    assert [item["to"] for item in (there, back)] == [f"data {data} x fsdp 1 x tensor 1" for data in (2, 1)]
    for item in (there, back):
        assert item["bytes"] > 0
        assert {"start", "compile", "snapshot", "restore", "replay", "settle"} <= item["phases"].keys()
    told = [json.loads(line) for line in moved.stdout.splitlines() if line.startswith("{")]
    nodes = {item["actor"]: item["node"] for item in told}
    assert len({nodes[name] for name in ("trainer-1.0", "trainer-1.1", "hybrid-2")}) == 2, nodes
    assert "trainer-2" in nodes

    helped = [step["step"] for step in steps if step.get("shares/micro_batches", 0) > 0]
    assert any(there["step"] < step <= back["step"] for step in helped), (there, back, helped)
    assert any(step <= there["step"] or step > back["step"] for step in helped)
    assert sum(step.get("shares/refused", 0) for step in steps) == 0
    changed = collections.Counter(
        item["to"] for item in transitions if item["worker"] == "rollout-2" and item["outcome"] == "done"
    )
    assert changed["training"] >= 2
    assert changed["rollout"] >= 1

    stayed = real_runs.run("moving_run.py", tmp_path / "stayed", str(taken), actors=0)
    assert stayed.returncode == 0, stayed.stdout + stayed.stderr
    assert trained(workdir) == trained(tmp_path / "stayed")  # the data position is no trainer's, and stays, too
    assert len({record["prompt_id"] for record, _ in trained(workdir)}) == 8 * taken
    wanted = [step for step in lines(tmp_path / "stayed" / "metrics.jsonl") if "loss" in step]
    assert wanted[-1]["loss"] < wanted[0]["loss"] < 0
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([step[name] for step in steps], [step[name] for step in wanted], rtol=1e-4)
