"""Harbor's task folders: in the host's own files, and in their container by a stand-in for podman."""

import asyncio
import json
import os
import shutil
import stat
import sys

import harness_doubles
import pytest

from libra_jax import protocols
from libra_jax.agents.environments.harness import harbor, harbor_tasks

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing")

DOCKERFILE = """FROM ubuntu:24.04
# what the image would hold
ENV GREETING="good day" \\
    OTHER=1
WORKDIR /app
COPY data.txt ./
COPY folder inner
CMD ["bash"]
"""
TESTS = """#!/bin/bash
if [ "$(cat /app/answer.txt)" = "good day data" ] && [ "$PWD" = /app ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
AGENT = (
    harness_doubles.ASK
    + """
import subprocess
task = json.load(open(os.environ["LIBRA_TASK_FILE"]))
assert task["instruction"].startswith("Write") and not os.path.exists("/tests")
subprocess.run(answer, shell=True, check=True)
"""
)


@pytest.fixture
def folder(tmp_path):
    """A folder with one task."""
    task = tmp_path / "tasks" / "greet"
    for name in ("environment/folder", "tests"):
        (task / name).mkdir(parents=True)
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 30.0\n")
    (task / "instruction.md").write_text("Write a greeting and the data into answer.txt.")
    (task / "environment" / "Dockerfile").write_text(DOCKERFILE)
    (task / "environment" / "data.txt").write_text("data\n")
    (task / "environment" / "folder" / "deep.txt").write_text("deep\n")
    (task / "tests" / "test.sh").write_text(TESTS)
    return tmp_path / "tasks"


def run(folder, model=None, **arguments):
    task = harbor_tasks.task_source(str(folder), holdout=0).task(0)
    arguments.setdefault("allow_unsafe", not arguments.get("container"))

    async def body():
        made = harbor.environment(**arguments)
        try:
            return await made.run(task, harness_doubles.endpoint(model))
        finally:
            await made.close()

    return asyncio.run(body())


@needs_bubblewrap
def test_an_agent_works_and_is_tested_in_the_folders_of_the_image(folder):
    python = ["python3", "-S", "-c", AGENT]
    right = "test -e inner/deep.txt && echo $GREETING $(cat data.txt) > answer.txt"
    with harness_doubles.model(lambda messages: right) as model:
        assert run(folder, model, command=python).reward == 1.0
    with harness_doubles.model(lambda messages: "echo wrong > answer.txt; touch /usr/mine || true") as model:
        assert run(folder, model, command=python).reward == 0.0
    assert not os.path.exists("/usr/mine")
    assert not os.path.exists("/app")


@needs_bubblewrap
def test_a_scene_reaches_its_session_and_no_other_port(folder):
    code = AGENT + "import socket\nsocket.create_connection(('127.0.0.1', int(sys.argv[1])), 2)\n"
    code = "import sys\n" + code
    with harness_doubles.model(lambda messages: "true") as model, harness_doubles.model() as other:
        port = other.base_url.rpartition(":")[2].removesuffix("/v1")
        command = ["python3", "-S", "-c", code, port]
        with pytest.raises(protocols.EnvironmentCrashed, match="ConnectionRefused"):
            run(folder, model, command=command)
        assert run(folder, model, command=command, internet=True).reward == 0.0


@needs_bubblewrap
def test_tests_without_a_reward_are_a_crash_and_late_ones_fail(folder):
    script = folder / "greet" / "tests" / "test.sh"
    script.write_text("echo no network >&2; exit 1\n")
    with pytest.raises(protocols.EnvironmentCrashed, match=r"gave no reward.*no network"):
        run(folder, command=["true"])
    script.write_text("sleep 600\n")
    (folder / "greet" / "task.toml").write_text("[verifier]\ntimeout_sec = 0.5\n")
    outcome = run(folder, command=["true"])
    assert (outcome.reward, outcome.metrics["tests_overdue"]) == (0.0, 1.0)


@needs_bubblewrap
def test_rewards_of_several_names_are_metrics_beside_the_reward(folder):
    told = json.dumps({"reward": 0.5, "style": 0.25})
    (folder / "greet" / "tests" / "test.sh").write_text(f"echo '{told}' > /logs/verifier/reward.json\n")
    outcome = run(folder, command=["true"])
    assert outcome.reward == 0.5
    assert outcome.metrics["reward_style"] == 0.25


PLANT = ["sh", "-c", "echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt"]


@needs_bubblewrap
def test_a_reward_that_the_agent_wrote_itself_does_not_count(folder):
    assert run(folder, command=PLANT).reward == 0.0
    (folder / "greet" / "tests" / "test.sh").write_text("exit 1\n")
    with pytest.raises(protocols.EnvironmentCrashed, match="gave no reward"):
        run(folder, command=PLANT)


@needs_bubblewrap
def test_what_an_agent_leaves_at_home_does_not_run_with_the_tests(folder):
    plant = "mkdir -p ~/.local/lib; echo 'echo 1 > /logs/verifier/reward.txt; exit' | tee ~/.bashrc ~/.profile > ~/x"
    (folder / "greet" / "tests" / "test.sh").write_text(
        "test -e ~/.bashrc; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    )
    assert run(folder, command=["sh", "-c", plant]).reward == 0.0


def test_a_task_without_its_container_is_refused_unless_that_is_allowed(folder):
    with pytest.raises(protocols.ConfigError, match=r"container: must be True: .* no limits .* allow_unsafe=True"):
        run(folder, command=["true"], allow_unsafe=False)


@needs_bubblewrap
def test_a_dockerfile_that_runs_commands_needs_its_container(folder):
    with (folder / "greet" / "environment" / "Dockerfile").open("a") as file:
        file.write("RUN mkdir -p /app/empty\nRUN apt-get install -y \\\n    cowsay\n")
    with pytest.raises(protocols.ConfigError, match=r"needs its container.*RUN apt-get install -y +cowsay"):
        run(folder, command=["true"])
    assert run(folder, command=["true"], lenient=True).reward == 0.0


def test_a_dockerfile_is_read_as_far_as_it_copies_files():
    recipe = harbor_tasks.read_recipe(DOCKERFILE)
    assert recipe.folder == "/app"
    assert recipe.variables == {"GREETING": "good day", "OTHER": "1"}
    assert recipe.copies == [("data.txt", "/app/data.txt"), ("folder", "/app/inner")]
    assert recipe.unmet == []
    assert harbor_tasks.read_recipe("FROM a\nCOPY --from=b x /y\n").unmet == ["COPY --from=b x /y"]


def test_a_folder_without_tasks_and_a_malformed_task_are_named(tmp_path, folder):
    with pytest.raises(protocols.DataError, match=r"holds no tasks of Harbor"):
        harbor_tasks.task_source(str(tmp_path))
    (folder / "greet" / "task.toml").write_text("[agent\n")
    with pytest.raises(protocols.DataError, match=r"greet: "):
        harbor_tasks.task_source(str(folder), holdout=0)
    (folder / "greet" / "task.toml").write_text('[[steps]]\nname = "first"\n')
    with pytest.raises(protocols.DataError, match="several steps"):
        harbor_tasks.task_source(str(folder), holdout=0)


RUNTIME = """#!{python}
import json, os, shutil, subprocess, sys
words, log, state = sys.argv[1:], {log!r}, {state!r}
with open(log, "a") as file:
    print(json.dumps(words), file=file)
if words[0] == "build":
    shutil.copytree(words[3], state + "/app")
elif words[0] == "run":
    volumes = [word[9:].split(":") for word in words if word.startswith("--volume=")]
    json.dump({{place: host for host, place, *_ in volumes}}, open(state + "/volumes", "w"))
elif words[0] == "cp":
    shutil.copytree(words[1], state + "/tests")
elif words[0] == "exec":
    folders = {{"/app": state + "/app", "/tests": state + "/tests", **json.load(open(state + "/volumes"))}}
    names = [word[6:] for word in words if word.startswith("--env=")]
    at = next(number for number, word in enumerate(words) if word.startswith("libra-"))
    told = {{name: os.environ[name] for name in names}}
    def inner(word):
        for place, host in folders.items():
            word = word.replace(place + "/", host + "/")
        return word
    command = [inner(word) for word in words[at + 1:]]
    if command[-1] == "kill -9 -1":
        sys.exit()
    if command[-1].endswith("test.sh"):
        command = ["bash", "-c", inner(open(command[-1]).read())]
    told = {{name: inner(value) if name.startswith("LIBRA") else value for name, value in told.items()}}
    sys.exit(subprocess.call(command, cwd=state + "/app", env={{**told, "PATH": os.environ["PATH"]}}))
"""
"""Stands in for podman: its container is a folder, and places in commands and scripts become those of the folder."""


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """The file that tells how the stand-in was called."""
    log, state, path = tmp_path / "log", tmp_path / "state", tmp_path / "bin" / "podman"
    state.mkdir()
    path.parent.mkdir()
    path.write_text(RUNTIME.format(python=sys.executable, log=str(log), state=str(state)))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return log


def test_a_container_is_built_used_for_agent_and_tests_and_removed(folder, runtime):
    (folder / "greet" / "tests" / "test.sh").write_text(
        "[ $(cat /app/answer.txt) = data ]; echo $((1 - $?)) > /logs/verifier/reward.txt"
    )
    with harness_doubles.model(lambda messages: "cat data.txt > answer.txt") as model:
        outcome = run(folder, model, command=harness_doubles.python(AGENT), container=True, options=["--memory=1g"])
    called = [json.loads(line) for line in runtime.read_text().splitlines()]
    assert [words[0] for words in called] == ["build", "run", "exec", "exec", "cp", "exec", "rm"]
    assert outcome.reward == 1.0
    assert "--memory=1g" in called[1]
    assert harness_doubles.SECRET not in runtime.read_text()


def test_a_reward_that_a_containers_agent_wrote_does_not_count(folder, runtime):
    (folder / "greet" / "tests" / "test.sh").write_text("echo 0 > /logs/verifier/reward.txt")
    assert run(folder, command=PLANT, container=True).reward == 0.0


def test_a_containers_agent_that_is_late_leaves_no_container(folder, runtime):
    with pytest.raises(protocols.EnvironmentCrashed, match="took more than"):
        run(folder, command=["sleep", "600"], container=True, seconds=0.5)
    assert json.loads(runtime.read_text().splitlines()[-1])[:2] == ["rm", "--force"]
