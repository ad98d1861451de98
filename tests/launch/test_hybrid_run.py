"""A run with a hybrid worker whose processes are killed in every state of its transitions, and one with none killed."""

import collections
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
import scripts

RUN_SECONDS, LOOK_SECONDS, END_SECONDS = 400.0, 0.5, 30.0

KILLS = (
    "training:replica",
    "draining:engine",
    "fetching:replica",
    "warming:replica",
    "joining:replica",
    "leaving:replica",
    "activating:engine",
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.multiprocess]


def run(workdir: Path, steps: int, *kills: str) -> subprocess.CompletedProcess[str]:
    """One run to its end; every process that it ever had has ended, too."""
    paths = [str(scripts.ROOT), str(scripts.ROOT / "launch"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_COMPILATION_CACHE_DIR": str(workdir.with_suffix(".cache")),
    }
    script = Path(__file__).parent / "restless_run.py"
    command = [sys.executable, str(script), str(workdir), str(steps), *kills]
    family: dict[psutil.Process, str] = {}
    with open(workdir.with_suffix(".out"), "w+") as out, open(workdir.with_suffix(".err"), "w+") as err:
        started = subprocess.Popen(command, cwd=scripts.ROOT, env=environment, stdout=out, stderr=err)
        deadline = time.monotonic() + RUN_SECONDS
        try:
            while started.poll() is None and time.monotonic() < deadline:
                # While it lives: whose parent has ended is found under it no more.
                with contextlib.suppress(psutil.NoSuchProcess):
                    for process in psutil.Process(started.pid).children(recursive=True):
                        family[process] = process.name()
                time.sleep(LOOK_SECONDS)
        finally:
            in_time = started.poll() is not None
            started.kill()
            started.wait(20)
            left = still_alive_after(END_SECONDS, family)
            for process in left:
                process.kill()
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(command, started.returncode, out.read(), err.read())
    assert in_time, f"the run did not end within {RUN_SECONDS:g} s: {done.stdout + done.stderr}"
    assert sum("RayHost" in name for name in family.values()) >= 4, f"not all actors were seen: {family.values()}"
    assert not left, f"processes were left behind: {left}"
    return done


def still_alive_after(seconds: float, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if is_alive(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(LOOK_SECONDS)
    return left


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(900)
def test_whatever_is_killed_in_whatever_state_every_prompt_is_trained_once(tmp_path):
    workdir = tmp_path / "run"
    first = run(workdir, 2_000, *KILLS, "joining:trainer")
    assert first.stdout.count("killed ") == len(KILLS) + 1, first.stdout + first.stderr
    assert first.returncode == 1
    assert "error: " in first.stdout
    assert "trainer" in first.stdout.splitlines()[-1]
    failed = [item for item in lines(workdir / "transitions.jsonl") if item["outcome"] == "failed"]
    states = {next(reversed(item["phases"]), item["from"]) for item in failed}
    # A member that dies may be told by its weights or by its share, one that leaves is ended anyway, and an engine
    # that dies while its replica is made anew has been started again by the time it is to sleep.
    assert {"fetching", "warming", "joining"} <= states
    taken = max(step["step"] for step in lines(workdir / "metrics.jsonl"))

    second = run(workdir, taken + 12)
    assert second.returncode == 0, second.stdout + second.stderr
    trace = lines(workdir / "trace.jsonl")
    trained = collections.Counter(record["trajectory_id"] for record in trace)
    assert set(trained.values()) == {1}
    assert len(trained) == (taken + 12) * 4 * 2
    steps = [step for step in lines(workdir / "metrics.jsonl") if "loss" in step]
    assert [step["step"] for step in steps] == list(range(1, taken + 13))
    assert all(step["staleness/max"] <= 1 for step in steps)
    assert sum(step.get("shares/micro_batches", 0) for step in steps) > 0
    assert sum(step.get("shares/refused", 0) for step in steps) == 0
    moved = [item for item in lines(workdir / "transitions.jsonl") if item["outcome"] == "done"]
    assert {item["to"] for item in moved} == {"training", "rollout"}


@pytest.mark.timeout(300)
def test_a_trainer_of_two_processes_goes_through_a_whole_run_and_its_resumption(tmp_path):
    settings = (
        "--config=configs/quickstart.py",
        "--config.coordinator.groups_per_step=4",
        "--config.coordinator.group_size=2",
        "--config.rollout.engine=fake",
        "--config.trainer.processes=2",
        "--config.trainer.fsdp=2",
        "--config.trainer.rows_per_micro_batch=2",
        "--config.cluster.backend=ray",
        "--config.warm_start.steps=0",
        "--config.evaluation.every=0",
        "--config.checkpoint.every=1",
        "--config.telemetry.report=False",
        f"--workdir={tmp_path / 'run'}",
    )
    for steps in (2, 3):
        done = scripts.run("train.py", *settings, f"--config.steps={steps}", seconds=140)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "(data 1, fsdp 2, tensor 1, context 1)" in done.stdout
    assert [step["step"] for step in lines(tmp_path / "run" / "metrics.jsonl") if "loss" in step] == [1, 2, 3]
