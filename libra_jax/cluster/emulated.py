"""Hosts that are emulated on this machine: Ray nodes, each with an address of its own on the loopback network.

They are started with `ray start`, as hosts of a real cluster are, and not with Ray's own utility for tests
(`ray.cluster_utils`), whose nodes share one address and one process, and which tells every program on the machine to
join them. Ray 2.60 listens on all networks of a machine unless a node has the address 127.0.0.1, which two cannot have:
these ask for a token, made for them alone. What is emulated is who is where, and who dies with whom;
links between hosts are as fast as memory here, and all share the machine's cores. Linux only.
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

from libra_jax.cluster import granted, guard, hosts, settings
from libra_jax.protocols import LibraError
from libra_jax.weights import memfd

PREFIX = "libra-ray-"
"""Of folders for Ray; what a killed process left is removed by its number (`cluster.ray_runtime`)."""

MOST = 250
"""Hosts, each the last number of its address."""

_OBJECT_STORE_MIB = 100
_END_SECONDS = 10.0
_STARTED = "Ray runtime started"


class EmulatedHosts:
    """So many hosts, `host-0` and on; the first is Ray's head. A context manager, which starts and ends them.

    Ended with this process, however that ends.

    Args:
      count: hosts.
      accelerators: of each; cores stand for them.
      gpus: Ray is told of as many GPUs as well, which are not there.
      seconds: deadline for all to be up.
      environment: environment variables of single hosts, by number.
      roles: what single hosts are for, by number; the others are for anything (`granted.ROLE_LABEL`).

    Attributes:
      address: of the head, for `config.cluster.address`.
      environment: environment variables of programs that are to join them.
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
        self._own = environment or {}
        self._roles = roles or {}
        self._folder = Path()
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        self._guards: dict[int, guard.Guard] = {}
        # A network of its own, so that those of two programs do not meet at Ray's fixed ports.
        self._network = f"127.{1 + os.getpid() // MOST % MOST}.{os.getpid() % MOST}"

    def __enter__(self) -> EmulatedHosts:
        # Names of Ray's sockets are long, and the kernel takes 107 characters: not in a deep TMPDIR.
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir="/tmp"))
        token = self._folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        deadline = time.monotonic() + self._seconds
        try:
            self.address = self._start_head(deadline)
            self.environment |= {"RAY_ADDRESS": self.address, **_named(0)}
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
        """Starts one more, or one that was killed, under a number that is free; does not wait if `seconds` is 0.

        Raises:
          LibraError: it does not start in time.
        """
        self._start(number, f"--address={self.address}")
        if seconds:
            self._wait(number, time.monotonic() + seconds)

    def kill(self, number: int) -> None:
        """Ends a host as a power cut does: all of its processes at once, by SIGKILL."""
        host = self._hosts.pop(number)
        with contextlib.suppress(psutil.NoSuchProcess):
            whole = psutil.Process(host.pid)
            processes = [whole, *whole.children(recursive=True)]
            for process in processes:  # none sees another's end and tidies up
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            for process in processes + whole.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        host.wait()
        if number:  # the head's guard stays: it removes the folder in the end
            self._guards.pop(number).fire(_END_SECONDS)

    def lives(self, number: int) -> bool:
        """Whether a host is up: it has neither been killed nor ended of itself, as Ray's do that lose their raylet."""
        return number in self._hosts and self._hosts[number].poll() is None

    def end(self) -> None:
        """Ends them all, and removes their files. Idempotent."""
        for host in self._hosts.values():
            host.terminate()
        for host in self._hosts.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.wait(_END_SECONDS)
        for number in sorted(self._guards, reverse=True):
            self._guards[number].fire(_END_SECONDS)
        for host in self._hosts.values():
            host.wait()
        self._hosts, self._guards = {}, {}

    def _start_head(self, deadline: float) -> str:
        self._start(
            0, "--head", "--port=0", "--include-dashboard=false", f"--system-config={json.dumps(dict(settings.SYSTEM))}"
        )
        self._wait(0, deadline)
        file = self._folder / "0" / "ray_current_cluster"
        while not (address := file.read_text().strip() if file.exists() else ""):  # Ray says that it has started first
            if time.monotonic() > deadline:
                raise LibraError(f"Ray's head, emulated here, did not tell its address within {self._seconds:g} s")
            time.sleep(0.1)
        return address

    def _start(self, number: int, *arguments: str) -> None:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            f"--node-ip-address={self._network}.{number + 1}",
            f"--node-name=host-{number}",
            f"--num-cpus={self._accelerators}",
            f"--num-gpus={self._gpus}",
            f"--temp-dir={self._folder / str(number)}",  # their own: nodes that start at once would take one's sockets
            f"--object-store-memory={_OBJECT_STORE_MIB << 20}",
            *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
            "--include-log-monitor=false",
            *([f"--labels={granted.label(self._roles[number])}"] if number in self._roles else []),
            *arguments,
        ]
        with self._log(number).open("wb") as log:
            self._hosts[number] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the command that uses them
                env={**os.environ, **self.environment, **_named(number), **self._own.get(number, {})},
            )
        folder = str(self._folder) if number == 0 else ""
        self._guards[number] = guard.Guard([-self._hosts[number].pid], folder)

    def _wait(self, number: int, deadline: float) -> None:
        host, log = self._hosts[number], self._log(number)
        while _STARTED not in (said := log.read_text(errors="replace")):
            if host.poll() is not None or time.monotonic() > deadline:
                last = " ".join(said.split())[-300:]
                why = "ended" if host.poll() is not None else f"was not up within {self._seconds:g} s"
                raise LibraError(f"host-{number}, which Ray emulates, {why}: {last or 'it said nothing'}")
            time.sleep(0.1)

    def _log(self, number: int) -> Path:
        return self._folder / f"host-{number}.log"


def _named(number: int) -> dict[str, str]:
    """Has the processes of a host take the memory of others for another host's, which it would be."""
    return {memfd.HOST_VARIABLE: f"emulated-{number}"}
