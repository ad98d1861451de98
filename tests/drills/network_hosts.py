"""Hosts on one machine: each with an address, a name and a process table of its own; files are shared.

A host is a network namespace on a bridge, with addresses that are for benchmarks (RFC 2544), so that nothing else has
them. It takes root, and iproute2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from libra_jax import protocols

COMMAND_SECONDS = 30.0
_BECOME = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


@dataclasses.dataclass(frozen=True)
class Host:
    """One of them.

    Attributes:
      name: what it is called by all.
      address: of it.
      namespace: of the kernel's, in which its network is.
      names: file in which all find each other.
      cable: the end of its network's cable that is at the bridge.
    """

    name: str
    address: str
    namespace: str
    names: Path
    cable: str

    def command(self, *command: str) -> list[str]:
        """Runs a command there; to kill it is to kill whatever runs there."""
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}"]
        unshare = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return [*enter, *unshare, "sh", "-c", _BECOME, "sh", str(self.names), self.name, *command]

    def beside(self, process: int, *command: str) -> list[str]:
        """Runs a command in the process table, too, of a process that runs there; killed with it."""
        return ["nsenter", f"--target={process}", "--net", "--uts", "--mount", "--pid", *command]

    def plug(self, in_: bool) -> None:
        """Puts its cable in, or pulls it: what others send it is lost without a word, and so is what it sends.

        Raises:
          LibraError: the kernel does not let it.
        """
        _ip("link", "set", self.cable, "up" if in_ else "down")


def missing() -> list[str]:
    """What this machine lacks of what is needed; empty: it has all."""
    lacking = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if os.geteuid():
        return [*lacking, "root"]
    if lacking:
        return lacking
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "tried", "type", "bridge"],
        capture_output=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    return ["networks of its own"] if tried.returncode else []


@contextlib.contextmanager
def running(folder: Path, count: int) -> Iterator[tuple[str, list[Host]]]:
    """The address of this machine for the hosts, and the hosts; they are gone at the end.

    Raises:
      LibraError: the kernel does not let them be made, or end.
    """
    bridge = f"lj{os.getpid()}"
    net = f"198.18.{os.getpid() % 250}"
    hosts = [
        Host(f"host{n}", f"{net}.{n}", f"{bridge}-{n}", folder / "hosts", f"{bridge}v{n}") for n in range(1, count + 1)
    ]
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    with contextlib.ExitStack() as made:
        _ip("link", "add", bridge, "type", "bridge")
        made.callback(_ip, "link", "delete", bridge)
        _ip("address", "add", f"{net}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for host in hosts:
            _ip("netns", "add", host.namespace)
            made.callback(_ip, "netns", "delete", host.namespace)  # which deletes the pair of devices, too
            _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("link", "set", host.cable, "master", bridge, "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", host.namespace, "link", "set", device, "up")
            # By the way out a host knows which address the others reach it at.
            _ip("-n", host.namespace, "route", "add", "default", "via", f"{net}.254")
        yield f"{net}.254", hosts


def _ip(*arguments: str) -> None:
    command = " ".join(["ip", *arguments])
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise protocols.LibraError(f"`{command}` did not end within {COMMAND_SECONDS:g} s") from None
    if done.returncode:
        raise protocols.LibraError(f"`{command}` ended with status {done.returncode}: {' '.join(done.stderr.split())}")
