"""Harbor's task folders in their containers, by a stand-in for podman."""

import asyncio
import json
import os

import harness_doubles
import podman_double
import pytest

from libra_jax import protocols
from libra_jax.harness import harbor, harbor_tasks

DOCKERFILE = """FROM ubuntu:24.04
WORKDIR /app
COPY data.txt ./
"""
TESTS = """#!/bin/bash
[ "$(cat /app/answer.txt)" = data ]
echo $((1 - $?)) > /logs/verifier/reward.txt
"""
AGENT = (
    harness_doubles.ASK
    + """
import subprocess
task = json.load(open(os.environ["LIBRA_TASK_FILE"]))
assert task["instruction"].startswith("Write") and not os.path.exists("../tests")
subprocess.run(answer, shell=True, check=True)
"""
)


@pytest.fixture
def folder(tmp_path):
    """A folder with one task."""
    task = tmp_path / "tasks" / "greet"
    for name in ("environment", "tests"):
        (task / name).mkdir(parents=True)
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 30.0\n")
    (task / "instruction.md").write_text("Write the data into answer.txt.")
    (task / "environment" / "Dockerfile").write_text(DOCKERFILE)
    (task / "environment" / "data.txt").write_text("data\n")
    (task / "tests" / "test.sh").write_text(TESTS)
    return tmp_path / "tasks"


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    made = podman_double.Podman(tmp_path / "podman")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    return made


def run(folder, model=None, **arguments):
    task = harbor_tasks.task_source(str(folder), holdout=0).task(0)

    async def body():
        made = harbor.environment(**arguments)
        try:
            return await made.run(task, harness_doubles.endpoint(model))
        finally:
            await made.close()

    return asyncio.run(body())


def test_a_container_is_built_used_for_agent_and_tests_and_removed(folder, runtime):
    with harness_doubles.model(lambda messages: "cat data.txt > answer.txt") as model:
        outcome = run(folder, model, command=harness_doubles.python(AGENT), options=["--memory=1g"])
    called = runtime.calls()
    assert [words[0] for words in called] == ["build", "run", "exec", "exec", "cp", "exec", "rm"]
    assert outcome.reward == 1.0
    assert "--memory=1g" in called[1]
    assert harness_doubles.SECRET not in json.dumps(called)
    with harness_doubles.model(lambda messages: "echo wrong > answer.txt") as model:
        assert run(folder, model, command=harness_doubles.python(AGENT)).reward == 0.0


def test_tests_without_a_reward_are_a_crash_and_late_ones_fail(folder, runtime):
    script = folder / "greet" / "tests" / "test.sh"
    script.write_text("echo no network >&2; exit 1\n")
    with pytest.raises(protocols.EnvironmentCrashed, match=r"gave no reward.*no network"):
        run(folder, command=["true"])
    script.write_text("sleep 600\n")
    (folder / "greet" / "task.toml").write_text("[verifier]\ntimeout_sec = 0.5\n")
    outcome = run(folder, command=["true"])
    assert (outcome.reward, outcome.metrics["tests_overdue"]) == (0.0, 1.0)


UNREADABLE = {
    "too deep": "printf '[%.0s' $(seq 100000) > /logs/verifier/reward.json",
    "a link": "ln -s /proc/sys/kernel/pid_max /logs/verifier/reward.json",
    "a pipe": "mkfifo /logs/verifier/reward.json",
    "a hole of a terabyte": "truncate -s 1T /logs/verifier/reward.json",
}


@pytest.mark.parametrize("script", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_reward_that_cannot_be_read_voids_the_attempt(folder, runtime, script):
    (folder / "greet" / "tests" / "test.sh").write_text(f"{script}\n")
    with pytest.raises(protocols.AttemptVoided, match="gave no reward"):
        run(folder, command=["true"])


def test_rewards_of_several_names_are_metrics_beside_the_reward(folder, runtime):
    told = json.dumps({"reward": 0.5, "style": 0.25})
    (folder / "greet" / "tests" / "test.sh").write_text(f"echo '{told}' > /logs/verifier/reward.json\n")
    outcome = run(folder, command=["true"])
    assert outcome.reward == 0.5
    assert outcome.metrics["reward_style"] == 0.25


def test_a_reward_that_the_agent_wrote_itself_does_not_count(folder, runtime):
    plant = "echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt"
    (folder / "greet" / "tests" / "test.sh").write_text("echo 0 > /logs/verifier/reward.txt")
    assert run(folder, command=["sh", "-c", plant]).reward == 0.0
    (folder / "greet" / "tests" / "test.sh").write_text("exit 1\n")
    with pytest.raises(protocols.EnvironmentCrashed, match="gave no reward"):
        run(folder, command=["sh", "-c", plant])


def test_the_variables_of_the_tests_reach_no_agent(folder, runtime):
    (folder / "greet" / "task.toml").write_text('[environment.env]\nSEEN = "yes"\n[verifier.env]\nKEY = "hidden"\n')
    (folder / "greet" / "tests" / "test.sh").write_text(
        "(grep -q hidden /app/seen || ! grep -q yes /app/seen || [ $KEY != hidden ])\n"
        "echo $? > /logs/verifier/reward.txt\n"
    )
    assert run(folder, command=["sh", "-c", "(env; cat $LIBRA_TASK_FILE) > seen"]).reward == 1.0
    assert "hidden" not in json.dumps(runtime.calls())


def test_an_agent_that_is_late_leaves_no_container(folder, runtime):
    with pytest.raises(protocols.EnvironmentCrashed, match="took more than"):
        run(folder, command=["sleep", "600"], seconds=0.5)
    assert runtime.calls()[-1][:2] == ["rm", "--force"]


def test_a_machine_without_a_container_runtime_is_told_what_to_install(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(protocols.ConfigError, match=r"neither podman nor docker; install .* podman"):
        run(folder, command=["true"])


def test_a_folder_without_tasks_and_a_malformed_task_are_named(tmp_path, folder):
    with pytest.raises(protocols.DataError, match=r"holds no tasks of Harbor"):
        harbor_tasks.task_source(str(tmp_path))
    (folder / "greet" / "task.toml").write_text("[agent\n")
    with pytest.raises(protocols.DataError, match=r"greet: "):
        harbor_tasks.task_source(str(folder), holdout=0)
    (folder / "greet" / "task.toml").write_text('[[steps]]\nname = "first"\n')
    with pytest.raises(protocols.DataError, match="several steps"):
        harbor_tasks.task_source(str(folder), holdout=0)
