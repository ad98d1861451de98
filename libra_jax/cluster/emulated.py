"""Emulated hosts on this machine: Ray nodes, each with its own address on the loopback network.

`ray start` starts them, as on the hosts of a real cluster. Ray's own test utility (`ray.cluster_utils`) would give all
nodes one address and one process, and would tell every program on the machine to join them. Ray 2.60 listens on all
networks of a machine unless the node's address is 127.0.0.1, which two nodes cannot share. These nodes therefore ask
for a token, made only for them.

The emulation covers placement and shared failure: which process is on which host, and dies with it. Links between the
hosts are as fast as memory, and all hosts share the machine's cores. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from libra_jax.cluster import granted, guard, hosts
from libra_jax.protocols import LibraError
from libra_jax.utils import scratch
from libra_jax.weights import memfd

MOST = 250
"""Maximum number of hosts; each uses one last number of an address."""

_OBJECT_STORE_MIB = 100
_END_SECONDS = 10.0
_STARTED = "Ray runtime started"


class _HostEnded(LibraError):
    """An emulated host ended before it was up."""


class EmulatedHosts:
    """A number of hosts, `host-0` and on; the first is Ray's head. A context manager, which starts and ends them.

    The hosts end with this process, in any case.

    Args:
      accelerators: number of accelerators of each host; CPU cores stand for them.
      gpus: tell Ray of an equal number of GPUs, which do not exist.
      seconds: seconds for all hosts to start.
      environment: environment variables of single hosts, by host number.
      roles: roles of single hosts, by host number; other hosts have any role (`granted.ROLE_LABEL`).

    Attributes:
      address: address of the head, for `config.cluster.address`.
      environment: environment variables of programs that are to join the hosts.
    """

    def __init__(
        self,
        count: int,
        *,
        accelerators: int = 1,
        gpus: bool = False,
        seconds: float = 120.0,
        environment: Mapping[int, Mapping[str, str]] | None = None,
        roles: Mapping[int, hosts.Role] | None = None,
    ) -> None:
        if not 1 <= count <= MOST:
            raise LibraError(f"{count} hosts cannot be emulated; between 1 and {MOST} can")
        self.address = ""
        self.environment: dict[str, str] = {}
        self._count = count
        self._accelerators = accelerators
        self._gpus = accelerators if gpus else 0
        self._seconds = seconds
        self._host_variables = environment or {}
        self._roles = roles or {}
        self._folder = Path()
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        self._guards: dict[int, guard.Guard] = {}
        # Each program has its own network, so that two programs do not collide at Ray's fixed ports.
        self._network = f"127.{1 + os.getpid() // MOST % MOST}.{os.getpid() % MOST}"

    def __enter__(self) -> EmulatedHosts:
        deadline = time.monotonic() + self._seconds
        try:
            return self._begin(deadline)
        except _HostEnded:
            # On a busy machine Ray gives up by its own time limits, or finds a port taken that was free a moment ago.
            return self._begin(deadline)

    def _begin(self, deadline: float) -> EmulatedHosts:
        # Socket names of Ray are long, and the kernel allows 107 characters, so a deep TMPDIR does not work.
        self._folder = Path(tempfile.mkdtemp(prefix=f"{scratch.RAY_PREFIX}{os.getpid()}-", dir="/tmp"))
        token = self._folder / "token"
        # The mode before the content, so that no other user can read the token in between.
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        try:
            settings = json.dumps(dict(guard.RAY_SETTINGS))
            self._start(0, "--head", "--port=0", "--include-dashboard=false", f"--system-config={settings}")
            self._wait(0, deadline)
            file = self._folder / "0" / "ray_current_cluster"
            # The head says that it has started before it writes its address.
            while not (address := file.read_text().strip() if file.exists() else ""):
                if time.monotonic() > deadline:
                    raise LibraError(f"Ray's head, emulated here, did not tell its address within {self._seconds:g} s")
                time.sleep(0.1)
            self.address = address
            self.environment |= {"RAY_ADDRESS": address, memfd.HOST_VARIABLE: "emulated-0"}
            for number in range(1, self._count):
                self.add(number, seconds=0.0)
            for number in range(1, self._count):
                self._wait(number, deadline)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def add(self, number: int, *, seconds: float = 120.0) -> None:
        """Starts a new or a killed host under a free number. Does not wait if `seconds` is 0.

        Raises:
          LibraError: the host does not start in time.
        """
        self._start(number, f"--address={self.address}")
        if seconds:
            self._wait(number, time.monotonic() + seconds)

    def kill(self, number: int) -> None:
        """Ends a host as a power cut does: all of its processes at once, by SIGKILL."""
        host = self._hosts.pop(number)
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = psutil.Process(host.pid)
            processes = [leader, *leader.children(recursive=True)]
            for process in processes:  # suspended first, so that none sees another's end and cleans up
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            for process in processes + leader.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        host.wait()
        if number:  # the head's guard stays, because it removes the folder in the end
            self._guards.pop(number).fire(_END_SECONDS)

    def lives(self, number: int) -> bool:
        """Returns True if a host is up. A host also ends by itself if it loses its raylet."""
        return number in self._hosts and self._hosts[number].poll() is None

    def end(self) -> None:
        """Ends all hosts and removes their files. Idempotent."""
        for host in self._hosts.values():
            host.terminate()
        for host in self._hosts.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.wait(_END_SECONDS)
        # The head last, because its guard removes the folder of all.
        for number in sorted(self._guards, reverse=True):
            self._guards[number].fire(_END_SECONDS)
        for host in self._hosts.values():
            host.wait()
        self._hosts, self._guards = {}, {}

    def _start(self, number: int, *arguments: str) -> None:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            f"--node-ip-address={self._network}.{number + 1}",
            f"--node-name=host-{number}",
            f"--num-cpus={self._accelerators}",
            f"--num-gpus={self._gpus}",
            f"--temp-dir={self._folder / str(number)}",  # one each: nodes that start at once would share sockets
            f"--object-store-memory={_OBJECT_STORE_MIB << 20}",
            *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
            "--include-log-monitor=false",
            *([f"--labels={granted.ROLE_LABEL}={self._roles[number]}"] if number in self._roles else []),
            *arguments,
        ]
        # Without this variable, a host's processes would reach other hosts' memory, which is remote in a real cluster.
        variables = {memfd.HOST_VARIABLE: f"emulated-{number}", **self._host_variables.get(number, {})}
        with (self._folder / f"host-{number}.log").open("wb") as log:
            self._hosts[number] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is only for the command that uses the hosts
                env={**os.environ, **self.environment, **variables},
            )
        folder = str(self._folder) if number == 0 else ""
        self._guards[number] = guard.Guard([-self._hosts[number].pid], folder)

    def _wait(self, number: int, deadline: float) -> None:
        host, log = self._hosts[number], self._folder / f"host-{number}.log"
        while _STARTED not in log.read_text(errors="replace"):
            if host.poll() is not None or time.monotonic() > deadline:
                exited = host.poll() is not None
                last = " ".join(log.read_text(errors="replace").split())[-300:]  # again: now it has said all
                why = "ended" if exited else f"was not up within {self._seconds:g} s"
                error = _HostEnded if exited else LibraError
                raise error(f"host-{number}, which Ray emulates, {why}: {last or 'it said nothing'}")
            time.sleep(0.1)
