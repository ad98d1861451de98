"""Whole runs that train agents of other programs: every rollout is a session, and each prompt is trained once."""

import json
import os
from pathlib import Path

import harness_interpreters
import openenv_server
import podman_double
import pytest
import real_runs
import scripts

HERE = Path(__file__).parent
AGENTS = HERE.parent / "common"
pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

STEPS, GROUP = 4, 2
TEST = "wc -c </app/answer.txt | awk '{print ($1 > 20)}' > /logs/verifier/reward.txt\n"


def train(tmp_path, kinds, seconds):
    """A run on the double of an engine, with one group of each kind a step; its workdir."""
    workdir = tmp_path / "run"
    done = scripts.run(
        "train.py",
        *real_runs.small(STEPS, len(kinds), GROUP),
        f"--workdir={workdir}",
        "--config.task.source=mixed_agents:task_source",
        "--config.task.environment=mixed_agents:environment",
        "--config.task.reset_seconds=300",
        "--config.task.tool_seconds=120",
        "--config.rollout.max_context=1024",
        "--config.trainer.row_tokens=1024",
        "--config.trainer.rows_per_micro_batch=1",
        "--config.task.max_turns=3",
        "--config.coordinator.max_staleness=1",
        seconds=seconds,
        environment={
            "LIBRA_JAX_TEST_AGENTS": json.dumps(kinds),
            "PYTHONPATH": f"{HERE}:{AGENTS}:{scripts.ROOT}",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = real_runs.lines(workdir / "metrics.jsonl")
    assert len(steps) == STEPS
    assert sum(step.get("groups/replaced", 0) for step in steps) == 0
    rollouts = real_runs.lines(workdir / "trace.jsonl")
    trained = [rollout["trajectory_id"] for rollout in rollouts]
    numbers = range(GROUP)
    expected = {f"{kind}-{step}/{number}" for kind in kinds for step in range(STEPS) for number in numbers}
    assert len(trained) == len(set(trained)) == len(expected)
    assert set(trained) == expected
    return {kind: [one for one in rollouts if one["prompt_id"].startswith(f"{kind}-")] for kind in kinds}


def harbors(tmp_path):
    """A folder with two tasks of Harbor's kind, whose reward is 1 for a long answer."""
    for name in ("one", "two"):
        task = tmp_path / "tasks" / name
        for inner in ("environment", "tests"):
            (task / inner).mkdir(parents=True)
        (task / "environment" / "Dockerfile").write_text("FROM ubuntu:24.04\nWORKDIR /app\n")
        (task / "task.toml").write_text("[agent]\ntimeout_sec = 300.0\n")
        (task / "instruction.md").write_text(f"Write much into answer.txt, {name}.")
        (task / "tests" / "test.sh").write_text(TEST)
    return str(tmp_path / "tasks")


@pytest.mark.timeout(600)
def test_a_loop_commands_and_a_harbor_task_train_four_steps(tmp_path, monkeypatch):
    pytest.importorskip("openai")
    (tmp_path / "dead").mkdir()
    runtime = podman_double.Podman(tmp_path / "podman")
    monkeypatch.setenv("PATH", f"{runtime.folder}:{os.environ['PATH']}")
    kinds = {
        "loop": {},
        "command": {},
        "dies": {"folder": str(tmp_path / "dead")},
        "harbor": {"tasks": harbors(tmp_path)},
    }
    rollouts = train(tmp_path, kinds, seconds=500)
    # The double's outputs are noise of any length, which these two kinds reward.
    assert len({one["reward"] for one in rollouts["command"]}) > 1
    assert all(one["turns"] for kind in kinds for one in rollouts[kind])
    # An agent of each prompt was killed with -9: its rollout was repeated, and none is worth 0.
    assert len(list((tmp_path / "dead").iterdir())) == STEPS
    assert all(one["reward"] >= 1 for one in rollouts["dies"])


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_clients_loop_trains_four_steps_with_a_real_engine(tmp_path):
    pytest.importorskip("openai")
    workdir = tmp_path / "run"
    done = scripts.run(
        "train.py",
        "--config=configs/any_agent_cpu.py",
        f"--workdir={workdir}",
        f"--config.steps={STEPS}",
        "--config.coordinator.groups_per_step=4",
        "--config.coordinator.group_size=4",
        "--config.rollout.slots=16",
        "--config.warm_start.steps=25",
        "--config.evaluation.every=0",
        "--config.telemetry.report=False",
        seconds=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [step for step in real_runs.lines(workdir / "metrics.jsonl") if "reward/mean" in step]
    assert len(steps) == STEPS
    # What the engine sampled is what the trainer scores: the client's text was never tokenized again.
    assert all(step["mismatch/ratio_max"] < 1.001 for step in steps if "mismatch/ratio_max" in step)
    assert any(step["agent/tool_calls"] > 0 for step in steps)
    assert sum(step["groups/replaced"] for step in steps) == 0


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_agents_of_four_packages_train_four_steps(tmp_path):
    names = {
        "agents_sdk": "openai_agents",
        "mini_swe": "mini_swe_agent",
        "verifiers": "verifiers",
        "openenv": "openenv",
    }
    kinds = {kind: {"python": harness_interpreters.python(name)} for kind, name in names.items()}
    # Prompts of a few characters: the double's model has a thousand positions, and a token is a character.
    short = {"agent": {"system_template": "Repair.", "instance_template": "{{task}}"}}
    kinds["mini_swe"]["arguments"] = {"settings": short}
    with openenv_server.echo(kinds["openenv"]["python"]) as url:
        kinds["openenv"]["arguments"] = {"url": url, "observe": "text", "max_steps": 2}
        rollouts = train(tmp_path, kinds, seconds=800)
    assert all(one["turns"] for kind in kinds for one in rollouts[kind])
    # OpenEnv's echo rewards letters, of which the double writes some. The others have one right answer.
    assert len({one["reward"] for one in rollouts["openenv"]}) > 1
