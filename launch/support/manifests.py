"""Makes the Kubernetes objects of a run: a RayJob of KubeRay or a JobSet, from the templates rayjob.yaml and
jobset.yaml.

Both have a head without accelerators, where the driver (launch/train.py) runs. They also have a group of hosts that
train and a group of hosts that roll out, as `libra_jax.cluster.hosts` lays the run out. All mount one claim, which
holds the run's workdir. Ray joins the hosts and asks every peer for its token. The scripts that run in the pods,
launch/templates/*.sh, are part of the image, as is all code.

No manifest has been applied to a cluster yet: not run. tests/launch/test_manifests.py checks the manifests against
the published models of Kubernetes and JobSet, and against KubeRay's reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from support import rendering

from libra_jax.cluster import granted, guard
from libra_jax.protocols import ConfigError

Kind = Literal["rayjob", "jobset"]
Accelerator = Literal["gpu", "tpu", "none"]

RESOURCES = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu", "none": ""}
"""Resource names of the device plug-ins of NVIDIA and of GKE."""

LONGEST_NAME = 40
"""Most characters of a run's name. KubeRay allows 47. Pods have 63, of which a JobSet adds 23
(`-training-10-100-xxxxx`)."""

ROLES = ("training", "rollout")
"""Groups whose hosts have a role of `libra_jax.cluster.hosts`; Ray's nodes carry the role as a label."""


@dataclass(frozen=True)
class Group:
    """Hosts of one kind.

    Attributes:
      name: training, rollout, cpu or head.
      count: number of hosts.
      accelerators: number of each host's accelerators.
      accelerator: kind of the accelerators.
      selector: labels that nodes must have.
      slice_hosts: hosts of a TPU slice, which are given out together. Divides `count`.
    """

    name: str
    count: int
    accelerators: int = 0
    accelerator: Accelerator = "none"
    selector: Mapping[str, str] = field(default_factory=dict)
    slice_hosts: int = 1

    @property
    def resource(self) -> str:
        """Kubernetes' name of the accelerators; empty if there are none."""
        return RESOURCES[self.accelerator]

    @property
    def role_label(self) -> dict[str, str]:
        """The label of Ray's nodes in this group; empty if its hosts have no role."""
        return {granted.ROLE_LABEL: self.name} if self.name in ROLES else {}


@dataclass(frozen=True)
class Job:
    """A run to submit. An empty text takes the cluster's or the namespace's default, or means none.

    Attributes:
      name: name of the object; names that Kubernetes derives from it begin with it.
      image: image of all containers; has the repository at `repository`, with `python` and `ray` on its PATH.
      command: the driver's arguments, run in `repository`; `--workdir` is added.
      groups: hosts with work of their own.
      claim: PersistentVolumeClaim that all pods mount, at `mount`.
      workdir: folder of the run, below `mount`.
      storage: size of a claim (`100Gi`) that the job makes; empty makes none.
      shared_memory: size of a host's /dev/shm; counts into its memory.
      grace: seconds from SIGTERM to SIGKILL.
      retries: restarts of everything after a failure; the run goes on from its workdir.
      environment: variables of all containers.
      secrets: variables whose values are in secrets: (secret, key) by variable.
      secrets_from: secrets of which each key becomes a variable.
      token_secret: secret with Ray's token, at `auth_token`. A RayJob's may be empty: KubeRay makes one.
      pull_secret: secret to pull the image with.
      queue: Kueue's queue, which admits the job.
    """

    name: str
    image: str
    command: Sequence[str]
    groups: Sequence[Group]
    claim: str
    workdir: str
    mount: str = "/runs"
    namespace: str = ""
    service_account: str = ""
    storage: str = ""
    storage_class: str = ""
    cpus: str = "8"
    head_cpus: str = "4"
    memory: str = "64Gi"
    head_memory: str = "16Gi"
    shared_memory: str = "8Gi"
    grace: int = 120
    retries: int = 3
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    secrets_from: Sequence[str] = ()
    token_secret: str = ""
    pull_secret: str = ""
    queue: str = ""
    ray_version: str = ""
    repository: str = "/libra-jax"

    def variables(self, group: Group, operated: bool) -> list[rendering.Manifest]:
        """Returns the variables of a group's containers by name; `operated`: KubeRay adds Ray's variables and
        labels."""
        plain = {**self.environment, "LIBRA_JAX_GRACE": str(self.grace), "LIBRA_JAX_WORKDIR": self.workdir}
        plain |= guard.RAY_ENVIRONMENT
        secret = dict(self.secrets)
        if group.name == "head":
            # An argument a line, as templates/run_driver.sh reads them.
            plain["LIBRA_JAX_COMMAND"] = "\n".join(self.command)
        if not operated:
            plain |= {"LIBRA_JAX_HEAD": f"{self.name}-head-0-0.{self.name}", "RAY_AUTH_MODE": "token"}
            secret["RAY_AUTH_TOKEN"] = (self.token_secret, "auth_token")
            if group.role_label:
                plain["LIBRA_JAX_LABELS"] = f"{granted.ROLE_LABEL}={group.name}"
            if group.name == "head":
                plain["LIBRA_JAX_HOSTS"] = str(sum(group.count for group in self.groups))
        # Kubernetes replaces $(NAME) in values; a doubled dollar stays a dollar.
        found: dict[str, rendering.Manifest] = {
            name: {"value": text.replace("$(", "$$(")} for name, text in plain.items()
        }
        for name, (of, key) in secret.items():
            found[name] = {"valueFrom": {"secretKeyRef": {"name": of, "key": key}}}
        return [{"name": name, **found[name]} for name in sorted(found)]


def documents(job: Job, kind: Kind) -> list[rendering.Manifest]:
    """Returns the objects to apply, in order: the claim, if the job makes it, and the job.

    Raises:
      ConfigError: the name is too long or invalid, or a JobSet has no secret with Ray's token.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name) or len(job.name) > LONGEST_NAME:
        raise ConfigError(
            f"--name={job.name}: must be at most {LONGEST_NAME} small letters, digits and hyphens, from a letter on"
        )
    if kind == "jobset" and not job.token_secret:
        raise ConfigError(
            "--ray_token_secret: a JobSet needs one, because anyone who reaches Ray in the cluster's network could run "
            "code in it; make it with: kubectl create secret generic ray-token --from-literal=auth_token="
            "$(openssl rand -hex 32)"
        )
    return rendering.manifests(f"{kind}.yaml", job=job, head=Group("head", 1), variables=job.variables)
