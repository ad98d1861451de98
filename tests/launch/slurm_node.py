"""A real Slurm of one node (munged, slurmctld and slurmd of Debian's packages) on this machine, for as long as a test.

Everything it has lies in one folder: key, socket, state, spool and logs; its ports are free ones. It runs as root,
without cgroups or accounting, beside any Slurm that the machine may have.
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
START_SECONDS, END_SECONDS, COMMAND_SECONDS, LOOK_SECONDS = 30.0, 15.0, 30.0, 0.25
CPUS = 4
"""That Slurm is told: more than there are, so that two runs fit a small machine at once."""

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
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
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2,requeue_delay=1
JobRequeue=1
KillWait=10
MinJobAge=300
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=60 State=UP
PartitionName=rollout Nodes={host} MaxTime=60 State=UP
"""


class SlurmError(AssertionError):
    """A daemon did not come up, or a command failed."""


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
        """A command's output."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        if done.returncode:
            raise SlurmError(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return done.stdout

    def state(self, job: str) -> str:
        """A job's state, like RUNNING."""
        return self.of_job(job, "JobState")

    def of_job(self, job: str, field: str) -> str:
        """One of the fields that `scontrol show job` tells."""
        shown = self.run("scontrol", "show", "job", job, "--oneliner")
        return next(part.split("=", 1)[1] for part in shown.split() if part.startswith(f"{field}="))

    def jobs(self) -> list[str]:
        """Those that have not ended."""
        return self.run("squeue", "--noheader", "--format=%i").split()


def missing() -> list[str]:
    """What the machine lacks of what is needed; empty: it has all."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    lacking = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return lacking + (["root"] if os.geteuid() else [])


@contextlib.contextmanager
def running() -> Iterator[Slurm]:
    """Starts one; at the end its jobs are cancelled, its daemons reaped and its folder removed."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # munge refuses a socket that others could not reach
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        slurm = _configure(folder)
        environment = {**os.environ, **slurm.environment, "PATH": f"{os.environ['PATH']}:/usr/sbin"}

        def start(*command: str, until: Callable[[], bool]) -> None:
            with open(folder / f"{command[0]}.out", "wb") as out:
                daemons.append(
                    subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
                )
            _wait(until, daemons[-1], folder / f"{command[0]}.out")

        munge = folder / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "seed")]
        start(
            *("munged", "--foreground", "--force", *files, f"--log-file={munge / 'log'}", f"--socket={munge / 'socket'}"),
            until=(munge / "socket").exists,
        )
        start("slurmctld", "-D", "-i", until=lambda: _answers(slurm, "UP" if False else ""))
        start("slurmd", "-D", until=lambda: "idle" in _answer(slurm))
        yield slurm
    finally:
        _end(daemons, folder)
        shutil.rmtree(folder, ignore_errors=True)
