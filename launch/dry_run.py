"""What a run would be, for `--dry_run`: nothing is started."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

import placement
import yaml

import wiring
from libra_jax import config as libra_config
from libra_jax.agents import factories
from libra_jax.cluster import hosts
from libra_jax.models import config as model_config
from libra_jax.telemetry import redaction

PROMPT_CHARACTERS = 60


def describe(config: libra_config.RunConfig) -> str:
    """The resolved config, the policy, the tasks, the device mesh and the partition."""
    shape = wiring.policy_shape(config, need_weights=False)
    parts = placement.partition(config)
    parameters = model_config.parameter_count(shape)
    trainer = config.trainer
    state_bytes = {"float32": 4, "bfloat16": 2}[config.model.param_dtype] * parameters * 3  # parameters and two moments
    per_device = state_bytes / (trainer.fsdp * trainer.tensor) / 2**30
    wire = {"float32": 4, "bfloat16": 2, "float16": 2}[config.rollout.dtype]
    lines = [
        yaml.safe_dump(
            json.loads(json.dumps(redaction.redacted(libra_config.to_dict(config)), default=list)), sort_keys=False
        ),
        f"policy      {shape.architecture}, {parameters / 1e6:,.1f} M parameters"
        + (
            ""
            if not config.model.path or Path(config.model.path).exists()
            else f" (weights not at {config.model.path})"
        ),
        f"tasks       {_tasks(config)}",
        f"reward      {_reward(config.reward)}",
        f"mesh        data={trainer.data} fsdp={trainer.fsdp} tensor={trainer.tensor} context={trainer.context}",
        f"partition   {parts.total} devices",
        f"  trainer   {_ordinals(parts.trainer)}: {per_device:.2f} GiB of parameters and optimizer a device",
    ]
    lines += [
        f"  rollout-{index} {_ordinals(devices)}: tensor parallel {len(devices)}, {slots} slots, "
        f"{parameters * wire / len(devices) / 2**30:.2f} GiB of weights a device"
        for index, (devices, slots) in enumerate(zip(parts.instances, config.rollout.instance_slots, strict=True))
    ]
    lines += _hosts(config)
    lines += _elastic(config)
    batch = config.coordinator.groups_per_step * config.coordinator.group_size
    lines.append(
        f"step        {config.coordinator.groups_per_step} prompts x {config.coordinator.group_size} attempts = "
        f"{batch} trajectories, staleness at most {config.coordinator.staleness}"
    )
    return "\n".join(lines)


def _reward(reward: libra_config.RewardConfig) -> str:
    """The terms of the sum."""
    terms = [(reward.environment_weight, "the environment's own")] if reward.environment_weight else []
    terms += [(function.weight, f"{name} ({function.factory})") for name, function in reward.parsed().items()]
    return " + ".join(what if weight == 1 else f"{weight:g} x {what}" for weight, what in terms)


def _hosts(config: libra_config.RunConfig) -> list[str]:
    """What is on which host, where a run is laid out over several."""
    layout = hosts.layout(config)
    if layout is None:
        return []
    lines = [f"hosts       {len(layout.hosts)}, of {config.cluster.accelerators_per_host} accelerators each"]
    for host in layout.hosts:
        processes = [f"process {number} of the trainer" for number in host.processes]
        names = processes + [placement.instance_name(number) for number in host.instances]
        lines.append(f"  host {host.number}    {host.role}, {host.accelerators} taken: {', '.join(names)}")
    return lines


def _elastic(config: libra_config.RunConfig) -> list[str]:
    """What may change sides or size while the run goes on."""
    elastic, lines = config.elastic, []
    if elastic.hybrid:
        count = len(config.rollout.tensor_parallel)
        names = ", ".join(placement.instance_name(number) for number in range(count - elastic.hybrid, count))
        replica = config.trainer.fsdp * config.trainer.tensor
        lines.append(f"hybrid      {names}: also a replica of the trainer, over {replica} device{'s' * (replica > 1)}")
    if elastic.resize:
        most, held = wiring.reach(config), config.trainer.devices + elastic.spare_devices
        where = f"; above {held}, in other processes" if most > held else " in the trainer's process"
        lines.append(f"resize      plans may change the mesh, to at most {most} devices{where}")
    return lines


def _ordinals(devices: tuple[int, ...]) -> str:
    return f"device {devices[0]}" if len(devices) == 1 else f"devices {devices[0]}-{devices[-1]}"


def _tasks(config: libra_config.RunConfig) -> str:
    """Where tasks come from, how many there are, and the first one."""
    task = config.task
    if task.path and not Path(task.path).exists():
        return f"{task.source} (no tasks at {task.path})"
    source = factories.task_source(task, config.seed)
    count = f"{len(source):,} to train on" if isinstance(source, Sized) else "generated"
    file = f" from {task.path}" if task.path else ""
    first = textwrap.shorten(_prompt(source.task(0).payload), PROMPT_CHARACTERS, placeholder=" ...")
    return f"{task.source}{file}, {count}; the first: {first}"


def _prompt(payload: Mapping[str, Any]) -> str:
    """The question of a task. What the policy sees is the environment's to say, and a dry run starts none."""
    text = next((payload[name] for name in ("prompt", "question", "expression") if name in payload), dict(payload))
    return text if isinstance(text, str) else json.dumps(text, default=str)
