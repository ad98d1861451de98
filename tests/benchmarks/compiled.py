"""The scheduler as `LIBRA_JAX_COMPILE=1 pip install .` makes it, built into a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from libra_jax import protocols

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600.0
"""Deadline of the build, which takes about 20 s of one core."""


def build(folder: Path) -> None:
    """Makes `folder` a place to import a libra_jax from whose scheduler is compiled.

    Raises:
      ConfigError: it cannot be built here; the message says what the build complained of last.
    """
    shutil.copytree(ROOT / "libra_jax", folder / "libra_jax", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = {**os.environ, "LIBRA_JAX_COMPILE": "1", "PYTHONPATH": str(folder)}
    try:
        made = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise protocols.ConfigError(f"the scheduler was not compiled within {SECONDS:g} s") from None
    if made.returncode:
        said = (made.stderr.strip() or made.stdout.strip() or "nothing").splitlines()[-1]
        raise protocols.ConfigError(
            f"the scheduler cannot be compiled here ({said}); it takes a C compiler, and mypy (launch/setup.sh --dev)"
        )


def run(folder: Path, arguments: list[str], *, seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter with these arguments, the compiled scheduler first on its path.

    Raises:
      ConfigError: it took longer than `seconds`.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(ROOT / "launch")])}
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise protocols.ConfigError(f"{' '.join(arguments)} took more than {seconds:g} s") from None
