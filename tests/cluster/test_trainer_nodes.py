"""A trainer whose processes are on several nodes, which Ray emulates on this machine."""

import asyncio
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import trainer_processes as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import inprocess
from libra_jax.trainer_control import client

pytestmark = [pytest.mark.ray, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.drill]
HERE = pathlib.Path(__file__).parent


def test_a_trainer_over_two_nodes_takes_the_steps_of_one_process(tmp_path):
    paths = [str(HERE), str(HERE.parent / "common"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / "two_nodes.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(set(told["nodes"])) == 2

    async def alone() -> list[float]:
        cluster = inprocess.InProcessCluster(shutdown_seconds=30)
        model = str(tmp_path / "model")
        processes = client.TrainerProcesses(cluster, doubles.maker(model, protocols.MeshSizes(2, 2, 1)))
        trainer = client.TrainerActorClient(processes, config_lib.DeadlineConfig())
        await trainer.make()
        await trainer.start()
        losses = [(await trainer.train_step(doubles.batch(version, seed=version)))["loss"] for version in range(2)]
        await cluster.shutdown()
        return losses

    np.testing.assert_allclose(told["losses"], asyncio.run(alone()), rtol=1e-5)
