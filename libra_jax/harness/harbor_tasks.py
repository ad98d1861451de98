"""Reads the tasks of Harbor's task folders."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from libra_jax import protocols
from libra_jax.environments import datasets


def task_source(path: str = "", seed: int = 0, holdout: float = 0.05) -> datasets.FileTasks:
    """Returns the tasks of a folder of Harbor's task folders.

    Args:
      path: The folder. Each folder in it with a `task.toml` is a task.
      seed: Seed of the order of training tasks.
      holdout: Share of the tasks that are kept for evaluation, at least one. 0 means none.

    Raises:
      DataError: The folder holds no tasks, or one is malformed. Has its path.
    """
    folders = sorted(file.parent for file in Path(path or ".").glob("*/task.toml"))
    if not folders:
        raise protocols.DataError(f"{path or '.'}: no folder in it has a task.toml, so it holds no tasks of Harbor")
    return datasets.FileTasks(
        path,
        seed,
        [(number, _payload(folder)) for number, folder in enumerate(folders, 1)],
        holdout,
        prompt="instruction",
    )


def _payload(folder: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads((folder / "task.toml").read_text())
        instruction = (folder / "instruction.md").read_text()
    except (OSError, ValueError) as error:
        raise protocols.DataError(f"{folder}: {error}") from error
    if settings.get("steps"):
        raise protocols.DataError(f"{folder}: task.toml has steps, and tasks of several steps are not supported")
    if not (folder / "tests" / "test.sh").is_file():
        raise protocols.DataError(f"{folder}: there is no tests/test.sh")
    parts = {name: settings.get(name, {}) for name in ("agent", "verifier", "environment")}
    return {
        "instruction": instruction,
        "folder": str(folder.resolve()),
        "agent_seconds": float(parts["agent"].get("timeout_sec") or 0.0),
        "tests_seconds": float(parts["verifier"].get("timeout_sec") or 600.0),
        "tests_variables": dict(parts["verifier"].get("env", {})),
        "variables": dict(parts["environment"].get("env", {})),
        "image": str(parts["environment"].get("docker_image") or ""),
    }
