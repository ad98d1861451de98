"""Watches over a run beside its coordinator: heartbeat, health page, and the end of a process that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import checkpoints, fencing, stopping
from libra_jax.telemetry import endpoint, files, status
from libra_jax.utils import deadlines

END = 0.9
"""Fraction of `deadlines.grace` after which a process that survived SIGTERM is ended."""

LOOK_SECONDS = 0.5


class LastResort:
    """Ends this process if a scheduler's SIGTERM did not. The exit status asks for the same command again.

    A compiling trainer, a starting engine or an import cannot be interrupted, and exit handlers of libraries may hang.
    The watching thread therefore runs until the process has ended. As after any kill, workers end with this process
    (tests/launch/test_killed_runs.py), and the newest checkpoint counts.

    Args:
      grace: `deadlines.grace`, in seconds.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._began = float("inf")
        threading.Thread(target=self._look, name="libra-last-resort", daemon=True).start()

    def begin(self, number: signal.Signals) -> None:
        """Starts the countdown at a signal. A signal interrupts anything, so this method only sets a variable."""
        if number in stopping.ENDS:
            self._began = min(self._began, time.monotonic())

    def _look(self) -> None:
        while time.monotonic() < self._began + END * self._grace:
            time.sleep(LOOK_SECONDS)
        with contextlib.suppress(OSError, ValueError):
            print("Not everything ended within config.deadlines.grace, and is killed.", file=sys.stderr)
        end_process()


def end_process() -> NoReturn:
    """Ends this process at once, with exit status 75; exit handlers of libraries may take many seconds."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(os.EX_TEMPFAIL)


@contextlib.contextmanager
def observed(
    config: config_lib.RunConfig, workdir: Path, fencing_token: fencing.Token | None
) -> Iterator[status.RunStatus]:
    """Writes `status.json` while the block runs and serves the health page. Yields the state that both show.

    If a ConfigError ends the block before its first training step, the start was refused. The file of the earlier
    start is put back then, because it says how the run in the workdir ended.

    Args:
      config: configuration of the run (`telemetry`).
      workdir: directory of the run.
      fencing_token: the run's fencing token in the workdir; None disables fencing.

    Raises:
      ConfigError: the health page cannot be served as `telemetry` says.
    """
    loop = asyncio.get_running_loop()

    try:
        earlier = status.read(workdir)
    except protocols.DataError:  # the heartbeat replaces it at once
        earlier = None
    step = max(0, checkpoints.newest_step(workdir))
    number = fencing_token.number if fencing_token else 0
    run = status.RunStatus(config.name, config.steps, number, loop.time, deadlines.waits, earlier=earlier, step=step)
    guard = files.always if fencing_token is None else fencing_token.may_write
    with contextlib.ExitStack() as closing:
        if config.telemetry.port:
            page = endpoint.MetricsServer(config.telemetry, run)
            closing.callback(page.close)
            run.endpoint = page.url
            print(f"Health page: {page.url}/health, and {page.url}/metrics for Prometheus")
        beat = status.Heartbeat(workdir, run, guard=guard)
        closing.callback(beat.close)
        try:
            yield run
        except BaseException as error:
            run.end("failed", str(error) or type(error).__name__)
            if isinstance(error, protocols.ConfigError) and earlier is not None and not run.trained:
                beat.withdraw()
            raise
