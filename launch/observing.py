"""What tells of a run while it lives, besides its recorder: the heartbeat, and the health page if it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from libra_jax import config as libra_config
from libra_jax.coordinator import deadlines, fencing
from libra_jax.telemetry import endpoint, files, heartbeat, status


@contextlib.contextmanager
def observed(config: libra_config.RunConfig, workdir: Path, epoch: fencing.Epoch | None) -> Iterator[status.RunStatus]:
    """Writes `status.json` while the block runs and serves the health page; yields what both tell of.

    Args:
      config: the run's configuration (`telemetry`).
      workdir: the run's directory.
      epoch: the run's own in there; None: nobody else can be in there.

    Raises:
      ConfigError: the health page cannot be served as `telemetry` says.
    """
    loop = asyncio.get_running_loop()

    def waits() -> Sequence[status.Waiting]:
        now = loop.time()
        return [
            status.Waiting(wait.subject, now - wait.began, wait.seconds, wait.turn.queued) for wait in deadlines.waits()
        ]

    run = status.RunStatus(config.name, config.steps, epoch.number if epoch else 0, loop.time, waits)
    guard = files.always if epoch is None else epoch.may_write
    with contextlib.ExitStack() as closing:
        if config.telemetry.port:
            page = endpoint.Endpoint(config.telemetry, run)
            closing.callback(page.close)
            run.endpoint = page.url
            print(f"Health page: {page.url}/health, and {page.url}/metrics for Prometheus")
        beat = heartbeat.Heartbeat(workdir, run, guard=guard)
        closing.callback(beat.close)
        try:
            yield run
        except BaseException as error:
            run.end("failed", str(error) or type(error).__name__)
            raise
