"""Runs commands of launch/ in forks of one process that has imported what they import, which takes over a second.

A fork is the command in all that a test can see: its arguments, folder, environment, path, `__main__` module, standard
streams, and end. What the interpreter reads as it starts (`PYTHON...` variables) is the server's.
"""

import ast
import contextlib
import gc
import importlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import types

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("launch", "launch/support")
OWN = ("__future__", "benchmarks", "gpu", "support")
"""Packages that stay to be imported: some of their modules define flags, and those of benchmarks import JAX."""
START_SECONDS, END_SECONDS = 120.0, 10.0
"""Deadlines of the server's start, which imports what the scripts do, and of an end that was asked for."""

READ_BY_PYTHON = ("PYTHON", "OPENBLAS", "OMP_")
"""Beginnings of variables that are read before a fork begins; PYTHONPATH is read again."""


class ForkServer:
    """A process that forks once for each command. It ends with the process that made it."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                cwd=ROOT,
                env={**self._environment, "OPENBLAS_NUM_THREADS": "1"},  # numpy would start threads of its own
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def run(
        self, script: str, arguments: tuple[str, ...], seconds: float, environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Returns what `subprocess.run` would for `python <script> <arguments>` at the root of the repository.

        Raises:
          subprocess.TimeoutExpired: the command took longer than `seconds`, and was killed.
        """
        differ = {name for name, _ in environment.items() ^ self._environment.items()} - {"PYTHONPATH"}
        early = [name for name in differ if name.startswith(READ_BY_PYTHON)]
        assert not early, f"{early} cannot be set for a fork: use scripts.run"
        command = json.dumps([script, arguments, environment]).encode()
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            socket.send_fds(self._connection, [command], [out.fileno(), err.fileno()])
            pid = self._answer(START_SECONDS)
            try:
                status = self._answer(seconds)
            except (
                BaseException
            ) as error:  # Ctrl-C and a test's timeout, too: the next command must not read this answer
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, 9)
                self._answer(END_SECONDS)
                if isinstance(error, TimeoutError):
                    raise subprocess.TimeoutExpired([script, *arguments], seconds) from None
                raise
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess([script, *arguments], status, out.read(), err.read())

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # it waits for a command
            self._process.kill()
            self._process.wait(END_SECONDS)

    def _answer(self, seconds: float) -> int:
        self._connection.settimeout(seconds)
        message = self._connection.recv(64)
        assert message, "the fork server has ended; its standard error says why"
        return int(message)


def _import_all() -> None:
    """Imports what the scripts import."""
    for file in (file for folder in FOLDERS for file in sorted((ROOT / folder).glob("*.py"))):
        for statement in ast.parse(file.read_text()).body:
            names = []
            if isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            elif isinstance(statement, ast.ImportFrom):
                names = [str(statement.module), *(f"{statement.module}.{alias.name}" for alias in statement.names)]
            for name in names:
                if name.split(".")[0] not in OWN:
                    with contextlib.suppress(ModuleNotFoundError):  # a name inside a module
                        importlib.import_module(name)
    from libra_jax import config
    from libra_jax.config import listing

    list(listing.settings(config.RunConfig))  # meanings of fields are read from their source, once


def _serve(connection: socket.socket) -> tuple[str, list[str], dict[str, str]] | None:
    """Returns None once the client has left; in each fork, its command."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 2**20, 2)
        if not message:
            return None
        # A fork has one thread, and a JAX backend or a lock that another thread held would be broken in it.
        assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1
        assert "jax" not in sys.modules
        pid = os.fork()
        if not pid:
            connection.close()
            for target, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, target)
                os.close(descriptor)
            script, arguments, environment = json.loads(message)
            return script, arguments, environment
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _become(script: str, arguments: list[str], environment: dict[str, str]) -> None:
    """Runs a script as the interpreter does; the process then ends as an interpreter ends."""
    server_paths = len(list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))) + 1
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:server_paths] = [str((ROOT / script).parent), *paths]
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [script, *arguments]
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    exec(compile((ROOT / script).read_text(), script, "exec"), main.__dict__)


if __name__ == "__main__":
    _import_all()
    gc.collect()
    gc.freeze()  # else collections in a fork would touch, and so copy, every page
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        command = _serve(listening)
    if command is not None:
        _become(*command)
