"""A process that SIGTERM has not ended in time ends all the same, whatever it hangs in."""

import os
import pathlib
import subprocess
import sys
import time

import pytest
import scripts

GRACE = 4.0
HANGS = f"""
import atexit, functools, os, signal, sys, time
from libra_jax.build import observing

last_resort = observing.LastResort({GRACE})
signal.signal(signal.SIGTERM, lambda number, _: last_resort.begin(signal.Signals(number)))
if "exit" in sys.argv:
    atexit.register(time.sleep, 600)
if "told" in sys.argv:
    os.kill(os.getpid(), signal.SIGTERM)
if "body" in sys.argv:
    time.sleep(600)
"""


def ends(*arguments: str) -> tuple[int, float]:
    """Its exit status, and the seconds that it took."""
    launch = pathlib.Path(scripts.ROOT) / "launch"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(scripts.ROOT), str(launch)])}
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGS, *arguments], env=environment, timeout=60, check=False)
    return done.returncode, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("where", ["body", "exit"])
def test_a_process_that_hangs_in_its_work_or_at_its_exit_is_ended_within_the_grace(where):
    started = ends()[1]
    status, seconds = ends("told", where)
    assert status == os.EX_TEMPFAIL
    assert seconds < 3 * started + GRACE


@pytest.mark.multiprocess
def test_a_process_that_ends_by_itself_keeps_its_status():
    assert ends("told")[0] == ends()[0] == 0
