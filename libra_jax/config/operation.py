"""Settings of actors' places, of deadlines, and of reports."""

from __future__ import annotations

import dataclasses
import ipaddress
from dataclasses import dataclass

from libra_jax.config.checks import check, check_choice
from libra_jax.config.group import group
from libra_jax.protocols import ConfigError


@dataclass
@group("cluster")
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


def _address(host: str, field_name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            f"config.{field_name}: {host!r} is no address; give one of this host's, such as 127.0.0.1"
        ) from None


@dataclass
@group("gateway")
class GatewayConfig:
    """The gateway: the address at which agents ask for outputs (docs/reference/gateway.md), and its limits."""

    # Address of this host at which the gateway listens. Beyond the loopback, secrets of sessions travel unencrypted.
    host: str = "127.0.0.1"
    port: int = 0  # port of the gateway; 0: any that is free
    max_body_bytes: int = 16 * 2**20  # bytes of the largest request
    requests_per_second: float = 100.0  # requests of one session a second, in the long run; 0: no limit
    # Outputs that one session may wait for at once. Each choice of a request with n choices counts.
    max_concurrent: int = 64
    request_seconds: float = 1800.0  # seconds from a request to the end of its answer, the wait for a slot included
    write_seconds: float = 60.0  # seconds that a client may leave a part of its answer unread before it is cut off
    # Processes that serve requests, with cluster.backend=ray; a session stays at one of them, and with a port in the
    # config, they have ports one after another. Embedded, the run's own process serves.
    processes: int = 1
    # Refuse requests for other sampling than the run's (temperature, top_p, seed, a schema, a forced call) and with
    # unknown fields. False: outputs are sampled by the run's settings, and agent/hints counts such requests.
    strict: bool = False
    # vLLM's parser of tool calls in outputs, such as hermes, qwen3_xml or llama3_json; auto: the one that the model's
    # chat template is certain to need, else none; none: calls stay in the text.
    tool_parser: str = "auto"
    # How reasoning is read. marks: the thought that begins an output, by its marks; auto: marks, if the model's chat
    # template writes thoughts, else none; none: reasoning stays in the text; or vLLM's parser, such as deepseek_r1.
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        _address(self.host, "gateway.host")
        check(0 <= self.port <= 65535, "gateway.port", f"must be a port, or 0 (any), not {self.port}")
        check(
            self.requests_per_second >= 0,
            "gateway.requests_per_second",
            f"must not be negative, not {self.requests_per_second:g}; 0 is no limit",
        )
        for name in ("max_body_bytes", "max_concurrent", "request_seconds", "write_seconds", "processes"):
            value = getattr(self, name)
            check(value > 0, f"gateway.{name}", f"must be positive, not {value:g}")
        for name in ("tool_parser", "reasoning_parser"):
            check(bool(getattr(self, name)), f"gateway.{name}", 'is empty; use "none" for no parser')


@dataclass
@group("telemetry")
class TelemetryConfig:
    """Reports of a run."""

    console: bool = True  # live progress on a terminal; plain lines elsewhere
    tensorboard: bool = True  # TensorBoard files
    wandb_project: str = ""  # project at Weights & Biases; empty is off
    report: bool = True  # report.html, written at the end
    samples: int = 8  # rollouts of each step and evaluation that are written as text (rollouts/samples.py); 0 is off
    port: int = 0  # port of the health page and of Prometheus's metrics, in the coordinator's process; 0: off, -1: any
    # Address of this host at which the health page listens; beyond the loopback it needs a token.
    host: str = "127.0.0.1"
    token_env: str = ""  # environment variable that holds the token; readers send "Authorization: Bearer <token>"

    def __post_init__(self) -> None:
        check(self.samples >= 0, "telemetry.samples", f"must not be negative, not {self.samples}; 0 saves none")
        check(-1 <= self.port <= 65535, "telemetry.port", f"must be a port, 0 (off) or -1 (any), not {self.port}")
        address = _address(self.host, "telemetry.host")
        check(
            not self.port or address.is_loopback or bool(self.token_env),
            "telemetry.host",
            f"{self.host} is reached from other hosts: name an environment variable that holds a token in "
            "telemetry.token_env, or leave it at 127.0.0.1",
        )


@dataclass
@group("deadlines")
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
