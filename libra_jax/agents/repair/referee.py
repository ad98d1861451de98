"""The process that runs hidden tests in a sandbox and answers the host. It never imports the tested code.

A sandbox gets this file as text after `guard.py` and `hidden.py`, so it imports the standard library
only. The tested code cannot trace this process, which alone holds the descriptor of the answer. Tests run in a child:
either `hidden.py` in a fork, or the project's own command. A child's report counts only if the child ends properly.
"""

from __future__ import annotations

import ctypes
import fnmatch
import hashlib
import importlib.machinery
import json
import os
import resource
import secrets
import select
import shutil
import signal
import struct
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax.agents.repair import hidden

_PR_SET_DUMPABLE = 4
_TOO_LONG = "the tests' report takes more than {} MiB"
_HEADER = struct.Struct(">16sI")


def _path(workspace: str) -> list[str]:
    """Returns the folders where the repository's modules are searched first."""
    packages = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [os.path.join(workspace, "src"), workspace, *filter(None, packages)]


def _limits() -> list[Any]:
    """Returns the limits of this process and of the sandbox's first process."""
    kinds = sorted(value for name, value in vars(resource).items() if name.startswith("RLIMIT_"))
    found: list[Any] = [resource.getrlimit(kind) for kind in kinds]
    try:
        with open("/proc/1/limits") as file:
            found.append(file.read())
    except OSError:
        pass
    return found


# unittest, in a child that is forked from here -----------------------------------------------------------------------


def _in_memory(paths: Sequence[str], workspace: str, *, remove: bool) -> dict[str, tuple[str, str]]:
    """Returns modules by name, with path and text. With `remove`, also removes the files from the disk."""
    found = {}
    for path in paths:
        if path.endswith(".py"):
            place = os.path.join(workspace, path)
            with open(place, "rb") as file:
                text = file.read().decode(errors="replace")
            if remove:
                os.unlink(place)
            name = path.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            found[name] = (place, text)
    return found


def forked(request: Mapping[str, Any], workspace: str, answer: int) -> dict[str, Any]:
    """Runs the hidden tests in a child, and returns the child's report.

    The report is one frame with a nonce, and the child exits right after it with status 0. Anything else is not a
    report.
    """
    tests = _in_memory(request["tests"], workspace, remove=True)
    helpers = _in_memory(request["helpers"], workspace, remove=False)
    nonce = secrets.token_bytes(16)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        # The child runs tested code, which must not be able to write the answer.
        os.close(answer)
        _report(tests, helpers, workspace, write, nonce)
    os.close(write)
    most = _HEADER.size + request["most_bytes"]
    text = _received(read, child, most)
    if len(text) > most:
        os.kill(child, signal.SIGKILL)  # the child may wait for a reader of the rest
    os.close(read)
    _, status = os.waitpid(child, 0)
    if len(text) > most:
        return {"problem": _TOO_LONG.format(request["most_bytes"] // 2**20)}
    if os.waitstatus_to_exitcode(status):
        return {"problem": f"the tests' process ended with status {os.waitstatus_to_exitcode(status)}"}
    if len(text) < _HEADER.size:
        return {"problem": "the tests' process ended before its tests did"}
    told, length = _HEADER.unpack_from(text)
    if told != nonce or length != len(text) - _HEADER.size:
        return {"problem": "the tests' process sent something that is no report", "forged": True}
    report: dict[str, Any] = json.loads(text[_HEADER.size :])
    return report


def _report(
    tests: Mapping[str, tuple[str, str]],
    helpers: Mapping[str, tuple[str, str]],
    workspace: str,
    target: int,
    nonce: bytes,
) -> None:
    """Runs the tests in the child and sends the report.

    Exits without `atexit`, so that nothing runs after the report.
    """
    # Taken before the tested code is imported, which could replace them.
    leave, write, pack, dumps = os._exit, os.write, _HEADER.pack, json.dumps
    try:
        import sys

        path = _path(workspace)
        sys.path[:0] = path
        report = dumps(hidden.play(tests, helpers, path[:2], workspace)).encode()
        left = memoryview(pack(nonce, len(report)) + report)
        while left:
            left = left[write(target, left) :]
        leave(0)
    finally:
        leave(1)


def _received(source: int, child: int, most: int) -> bytes:
    """Returns what a child writes until it ends. Processes that it leaves behind may keep the pipe open.

    Args:
      source: Read end of the pipe. It stays open.
      child: Process id of the child.
      most: Number of bytes after which reading stops.
    """
    ended, pieces = os.pidfd_open(child), bytearray()
    os.set_blocking(source, False)
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(ended, select.POLLIN)
    over = False
    while len(pieces) <= most:
        if not over:
            # The child has ended: only what lies in the pipe by now is its own.
            over = any(place == ended for place, _ in poll.poll())
        try:
            piece = os.read(source, 2**16)
        except BlockingIOError:
            if over:
                break
            continue
        if not piece and over:
            break
        if not piece:
            poll.unregister(source)
            poll.poll()
            break
        pieces += piece
    os.close(ended)
    return bytes(pieces)


# The project's own command -------------------------------------------------------------------------------------------


def _marks(request: Mapping[str, Any], workspace: str) -> dict[str, str]:
    """Returns a digest of each file that decides how tests run."""
    found, tests = {}, set(request["tests"])
    for folder, _, names in os.walk(workspace):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), workspace)
            if path in tests or any(fnmatch.fnmatchcase(name, pattern) for pattern in request["startup"]):
                try:
                    with open(os.path.join(folder, name), "rb") as file:
                        found[path] = hashlib.sha256(file.read()).hexdigest()
                except OSError as error:
                    found[path] = type(error).__name__
    return found


def commanded(request: Mapping[str, Any], workspace: str) -> dict[str, Any]:
    """Runs a command. Returns its JUnit report if it makes pytest write one, otherwise its output."""
    before, folder = _marks(request, workspace), os.path.join("/tmp", secrets.token_hex(8))
    os.mkdir(folder)
    # A random place, so that tested code cannot prepare a report there.
    report = os.path.join(folder, secrets.token_hex(8))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(_path(workspace)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_ADDOPTS": f"--junitxml={report}",
    }
    shell = subprocess.run(
        ["/bin/bash", "--noprofile", "--norc", "-c", request["command"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=workspace,
        env=environment,
        check=False,
    )
    after = _marks(request, workspace)
    touched = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    found = {"changes": [f"{path} was touched while the tests ran" for path in touched], "status": shell.returncode}
    try:
        # Tested code may have put a link or a pipe there.
        with open(os.open(report, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found["junit"] = file.read(request["most_bytes"] + 1).decode(errors="replace")
    except OSError:
        found["printed"] = shell.stdout[-request["most_bytes"] // 8 :].decode(errors="replace")
    shutil.rmtree(folder, ignore_errors=True)
    return found


def main(request_text: str, workspace: str) -> None:
    """Runs the tests and writes the answer: the request's secret, and the report of the tests' process.

    Args:
      request_text: Request in JSON, made by `suites.py`.
      workspace: Folder of the repository and the tests.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no other process may trace this one
    # The answer gets a descriptor that no child inherits, and nobody else writes to the standard streams' places.
    answer, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(nothing, target)
    request, limits = json.loads(request_text), _limits()
    own, packages = _path(workspace)[:2], _path(workspace)[2:]
    for name in request["added"]:
        spec = importlib.machinery.PathFinder.find_spec(name, packages)
        # A folder without __init__.py has no loader, and takes the place of no package.
        if spec is None or spec.loader is None:
            continue
        # The policy added a module under the name of an installed package, which it would replace.
        for root in own:
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
            if os.path.isfile(os.path.join(root, f"{name}.py")):
                os.unlink(os.path.join(root, f"{name}.py"))
    found = commanded(request, workspace) if request["command"] else forked(request, workspace, answer)
    if _limits() != limits:
        found.setdefault("changes", []).append("the limits of the sandbox were changed")
    text = json.dumps({**found, "secret": request["secret"]}).encode()
    if len(text) > request["most_bytes"]:  # the sandbox would cut the middle out of a longer answer
        problem = _TOO_LONG.format(request["most_bytes"] // 2**20)
        text = json.dumps({"problem": problem, "secret": request["secret"]}).encode()
    left = memoryview(text)
    while left:
        left = left[os.write(answer, left) :]
