"""Describes a run's workers as actors: the trainer's processes, hybrid workers, weight relays and loop workers.

`cluster.placement` describes the rollout engines.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import huge_pages
from libra_jax.cluster import placement, resolved_run
from libra_jax.trainer_control import client

TRAINER = "libra_jax.training.trainer:create"
TRAINING_SIDE = "libra_jax.training.training_side:create"
RELAY = "libra_jax.weights.relay:create"
LOOP_WORKER = "libra_jax.build.loop_worker:create"


def trainer_spec(run: resolved_run.ResolvedRun, workdir: Path, process: int = 0) -> protocols.ActorSpec:
    """Describes the trainer actor, or one of its processes, on the devices of `trainer.platform`.

    JAX trains on the first platform of JAX_PLATFORMS. Weights pass through its CPU backend on their way to the engines.

    Args:
      run: the run; for a trainer that takes over, with that trainer's mesh.
      workdir: directory of the run.
      process: index among `trainer.processes`; each process has the next equal share of the devices.
    """
    config, trainer_devices = run.config, run.partition.trainer
    devices_per_process = len(trainer_devices) // config.trainer.processes
    devices = trainer_devices[process * devices_per_process : (process + 1) * devices_per_process]
    platform = config.trainer.platform
    host, local = run.place(devices)
    # A trainer of one process holds the devices of a larger mesh, too; several processes hold none.
    spare = config.elastic.spare_devices if config.trainer.processes == 1 else 0
    # JAX's own default of 0.75 leaves a quarter of each GPU unused if the trainer shares it with nothing. JAX refuses
    # to start if the old and the new name of this variable are both set.
    set_by_user = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & set(os.environ)
    environment = {
        "auto": {},
        "cpu": {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(len(devices) + spare),
            **huge_pages.environment(config.trainer),
        },
        "cuda": {
            "JAX_PLATFORMS": "cuda,cpu",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, local)),
            **({} if set_by_user else {"XLA_CLIENT_MEM_FRACTION": f"{config.trainer.memory_fraction:g}"}),
        },
        "tpu": {"JAX_PLATFORMS": "tpu,cpu"},
    }[platform]
    return protocols.ActorSpec(
        name="trainer",
        factory=TRAINER,
        arguments={"config": config_lib.to_dict(config), "workdir": str(workdir.resolve()), "process": process},
        gpus=len(devices) if platform == "cuda" else 0,
        environment=environment,
        devices=devices,
        host=host,
    )


def trainer_processes(
    run: resolved_run.ResolvedRun, workdir: Path, sizes: protocols.MeshSizes | None = None
) -> client.MakeProcess:
    """Returns the factory for the run's trainer processes, or for a trainer on another mesh that is to take over.

    Args:
      run: the run.
      workdir: directory of the run.
      sizes: axis sizes of the mesh; None means the config's.
    """
    mesh = dataclasses.asdict(sizes) if sizes is not None else {}

    def make(process: int, processes: int) -> protocols.ActorSpec:
        trainer = dataclasses.replace(run.config.trainer, **mesh, processes=processes)
        config = dataclasses.replace(run.config, trainer=trainer)
        return trainer_spec(resolved_run.ResolvedRun(config, run.shape), workdir, process)

    return make


def training_side_specs(run: resolved_run.ResolvedRun, workdir: Path) -> list[protocols.ActorSpec]:
    """Describes the training side of each hybrid worker, on devices that its instance has already leased."""
    config = run.config
    count, trainer = config.elastic.hybrid, config.trainer
    if not count:
        return []
    needed, specs = trainer.replica_devices, []
    # The hybrid instances are the last ones (`placement.EngineSpecs`).
    instances = list(enumerate(run.partition.instances))
    for place, (number, devices) in enumerate(instances[-count:]):
        host, local = run.place(devices)
        environment = {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(needed),
            **huge_pages.environment(trainer),
        }
        if trainer.platform == "cuda":
            visible = ",".join(map(str, local[:needed]))
            # The allocator must return freed memory to the device, because the engine needs rollout.gpu_memory_fraction
            # of it again when it wakes. This allocator reserves nothing and knows no fraction: while the engine sleeps,
            # the worker may use all that the engine has freed.
            allocator = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            environment = {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": visible, **allocator}
        arguments = {
            "config": config_lib.to_dict(config),
            "workdir": str(workdir.resolve()),
            "name": placement.instance_name(number),
            "cores": config.elastic.cores[place : place + 1],
        }
        specs.append(
            protocols.ActorSpec(f"hybrid-{number}", TRAINING_SIDE, arguments, environment=environment, host=host)
        )
    return specs


def relay_specs(run: resolved_run.ResolvedRun) -> dict[int, protocols.ActorSpec]:
    """Describes the weight relay of each host. No relays if all is on one host, or if weights go by NCCL.

    Relays reserve no CPU: they wait for the network, and run beside the workers that have reserved the host's CPUs.
    """
    config, layout = run.config, run.layout
    if layout is None or config.rollout.transport != "memfd":
        return {}
    # Half of the deadline for a chunk of weights, so that the chunk can be requested a second time.
    seconds = config.deadlines.weight_sync / 2
    names = {host.number: f"relay-{host.number}" for host in layout.hosts}
    return {
        host: protocols.ActorSpec(
            name,
            RELAY,
            {"name": name, "link_seconds": seconds, "cluster": config.cluster.address},
            cpus=0.0,
            host=host,
        )
        for host, name in names.items()
    }


def loop_worker_specs(run: resolved_run.ResolvedRun, workdir: Path) -> list[protocols.ActorSpec]:
    """Describes the loop workers of `rollout.loop_workers`, spread over the hosts whose accelerators roll out.

    They reserve no CPU, like the relays: a host's CPUs are for its engines' processes, its tools and its agent loops.
    """
    config, layout = run.config, run.layout
    places = [host.number for host in layout.of_role("rollout")] if layout is not None else [None]
    arguments = {"config": config_lib.to_dict(config), "workdir": str(workdir.resolve())}
    return [
        protocols.ActorSpec(f"loops-{number}", LOOP_WORKER, arguments, cpus=0.0, host=places[number % len(places)])
        for number in range(config.rollout.loop_workers)
    ]
