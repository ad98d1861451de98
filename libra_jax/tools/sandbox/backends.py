"""Backends that hold a sandbox: bubblewrap, a container runtime, or nothing. Each builds a command line."""

from __future__ import annotations

import abc
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
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.tools.sandbox import limits as limits_module
from libra_jax.tools.sandbox import seccomp, supervisor
from libra_jax.utils import scratch

NAMES = ("bubblewrap", "container", "none")
WORKSPACE = "/workspace"
DOOR = "/libra"
"""Where a sandbox finds the pool's folder of sockets (`pool.Sandbox.door`)."""

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

_LOWER = "/mnt/nothing"
"""An empty folder, because a read-only overlay needs a second one."""

_TERMINALS = "/mnt/terminals"
_MAKE_TERMINALS = f"mount -t devpts -o newinstance,ptmxmode=666,mode=600,max={supervisor.TERMINALS} none {_TERMINALS}"
"""Makes terminals that are counted apart from the host's, of which there are a few thousand for everybody."""

_HELP_SECONDS = 10.0
_SAMPLED = (
    "memory, sockets and processor time are looked at every 20 ms or so, and code that is quick exceeds their limits "
    "for a moment; delegate a control group of version 2 with memory and pids (systemd: Delegate=yes) for exact ones"
)
INTERPRETER = str(getattr(sys, "_base_executable", "") or sys.executable)
"""Path of this Python, outside of any virtual environment."""

_PYTHON = (INTERPRETER, "-I", "-S")
"""Starts Python without `site`, which takes most of the start time and would show what this machine has installed."""

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
    "package = sys.modules['libra_jax.tools.sandbox'] = types.ModuleType('package')\n"
    "for name, text in {modules!r}.items():\n"
    "    module = types.ModuleType(name)\n"
    "    setattr(package, name, module)\n"
    "    exec(compile(text, name, 'exec'), module.__dict__)\n"
    "exec(compile({supervisor!r}, 'supervisor', 'exec'))\n"
)
SOURCE = _BOOT.format(
    modules={name: Path(__file__).with_name(f"{name}.py").read_text() for name in _MODULES},
    supervisor=Path(__file__).with_name("supervisor.py").read_text(),
)
"""The program of a sandbox's first process, as text."""


@dataclass(frozen=True)
class SandboxCommand:
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


@dataclass(eq=False)
class Backend(abc.ABC):
    """Starts sandboxes under fixed limits.

    Attributes:
      limits: Limits of each sandbox.
      packages: Place in the sandbox of each directory with Python modules, by the directory of the host.
      door: Folder of the host that each sandbox sees at `DOOR`, read-only. Empty: none.
    """

    limits: limits_module.Limits
    packages: Mapping[str, str]
    door: str = ""

    @property
    def door_place(self) -> str:
        """Where a sandbox finds `door`. Empty if a sandbox has the host's own network, and needs no door."""
        return DOOR

    @abc.abstractmethod
    def launch(self, *, group: bool) -> SandboxCommand:
        """Returns the command that starts one sandbox.

        Args:
          group: The caller will put the first process into a control group that limits memory.
        """

    def caveats(self, *, group: bool) -> list[str]:
        """Returns what is not contained, or is limited only roughly. `group` means the same as for `launch`."""
        del group
        return []

    def _first_process(self, directory: str = "", **settings: bool) -> tuple[list[str], dict[str, str]]:
        """Returns what the first process runs, as the words after `python -c`, and its complete environment.

        Args:
          directory: The sandbox's only directory. Empty for the places of a sandbox with a file system of its own.
          **settings: Further settings of `supervisor.Supervisor`.
        """
        places = [directory] if directory else [WORKSPACE, "/tmp", "/dev/shm"]
        packages = list(self.packages.values())
        supervisor_settings = {
            "workspace": places[0],
            "writable": places,
            "private": [] if directory else places,
            "packages": packages,
            "limits": asdict(self.limits),
            "count_processes": False,
            "group": False,
            **settings,
        }
        # Nothing is taken from this process's environment.
        environment = {
            **_ENVIRONMENT,
            "PATH": f"{os.path.dirname(INTERPRETER)}:{_PATH}",
            "HOME": places[0],
            "TMPDIR": directory or "/tmp",
            "PYTHONPATH": ":".join(packages),
        }
        return [SOURCE, json.dumps(supervisor_settings)], environment


def make(
    name: str,
    limits: limits_module.Limits,
    packages: tuple[str, ...],
    image: str,
    *,
    allow_unsafe: bool,
    door: str = "",
) -> Backend:
    """Returns the backend with this name.

    Args:
      name: One of `NAMES`.
      limits: Limits of each sandbox.
      packages: Directories of the host that are shown read-only and searched for Python modules.
      image: Container image with Python 3.11 and bash. Only the container backend reads it.
      allow_unsafe: Permits the backend "none".
      door: Folder of the host whose sockets the sandboxes may connect to. Empty: none.
    """
    config_lib.check_choice(name, NAMES, "sandbox.backend")
    for path in packages:
        config_lib.check(os.path.isdir(path), "sandbox.packages", f"{path} is no directory")
    if name == "none":
        config_lib.check(
            allow_unsafe,
            "sandbox.backend",
            "none runs what a policy writes with all rights of this process; set sandbox.allow_unsafe=True if that is "
            "meant",
        )
        return Unconfined(limits, {path: path for path in packages}, door)
    places = {os.path.realpath(path): f"/packages/{number}" for number, path in enumerate(packages)}
    if name == "container":
        runtime = shutil.which("podman") or shutil.which("docker")
        if runtime is None:
            raise protocols.ConfigError("config.sandbox.backend: container needs podman or docker, and neither is here")
        return ContainerBackend(limits, places, runtime, image, door)
    program = shutil.which("bwrap")
    if program is None:
        raise protocols.ConfigError(f"config.sandbox.backend: bubblewrap is not here: {INSTALL}")
    return Bubblewrap(limits, places, program, door)


class Bubblewrap(Backend):
    """Runs each sandbox in its own namespaces, with a read-only system, no network and no privileges.

    If this process is root, it changes to another user before it starts bubblewrap. Otherwise the sandbox would still
    be the host's root under another name. It would own the host's devices and kernel settings, and the kernel would not
    count its processes.
    """

    def __init__(self, limits: limits_module.Limits, packages: Mapping[str, str], program: str, door: str = "") -> None:
        super().__init__(limits, packages, door)
        self._program = program
        # Older versions of bubblewrap lack some options, so its help text tells which ones exist.
        self._options = _help(program)
        self._root = os.geteuid() == 0
        if self._root and shutil.which("setpriv") is None:
            raise protocols.ConfigError(
                "config.sandbox.backend: bubblewrap run by root needs setpriv to give root's rights up; install "
                "util-linux, or run as another user"
            )
        for path in packages:
            # The sandbox's user is not root, so the permissions for others have to let it read and enter the folder.
            readable = not self._root or os.stat(path).st_mode & 0o005 == 0o005
            config_lib.check(readable, "sandbox.packages", f"{path} is for root alone; let others read it (chmod o+rx)")
        self._zero = _ZERO if self._root and _mounts(_MAKE_ZERO) else ""
        self._terminals = _TERMINALS if self._root and _mounts(_MAKE_TERMINALS) else ""
        # The words before the command, and the host's path of each directory that is shown. They make the sandbox the
        # kernel's first choice to kill if memory runs out. Paths that only root reaches are mounted below /mnt first,
        # in a private mount namespace, while the process is still root.
        home = os.path.realpath(sys.base_prefix)
        places = {home: home, **self.packages, **({os.path.realpath(door): DOOR} if door else {})}
        self._binds = {path: (path, place) for path, place in places.items()}
        script, words = "echo 1000 2>/dev/null >/proc/self/oom_score_adj; set -e; ", ["sh", "-c"]
        mounts = [_MAKE_ZERO] * bool(self._zero) + [_MAKE_TERMINALS] * bool(self._terminals)
        # An overlay has files of its own: a lock on one is none on the host's. Named by `.`, it does not tell its path.
        overlays = self._root and _overlays()
        folders = [_LOWER, _TERMINALS]
        self._system = {path: path for path in _READ_ONLY if os.path.isdir(path) and not os.path.islink(path)}
        for number, path in enumerate([*self._binds, *self._system] if self._root else ()):
            place = f"/mnt/{number}"
            # A socket is reached through its own file only, so the door stays as it is.
            if overlays and self._binds.get(path, ("", ""))[1] != DOOR and not _holds_mounts(path):
                mounts.append(_overlay(path, place))
            elif not all(folder.stat().st_mode & 0o001 for folder in (Path(path), *Path(path).parents)):
                mounts.append(f"mount --bind {shlex.quote(path)} {place}")
            else:
                continue
            folders.append(place)
            if path in self._binds:
                self._binds[path] = (place, self._binds[path][1])
            else:
                self._system[path] = place
        if mounts:
            words = [*_PRIVATELY, *words]
            script += "".join(f"{mount}; " for mount in (_EMPTY, f"mkdir {' '.join(folders)}", *mounts))
        self._prefix = [*words, script + 'exec "$@"', "sh"]
        match = re.match(r"(\d+)\.(\d+)", platform.release())
        release = (int(match[1]), int(match[2])) if match else (0, 0)
        # From Linux 5.14 on, each user namespace has its own process count. Before, the count included the user's other
        # processes on the host, so a limit on it could fail a sandbox that is nearly empty.
        self._counts = release >= (5, 14)
        self._users = _USERS if self._root and _maps_users(_USERS) else None

    def launch(self, *, group: bool) -> SandboxCommand:
        descriptors: list[int] = []

        def holding(content: bytes) -> str:
            descriptors.append(os.memfd_create("sandbox"))
            os.write(descriptors[-1], content)
            os.lseek(descriptors[-1], 0, os.SEEK_SET)
            return str(descriptors[-1])

        command = [*self._prefix]
        if self._root:
            # To a user of this sandbox alone, because the kernel counts some things by user. Random instead of counted,
            # because several runs on a machine share the range.
            user = NOBODY if self._users is None else secrets.choice(self._users)
            command += ["setpriv", f"--reuid={user}", f"--regid={NOBODY}", "--clear-groups"]
        # --unshare-all only tries to make a user namespace; --unshare-user turns a failure into an error.
        command += [self._program, "--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        command += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
        # Older versions lack it. The filter of system calls refuses new namespaces as well.
        command += ["--disable-userns"] if "--disable-userns" in self._options else []
        command += self._mounts()
        for path, text in _FILES.items():
            command += ["--file", holding(text.encode()), path]
        if filtered := seccomp.program():
            command += ["--seccomp", holding(filtered)]
        info = holding(b"")  # not a pipe: if its reader died, bubblewrap would end and leave its clone behind
        program, environment = self._first_process(count_processes=self._counts, group=group)
        command += ["--info-fd", info, "--remount-ro", "/", "--chdir", WORKSPACE, "--", *_PYTHON, "-c", *program]
        return SandboxCommand(command, environment, int(info), tuple(descriptors))

    def caveats(self, *, group: bool) -> list[str]:
        caveats = [] if group else [_SAMPLED]
        if not seccomp.program():
            caveats.append(f"no filter of system calls for {platform.machine()}: code can change limits and priorities")
        if self._users is None:
            caveats.append(
                "all sandboxes are one user's: pipes, watches and open files in transit are counted together"
            )
        if not (group or self._zero):
            caveats.append("memory that is shared through /dev/zero and mostly unmapped again is not counted")
        return caveats

    def _mounts(self) -> list[str]:
        words = []
        for path in _READ_ONLY:
            # On many systems /bin and /lib are links into /usr. The sandbox gets the same links.
            if os.path.islink(path):
                words += ["--symlink", os.readlink(path), path]
            elif path in self._system:
                words += ["--ro-bind", self._system[path], path]
        for name in _ETC:
            words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        words += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]
        if self._zero:
            words += ["--dev-bind", self._zero, "/dev/zero"]
        if self._terminals:
            words += ["--dev-bind", self._terminals, "/dev/pts"]
        for path in (WORKSPACE, "/tmp", "/dev/shm"):
            if "--size" in self._options:  # otherwise the first process checks the size while a call runs
                words += ["--size", str(self.limits.workspace_mib * 2**20)]
            words += ["--tmpfs", path]
        for path, place in self._binds.values():
            words += ["--ro-bind", path, place]
        return [*words, "--remount-ro", "/dev"]


def _overlays() -> bool:
    """Returns whether folders of the host can be shown as overlays."""
    return _mounts(f"mount -t overlay -o lowerdir=/usr:{_LOWER} none {_LOWER}")


def _overlay(path: str, place: str) -> str:
    """Returns a command that shows a folder read-only at a place, with files of its own if its file system can."""
    mount = f"mount -t overlay -o lowerdir=.:{_LOWER} none {place} 2>/dev/null || mount --bind . {place}"
    return f"(cd {shlex.quote(path)}; {mount})"


def _holds_mounts(path: str) -> bool:
    """Returns whether something is mounted below a folder. An overlay of the folder would not show it."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return any(point.startswith(f"{path.rstrip('/')}/") for point in points)


@functools.cache
def _mounts(make: str) -> bool:
    """Returns whether this can be made below /mnt in a private mount namespace. Some containers refuse it even to root.

    Args:
      make: Commands of the shell.
    """
    try:
        script = f"set -e; {_EMPTY}; mkdir {_LOWER} {_TERMINALS}; {make}" + (
            f"; head -c1 {_ZERO}" if make == _MAKE_ZERO else ""
        )
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


class ContainerBackend(Backend):
    """Runs each sandbox as a podman or docker container. The runtime brings its own filter of system calls."""

    def __init__(
        self, limits: limits_module.Limits, packages: Mapping[str, str], runtime: str, image: str, door: str = ""
    ) -> None:
        config_lib.check(bool(image), "sandbox.image", "must name an image with Python 3.11 and bash")
        super().__init__(limits, packages, door)
        self._runtime, self._image = runtime, image

    def launch(self, *, group: bool) -> SandboxCommand:
        """See `Backend`. The runtime makes its own control group, so `group` is ignored."""
        limits, name = self.limits, f"libra-{uuid.uuid4().hex}"
        size = f"rw,nosuid,nodev,mode=1777,size={limits.workspace_mib}m"
        command = [self._runtime, "run", "--rm", "--interactive", "--pull=never", f"--name={name}", "--network=none"]
        command += ["--read-only", f"--user={NOBODY}:{NOBODY}", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        # Swap is part of the second number, so equal numbers allow none.
        command += [f"--memory={limits.memory_mib}m", f"--memory-swap={limits.memory_mib}m"]
        # 3 more processes for the sandbox itself: its first process and two interpreters.
        command += ["--oom-score-adj=1000", f"--pids-limit={limits.processes + 3}"]
        command += [f"--shm-size={limits.workspace_mib}m"]
        command += [f"--tmpfs={WORKSPACE}:{size},exec", f"--tmpfs=/tmp:{size}", f"--workdir={WORKSPACE}"]
        command += [f"--volume={path}:{place}:ro" for path, place in self.packages.items()]
        command += [f"--volume={self.door}:{DOOR}:ro"] if self.door else []
        program, environment = self._first_process(group=True)
        # The host's own Python is not in the image.
        command += [f"--env={key}={value}" for key, value in {**environment, "PATH": _PATH}.items()]
        command += [self._image, "python3", "-I", "-c", *program]
        # The runtime's client needs this process's environment. The container gets only the --env words.
        return SandboxCommand(command, dict(os.environ), remove=(self._runtime, "rm", "--force", name))


class Unconfined(Backend):
    """Runs code as a plain process, if neither other backend is available. It stops accidents, but no attacks."""

    @property
    def door_place(self) -> str:
        return ""

    def launch(self, *, group: bool) -> SandboxCommand:
        directory = os.path.realpath(scratch.folder("sandbox"))
        program, environment = self._first_process(directory, group=group)
        return SandboxCommand([*_PYTHON, "-c", *program], environment, directory=directory)

    def caveats(self, *, group: bool) -> list[str]:
        del group
        return ['backend "none" contains nothing: code has all rights of this process', _SAMPLED]
