"""SIGTERM before there is a run: it ends at once, as a scheduler is to see it, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time

import scripts

SLOW = """
import pathlib, time

def environment(tools=None):
    pathlib.Path("reached").touch()
    time.sleep(60)
"""


def test_sigterm_while_the_config_is_checked_asks_for_the_same_command_again(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    train = [sys.executable, str(scripts.ROOT / "launch" / "train.py"), "--workdir=run"]
    flags = [f"--config={scripts.ROOT / 'configs' / 'quickstart.py'}", "--config.task.environment=slow:environment"]
    with open(tmp_path / "log", "w+") as log:
        run = subprocess.Popen([*train, *flags], cwd=tmp_path, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 90
            while not (tmp_path / "reached").exists():
                assert run.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            run.send_signal(signal.SIGTERM)
            assert run.wait(timeout=20) == os.EX_TEMPFAIL
        finally:
            run.kill()
            run.wait(timeout=20)
    assert "stopped before the run began" in (tmp_path / "log").read_text()
    assert not (tmp_path / "run").exists()
