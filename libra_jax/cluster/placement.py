"""Gives each worker its devices, and makes the specs of rollout engines, both the config's and a plan's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import granted, resolved_run
from libra_jax.models import config as model_config

ENGINES = {"vllm": "libra_jax.engines.vllm_engine:create", "fake": "libra_jax.engines.fake_engine:create"}


HOSTS_FILE = "hosts.json"
"""Name of the workdir's file with the hosts that the cluster granted to the run."""


def record(workdir: Path, note: Callable[[str], None], guard: Callable[[], bool], run_hosts: granted.Granted) -> None:
    """Notes which nodes are the run's hosts, and writes them into `hosts.json` if this run may still write."""
    note(run_hosts.sentence())
    if not guard():
        return
    # Renamed when it is complete, so that a reader never sees half a file.
    partial = workdir / f"{HOSTS_FILE}.partial"
    try:
        partial.write_text(json.dumps(run_hosts.record(), indent=1) + "\n")
        partial.rename(workdir / HOSTS_FILE)
    except OSError as error:
        note(f"warning: {workdir / HOSTS_FILE} could not be written ({error.strerror or error})")


def instance_name(number: int) -> str:
    """Returns the name of a rollout instance, which is also the name of its hybrid worker."""
    return f"rollout-{number}"


class EngineSpecs:
    """Makes the specs of a run's rollout engines.

    Args:
      workdir: folder of the run; each engine has a log file in it.
    """

    def __init__(self, run: resolved_run.ResolvedRun, workdir: Path) -> None:
        self._run = run
        self._config = config = run.config
        self._model = model_config.to_hf(run.policy)
        self._workdir = workdir.resolve()
        lora = config.model.lora
        # With merged weights, an engine knows of no adapter.
        self._lora = {"lora": config_lib.to_dict(lora)} if lora.rank and lora.sync == "adapter" else {}
        rollout = config.rollout
        self._slots = config_lib.slots_by_degree(rollout.tensor_parallel, rollout.instance_slots)

    def specs(self) -> list[protocols.ActorSpec]:
        """Returns one actor for each instance of the config, with its own slots and devices."""
        slots = self._config.rollout.instance_slots
        return [
            self._spec(number, devices, slots[number]) for number, devices in enumerate(self._run.partition.instances)
        ]

    def add(self, number: int, degree: int, other_specs: Sequence[protocols.ActorSpec]) -> protocols.ActorSpec:
        """Returns an instance that a plan adds, on the last devices that other instances leave free.

        It has the slots of the config's first instance with its degree, or `rollout.slots`.
        """
        used_devices = {device for spec in other_specs for device in spec.devices}
        free = [device for device in range(self._run.partition.total) if device not in used_devices]
        together = free if self._run.layout is None else self._run.layout.on_one_host(free, degree)
        if len(together) < degree:
            where = "" if self._run.layout is None else ", too few of them on one host"
            raise protocols.LibraError(
                f"a plan asks for an instance of degree {degree}, and {len(free)} devices are free{where}"
            )
        return self._spec(number, tuple(together[-degree:]), self._slots.get(degree, self._config.rollout.slots))

    def _spec(self, number: int, devices: tuple[int, ...], slots: int) -> protocols.ActorSpec:
        config, name = self._config, instance_name(number)
        host, local = self._run.place(devices)
        # One core for each worker. None if the instance is not pinned, or replaces a part of training, whose cores are
        # not listed one by one.
        cores, first = config.rollout.cores, config.trainer.devices
        cores = tuple(cores[device - first] for device in devices) if cores and min(devices) >= first else ()
        # The last instances of the config are hybrid; an instance that a plan adds is not.
        count = len(self._run.partition.instances)
        on_gpu = config.trainer.platform == "cuda"
        rollout = {
            **config_lib.to_dict(config.rollout),
            "slots_by_instance": (),
            "slots": slots,
            "accelerators": (),
        }
        accelerators = config.rollout.accelerators
        return protocols.ActorSpec(
            name=name,
            factory=ENGINES[config.rollout.engine],
            arguments={
                "name": name,
                "model_config": self._model,
                "rollout": rollout,
                "tensor_parallel": len(devices),
                # A different seed for each instance, or equal requests would get equal samples.
                "seed": config.seed + number,
                "log_path": str(self._workdir / f"{name}.log"),
                "cpu_cores": "|".join(map(str, cores)) or "auto",
                "hybrid": count - config.elastic.hybrid <= number < count,
                **({"return_routing": True} if config.algorithm.routing_replay == "rollout" else {}),
                **({"accelerator": accelerators[number]} if accelerators else {}),
                **self._lora,
            },
            gpus=len(devices) if on_gpu else 0,
            environment={"CUDA_VISIBLE_DEVICES": ",".join(map(str, local))} if on_gpu else {},
            devices=devices,
            cores=cores,
            host=host,
        )
