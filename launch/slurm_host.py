"""One host's part in a run under Slurm. The script that `launch/slurm.py` renders starts it there, through srun.

Ray's symmetric start (`ray symmetric-run`, Ray 2.60) starts Ray on each host, the driver on the head, and ends Ray
after it. It refuses a host on which it finds a Ray, whoever's it is, and at the end it ends every Ray it finds. Where
runs share hosts, each therefore has a process table of its own (a PID namespace; util-linux' `unshare`), in which there
is no Ray but its own, and of which the kernel leaves nothing alive.

Ports that one process binds for itself (raylet, object manager, workers) are chosen by the kernel as they are bound, so
that nobody can come between. Those that others have to know beforehand come from the job's own window, below the
kernel's, and are seen to be free. (Left to the kernel too, agents tell theirs by files, for which Ray waits 15 s.)

How the run ended is in the file `ended` of the attempt's folder: `finished`, `stopped` (it was told to, and goes on if
started again), `lost` (it ended with status 75 without having been told: started again, it goes on, too) or `failed
STATUS`. A host on which Ray does not start ends the attempt, as long as there is no driver; one that is lost later is
the driver's to see to. Where the head itself is cut off under its driver, nobody can write that; the job's script takes
it for `lost`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import absent_modules  # noqa: F401 (see there)

from libra_jax.cluster import granted, settings
from libra_jax.protocols import LibraError

FIRST_PORT, WINDOWS, WINDOW = 20_000, 600, 20
"""Windows of ports, by job id: 20000 to 31999, below those that Linux chooses from (32768 on)."""

HEAD_PORTS = ("gcs", "ray-client-server-port")
"""In the window's first half: where hosts join, and what Ray 2.60 starts wherever grpc is installed."""

AGENT_PORTS = (
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
    "runtime-env-agent-port",
)
"""In its second half, on every host."""

CPUS = 1024
"""That Ray is told of: a host must have room for every actor laid out there; which cores it has, Slurm has granted."""

LOOK_SECONDS, END_SECONDS = 1.0, 30.0

ENDED, STOP, LOG = "ended", "stop", "train.log"
"""Files of an attempt: how it ended, that it has to stop, and what the driver says, from its start on."""

UNREACHABLE = "192.0.2.1"
"""Of TEST-NET-1 (RFC 5737). A datagram socket that is connected to it sends nothing, and knows this host's address."""

RAY_ENVIRONMENT = {
    **settings.environment(),
    "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": "300",  # seconds; imports from a shared file system take their time
}


def free_ports(job: int, address: str, names: Sequence[str], *, half: int) -> dict[str, int]:
    """Neighbouring ports that are not in use, by name: in half 0 or 1 of the job's own window, or the next with room.

    Raises:
      LibraError: there are none in any window.
    """
    for number in range(WINDOWS):
        begin = FIRST_PORT + (job + number) % WINDOWS * WINDOW + half * WINDOW // 2
        for first in range(begin, begin + WINDOW // 2 - len(names) + 1):
            ports = range(first, first + len(names))
            if all(_is_free(address, port) for port in ports):
                return dict(zip(names, ports, strict=True))
    last = FIRST_PORT + WINDOWS * WINDOW - 1
    raise LibraError(f"no {len(names)} free ports from {FIRST_PORT} to {last} on this host")


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind((address, port))
        except OSError:
            return False
    return True


def own_address(other: str) -> str:
    """This host's IPv4 address on the way to another one; to itself, on the way out; 127.0.0.1 if there is no way."""
    here = other in (socket.gethostname(), os.environ.get("SLURMD_NODENAME"))
    for target in (UNREACHABLE,) if here else (other, UNREACHABLE):
        with socket.socket(type=socket.SOCK_DGRAM) as connected, contextlib.suppress(OSError):
            connected.connect((target, 9))
            return str(connected.getsockname()[0])
    return "127.0.0.1"


def print_address(arguments: argparse.Namespace) -> int:
    """Prints `host:port` of the Ray that is to be started here."""
    address = own_address(arguments.toward)
    print(f"{address}:{free_ports(arguments.job, address, HEAD_PORTS, half=0)['gcs']}")
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Ray on this host from its start to its end, and on the head the driver."""
    name, attempt = os.environ["SLURMD_NODENAME"], arguments.attempt
    directory = Path(tempfile.mkdtemp(prefix=f"libra-{arguments.job}-", dir="/tmp"))  # Ray's sockets need a short one
    try:
        why = "Ray did not start here"
        try:
            with _terminated(attempt if name == arguments.head else None):
                status = _keep_ray(arguments, name, directory)
        except LibraError as error:
            status, why = 1, str(error)
        told = name == arguments.head and (attempt / STOP).exists()
        driven = (attempt / LOG).exists()
        if not (attempt / ENDED).exists() and (told or not driven):
            _write_end(attempt, "stopped" if told else "failed 1")
            before = "the driver could save" if driven else "the driver began"
            print(f"{name}: " + (f"told to stop, and ended before {before}" if told else f"error: {why}"), flush=True)
        # Ray's start ends in whatever status it likes: what counts is how the driver did.
        return 0 if _how(attempt) in ("finished", "stopped") else status or 1
    finally:
        if _how(attempt) not in ("finished", "stopped"):
            _keep_logs(directory, attempt / f"ray-{name}")
        shutil.rmtree(directory, ignore_errors=True)


def _keep_ray(arguments: argparse.Namespace, name: str, directory: Path) -> int:
    """Starts Ray's part here; its status, when it has ended or been ended."""
    alone = [] if arguments.exclusive else _alone()
    host = subprocess.Popen(
        [*alone, *_symmetric_run(arguments, name, directory)], env={**os.environ, **RAY_ENVIRONMENT}
    )
    # With its process table, or as Ctrl-C does it, after which Ray is stopped, too.
    end = functools.partial(_signal, host, signal.SIGKILL if alone else signal.SIGINT)

    def over() -> bool:
        """All end after the driver; the head before there is one, too. Without a process table, it ends by itself."""
        ended, stop, driven = ((arguments.attempt / file).exists() for file in (ENDED, STOP, LOG))
        if name != arguments.head:
            return ended
        return ended and bool(alone) if driven else ended or stop

    try:
        return _wait(host, over, once=end, most=END_SECONDS)
    finally:
        end()
        _bury(host)


def _bury(process: subprocess.Popen[bytes]) -> None:
    """Waits for what was told to end, and kills it if it does not."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _how(attempt: Path) -> str:
    """How it ended: the first word of that file."""
    file = attempt / ENDED
    return file.read_text().split()[0] if file.exists() else ""


def _write_end(attempt: Path, how: str) -> None:
    partial = attempt / f"{ENDED}.partial"
    partial.write_text(f"{how}\n")
    partial.rename(attempt / ENDED)


def _symmetric_run(arguments: argparse.Namespace, name: str, directory: Path) -> list[str]:
    is_head = name == arguments.head
    here = [sys.executable, os.path.abspath(__file__)]
    options = [
        f"--temp-dir={directory}",
        f"--node-name={name}",
        *_labels(name, arguments.training),
        f"--num-cpus={CPUS}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--node-manager-port=0",
        "--object-manager-port=0",
    ]
    agents = free_ports(arguments.job, "", AGENT_PORTS, half=1)
    options += [f"--{option}={port}" for option, port in agents.items()]
    if is_head:  # the others refuse the first, and do not start what the second is for
        options.append("--include-dashboard=false")
        if importlib.util.find_spec("grpc"):
            options.append(f"--ray-client-server-port={int(arguments.address.rpartition(':')[2]) + 1}")
    return [
        *([] if arguments.exclusive else [*here, "reap", "--"]),
        *("ray", "symmetric-run", f"--address={arguments.address}", f"--min-nodes={arguments.hosts}", *options, "--"),
        *(*here, "drive", f"--attempt={arguments.attempt}", "--", *arguments.command),
    ]


def _labels(name: str, training: str) -> list[str]:
    """What this host's partition is for; any host is for anything where there is but one."""
    if not training:
        return []
    return [f"--labels={granted.label('training' if name in training.split(',') else 'rollout')}"]


def _alone() -> list[str]:
    """What starts a command with a process table of its own.

    Raises:
      LibraError: this host does not allow it.
    """
    start = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid():
        start += ["--user", "--map-current-user"]
    try:
        tried = subprocess.run([*start, "true"], capture_output=True, text=True, timeout=END_SECONDS, check=False)
        why = tried.stderr.strip() if tried.returncode else ""
    except OSError as error:
        why = str(error)
    if why:
        raise LibraError(
            f"this host gives a run no process table of its own ({why}), without which two that share it would "
            "end each other's Ray; submit with --exclusive, for whole hosts"
        )
    return start


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _keep_logs(directory: Path, kept: Path) -> None:
    """What Ray wrote, for whoever looks for why a run did not finish."""
    for logs in directory.glob("session_2*/logs"):
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(logs, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))


def reap(arguments: argparse.Namespace) -> int:
    """The first process of a process table: runs the command, and buries what others leave behind."""
    child = subprocess.Popen(arguments.command)
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            return os.waitstatus_to_exitcode(status)


def drive(arguments: argparse.Namespace) -> int:
    """The driver, on the head: told to stop, once, when the attempt's folder says so; how it ended is written there."""
    stop = arguments.attempt / STOP
    told: list[bool] = []

    def tell() -> None:
        if not told:
            told.append(True)
            driver.send_signal(signal.SIGTERM)

    # Slurm tracks processes by cgroups or otherwise. By cgroups, a signal to a step reaches what it started itself, and
    # comes here by the file; otherwise the driver has it, too, and a second one would end it at once.
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    with open(arguments.attempt / LOG, "ab") as log:
        driver = subprocess.Popen(arguments.command, stdout=log, stderr=log)
        status = _wait(driver, stop.exists, once=tell)
    if told and status == -signal.SIGTERM:  # it was still being imported, and heard nothing
        status = os.EX_TEMPFAIL
    again = "stopped" if told else "lost"
    how = {0: "finished", os.EX_TEMPFAIL: again}.get(status, f"failed {status if status > 0 else 128 - status}")
    _write_end(arguments.attempt, how)
    return status


def _wait(
    process: subprocess.Popen[bytes], condition: Callable[[], bool], *, once: Callable[[], None], most: float = math.inf
) -> int:
    """Waits for the process; as soon as the condition holds, calls `once`, and kills what is there `most` s later."""
    called, until = False, math.inf
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_SECONDS)
        if not called and condition():
            called, until = True, time.monotonic() + most
            once()
        if time.monotonic() >= until:
            process.kill()


@contextlib.contextmanager
def _terminated(attempt: Path | None) -> Iterator[None]:
    """SIGTERM to the step asks the driver to stop; what is here stays until it has, or Slurm's SIGKILL comes.

    Args:
      attempt: the attempt's folder, on the head; the other hosts wait for what becomes of it there.
    """

    def told(*_: int | types.FrameType | None) -> None:
        if attempt is not None:
            with contextlib.suppress(OSError):
                (attempt / STOP).touch()

    before = signal.signal(signal.SIGTERM, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parse(arguments: list[str]) -> argparse.Namespace:
    """The part and its settings; a command follows `--`."""
    own, command = arguments, []
    if "--" in arguments:
        split = arguments.index("--")
        own, command = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(description="One host's part in a run under Slurm; see the file's docstring.")
    parts = parser.add_subparsers(required=True)
    for part in (print_address, run, reap, drive):
        given = parts.add_parser(part.__name__.removeprefix("print_"), help=part.__doc__)
        given.set_defaults(part=part, command=command)
        if part in (print_address, run):
            given.add_argument("--job", type=int, required=True, help="id of the Slurm job")
        if part is print_address:
            given.add_argument("--toward", required=True, help="another host of the job, or this one")
        if part is run:
            given.add_argument("--head", required=True, help="Slurm's name of the host on which the driver is")
            given.add_argument("--address", required=True, help="host:port of the Ray")
            given.add_argument("--hosts", type=int, required=True, help="how many the job has")
            given.add_argument("--training", default="", help="the hosts that train, where they have a partition")
            given.add_argument("--exclusive", action="store_true", help="no other run is on these hosts")
        if part in (run, drive):
            given.add_argument("--attempt", type=Path, required=True, help="folder of the attempt")
    return parser.parse_args(own, argparse.Namespace())


if __name__ == "__main__":
    parsed = _parse(sys.argv[1:])
    try:
        sys.exit(parsed.part(parsed))
    except LibraError as refused:
        sys.exit(f"error: {refused}")
