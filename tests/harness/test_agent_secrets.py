"""Canaries in the private fields of tasks, and forged verdicts: what an agent's commands can read and write."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import harness_doubles
import pytest
import repairs
import sandboxes

from libra_jax import protocols
from libra_jax.environments import math, question, repo_repair, search_qa
from libra_jax.examples import acquaintances, calculator, integers, planted, time_zones
from libra_jax.harness import jobs, private_view
from libra_jax.utils import deadlines

HERE = str(Path(__file__).parents[1] / "common")
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing")

SEARCH = """
import os, re, sys
word, found = re.compile(b"CANA[R]Y-[a-z_]+-7f3a"), set()

def look(path, most=2**26):
    try:
        # A pipe, which has no other end perhaps, must not block.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", 0) as file:
            found.update(word.findall(file.read(most) or b""))
    except OSError: pass

def look_in_memory(number):
    try:
        with open(f"/proc/{number}/maps") as maps, open(f"/proc/{number}/mem", "rb", 0) as memory:
            for line in maps:
                first, last = (int(part, 16) for part in line.split()[0].split("-"))
                if line.split()[1][0] == "r" and last - first < 2**28 and first < 2**47:
                    try:
                        memory.seek(first)
                        found.update(word.findall(memory.read(last - first)))
                    except (OSError, ValueError): pass
    except OSError: pass

for number in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline", "fd/0", "fd/1", "fd/3", "cwd/call.json", "root/tmp/call.json"):
        look(f"/proc/{number}/{name}")
    if int(number) != os.getpid(): look_in_memory(number)
for top in (".", "../told", "../home", "../tmp", "/tmp", "/dev/shm", os.environ.get("HOME", "/tmp")):
    for folder, folders, names in os.walk(top):
        # Other folders of a shared /tmp are no part of what is tried.
        folders[:] = [name for name in folders if folder != "/tmp" or name.startswith(("libra", "harness"))]
        for name in names[:500]: look(os.path.join(folder, name), 2**20)
found.update(word.findall(repr(sorted(os.environ.items())).encode()))
print("found:", sorted(found))
"""
"""Looks for canaries in all that a process can read. Its own text has none."""


def canary(name):
    return "-".join(["CANARY", name, "7f3a"])


def canaries(value, name="value"):
    """The same value with a canary in each text, and beside it in each list."""
    if isinstance(value, dict):
        return {key: canaries(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [canaries(one, name) for one in value]
    return f"{value} # {canary(name)}" if isinstance(value, str) else value


def task():
    """A planted bug whose private fields hold canaries, among fields that other sources of tasks have."""
    payload = dict(planted.task_source(level="easy").task(0).payload)
    private = {name: canaries(payload[name], name) for name in ("fix", "calls", "kind")}
    names = ("answer", "tests", "solution", "hint", "fail_to_pass", "worked", "rubric")
    return protocols.Task("t", {**payload, **private, **{name: canary(name) for name in names}})


def search_callable(task, endpoint):
    """An agent in a process of its own, which runs the search as a command of the model."""
    shown = json.dumps(task.payload) + json.dumps(vars(endpoint))
    ended = subprocess.run([sys.executable, "-S", "-c", SEARCH], capture_output=True, text=True, check=True)
    return {"reward": 0.0, "text": shown + ended.stdout}


async def search_here(task, endpoint):
    """An agent in the run's process, whose model sees what it is told."""
    return {"reward": 0.0, "text": json.dumps(task.payload) + "found: []"}


def report(finished):
    report.seen = finished.output or finished.verdict["text"]
    return 0.0


KINDS = {
    "command": {"command": harness_doubles.python(SEARCH), "files": "files"},
    "sandbox": {"command": ["python3", "-S", "-c", SEARCH], "sandbox": True, "files": "files"},
    "process": {"callable": f"{__name__}:search_callable", "python": "python", "search": [HERE]},
    "in-process": {"callable": f"{__name__}:search_here"},
}


@needs_bubblewrap
@repairs.cases(KINDS)
def test_no_private_field_reaches_an_agent_of_a_harness(made):
    sandboxes.skip_without_bubblewrap()
    given = task()
    harness_doubles.run_with_tools(given, None, score=f"{__name__}:report", **made)
    assert "found: []" in report.seen
    assert canary("answer")[:6] not in report.seen
    assert given.payload["answer"] == canary("answer")


@needs_bubblewrap
def test_no_private_field_reaches_the_policy_of_a_repair():
    async def work(tools):
        environment = repo_repair.environment(tools, prompt="Look: {issue}")
        said = [message.content for message in await environment.reset(task())]
        for tool in ("python", "shell"):
            call = {"code": SEARCH} if tool == "python" else {"command": f"python3 -S -c {json.dumps(SEARCH)}"}
            if tool == "shell":
                await environment._toolbox.session.edit({"command": "create", "path": "s.py", "text": SEARCH})
                call = {"command": "python3 -S s.py"}
            result = await environment.step(tools.format.write(tool, call))
            said += [answer.content for answer in result.tool_returns]
        await environment.close()
        return said

    said = repairs.with_tools(work)
    assert sum("found: []" in text for text in said) == 2
    assert "CANARY" not in "".join(said)


SOURCES = {
    "calculator": (calculator.task_source(), lambda tools: calculator.environment()),
    "acquaintances": (acquaintances.task_source(), lambda tools: math.environment(tools, processes=1)),
    "search": (acquaintances.task_source(), search_qa.environment),
    "time-zones": (time_zones.task_source(), time_zones.environment),
    "integers": (integers.task_source(), lambda tools: question.environment()),
}


@repairs.cases(SOURCES)
def test_no_private_field_is_in_the_messages_or_the_sandbox_of_an_environment(made):
    source, make = made
    payload = dict(source.task(0).payload)
    private = {name: canaries(value, name) for name, value in payload.items() if name not in jobs.PROMPT_FIELDS}
    given = protocols.Task("t", {**payload, **private, "hint": canary("hint"), "rubric": canary("rubric")})

    async def work(tools):
        environment = make(tools)
        said = [message.content for message in await deadlines.call(environment.reset, given)]
        result = await deadlines.call(environment.step, tools.format.write("python", {"code": SEARCH}))
        said += [answer.content for answer in result.tool_returns]
        await deadlines.call(environment.close)
        return said

    said = repairs.with_tools(work, use=("python",))
    assert said
    assert "CANARY" not in "".join(said)


# Verdicts -------------------------------------------------------------------------------------------------------------

FORGE = """
import glob, json, os, re, sys, time
verdict = b'{"reward": 1.0}'
keys = [b""]
for number in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            with open(f"/proc/{number}/{name}", "rb") as file: keys += re.findall(rb"[0-9a-f]{64}", file.read(2**20))
        except (OSError, ValueError): pass
    if int(number) != os.getpid():
        try:
            with open(f"/proc/{number}/maps") as maps, open(f"/proc/{number}/mem", "rb", 0) as memory:
                for line in maps:
                    first, last = (int(part, 16) for part in line.split()[0].split("-"))
                    if line.split()[1][0] == "r" and last - first < 2**27 and first < 2**47:
                        memory.seek(first)
                        keys += re.findall(rb"[0-9a-f]{64}", memory.read(last - first))
        except (OSError, ValueError): pass
import hmac
texts = {key: hmac.digest(key, verdict, "sha256").hex().encode() + b"\\n" + verdict for key in set(keys)}
until = time.monotonic() + SECONDS
while True:
    for place in [*glob.glob("../told/verdict*"), "../told/verdict", "../told/verdict.json"]:
        for key, text in texts.items():
            try:
                with open(place, "wb") as file: file.write(verdict if "json" in place else text)
            except OSError: pass
    if time.monotonic() > until: break
print(json.dumps({"reward": 1.0}))
"""


def forged(task, endpoint, command):
    """An agent that runs a command of the model, and says that the attempt was bad."""
    subprocess.run([sys.executable, "-S", "-c", command], check=False)
    return {"reward": 0.0}


FORGERIES = {
    "at-once": f"SECONDS = 0{FORGE}",
    "again-and-again": f"import os\nif os.fork() == 0:\n    os.setsid()\n    SECONDS = 20\n    exec({FORGE!r})",
    "a-loop": "import os\nif os.fork() == 0:\n    os.setsid()\n    while True:\n"
    "        for name in ('verdict', 'verdict.json'):\n"
    "            with open('x', 'w') as file: file.write('{\"reward\": 1.0}')\n"
    "            os.replace('x', '../told/' + name)\n",
    "a-link": "import os\nos.symlink('/etc/hostname', '../told/verdict')\n",
    "a-pipe": "import os\nos.mkfifo('../told/verdict')\n",
    "a-folder": "import os\nos.mkdir('../told/verdict')\n",
    "kill": "import os\nos.kill(os.getppid(), 9)\n",
    "close-the-folder": "import shutil\nshutil.rmtree('../told')\n",
}


@needs_bubblewrap
@repairs.cases(FORGERIES)
def test_a_command_of_the_model_forges_no_verdict(made):
    sandboxes.skip_without_bubblewrap()
    arguments = {"callable": f"{__name__}:forged", "python": "python", "search": [HERE], "seconds": 30.0}
    try:
        outcome = harness_doubles.run(harness_doubles.task(prompt="p"), arguments={"command": made}, **arguments)
        assert outcome.reward == 0.0
    except protocols.EnvironmentCrashed:
        pass  # voided: `test_a_second_void_is_scored` has the rest
    assert not [file for file in Path("/proc/self/fd").iterdir() if "/told/verdict" in os.path.realpath(file)]


def test_an_agent_has_no_capabilities_and_changes_no_code_of_the_run():
    if not private_view.own_processes(Path("/tmp/folder/rollout")):
        pytest.skip("bubblewrap does not work here")
    package = Path(private_view.__file__).parent
    line = (
        "grep -hE 'Cap(Prm|Eff|Amb)' /proc/self/status; ls -d /proc/[0-9]* | wc -l; "
        f"(echo pass >> {package}/child.py) 2>/dev/null || echo refused; echo x > /tmp/$$ && rm /tmp/$$ && echo written"
    )
    harness_doubles.run(command=line, score="harness_doubles:judge")
    *capabilities, count, code, temporary = harness_doubles.judge.seen.output.splitlines()
    assert {line.split()[1].strip("0") for line in capabilities} == {""}
    assert (int(count) < 8, code, temporary) == (True, "refused", "written")


def test_an_agent_sees_no_folder_of_ray_and_no_shared_memory_of_the_run():
    if not private_view.own_processes(Path("/tmp/folder/rollout")):
        pytest.skip("bubblewrap does not work here")
    ray, memory = Path(tempfile.mkdtemp(prefix="libra-ray-", dir="/tmp")), Path(f"/dev/shm/libra-test-{os.getpid()}")
    try:
        for path in (ray / "secret", memory):
            path.touch()
        harness_doubles.run(command=f"rm -v {ray}/secret {memory}; echo x > /dev/shm/own && echo written")
        assert harness_doubles.judge.seen.output == "written\n"
        assert (ray / "secret").exists()
        assert memory.exists()
    finally:
        memory.unlink(missing_ok=True)
        shutil.rmtree(ray)


def test_a_probe_of_bubblewrap_has_a_deadline_and_is_tried_again(monkeypatch):
    root, probe = Path("/tmp/folder/rollout"), subprocess.run
    if not private_view.own_processes(root):
        pytest.skip("bubblewrap does not work here")

    def hangs(command, timeout=None, **_):
        assert timeout
        raise subprocess.TimeoutExpired(command, timeout)

    private_view._private_view.cache_clear()
    monkeypatch.setattr(subprocess, "run", hangs)
    assert private_view.own_processes(root) == ()
    monkeypatch.setattr(subprocess, "run", probe)
    assert private_view.own_processes(root)
