"""A real run (vLLM and JAX) over a narrow and a wide instance, both of which speculate: what moves keeps its tokens and
log-probabilities, and these are the trainer's."""

import json
import math
import os

import pytest
import scripts

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SETTINGS = (
    f"--config.rollout.engine_arguments={ {'speculative_config': NGRAM} }",
    "--config.steps=3",
    "--config.coordinator.groups_per_step=8",
    "--config.rollout.slots_by_instance=(64,8)",
    # Until the policy calls tools well, nothing it does tells how much is left, and nothing moves.
    "--config.warm_start.steps=100",
    "--config.trainer.rows_per_micro_batch=4",
    "--config.telemetry.report=False",
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.drill]


@pytest.mark.timeout(600)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a wide instance needs two cores")
def test_log_probabilities_of_moved_trajectories_are_the_trainers(tmp_path):
    policy = "--config=configs/cmlfq_cpu.py:cmlfq_paper"
    run = scripts.run("train.py", policy, *SETTINGS, f"--workdir={tmp_path / 'run'}", seconds=580)
    assert run.returncode == 0, run.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "loss" in step]
    assert len(steps) == 3
    assert sum(step["routing/moves"] for step in steps) > 0
    assert sum(step["agent/moves"] for step in steps) > 0, "trained trajectories have moved"
    assert sum(step["routing/judged"] for step in steps) > 0
    moved = [step["mismatch/moved_log_prob_max"] for step in steps if step["agent/moves"] > 0]
    assert max(moved) < 1e-3
    # Tokens of the scoring version, moved or not.
    ratios = [step["mismatch/ratio_max"] for step in steps if "mismatch/ratio_max" in step]
    assert steps[0]["mismatch/ratio_max"] == ratios[0], "the first batch was sampled by the version that trains"
    assert max(map(math.log, ratios)) < 1e-3
    assert all(step["skipped"] == 0 and step["grad_norm"] > 0 for step in steps)
    assert [step["policy_version"] for step in steps] == [1, 2, 3]
    assert all(step["routing/move_seconds"] > 0 for step in steps if step["routing/moves"])
