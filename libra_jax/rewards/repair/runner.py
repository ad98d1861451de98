"""Runs a repository's tests in a process of their own, and sends their report to the host.

A sandbox gets this file as text, with a call of `main` at its end. Standard library only. This process never imports
the tested code, which cannot trace it and inherits no descriptor of the answer. The tests' own process writes the
report, so the tested code can forge one (docs/guides/repositories.md).
"""

from __future__ import annotations

import ctypes
import fnmatch
import hashlib
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

_PR_SET_DUMPABLE = 4
_DRAIN_SECONDS = 2.0  # to read the rest that the tests printed: a process that they left may hold the pipe open
_TOO_LONG = "the tests' report takes more than {} MiB"
_BEGIN = "import unittest.case\nunittest.case._ShouldStop = ()\n"
"""Code that each Python of the tests runs first. The exception ends a test as passed. Nothing can raise a tuple."""

_OPTIONAL = ("__init__", "sitecustomize", "usercustomize", "org")
"""Modules that are imported if they exist: by pytest that of the root, by Python the others. `copy` imports org."""
_FIND = """import json, sys
packages, names = json.load(sys.stdin)
sys.path[:0] = packages
for name in names:
    if name in sys.stdlib_module_names or any(finder.find_spec(name, None) for finder in sys.meta_path):
        print(name)
"""


def _remove_shadows(added: Mapping[str, list[str]], packages: list[str]) -> None:
    """Removes new modules (files by name) that would be imported instead of others, or by no one of the repository."""
    request = json.dumps([packages, [name for name in added if name.isidentifier()]])
    # Python itself knows best what it finds: its own modules, those of its site-packages and of paths that these add.
    command = [sys.executable, "-I", "-c", _FIND]
    importable_names = subprocess.run(
        command, input=request, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    for path in {path for name in (*importable_names, *_OPTIONAL) for path in added.get(name, ())}:
        os.unlink(path)


def _digests(request: Mapping[str, Any], workspace: str) -> dict[str, str]:
    """Returns a digest of each file that decides how tests run."""
    digests, tests = {}, set(request["tests"])
    for folder, _, names in os.walk(workspace):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), workspace)
            if path in tests or any(fnmatch.fnmatchcase(name, pattern) for pattern in request["startup"]):
                try:
                    with open(os.path.join(folder, name), "rb") as file:
                        digests[path] = hashlib.sha256(file.read()).hexdigest()
                except OSError as error:
                    digests[path] = type(error).__name__
    return digests


def _drain(pipe: IO[bytes], printed: bytearray, max_bytes: int) -> None:
    """Reads a pipe to its end, and keeps the last `max_bytes` bytes in `printed`."""
    while chunk := os.read(pipe.fileno(), 65536):
        printed.extend(chunk)
        del printed[:-max_bytes]


def _run(request: Mapping[str, Any], workspace: str, path: list[str]) -> dict[str, Any]:
    """Returns the JUnit report of the tests, or what they printed if there is none."""
    before, folder = _digests(request, workspace), os.path.join("/tmp", secrets.token_hex(8))
    os.mkdir(folder)
    report = os.path.join(folder, secrets.token_hex(8))
    with open(os.path.join(folder, "sitecustomize.py"), "w") as file:
        file.write(_BEGIN)
    command = ["/bin/bash", "--noprofile", "--norc", "-c", request["command"]]
    if not request["command"]:
        modules = [name.removeprefix("src/") for name in request["tests"] if name.endswith(".py")]
        command = [sys.executable, "-c", request["unittest"], report, *modules]
    shell = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=workspace,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([folder, *path]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1",  # its folder is in HOME, which is the workspace
            "PYTEST_ADDOPTS": f"--junitxml={report}",
        },
    )
    # Not a file: tested code could change it, and the limit of a file would fail tests that print much.
    printed = bytearray()
    reader = threading.Thread(target=_drain, args=(shell.stdout, printed, request["most_bytes"] // 8), daemon=True)
    reader.start()
    shell.wait()
    reader.join(_DRAIN_SECONDS)
    after = _digests(request, workspace)
    touched = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    result: dict[str, Any] = {"touched": touched, "status": shell.returncode}
    try:
        # Tested code may have put a link or a pipe there.
        with open(os.open(report, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            result["junit"] = file.read(request["most_bytes"] + 1).decode(errors="replace")
    except OSError:
        result["printed"] = printed.decode(errors="replace")
    return result


def main(request: Mapping[str, Any]) -> None:
    """Runs the tests and writes the answer: the request's secret, and the report of the tests' process."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no other process may trace this one
    # The answer gets a descriptor that no child inherits, and no one else writes to the standard streams' places.
    answer, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(nothing, target)
    workspace = os.getcwd()
    packages = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if request["added"]:
        _remove_shadows(request["added"], packages)
    source = os.path.join(workspace, "src")
    source_paths = [source, workspace] if os.path.isdir(source) else [workspace]  # Python would read a zip file, too
    result = _run(request, workspace, [*source_paths, *packages])
    text = json.dumps({**result, "secret": request["secret"]}).encode()
    if len(text) > request["most_bytes"]:  # the sandbox would cut the middle out of a longer answer
        problem = _TOO_LONG.format(request["most_bytes"] // 2**20)
        text = json.dumps({"problem": problem, "secret": request["secret"]}).encode()
    buffer = memoryview(text)
    while buffer:
        buffer = buffer[os.write(answer, buffer) :]
