"""The reference that is generated from the code: units of fields, and flags of every script."""

import os
import subprocess
import sys

import pages
import pytest

UNITS = {
    "sandbox.seconds": "seconds",
    "deadlines.grace": "seconds",
    "rollout.chunk_mib": "MiB",
    "task.max_tokens": "tokens",
    "scheduler.costs.prefill_tokens_per_second": "tokens per second",
    "warm_start.steps": "training steps",
    "planner.window": "training steps",
    "scheduler.window": "",
    "reward.environment_weight": "",
}


def test_units_are_those_of_the_fields():
    code = "import generated, sys; print('\\n'.join(generated.unit(name) for name in sys.argv[1:]))"
    path = os.pathsep.join(map(str, (pages.ROOT / "docs" / "_ext", pages.ROOT / "launch", pages.ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", code, *UNITS],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert dict(zip(UNITS, done.stdout.split("\n"), strict=False)) == UNITS


@pytest.mark.parametrize(("script", "flag"), [("train", "workdir"), ("slurm", "grace"), ("kubernetes", "image")])
def test_scripts_have_their_own_and_shared_flags(script: str, flag: str):
    assert flag in pages.known()["flags"][script]
