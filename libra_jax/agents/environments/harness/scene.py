"""The file system that a container would show, made of the host's by bubblewrap: for tasks that name fixed folders.

System folders are the host's, read-only. The task's own folders, such as /app, are the rollout's. A scene is weaker
than the run's sandbox: it has no limits of memory, processes or files, and no filter of system calls.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_jax import scratch
from libra_jax.agents.sandbox import backends

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc")
_PORT = 8080
_PROBE_SECONDS = 15.0
_INSIDE = str(Path(__file__).with_name("inside.py"))
_log = logging.getLogger(__name__)
LIBRA = "/libra"
"""Where a scene shows what an agent is told: its task file, and the gateway's socket."""


def own_processes(root: Path) -> tuple[str, ...]:
    """Returns the words that run a command in a view of this host with its own processes, and no capabilities.

    The view hides the processes of the run, which hold answers, and the temporary folders of runs, except `root`. Files
    of the host are read-only outside of temporary folders, because an agent could change the code of later rollouts.
    Shared memory is empty, because engines have theirs there. No words, with a warning, where bubblewrap does not work.
    """
    try:
        words = list(_private_view())
    except (OSError, subprocess.SubprocessError):
        _warn_exposed()
        return ()
    above = {root.parent.parent, Path("/tmp")}  # Ray's and sockets' folders are in /tmp if a path would be too long
    names = (f"{scratch.PREFIX}*", f"{scratch.RAY_PREFIX}*")
    for folder in {root.parent, *(folder for place in above for name in names for folder in place.glob(name))}:
        if folder.is_dir() and not folder.is_symlink():  # bubblewrap would fail on others
            words += ["--tmpfs", str(folder)]
    return (*words, "--bind", str(root), str(root), "--")


@functools.cache
def _warn_exposed() -> None:
    exposed = "Agents run as this run's user without bubblewrap, so commands of the model may read this run's memory"
    _log.warning("%s, answers included: %s", exposed, backends.INSTALL)


@functools.cache  # does not keep an error, because a machine under load may fail once
def _private_view() -> tuple[str, ...]:
    words = [shutil.which("bwrap") or "bwrap", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc"]
    words += ["--tmpfs", "/dev/shm"]
    for folder in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):
        words += ["--bind-try", folder, folder]
    words += ["--unshare-pid", "--unshare-ipc", "--die-with-parent", "--cap-drop", "ALL"]
    subprocess.run([*words, "--", "true"], check=True, capture_output=True, timeout=_PROBE_SECONDS)
    return tuple(words)


@dataclass(frozen=True)
class Scene:
    """A view of the host's files.

    Attributes:
      program: path of bubblewrap.
      writable: folders of the host by their place in the scene.
      readable: folders and files of the host by their place in the scene, read-only.
      folder: working directory in the scene.
      isolated: the scene has a network of its own, with a loopback and nothing else.
      socket: place in an isolated scene of the gateway's socket. Empty: none.
    """

    program: str
    writable: Mapping[str, str]
    readable: Mapping[str, str]
    folder: str
    isolated: bool
    socket: str = ""

    def wrapped(self, command: Sequence[str]) -> list[str]:
        """Returns the words that run a command in the scene. Its variables are those of the caller's choice."""
        words = [self.program, "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        words += ["--hostname", "task", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        words += ["--unshare-net"] if self.isolated else []
        for path in _SYSTEM:
            # On many systems /bin and /lib are links into /usr. The scene gets the same links.
            if os.path.islink(path):
                words += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                words += ["--ro-bind", path, path]
        # Python outside of /usr, and a virtual environment, are found under their own paths.
        own = {path: path for path in (os.path.realpath(sys.base_prefix), _INSIDE) if not path.startswith("/usr/")}
        # Read-only folders come last: Python may lie inside of a writable place, such as the home directory.
        for place, path in self.writable.items():
            words += ["--bind", path, place]
        for place, path in {**own, **self.readable}.items():
            words += ["--ro-bind", path, place]
        words += ["--chdir", self.folder]
        if self.socket:
            command = [backends.INTERPRETER, "-I", "-S", _INSIDE, str(_PORT), self.socket, *command]
        return [*words, "--", *command]

    def reached(self, url: str) -> str:
        """Returns the gateway's address inside the scene."""
        near = urllib.parse.urlsplit(url)._replace(netloc=f"127.0.0.1:{_PORT}")
        return urllib.parse.urlunsplit(near) if self.socket else url
