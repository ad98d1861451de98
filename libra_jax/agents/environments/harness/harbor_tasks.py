"""Reads Harbor's task folders: the tasks, and what a Dockerfile says."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra_jax import protocols
from libra_jax.agents import datasets

_IGNORED = ("FROM", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "USER", "SHELL", "STOPSIGNAL", "MAINTAINER", "VOLUME")


@dataclass(frozen=True)
class Recipe:
    """What a Dockerfile says, as far as it can be had without an image.

    Attributes:
      folder: working directory.
      copies: pairs of a path in the task's folder `environment`, and a place.
      variables: environment variables.
      unmet: instructions that need an image.
    """

    folder: str = "/app"
    copies: Sequence[tuple[str, str]] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    unmet: Sequence[str] = ()


def read_recipe(text: str) -> Recipe:
    """Reads a Dockerfile. Without one (an empty text), the working directory is /app."""
    folder, variables = "/app", dict[str, str]()
    copies: list[tuple[str, str]] = []
    unmet: list[str] = []
    joined = re.sub(r"\\\s*\n", " ", re.sub(r"^\s*#.*\n?", "", text, flags=re.MULTILINE))
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        name, rest = word.upper(), rest.strip()
        if name == "WORKDIR":
            folder = os.path.normpath(os.path.join(folder if copies or rest.startswith("/") else "/", rest))
        elif name == "ENV":
            pairs = re.findall(r'(\w+)=("[^"]*"|\S+)', rest) or [tuple(rest.split(None, 1))]
            variables |= {pair[0]: pair[1].strip('"') for pair in pairs if len(pair) == 2}
        elif name in ("COPY", "ADD") and not rest.startswith(("--from", "[", "http")):
            *sources, target = [part for part in rest.split() if not part.startswith("--")]
            place = os.path.normpath(os.path.join(folder, target))
            copies += [
                (source, os.path.join(place, os.path.basename(source)) if target.endswith(("/", ".")) else place)
                for source in sources
            ]
        elif name not in _IGNORED and not re.fullmatch(r"mkdir (-p )?[\w/. -]+", rest):
            unmet.append(line)
    return Recipe(folder, copies, variables, unmet)


def task_source(path: str = "", seed: int = 0, holdout: float = 0.05) -> datasets.FileTasks:
    """Returns the tasks of a folder of Harbor's task folders.

    Args:
      path: The folder. Each folder in it with a `task.toml` is a task.
      seed: Seed of the order of training tasks.
      holdout: Share of the tasks that are kept for evaluation, at least one. 0 means none.

    Raises:
      DataError: The folder holds no tasks, or one is malformed. Has its path.
    """
    found = sorted(file.parent for file in Path(path or ".").glob("*/task.toml"))
    if not found:
        raise protocols.DataError(f"{path or '.'}: no folder in it has a task.toml, so it holds no tasks of Harbor")
    return datasets.FileTasks(
        path,
        seed,
        [(number, _payload(folder)) for number, folder in enumerate(found, 1)],
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
        "workdir": str(parts["environment"].get("workdir") or ""),
    }
