"""Runs one host's part in a run under Slurm. The script that `launch/slurm.py` renders starts it on each host by srun.

The head starts Ray, waits until all hosts have joined, and runs the driver. The other hosts join and stay until the
driver has ended. Ray has a folder of its own on each host, ports by the job's number, and a process group that ends
with this process. (Ray's own `symmetric-run` ends every Ray that it finds on a host, including those of other runs.)

The file `ended` in the attempt's folder says how the run ended:

  finished       all steps are done
  stopped        it was told to stop; a restart continues it
  lost           it ended with status 75 without being told; a restart continues it, too
  failed STATUS  it failed, or a host failed before the driver began

The driver handles hosts that are lost later. If the head is cut off under its driver, no process writes the file;
the job's script counts that as `lost`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import support  # noqa: F401 (explains a missing module)

from libra_jax.cluster import granted, guard
from libra_jax.protocols import LibraError

FIRST_PORT, JOBS = 20_000, 1_000
"""First port, and number of port ranges. Jobs whose numbers differ by less than JOBS have other ports, from 20000 to
29999: below those that Linux chooses from (32768 on).

Ray's own default ports would not do: many clusters share hosts between jobs, and the hosts of a second job would join
the Ray of the first one."""

PORTS = (
    "port",
    "ray-client-server-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
    "runtime-env-agent-port",
)
"""Flags of `ray start` for ports that other processes have to know. The first two are the head's."""

CPUS = 1024
"""Cores that Ray counts; high, because a host must have room for every actor laid out there. Slurm grants the real
cores."""

START_SECONDS, END_SECONDS, LOOK_SECONDS = 300.0, 30.0, 1.0

STARTS = 3
"""Most starts of Ray on a host. Ray 2.60 gives its own processes 30 s, and imports from a busy file system may take
longer."""

AWAIT_HOSTS = Path(__file__).parent / "templates" / "await_hosts.py"

ENDED, STOP, LOG = "ended", "stop", "train.log"
"""Files of an attempt: how it ended, the request to stop, and the driver's output, which exists from the driver's
start on."""

RAY_FOLDER = "r"
"""Ray's folder in the host's own folder; short, because the kernel allows 107 characters for the name of a socket."""

UNREACHABLE = "192.0.2.1"
"""Address of TEST-NET-1 (RFC 5737). A datagram socket that is connected to it sends nothing, and knows this host's
address."""


def ports(job: int) -> dict[str, int]:
    """Returns the job's ports, by the flag of `ray start`."""
    first = FIRST_PORT + 10 * (job % JOBS)
    return {name: first + index for index, name in enumerate(PORTS)}


def check_free(job: int) -> None:
    """Raises LibraError if something on this host listens on one of the job's ports."""
    for port in ports(job).values():
        with socket.socket() as tried:
            # Closed connections of an earlier attempt must not block the port.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("", port))
            except OSError as error:
                raise LibraError(
                    f"port {port} of this host is taken ({error.strerror}), maybe by another run; submit with "
                    "--exclusive, for whole hosts"
                ) from None


def own_address(other: str) -> str:
    """Returns this host's IPv4 address towards another host; if the other host is this one, the address on the way
    out."""
    here = other in (socket.gethostname(), os.environ.get("SLURMD_NODENAME"))
    for target in (UNREACHABLE,) if here else (other, UNREACHABLE):
        with socket.socket(type=socket.SOCK_DGRAM) as connected, contextlib.suppress(OSError):
            # Nothing is sent: the kernel only chooses the route, and by that this socket's address.
            connected.connect((target, 9))
            return str(connected.getsockname()[0])
    return "127.0.0.1"


def print_address(arguments: argparse.Namespace) -> int:
    """Prints `host:port` of the Ray that this host will head."""
    check_free(arguments.job)
    print(f"{own_address(arguments.toward)}:{ports(arguments.job)['port']}")
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Runs Ray on this host from its start to its end; the head also runs the driver."""
    name, attempt = os.environ["SLURMD_NODENAME"], arguments.attempt
    is_head = name == arguments.head
    os.environ.update(guard.RAY_ENVIRONMENT)
    prefix = f"libra-{arguments.job}-{zlib.crc32(name.encode()):x}-"  # Ray's sockets need a short path
    for left in Path("/tmp").glob(f"{prefix}*"):  # left by a killed attempt of this job
        shutil.rmtree(left, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    why = "Ray did not start here"
    try:
        with _stop_on_sigterm(attempt if is_head else None):
            try:
                status = _try(_lead if is_head else _follow, arguments, name, directory)
            except LibraError as error:
                status, why = 1, str(error)
        # Until the driver runs, a host that fails ends the attempt.
        if not (attempt / ENDED).exists() and not (attempt / LOG).exists():
            told = is_head and (attempt / STOP).exists()
            _write_end(attempt, "stopped" if told else "failed 1")
            print(f"{name}: {'told to stop before the driver began' if told else f'error: {why}'}", flush=True)
        # Ray's own status says nothing about the run: the driver's end counts.
        return 0 if _how(attempt) in ("finished", "stopped") else status or 1
    finally:
        if _how(attempt) not in ("finished", "stopped"):
            for logs in directory.glob(f"{RAY_FOLDER}/session_2*/logs"):  # they show why a run did not finish
                with contextlib.suppress(OSError, shutil.Error):
                    ignored = shutil.ignore_patterns("*.sock")
                    shutil.copytree(logs, attempt / f"ray-{name}", dirs_exist_ok=True, ignore=ignored)
        shutil.rmtree(directory, ignore_errors=True)


def _try(
    part: Callable[[argparse.Namespace, str, Path], int], arguments: argparse.Namespace, name: str, directory: Path
) -> int:
    """Runs this host's part, again if Ray ended before the driver began or the attempt was to end. Returns the last
    status."""
    for left in reversed(range(STARTS)):
        status = part(arguments, name, directory)
        if not left or any((arguments.attempt / file).exists() for file in (ENDED, STOP, LOG)):
            break
        print(f"{name}: Ray ended before the driver began; it is started again.", flush=True)
    return status


def _lead(arguments: argparse.Namespace, name: str, directory: Path) -> int:
    """Starts Ray's head, waits for the hosts, and runs the driver. Returns the driver's status, or 1 if none ran."""
    attempt, others = arguments.attempt, arguments.hosts - 1

    def over() -> bool:
        return (attempt / ENDED).exists() or (attempt / STOP).exists()

    host = arguments.address.rpartition(":")[0]
    head = ["--head", f"--node-ip-address={host}", "--include-dashboard=false"]
    with _ray(arguments, name, directory, *head) as starting:
        # Without --block, `ray start` returns once the head is up.
        if _finish(starting, over):
            return 1
        if others:
            joined = [sys.executable, str(AWAIT_HOSTS), str(others), f"{START_SECONDS:g}"]
            if _finish(subprocess.Popen(joined), over):
                raise LibraError("the other hosts did not join; see their logs beside this one")
        if over():
            return 1
        print(f"{name}: all {arguments.hosts} hosts have joined; the driver starts.", flush=True)
        return subprocess.call(
            [sys.executable, os.path.abspath(__file__), "drive", f"--attempt={attempt}", "--", *arguments.command]
        )


def _follow(arguments: argparse.Namespace, name: str, directory: Path) -> int:
    """Joins the head's Ray and stays until the attempt has ended. Returns the status of Ray's start."""
    ended, deadline = arguments.attempt / ENDED, time.monotonic() + START_SECONDS
    address, _, port = arguments.address.rpartition(":")
    while not ended.exists():  # Ray itself would try for only 20 s
        with contextlib.suppress(OSError):
            socket.create_connection((address, int(port)), timeout=LOOK_SECONDS).close()
            break
        if time.monotonic() > deadline:
            raise LibraError(f"Ray's head at {arguments.address} did not answer within {START_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)
    # With --block, `ray start` stays as long as its Ray, so a Ray that ends by itself is noticed here.
    with _ray(arguments, name, directory, f"--address={arguments.address}", "--block") as joined:
        return _finish(joined, ended.exists)


@contextlib.contextmanager
def _ray(arguments: argparse.Namespace, name: str, directory: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `ray start` inside the block; all processes that it started end with the block, or with this process."""
    check_free(arguments.job)
    mine = ports(arguments.job)
    if "--head" not in options:
        del mine["port"]
    if "--head" not in options or not importlib.util.find_spec("grpc"):  # without grpc, Ray starts no client server
        del mine["ray-client-server-port"]
    command = [
        *("ray", "start", *options),
        # Ray opens this folder to every user (0777); the one above it is for this user only.
        f"--temp-dir={directory / RAY_FOLDER}",
        f"--node-name={name}",
        *_labels(name, arguments.training),
        f"--num-cpus={CPUS}",
        # The kernel chooses the ports that one process binds for itself, so no other process can take them before.
        *("--min-worker-port=0", "--max-worker-port=0", "--node-manager-port=0", "--object-manager-port=0"),
        *(f"--{flag}={port}" for flag, port in mine.items()),
    ]
    # A process group of its own, which the guard can end as a whole.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    ending = guard.Guard([-process.pid])
    try:
        yield process
    finally:
        ending.fire(END_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)


def _labels(name: str, training: str) -> list[str]:
    """Returns the label of this host's role for Ray; without a partition for training, any host may do either."""
    if not training:
        return []
    return [f"--labels={granted.ROLE_LABEL}={'training' if name in training.split(',') else 'rollout'}"]


def _finish(process: subprocess.Popen[bytes], over: Callable[[], bool]) -> int:
    """Waits for a process, and kills it once `over` holds. Returns its status."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_SECONDS)
        if over():
            process.kill()


def _how(attempt: Path) -> str:
    """Returns the first word of `ended`; empty if there is no such file."""
    file = attempt / ENDED
    return file.read_text().split()[0] if file.exists() else ""


def _write_end(attempt: Path, how: str) -> None:
    # Renamed, so that no reader sees a half-written file.
    partial = attempt / f"{ENDED}.partial"
    partial.write_text(f"{how}\n")
    partial.rename(attempt / ENDED)


def drive(arguments: argparse.Namespace) -> int:
    """Runs the driver. Tells it to stop, once, if the attempt's folder asks for it, and records how the driver
    ended."""
    stop = arguments.attempt / STOP
    told: list[bool] = []
    # If Slurm tracks processes by cgroups, a signal to a step reaches only the process that srun started; the driver is
    # then told by the file. Otherwise the driver gets the signal too, and a second signal would end it at once.
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    with open(arguments.attempt / LOG, "ab") as log:
        driver = subprocess.Popen(arguments.command, stdout=log, stderr=log)
        while (status := driver.poll()) is None:
            if not told and stop.exists():
                told.append(True)
                driver.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(LOOK_SECONDS)
    if told and status == -signal.SIGTERM:  # it was still importing, and did not handle the signal
        status = os.EX_TEMPFAIL
    again = "stopped" if told else "lost"
    how = {0: "finished", os.EX_TEMPFAIL: again}.get(status, f"failed {status if status > 0 else 128 - status}")
    _write_end(arguments.attempt, how)
    return status


@contextlib.contextmanager
def _stop_on_sigterm(attempt: Path | None) -> Iterator[None]:
    """Makes SIGTERM to the step ask the driver to stop. This host stays until the driver has ended, or SIGKILL comes.

    Args:
      attempt: the attempt's folder, on the head; None on the others, which wait for its file `ended`.
    """

    def told(*_: object) -> None:
        if attempt is not None:
            with contextlib.suppress(OSError):
                (attempt / STOP).touch()

    before = signal.signal(signal.SIGTERM, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the part and its settings; a command follows `--`."""
    own, command = arguments, []
    if "--" in arguments:
        split = arguments.index("--")
        own, command = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(description="One host's part in a run under Slurm; see the file's docstring.")
    parts = parser.add_subparsers(required=True)
    for part in (print_address, run, drive):
        given = parts.add_parser(part.__name__.removeprefix("print_"), help=part.__doc__)
        given.set_defaults(part=part, command=command)
        if part is not drive:
            given.add_argument("--job", type=int, required=True, help="id of the Slurm job")
        if part is print_address:
            given.add_argument("--toward", required=True, help="another host of the job, or this one")
        else:
            given.add_argument("--attempt", type=Path, required=True, help="folder of the attempt")
        if part is run:
            given.add_argument("--head", required=True, help="Slurm's name of the host on which the driver runs")
            given.add_argument("--address", required=True, help="host:port of Ray's head")
            given.add_argument("--hosts", type=int, required=True, help="number of hosts of the job")
            given.add_argument("--training", default="", help="hosts that train, if they have their own partition")
    return parser.parse_args(own, argparse.Namespace())


if __name__ == "__main__":
    parsed = _parse(sys.argv[1:])
    try:
        sys.exit(parsed.part(parsed))
    except LibraError as refused:
        sys.exit(f"error: {refused}")
