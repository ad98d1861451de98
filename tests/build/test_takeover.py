"""Two starts of one run: the second is refused while the first lives, wherever, and takes over where it is told to."""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import scripts

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import workdirs
from libra_jax.coordinator import fencing
from libra_jax.telemetry import status

HOLDER = pathlib.Path(__file__).with_name("workdir_holder.py")
RUN = config_lib.RunConfig(telemetry=config_lib.TelemetryConfig(console=False))


@contextlib.contextmanager
def holder(workdir: pathlib.Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the workdir."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(scripts.ROOT), str(scripts.ROOT / "launch")])}
    command = [sys.executable, str(HOLDER), str(workdir), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        yield process
    finally:
        process.kill()
        process.wait(timeout=20)
        process.stdout.close()


@pytest.fixture
def lockless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not pass locks on."""
    monkeypatch.setattr(workdirs, "_lock", lambda workdir: True)


@pytest.mark.multiprocess
def test_a_second_start_on_the_host_is_refused_by_name_and_goes_on_once_the_first_is_killed(tmp_path):
    with holder(tmp_path / "run") as first:
        with pytest.raises(
            protocols.ConfigError,
            match=rf"is in use by the run of process {first.pid} on \S+ \(step 0 of 100\); wait .* --take_over",
        ):
            workdirs.open_workdir(RUN, str(tmp_path / "run"))
        assert fencing.newest(tmp_path / "run").number == 1, "a start that is refused fences no one off"
        first.kill()
        first.wait(timeout=20)
        began = time.monotonic()
        workdirs.open_workdir(RUN, str(tmp_path / "run"))
        assert time.monotonic() - began < status.WATCH_SECONDS / 2, "a lock that is free needs no watching"
        assert workdirs.take_fencing_token(tmp_path / "run").number == 2


@pytest.mark.multiprocess
def test_on_another_host_a_live_run_is_seen_although_no_lock_reaches_and_its_clock_is_an_hour_ahead(tmp_path, lockless):
    with holder(tmp_path / "run", "--elsewhere") as first:
        began = time.monotonic()
        with pytest.raises(protocols.ConfigError, match=rf"in use by the run of process {first.pid} on "):
            workdirs.open_workdir(RUN, str(tmp_path / "run"))
        assert time.monotonic() - began < 30.0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_on_another_host_a_dead_run_is_told_by_watching_it(tmp_path, lockless, capsys):
    with holder(tmp_path / "run", "--elsewhere") as first:
        first.kill()
        first.wait(timeout=20)
        began = time.monotonic()
        workdirs.open_workdir(RUN, str(tmp_path / "run"))
        assert status.WATCH_SECONDS <= time.monotonic() - began < 30.0
        assert "looking for 10 s whether it lives" in capsys.readouterr().err


@pytest.mark.multiprocess
@pytest.mark.parametrize("where", [(), ("--elsewhere",)], ids=["here", "elsewhere"])
def test_a_run_that_is_taken_over_stops_with_a_sentence_and_writes_nothing_more(tmp_path, where, monkeypatch):
    if where:
        monkeypatch.setattr(workdirs, "_lock", lambda workdir: True)
        monkeypatch.setattr(status, "WATCH_SECONDS", 2.0)
    with holder(tmp_path / "run", *where) as first:
        workdirs.open_workdir(RUN, str(tmp_path / "run"), take_over=True)
        began = time.monotonic()
        token = workdirs.take_fencing_token(tmp_path / "run", take_over=True)
        waited = time.monotonic() - began
        assert first.wait(timeout=20) == 3
        assert f"taken over by the run of process {os.getpid()} on " in first.stdout.read()
    assert waited < 20.0
    assert token.may_write()
    record = json.loads((tmp_path / "run" / status.STATUS_FILE).read_text())
    assert (record["fencing_token"], record["ended"]) == (1, None), "not even that it has ended"


@pytest.mark.multiprocess
def test_a_take_over_with_another_config_is_refused_and_leaves_the_live_run_alone(tmp_path):
    with holder(tmp_path / "run") as first:
        with pytest.raises(protocols.ConfigError, match=r"config\.seed is 0 there and 1 here"):
            workdirs.open_workdir(dataclasses.replace(RUN, seed=1), str(tmp_path / "run"), take_over=True)
        assert fencing.newest(tmp_path / "run").number == 1
        assert first.poll() is None
