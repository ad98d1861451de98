"""Real runs (JAX, and vLLM where it is said) that a scheduler or another start ends: in time, and with nothing lost."""

import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import real_runs
import scripts

from libra_jax.telemetry import status

GRACE, GROUPS, ATTEMPTS = 20.0, 4, 2
LIMIT_SECONDS = 240.0
SETTINGS = (
    "--config=configs/quickstart.py",
    f"--config.coordinator.groups_per_step={GROUPS}",
    f"--config.coordinator.group_size={ATTEMPTS}",
    "--config.rollout.slots=8",
    "--config.rollout.max_tokens=24",
    "--config.warm_start.steps=0",
    "--config.evaluation.every=0",
    "--config.checkpoint.every=3",
    f"--config.deadlines.grace={GRACE:g}",
    "--config.telemetry.report=False",
)


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a run in `tmp_path/run`, its output in `tmp_path/log`; whatever is left of it is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "launch/train.py", *SETTINGS, *arguments, f"--workdir={tmp_path / 'run'}"]
        with open(tmp_path / "log", "a") as log:
            started.append(subprocess.Popen(command, cwd=scripts.ROOT, stdout=log, stderr=log))
        return started[-1]

    yield begin
    for run in started:
        run.kill()
        run.wait(timeout=30)


def wait(run: subprocess.Popen[str], workdir: pathlib.Path, steps: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (workdir / "metrics.jsonl").exists() or len(real_runs.lines(workdir / "metrics.jsonl")) < steps:
        assert run.poll() is None, (workdir.parent / "log").read_text()[-3000:]
        assert time.monotonic() < deadline, f"the run took no {steps} steps"
        time.sleep(0.05)


def assert_each_prompt_trained_once(workdir: pathlib.Path, steps: int) -> None:
    assert [record["step"] for record in real_runs.lines(workdir / "metrics.jsonl")] == list(range(1, steps + 1))
    prompts = collections.Counter(record["prompt_id"] for record in real_runs.lines(workdir / "trace.jsonl"))
    assert len(prompts) == steps * GROUPS
    assert set(prompts.values()) == {ATTEMPTS}


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.vllm
@pytest.mark.timeout(700)
def test_a_scheduler_that_gives_twenty_seconds_finds_the_run_ended_and_the_same_command_goes_on(tmp_path, start):
    workdir, steps = tmp_path / "run", 8
    settings = (f"--config.steps={steps}", "--config.telemetry.port=-1")
    first = start(*settings)
    wait(first, workdir, 2)
    family = psutil.Process(first.pid).children(recursive=True)
    ports = real_runs.listening([psutil.Process(first.pid), *family])  # where it has no Ray; test_listening.py
    assert ports
    assert not real_runs.beyond_loopback(ports)
    began = time.monotonic()
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=GRACE + 10) == os.EX_TEMPFAIL
    assert time.monotonic() - began < GRACE
    assert not real_runs.still_alive_after(5.0, family)
    record = json.loads((workdir / "status.json").read_text())
    assert record["ended"]["how"] == "stopped"
    assert record["ended"]["sentence"].endswith("; the same command goes on from the checkpoint there.")
    assert start(*settings).wait(timeout=LIMIT_SECONDS) == 0
    assert_each_prompt_trained_once(workdir, steps)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_a_second_start_is_refused_and_one_that_takes_over_ends_the_first_and_trains_the_rest(tmp_path, start):
    workdir, endless = tmp_path / "run", ("--config.rollout.engine=fake", "--config.steps=4000")
    first = start(*endless)
    wait(first, workdir, 2)
    refused = scripts.run_forked("train.py", *SETTINGS, *endless, f"--workdir={workdir}", seconds=60)
    scripts.assert_one_sentence(refused, f"in use by the run of process {first.pid} on ", "--take_over")
    shown = scripts.run_forked("status.py", str(workdir))
    assert (shown.returncode, "It lives." in shown.stdout, "trainer" in shown.stdout) == (0, True, True)
    second = start(*endless, "--take_over")
    assert first.wait(timeout=LIMIT_SECONDS) == 1
    log = (tmp_path / "log").read_text()
    assert f"has been taken over by the run of process {second.pid} on " in log
    wait(second, workdir, len(real_runs.lines(workdir / "metrics.jsonl")) + 3)
    second.kill()
    second.wait(timeout=30)
    shown = scripts.run_forked("status.py", str(workdir))
    assert (shown.returncode, "DEAD: its process is gone" in shown.stdout) == (1, True)
    steps = len(real_runs.lines(workdir / "metrics.jsonl")) + 2
    assert start("--config.rollout.engine=fake", f"--config.steps={steps}").wait(timeout=LIMIT_SECONDS) == 0
    assert_each_prompt_trained_once(workdir, steps)
    shown = scripts.run_forked("status.py", str(workdir))
    assert (shown.returncode, "It has ended (done)." in shown.stdout) == (0, True)


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_a_step_of_jax_that_would_not_end_in_time_is_given_up_and_its_groups_are_trained_later(tmp_path, start):
    """A step of two thousand micro-batches, which takes from 15 seconds to a minute, and 12 seconds of grace."""
    workdir, grace, groups, attempts = tmp_path / "run", 12.0, 128, 16
    settings = (
        "--config.rollout.engine=fake",
        "--config.checkpoint.every=1",
        "--config.steps=2",
        f"--config.coordinator.groups_per_step={groups}",
        f"--config.coordinator.group_size={attempts}",
        "--config.trainer.rows_per_micro_batch=1",
        "--config.trainer.pack=False",
        f"--config.deadlines.grace={grace:g}",
    )
    first = start(*settings)
    deadline = time.monotonic() + LIMIT_SECONDS
    while "training step 2" not in json.dumps((status.read(workdir) or {}).get("workers", {}).get("trainer")):
        assert first.poll() is None, (tmp_path / "log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    first.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert first.wait(timeout=60) == os.EX_TEMPFAIL
    assert time.monotonic() - began < grace
    assert f"The step after 1 was aborted: its {groups} groups wait again." in (tmp_path / "log").read_text()
    assert start(*settings).wait(timeout=LIMIT_SECONDS) == 0
    assert [record["step"] for record in real_runs.lines(workdir / "metrics.jsonl")] == [1, 2]
    prompts = collections.Counter(record["prompt_id"] for record in real_runs.lines(workdir / "trace.jsonl"))
    assert len(prompts) == 2 * groups
    assert set(prompts.values()) == {attempts}
