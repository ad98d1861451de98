"""Real runs (vLLM and JAX) killed in the middle: the same command goes on, and nothing is lost or left behind."""

import collections
import contextlib
import json
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import scripts

STEPS, GROUPS, ATTEMPTS = 6, 4, 2
DEADLINE_SECONDS = 240.0
SETTINGS = (
    "--config=configs/quickstart.py",
    f"--config.steps={STEPS}",
    f"--config.coordinator.groups_per_step={GROUPS}",
    f"--config.coordinator.group_size={ATTEMPTS}",
    "--config.rollout.slots=8",
    "--config.rollout.max_tokens=24",
    "--config.trainer.rows_per_micro_batch=2",
    "--config.warm_start.steps=0",
    "--config.evaluation.every=0",
    "--config.checkpoint.every=1",
    "--config.telemetry.report=False",
)


def start(workdir: pathlib.Path) -> subprocess.Popen[bytes]:
    log = open(workdir.with_suffix(".log"), "ab")  # noqa: SIM115  (the child keeps it)
    command = [sys.executable, "launch/train.py", *SETTINGS, f"--workdir={workdir}"]
    with log:
        return subprocess.Popen(command, cwd=scripts.ROOT, stdout=log, stderr=log)


def wait_for(condition: Callable[[], bool], run: subprocess.Popen[bytes] | None, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert run is None or run.poll() is None, f"the run ended with status {run and run.returncode} before {what}"
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE_SECONDS:g} s"
        time.sleep(0.1)


def steps_done(workdir: pathlib.Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]
    return []


def trained_prompts(workdir: pathlib.Path) -> collections.Counter[str]:
    records = [json.loads(line) for line in (workdir / "trace.jsonl").read_text().splitlines()]
    return collections.Counter(record["prompt_id"] for record in records)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [item for item in processes if item.is_running() and item.status() != psutil.STATUS_ZOMBIE]


def engine_cores(run: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [child for child in psutil.Process(run.pid).children(recursive=True) if "EngineCore" in child.name()]


def named_memory(processes: list[psutil.Process]) -> set[pathlib.Path]:
    """Named shared memory that the processes have mapped."""
    found: set[pathlib.Path] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = pathlib.Path(f"/proc/{process.pid}/maps").read_text()
            found |= {pathlib.Path(name) for name in re.findall(r"/dev/shm/\S+", maps)}
    return found


@pytest.fixture
def reaped() -> Iterator[list[subprocess.Popen[bytes]]]:
    runs: list[subprocess.Popen[bytes]] = []
    yield runs
    for run in runs:
        if run.poll() is None:
            run.kill()
        run.wait(timeout=30)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_run_whose_trainer_then_engine_is_killed_trains_every_prompt_once(tmp_path, reaped):
    workdir = tmp_path / "run"

    first = start(workdir)
    reaped.append(first)
    wait_for(lambda: len(steps_done(workdir)) >= 2, first, "second training step")
    family = psutil.Process(first.pid).children(recursive=True)
    memory = named_memory(family)
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=30)
    wait_for(lambda: not alive(family), None, "end of the killed run's processes")
    killed_at = steps_done(workdir)[-1]
    assert killed_at < STEPS, "the run was over before it was killed"

    second = start(workdir)
    reaped.append(second)
    wait_for(lambda: steps_done(workdir)[-1:] > [killed_at], second, "training step after the restart")
    cores = engine_cores(second)
    assert cores, "the restarted run has no engine process to kill"
    for core in cores:
        core.kill()
    family = psutil.Process(second.pid).children(recursive=True)
    memory |= named_memory(family)
    try:
        assert second.wait(timeout=DEADLINE_SECONDS) == 0, workdir.with_suffix(".log").read_text()[-3000:]
    finally:  # Python's own trackers end a moment after the process that they look after
        wait_for(lambda: not alive(family + cores), None, "end of the second run's processes")

    assert steps_done(workdir) == list(range(1, STEPS + 1))
    prompts = trained_prompts(workdir)
    assert len(prompts) == STEPS * GROUPS
    assert set(prompts.values()) == {ATTEMPTS}
    assert {prompt.rsplit("-", 1)[-1] for prompt in prompts} == {str(index) for index in range(STEPS * GROUPS)}
    assert not [path for path in memory if path.exists()]
