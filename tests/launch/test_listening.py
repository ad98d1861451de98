"""Where the processes of a real run listen: at the loopback, all of them, unless they are told otherwise."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time

import psutil
import pytest
import real_runs
import scripts

SECONDS = 400.0
SETTINGS = (
    "--config=configs/quickstart.py",
    "--config.steps=2",
    "--config.warm_start.steps=0",
    "--config.evaluation.every=0",
    "--config.coordinator.groups_per_step=2",
    "--config.coordinator.group_size=2",
    "--config.rollout.max_tokens=8",
    # Ray's own processes, an actor each for engine and trainer, JAX's coordinator and gloo between two of them.
    "--config.cluster.backend=ray",
    "--config.trainer.platform=cpu",
    "--config.trainer.processes=2",
    "--config.trainer.data=2",
    # One engine of two worker processes, with torch's process group between them.
    "--config.rollout.tensor_parallel=(2,)",
    "--config.telemetry.report=False",
    "--config.telemetry.port=-1",
    "--config.deadlines.cluster_start=200",
)


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an engine of two workers needs two cores")
def test_every_process_of_a_run_listens_at_the_loopback_alone(tmp_path: pathlib.Path):
    """Of one by Ray, from its start to its end; of one without, test_stopped_runs.py looks."""
    command = [sys.executable, "launch/train.py", *SETTINGS, f"--workdir={tmp_path / 'run'}"]
    seen: set[tuple[str, str]] = set()
    family: set[psutil.Process] = set()
    names: set[str] = set()
    with open(tmp_path / "log", "w+") as log:
        run = subprocess.Popen(command, cwd=scripts.ROOT, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + SECONDS
            while run.poll() is None and time.monotonic() < deadline:
                family |= {psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)}
                seen |= real_runs.listening(family)
                for process in family:
                    with contextlib.suppress(psutil.Error):
                        names.add(process.name())
                time.sleep(0.2)
        except psutil.NoSuchProcess:  # it ended between two lines
            pass
        finally:
            run.kill()
            run.wait(20)
            left = real_runs.still_alive_after(30.0, family)
            for process in left:
                process.kill()
        log.seek(0)
        assert run.returncode == 0, log.read()
    assert not left
    assert not real_runs.beyond_loopback(seen)
    wanted = ("gcs_server", "raylet", "RayHost", "EngineCore", "VLLM::Worker")
    assert all(name in " ".join(names) for name in wanted), f"the run was not seen at work: {names}"
