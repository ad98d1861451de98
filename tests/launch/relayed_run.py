"""A run over four hosts that Ray emulates: a trainer of two processes on two, a real vLLM engine on each of the others.

  PYTHONPATH=.:launch:tests/common python relayed_run.py WORKDIR STEPS [FULL_SYNC_EVERY]

With FULL_SYNC_EVERY, weights travel in bfloat16 as differences, and the learning rate is one of a large model. Engines
compare the checksum of each chunk that they load with that of the trainer's snapshot.

Prints for each actor, as JSON, its host and on which node it is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from typing import Any

from configs import quickstart
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import preflight, wiring, workdirs
from libra_jax.cluster import emulated
from libra_jax.tools import toolkit

HOSTS = 4


def config(steps: int, address: str, full_sync_every: int = 1) -> config_lib.RunConfig:
    values = quickstart.get_config()
    values.name, values.steps = "relayed", steps
    values.coordinator.groups_per_step = 4
    values.coordinator.group_size = 4
    values.rollout.tensor_parallel = (1, 1)
    values.rollout.slots = 16
    values.rollout.max_tokens = 24
    values.rollout.kv_cache_gib = 0.1
    values.rollout.chunk_mib = 1
    values.trainer.fsdp = 2
    values.trainer.processes = 2
    values.trainer.rows_per_micro_batch = 2
    values.trainer.row_tokens = 128
    # Whatever was said changes the weights, and by much: an engine that missed a version would be found out.
    values.optimizer.learning_rate = 1e-2
    values.optimizer.warmup_steps = 0
    values.reward.functions = {"said": {"factory": "moving_doubles:reward"}}
    values.reward.environment_weight = 0.0
    values.warm_start.steps = values.evaluation.every = values.checkpoint.every = 0
    if full_sync_every > 1:
        values.rollout.full_sync_every = full_sync_every
        values.rollout.dtype = "bfloat16"
        values.rollout.checksum = True
        values.optimizer.learning_rate = 1e-6
    values.cluster.backend = "ray"
    values.cluster.address = address
    values.cluster.accelerators_per_host = 1
    values.telemetry.report = False
    values.telemetry.tensorboard = False
    return config_lib.checked(values)


def tell_nodes() -> None:
    from libra_jax.cluster import ray_cluster

    spawn = ray_cluster.RayCluster.spawn

    async def told(self: Any, spec: protocols.ActorSpec) -> Any:
        made = await spawn(self, dataclasses.replace(spec, cpus=0.0))  # the machine has fewer than the hosts have
        node = self._actors[spec.name].birth.node
        print(json.dumps({"actor": spec.name, "host": spec.host, "node": node}), flush=True)
        return made

    ray_cluster.RayCluster.spawn = told  # type: ignore[method-assign]


def main() -> None:
    with emulated.EmulatedHosts(HOSTS, accelerators=1) as hosts:
        os.environ.update(hosts.environment)  # before Ray is imported, which reads it then
        tell_nodes()
        run = config(int(sys.argv[2]), hosts.address, *map(int, sys.argv[3:]))
        resolved = preflight.validate(run, need_weights=True)
        tools = toolkit.Toolkit(run.tools, run.sandbox)
        asyncio.run(wiring.train(resolved, workdirs.open_workdir(run, sys.argv[1]), tools))


if __name__ == "__main__":
    main()
