"""The folder of one rollout: made fresh, filled with a template and the task's files, read at the end, and removed."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from libra_jax import protocols
from libra_jax.rewards.repair import snapshots
from libra_jax.utils import scratch

FOLDERS = ("work", "home", "tmp")


def fresh() -> Path:
    """Returns a new folder of one rollout, with empty `FOLDERS`."""
    root = scratch.folder("harness")
    for name in FOLDERS:
        (root / name).mkdir()
    return root


def folder_variables(root: Path) -> dict[str, str]:
    """Returns the variables that name an agent's own folders."""
    return {"HOME": str(root / "home"), "TMPDIR": str(root / "tmp")}


def tell(root: Path, name: str, text: str) -> Path:
    """Writes a file next to the agent's folders, which tells it what to do. Returns its path."""
    (root / "told").mkdir()
    (root / "told" / name).write_text(text)
    return root / "told" / name


def fill(root: Path, template: str, files: snapshots.RepositorySnapshot) -> None:
    """Copies a template into the folder's working directory, and writes files there."""
    if template:
        shutil.copytree(template, root / "work", symlinks=True, dirs_exist_ok=True)
    lay(files, root / "work")


def lay(files: snapshots.RepositorySnapshot, folder: Path) -> None:
    """Writes files into a folder. Paths that lead out of the folder are refused."""
    for path in (*files.files, *files.links):
        if not snapshots.is_inside(path):
            raise protocols.DataError(f"the path {path!r} of a task's file leads out of its folder")
    for path, file in files.files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.content)
        place.chmod(0o755 if file.executable else 0o644)
    for path, target in files.links.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).symlink_to(target)


def read(path: Path, most_bytes: int) -> bytes:
    """Returns the first bytes of a file. An agent may have put a link, a pipe or a folder there, or a large file."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        return file.read(most_bytes)


def collect(work: Path, patterns: Sequence[str], most_bytes: int) -> tuple[dict[str, snapshots.File], str]:
    """Returns the regular files of a working directory whose paths match a pattern, and why there are none.

    Links are not followed, not even one in the directory's own place; `.git` and `__pycache__` are left out.

    Args:
      work: the working directory. Nothing may write to it any more.
      patterns: patterns of `fnmatch`, such as "*.py"; "*" also matches "/".
      most_bytes: most bytes of all files of the directory.
    """
    if not patterns:
        return {}, ""
    if work.is_symlink():
        return {}, "the agent put a link in the place of its working directory"
    try:
        files = snapshots.RepositorySnapshot.read(work, most_bytes).files
    except (protocols.DataError, OSError, RecursionError) as error:  # the last one: folders that are nested too deeply
        return {}, str(error)
    return select(files, patterns), ""


def select(files: Mapping[str, snapshots.File], patterns: Sequence[str]) -> dict[str, snapshots.File]:
    """Returns the files whose paths match one of the patterns."""
    return {
        path: file for path, file in files.items() if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
    }
