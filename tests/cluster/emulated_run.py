"""What becomes of a run's actors on emulated hosts, which come, go and differ; prints what it saw as JSON.

python emulated_run.py FOLDER
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from cluster_actors import Counter

from libra_jax import config as config_lib
from libra_jax.cluster import emulated, granted, hosts
from libra_jax.protocols import ActorSpec, LibraError, WorkerLost

EACH = 2
ROLES = {0: "training", 1: "rollout", 2: "training"}
"""Of hosts: by their names alone, the second would train, and the third roll out."""
SECONDS = 120.0
GPUS = {"CUDA_VISIBLE_DEVICES": "5,7"}


def layout(each: int = EACH, processes: int = 2, degrees: tuple[int, ...] = (1, 1)) -> hosts.HostLayout:
    """Two devices a process of the trainer, so that each fills a host of two."""
    found = hosts.layout(
        config_lib.RunConfig(
            trainer=config_lib.TrainerConfig(
                data=2 * processes, processes=processes, rows_per_micro_batch=2 * processes
            ),
            rollout=config_lib.RolloutConfig(tensor_parallel=degrees),
            cluster=config_lib.ClusterConfig(backend="ray", accelerators_per_host=each),
        )
    )
    assert found is not None
    return found


def spec(name: str, host: int | None) -> ActorSpec:
    return ActorSpec(name, "cluster_actors:Counter", {}, host=host)


@contextlib.asynccontextmanager
async def cluster(
    address: str, laid_out: hosts.HostLayout | None, told: list[granted.Granted], platform: str = "cpu"
) -> Any:
    from libra_jax.cluster import create

    made = create.create(
        config_lib.ClusterConfig(backend="ray", address=address, accelerators_per_host=EACH),
        start_seconds=SECONDS,
        layout=laid_out,
        platform=platform,
        on_hosts=told.append,
    )
    try:
        yield made
    finally:
        await made.shutdown()


async def refused(address: str, laid_out: hosts.HostLayout | None, seconds: float = 8.0) -> Mapping[str, Any]:
    """What is said to a run of this layout, which waits `seconds` for room, and after how long."""
    from libra_jax.cluster import ray_placement

    begun = time.monotonic()
    settle, ray_placement.SETTLE_SECONDS = ray_placement.SETTLE_SECONDS, 2.0
    async with cluster(address, laid_out, []) as made:
        if laid_out is not None:
            made._placement._seconds = seconds
        try:
            await made.spawn(spec("x", 0))
        except LibraError as error:
            return {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begun}
        finally:
            ray_placement.SETTLE_SECONDS = settle
    return {}


async def refusal(made: Any) -> str:
    try:
        await made.spawn(spec("rollout-0", 2))
    except WorkerLost as error:
        return str(error)
    return ""


async def live(nodes: emulated.EmulatedHosts) -> Mapping[str, Any]:
    """Actors on three hosts, of which one dies twice: a spare one takes its place, then there is none."""
    told: list[granted.Granted] = []
    seen: dict[str, Any] = {}
    async with cluster(nodes.address, layout(), told) as made:
        names = ("trainer.0", "trainer.1", "rollout-0", "rollout-1")
        places = [*layout().processes, *layout().instances]
        await asyncio.gather(*(made.spawn(spec(name, place.host)) for name, place in zip(names, places, strict=True)))
        nodes.add(3)
        await made.spawn(spec("reward", None))
        where = node_names()
        seen["on"] = {name: where[actor.birth.node] for name, actor in made._actors.items()}

        before = made._actors["rollout-0"]
        nodes.kill(1)
        await asyncio.wait({before.death}, timeout=SECONDS)
        await made.stop("rollout-0")
        again = await made.spawn(spec("rollout-0", 2))
        seen["again_on"] = node_names()[made._actors["rollout-0"].birth.node]
        seen["answers"] = await again.call(Counter.add, 3)

        before = made._actors["rollout-0"]
        nodes.kill(3)
        await asyncio.wait({before.death}, timeout=SECONDS)
        await made.stop("rollout-0")
        nodes.add(4)
        seen["refused_spare"] = [await refusal(made) for _ in range(2)]  # again, too
        nodes.kill(4)
        made._placement._seconds = 4.0
        begun = time.monotonic()
        try:
            await made.spawn(spec("rollout-0", 2))
        except LibraError as error:
            seen["gone"] = {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begun}
        seen["told"] = [[node.name for node in granted_.nodes] for granted_ in told]
        seen["sentence"] = told[0].sentence()
        seen["record"] = told[0].record()
    return seen


def node_names() -> dict[str, str]:
    import ray

    return {node["NodeID"]: node["NodeName"] for node in ray.nodes()}


def groups(address: str) -> list[str]:
    """The states of all placement groups there have been."""
    import ray

    ray.init(address=address, log_to_driver=False)
    try:
        return sorted(group["state"] for group in ray.util.placement_group_table().values())
    finally:
        ray.shutdown()


def other_jax(folder: pathlib.Path) -> dict[str, str]:
    """The environment of a host with another version of jax, as far as its package says."""
    information = folder / "jax-9.9.9.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 9.9.9\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


async def gpus(address: str) -> dict[str, str]:
    """Which GPUs workers see: their host's programs are to use the fifth and the seventh, or the second and third."""
    laid_out, told = layout(processes=1), []
    workers = {"trainer": ((0, 1), laid_out.processes[0])}
    workers |= {f"rollout-{number}": (place.devices, place) for number, place in enumerate(laid_out.instances)}
    found = {}
    async with cluster(address, laid_out, told, platform="cuda") as made:
        for name, (devices, place) in workers.items():
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
            asked = dataclasses.replace(spec(name, place.host), gpus=len(devices), environment=environment)
            found[name] = await (await made.spawn(asked)).call(Counter.variable, "CUDA_VISIBLE_DEVICES")
    return found


def main() -> None:
    own = {0: GPUS, 1: {"CUDA_VISIBLE_DEVICES": "2,3"}, 2: GPUS}
    own |= {4: other_jax(pathlib.Path(sys.argv[1])), 5: {"PYTHONHOME": "/nowhere"}}
    with emulated.EmulatedHosts(3, accelerators=EACH, gpus=True, environment=own, roles=ROLES) as nodes:
        os.environ |= nodes.environment  # before Ray is imported, which reads it then
        print(json.dumps({"up": nodes.address}), flush=True)
        seen: dict[str, Any] = {}
        seen["not_laid_out"] = asyncio.run(refused(nodes.address, None))
        seen["too_many"] = asyncio.run(refused(nodes.address, layout(processes=3)))
        seen["too_large"] = asyncio.run(refused(nodes.address, layout(each=4, degrees=(1,))))
        seen["gpus"] = asyncio.run(gpus(nodes.address))
        seen |= asyncio.run(live(nodes))
        nodes.add(4)
        # Ray 2.60 may see no room for 20 s and longer where hosts have died, although all of it is free.
        seen["differing"] = asyncio.run(refused(nodes.address, layout(), seconds=90.0))
        try:
            nodes.add(5)
        except LibraError as error:
            seen["broken"] = str(error)
        seen["groups"] = groups(nodes.address)
        print(json.dumps(seen))


if __name__ == "__main__":
    main()
