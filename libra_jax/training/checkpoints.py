"""Saving and restoring the train state with Orbax, asynchronously.

A checkpoint is a directory that Orbax writes under a temporary name and renames into place; when it is durable, a list
of its files and their sizes, the *seal*, is written into it last. A directory without its seal was cut short; one whose
files do not fit the seal was damaged since. Both are told before Orbax reads a byte.

Thread-safety: one thread calls; Orbax writes in threads of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
from typing import Any

import jax
import orbax.checkpoint as ocp

from libra_jax import protocols
from libra_jax.training import state as state_lib

SEAL = "libra_files.json"


class Checkpointer:
    """Saves and restores train states."""

    def __init__(self) -> None:
        self._orbax = ocp.StandardCheckpointer()
        self._pending: pathlib.Path | None = None

    def save(self, path: str, state: state_lib.TrainState) -> None:
        """Begins to save `state` into the new directory `path`; it may be changed or donated as soon as this returns.

        What a killed save left behind at `path` is replaced.

        Raises:
          LibraError: `path` holds a whole checkpoint, or cannot be written.
        """
        self.wait()
        target = pathlib.Path(path).absolute()
        if (target / SEAL).exists():
            raise protocols.LibraError(f"{target}: holds a checkpoint already; save to a new directory.")
        try:
            _check_writable(target.parent)
            self._orbax.save(target, _tree(state), force=True)
        except (OSError, ValueError) as error:
            raise protocols.LibraError(f"{target}: the checkpoint cannot be written ({_line(error)}).") from error
        self._pending = target

    def wait(self) -> None:
        """Returns when the last `save` is durable and sealed.

        Raises:
          LibraError: it could not be written.
        """
        target, self._pending = self._pending, None
        if target is None:
            return
        try:
            self._orbax.wait_until_finished()
            _seal(target)
        except Exception as error:  # Orbax passes on whatever its writing threads met
            raise protocols.LibraError(f"{target}: the checkpoint cannot be written ({_line(error)}).") from error

    def restore(self, path: str, structure: state_lib.TrainState) -> state_lib.TrainState:
        """Restores the state saved at `path`, each shard straight onto its device.

        Args:
          path: directory given to `save`, on whatever mesh that was.
          structure: `jax.ShapeDtypeStruct` leaves with the shardings to restore into.

        Raises:
          DataError: the directory is missing, incomplete, damaged, or of another model or optimizer.
        """
        source = pathlib.Path(path).absolute()
        _check_seal(source)
        try:
            tree = self._orbax.restore(source, _tree(structure))
        except Exception as error:  # Orbax raises bare Exception for unreadable arrays
            raise protocols.DataError(
                f"{source}: does not hold a train state of this model and optimizer ({_line(error)})."
            ) from error
        return state_lib.TrainState(**tree)

    def close(self) -> None:
        """Waits for the last save and ends Orbax's threads."""
        try:
            self.wait()
        finally:
            self._orbax.close()


def _check_writable(directory: pathlib.Path) -> None:
    """Raises OSError now: Orbax's threads would wait minutes for a directory that nobody can make, at exit too."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def _tree(state: state_lib.TrainState) -> dict[str, Any]:
    tree = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: value for name, value in tree.items() if value is not None}


def _files(directory: pathlib.Path) -> dict[str, int]:
    return {
        str(file.relative_to(directory)): file.stat().st_size
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file.name != SEAL
    }


def _seal(directory: pathlib.Path) -> None:
    if jax.process_index() != 0:
        return
    sizes = _files(directory)
    partial = directory / f"{SEAL}.partial"
    with partial.open("w") as file:
        json.dump(sizes, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / SEAL)


def _check_seal(directory: pathlib.Path) -> None:
    if not directory.is_dir():
        raise protocols.DataError(f"{directory}: no such checkpoint directory.")
    try:
        sealed = json.loads((directory / SEAL).read_text())
    except FileNotFoundError:
        raise protocols.DataError(
            f"{directory}: its save was cut short ({SEAL} is missing); use an earlier checkpoint."
        ) from None
    except ValueError:
        raise protocols.DataError(f"{directory}: {SEAL} is damaged; use an earlier checkpoint.") from None
    found = _files(directory)
    for name, size in sealed.items():
        if found.get(name) != size:
            problem = "is missing" if name not in found else f"has {found[name]} bytes instead of {size}"
            raise protocols.DataError(f"{directory / name}: {problem}; the checkpoint is damaged, use an earlier one.")


def _line(error: BaseException) -> str:
    """The first line of an error's text, cut to a readable length."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
