"""What a script prints when its work fails, whatever it fails with."""

import os
import subprocess
import sys

from support import cli

import pytest
import scripts

from libra_jax import protocols


def failing(error: BaseException, interrupted: str = "", lost: int = 1) -> int:
    def main() -> None:
        raise error

    return cli._guarded(main, interrupted, lost)


def test_an_unforeseen_error_is_one_line_that_says_how_to_see_more(capsys, monkeypatch):
    monkeypatch.delenv("LIBRA_JAX_TRACEBACK", raising=False)
    assert failing(ValueError("too\nlong")) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ValueError: too long (unforeseen: LIBRA_JAX_TRACEBACK=1 ")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("too long"), protocols.DataError("no such file")])
def test_the_traceback_is_shown_where_it_is_asked_for(error, capsys, monkeypatch):
    monkeypatch.setenv("LIBRA_JAX_TRACEBACK", "1")
    assert failing(error) == 1
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert "unforeseen" not in shown


def test_foreseen_errors_interrupts_and_exits_stay_what_they_are(capsys, monkeypatch):
    monkeypatch.delenv("LIBRA_JAX_TRACEBACK", raising=False)
    assert failing(protocols.ConfigError("config.steps: must be positive")) == 2
    assert capsys.readouterr().err == "error: config.steps: must be positive\n"
    assert failing(KeyboardInterrupt(), "interrupted; nothing is lost.") == 130
    assert capsys.readouterr().err == "error: interrupted; nothing is lost.\n"
    with pytest.raises(SystemExit, match="3"):
        failing(SystemExit(3))
    assert cli._guarded(lambda: None, "") == 0
    assert cli._guarded(lambda: 4, "") == 4


@pytest.mark.parametrize("traced", ["", "1"])
@pytest.mark.parametrize("error", [protocols.EnvironmentCrashed, ValueError])
def test_escapes_that_an_error_quotes_do_not_reach_the_terminal(error, traced, capsys, monkeypatch):
    monkeypatch.setenv("LIBRA_JAX_TRACEBACK", traced)
    assert failing(error("the tool said \x1b[2J\x1b]0;owned\x07\u202e")) == 1
    shown = capsys.readouterr().err
    assert not set(shown) & set("\x1b\x07\u202e")
    assert r"the tool said \x1b[2J\x1b]0;owned\x07\u202e" in shown


def test_escapes_in_logs_do_not_reach_the_terminal():
    script = (
        "import logging, sys; sys.path.insert(0, 'launch'); from support import cli\n"
        "cli.run(lambda: logging.getLogger('libra_jax.x').warning('a tool said %s', '\\x1b[2J') or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=scripts.ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert r"a tool said \x1b[2J" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("error", [protocols.WorkerLost("gone"), protocols.TrainerLost("gone")])
def test_a_worker_that_is_lost_has_the_status_that_its_script_wants(error, capsys):
    assert failing(error) == 1
    assert failing(error, lost=75) == 75
    assert failing(protocols.DeadlineMissed("late"), lost=75) == 1
    assert capsys.readouterr().err == "error: gone\nerror: gone\nerror: late\n"


def test_help_ends_silently_where_its_reader_has_left():
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "launch/train.py", "--help"]
    ended = subprocess.run(
        command, cwd=scripts.ROOT, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(writes)
    assert ended.stderr == ""


def test_an_output_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    (tmp_path / "notes").write_text("not a folder")
    result = scripts.run_forked("simulate.py", "--policies=sticky", f"--output={tmp_path / 'notes' / 'out.json'}")
    scripts.assert_one_sentence(result, "error: --output: ", "out.json cannot be written (")
    assert result.stdout == ""


def test_an_output_that_can_be_written_is_left_as_it_was(tmp_path):
    new, old = tmp_path / "folder" / "new.json", tmp_path / "old.json"
    old.write_text("{}")
    cli.check_output(new)
    cli.check_output(old)
    assert new.parent.is_dir()
    assert not new.exists()
    assert old.read_text() == "{}"


BENCHMARK_OF_NOTHING = """
import runpy, sys, types
sys.path.insert(0, "launch")
import benchmarks
for name in ("bridge", "rollout", "train", "weight_sync"):
    setattr(benchmarks, name, types.SimpleNamespace(measure=lambda *_: {"measured": 1}))
runpy.run_path("launch/benchmark.py", run_name="__main__")
"""
"""The script without what it measures, which takes long to import."""


@pytest.mark.parametrize(
    ("flags", "problem", "status"),
    [
        (["--only=train,trian"], "--only: 'trian' is not one of rollout, bridge,", 2),
        (["--only=train", "--output=/dev/null/out.json"], "--output: /dev/null/out.json cannot be written (", 1),
        (["--only=train"], "", 0),
    ],
)
def test_the_benchmark_is_refused_before_anything_is_measured(flags, problem, status, tmp_path):
    (tmp_path / "benchmark.py").write_text(BENCHMARK_OF_NOTHING)
    result = scripts.run_forked(str(tmp_path / "benchmark.py"), *flags)
    if problem:
        scripts.assert_one_sentence(result, f"error: {problem}")
    assert result.returncode == status, result.stderr
    assert ("measured" in result.stdout) == (not problem), result.stderr


SCRIPTS = sorted(file.name for file in (scripts.ROOT / "launch").glob("*.py") if "cli.run(" in file.read_text())


@pytest.mark.parametrize("script", sorted({*SCRIPTS, "slurm_host.py"}))
def test_a_python_without_what_a_script_needs_is_told_in_a_sentence(script):
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-S", f"launch/{script}", "--help"],  # -S: without installed packages
        cwd=scripts.ROOT,
        env=bare,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    scripts.assert_one_sentence(result, " has no module ", "bash launch/setup.sh", f".venv/bin/python launch/{script}")
    assert (result.returncode, result.stdout) == (1, "")


QUICK, SIMULATED = "--config=configs/quickstart.py", "--config=configs/simulate.py"

MISTAKES = {
    "tests.drills": [["--only=nothing"], []],
    "calibrate.py": [["--workdirs="]],
    "evaluate.py": [[], ["--attempts=many"]],
    "gpu_check.py": [["--minutes=many"]],
    "kubernetes.py": [[QUICK], [QUICK, "--config.steps=0", "--dry_run"]],
    "local.py": [[]],
    "compile.py": [[QUICK, "--config.steps=0"], [QUICK, "--topology=many"]],
    "plan.py": [["--hardware=a900"], ["--accelerators=few"], ["--config.steps=0"], [SIMULATED, "--inventory=h800"]],
    "prepare_data.py": [["--dataset=search_r1", "--input=in.jsonl", "--output=out.txt"], []],
    "report.py": [[]],
    "serve.py": [[], [QUICK], ["--port=many"]],
    "sft.py": [[], [QUICK], [QUICK, "--data=chats.jsonl", "--epochs=0"]],
    "show.py": [["--best", "--worst", "--workdir=nowhere"]],
    "simulate.py": [["--policies=nothing"], ["--seeds=a"], [SIMULATED, "--config.steps=0"]],
    "slurm.py": [[QUICK, "--config.steps=0"], []],
    "status.py": [["--refresh=often"]],
    "sweep.py": [[], ["--configs=nosuch.py"], ["--configs=configs/quickstart.py", "--sweep=optimizer.lr=1"]],
    "tpu.py": [[QUICK]],
    "train.py": [[QUICK, "--config.steps=0"], [QUICK, "--config.steps=many"], [QUICK, "--stepz=1"]],
    "twin.py": [["--nonsense"]],
}
"""Commands that have to change before they can work."""

ONLY_HERE = ("calibrate.py", "compile.py", "evaluate.py", "kubernetes.py", "serve.py", "sft.py", "slurm.py", "tpu.py")
ONLY_HERE += ("prepare_data.py", "report.py", "show.py", "twin.py")
"""Scripts that no other test runs as a process of their own."""

FAILURES = {
    "calibrate.py": ["--workdirs=/nowhere/run"],
    "plan.py": ["--trace=/nowhere/trace.jsonl"],
    "prepare_data.py": ["--dataset=search_r1", "--input=/nowhere/in.jsonl", "--output=/dev/null/out.jsonl"],
    "report.py": ["--workdir=/nowhere/run"],
    "show.py": ["--workdir=/nowhere/run"],
    "simulate.py": ["--policies=sticky", "--output=/dev/null/out.json"],
    "status.py": ["--workdir=/nowhere/run"],
    "train.py": ["--config=configs/questions.py", "--config.task.path=/nowhere/tasks.jsonl", "--dry_run"],
}
"""Commands that are right, and whose work fails on this machine."""


def test_the_table_of_mistakes_has_every_script():
    own_test = {"benchmark.py"}
    assert sorted(MISTAKES) == sorted({*SCRIPTS, "tests.drills"} - own_test)


@pytest.mark.parametrize(
    ("script", "arguments"), [(script, arguments) for script, many in MISTAKES.items() for arguments in many]
)
def test_a_mistaken_command_has_exit_status_2(script, arguments):
    alone = script in ONLY_HERE and arguments is MISTAKES[script][0]
    result = (scripts.run if alone or script == "tests.drills" else scripts.run_forked)(script, *arguments)
    scripts.assert_one_sentence(result)
    assert result.returncode == 2, result.stderr


@pytest.mark.parametrize("script", FAILURES)
def test_work_that_fails_has_exit_status_1(script):
    result = scripts.run_forked(script, *FAILURES[script], environment={"HF_HUB_OFFLINE": "1"})
    scripts.assert_one_sentence(result)
    assert result.returncode == 1, result.stderr


def test_a_default_config_is_found_from_any_folder(tmp_path):
    """The setting is refused after the config was read."""
    result = subprocess.run(
        [sys.executable, scripts.ROOT / "launch" / "plan.py", "--config.steps=0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(scripts.ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    scripts.assert_one_sentence(result, "error: config.steps: ")
