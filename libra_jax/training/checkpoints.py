"""Saves and restores the train state with Orbax, asynchronously.

A checkpoint is a directory that Orbax writes under a temporary name and renames into place. When the directory is
durable, the *seal* is written into it last: a list of its files with sizes and checksums. A directory without a seal
was cut short. A directory whose files do not match the seal was damaged later. Both errors are reported before Orbax
reads a byte. A state with numbers that are not finite is neither saved nor restored.

If several processes share the state, all of them make the same calls. Each process writes and reads what its devices
hold, and verifies its share of the files. Process 0 renames the directory and seals it, after all processes have
written.

Thread-safety: one thread calls; Orbax writes in its own threads, and one thread of this module waits for them.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from libra_jax import protocols
from libra_jax.data import world
from libra_jax.training import state as state_lib
from libra_jax.utils import checksums

SEAL = checksums.SEAL
HOST = "libra_host.json"


class Checkpointer:
    """Saves and restores train states.

    Args:
      compress: compress the arrays. False makes a snapshot ready sooner, if it is read once and then removed.
    """

    def __init__(self, *, compress: bool = True) -> None:
        logging.getLogger("absl").addFilter(_is_news)
        self._orbax = ocp.StandardCheckpointer()
        self._saves = self._orbax
        if not compress:
            self._saves = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
        self._target = pathlib.Path()
        self._finishing: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def saving(self) -> bool:
        """True while the last save is neither durable nor failed."""
        return self._finishing is not None and self._finishing.is_alive()

    def save(self, path: str, state: state_lib.TrainState, host: Mapping[str, Any] | None = None) -> None:
        """Starts to save `state` into the new directory `path`. The state may be changed or donated after the return.

        The rest of a killed save at `path` is replaced.

        Args:
          path: directory to create.
          state: train state on the devices.
          host: the trainer's further state, as JSON; `host_state` reads it.

        Raises:
          LibraError: `path` holds a whole checkpoint.
          CheckpointFailed: `path` cannot be written, or the state holds numbers that are not finite.
        """
        self.wait()
        target = pathlib.Path(path).absolute()
        if (target / SEAL).exists():
            raise protocols.LibraError(f"{target}: holds a checkpoint already; save to a new directory.")
        if not is_finite(state):
            raise protocols.CheckpointFailed(f"{target}: not written, because the train state {NOT_FINITE}.")
        try:
            # Tried at once, because Orbax's threads would wait for minutes if the directory cannot be written, and at
            # exit, too.
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=target.parent):
                pass
            # If the disk fills up while they write, they fail in time, with a page of traces each. A trained state
            # hardly shrinks under compression, so the bytes of its arrays are the estimate.
            free, needed = shutil.disk_usage(target.parent).free, sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            if free < needed:
                room = f"{needed / 1e6:,.1f} MB to write, {free / 1e6:,.1f} MB free"
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {room}")
            # force: a killed save may have left an unsealed directory here.
            if self._saves is self._orbax:
                self._orbax.save(target, _tree(state), force=True)
            else:
                self._saves.save(target, args=ocp.args.PyTreeSave(_tree(state)), force=True)
        except (OSError, ValueError) as error:
            raise protocols.CheckpointFailed(
                f"{target}: the checkpoint cannot be written ({_line(error)}): see to the disk."
            ) from error
        self._target = target
        self._finishing = threading.Thread(target=self._finish, args=(dict(host or {}),), name="seal", daemon=True)
        self._finishing.start()

    def _finish(self, host: Mapping[str, Any]) -> None:
        try:
            self._saves.wait_until_finished()
            if jax.process_index() == 0:
                with (self._target / HOST).open("w") as file:
                    json.dump(dict(host), file)
                    file.flush()
                    # Durable before the seal, which vouches for this file too.
                    os.fsync(file.fileno())
                checksums.seal_folder(self._target)
        except Exception as error:  # Orbax re-raises any error of its writing threads; `wait` reports it
            self._error = error

    def wait(self) -> None:
        """Waits until the last `save` is durable and sealed.

        Raises:
          CheckpointFailed: the checkpoint could not be written.
          PeerLost: another process of the trainer is gone.
        """
        if self._finishing is None:
            return
        self._finishing.join()
        error, self._finishing, self._error = self._error, None, None
        if error is not None:
            raise world.peer_lost(error) or protocols.CheckpointFailed(
                f"{self._target}: the checkpoint cannot be written ({_line(error)}): see to the disk."
            ) from error

    def restore(self, path: str, structure: state_lib.TrainState) -> state_lib.TrainState:
        """Restores the state saved at `path`, each shard directly onto its device.

        Args:
          path: directory given to `save`, on any mesh.
          structure: `jax.ShapeDtypeStruct` leaves with the shardings to restore into.

        Raises:
          DataError: the directory is missing, incomplete, damaged, or of another model or optimizer; or its state
            is not finite.
        """
        source = pathlib.Path(path).absolute()
        if not source.is_dir():
            raise protocols.DataError(f"{source}: no such checkpoint directory.")
        try:
            sealed = checksums.read_seal(source)
        except FileNotFoundError:
            raise protocols.DataError(
                f"{source}: its save was cut short ({SEAL} is missing); use an earlier checkpoint."
            ) from None
        except (OSError, ValueError):
            raise protocols.DataError(f"{source}: {SEAL} is damaged; use an earlier checkpoint.") from None
        # Each process verifies every n-th file, so that together they read the checkpoint once.
        share = sorted(sealed)[jax.process_index() :: jax.process_count()]
        if problem := checksums.problem(source, {name: sealed[name] for name in share}):
            raise protocols.DataError(f"{source}/{problem}; the checkpoint is damaged, use an earlier one.")
        if self._finishing is not None:
            self._finishing.join()  # two threads must not wait for Orbax at once
        try:
            tree = self._orbax.restore(source, _tree(structure))
        except Exception as error:  # Orbax raises bare Exception for unreadable arrays
            raise protocols.DataError(
                f"{source}: does not hold a train state of this model and optimizer ({_line(error)})."
            ) from error
        if tree.get("critic") is not None:
            tree["critic"] = state_lib.TrainState(**tree["critic"])
        state = state_lib.TrainState(**tree)
        if not is_finite(state):
            raise protocols.DataError(
                f"{source}: {NOT_FINITE}; move this checkpoint away to go on from the one before it."
            )
        return state

    def close(self) -> None:
        """Waits for the last save and ends Orbax's threads."""
        try:
            self.wait()
        finally:
            self._orbax.close()
            if self._saves is not self._orbax:
                self._saves.close()


def _is_news(record: logging.LogRecord) -> bool:
    """Returns False for an error of Orbax's threads, which log their traces. `Checkpointer.wait` raises the error."""
    return record.exc_info is None or f"{os.sep}orbax{os.sep}" not in record.pathname


def _tree(state: state_lib.TrainState) -> dict[str, Any]:
    tree = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    if state.critic is not None:
        tree["critic"] = _tree(state.critic)
    return {name: value for name, value in tree.items() if value is not None}


NOT_FINITE = "holds numbers that are not finite (NaN or infinity)"


_all_finite = jax.jit(lambda leaves: jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all())


def is_finite(tree: Any) -> bool:
    """Returns True if all numbers in a tree of arrays are finite. A collective if several processes share them."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return bool(_all_finite(leaves)) if leaves else True


def host_state(path: str) -> dict[str, Any]:
    """Returns the host state saved beside the train state; empty if the checkpoint has none.

    Raises:
      DataError: the file cannot be read.
    """
    file = pathlib.Path(path) / HOST
    try:
        return json.loads(file.read_text()) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise protocols.DataError(f"{file}: cannot be read ({_line(error)}); use an earlier checkpoint.") from error


def _line(error: BaseException) -> str:
    """Returns the first line of an error's text, cut to a readable length."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
