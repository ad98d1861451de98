"""A whole run in a process of its own, to be killed: `python coordinator_child.py WORKDIR`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import coordinator_doubles as doubles

from libra_jax import protocols
from libra_jax.cluster import inprocess
from libra_jax.coordinator import checkpoints
from libra_jax.telemetry import recorder

CONFIG = doubles.make_config(
    steps=80,
    coordinator={"groups_per_step": 3, "group_size": 2, "max_staleness": 1},
    checkpoint={"every": 1, "keep": 2},
    telemetry={"console": False, "tensorboard": False, "report": False},
)


async def main(workdir: Path) -> None:
    recorder.cut_back(workdir, checkpoints.newest_step(workdir))
    record = recorder.create(CONFIG, workdir, asyncio.get_running_loop().time)
    coordinator = doubles.make_coordinator(
        CONFIG,
        cluster=inprocess.InProcessCluster(shutdown_seconds=5.0),
        trainer_spec=protocols.ActorSpec(
            "trainer", "coordinator_doubles:make_trainer", {"seconds": 0.04, "log": str(workdir / "trainer.json")}
        ),
        engine_specs=doubles.engine_specs(CONFIG, tokens_per_second=500.0),
        recorder=record,
        workdir=workdir,
    )
    print("running", flush=True)
    summary = await coordinator.run()
    record.close()
    print(summary.sentence, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
