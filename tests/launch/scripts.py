"""Running the scripts of launch/ as a user does, and reading what they answer."""

import atexit
import functools
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

import fork_server

from libra_jax.build import huge_pages

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(
    script: str, *arguments: str, seconds: float = 120.0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs launch/`script`, or a module of tests/ by its name, to its end, with further environment variables."""
    program = [f"launch/{script}"] if script.endswith(".py") else ["-m", script]
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def run_forked(
    script: str, *arguments: str, seconds: float = 120.0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs launch/`script`, or one of an absolute path, as `run` does, without the second that its imports take.

    `run` is for what starts engines or workers. Each script is also run once as a process of its own.
    """
    # With malloc's setting a command that trains on CPUs does not start itself again.
    settled = {"PYTHONWARNINGS": "ignore", huge_pages.VARIABLE: "glibc.malloc.hugetlb=1"}
    whole = {**os.environ, **settled, **(environment or {})}
    return _fork_server().run(str(pathlib.Path("launch", script)), arguments, seconds, whole)


@functools.cache
def _fork_server() -> fork_server.ForkServer:
    server = fork_server.ForkServer()
    atexit.register(server.close)
    return server


def assert_one_sentence(result: subprocess.CompletedProcess[str], *fragments: str) -> None:
    """The script failed with one sentence that holds the fragments, and no traceback."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    for fragment in fragments:
        assert fragment in errors[0], errors[0]
