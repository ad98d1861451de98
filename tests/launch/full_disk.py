"""A run on a small disk that is full for a while and then again at its end: `full_disk.py WORKDIR BYTES_LEFT`.

It runs in a mount namespace of its own (`unshare --mount`), where it mounts a small tmpfs at the workdir, and prints
what it found as one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import real_runs

DISK, LIMIT_SECONDS = "24m", 240.0
STEPS = 14
SETTINGS = (
    "--config=configs/quickstart.py",
    "--config.rollout.engine=fake",
    f"--config.steps={STEPS}",
    "--config.warm_start.steps=0",
    "--config.evaluation.every=0",
    "--config.checkpoint.every=2",
    "--config.checkpoint.keep=1",
    "--config.coordinator.groups_per_step=2",
    "--config.coordinator.group_size=2",
    "--config.telemetry.report=False",
)


def main(workdir: Path, left_free: int) -> None:
    workdir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(workdir)], check=True)
    filler, log = workdir / "filler", workdir.with_suffix(".log")

    first = start(workdir, log)
    wait(first, lambda: manifests(workdir), "first checkpoint")
    fill(filler, left_free)
    wait(first, lambda: log.read_text().count(" failed, and the run goes on without it") >= 1, "failed checkpoint")
    at_worst = manifests(workdir)
    filler.unlink()
    wait(first, lambda: max(manifests(workdir)) > max(at_worst), "checkpoint after it")
    fill(filler, left_free)
    status = first.wait(LIMIT_SECONDS)
    kept = manifests(workdir)
    left = sorted(str(path.relative_to(workdir)) for path in workdir.glob("checkpoints/*/*"))
    filler.unlink()

    second = start(workdir, log)
    again = second.wait(LIMIT_SECONDS)
    steps = [record["step"] for record in real_runs.lines(workdir / "metrics.jsonl")]
    prompts = [record["prompt_id"] for record in real_runs.lines(workdir / "trace.jsonl")]
    found = {"at_worst": at_worst, "status": status, "kept": kept, "left": left, "again": again}
    print(json.dumps({**found, "newest": manifests(workdir), "steps": steps, "prompts": prompts}))


def start(workdir: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "launch/train.py", *SETTINGS, f"--workdir={workdir}"]
    with open(log, "ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out)


def manifests(workdir: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in workdir.glob("checkpoints/step-*/manifest*.json"))


def fill(filler: Path, left_free: int) -> None:
    """Takes every byte of the disk but so many."""
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    os.truncate(filler, filler.stat().st_size - left_free)


def wait(run: subprocess.Popen[bytes], condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if run.poll() is not None or time.monotonic() > deadline:
            run.kill()
            sys.exit(f"there was no {what}; the run's status is {run.poll()}")
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
