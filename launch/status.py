"""Shows a run on one screen: its step, its workers, what it waits for, or how it ended.

  python launch/status.py runs/mine
  python launch/status.py --watch            # the run that wrote last under runs/, again and again

It reads `status.json`, from any host that sees the workdir. Exit status 0: the run lives or has ended as it should;
1: it failed, or is dead without having said so.
"""

from __future__ import annotations

import time
from pathlib import Path

from support import cli

from absl import flags
from rich.console import Console
from rich.live import Live

from libra_jax import protocols
from libra_jax.telemetry import recorder, screen, status
from libra_jax.utils import checksums, machine

_WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder; default the one under runs/ that was written last.")
_WATCH = flags.DEFINE_bool("watch", False, "Redraw the screen every second, until the run ends.")

RUNS = "runs"
REDRAW_SECONDS = 1.0


def main() -> int:
    workdir = Path(_WORKDIR.value) if _WORKDIR.value else newest(Path(RUNS))
    record = _read(workdir)
    alive = status.is_alive(workdir, record)
    if not _WATCH.value:
        Console().print(screen.picture(record, verdict(record, alive)))
        for sentence in recorder.cut_back(workdir, record["step"], checksums.known_records(workdir), look=True):
            print(sentence)
    else:
        with Live(screen.picture(record, verdict(record, alive)), console=Console(), auto_refresh=False) as live:
            while alive:
                time.sleep(REDRAW_SECONDS)
                record = _read(workdir)
                alive = status.is_alive(workdir, record)
                live.update(screen.picture(record, verdict(record, alive)), refresh=True)
    ended_well = record["ended"] is not None and record["ended"]["how"] != "failed"
    return 0 if alive or ended_well else 1


def newest(runs: Path) -> Path:
    """Returns the workdir whose run wrote last.

    Raises:
      DataError: there is no run.
    """
    found = {file.parent: file.stat().st_mtime_ns for file in runs.glob(f"*/{status.STATUS_FILE}")}
    if not found:
        raise protocols.DataError(f"{runs}/ holds no run with a {status.STATUS_FILE}; give the workdir of one")
    return max(found, key=lambda workdir: found[workdir])


def verdict(record: status.Record, alive: bool) -> str:
    """Returns a sentence that says whether the run lives."""
    if record["ended"]:
        return f"It has ended ({record['ended']['how']}). {record['ended']['sentence']}"
    if alive:
        return "It lives."
    here = record["place"] == machine.identity()
    why = "its process is gone" if here else f"nothing has been written for {status.WATCH_SECONDS:g} s"
    return f"DEAD: {why}, and it has not said why. The same command goes on from the last checkpoint."


def _read(workdir: Path) -> status.Record:
    record = status.read(workdir)
    if record is None:
        raise protocols.DataError(f"{workdir} holds no {status.STATUS_FILE}; give the workdir of a run")
    return record


if __name__ == "__main__":
    cli.run(main, positional="workdir")
