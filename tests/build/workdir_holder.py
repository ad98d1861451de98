"""A run that only holds its workdir, in a process of its own: `workdir_holder.py WORKDIR [--elsewhere]`.

With --elsewhere it is on another host, whose locks do not reach this one and whose clock is an hour ahead.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax.build import observing, workdirs
from libra_jax.coordinator import fencing
from libra_jax.utils import machine


def be_elsewhere() -> None:
    now = time.time
    time.time = lambda: now() + 3600.0
    machine.identity = lambda: "another-kernel/pid:[1]"
    workdirs._lock = lambda workdir: True


async def main(workdir: str) -> None:
    run = config_lib.RunConfig(telemetry=config_lib.TelemetryConfig(console=False))
    path: Path = workdirs.open_workdir(run, workdir)
    token = workdirs.take_fencing_token(path)
    with observing.observed(run, path, token):
        print("holding", flush=True)
        await fencing.watch(token)


if __name__ == "__main__":
    if "--elsewhere" in sys.argv:
        be_elsewhere()
    try:
        asyncio.run(main(sys.argv[1]))
    except fencing.Superseded as error:
        print(error, flush=True)
        sys.exit(3)
