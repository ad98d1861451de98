"""Submits a run to Kubernetes as a RayJob (KubeRay) or a JobSet; --dry_run prints the manifest instead.

  python launch/kubernetes.py --config=configs/mine.py --image=registry.example/libra-jax:1 --dry_run >run.yaml
  kubectl apply --dry-run=server -f run.yaml   # the cluster checks it, and makes nothing
  python launch/kubernetes.py --config=configs/mine.py --image=... --kind=jobset --ray_token_secret=ray-token

The hosts are those of `config.cluster.accelerators_per_host` (libra_jax/cluster/hosts.py): a group that trains, a group
that rolls out, and a head without accelerators for the driver. `--config.` settings are passed on to launch/train.py.
The image holds the repository (third_party/Dockerfile; for GPUs, third_party/Dockerfile.cuda), and for a RayJob also
ray[default]. The claim must allow many hosts to write. If a run fails or loses its hosts, it is restarted with the same
workdir, from its last checkpoint. The templates are launch/templates/rayjob.yaml, jobset.yaml and pod.yaml.

No cluster has run these yet: not run. Hosts of two kinds (TPU and GPU) are rendered, and not placed yet.
"""

from __future__ import annotations

if __name__ != "__main__":
    # This folder comes first on the path, and libraries look for Kubernetes' Python client by this name. The error
    # tells them that there is none.
    raise ImportError("launch/kubernetes.py is a script; what it renders is in launch/support/manifests.py")

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import PurePosixPath

from support import cli, job_flags, manifests, rendering

from absl import flags

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import hosts

APPLY_SECONDS = 120.0
"""Deadline for the cluster to take a manifest, in seconds."""

MEMORY = "64Gi"
"""Memory of a host without --memory, if the model's size is not known here."""

_BY_PLATFORM: dict[str, tuple[manifests.Accelerator, manifests.Accelerator]] = {
    "cuda": ("gpu", "gpu"),
    "tpu": ("tpu", "gpu"),
    "cpu": ("none", "none"),
}
"""Accelerators that train and that roll out, by config.trainer.platform."""

flags.mark_flag_as_required("config")
_KIND = flags.DEFINE_enum("kind", "rayjob", ["rayjob", "jobset"], "What to render.")
_NAME = flags.DEFINE_string("name", None, "Name of the object; default <config>-<hash of config>.")
_IMAGE = job_flags.image()
_REPOSITORY = flags.DEFINE_string("repository", "/libra-jax", "Folder of the repository in the image.")
_NAMESPACE = flags.DEFINE_string("namespace", "", "Namespace; default: that of kubectl's context.")
_SERVICE_ACCOUNT = flags.DEFINE_string("service_account", "", "Service account of the pods.")
_PULL_SECRET = flags.DEFINE_string("pull_secret", "", "Secret to pull the image with.")
_QUEUE = flags.DEFINE_string("queue", "", "Kueue's local queue.")
_CLAIM = flags.DEFINE_string("claim", "libra-jax-runs", "PersistentVolumeClaim that holds workdirs (ReadWriteMany).")
_STORAGE = flags.DEFINE_string("storage", "", "Size of the claim (100Gi), which is then made, too.")
_STORAGE_CLASS = flags.DEFINE_string("storage_class", "", "Storage class of a claim that is made.")
_MOUNT = flags.DEFINE_string("mount", "/runs", "Where the pods see the claim.")
_CPUS = job_flags.cpus_per_host("6 for each accelerator and 1 more; 1 for each part of a CPU")
_MEMORY = flags.DEFINE_string("memory", "", "Memory of a host; default: by the size of the model.")
_HEAD_CPUS = flags.DEFINE_string("head_cpus", "4", "CPUs of the head, where the driver and environments run.")
_HEAD_MEMORY = flags.DEFINE_string("head_memory", "16Gi", "Memory of the head.")
_SHARED_MEMORY = flags.DEFINE_string("shared_memory", "8Gi", "Of that, at most, in /dev/shm.")
_CPU_HOSTS = flags.DEFINE_integer("cpu_hosts", 0, "Further hosts without accelerators, for rewards.", lower_bound=0)
_TRAIN = flags.DEFINE_enum(
    "train_accelerator", None, ["gpu", "tpu", "none"], "Default: as config.trainer.platform says."
)
_ROLLOUT = flags.DEFINE_enum("rollout_accelerator", None, ["gpu", "tpu", "none"], "Default: gpu, or none on CPU.")
_TRAIN_SELECTOR = flags.DEFINE_list("train_selector", [], "Labels of nodes that train: key=value,key=value.")
_ROLLOUT_SELECTOR = flags.DEFINE_list("rollout_selector", [], "Labels of nodes that roll out.")
_TPU_TYPE = flags.DEFINE_string("tpu_type", "", "TPU of GKE's nodes (tpu-v5-lite-podslice).")
_TRAIN_TOPOLOGY = flags.DEFINE_string("train_topology", "", "Topology of a TPU slice that trains (4x4).")
_ROLLOUT_TOPOLOGY = flags.DEFINE_string("rollout_topology", "", "Topology of a TPU slice that rolls out (2x2).")
_ENVIRONMENT = job_flags.environment(" for all containers; no secrets")
_SECRET = flags.DEFINE_multi_string("secret", [], "NAME=SECRET/KEY: a variable from a key of a secret.")
_SECRETS_FROM = flags.DEFINE_list("secrets_from", [], "Secrets of which each key becomes a variable.")
_TOKEN_SECRET = flags.DEFINE_string(
    "ray_token_secret", "", "Secret with Ray's token at auth_token; else KubeRay makes one."
)
_GRACE = job_flags.grace()
_RETRIES = job_flags.retries("; in a JobSet, pods that are taken away do not count")
_RAY_VERSION = flags.DEFINE_string("ray_version", "", "In the image; default: the one installed here.")
_OUTPUT = job_flags.output()
flags.adopt_module_key_flags(job_flags)  # so that --help shows them


def main() -> None:
    run = job_flags.run()
    run.validate()
    job_flags.check_grace(_GRACE.value, run.config)
    job = _job(run, ["python", "launch/train.py", *run.arguments])
    text = rendering.dump(manifests.documents(job, _KIND.value))
    job_flags.show(text, _OUTPUT.value)
    if not job_flags.DRY_RUN.value:
        _apply(text, job.name)


def _job(run: job_flags.Run, command: Sequence[str]) -> manifests.Job:
    config, size = run.config, run.host_size()
    job_flags.check_image(_IMAGE.value, config.trainer.platform)
    groups = _groups(config)
    default = f"{config.name}-{config_lib.digest(config)}"
    name = re.sub(r"[^a-z0-9]+", "-", default.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    if len(name) > manifests.LONGEST_NAME:  # a long name loses its middle, not the hyphen and hash at its end
        name = name[: manifests.LONGEST_NAME - 9].rstrip("-") + name[-9:]
    environment, missing = job_flags.variables(
        _ENVIRONMENT.value, "put it in a secret of the cluster and give --secret={name}=SECRET/KEY"
    )
    if missing:
        raise protocols.ConfigError(
            f"--environment={missing[0]}: pods have none of your variables; give its value, too, or, where that is a "
            f"secret, --secret={missing[0]}=SECRET/KEY"
        )
    key, secrets = job_flags.telemetry_key(config), _secrets()
    if key and not ({key, "WANDB_MODE"} & {*environment, *secrets} or _SECRETS_FROM.value):
        raise protocols.ConfigError(
            f"config.telemetry.wandb_project: pods have no {key}; give --secret={key}=SECRET/KEY or --secrets_from, or "
            "--environment=WANDB_MODE=offline"
        )
    # What one pod has fetched from the hub serves all, and the next start.
    environment.setdefault("HF_HOME", str(PurePosixPath(_MOUNT.value) / "huggingface"))
    workdir = PurePosixPath(_MOUNT.value) / (job_flags.WORKDIR.value or default)
    if not workdir.is_relative_to(_MOUNT.value) or ".." in workdir.parts or str(workdir) == _MOUNT.value:
        raise protocols.ConfigError(
            f"--workdir={job_flags.WORKDIR.value}: must be a folder below --mount={_MOUNT.value}, the claim"
        )
    return manifests.Job(
        name=_NAME.value or name,
        image=_IMAGE.value,
        command=command,
        groups=groups,
        claim=_CLAIM.value,
        workdir=str(workdir),
        mount=_MOUNT.value,
        namespace=_NAMESPACE.value,
        service_account=_SERVICE_ACCOUNT.value,
        storage=_quantity("storage", _STORAGE.value) if _STORAGE.value else "",
        storage_class=_STORAGE_CLASS.value,
        cpus=str(_CPUS.value or size.cpus),
        head_cpus=_quantity("head_cpus", _HEAD_CPUS.value),
        memory=_quantity("memory", _MEMORY.value or (f"{size.memory_mib // 1024}Gi" if size.memory_mib else MEMORY)),
        head_memory=_quantity("head_memory", _HEAD_MEMORY.value),
        shared_memory=_quantity("shared_memory", _SHARED_MEMORY.value),
        grace=_GRACE.value,
        retries=_RETRIES.value,
        environment=environment,
        secrets=secrets,
        secrets_from=_SECRETS_FROM.value,
        token_secret=_TOKEN_SECRET.value,
        pull_secret=_PULL_SECRET.value,
        queue=_QUEUE.value,
        ray_version=_RAY_VERSION.value or metadata.version("ray"),
        repository=_REPOSITORY.value,
    )


def _groups(config: config_lib.RunConfig) -> list[manifests.Group]:
    layout = hosts.layout(config)
    if layout is None:
        raise protocols.ConfigError(
            "config.cluster.accelerators_per_host: is 0, so the run has no hosts to ask for; set it to what a host has"
        )
    platform = config.trainer.platform
    if platform not in _BY_PLATFORM and not (_TRAIN.value and _ROLLOUT.value):
        raise protocols.ConfigError(
            f"config.trainer.platform: {platform!r} does not say what hosts to ask for; set it to cuda, tpu or cpu, or "
            "give --train_accelerator and --rollout_accelerator"
        )
    defaults = _BY_PLATFORM.get(platform, ("none", "none"))
    train, rollout = _TRAIN.value or defaults[0], _ROLLOUT.value or defaults[1]
    if train != rollout:
        print(
            f"note: hosts that train have {train}, hosts that roll out {rollout}; the Ray backend still asks each host "
            "for the accelerators of config.trainer.platform, and will not place such a run",
            file=sys.stderr,
        )
    each = config.cluster.accelerators_per_host
    found = [
        _group("training", layout.of_role("training"), each, train),
        _group("rollout", layout.of_role("rollout"), each, rollout),
    ]
    return found + ([manifests.Group("cpu", _CPU_HOSTS.value)] if _CPU_HOSTS.value else [])


def _group(
    role: hosts.Role, members: Sequence[hosts.Host], each: int, accelerator: manifests.Accelerator
) -> manifests.Group:
    flag = "train" if role == "training" else "rollout"
    labels = _TRAIN_SELECTOR.value if role == "training" else _ROLLOUT_SELECTOR.value
    selector = dict(_pair(f"{flag}_selector", label, "key=value") for label in labels)
    if accelerator == "none":
        return manifests.Group(role, len(members), selector=selector)
    if accelerator == "gpu":
        most = max(host.accelerators for host in members)
        return manifests.Group(role, len(members), most, "gpu", selector)
    topology = _TRAIN_TOPOLOGY.value if role == "training" else _ROLLOUT_TOPOLOGY.value
    if not _TPU_TYPE.value or not re.fullmatch(r"\d+(x\d+){1,2}", topology):
        raise protocols.ConfigError(
            f"--tpu_type, --{flag}_topology: TPU hosts need both, as GKE labels its nodes (tpu-v5-lite-podslice, 4x4)"
        )
    chips = math.prod(map(int, topology.split("x")))
    of_slice = chips // each
    if chips % each or len(members) % of_slice:
        raise protocols.ConfigError(
            f"--{flag}_topology={topology}: a slice has {chips} chips, and the {len(members)} hosts of {role} with "
            f"{each} each (config.cluster.accelerators_per_host) are not a whole number of slices"
        )
    gke = {"cloud.google.com/gke-tpu-accelerator": _TPU_TYPE.value, "cloud.google.com/gke-tpu-topology": topology}
    return manifests.Group(role, len(members), each, "tpu", {**gke, **selector}, of_slice)


def _secrets() -> dict[str, tuple[str, str]]:
    found = {}
    for text in _SECRET.value:
        name, reference = _pair("secret", text, "NAME=SECRET/KEY", shown=False)
        matched = re.fullmatch(r"([a-z0-9][-.a-z0-9]*)/([-._\w]+)", reference)
        if matched is None:
            raise protocols.ConfigError(
                f"--secret: what follows {name}= must name a secret of the cluster and a key in it, SECRET/KEY, never "
                "the value"
            )
        found[name] = (matched[1], matched[2])
    return found


def _pair(flag: str, text: str, form: str, shown: bool = True) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise protocols.ConfigError(f"--{flag}{f'={text}' if shown else ''}: must have the form {form}")
    return name, value


def _quantity(flag: str, text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?(m|k|[KMGTPE]i?)?", text):
        raise protocols.ConfigError(f"--{flag}={text}: is no quantity of Kubernetes, like 8, 500m or 64Gi")
    return text


def _apply(text: str, name: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise protocols.DataError(
            "there is no kubectl on the PATH; install it, or give --dry_run and apply what is printed later"
        )
    try:
        done = subprocess.run(
            [kubectl, "apply", "-f", "-"],
            input=text,
            capture_output=True,
            text=True,
            timeout=APPLY_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise protocols.LibraError(
            f"kubectl had no answer from the cluster within {APPLY_SECONDS:g} s; see kubectl cluster-info"
        ) from None
    if done.returncode:
        raise protocols.LibraError(f"kubectl refused it: {' '.join(done.stderr.split())}")
    print(done.stdout, end="")
    if done.stdout.rstrip().endswith("unchanged"):
        print(
            f"{_KIND.value} {name} exists already: to start it again, first kubectl delete {_KIND.value} {name} "
            "(its workdir stays, and the run goes on from there)",
            file=sys.stderr,
        )


cli.run(main, needs_config=True)
