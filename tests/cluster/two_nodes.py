"""A trainer of two processes on two nodes of an emulated Ray cluster; prints its nodes and losses as JSON.

python two_nodes.py FOLDER
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys

import ray_nodes
import trainer_processes as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import ray_cluster
from libra_jax.trainer_control import client


async def train(address: str, model: str) -> dict[str, list]:
    cluster = ray_cluster.RayCluster(address, start_seconds=120, shutdown_seconds=30)
    processes = client.TrainerProcesses(cluster, doubles.maker(model, protocols.MeshSizes(2, 2, 1)), count=2)
    trainer = client.TrainerActorClient(processes, config_lib.DeadlineConfig())
    try:
        await trainer.make()
        await trainer.start()
        losses = [(await trainer.train_step(doubles.batch(version, seed=version)))["loss"] for version in range(2)]
        return {"nodes": [actor.birth.node for actor in cluster._actors.values()], "losses": losses}
    finally:
        await trainer.stop()
        await cluster.shutdown()


def main() -> None:
    with ray_nodes.two_nodes(cpus=1) as address:  # each has room for one process
        model = doubles.write_model(pathlib.Path(sys.argv[1]) / "model")
        print(json.dumps(asyncio.run(train(address, model))))


if __name__ == "__main__":
    main()
