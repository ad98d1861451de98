"""A real Slurm of one node (munged, slurmctld and slurmd of Debian's packages) on this machine, for as long as a test.

Everything it has lies in one folder: key, socket, state, spool and logs; its ports are free ones, and it heeds no Slurm
that the machine may have. It runs as root, without cgroups or accounting. Beside its node it knows hosts with GPUs that
are down: jobs for those are taken, checked and never start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
START_SECONDS, END_SECONDS, COMMAND_SECONDS, LOOK_SECONDS = 60.0, 20.0, 30.0, 0.2
CPUS = 4
"""That Slurm is told: two runs have to fit at once, however small the machine is."""

CONF = """\
ClusterName=test
SlurmctldHost={node}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
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
NodeName={node} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
NodeName=train[1-4],roll[1-8] NodeAddr=127.0.0.1 Port={nobody} CPUs=64 Gres=gpu:8 State=DOWN
PartitionName=main Nodes={node} Default=YES MaxTime=60 State=UP
PartitionName=train Nodes=train[1-4] State=UP
PartitionName=rollout Nodes=roll[1-8] State=UP
"""
"""`cred_expire` is what a requeued job waits for, 120 s unless told."""


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

    def jobs(self) -> list[str]:
        """Those that have not ended."""
        return self.run("squeue", "--noheader", "--format=%A").split()


def missing() -> list[str]:
    """What this machine lacks of what is needed; empty: it has all."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return lacking + ([] if os.geteuid() == 0 else ["to be root"])


@contextlib.contextmanager
def running() -> Iterator[Slurm]:
    """Starts one. At the end its jobs are cancelled, its daemons reaped and its folder removed."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)  # munge refuses a socket that others could not reach
    munge, daemons = folder / "munge", contextlib.ExitStack()
    slurm = Slurm(folder, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()})
    try:
        with daemons:
            _configure(folder)
            files = [f"--{kind}-file={munge / kind}" for kind in ("key", "log", "pid", "seed")]
            munged = ["munged", "--foreground", "--force", *files, f"--socket={munge / 'socket'}"]
            daemons.enter_context(_daemon(slurm, *munged, until=(munge / "socket").exists))
            daemons.enter_context(_daemon(slurm, "slurmctld", "-D", "-i", until=lambda: _succeeds(slurm, "sinfo")))
            daemons.enter_context(
                _daemon(slurm, "slurmd", "-D", until=lambda: "idle" in slurm.run("sinfo", "-p", "main"))
            )
            daemons.callback(_cancel_all, slurm)
            yield slurm
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Returns when the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds:g} s"
        time.sleep(LOOK_SECONDS)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])


def _configure(folder: Path) -> None:
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    with contextlib.ExitStack() as held:
        ports = [held.enter_context(contextlib.closing(socket.create_server(("", 0)))) for _ in range(3)]
        controller, daemon, nobody = (port.getsockname()[1] for port in ports)
    node = socket.gethostname().split(".")[0]
    text = CONF.format(node=node, folder=folder, controller=controller, daemon=daemon, nobody=nobody, cpus=CPUS)
    (folder / "slurm.conf").write_text(text)


@contextlib.contextmanager
def _daemon(slurm: Slurm, *command: str, until: Callable[[], bool]) -> Iterator[None]:
    """A daemon, with what it starts, from when it answers to its end."""
    said = slurm.folder / f"{command[0]}.out"
    with open(said, "wb") as out:
        process = subprocess.Popen(
            command, env=slurm.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=slurm.folder
        )
    try:

        def ready() -> bool:
            assert process.poll() is None, f"{command[0]} ended: {said.read_text()[-2000:]}"
            return until()

        wait_for(ready, START_SECONDS, f"answer of {command[0]} ({said})")
        yield
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.terminate()
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
