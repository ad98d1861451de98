"""Describes a run as a Slurm job: the launcher's settings, the hosts it asks for, and its script, rendered from
`templates/slurm.sbatch`."""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import host_sizes, job_flags, rendering

from libra_jax.cluster import resolved_run
from libra_jax.protocols import ConfigError

EXPORTED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER")
"""Variables of the submitting shell that a job gets, besides those that --environment names."""

_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")

_PASSED_ON = ("account", "qos", "constraint", "exclude")
"""Settings that sbatch takes under the same name, for every kind of host."""


def _flag(help_text: str, default: Any = "") -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags of launch/slurm.py. Those with a help text are its own, the others those of `job_flags`.

    An empty value means that a flag is not given.
    """

    partition: str = _flag("Partition of all hosts; default: Slurm's own.")
    train_partition: str = _flag("Partition of the hosts that train; with --rollout_partition.")
    rollout_partition: str = _flag("Partition of the hosts that roll out.")
    time: str = _flag("Longest time, as Slurm writes it: 90 (minutes), 12:00:00, 2-00:00:00.")
    account: str = _flag("Account to charge.")
    qos: str = _flag("Quality of service.")
    constraint: str = _flag("Features that hosts must have.")
    nodelist: str = _flag("Hosts to take.")
    exclude: str = _flag("Hosts to leave out.")
    sbatch: Sequence[str] = _flag("Another option of sbatch, like --sbatch=--reservation=mine; may be repeated.", ())
    memory: str = _flag("Memory of each host, like 64G; default: by the model's size. 0: all.")
    exclusive: bool = _flag("Take whole hosts, which no other job shares.", False)
    requeue: bool = _flag("Queue up again after a pre-emption, a lost host, or the end of the time.", True)
    container_mounts: str = _flag("What pyxis mounts there, as SOURCE:TARGET,...")
    python: str = _flag("Python of the hosts; default: this one, and in a container python3.")
    cpus_per_host: int = 0
    grace: int = 120
    retries: int = 3
    environment: Sequence[str] = ()
    image: str = ""
    setup: str = ""


@dataclasses.dataclass(frozen=True)
class HostGroup:
    """Hosts of one kind, which are one part of a heterogeneous job.

    Attributes:
      partition: their partition; empty is Slurm's default.
      hosts: their number.
      gpus: GPUs of each host.
      comment: their task.
    """

    partition: str
    hosts: int
    gpus: int
    comment: str

    def options(self, settings: Settings, amounts: Mapping[str, object]) -> list[str]:
        """Returns the options for sbatch, with `amounts` of CPUs and memory."""
        values = {
            "partition": self.partition,
            "nodes": self.hosts,
            "ntasks-per-node": 1,
            **amounts,
            "gpus-per-node": self.gpus,
            "time": settings.time,
            "nodelist": settings.nodelist,
            **{name: getattr(settings, name) for name in _PASSED_ON},
        }
        options = [f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value]
        return [*options, *(["--exclusive"] if settings.exclusive else []), *settings.sbatch]


def script(
    run: resolved_run.ResolvedRun,
    settings: Settings,
    *,
    arguments: Sequence[str],
    folder: Path,
    workdir: Path,
    known: Mapping[str, str],
    size: host_sizes.HostSize | None = None,
    partitions: Mapping[str, Partition] | None = None,
    launch: Path = Path(__file__).parents[1],
) -> str:
    """Returns the job's script.

    Args:
      run: the run, whose cluster is the job's Ray.
      settings: the launcher's flags.
      arguments: arguments of launch/train.py, without the workdir.
      folder: folder that the job is submitted from.
      workdir: folder of the run.
      known: environment of the submitting shell.
      size: estimate of what each host needs; None asks for nothing.
      partitions: Slurm's partitions from `read_partitions`; None if they are not known here.
      launch: folder of the launch scripts.

    Raises:
      ConfigError: a setting is wrong, or conflicts with another setting or the config; the sentence names the flag.
    """
    _check(run, settings)
    advice = "give --environment={name} alone, and it comes from the environment that you submit from"
    environment, names = job_flags.variables(settings.environment, advice)
    for name in names:
        if name not in known:
            raise ConfigError(f"--environment={name}: is not set where you submit from; set it, or give {name}=VALUE")
    mounts = [f"--container-mounts={settings.container_mounts}"] if settings.container_mounts else []
    groups = host_groups(run, settings)
    for group in groups if partitions else ():
        _check_partition(group, partitions or {})
    parts = [(group, group.options(settings, amounts(settings, size, partitions, group.partition))) for group in groups]
    return rendering.shell(
        "slurm.sbatch",
        name=run.config.name,
        settings=settings,
        parts=parts,
        hosts=sum(group.hosts for group in groups),
        folder=folder,
        workdir=workdir,
        launch=launch,
        arguments=arguments,
        export=(*EXPORTED, *(name for name in names if name not in EXPORTED)),
        environment=environment,
        container=[f"--container-image={settings.image}", *mounts] if settings.image else [],
    )


def host_groups(run: resolved_run.ResolvedRun, settings: Settings) -> list[HostGroup]:
    """Returns the hosts by partition. Training hosts come first, because the driver runs on the first host."""
    layout = run.layout
    on_gpus = run.config.trainer.platform == "cuda"
    if layout is None:
        gpus = run.partition.total if on_gpus else 0
        return [HostGroup(settings.partition, 1, gpus, "one host trains and rolls out")]
    divided = [(settings.partition, layout.hosts)]
    if settings.train_partition:
        divided = [
            (settings.train_partition, layout.of_role("training")),
            (settings.rollout_partition, layout.of_role("rollout")),
        ]
    groups = []
    for partition, members in divided:
        counts = {"train": layout.of_role("training"), "roll out": layout.of_role("rollout")}
        tasks = [(sum(host in members for host in of_role), task) for task, of_role in counts.items()]
        comment = ", ".join(f"{count} host{'s' * (count > 1)} to {task}" for count, task in tasks if count)
        gpus = max(host.accelerators for host in members) if on_gpus else 0
        groups.append(HostGroup(partition, len(members), gpus, comment))
    return groups


def amounts(
    settings: Settings,
    size: host_sizes.HostSize | None,
    partitions: Mapping[str, Partition] | None,
    partition: str,
) -> dict[str, object]:
    """Returns the options for the CPUs and the memory of a host. Slurm's own default is one core, and often little
    memory. An estimate never exceeds what the partition's hosts have.

    Slurm takes a host whose memory no one has configured for one of 1 MiB and refuses every request, so there is none.
    """
    cpus, memory = settings.cpus_per_host, settings.memory
    if size is not None:
        there = (partitions or {}).get(partition)
        limit = there.least if there else None
        if not settings.exclusive:
            cpus = cpus or min(size.cpus, (limit and limit.cpus) or size.cpus)
        if not memory and size.memory_mib:
            mib = size.memory_mib if limit is None else min(size.memory_mib, limit.memory_mib)
            memory = "0" if settings.exclusive else f"{mib}M" if mib else ""
    options = " ".join(settings.sbatch)
    return {
        "cpus-per-task": "" if re.search(r"--cpus-per-task|(^| )-c", options) else cpus,
        "mem": "" if "--mem" in options else memory,
    }


def _check(run: resolved_run.ResolvedRun, settings: Settings) -> None:
    config = run.config
    if config.trainer.platform == "tpu":
        raise ConfigError("config.trainer.platform: tpu is for launch/tpu.py; Slurm's hosts have GPUs or none")
    if settings.time and seconds(settings.time) <= settings.grace:
        raise ConfigError(
            f"--grace={settings.grace}: seconds before the end at which the run is told to stop, and --time="
            f"{settings.time} is not longer; lower it, or give the job more time"
        )
    job_flags.check_grace(settings.grace, config)
    advice = "give the NAME of a variable that you have set by --environment"
    passed_on = [(name, getattr(settings, name)) for name in _PASSED_ON]
    for flag, text in [("setup", settings.setup), *passed_on, *(("sbatch", option) for option in settings.sbatch)]:
        job_flags.check_text(flag, text, advice)
    if bool(settings.train_partition) != bool(settings.rollout_partition):
        raise ConfigError("--train_partition and --rollout_partition go together; for one, give --partition")
    if settings.train_partition:
        for flag, value in (("partition", settings.partition), ("nodelist", settings.nodelist)):
            if value:
                raise ConfigError(f"--{flag}={value}: does not go with --train_partition and --rollout_partition")
        if run.layout is None:
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


def _check_partition(group: HostGroup, partitions: Mapping[str, Partition]) -> None:
    """Raises ConfigError if Slurm has no such partition, or if it is too small."""
    if group.partition in partitions:
        partitions[group.partition].check(group)
    elif group.partition:
        names = sorted(filter(None, partitions))
        near = difflib.get_close_matches(group.partition, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none that you may use'}"
        raise ConfigError(f"--partition: Slurm has no partition {group.partition!r}; {hint}")


_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(?:(\d+):)??(\d+)(?::(\d+))?)")


def seconds(time: str) -> int:
    """Returns the seconds of a time as Slurm writes it.

    Raises:
      ConfigError: it is none.

    >>> [seconds(text) for text in ("90", "1:30", "2:00:00", "1-0", "1-2:30")]
    [5400, 90, 7200, 86400, 95400]
    """
    match = _TIME.fullmatch(time)
    if match is None:
        raise ConfigError(
            f"--time={time}: is no time of Slurm's; write minutes, hours:minutes:seconds or "
            "days-hours:minutes:seconds, like 90, 12:00:00 or 2-00:00:00"
        )
    days, day_hours, day_minutes, day_seconds, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + day_hours + hours) * 60 + day_minutes + minutes) * 60 + day_seconds + rest


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partition of Slurm's.

    Attributes:
      name: its name.
      nodes: (number of nodes, GPUs of each) for each kind of node.
      least: CPUs and memory of its smallest node, 0 if no one has configured them.
    """

    name: str
    nodes: tuple[tuple[int, int], ...]
    least: host_sizes.HostSize

    def check(self, group: HostGroup) -> None:
        """Raises ConfigError if it has too few nodes with enough GPUs. sbatch would let such a job wait for ever."""
        most = max(gpus for _, gpus in self.nodes)
        if group.gpus > most:
            raise ConfigError(
                f"config.cluster.accelerators_per_host: a host is asked for {group.gpus} GPUs, and those of "
                f"partition {self.name!r} have at most {most}; lay the run out by what a host has"
            )
        nodes = sum(count for count, gpus in self.nodes if gpus >= group.gpus)
        if group.hosts > nodes:
            condition = f" with {group.gpus} GPUs" if group.gpus else ""
            raise ConfigError(
                f"--partition: the run takes {group.hosts} host{'s' * (group.hosts > 1)} ({group.comment}), and "
                f"partition {self.name!r} has {nodes}{condition}; take a smaller run, or another partition"
            )


def read_partitions(output: str) -> dict[str, Partition]:
    """Reads the output of `sinfo --noheader --format=%P|%D|%G|%c|%m`: a line for each kind of node of a partition.

    Returns:
      The partitions by name. "" is the default one.
    """
    partitions: dict[str, Partition] = {}
    for line in output.split():
        name, count, gres, cpus, memory = line.split("|")
        node = int(count), sum(map(int, _GPUS.findall(gres)))
        # A plus sign follows the least of several; a node whose memory no one has configured has 1 MiB.
        mib = int(memory.rstrip("+"))
        size = host_sizes.HostSize(int(cpus.rstrip("+")), mib if mib > 1 else 0)
        plain = name.rstrip("*")
        for key in dict.fromkeys((plain, "" if name.endswith("*") else plain)):  # an asterisk marks the default one
            before = partitions.get(key, Partition(plain, (), size))
            least = host_sizes.HostSize(
                min(before.least.cpus, size.cpus), min(before.least.memory_mib, size.memory_mib)
            )
            partitions[key] = Partition(plain, (*before.nodes, node), least)
    return partitions
