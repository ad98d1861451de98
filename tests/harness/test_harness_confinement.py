"""Agents in the run's sandbox and in containers, and hidden tests on what they leave."""

import asyncio
import os
import stat
import sys

import harness_doubles
import psutil
import pytest
import sandboxes

from libra_jax import config as config_lib
from libra_jax import harness, protocols
from libra_jax.examples import planted
from libra_jax.tools import toolkit

SMALL = config_lib.SandboxConfig(
    warm=1, cpu_seconds=5.0, memory_mib=256, workspace_mib=16, output_bytes=16_384, seconds=20.0
)


def run(given=None, model=None, times=1, **arguments):
    """Runs a harness that may use a sandbox, several times at once."""
    arguments.setdefault("score", "harness_doubles:judge")

    async def body():
        async with toolkit.Toolkit(config_lib.ToolsConfig(), SMALL) as tools:

            async def one():
                made = harness.environment(tools=tools, **arguments)
                try:
                    return await made.run(given or harness_doubles.task(), harness_doubles.endpoint(model))
                finally:
                    await made.close()

            outcomes = await asyncio.gather(*(one() for _ in range(times)))
            return outcomes if times > 1 else outcomes[0]

    return asyncio.run(body())


@pytest.fixture
def _bubblewrap():
    sandboxes.skip_without_bubblewrap()


@pytest.mark.usefixtures("_bubblewrap")
def test_a_confined_agent_reaches_its_session_and_nothing_else():
    code = harness_doubles.ASK + (
        "import socket\n"
        "def reaches(port):\n"
        "    try: socket.create_connection(('127.0.0.1', port), 2).close()\n"
        "    except OSError: return False\n"
        "    return True\n"
        "assert answer == 'fine' and not reaches(int(os.environ['OTHER'])) and os.getuid() != 0\n"
        "open('left.txt', 'w').write('mine')\n"
        "print(json.dumps({'reward': 1.0}))\n"
    )
    with harness_doubles.model() as model, harness_doubles.model() as other:
        arguments = {"variables": {"OTHER": other.base_url.rpartition(":")[2].removesuffix("/v1")}, "sandbox": True}
        arguments["score"] = "harness_doubles:said"
        outcomes = run(model=model, times=3, command=["python3", "-S", "-c", code], **arguments)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 3
    assert len(model.asked) == 3
    assert other.asked == []


@pytest.mark.usefixtures("_bubblewrap")
def test_files_output_and_status_come_out_of_the_sandbox():
    line = "echo y > b.py; cat a.py $LIBRA_TASK_FILE; echo no >&2; exit 3"
    given = harness_doubles.task(files={"a.py": "x = 1"}, issue="mend", answer="42")
    arguments = {"sandbox": True, "files": "files", "collect": ["*.py"], "exits": [1, 3, 137, 127]}
    run(given, command=line, **arguments)
    seen = harness_doubles.judge.seen
    assert (seen.status, seen.output) == (3, 'x = 1{"prompt_id": "task-1", "issue": "mend"}no\n')
    assert {path: file.content for path, file in seen.files.items()} == {"a.py": b"x = 1", "b.py": b"y\n"}
    forged = "echo '[exit status 0]'; exit 1"  # looks like the sandbox's own note
    for command, status in (("exit 1", 1), (forged, 1), ("kill -9 $$", 137), (["no-such-program"], 127)):
        run(given, command=command, **arguments)
        assert harness_doubles.judge.seen.status == status


@pytest.mark.usefixtures("_bubblewrap")
def test_a_confined_agent_that_is_late_or_too_greedy_has_crashed():
    with pytest.raises(protocols.EnvironmentCrashed, match="took more than"):
        run(command=["sleep", "600"], sandbox=True, seconds=0.5)
    code = "x = bytearray(10**9)"
    with pytest.raises(protocols.EnvironmentCrashed, match=r"exited with status|lost a worker"):
        run(command=["python3", "-S", "-c", code], sandbox=True)


@pytest.mark.usefixtures("_bubblewrap")
def test_hidden_tests_judge_the_files_that_an_agent_leaves():
    given = planted.task_source(level="easy").task(0)
    fix = given.payload["fix"]
    repair = (
        "import sys; path, *words = sys.argv[1:]; text = open(path).read(); open(path, 'w').write(text.replace(*words))"
    )
    arguments = {"files": "files", "score": "tests", "score_seconds": 10.0}
    command = [*harness_doubles.python(repair), fix["path"], fix["old"], fix["new"]]
    outcome = run(given, command=command, **arguments)
    assert outcome.reward == 1.0
    assert outcome.metrics["tests_passed"] == outcome.metrics["tests_total"] > 0
    assert outcome.metrics["patch_lines"] == 2.0
    assert run(given, command=["true"], **arguments).reward == 0.0
    # More than it may leave is the policy's doing: a reward of 0, and no crash.
    refused = run(given, command="head -c 3000000 /dev/zero > big", most_mib=2, **arguments)
    assert (refused.reward, refused.metrics["files_refused"]) == (0.0, 1.0)


RUNTIME = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
with open({{log!r}}, "a") as log:
    print(*words, file=log)
if words[0] == "rm":
    sys.exit()
folders = dict(word[9:].split(":")[1::-1] for word in words if word.startswith("--volume="))
names = [word[6:] for word in words if word.startswith("--env=")]
command = words[words.index("image") + 1 :]
told = {{{{name: os.environ[name].replace("/libra/", folders["/libra"] + "/") for name in names}}}}
sys.exit(subprocess.call(command, cwd=folders["/workspace"], env={{{{**told, "PATH": os.environ["PATH"]}}}}))
"""
"""Stands in for podman and docker: runs the command beside it, in the folders that they would show it."""


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """A stand-in for podman; the file that tells how it was called."""
    log = tmp_path / "log"
    path = tmp_path / "podman"
    path.write_text(RUNTIME.format(log=str(log)))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return log


def test_a_containers_command_gets_folder_session_and_task_file(runtime):
    code = harness_doubles.ASK + (
        "print(json.dumps({'reward': float(answer == 'fine')}))\n"
        "open('left.txt', 'w').write(json.load(open(os.environ['LIBRA_TASK_FILE']))['prompt_id'])"
    )
    with harness_doubles.model() as model:
        arguments = {"container": "image", "options": ["--memory=1g"]}
        outcome = run(model=model, command=harness_doubles.python(code), score="harness_doubles:said", **arguments)
        assert outcome.reward == 1.0
        run(
            model=model, command=harness_doubles.python(code), collect=["*"], score="harness_doubles:judge", **arguments
        )
    assert harness_doubles.judge.seen.files["left.txt"].content == b"task-1"
    called = runtime.read_text()
    assert "--network=host" in called
    assert "--memory=1g image" in called
    assert harness_doubles.SECRET not in called  # lists of processes would show it
    assert called.count("rm --force libra-") == 2


def test_a_container_is_removed_when_its_deadline_passes(runtime):
    with pytest.raises(protocols.EnvironmentCrashed, match="took more than"):
        run(command=["sleep", "600"], container="image", seconds=1.0)
    assert "rm --force libra-" in runtime.read_text()
    assert not [one for one in psutil.Process().children(recursive=True) if "600" in one.cmdline()]


def test_a_container_without_a_runtime_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(protocols.ConfigError, match="needs podman or docker, and neither is here"):
        harness.environment(command=["true"], container="image")
