"""Running the scripts of launch/ as a user does, and reading what they answer."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

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


def assert_one_sentence(result: subprocess.CompletedProcess[str], *fragments: str) -> None:
    """The script failed with one sentence that holds the fragments, and no traceback."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    for fragment in fragments:
        assert fragment in errors[0], errors[0]
