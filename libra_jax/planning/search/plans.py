"""Converts plans: from a configuration, from a file, and to a configuration."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.utils import checksums

MOST_DEVICES = 1_000_000
"""Most accelerators of a plan: more than any cluster has."""


def core_degrees(run: config_lib.RunConfig) -> tuple[int, ...]:
    """Returns the tensor-parallel degrees of the instances that plans cover: all but the hybrid ones, which are the
    last."""
    degrees = run.rollout.tensor_parallel
    return degrees[: len(degrees) - run.elastic.hybrid]


def from_config(run: config_lib.RunConfig, mesh: tuple[int, int, int]) -> protocols.Plan:
    """Returns the plan that a run's configuration describes, without hybrid instances, which no plan covers.

    Args:
      run: its configuration; `scheduler.max_remaining_tokens` bounds the buckets.
      mesh: (data, fsdp, tensor) of its trainer.
    """
    counts = collections.Counter(core_degrees(run))
    bounds = [*run.scheduler.max_remaining_tokens, run.rollout.max_context]
    if len(bounds) != len(counts):  # a single bucket has all instances
        bounds = [run.rollout.max_context] * len(counts)
    rollout = [
        protocols.PlannedBucket(degree, counts[degree], bound)
        for degree, bound in zip(sorted(counts), bounds, strict=True)
    ]
    return protocols.Plan(*mesh, tuple(rollout), run.trainer.context)


def read(path: Path) -> protocols.Plan:
    """Reads the plan that `launch/plan.py` wrote.

    Raises:
      DataError: the file is missing, or is no such plan; the message says what is wrong with it.
    """
    try:
        document = checksums.read_object(path)
        train, rollout = document["train"], document["rollout"]
        mesh = {name: train[name] for name in ("data", "fsdp", "tensor")}
        plan = of_values({**mesh, "context": train.get("context", 1), "rollout": rollout})
        devices = train["devices"]
    except OSError as error:
        raise protocols.DataError(f"{path}: the plan cannot be read ({error.strerror or error})") from error
    except KeyError as error:
        raise protocols.DataError(f"{path}: this is no plan of launch/plan.py: it has no {error.args[0]}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise protocols.DataError(f"{path}: this is no plan of launch/plan.py ({error})") from error
    sizes = [plan.data, plan.fsdp, plan.tensor, plan.context]
    sizes += [size for bucket in plan.rollout for size in dataclasses.astuple(bucket)]
    if not plan.rollout or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise protocols.DataError(
            f"{path}: a plan has at least one instance, and every size is a positive whole number"
        )
    if plan.train_devices + plan.rollout_devices > MOST_DEVICES:  # each instance becomes an entry of the config
        raise protocols.DataError(f"{path}: a plan has at most {MOST_DEVICES:,} accelerators")
    if devices != plan.train_devices:
        raise protocols.DataError(
            f"{path}: train.devices is {devices}, and data x fsdp x tensor x context are {plan.train_devices}"
        )
    # Buckets are found by bisection of degrees and bounds (`scheduling.levels.LevelMap`).
    ranges = [(bucket.tensor_parallel, bucket.max_remaining_tokens) for bucket in plan.rollout]
    if any(a >= c or b >= d for (a, b), (c, d) in itertools.pairwise(ranges)):
        raise protocols.DataError(f"{path}: degrees and bounds of rollout must ascend, not {ranges}")
    return plan


def accelerators(path: Path) -> int:
    """Returns how many accelerators the plan of a file splits; 0 if the file does not say.

    Args:
      path: a file that `read` has read.
    """
    number = checksums.read_object(path).get("for", {}).get("accelerators", 0)
    return number if isinstance(number, int) else 0


FIELDS = (
    *(f"trainer.{axis}" for axis in ("data", "fsdp", "tensor", "context")),
    "rollout.tensor_parallel",
    "scheduler.max_remaining_tokens",
    "simulation.train_devices",
    "simulation.train_mesh",
)
"""Settings that a plan decides."""


def applied(values: Mapping[str, Any], plan: protocols.Plan) -> dict[str, Any]:
    """Returns a configuration, as nested dicts, with the mesh, instances, slots and buckets of a plan.

    The rows of a micro-batch are rounded up to a multiple of the mesh's shards. If the trainer's processes do not
    divide the mesh, or one would span hosts, there are the fewest that fit (`cluster.accelerators_per_host`).

    Args:
      values: values of a run, or of a simulated one.
      plan: from `read`. An instance has the slots that the configuration gives its degree, or else `rollout.slots`.
    """
    degrees = [bucket.tensor_parallel for bucket in plan.rollout for _ in range(bucket.count)]
    rollout, simulation = values["rollout"], values.get("simulation", {})
    instance_slots = simulation.get("slots") or rollout["slots_by_instance"]
    by_degree = config_lib.slots_by_degree(rollout["tensor_parallel"], instance_slots)
    slots = tuple(by_degree.get(degree, rollout["slots"]) for degree in degrees)
    mesh = {"data": plan.data, "fsdp": plan.fsdp, "tensor": plan.tensor}
    # The widest bucket serves all longer requests, so it has no bound.
    bounds = tuple(bucket.max_remaining_tokens for bucket in plan.rollout[:-1])
    laid_out = {
        **values,
        "rollout": {**rollout, "tensor_parallel": tuple(degrees), "slots_by_instance": slots},
        "scheduler": {**values["scheduler"], "max_remaining_tokens": bounds},
    }
    if simulation:
        config_lib.check(
            plan.context == 1, "simulation.train_mesh", f"has no context, and the plan's is {plan.context}"
        )
        sizes = {"train_devices": plan.train_devices, "train_mesh": tuple(mesh.values()), "slots": slots}
        return {**laid_out, "simulation": {**simulation, **sizes}}
    # A micro-batch needs the same rows on every shard.
    shards, rows = plan.data * plan.fsdp, values["trainer"]["rows_per_micro_batch"]
    host_devices, processes = values["cluster"]["accelerators_per_host"], values["trainer"]["processes"]
    devices = plan.train_devices
    if devices % processes or (host_devices and devices // processes > host_devices):  # no process spans hosts
        fewest = -(-devices // (host_devices or devices))
        processes = next(count for count in range(fewest, devices + 1) if devices % count == 0)
    trainer = {
        **values["trainer"],
        **mesh,
        "context": plan.context,
        "processes": processes,
        "rows_per_micro_batch": -(-rows // shards) * shards,
    }
    return {**laid_out, "trainer": trainer}


def of_values(values: Mapping[str, Any]) -> protocols.Plan:
    """Returns the plan whose `dataclasses.asdict` gives these values."""
    rollout = tuple(protocols.PlannedBucket(**bucket) for bucket in values["rollout"])
    # Checkpoints and files of versions without a context axis do not name it.
    return protocols.Plan(values["data"], values["fsdp"], values["tensor"], rollout, values.get("context", 1))
