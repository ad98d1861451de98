"""Kubernetes objects for a run, as plain data: a RayJob of KubeRay (ray.io/v1) or a JobSet (jobset.x-k8s.io/v1alpha2).

Both have a head without accelerators, where the driver (launch/train.py) runs, a group of hosts that train and one of
hosts that roll out, as `libra_jax.cluster.hosts` lays the run out; all mount one claim, which holds the run's workdir.
Ray joins the hosts and asks every peer for its token. What runs in the pods is in launch/templates/: those scripts, as
all the code, are the image's.

A JobSet, and the pods and claims of both kinds, are valid by the published models (tests/launch/test_manifests.py). A
RayJob's own fields follow the API reference of KubeRay 1.6 (groups have labels since 1.5, authOptions came with 1.5.1);
its CustomResourceDefinition is not in this repository, so `--crd` takes that of your cluster. No manifest has been
applied to a cluster yet: not run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from libra_jax.cluster import granted, settings
from libra_jax.protocols import ConfigError

Kind = Literal["rayjob", "jobset"]
Accelerator = Literal["gpu", "tpu", "none"]

RESOURCES = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}
"""What the device plug-ins of NVIDIA and of GKE call what they hand out; nodes that have it are tainted alike."""

LONGEST_NAME = 40
"""Of a run: KubeRay allows 47 characters; pods have 63, of which a JobSet's add 23 (`-training-10-100-xxxxx`)."""

ROLES = ("training", "rollout")
"""Groups whose hosts have a role of `libra_jax.cluster.hosts`; Ray's nodes are labelled with it."""

RAY_PORT = 6379
TOKEN_KEY = "auth_token"
"""In the secret of Ray's token: where KubeRay looks for it."""

EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
"""JobSet's annotation: a job has all nodes with the same value of this label to itself."""

_TAKEN_AWAY = {"rules": [{"action": "FailJob", "onPodConditions": [{"status": "True", "type": "DisruptionTarget"}]}]}
"""Of a job: a pod that was pre-empted, evicted or drained fails it for a reason of its own (`PodFailurePolicy`),"""

_TAKEN_AWAY_IS_FREE = {
    "action": "RestartJobSetAndIgnoreMaxRestarts",
    "name": "takenAway",
    "onJobFailureReasons": ["PodFailurePolicy"],
}
"""for which a JobSet starts anew without counting. KubeRay 1.6 has no such rule: a RayJob counts every new start."""

_SCRIPTS = "launch/templates"
_VOLUME = "runs"  # that holds the workdir


@dataclass(frozen=True)
class Group:
    """Hosts of one kind.

    Attributes:
      name: training, rollout or cpu.
      count: how many.
      accelerators: that each has.
      accelerator: what they are.
      selector: labels of the nodes that will do.
      slice_hosts: on TPU, hosts of a slice: they are given out together. Divides `count`.
    """

    name: str
    count: int
    accelerators: int = 0
    accelerator: Accelerator = "none"
    selector: Mapping[str, str] = field(default_factory=dict)
    slice_hosts: int = 1


@dataclass(frozen=True)
class Job:
    """What is submitted.

    Attributes:
      name: of the object; what Kubernetes names after it begins with it.
      image: of all containers; has the repository at `repository`, with `python` and `ray` on its PATH.
      command: the driver's, an argument an entry, run in `repository`; `--workdir` is added to it.
      groups: of hosts with work of their own.
      claim: PersistentVolumeClaim that all pods mount, at `mount`.
      workdir: of the run, below `mount`.
      namespace: empty: the one of whoever applies it.
      service_account: of the pods; empty: the namespace's default.
      storage: size of the claim (`100Gi`), which is made too; empty: it is there.
      storage_class: of a claim that is made; empty: the cluster's default.
      cpus: of each host; `head_cpus` of the head.
      memory: of each host (`64Gi`); `head_memory` of the head.
      shared_memory: of a host at /dev/shm, where Ray keeps its objects; counts into its memory.
      grace: seconds from SIGTERM to SIGKILL.
      retries: times that everything is made anew after a failure; the run goes on from its workdir. A JobSet does not
        count those after which a pod was taken away.
      environment: variables of all containers.
      secrets: variables whose values are in secrets: (secret, key) by variable.
      secrets_from: secrets of which each key becomes a variable.
      token_secret: with Ray's token, at `auth_token`; empty (a RayJob's only): KubeRay makes one.
      pull_secret: to pull the image with.
      queue: of Kueue, which admits the job; empty: none.
      ray_version: in the image.
      repository: its folder in the image.
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


def documents(job: Job, kind: Kind) -> list[dict[str, Any]]:
    """The objects to apply, in order.

    Raises:
      ConfigError: the name is too long or not one, or a JobSet has no secret with Ray's token.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name) or len(job.name) > LONGEST_NAME:
        raise ConfigError(
            f"--name={job.name}: must be at most {LONGEST_NAME} small letters, digits and hyphens, from a letter on"
        )
    if kind == "jobset" and not job.token_secret:
        raise ConfigError(
            "--ray_token_secret: a JobSet needs one, because whoever reaches Ray in the cluster's network could run "
            f"code in it; make it with: kubectl create secret generic ray-token --from-literal={TOKEN_KEY}="
            "$(openssl rand -hex 32)"
        )
    made = [_claim(job)] if job.storage else []
    return [*made, _rayjob(job) if kind == "rayjob" else _jobset(job)]


def dump(objects: Sequence[Mapping[str, Any]]) -> str:
    """The objects as YAML, keys sorted, so that two of them differ only where they differ."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=True, explicit_start=True, width=120)


def _claim(job: Job) -> dict[str, Any]:
    spec: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": job.storage}}}
    if job.storage_class:
        spec["storageClassName"] = job.storage_class
    metadata = _metadata(dataclasses.replace(job, queue=""), name=job.claim)
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _rayjob(job: Job) -> dict[str, Any]:
    auth = {"mode": "token", **({"secretName": job.token_secret} if job.token_secret else {})}
    head = _pod(job, "head", stop=f"{_SCRIPTS}/stop_driver.sh")
    head["spec"]["containers"][0]["ports"] = [
        {"containerPort": RAY_PORT, "name": "gcs-server"},
        {"containerPort": 8265, "name": "dashboard"},
    ]
    cluster = {
        "authOptions": auth,
        "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0", "num-gpus": "0"}, "template": head},
        "workerGroupSpecs": [_worker_group(job, group) for group in job.groups],
    }
    if job.ray_version:
        cluster["rayVersion"] = job.ray_version
    spec = {
        "backoffLimit": job.retries,
        # The arguments are in the head's environment: on their way here they would pass three shells.
        "entrypoint": f"bash {job.repository}/{_SCRIPTS}/run_driver.sh",
        "rayClusterSpec": cluster,
        "shutdownAfterJobFinishes": True,
        "submissionMode": "K8sJobMode",
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": _metadata(job), "spec": spec}


def _worker_group(job: Job, group: Group) -> dict[str, Any]:
    replicas = group.count // group.slice_hosts
    return {
        "groupName": group.name,
        **({"labels": {granted.ROLE_LABEL: group.name}} if group.name in ROLES else {}),  # of Ray's nodes
        "maxReplicas": replicas,
        "minReplicas": replicas,
        "numOfHosts": group.slice_hosts,
        "rayStartParams": {},
        "replicas": replicas,
        "template": _pod(job, group, stop=f"{_SCRIPTS}/await_driver.sh"),
    }


def _jobset(job: Job) -> dict[str, Any]:
    head = _replicated("head", 1, 1, _pod(job, "head", run=f"{_SCRIPTS}/head.sh"))
    hosts = [
        _replicated(
            group.name,
            group.count // group.slice_hosts if group.accelerator == "tpu" else 1,
            group.slice_hosts if group.accelerator == "tpu" else group.count,
            _pod(job, group, run=f"{_SCRIPTS}/host.sh"),
            together=group.accelerator == "tpu",
        )
        for group in job.groups
    ]
    spec = {
        "failurePolicy": {"maxRestarts": job.retries, "rules": [_TAKEN_AWAY_IS_FREE]},
        "network": {"enableDNSHostnames": True},
        "replicatedJobs": [head, *hosts],
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["head"]},
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(job), "spec": spec}


def _replicated(
    name: str, replicas: int, pods: int, template: Mapping[str, Any], together: bool = False
) -> dict[str, Any]:
    work: dict[str, Any] = {
        "spec": {
            "backoffLimit": 0,  # a host that is lost fails its job, and with it the set, which is made anew
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "podFailurePolicy": _TAKEN_AWAY,
            "template": template,
        }
    }
    if together:  # the pods of a slice belong on one node pool, which is one slice
        work["metadata"] = {"annotations": {EXCLUSIVE: "cloud.google.com/gke-nodepool"}}
    return {"name": name, "replicas": replicas, "template": work}


def _pod(job: Job, where: Group | Literal["head"], *, run: str = "", stop: str = "") -> dict[str, Any]:
    """A host's pod: `run` is its script, where the operator gives it none; `stop` the one before SIGTERM."""
    group = Group("head", 1) if where == "head" else where
    limits = {"cpu": job.head_cpus, "memory": job.head_memory} if where == "head" else _limits(job, group)
    container: dict[str, Any] = {
        "env": _environment(job, group.name, operated=not run),
        "image": job.image,
        "name": f"ray-{group.name}",
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [{"mountPath": job.mount, "name": _VOLUME}, {"mountPath": "/dev/shm", "name": "shared-memory"}],
        "workingDir": job.repository,
    }
    if run:
        container["command"] = ["bash", run]
    if stop:
        container["lifecycle"] = {"preStop": {"exec": {"command": ["bash", f"{job.repository}/{stop}"]}}}
    if job.secrets_from:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in job.secrets_from]
    spec: dict[str, Any] = {
        "containers": [container],
        "terminationGracePeriodSeconds": job.grace,
        "volumes": [
            {"name": _VOLUME, "persistentVolumeClaim": {"claimName": job.claim}},
            {"emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory}, "name": "shared-memory"},
        ],
    }
    if run:
        spec["restartPolicy"] = "Never"
    if job.service_account:
        spec["serviceAccountName"] = job.service_account
    if job.pull_secret:
        spec["imagePullSecrets"] = [{"name": job.pull_secret}]
    if group.selector:
        spec["nodeSelector"] = dict(group.selector)
    if group.accelerator != "none":
        spec["tolerations"] = [{"effect": "NoSchedule", "key": RESOURCES[group.accelerator], "operator": "Exists"}]
    return {"metadata": {"labels": {"app.kubernetes.io/name": "libra-jax"}}, "spec": spec}


def _limits(job: Job, group: Group) -> dict[str, str]:
    found = {"cpu": job.cpus, "memory": job.memory}
    if group.accelerator != "none":
        found[RESOURCES[group.accelerator]] = str(group.accelerators)
    return found


def _environment(job: Job, group: str, *, operated: bool) -> list[dict[str, Any]]:
    """Variables in the order of their names; `operated`: KubeRay adds those of Ray, and its labels."""
    head = group == "head"
    own = {"LIBRA_JAX_GRACE": str(job.grace), "LIBRA_JAX_WORKDIR": job.workdir, **settings.environment()}
    if head:
        own["LIBRA_JAX_COMMAND"] = "\n".join(job.command)
    secret = dict(job.secrets)
    if not operated:
        own |= {"LIBRA_JAX_HEAD": f"{job.name}-head-0-0.{job.name}", "RAY_AUTH_MODE": "token"}
        secret["RAY_AUTH_TOKEN"] = (job.token_secret, TOKEN_KEY)
    if group in ROLES and not operated:
        own["LIBRA_JAX_LABELS"] = f"{granted.ROLE_LABEL}={group}"
    if head and not operated:
        own["LIBRA_JAX_HOSTS"] = str(sum(group.count for group in job.groups))
    # Kubernetes replaces $(NAME) in values; doubled, the dollar stands for itself.
    plain = {**job.environment, **own}
    values: dict[str, dict[str, Any]] = {name: {"value": text.replace("$(", "$$(")} for name, text in plain.items()}
    values |= {name: {"valueFrom": {"secretKeyRef": {"name": of, "key": key}}} for name, (of, key) in secret.items()}
    return [{"name": name, **values[name]} for name in sorted(values)]


def _metadata(job: Job, name: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {"labels": {"app.kubernetes.io/name": "libra-jax"}, "name": name or job.name}
    if job.namespace:
        found["namespace"] = job.namespace
    if job.queue:
        found["labels"]["kueue.x-k8s.io/queue-name"] = job.queue
    return found


class _Dumper(yaml.SafeDumper):
    """Text of several lines as such, and every object in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
