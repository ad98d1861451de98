"""Backends that hold a sandbox: bubblewrap, a container runtime, or nothing. Each builds a command line."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from libra_jax import config, protocols
from libra_jax.agents.sandbox import limits as limits_module
from libra_jax.agents.sandbox import seccomp

NAMES = ("bubblewrap", "container", "none")
WORKSPACE = "/workspace"
NOBODY = 65534
INSTALL = (
    "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap or pacman -S bubblewrap), which the "
    "sandbox of tools needs"
)

_USERS = range(2_000_000_000, 2_016_777_216)
"""User ids that no system assigns to people. If this process is root, each sandbox runs as another id of the range."""

_PRIVATELY = ("unshare", "--mount", "--propagation=private")
_EMPTY = "mount -t tmpfs -o mode=755 none /mnt"
_ZERO = "/mnt/zero"
_MAKE_ZERO = f"mknod -m 444 {_ZERO} c 1 5"
"""Makes a read-only /dev/zero. A process that can write to it can share memory through it that no limit counts."""

_HELP_SECONDS = 10.0
_SAMPLED = (
    "memory, sockets and processor time are looked at every 20 ms or so, and code that is quick exceeds their limits "
    "for a moment; delegate a control group of version 2 with memory and pids (systemd: Delegate=yes) for exact ones"
)
_PATH = "/usr/local/bin:/usr/bin:/bin"
_ENVIRONMENT = {"LANG": "C.UTF-8", "USER": "nobody", "TERM": "dumb"}
_READ_ONLY = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
_FILES = {
    "/etc/passwd": f"nobody:x:{NOBODY}:{NOBODY}:nobody:{WORKSPACE}:/bin/bash\n",
    "/etc/group": f"nogroup:x:{NOBODY}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
_MODULES = ("usage", "children")
"""Modules that the first process imports besides the standard library. It gets their source as text."""

_BOOT = (
    "import sys, types\n"
    "package = sys.modules['libra_jax.agents.sandbox'] = types.ModuleType('package')\n"
    "for name, text in {modules!r}.items():\n"
    "    module = types.ModuleType(name)\n"
    "    setattr(package, name, module)\n"
    "    exec(compile(text, name, 'exec'), module.__dict__)\n"
    "exec(compile({supervisor!r}, 'supervisor', 'exec'))\n"
)


@dataclass(frozen=True)
class Launch:
    """The command that starts one sandbox, and what it needs.

    Attributes:
      command: Words of the command line.
      environment: The complete environment of the process.
      info_fd: Descriptor where bubblewrap writes the id of the first process, one of `descriptors`. -1 if none.
      descriptors: Descriptors that the command inherits. The caller closes them.
      remove: Command that ends the sandbox if killing its process does not end it. Empty if killing is enough.
      directory: Directory of the host that is removed with the sandbox. Empty if none.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    info_fd: int = -1
    descriptors: tuple[int, ...] = ()
    remove: tuple[str, ...] = ()
    directory: str = ""


class Backend(Protocol):
    """Starts sandboxes under fixed limits."""

    def launch(self, *, group: bool) -> Launch:
        """Returns the command that starts one sandbox.

        Args:
          group: The caller will put the first process into a control group that limits memory.
        """
        ...

    def caveats(self, *, group: bool) -> list[str]:
        """Returns what is not contained, or is limited only roughly. `group` means the same as for `launch`."""
        ...


def make(
    name: str, limits: limits_module.Limits, packages: tuple[str, ...], image: str, *, allow_unsafe: bool
) -> Backend:
    """Returns the backend with this name.

    Args:
      name: One of `NAMES`.
      limits: Limits of each sandbox.
      packages: Directories of the host that are shown read-only and searched for Python modules.
      image: Container image with Python 3.11 and bash. Only the container backend reads it.
      allow_unsafe: Permits the backend "none".

    Raises:
      ConfigError: The name is unknown, or a program that the backend needs is not installed.
    """
    config.check_choice(name, NAMES, "sandbox.backend")
    for path in packages:
        config.check(os.path.isdir(path), "sandbox.packages", f"{path} is no directory")
    if name == "none":
        config.check(
            allow_unsafe,
            "sandbox.backend",
            "none runs what a policy writes with all rights of this process; set sandbox.allow_unsafe=True if that is "
            "meant",
        )
        return Unconfined(limits, packages)
    if name == "container":
        runtime = shutil.which("podman") or shutil.which("docker")
        if runtime is None:
            raise protocols.ConfigError("config.sandbox.backend: container needs podman or docker, and neither is here")
        return Container(limits, packages, runtime, image)
    program = shutil.which("bwrap")
    if program is None:
        raise protocols.ConfigError(f"config.sandbox.backend: bubblewrap is not here: {INSTALL}")
    return Bubblewrap(limits, packages, program)


def interpreter() -> str:
    """Returns the path of this Python, outside of any virtual environment."""
    return str(getattr(sys, "_base_executable", "") or sys.executable)


def _python() -> list[str]:
    """Returns the words that start Python without `site`.

    Importing `site` takes most of the start time, and it would show code what this machine has installed.
    """
    return [interpreter(), "-I", "-S"]


def _home_of_python() -> str:
    return os.path.realpath(sys.base_prefix)


def _open_to_all(path: str) -> bool:
    """Returns whether a user without special rights can reach the directory."""
    place = Path(os.path.realpath(path))
    return all(folder.stat().st_mode & 0o001 for folder in (place, *place.parents))


@functools.cache
def source() -> str:
    """Returns the program of a sandbox's first process, as text."""
    here = Path(__file__).parent
    modules = {name: (here / f"{name}.py").read_text() for name in _MODULES}
    return _BOOT.format(modules=modules, supervisor=(here / "supervisor.py").read_text())


def _places(packages: tuple[str, ...]) -> dict[str, str]:
    """Returns where a sandbox shows each of the host's directories."""
    return {os.path.realpath(path): f"/packages/{number}" for number, path in enumerate(packages)}


def _settings(limits: limits_module.Limits, packages: Iterable[str], **more: Any) -> str:
    places = [WORKSPACE, "/tmp", "/dev/shm"]
    settings = {"workspace": WORKSPACE, "writable": places, "private": places, "count_processes": False, "group": False}
    return json.dumps({**settings, "packages": list(packages), "limits": asdict(limits), **more})


def _environment(home: str, temporary: str, packages: Iterable[str]) -> dict[str, str]:
    """Returns the complete environment of the sandboxed code. Nothing is taken from this process's environment."""
    path = f"{os.path.dirname(interpreter())}:{_PATH}"
    return {**_ENVIRONMENT, "PATH": path, "HOME": home, "TMPDIR": temporary, "PYTHONPATH": ":".join(packages)}


class Bubblewrap:
    """Runs each sandbox in its own namespaces, with a read-only system, no network and no privileges.

    If this process is root, it changes to another user before it starts bubblewrap. Otherwise the sandbox would still
    be the host's root under another name. It would own the host's devices and kernel settings, and the kernel would not
    count its processes.
    """

    def __init__(self, limits: limits_module.Limits, packages: tuple[str, ...], program: str) -> None:
        self._limits, self._packages, self._program = limits, packages, program
        # Older versions of bubblewrap lack some options, so its help text tells which ones exist.
        self._options = _help(program)
        self._root = os.geteuid() == 0
        if self._root and shutil.which("setpriv") is None:
            raise protocols.ConfigError(
                "config.sandbox.backend: bubblewrap run by root needs setpriv to give root's rights up; install "
                "util-linux, or run as another user"
            )
        self._shown = {_home_of_python(): _home_of_python(), **_places(packages)}
        for path in packages:
            # The sandbox's user is not root, so the permissions for others have to let it read and enter the folder.
            readable = not self._root or os.stat(path).st_mode & 0o005 == 0o005
            config.check(readable, "sandbox.packages", f"{path} is for root alone; let others read it (chmod o+rx)")
        hidden = [path for path in self._shown if self._root and not _open_to_all(path)]
        self._sources = {path: f"/mnt/{hidden.index(path)}" if path in hidden else path for path in self._shown}
        self._zero = _ZERO if self._root and _makes_devices() else ""
        self._prefix = self._preparation(hidden)
        found = re.match(r"(\d+)\.(\d+)", platform.release())
        release = (int(found[1]), int(found[2])) if found else (0, 0)
        # From Linux 5.14 on, each user namespace has its own process count. Before, the count included the user's other
        # processes on the host, so a limit on it could fail a sandbox that is nearly empty.
        self._counts = release >= (5, 14)
        self._users = _USERS if self._root and _maps_users(_USERS) else None

    def _preparation(self, hidden: list[str]) -> list[str]:
        """Returns the words that come before the command.

        They make the sandbox the kernel's first choice to kill if memory runs out. Paths that only root reaches are
        first mounted below /mnt, in a private mount namespace. This has to happen while the process is still root.
        """
        script = "echo 1000 2>/dev/null >/proc/self/oom_score_adj; set -e; "
        words = ["sh", "-c"]
        if hidden or self._zero:
            words = [*_PRIVATELY, *words]
            script += f"{_EMPTY}; "
        if self._zero:
            script += f"{_MAKE_ZERO}; "
        for number, path in enumerate(hidden):
            script += f"mkdir /mnt/{number}; mount --bind {shlex.quote(path)} /mnt/{number}; "
        return [*words, script + 'exec "$@"', "sh"]

    def _drop(self) -> list[str]:
        """Returns words that change from root to a user of this sandbox alone.

        The kernel counts some things by user.
        """
        if not self._root:
            return []
        # Random instead of counted, because several runs on a machine share the range.
        user = NOBODY if self._users is None else secrets.choice(self._users)
        return ["setpriv", f"--reuid={user}", f"--regid={NOBODY}", "--clear-groups"]

    def launch(self, *, group: bool) -> Launch:
        """See `Backend`."""
        descriptors: list[int] = []

        def holding(content: bytes) -> str:
            descriptors.append(os.memfd_create("sandbox"))
            os.write(descriptors[-1], content)
            os.lseek(descriptors[-1], 0, os.SEEK_SET)
            return str(descriptors[-1])

        command = [*self._prefix, *self._drop(), self._program, *self._isolation(), *self._mounts()]
        for path, text in _FILES.items():
            command += ["--file", holding(text.encode()), path]
        if filtered := seccomp.program():
            command += ["--seccomp", holding(filtered)]
        info = holding(b"")  # not a pipe: if its reader died, bubblewrap would end and leave its clone behind
        command += ["--info-fd", info, "--remount-ro", "/", "--chdir", WORKSPACE, "--", *_python(), "-c"]
        packages = _places(self._packages).values()
        command += [source(), _settings(self._limits, packages, count_processes=self._counts, group=group)]
        return Launch(
            command, _environment(WORKSPACE, "/tmp", _places(self._packages).values()), int(info), tuple(descriptors)
        )

    def caveats(self, *, group: bool) -> list[str]:
        """See `Backend`."""
        found = [] if group else [_SAMPLED]
        if not seccomp.program():
            found.append(f"no filter of system calls for {platform.machine()}: code can change limits and priorities")
        if self._users is None:
            found.append("all sandboxes are one user's: pipes, watches and open files in transit are counted together")
        if not (group or self._zero):
            found.append("memory that is shared through /dev/zero and mostly unmapped again is not counted")
        return found

    def _isolation(self) -> list[str]:
        # --unshare-all only tries to make a user namespace; --unshare-user turns a failure into an error.
        words = ["--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox"]
        words += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
        return [*words, "--disable-userns"] if "--disable-userns" in self._options else words

    def _mounts(self) -> list[str]:
        words = []
        for path in _READ_ONLY:
            # On many systems /bin and /lib are links into /usr. The sandbox gets the same links.
            if os.path.islink(path):
                words += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                words += ["--ro-bind", path, path]
        for name in _ETC:
            words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        words += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]
        if self._zero:
            words += ["--dev-bind", self._zero, "/dev/zero"]
        for path in (WORKSPACE, "/tmp", "/dev/shm"):
            if "--size" in self._options:  # otherwise the first process checks the size while a call runs
                words += ["--size", str(self._limits.workspace_mib * 2**20)]
            words += ["--tmpfs", path]
        for path, place in self._shown.items():
            words += ["--ro-bind", self._sources[path], place]
        return [*words, "--remount-ro", "/dev"]


@functools.cache
def _makes_devices() -> bool:
    """Returns whether a device can be made in a private mount namespace. Some containers refuse this even to root."""
    script = f"set -e; {_EMPTY}; {_MAKE_ZERO}; head -c1 {_ZERO}"
    try:
        done = subprocess.run([*_PRIVATELY, "sh", "-c", script], capture_output=True, timeout=_HELP_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _maps_users(users: range) -> bool:
    """Returns whether this process's user namespace maps all of these ids."""
    lines = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= users[0] and users[-1] < first + count for first, _, count in lines)


@functools.cache
def _help(program: str) -> str:
    try:
        return subprocess.run([program, "--help"], capture_output=True, text=True, timeout=_HELP_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise protocols.ConfigError(f"config.sandbox.backend: {program} --help did not answer: {error}") from error


class Container:
    """Runs each sandbox as a podman or docker container. The runtime brings its own filter of system calls."""

    def __init__(self, limits: limits_module.Limits, packages: tuple[str, ...], runtime: str, image: str) -> None:
        config.check(bool(image), "sandbox.image", "must name an image with Python 3.11 and bash")
        self._limits, self._packages, self._runtime, self._image = limits, packages, runtime, image

    def launch(self, *, group: bool) -> Launch:
        """See `Backend`. The runtime makes its own control group, so `group` is ignored."""
        limits, name = self._limits, f"libra-{uuid.uuid4().hex}"
        size = f"rw,nosuid,nodev,mode=1777,size={limits.workspace_mib}m"
        command = [self._runtime, "run", "--rm", "--interactive", "--pull=never", f"--name={name}", "--network=none"]
        command += ["--read-only", f"--user={NOBODY}:{NOBODY}", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        command += [f"--memory={limits.memory_mib}m", f"--memory-swap={limits.memory_mib}m"]
        command += [
            "--oom-score-adj=1000",
            f"--pids-limit={limits.processes + 3}",
            f"--shm-size={limits.workspace_mib}m",
        ]
        command += [f"--tmpfs={WORKSPACE}:{size},exec", f"--tmpfs=/tmp:{size}", f"--workdir={WORKSPACE}"]
        command += [f"--volume={path}:{place}:ro" for path, place in _places(self._packages).items()]
        environment = {**_environment(WORKSPACE, "/tmp", _places(self._packages).values()), "PATH": _PATH}
        command += [f"--env={key}={value}" for key, value in environment.items()]
        settings = _settings(limits, _places(self._packages).values(), group=True)
        command += [self._image, "python3", "-I", "-c", source(), settings]
        # The runtime's client needs this process's environment. The container gets only the --env words.
        return Launch(command, dict(os.environ), remove=(self._runtime, "rm", "--force", name))

    def caveats(self, *, group: bool) -> list[str]:
        """See `Backend`."""
        del group
        return []


class Unconfined:
    """Runs code as a plain process, if neither other backend is available. It stops accidents, but no attacks."""

    def __init__(self, limits: limits_module.Limits, packages: tuple[str, ...]) -> None:
        self._limits, self._packages = limits, packages

    def launch(self, *, group: bool) -> Launch:
        """See `Backend`."""
        directory = os.path.realpath(tempfile.mkdtemp(prefix="libra-sandbox-"))
        places = {"workspace": directory, "writable": [directory], "private": []}
        settings = _settings(self._limits, self._packages, group=group, **places)
        environment = _environment(directory, directory, self._packages)
        return Launch([*_python(), "-c", source(), settings], environment, directory=directory)

    def caveats(self, *, group: bool) -> list[str]:
        """See `Backend`."""
        del group
        return ['backend "none" contains nothing: code has all rights of this process', _SAMPLED]
