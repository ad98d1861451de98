"""launch/sweep.py --launcher: real runs are submitted once each, those that are done never again, and one table."""

import json
import os
import shlex
import signal
import stat
import threading
import time

from support import sweeps

import pytest
import scripts

from libra_jax import config as config_lib
from libra_jax.protocols import ConfigError, LibraError
from libra_jax.telemetry import status

CONFIG = """
from libra_jax import config as config_lib

def get_config(variant="plain"):
    config = config_lib.RunConfig()
    config.name, config.steps = f"small-{variant}", 2
    config.rollout.engine = "fake"
    config.coordinator.groups_per_step = config.coordinator.group_size = 2
    config.trainer.rows_per_micro_batch = 1
    config.trainer.platform = "cpu"
    if variant == "hosts":
        config.cluster.backend, config.cluster.accelerators_per_host = "ray", 1
    return config
"""

LAUNCHER = """
import json, pathlib, sys
given = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:] if "=" in argument)
workdir = pathlib.Path(given["workdir"])
with open(workdir.parent / "calls", "a") as calls:
    calls.write(json.dumps(given) + "\\n")
if "--fail" in sys.argv and workdir.name.startswith("b-"):
    print("error: no room", file=sys.stderr)
    sys.exit(1)
if "--train" in sys.argv:
    workdir.mkdir()
    steps = [json.dumps({"step": step, "reward/mean": 0.5}) for step in (1, 2)]
    (workdir / "metrics.jsonl").write_text("\\n".join(steps) + "\\n")
print("Submitted.", file=sys.stderr)
print(40 + len((workdir.parent / "calls").read_text().splitlines()))
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Two runs, and a launcher that notes how it was called: returns (runs, folder, its calls)."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    monkeypatch.setattr(sweeps, "LAUNCHERS", dict.fromkeys(sweeps.LAUNCHERS, str(script)))
    folder = tmp_path / "sweep"
    config = config_lib.parse(config_lib.RunConfig, {"steps": 2, "seed": 3})
    runs = [
        sweeps.Run(name, f"configs/{name}.py", config, 2, sweeps.workdir(folder, name, config)) for name in ("a", "b")
    ]

    def calls():
        return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]

    return runs, folder, calls


PATIENT = """
import pathlib, signal, sys, time
given = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:] if "=" in argument)
workdir = pathlib.Path(given["workdir"])
def stop(*_):
    (workdir / "checkpoint").touch()
    print("stopped at step 1")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
workdir.mkdir()
(workdir / "begun").touch()
time.sleep(60)
"""


def submit(runs, folder, launcher, flags="", **options):
    sweeps.run(runs, folder, launcher, flags, **{"jobs": 1, "again": False, **options})


def test_a_sweep_that_is_stopped_lets_its_run_save_and_begins_no_other(sweep, tmp_path, capsys):
    runs, folder, _ = sweep
    (tmp_path / "launcher.py").write_text(PATIENT)

    def stop():
        deadline = time.monotonic() + 60
        while not (runs[0].workdir / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(SystemExit) as ended:
        submit(runs, folder, "here")
    stopping.join()
    assert ended.value.code == os.EX_TEMPFAIL
    assert (runs[0].workdir / "checkpoint").exists()
    assert not runs[1].workdir.exists()
    assert "stopped; the same command goes on" in capsys.readouterr().err


def test_a_table_and_a_picture_have_means_and_spreads_over_seeds(tmp_path, monkeypatch, capsys):
    """Settings with two seeds each, of which one setting's runs fail: rows with their sentences, and no mean."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER.replace('"reward/mean": 0.5', '"reward/mean": 0.25 + 0.5 * int(given["config.seed"])'))
    monkeypatch.setattr(sweeps, "LAUNCHERS", dict.fromkeys(sweeps.LAUNCHERS, str(script)))
    folder = tmp_path / "sweep"
    runs = []
    for name, rate in (("a", "1e-4"), ("b", "3e-4")):
        for seed in (0, 1):
            values = {"steps": 2, "seed": seed, "optimizer": {"learning_rate": float(rate)}}
            config = config_lib.parse(config_lib.RunConfig, values)
            settings = (f"--config.optimizer.learning_rate={rate}",)
            workdir = sweeps.workdir(folder, name, config)
            runs.append(sweeps.Run(name, "configs/a.py", config, None, workdir, settings))
    with pytest.raises(LibraError, match="2 of 4 runs failed, the others are kept"):
        submit(runs, folder, "here", "--train --fail")
    calls = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
    assert [call["config.optimizer.learning_rate"] for call in calls] == ["1e-4", "1e-4", "3e-4", "3e-4"]
    shown = capsys.readouterr().out
    assert "no room (status 1" in shown
    assert "2 of 2" in shown
    assert "0.500" in shown, "the mean of 0.25 and 0.75"
    assert "0.354" in shown, "their standard deviation"
    assert "+- is the sample standard deviation over the seeds" in " ".join(shown.split())
    summary = json.loads((folder / "sweep.json").read_text())
    assert summary["a"]["reward"] == {"mean": 0.5, "spread": pytest.approx(0.3536, abs=1e-4)}
    assert summary["b"]["reward"]["mean"] is None
    assert {run["state"] for run in summary["b"]["runs"]} == {"failed"}
    assert "mean of 2 seeds" in (folder / "sweep.svg").read_text()


def test_what_a_run_says_of_its_end_is_in_the_table(sweep, capsys):
    runs, folder, _ = sweep
    submit(runs[:1], folder, "slurm")
    ended = {"how": "failed", "sentence": "the disk is full"}
    runs[0].workdir.mkdir()
    view = status.RunStatus("a", 2, 1, lambda: 0.0).view()
    (runs[0].workdir / "status.json").write_text(json.dumps({**view, "ended": ended}))
    capsys.readouterr()
    submit(runs[:1], folder, "slurm")
    shown = capsys.readouterr().out
    assert "the disk is full" in shown
    assert "failed" in shown


def test_escapes_of_runs_and_launchers_do_not_reach_the_terminal(sweep, tmp_path, capsys):
    """A run's reason to fail, a launcher's answer and a launcher's last line are anybody's text."""
    runs, folder, _ = sweep
    hostile = "\x1b]0;mine\x07 \x9b2J"
    script = LAUNCHER.replace("Submitted.", hostile).replace("no room", hostile).replace("error: ", "")
    (tmp_path / "launcher.py").write_text(f"{script}print({hostile!r})\n")
    with pytest.raises(LibraError):
        submit(runs, folder, "slurm", "--fail")
    runs[0].workdir.mkdir()
    view = status.RunStatus("a", 2, 1, lambda: 0.0).view()
    ended = {"how": "failed", "sentence": f"[red]mine[/red] {hostile}"}
    (runs[0].workdir / "status.json").write_text(json.dumps({**view, "ended": ended}))
    submit(runs, folder, "slurm")
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert not set(text) & {"\x1b", "\x07", "\x9b"}
        assert r"\x1b]0;mine\x07 \x9b2J" in text
    assert "[red]mine[/red]" in shown.out


def test_a_run_is_submitted_once_with_its_own_workdir(sweep, capsys):
    runs, folder, calls = sweep
    submit(runs, folder, "slurm", "--partition=gpu --comment='two words'")
    first, second = calls()
    assert first["config"] == "configs/a.py"
    assert (first["config.seed"], first["config.steps"], first["partition"]) == ("3", "2", "gpu")
    assert first["comment"] == "two words"
    assert first["workdir"] != second["workdir"]
    shown = capsys.readouterr()
    assert "2 runs: 0 done, 0 submitted before, 2 now" in shown.err
    assert "41" in shown.out
    assert "42" in shown.out

    submit(runs, folder, "slurm")
    assert len(calls()) == 2
    shown = capsys.readouterr()
    assert "2 runs: 0 done, 2 submitted before, 0 now" in shown.err
    assert "41" in shown.out, "the table still tells what it was submitted as"

    submit(runs, folder, "slurm", again=True)
    assert len(calls()) == 4


def test_what_is_done_is_not_submitted_again(sweep, capsys):
    runs, folder, calls = sweep
    submit(runs[:1], folder, "here", "--train")
    assert "0.500" in capsys.readouterr().out
    submit(runs, folder, "slurm", again=True)
    assert [call["config"] for call in calls()] == ["configs/a.py", "configs/b.py"]
    shown = capsys.readouterr()
    assert "2 runs: 1 done, 0 submitted before, 1 now" in shown.err
    assert "2 of 2" in shown.out


def test_what_could_not_be_submitted_is_told_and_submitted_the_next_time(sweep, capsys):
    runs, folder, calls = sweep
    with pytest.raises(LibraError, match=r"1 of 2 runs failed, the others are kept: b-seed3-\w+: no room \(status 1"):
        submit(runs, folder, "slurm", "--fail")
    assert "failed" in capsys.readouterr().out
    submit(runs, folder, "slurm")
    assert [call["config"] for call in calls()] == ["configs/a.py", "configs/b.py", "configs/b.py"]


def test_a_launcher_that_does_not_answer_is_given_up(sweep, monkeypatch):
    runs, folder, _ = sweep
    monkeypatch.setattr(sweeps, "SUBMIT_SECONDS", 0.01)
    with pytest.raises(LibraError, match=r"did not submit it within 0\.01 s"):
        submit(runs[:1], folder, "slurm")


def test_a_dry_run_prints_commands_and_submits_nothing(sweep, capsys):
    runs, folder, _ = sweep
    submit(runs, folder, "slurm", "--comment='two words'", dry_run=True)
    first, second = capsys.readouterr().out.splitlines()
    assert shlex.split(first)[2:5] == ["--config=configs/a.py", "--config.seed=3", "--config.steps=2"]
    assert shlex.split(second)[-1] == "--comment=two words"
    assert not folder.exists()
    with pytest.raises(ConfigError, match="--launcher_flags: has --dry_run"):
        submit(runs, folder, "slurm", "--dry_run")


def test_flags_that_no_shell_would_read_are_refused(sweep):
    runs, folder, _ = sweep
    with pytest.raises(ConfigError, match="--launcher_flags: cannot be read"):
        submit(runs, folder, "slurm", "--comment='two")


def test_a_sweep_is_given_to_kubernetes_run_by_run(tmp_path, monkeypatch):
    (tmp_path / "small.py").write_text(CONFIG)
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\ncat >>{tmp_path}/applied\necho rayjob.ray.io/mine created\n")
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    arguments = (f"--of={tmp_path}/small.py", "--configs=hosts", "--seeds=0,1", f"--output={tmp_path}/runs")
    launcher = ("--launcher=kubernetes", f"--launcher_flags=--image=i --mount={tmp_path}/runs")
    result = scripts.run_forked("sweep.py", *arguments, *launcher)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("rayjob.ray.io/mine created") == 2
    applied = (tmp_path / "applied").read_text()
    for seed in (0, 1):
        assert f"--config.seed={seed}\n" in applied
        assert f"value: {tmp_path}/runs/hosts-seed{seed}-" in applied


GRID = "--sweep=task.environment=libra_jax.examples.calculator:environment,libra_jax.no_such:environment"


@pytest.mark.slow
def test_a_grid_runs_here_tells_what_failed_and_goes_on(tmp_path):
    (tmp_path / "small.py").write_text(CONFIG)
    arguments = (f"--of={tmp_path}/small.py", "--configs=plain", f"--output={tmp_path}/runs", GRID)
    first = scripts.run("sweep.py", *arguments, "--config.optimizer.learning_rate=2e-4", seconds=280)
    assert first.returncode == 1, first.stderr
    assert "1 of 2 runs failed, the others are kept" in first.stderr
    assert "2 of 2" in first.stdout, first.stdout
    assert "libra_jax.no_such" in first.stdout
    summary = json.loads((tmp_path / "runs" / "sweep.json").read_text())
    good, bad = summary.values()
    assert [run["state"] for run in good["runs"] + bad["runs"]] == ["done", "failed"]
    assert "libra_jax.no_such" in bad["runs"][0]["sentence"]
    assert good["reward"]["mean"] == good["runs"][0]["reward"]
    config = json.loads((tmp_path / "runs" / good["runs"][0]["workdir"] / "config.json").read_text())
    assert config["optimizer"]["learning_rate"] == 2e-4
    assert (tmp_path / "runs" / "sweep.svg").read_text().startswith("<?xml")
    again = scripts.run("sweep.py", *arguments, "--config.optimizer.learning_rate=2e-4", seconds=280)
    assert "2 runs: 1 done, 0 submitted before, 1 now" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("--configs=configs/simulate.py",), ("configs/simulate.py is a simulated run; leave out --launcher",)),
        (("--configs=configs/quickstart.py", "--sweep=optimizer.learning_rate=2e-4,0.0002"), ("are the same run",)),
        (
            ("--configs=configs/quickstart.py", "--sensitivity"),
            ("--sensitivity: moves coefficients",),
        ),
    ],
)
def test_what_cannot_be_submitted_is_refused_in_a_sentence(arguments, fragments, tmp_path):
    result = scripts.run_forked("sweep.py", *arguments, f"--output={tmp_path}", "--launcher=here")
    scripts.assert_one_sentence(result, *fragments)
