"""A full disk under the workdir of a real run (JAX, Orbax; a fake engine): nothing is lost but time."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import scripts

HERE = Path(__file__).parent
UNSHARE = ("unshare", "--mount", "--map-root-user")
STEPS, GROUPS, ATTEMPTS = 14, 2, 2


def may_mount() -> bool:
    """Whether this machine lets us mount in a namespace of our own."""
    command = [*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.skipif(not may_mount(), reason="this machine lets no one mount a small disk (unshare --mount)")
@pytest.mark.parametrize("left_free", [0, 400_000], ids=["no_byte", "too_few_for_the_trainers_part"])
def test_a_full_disk_costs_checkpoints_and_only_the_last_one_ends_the_run(tmp_path, left_free):
    paths = [str(scripts.ROOT), str(HERE), str(HERE.parent / "common"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*UNSHARE, sys.executable, str(HERE / "full_disk.py"), str(tmp_path / "run"), str(left_free)],
        cwd=scripts.ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    log = (tmp_path / "run.log").read_text() if (tmp_path / "run.log").exists() else ""
    assert done.returncode == 0, done.stderr + log
    found = json.loads(done.stdout)
    (kept,) = found["kept"]
    assert found["at_worst"], "the good one stayed while there was no room for another"
    assert kept > max(found["at_worst"]), "and there was another once there was room"
    assert found["status"] == 1
    assert f"error: {'The checkpoint ' if not left_free else ''}{tmp_path}/run/checkpoints/step-{STEPS:08d}" in log
    assert "No space left on device" in log
    assert "Traceback" not in log
    parts = ("coordinator.json", "manifest.json", "trainer")
    assert found["left"] == [f"checkpoints/step-{kept:08d}/{part}" for part in parts], "parts of others are removed"
    assert found["again"] == 0
    assert found["newest"] == [STEPS]
    assert found["steps"] == list(range(1, STEPS + 1))
    prompts = collections.Counter(found["prompts"])
    assert len(prompts) == STEPS * GROUPS
    assert set(prompts.values()) == {ATTEMPTS}
