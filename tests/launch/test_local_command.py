"""Commands on emulated hosts: what they are told, and that the hosts end with them, whatever ends what."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import real_runs
import scripts

from libra_jax.utils import scratch

SCRIPT = scripts.ROOT / "launch" / "local.py"
END_SECONDS = 40.0

COMMAND = """
import json, os, signal, sys, time
def end(*_):
    print("told to end", flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, end)
print(json.dumps({"pid": os.getpid(), "address": os.environ["RAY_ADDRESS"], "arguments": sys.argv[1:]}), flush=True)
time.sleep(float(os.environ["SLEEP"]))
sys.exit(3)
"""


@contextmanager
def started(
    script: pathlib.Path, *arguments: str, sleep: float = 600.0
) -> Iterator[tuple[subprocess.Popen[str], dict]]:
    """`launch/local.py` with one host, its command up; afterwards nothing of it may be left."""
    script.write_text(COMMAND)
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "--hosts=1", "--", str(script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SLEEP": str(sleep)},
    ) as process:
        try:
            said = json.loads(process.stdout.readline())
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) >= 5
            yield process, said
            left = real_runs.still_alive_after(END_SECONDS, family)
            deadline = time.monotonic() + END_SECONDS
            while (folders := list(pathlib.Path("/tmp").glob(f"{scratch.RAY_PREFIX}{process.pid}-*"))) and (
                time.monotonic() < deadline
            ):
                time.sleep(0.1)
        finally:
            process.kill()
    assert left == []
    assert folders == []


def test_hosts_that_would_leave_none_to_roll_out_are_refused():
    done = scripts.run("local.py", "--hosts=2", "--train_hosts=2", "--", "true")
    scripts.assert_one_sentence(done, "--train_hosts=2: some of the 2 hosts train and some roll out (--hosts)")


@pytest.mark.ray
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_script_is_told_of_its_hosts_and_its_exit_status_is_the_commands(tmp_path):
    arguments = ("--config.cluster.accelerators_per_host=2", "--more")
    with started(tmp_path / "script.py", "--config.cluster.accelerators_per_host=2", "--more", sleep=1) as (
        local,
        said,
    ):
        assert local.wait(60) == 3
    assert said["arguments"] == [
        *arguments,
        "--config.cluster.backend=ray",
        f"--config.cluster.address={said['address']}",
    ]
    host, _, port = said["address"].rpartition(":")
    assert host.startswith("127.")
    assert port.isdecimal()


@pytest.mark.ray
@pytest.mark.multiprocess
@pytest.mark.slow
def test_sigterm_is_for_the_command_and_the_hosts_end_after_it(tmp_path):
    with started(tmp_path / "script.py") as (local, _):
        local.send_signal(signal.SIGTERM)
        assert local.stdout.readline() == "told to end\n"
        assert local.wait(60) == 5


@pytest.mark.ray
@pytest.mark.multiprocess
@pytest.mark.slow
def test_killed_with_9_it_leaves_no_host_command_or_file(tmp_path):
    with started(tmp_path / "script.py") as (local, _):
        local.kill()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--hosts=2",), "no command to run on the hosts; give it after --"),
        (("--hosts=2", "--kill_host=2", "--", "true"), "--kill_host=2: the hosts are 0 to 1 (--hosts)"),
        (("--hosts=999", "--", "true"), "999 hosts cannot be emulated; between 1 and 250 can"),
        (("--hosts=1", "--", "no-such-command"), "no-such-command, the command after --, is neither a script"),
        (("--hosts=1", "--", "nowhere.py"), "nowhere.py, the command after --, is neither a script"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(arguments, sentence):
    scripts.assert_one_sentence(scripts.run("local.py", *arguments), sentence)
