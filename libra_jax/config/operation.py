"""Settings of actors' places, of deadlines, and of reports."""

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
    """Places of the actors."""

    backend: str = "inprocess"  # inprocess: embedded on this machine; ray: placed by Ray
    address: str = ""  # ray: address of the cluster to join; empty starts an embedded one
    # ray: accelerators of a host, by which the run is laid out over hosts (cluster/hosts.py); on CPU, their stand-ins.
    # 0: no layout; Ray places each worker where it has room, and workers that share weights must be on one host.
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
    """Reports of a run."""

    console: bool = True  # live progress on a terminal; plain lines elsewhere
    tensorboard: bool = True  # TensorBoard files
    wandb_project: str = ""  # project at Weights & Biases; empty is off
    report: bool = True  # report.html, written at the end
    samples: int = 8  # rollouts of each step and evaluation that are written as text (agents/samples.py); 0 is off
    port: int = 0  # port of the health page and of Prometheus's metrics, in the coordinator's process; 0: off, -1: any
    # Address of this host at which the health page listens; beyond the loopback it needs a token.
    host: str = "127.0.0.1"
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
    """Longest waits, in seconds. A wait that exceeds its deadline ends in an error that names the worker."""

    engine_start: float = 300.0  # seconds until a rollout engine serves
    trainer_start: float = 600.0  # seconds until the trainer's processes have loaded the model
    # Seconds of each step with Ray: its start or joining, room for the run's hosts, placing an actor.
    cluster_start: float = 60.0
    reward_start: float = 300.0  # seconds until an actor has made its reward functions, whose factories may load models
    first_token: float = 300.0  # seconds between two deltas of a request that holds a slot
    placement: float = 300.0  # seconds beyond scheduler.ageing_seconds that a request waits while a slot is free
    train_step: float = 1800.0  # seconds of a training step, its compilation included
    weight_sync: float = 300.0  # seconds of each call of a weight sync
    checkpoint: float = 1800.0  # seconds to write or verify a checkpoint
    transition: float = 120.0  # seconds of each state of a hybrid worker that switches between rollout and training
    shutdown: float = 60.0  # seconds of each worker's shutdown
    grace: float = 60.0  # seconds from SIGTERM to the kill by the cluster's scheduler (coordinator/stopping.py)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            check(getattr(self, item.name) > 0, f"deadlines.{item.name}", "must be positive")
