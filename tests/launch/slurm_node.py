"""A real Slurm (munged, slurmctld and slurmd of Debian's packages) on this machine, for as long as a test.

Everything it has lies in one folder: key, socket, state, spool and logs; its ports are free ones, and it heeds no Slurm
that the machine may have. It runs as root and without accounting, and tracks processes by cgroups, which is Slurm's
default, where this machine lets it; emulated hosts do not. Its node is this machine, and it knows hosts with GPUs that
are down: jobs for those are taken, checked and never start. Or its nodes are emulated hosts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from tests.drills import network_hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
START_SECONDS, END_SECONDS, COMMAND_SECONDS, LOOK_SECONDS = 60.0, 20.0, 30.0, 0.2
CPUS = 12
"""That Slurm is told: six jobs have to fit at once, however small the machine is."""

CONF = """\
ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{tracks}
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
KillWait=10
GresTypes=gpu
{nodes}
PartitionName=main Nodes={mine} Default=YES MaxTime=60 State=UP
PartitionName=train Nodes={train} State=UP
PartitionName=rollout Nodes={rollout} State=UP
"""
"""`cred_expire` is what a requeued job waits for, 120 s unless told."""

CGROUPS = Path("/sys/fs/cgroup")
CGROUP = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={CGROUPS}\nCgroupAutomount=no\n"

DOWN = "NodeName=train[1-4],roll[1-8] NodeAddr=127.0.0.1 Port={port} CPUs=64 Gres=gpu:8 State=DOWN"


@dataclasses.dataclass(frozen=True)
class Slurm:
    """A running one.

    Attributes:
      folder: of everything it has.
      environment: variables by which its commands find it.
    """

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        """A command's output; it has to succeed."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
        return done.stdout

    def field(self, job: str, name: str) -> str:
        """One of the fields that `scontrol show job` tells, like JobState."""
        shown = self.run("scontrol", "show", "job", job, "--oneliner")
        return next(part.split("=", 1)[1] for part in shown.split() if part.startswith(f"{name}="))

    def is_idle(self, node: str) -> bool:
        """Whether a node is there, and has no job."""
        return self.run("sinfo", "--noheader", f"--nodes={node}", "--format=%t").split()[:1] == ["idle"]

    def jobs(self) -> list[str]:
        """Those that have not ended."""
        return self.run("squeue", "--noheader", "--format=%A").split()


def missing() -> list[str]:
    """What this machine lacks of what is needed; empty: it has all."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return lacking + ([] if os.geteuid() == 0 else ["to be root"])


def tracks_by_cgroups() -> bool:
    """Whether a Slurm of this machine's own node can: then a signal to a step reaches only what the step started."""
    tried = CGROUPS / "freezer" / f"libra-{os.getpid()}"
    try:
        tried.mkdir()
        tried.rmdir()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def running(hosts: int = 0) -> Iterator[Slurm]:
    """Starts one. At the end its jobs are cancelled, its daemons reaped and its folder removed.

    Args:
      hosts: to emulate, at least two: the last one is the partition `train`, the others are `rollout`. 0: none.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)  # munge refuses a socket that others could not reach
    munge, made = folder / "munge", contextlib.ExitStack()
    slurm = Slurm(folder, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()})

    def start(name: str, command: Sequence[str], until: Callable[[], bool], end: signal.Signals) -> None:
        made.enter_context(_daemon(slurm, name, command, until, end))

    try:
        with made:
            address, emulated = made.enter_context(network_hosts.running(folder, hosts)) if hosts else ("", [])
            _configure(folder, address, emulated)
            files = [f"--{kind}-file={munge / kind}" for kind in ("key", "log", "pid", "seed")]
            munged = ["munged", "--foreground", "--force", *files, f"--socket={munge / 'socket'}"]
            start("munged", munged, (munge / "socket").exists, signal.SIGTERM)
            start("slurmctld", ["slurmctld", "-D", "-i"], lambda: _succeeds(slurm, "sinfo"), signal.SIGTERM)
            for host in emulated:
                command = host.command("slurmd", "-D", "-N", host.name)
                start(host.name, command, lambda name=host.name: slurm.is_idle(name), signal.SIGKILL)
            if not emulated:
                start("slurmd", ["slurmd", "-D"], lambda: slurm.is_idle(_this()), signal.SIGTERM)
            made.callback(_cancel_all, slurm)
            yield slurm
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        ours = CGROUPS / "freezer" / f"slurm_{_this()}"
        for group in sorted([ours, *ours.rglob("*/")], reverse=True):  # those within first
            with contextlib.suppress(OSError):  # another Slurm's
                group.rmdir()


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Returns when the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds:g} s"
        time.sleep(LOOK_SECONDS)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])


def _this() -> str:
    return socket.gethostname().split(".")[0]


def _configure(folder: Path, address: str, emulated: Sequence[network_hosts.Host]) -> None:
    for name in ("munge", "state"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    with contextlib.ExitStack() as held:
        free = [held.enter_context(contextlib.closing(socket.create_server(("", 0)))) for _ in range(3)]
        ports = [port.getsockname()[1] for port in free]
    here = [(_this(), "127.0.0.1")]
    mine = [(host.name, host.address) for host in emulated] or here
    nodes = [f"NodeName={name} NodeAddr={where} CPUs={CPUS} State=UNKNOWN" for name, where in mine]
    names = [name for name, _ in mine]
    text = CONF.format(
        folder=folder,
        controller=_this(),
        address=address or "127.0.0.1",
        ports=ports,
        nodes="\n".join(nodes if emulated else [*nodes, DOWN.format(port=ports[2])]),
        mine=",".join(names),
        train=names[-1] if emulated else "train[1-4]",
        rollout=",".join(names[:-1]) if emulated else "roll[1-8]",
        tracks="cgroup" if tracks_by_cgroups() and not emulated else "linuxproc",
    )
    (folder / "cgroup.conf").write_text(CGROUP)
    (folder / "slurm.conf").write_text(text)


@contextlib.contextmanager
def _daemon(
    slurm: Slurm, name: str, command: Sequence[str], until: Callable[[], bool], end: signal.Signals
) -> Iterator[None]:
    """A daemon, with what it starts, from when it answers to its end."""
    said = slurm.folder / f"{name}.out"
    with open(said, "wb") as out:
        process = subprocess.Popen(
            command, env=slurm.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=slurm.folder
        )
    try:

        def ready() -> bool:
            assert process.poll() is None, f"{name} ended: {said.read_text()[-2000:]}"
            return until()

        wait_for(ready, START_SECONDS, f"answer of {name} ({said})")
        yield
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(end)
        _, alive = psutil.wait_procs(family, timeout=END_SECONDS)
        for left in alive:
            left.kill()
        process.wait(END_SECONDS)


def _succeeds(slurm: Slurm, *command: str) -> bool:
    done = subprocess.run(command, env=slurm.environment, capture_output=True, timeout=COMMAND_SECONDS, check=False)
    return done.returncode == 0


def _cancel_all(slurm: Slurm) -> None:
    if slurm.jobs():
        slurm.run("scancel", "--user=root")
        wait_for(lambda: not slurm.jobs(), END_SECONDS + 15.0, "end of the cancelled jobs")
