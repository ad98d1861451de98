"""Agents that are programs: what they get, what is data and what is a crash, and that nothing of them is left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness_doubles
import psutil
import pytest
import sandboxes

from libra_jax import harness, protocols

VERDICT = "import json; print(json.dumps({'reward': 0.5, 'metrics': {'lines': 3}}))"
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("daemon", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
while not (os.path.exists("daemon") and open("daemon").read()):
    time.sleep(0.01)
"""
"""Code that leaves a process behind, in another session and with another parent."""


HERE = "harness_doubles"


def test_a_command_asks_the_session_and_is_scored():
    code = harness_doubles.ASK + "print('talk'); print(json.dumps({'reward': float(len(answer))}))"
    with harness_doubles.model(lambda messages: messages[0]["content"] + "!") as model:
        outcome = harness_doubles.run(model=model, command=harness_doubles.python(code), score=f"{HERE}:said")
    assert outcome.reward == 6.0
    assert model.keys == [harness_doubles.SECRET]
    assert outcome.metrics["harness_seconds"] > 0


@pytest.mark.parametrize("printed", ["42", '{"reward": "high"}', '{"reward": NaN}', '{"score": 1}', ""])
def test_a_scorer_without_a_valid_verdict_is_a_crash(printed):
    if printed == "42":
        assert harness_doubles.run(command=["echo", printed], score=f"{HERE}:said").reward == 42.0
        return
    with pytest.raises(protocols.EnvironmentCrashed, match=r"verdict|finite|raised"):
        harness_doubles.run(command=["echo", printed], score=f"{HERE}:said")


def test_placeholders_take_values_of_the_task_and_of_the_session():
    code = "import sys, json; print(json.dumps({'reward': float(sys.argv[1] == 'a b' and sys.argv[2] == 'x={odd}')}))"
    command = [*harness_doubles.python(code), "{question}", "x={odd}"]
    score = {"score": f"{HERE}:said"}
    assert harness_doubles.run(harness_doubles.task(question="a b"), command=command, **score).reward == 1.0
    with pytest.raises(protocols.DataError, match="no field 'odd'"):
        harness_doubles.run(
            harness_doubles.task(question="a b"), command=[*harness_doubles.python(code), "{odd}"], **score
        )


def test_a_shell_line_quotes_the_values_of_the_task():
    line = """test {question} = 'it'"'"'s $HOME; true' && echo '{"reward": 1}'"""
    given = harness_doubles.task(question="it's $HOME; true")
    outcome = harness_doubles.run(given, command=line, score=f"{HERE}:said")
    assert outcome.reward == 1.0


def test_an_agent_sees_named_fields_of_its_task_alone():
    code = "import os; print(open(os.environ['LIBRA_TASK_FILE']).read())"
    given = harness_doubles.task(question="6*7", answer="42")
    arguments = {"command": harness_doubles.python(code), "score": f"{HERE}:judge"}
    harness_doubles.run(given, fields=["question"], **arguments)
    assert json.loads(harness_doubles.judge.seen.output) == {"prompt_id": "task-1", "question": "6*7"}
    harness_doubles.run(given, fields=["*"], **arguments)
    assert json.loads(harness_doubles.judge.seen.output)["answer"] == "42"
    with pytest.raises(protocols.DataError, match="no field 'hint'"):
        harness_doubles.run(given, fields=["hint"], **arguments)


def test_secrets_of_the_run_stay_out_of_an_agents_environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    harness_doubles.run(command=["env"], variables={"MINE": "1"}, score=f"{HERE}:judge")
    seen = dict(line.split("=", 1) for line in harness_doubles.judge.seen.output.splitlines() if "=" in line)
    assert "WANDB_API_KEY" not in seen
    assert seen["MINE"] == "1"
    assert seen["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    assert Path(seen["HOME"]).parent == Path(seen["TMPDIR"]).parent != Path.home().parent


def test_each_rollout_has_a_fresh_folder_of_template_and_files(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "template.txt").write_text("of the template")
    given = harness_doubles.task(files={"src/a.py": "x = 1\n"})
    line = "cat inner/template.txt && cat src/a.py && echo y > src/b.py && echo z > b.txt && pwd"
    arguments = {"command": line, "files": "files", "workspace": str(tmp_path), "score": f"{HERE}:judge"}
    harness_doubles.run(given, collect=["*.py"], **arguments)
    assert harness_doubles.judge.seen.output.startswith("of the templatex = 1\n")
    assert {path: file.content for path, file in harness_doubles.judge.seen.files.items()} == {
        "src/a.py": b"x = 1\n",
        "src/b.py": b"y\n",
    }
    first = harness_doubles.judge.seen.output.splitlines()[-1]
    assert not Path(first).exists()
    assert not (tmp_path / "b.txt").exists()
    harness_doubles.run(given, collect=["*.txt"], **arguments)
    assert harness_doubles.judge.seen.output.splitlines()[-1] != first


def test_a_link_in_place_of_the_working_directory_is_not_followed(tmp_path):
    (tmp_path / "a.py").write_text("not the agent's")
    line = f'cd ..; mv work away; ln -s "{tmp_path}" work'
    harness_doubles.run(command=line, collect=["*.py"], score=f"{HERE}:judge")
    assert harness_doubles.judge.seen.files == {}
    assert "a link in the place of its working directory" in harness_doubles.judge.seen.refused


def test_files_beyond_the_limit_are_refused_and_not_a_crash():
    line = "head -c 3000000 /dev/zero > big"
    harness_doubles.run(command=line, collect=["*"], most_mib=2, score=f"{HERE}:judge")
    assert harness_doubles.judge.seen.files == {}
    assert "2097152 bytes" in harness_doubles.judge.seen.refused


def test_folders_that_are_nested_too_deeply_are_refused_and_removed():
    line = 'pwd; python3 -c \'import os\nfor _ in range(1200): os.mkdir("a"); os.chdir("a")\''
    harness_doubles.run(command=line, collect=["*"], score=f"{HERE}:judge")
    assert "recursion" in harness_doubles.judge.seen.refused
    assert not Path(harness_doubles.judge.seen.output.strip()).parent.exists()


@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out"])
def test_files_of_a_task_stay_inside_the_folder(path):
    with pytest.raises(protocols.DataError, match="leads out of its folder"):
        harness_doubles.run(harness_doubles.task(files={path: "x"}), command=["true"], files="files")


def test_the_end_of_a_long_output_is_kept_in_little_memory():
    code = "print('x' * 3_000_000); print('end')"
    harness_doubles.run(command=harness_doubles.python(code), output_bytes=1000, score=f"{HERE}:judge")
    assert len(harness_doubles.judge.seen.output) == 1000
    assert harness_doubles.judge.seen.output.endswith("xxx\nend\n")


def test_only_the_exit_statuses_that_are_listed_are_scored():
    line = "echo why >&2; exit 3"
    with pytest.raises(protocols.EnvironmentCrashed, match=r"status 3 .*it said last: why"):
        harness_doubles.run(command=line)
    outcome = harness_doubles.run(command=line, exits=[0, 3], score=f"{HERE}:judge")
    assert outcome.reward == 0.25
    assert harness_doubles.judge.seen.status == 3


def test_an_agent_that_is_killed_has_crashed():
    with pytest.raises(protocols.EnvironmentCrashed, match="status 137"):
        harness_doubles.run(command="kill -9 $$")


def test_a_missed_deadline_is_a_crash_or_data_as_the_config_says():
    with pytest.raises(protocols.EnvironmentCrashed, match=r"took more than 0\.2 s"):
        harness_doubles.run(command=["sleep", "600"], seconds=0.2)
    outcome = harness_doubles.run(command="echo begun; sleep 600", seconds=0.3, overdue="score", score=f"{HERE}:judge")
    assert outcome.metrics["harness_overdue"] == 1.0
    assert harness_doubles.judge.seen.status is None
    assert harness_doubles.judge.seen.output == "begun\n"


def test_a_scorer_that_breaks_or_hangs_is_a_crash():
    for name, said, voids in (
        ("judge_badly", r"scorer .*judge_badly.* raised KeyError: 'gold'", True),
        ("judge_slowly", "scorer .*judge_slowly.* took more than 0.1 s", True),
        ("judge_unreachably", "scorer .*judge_unreachably.* raised ConnectionRefusedError", False),
    ):
        with pytest.raises(protocols.EnvironmentCrashed, match=said) as crash:
            harness_doubles.run(command=["true"], score=f"{HERE}:{name}", score_seconds=0.1)
        assert isinstance(crash.value, protocols.AttemptVoided) is voids


async def until(condition):
    while not condition():  # noqa: ASYNC110 - another process is waited for
        await asyncio.sleep(0.01)


def test_processes_that_an_agent_leaves_end_with_it():
    before = set(psutil.Process().children(recursive=True))
    harness_doubles.run(command=harness_doubles.python(DAEMON + "print(open('daemon').read())"))
    assert int(harness_doubles.judge.seen.output)
    assert not sandboxes.alive(set(psutil.Process().children(recursive=True)) - before)


def test_a_cancelled_agent_ends_with_all_its_processes(tmp_path):
    mark = tmp_path / "mark"
    code = DAEMON + f"open({str(mark)!r}, 'w').write(open('daemon').read() + ' ' + os.getcwd()); time.sleep(600)"

    async def body():
        # Other tests of this process may have left helpers of their own, such as a tracker of resources.
        before = set(psutil.Process().children(recursive=True))
        made = harness.environment(command=harness_doubles.python(code), score=f"{HERE}:judge")
        running = asyncio.ensure_future(made.run(harness_doubles.task(), harness_doubles.endpoint()))
        async with asyncio.timeout(30):
            await until(lambda: mark.exists() and " " in mark.read_text())
        found = set(psutil.Process().children(recursive=True)) - before
        assert len(found) >= 3  # the daemon is one of them
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return sandboxes.alive(found)

    assert asyncio.run(body()) == []
    assert not Path(mark.read_text().split()[1]).exists()


def test_close_ends_an_agent_that_still_runs():
    async def body():
        before = set(psutil.Process().children(recursive=True))
        made = harness.environment(command=["sleep", "600"], score=f"{HERE}:judge")
        running = asyncio.ensure_future(made.run(harness_doubles.task(), harness_doubles.endpoint()))
        async with asyncio.timeout(30):
            await until(lambda: set(psutil.Process().children(recursive=True)) - before)
        found = list(set(psutil.Process().children(recursive=True)) - before)
        await made.close()
        with pytest.raises(asyncio.CancelledError):
            await running
        return sandboxes.alive(found)

    assert asyncio.run(body()) == []


@pytest.mark.multiprocess
def test_a_run_killed_with_minus_9_leaves_no_process_and_no_folder(tmp_path):
    mark = tmp_path / "mark"
    agent = DAEMON + f"open({str(mark)!r}, 'w').write(open('daemon').read() + ' ' + os.getcwd()); time.sleep(600)"
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1] / 'common')!r})\n"
        f"import harness_doubles\nharness_doubles.run(command=harness_doubles.python({agent!r}))\n"
    )
    begun = subprocess.Popen([sys.executable, "-c", script], env=os.environ)
    try:
        deadline = time.monotonic() + 60
        while not (mark.exists() and " " in mark.read_text()):
            assert time.monotonic() < deadline
            assert begun.poll() is None
            time.sleep(0.02)
        folder = mark.read_text().split()[1]
        found = psutil.Process(begun.pid).children(recursive=True)
        assert len(found) >= 3
    finally:
        begun.send_signal(signal.SIGKILL)
        begun.wait(30)
    assert asyncio.run(sandboxes.gone(found)) == []
    deadline = time.monotonic() + 30
    while Path(folder).parent.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_only_so_many_agents_run_at_once(tmp_path):
    line = f"echo $$ > {tmp_path}/$$; sleep 0.2; ls {tmp_path} | wc -l > count; rm {tmp_path}/$$; cat count"
    counts = []

    async def one():
        made = harness.environment(command=line, most=2, score=f"{HERE}:judge_count")
        await made.run(harness_doubles.task(), harness_doubles.endpoint())

    async def body():
        harness_doubles.judge_count.counts = counts
        await asyncio.gather(*(one() for _ in range(5)))

    asyncio.run(body())
    assert len(counts) == 5
    assert max(counts) <= 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "must hold either 'command' or 'callable'"),
        ({"command": ["true"], "callable": "a:b"}, "must hold either"),
        ({"command": ["no-such-program"]}, "there is no program no-such-program"),
        ({"command": ["true"], "python": "python3"}, "belongs to 'callable'"),
        ({"callable": "json:dumps", "sandbox": True}, "belongs to 'command'"),
        ({"callable": "json:dumps", "search": ["/"]}, "needs 'python'"),
        ({"callable": "json:dump_s"}, "did you mean 'dumps'"),
        ({"callable": "json:dumps", "python": "/no/python"}, "there is no program /no/python"),
        ({"command": ["true"], "seconds": 0}, "must be positive"),
        ({"command": ["true"], "overdue": "zero"}, "overdue"),
        ({"command": ["true"], "workspace": "/no/folder"}, "is no directory"),
        ({"command": ["true"], "sandbox": True}, "needs the sandbox of a run"),
        ({"command": ["true"], "score": "tests"}, "must name the field"),
        ({"command": ["true"], "options": ["--x"]}, "needs 'container'"),
        ({"command": ["true"]}, r"score: must be 'tests' or the name of a function: .* would be forged"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_a_run(arguments, said):
    with pytest.raises(protocols.ConfigError, match=said):
        harness.environment(**arguments)
