"""Ten kill -9 at random moments of a real process, restarted with the same command each time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = [sys.executable, str(Path(__file__).with_name("coordinator_child.py"))]
STEPS, PROMPTS = 80, 240


def start(workdir: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([*CHILD, str(workdir)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "running\n"
    return child


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ten_kills_train_the_same_set_of_prompts_as_none(tmp_path):
    moments = random.Random(20)
    for _ in range(10):
        child = start(tmp_path)
        time.sleep(moments.uniform(0.0, 0.3))  # ten of these are less than the run takes, however fast the machine
        assert child.poll() is None, "the run ended before it could be killed ten times"
        child.kill()
        child.wait()
        child.stdout.close()
    survivor = start(tmp_path)
    said, _ = survivor.communicate(timeout=60)
    assert survivor.returncode == 0
    assert said == f"Trained {STEPS} steps on {PROMPTS} groups.\n"

    trained = json.loads((tmp_path / "trainer.json").read_text())
    assert sorted(trained["prompts"]) == sorted(f"task-{index}" for index in range(PROMPTS))
    assert max(trained["staleness"]) <= 1
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))
    attempts = [record["trajectory_id"] for record in lines(tmp_path / "trace.jsonl")]
    assert sorted(attempts) == sorted(f"task-{index}/{sample}" for index in range(PROMPTS) for sample in range(2))
