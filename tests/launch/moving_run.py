"""A run of real processes whose plans move the trainer to two of them and back, on two nodes that Ray emulates.

A hybrid worker changes sides meanwhile, whenever it can. Trainer and replica are real; the engines are doubles.

  PYTHONPATH=.:launch:tests/common python moving_run.py WORKDIR
  PYTHONPATH=.:launch:tests/common python moving_run.py WORKDIR STEPS

The first ends by itself, and prints for each actor, as JSON, on which node it is. The second takes so many steps of the
same run in one process, where nothing moves.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray_nodes
import restless_run

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import preflight, wiring, workdirs
from libra_jax.cluster import placement
from libra_jax.hybrid import switching
from libra_jax.planning import planner, replanning
from libra_jax.tools import toolkit

QUIET_STEPS = 3
"""Undisturbed steps before each plan, and before the end."""


def plan(data: int, instances: int) -> protocols.Plan:
    return protocols.Plan(data, 1, 1, (protocols.PlannedBucket(1, instances, 128),))


class Mover:
    """Instead of the planner: of the core's three devices two train, and then one again."""

    def __init__(self) -> None:
        self.plan = plan(1, 2)
        self.calibrated = True
        self._coming = [plan(2, 1), plan(1, 2)]
        self._quiet = 0

    def after(
        self, step: int, measured: planner.ObservedStep, trained: Sequence[Any], *, may_move: bool = True
    ) -> tuple[replanning.Decision[protocols.Plan] | None, dict[str, float]]:
        self._quiet = self._quiet + 1 if may_move else 0
        if self._quiet < QUIET_STEPS:
            return None, {}
        self._quiet = 0
        if not self._coming:
            os.kill(os.getpid(), signal.SIGTERM)
            return None, {}
        self.plan = self._coming.pop(0)
        return replanning.Decision(step, "it is time", self.plan, 2.0, 1.0, 0.1, True, "it was told to"), {}

    def refuse(self, plan: protocols.Plan) -> None:
        self.plan = plan

    def snapshot(self) -> Mapping[str, Any]:
        return {"plan": dataclasses.asdict(self.plan)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        raise AssertionError("this run is not resumed")

    def close(self) -> None:
        pass


def config(steps: int) -> config_lib.RunConfig:
    run = restless_run.config(steps)
    return dataclasses.replace(
        run,
        name="moving",
        reward=config_lib.RewardConfig(
            functions={"said": {"factory": "moving_doubles:reward"}}, environment_weight=0.0
        ),
        algorithm=config_lib.AlgorithmConfig(advantage="dr_grpo", clip_low=0.99),  # a group of one keeps its reward
        optimizer=config_lib.OptimizerConfig(name="adam", eps=1e-6, learning_rate=1e-3),
        trainer=dataclasses.replace(run.trainer, rows_per_micro_batch=2, pack=False),
        coordinator=config_lib.CoordinatorConfig(groups_per_step=8, group_size=1, max_staleness=0),
        rollout=dataclasses.replace(run.rollout, tensor_parallel=(1, 1, 1)),
        checkpoint=config_lib.CheckpointConfig(every=4),
    )


def steady(run: config_lib.RunConfig) -> config_lib.RunConfig:
    return dataclasses.replace(
        run,
        cluster=config_lib.ClusterConfig(),
        rollout=dataclasses.replace(run.rollout, loop_workers=0),  # which are actors of Ray
        elastic=config_lib.ElasticConfig(),
        checkpoint=config_lib.CheckpointConfig(every=0),
    )


def tell_nodes() -> None:
    """Only what trains takes a CPU, and every actor's node is printed."""
    from libra_jax.cluster import ray_cluster

    spawn = ray_cluster.RayCluster.spawn

    async def told(self: Any, spec: protocols.ActorSpec) -> Any:
        trains = spec.name.startswith(("trainer", "replica"))
        made = await spawn(self, dataclasses.replace(spec, cpus=float(trains)))
        print(json.dumps({"actor": spec.name, "node": self._actors[spec.name].birth.node}), flush=True)
        return made

    ray_cluster.RayCluster.spawn = told  # type: ignore[method-assign]


def train(run: config_lib.RunConfig, workdir: Path, address: str = "") -> None:
    resolved = preflight.validate(run, need_weights=True)
    # Hybrid workers are on the trainer's host, and so are these nodes.
    run = dataclasses.replace(run, cluster=dataclasses.replace(run.cluster, address=address))
    tools = toolkit.Toolkit(run.tools, run.sandbox)
    asyncio.run(wiring.train(resolved, workdirs.open_workdir(run, str(workdir)), tools))


def main() -> None:
    workdir = Path(sys.argv[1])
    if len(sys.argv) > 2:
        train(steady(config(int(sys.argv[2]))), workdir)
        return
    placement.ENGINES["fake"] = "moving_doubles:engine"
    wiring.global_planner = lambda *_: Mover()  # type: ignore[assignment]
    switching.Switching = restless_run.Restless  # type: ignore[misc, assignment]
    tell_nodes()
    with ray_nodes.two_nodes(cpus=2) as address:  # which a trainer, two successors and a replica fill
        train(config(2_000), workdir, address)


if __name__ == "__main__":
    main()
