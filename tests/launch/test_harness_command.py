"""The command that makes virtual environments for agents: its names, and the pins behind them."""

import re
import subprocess

import pytest
import scripts

LOCKS = sorted((scripts.ROOT / "third_party" / "harnesses").glob("*.txt"))


@pytest.mark.parametrize("arguments", [(), ("no_such_agent",), ("verifiers", "openenv")])
def test_a_wrong_name_is_answered_with_the_right_ones(arguments):
    command = ["bash", "launch/harness.sh", *arguments]
    done = subprocess.run(command, cwd=scripts.ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    names = sorted(file.stem for file in (scripts.ROOT / "third_party" / "harnesses").iterdir())
    assert done.stderr.strip().endswith(" ".join(names))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_line_of_a_lock_pins_one_version(lock):
    lines = lock.read_text().splitlines()
    assert lines
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!]+", line) for line in lines)
