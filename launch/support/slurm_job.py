"""Describes a run as a Slurm job: the hosts that it asks for, and its script, rendered from
`templates/slurm.sbatch`."""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from support import host_sizes, job_flags, rendering

from libra_jax import config as config_lib
from libra_jax.cluster import hosts, placement
from libra_jax.protocols import ConfigError

EXPORTED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER")
"""Variables of the submitting shell that a job gets, beside those that --environment names."""

_TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+|\d+-\d+:\d+|\d+-\d+:\d+:\d+")
_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The launcher's flags; an empty value means that the flag was not given.

    Attributes:
      partition: partition of all hosts.
      train_partition: partition of the hosts that train; with `rollout_partition`.
      rollout_partition: partition of the hosts that roll out.
      time: longest time, as Slurm writes it.
      options: further options for sbatch, for every kind of host.
      nodelist: hosts to take.
      cpus_per_host: cores of each host; 0 takes the estimate, or all cores of `exclusive` hosts.
      memory: memory of each host as Slurm writes it; empty takes the estimate, or all memory of `exclusive` hosts.
      exclusive: no other job may share the hosts.
      requeue: the job goes on after a pre-emption or the end of its time.
      grace: seconds between the signal to stop and the end.
      retries: times that the job goes on after it lost a host that it needs.
      environment: `NAME=VALUE`, or `NAME` of a variable of the submitting shell.
      image: container image in which pyxis runs each host's part.
      container_mounts: folders that pyxis mounts in the container.
      setup: shell line before the run on each host.
      python: Python of every host.
    """

    partition: str = ""
    train_partition: str = ""
    rollout_partition: str = ""
    time: str = ""
    options: tuple[str, ...] = ()
    nodelist: str = ""
    cpus_per_host: int = 0
    memory: str = ""
    exclusive: bool = False
    requeue: bool = True
    grace: int = 120
    retries: int = 3
    environment: tuple[str, ...] = ()
    image: str = ""
    container_mounts: str = ""
    setup: str = ""
    python: str = "python3"


@dataclasses.dataclass(frozen=True)
class Part:
    """Hosts of one kind.

    Attributes:
      partition: their partition; empty is Slurm's default.
      hosts: their number.
      gpus: GPUs of each host.
      comment: their task.
      options: options for sbatch.
    """

    partition: str
    hosts: int
    gpus: int
    comment: str
    options: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Job:
    """The values of the template, which shows the use of each."""

    name: str
    folder: str
    workdir: str
    launch: str
    arguments: tuple[str, ...]
    export: tuple[str, ...]
    environment: Mapping[str, str]
    container: tuple[str, ...]
    parts: tuple[Part, ...]
    settings: Settings

    @property
    def title(self) -> str:
        """Tasks of the hosts."""
        return "; ".join(part.comment for part in self.parts)

    @property
    def hosts(self) -> int:
        """Number of all hosts."""
        return sum(part.hosts for part in self.parts)


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partition of Slurm's.

    Attributes:
      name: its name.
      nodes: (number of nodes, GPUs of each) for each kind of node.
      is_default: a job that names no partition gets this one.
      cpus: CPUs of its smallest node; 0 if Slurm does not say.
      memory_mib: MiB of memory of that node; 0 if Slurm does not say.
    """

    name: str
    nodes: tuple[tuple[int, int], ...]
    is_default: bool = False
    cpus: int = 0
    memory_mib: int = 0


def make(
    config: config_lib.RunConfig,
    settings: Settings,
    *,
    arguments: Sequence[str],
    folder: Path,
    workdir: Path,
    known: Mapping[str, str],
    size: host_sizes.HostSize | None = None,
    there: Sequence[Partition] = (),
) -> Job:
    """Returns the job of a run.

    Args:
      config: the run's configuration, whose cluster is the job's Ray.
      settings: the launcher's flags.
      arguments: arguments of launch/train.py, without the workdir.
      folder: folder that the job is submitted from.
      workdir: folder of the run.
      known: environment of the submitting shell.
      size: estimate of what each host needs; None asks for nothing.
      there: Slurm's partitions; empty if they are not known here.

    Raises:
      ConfigError: a setting is wrong, or conflicts with another setting or the config; the sentence names the flag.
    """
    _check(config, settings)
    instead = "give --environment={name} alone, and it comes from the environment that you submit from"
    environment, names = job_flags.variables(settings.environment, instead)
    for name in names:
        if name not in known:
            raise ConfigError(f"--environment={name}: is not set where you submit from; set it, or give {name}=VALUE")
    mounts = [f"--container-mounts={settings.container_mounts}"] if settings.container_mounts else []
    return Job(
        name=config.name,
        folder=str(folder),
        workdir=str(workdir),
        launch=str(Path(__file__).parents[1]),
        arguments=tuple(arguments),
        export=(*EXPORTED, *(name for name in names if name not in EXPORTED)),
        environment=environment,
        container=(f"--container-image={settings.image}", *mounts) if settings.image else (),
        parts=parts(config, settings, size, there),
        settings=settings,
    )


def render(job: Job) -> str:
    """Returns the job's script."""
    return rendering.shell("slurm.sbatch", job=job)


def parts(
    config: config_lib.RunConfig,
    settings: Settings,
    size: host_sizes.HostSize | None = None,
    there: Sequence[Partition] = (),
) -> tuple[Part, ...]:
    """Returns the hosts by kind. Training hosts come first, because the driver runs on the first host. One partition
    is one kind."""
    layout = hosts.layout(config)
    on_gpus = config.trainer.platform == "cuda"
    if layout is None:
        total = placement.partition(config).total
        found = [Part(settings.partition, 1, total if on_gpus else 0, "one host trains and rolls out")]
    elif settings.train_partition:
        found = [
            _part(layout.of_role("training"), settings.train_partition, on_gpus),
            _part(layout.of_role("rollout"), settings.rollout_partition, on_gpus),
        ]
    else:
        found = [_part(layout.hosts, settings.partition, on_gpus)]
    made = []
    for part in found:
        given = {
            "--partition": part.partition,
            "--nodes": part.hosts,
            "--ntasks-per-node": 1,
            **_amounts(settings, size, _partition(there, part.partition)),
            "--gpus-per-node": part.gpus,
            "--time": settings.time,
            "--nodelist": settings.nodelist,
        }
        options = [f"{name}={shlex.quote(str(value))}" for name, value in given.items() if value]
        options += ["--exclusive"] if settings.exclusive else []
        made.append(dataclasses.replace(part, options=(*options, *settings.options)))
    return tuple(made)


def _amounts(settings: Settings, size: host_sizes.HostSize | None, there: Partition | None) -> dict[str, object]:
    """Returns the options for the CPUs and the memory of a host. Slurm's own default is one core, and often little
    memory. An estimate never exceeds what the partition's hosts have.

    Slurm takes a host whose memory nobody has configured for one of 1 MiB and refuses every request, so there is none.
    """
    cpus, memory = settings.cpus_per_host, settings.memory
    if size is not None:
        mib = 1024 * size.memory_gib
        if not settings.exclusive:
            cpus = cpus or min(size.cpus, (there and there.cpus) or size.cpus)
        if not memory and mib:
            limit = mib if there is None else min(mib, there.memory_mib)
            memory = "0" if settings.exclusive else f"{limit}M" if limit else ""
    given = " ".join(settings.options)
    return {
        "--cpus-per-task": "" if re.search(r"--cpus-per-task|(^| )-c", given) else cpus,
        "--mem": "" if "--mem" in given else memory,
    }


def _partition(there: Sequence[Partition], name: str) -> Partition | None:
    """Returns the partition of this name, or the default one if the name is empty; None if it is not known."""
    return next((one for one in there if one.name == name or (not name and one.is_default)), None)


def _part(of: Sequence[hosts.Host], partition: str, on_gpus: bool) -> Part:
    kinds = {role: sum(host.role == role for host in of) for role in ("training", "rollout")}
    says = {"training": "train", "rollout": "roll out"}
    comment = ", ".join(f"{count} host{'s' * (count > 1)} to {says[role]}" for role, count in kinds.items() if count)
    return Part(partition, len(of), max(host.accelerators for host in of) if on_gpus else 0, comment)


def _check(config: config_lib.RunConfig, settings: Settings) -> None:
    if config.trainer.platform == "tpu":
        raise ConfigError("config.trainer.platform: tpu is for launch/tpu.py; Slurm's hosts have GPUs or none")
    if settings.time and not _TIME.fullmatch(settings.time):
        raise ConfigError(
            f"--time={settings.time}: is no time of Slurm's; write minutes, hours:minutes:seconds or "
            "days-hours:minutes:seconds, like 90, 12:00:00 or 2-00:00:00"
        )
    if settings.time and seconds(settings.time) <= settings.grace:
        raise ConfigError(
            f"--grace={settings.grace}: seconds before the end at which the run is told to stop, and --time="
            f"{settings.time} is not longer; lower it, or give the job more time"
        )
    job_flags.check_grace(settings.grace, config)
    instead = "give the NAME of a variable that you have set by --environment"
    for flag, text in (("setup", settings.setup), *(("sbatch", option) for option in settings.options)):
        job_flags.check_text(flag, text, instead)
    if bool(settings.train_partition) != bool(settings.rollout_partition):
        raise ConfigError("--train_partition and --rollout_partition go together; for one, give --partition")
    if settings.train_partition:
        for flag, value in (("partition", settings.partition), ("nodelist", settings.nodelist)):
            if value:
                raise ConfigError(f"--{flag}={value}: does not go with --train_partition and --rollout_partition")
        if hosts.layout(config) is None:
            raise ConfigError(
                "config.cluster.accelerators_per_host: is 0, which puts the whole run on one host; two partitions need "
                "to know how many accelerators a host has"
            )
    if settings.container_mounts and not settings.image:
        raise ConfigError("--container_mounts: are those of a container; give --image, too")
    if settings.requeue and not config.checkpoint.every:
        raise ConfigError(
            "config.checkpoint.every: is 0, so that a run that was pre-empted would begin again at its first step; "
            "set it, or give --norequeue"
        )


def seconds(time: str) -> int:
    """Returns the seconds of a time as Slurm writes it.

    >>> [seconds(text) for text in ("90", "1:30", "2:00:00", "1-0", "1-2:30")]
    [5400, 90, 7200, 86400, 95400]
    """
    days, dash, rest = time.rpartition("-")
    fields = [int(field) for field in rest.split(":")]
    if dash:  # days come with hours first
        fields = [*fields, 0, 0][:3]
    elif len(fields) == 1:  # a single number is minutes
        fields = [0, *fields, 0]
    fields = [0] * (3 - len(fields)) + fields
    return ((int(days or 0) * 24 + fields[0]) * 60 + fields[1]) * 60 + fields[2]


def parse_partitions(shown: str) -> tuple[Partition, ...]:
    """Reads the output of `sinfo --noheader --format=%P|%D|%G|%c|%m`: a line for each kind of node of a partition."""
    found: dict[str, list[tuple[int, int]]] = {}
    sizes: dict[str, list[tuple[int, int]]] = {}
    default = ""
    for line in shown.split():
        name, count, gres, cpus, memory = (*line.split("|"), "0", "0")[:5]
        # sinfo marks the default partition with an asterisk.
        if name.endswith("*"):
            default = name = name[:-1]
        found.setdefault(name, []).append((int(count), sum(map(int, _GPUS.findall(gres)))))
        # A plus sign follows the least of several; a node whose memory nobody has configured has 1 MiB.
        mib = int(memory.rstrip("+"))
        sizes.setdefault(name, []).append((int(cpus.rstrip("+")), mib if mib > 1 else 0))
    return tuple(
        Partition(name, tuple(nodes), name == default, *(min(column) for column in zip(*sizes[name], strict=True)))
        for name, nodes in found.items()
    )


def check_partitions(asked: Sequence[Part], there: Sequence[Partition]) -> None:
    """Compares the requested hosts with Slurm's partitions.

    Raises:
      ConfigError: there is no such partition, or it has too few nodes with enough GPUs.
    """
    for part in asked:
        named = [one for one in there if one.name == part.partition or (not part.partition and one.is_default)]
        if not named and part.partition:
            names = [one.name for one in there]
            near = difflib.get_close_matches(part.partition, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none that you may use'}"
            raise ConfigError(f"--partition: Slurm has no partition {part.partition!r}; {hint}")
        for one in named:
            nodes, most = sum(count for count, gpus in one.nodes if gpus >= part.gpus), max(g for _, g in one.nodes)
            if part.gpus > most:
                raise ConfigError(
                    f"config.cluster.accelerators_per_host: a host is asked for {part.gpus} GPUs, and those of "
                    f"partition {one.name!r} have at most {most}; lay the run out by what a host has"
                )
            if part.hosts > nodes:
                which = f" with {part.gpus} GPUs" if part.gpus else ""
                raise ConfigError(
                    f"--partition: the run takes {part.hosts} host{'s' * (part.hosts > 1)} ({part.comment}), and "
                    f"partition {one.name!r} has {nodes}{which}; take a smaller run, or another partition"
                )
