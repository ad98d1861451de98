"""Settings of actors' places, of deadlines, and of reports."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from libra_jax.config.checks import check
from libra_jax.config.fields import field
from libra_jax.config.group import group
from libra_jax.protocols import ConfigError


@dataclass
@group("cluster")
class ClusterConfig:
    """Places of the actors."""

    # inprocess: embedded on this machine; ray: placed by Ray.
    backend: str = field("inprocess", choices=("inprocess", "ray"))
    address: str = ""  # ray: address of the cluster to join; empty starts an embedded one
    # ray: accelerators of a host, by which the run is laid out over hosts (cluster/hosts.py); on CPU, their stand-ins.
    # 0: no layout; Ray places each worker where it has room, and workers that share weights must be on one host.
    accelerators_per_host: int = field(0, ge=0, needs=("backend", "ray"))


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
    port: int = field(0, ge=0, le=65535, hint="0: any")  # port of the gateway; 0: any that is free
    max_body_bytes: int = field(16 * 2**20, gt=0)  # bytes of the largest request
    # Requests of one session a second, in the long run; 0: no limit.
    requests_per_second: float = field(100.0, ge=0, hint="0 is no limit")
    # Outputs that one session may wait for at once. Each choice of a request with n choices counts.
    max_concurrent: int = field(64, gt=0)
    # Seconds from a request to the end of its answer, the wait for a slot included.
    request_seconds: float = field(1800.0, gt=0)
    # Seconds that a client may leave a part of its answer unread before it is cut off.
    write_seconds: float = field(60.0, gt=0)
    # Refuse requests for other sampling than the run's (temperature, top_p, seed, a schema, a forced call) and with
    # unknown fields. False: outputs are sampled by the run's settings, and agent/hints counts such requests.
    strict: bool = False
    # vLLM's parser of tool calls in outputs, such as hermes, qwen3_xml or llama3_json; auto: the one that the model's
    # chat template is certain to need, else none; none: calls stay in the text.
    tool_parser: str = field("auto", nonempty=True, hint='"none" is no parser')
    # How reasoning is read. marks: the thought that begins an output, by its marks; auto: marks, if the model's chat
    # template writes thoughts, else none; none: reasoning stays in the text; or vLLM's parser, such as deepseek_r1.
    reasoning_parser: str = field("auto", nonempty=True, hint='"none" is no parser')

    def __post_init__(self) -> None:
        _address(self.host, "gateway.host")


@dataclass
@group("telemetry")
class TelemetryConfig:
    """Reports of a run."""

    console: bool = True  # live progress on a terminal; plain lines elsewhere
    tensorboard: bool = True  # TensorBoard files
    wandb_project: str = ""  # project at Weights & Biases; empty is off
    report: bool = True  # report.html, written at the end
    # Rollouts of each step and evaluation that are written as text (rollouts/samples.py); 0 is off.
    samples: int = field(8, ge=0, hint="0 saves none")
    # Port of the health page and of Prometheus's metrics, in the coordinator's process; 0: off, -1: any.
    port: int = field(0, ge=-1, le=65535, hint="0: off, -1: any")
    # Address of this host at which the health page listens; beyond the loopback it needs a token.
    host: str = "127.0.0.1"
    token_env: str = ""  # environment variable that holds the token; readers send "Authorization: Bearer <token>"

    def __post_init__(self) -> None:
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

    engine_start: float = field(300.0, gt=0)  # seconds until a rollout engine serves
    trainer_start: float = field(600.0, gt=0)  # seconds until the trainer's processes have loaded the model
    # Seconds of each step with Ray: its start or joining, room for the run's hosts, placing an actor.
    cluster_start: float = field(60.0, gt=0)
    # Seconds until an actor has made its reward functions, whose factories may load models.
    reward_start: float = field(300.0, gt=0)
    first_token: float = field(300.0, gt=0)  # seconds between two deltas of a request that holds a slot
    # Seconds beyond scheduler.ageing_seconds that a request waits while a slot is free.
    placement: float = field(300.0, gt=0)
    train_step: float = field(1800.0, gt=0)  # seconds of a training step, its compilation included
    weight_sync: float = field(300.0, gt=0)  # seconds of each call of a weight sync
    checkpoint: float = field(1800.0, gt=0)  # seconds to write or verify a checkpoint
    # Seconds of each state of a hybrid worker that switches between rollout and training.
    transition: float = field(120.0, gt=0)
    shutdown: float = field(60.0, gt=0)  # seconds of each worker's shutdown
    # Seconds from SIGTERM to the kill by the cluster's scheduler (coordinator/stopping.py).
    grace: float = field(60.0, gt=0)
