"""Settings of where a run's actors live, how long they are waited for, and where it reports."""

from __future__ import annotations

import dataclasses
import ipaddress
from dataclasses import dataclass

from libra_jax.config.checks import check, check_choice
from libra_jax.config.group import group
from libra_jax.protocols import ConfigError


@group
@dataclass
class ClusterConfig:
    """Where actors live."""

    backend: str = "inprocess"  # inprocess: embedded on this machine; ray: placed by Ray
    address: str = ""  # ray: cluster to join; empty starts one embedded
    # ray: accelerators that a host has, and by which the run's are laid out over hosts (cluster/hosts.py); on CPU, that
    # stand for them. 0: no layout; workers go where Ray has room, and those that share weights must be on one host.
    accelerators_per_host: int = 0

    def __post_init__(self) -> None:
        check_choice(self.backend, ("inprocess", "ray"), "cluster.backend")
        check(
            self.accelerators_per_host >= 0,
            "cluster.accelerators_per_host",
            f"must not be negative, not {self.accelerators_per_host}",
        )
        check(
            self.backend == "ray" or not self.accelerators_per_host,
            "cluster.accelerators_per_host",
            "lays a run out over hosts, which needs cluster.backend=ray",
        )


@group
@dataclass
class TelemetryConfig:
    """Where a run reports."""

    console: bool = True  # live progress on a terminal; plain lines elsewhere
    tensorboard: bool = True  # write TensorBoard files
    wandb_project: str = ""  # empty is off
    report: bool = True  # report.html at the end
    samples: int = 8  # rollouts a step, and an evaluation, written out as text (agents/samples.py); 0: off
    port: int = 0  # of the health page and of Prometheus's metrics, in the coordinator's process; 0: off, -1: any
    host: str = "127.0.0.1"  # the address of this host that it listens at; beyond the loopback it needs a token
    token_env: str = ""  # environment variable that holds the token; readers send "Authorization: Bearer <token>"

    def __post_init__(self) -> None:
        check(self.samples >= 0, "telemetry.samples", f"must not be negative, not {self.samples}; 0 saves none")
        check(-1 <= self.port <= 65535, "telemetry.port", f"must be a port, 0 (off) or -1 (any), not {self.port}")
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            raise ConfigError(
                f"config.telemetry.host: {self.host!r} is no address; give one of this host's, such as 127.0.0.1"
            ) from None
        check(
            not self.port or address.is_loopback or bool(self.token_env),
            "telemetry.host",
            f"{self.host} is reached from other hosts: name an environment variable that holds a token in "
            "telemetry.token_env, or leave it at 127.0.0.1",
        )


@group
@dataclass
class DeadlineConfig:
    """Longest waits, in seconds; passing one ends in an error that names the worker."""

    engine_start: float = 300.0  # of a rollout engine, until it serves
    trainer_start: float = 600.0  # of the trainer's processes, until the model is loaded
    cluster_start: float = 60.0  # Ray: it comes up or is joined, has room for the run's hosts, places an actor
    reward_start: float = 300.0  # of an actor that holds reward functions: its factories may load models
    first_token: float = 300.0  # between two deltas of a request that holds a slot
    placement: float = 300.0  # a request waits while a slot is free, beyond scheduler.ageing_seconds
    train_step: float = 1800.0  # a training step, its compilation included
    publish: float = 300.0  # each verb of a weight update
    checkpoint: float = 1800.0  # one checkpoint, written or verified
    transition: float = 120.0  # each state of a hybrid worker's way between rollout and training
    shutdown: float = 60.0  # each worker's end when the run ends
    grace: float = 60.0  # from SIGTERM to the end: what the scheduler gives before it kills (coordinator/stopping.py)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            check(getattr(self, item.name) > 0, f"deadlines.{item.name}", "must be positive")
