"""A run's workdir: made for one config, refused to another config, and held by one process at a time.

On one host, a lock shows if a run lives in the workdir. Other hosts' file systems may not share locks, so there the run
must still change its `status.json`. If a machine hangs, both signs may be wrong; then fencing tokens keep the two runs
apart (`coordinator.fencing`).
"""

from __future__ import annotations

import dataclasses
import fcntl
import glob
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import changes
from libra_jax.coordinator import checkpoint_store, fencing
from libra_jax.telemetry import escapes, metrics, recorder, status
from libra_jax.utils import checksums, machine

END_SECONDS = 60.0
"""Seconds that a fenced-off run may take to end before the other begins beside it. It can write nothing more."""

LOOK_SECONDS = 0.2

_held: dict[Path, list[int]] = {}
"""Open lock files of the workdirs that this process holds."""


def default(config: config_lib.RunConfig) -> Path:
    """Returns the workdir of a run that is given none."""
    return Path(f"runs/{config.name}-{config_lib.digest(config)}")


def check_place(path: Path) -> None:
    """Raises ConfigError if a file is in the way of the workdir. For callers that do not make the workdir yet."""
    for folder in (path, *path.parents):
        if folder.exists():
            if not folder.is_dir():
                raise protocols.ConfigError(f"--workdir={path} cannot be used ({folder} is a file); choose a folder")
            return


def open_workdir(
    config: config_lib.RunConfig, workdir: str | None, *, take_over: bool = False, allow_changes: Sequence[str] = ()
) -> Path:
    """Makes the workdir and writes `config.json`. Refuses a workdir of another config or of a living run.

    Settings of `config_lib.MAY_CHANGE` may differ from one start to the next; steps must not fall below the steps
    taken. Every change is printed and recorded in the workdir (`changes.record`).

    Args:
      config: configuration of the run.
      workdir: path of the workdir; None means the config's own.
      take_over: accept a workdir in which a run lives: `take_fencing_token` will fence that run off.
      allow_changes: further settings that may differ, as returned by `changes.allowed_names`.

    Raises:
      ConfigError: the workdir's config differs (the message names the fields), or a run lives in it (the message names
        its process).
    """
    path = Path(workdir) if workdir else default(config)
    if not workdir:
        tell_other_runs(config)
    try:
        return _open(path, config, take_over, allow_changes)
    except OSError as error:
        raise protocols.ConfigError(
            f"--workdir={path} cannot be used ({error.strerror or error}); choose a folder that can be written"
        ) from error


def tell_other_runs(config: config_lib.RunConfig) -> None:
    """Prints the run of this name that could go on, if the config's own workdir would be new.

    The hash in the folder's name changes with most settings, so a changed command begins another run.
    """
    path = default(config)
    if path.exists():
        return
    folders = [file.parent for file in path.parent.glob(f"{glob.escape(config.name)}-*/config.json")]
    folders = [folder for folder in folders if len(folder.name) == len(path.name)]  # a hash follows the name
    if folders:
        newest = max(folders, key=lambda folder: folder.stat().st_mtime)
        print(f"note: {path} begins a new run; --workdir={newest} goes on in the newest.", file=sys.stderr)


def take_fencing_token(workdir: Path, *, take_over: bool = False) -> fencing.Token:
    """Takes the workdir's next fencing token, which ends every earlier run in it. Call it last before the run begins.

    All checks must come before, because an earlier run does not come back.

    Args:
      workdir: directory of the run, opened.
      take_over: wait for the end of a run that lives in there, because it holds ports, memory and accelerators.

    Raises:
      ConfigError: the folder cannot be written.
    """
    try:
        fencing_token = fencing.take(workdir, lambda: checkpoint_store.find(workdir).step)
    except OSError as error:
        raise protocols.ConfigError(
            f"--workdir={workdir} cannot be used ({error.strerror or error}); choose a folder that can be written"
        ) from error
    if take_over and not _has_ended(workdir):
        print(
            f"The run before has not ended within {END_SECONDS:g} s. It can write nothing more, but may still hold "
            "accelerators: look after its processes.",
            file=sys.stderr,
        )
    return fencing_token


def _has_ended(workdir: Path) -> bool:
    """Waits for the end of a run that has been fenced off; returns False if it did not end."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        if _lock(workdir):
            record = _status(workdir)
            return record is None or not _lives_elsewhere(workdir, record)
        time.sleep(LOOK_SECONDS)
    return False


def newest(path: Path) -> checkpoint_store.NewestCheckpoint:
    """Returns the newest checkpoint that verifies. Raises DataError as `checkpoint_store.find` and `checked`."""
    checkpoint = checkpoint_store.find(path)
    if checkpoint.stored:
        checkpoint_store.checked(path, checkpoint.stored)
    return checkpoint


def foreseen(
    config: config_lib.RunConfig, workdir: str | None, *, take_over: bool = False, allow_changes: Sequence[str] = ()
) -> str:
    """Describes the workdir as a run with these arguments would find it. Writes nothing and keeps no lock.

    Args: as for `open_workdir`.

    Raises:
      ConfigError: `open_workdir` would refuse the workdir, with this sentence.
    """
    path = Path(workdir) if workdir else default(config)
    check_place(path)
    _check_allowed(path, allow_changes)
    # A folder without a lock has no run, and a dry run leaves no file behind.
    if not take_over and (path / ".lock").exists():
        _refuse_if_in_use(path)
        release(path)
    if not (path / "config.json").exists():
        return f"{path}, new"
    stored = _compared(path, _resolved(config), allow_changes)
    checkpoint = stored.checkpoint
    steps = checkpoint.step
    continuation = f"goes on from step {steps}" if steps > 0 else "begins again, because it has no checkpoint"
    changed = f", with other settings: {'; '.join(map(str, stored.differing))}" if stored.differing else ""
    damaged = [*checkpoint.skipped, *recorder.cut_back(path, checkpoint.step, checkpoint.records, look=True)]
    return "\n  ".join([f"{path}, {continuation}{changed}", *damaged])


@dataclasses.dataclass(frozen=True)
class _StoredConfig:
    """A workdir's earlier config beside the present one.

    Attributes:
      config: the earlier config, as its file has it.
      differing: settings that differ; all of them may.
      checkpoint: the newest checkpoint.
    """

    config: changes.Settings
    differing: Sequence[changes.Change]
    checkpoint: checkpoint_store.NewestCheckpoint


def _check_allowed(path: Path, allow_changes: Sequence[str]) -> None:
    if allow_changes and not (path / "config.json").exists():
        raise protocols.ConfigError(
            f"--allow_changes: {path} holds no config.json, so no run can go on; give the --workdir of the run that is "
            "to go on with other settings"
        )


def _resolved(config: config_lib.RunConfig) -> changes.Settings:
    """Returns the content of the config's `config.json`."""
    resolved: changes.Settings = json.loads(json.dumps(escapes.redacted(config_lib.to_dict(config)), default=list))
    return resolved


def _compared(path: Path, resolved: changes.Settings, allow_changes: Sequence[str]) -> _StoredConfig:
    """Compares the workdir's config with the present one. Refuses one with which the run in there cannot go on."""
    stored = _stored(path / "config.json")
    differing = changes.find(escapes.redacted(stored), resolved)
    checkpoint = newest(path)  # once, because it reads all files of a checkpoint
    step = checkpoint.step
    changes.check(path, differing, allow_changes, checkpoint=step >= 0)
    if step >= 0 and any(change.name == "model.path" for change in differing):
        changes.check_model(path, stored["model"], resolved["model"])
    if step < 1 and (recorded := max(metrics.read(path / metrics.METRICS_FILE), default=0)) > 0:
        if not resolved["checkpoint"]["every"]:
            raise protocols.ConfigError(
                f"--workdir={path} holds {recorded} steps of a run that saves nothing (config.checkpoint.every is "
                "0): it cannot go on, and a new one would take its place; use another --workdir, or move that one "
                "away"
            )
        if step < 0:
            print(f"warning: {path} has no checkpoint; the run repeats its {recorded} recorded steps.", file=sys.stderr)
    if resolved["steps"] < step:
        raise protocols.ConfigError(
            f"config.steps: {resolved['steps']} is fewer than the {step} steps that the run in {path} has taken; "
            "give more to go on, or use another --workdir"
        )
    return _StoredConfig(stored, differing, checkpoint)


def _open(path: Path, config: config_lib.RunConfig, take_over: bool, allow_changes: Sequence[str]) -> Path:
    existed, stored_file = path.exists(), path / "config.json"
    _check_allowed(path, allow_changes)
    if existed and not take_over:  # lock before reading; a refused config must leave no new folder behind
        _refuse_if_in_use(path)
    resolved = _resolved(config)
    if stored_file.exists():
        stored = _compared(path, resolved, allow_changes)
        if stored.differing:
            changes.record(path, stored.differing, allow_changes, max(0, stored.checkpoint.step))
            differences = "; ".join(map(str, stored.differing))
            print(f"The run in {path} goes on with other settings: {differences}.", file=sys.stderr)
        if stored.config == resolved:
            return path
    elif checkpoint_store.counting(path):
        print(f"warning: {path} has checkpoints and no config.json; its settings are not compared.", file=sys.stderr)
    if not existed:
        path.mkdir(parents=True, exist_ok=True)
        if not take_over:
            _refuse_if_in_use(path)
    partial = stored_file.with_suffix(".partial")
    partial.write_text(checksums.indented(resolved))
    # Renamed into place, so that no reader sees half a file.
    partial.rename(stored_file)
    return path


def _stored(file: Path) -> changes.Settings:
    try:
        stored = checksums.read_object(file)
        if {"task", "rollout"} <= stored.keys():  # a run's config, not a model's
            stored = config_lib.renamed(stored)
            escapes.redacted(stored)  # the comparison does so: it raises here if the values are nested too deeply
            return stored
        problem = f"it holds {stored!r:.40}"
    except protocols.ConfigError as error:
        raise protocols.ConfigError(
            f"--workdir={file.parent}: an earlier version wrote its {file.name} ({error}); use another workdir"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        problem = str(getattr(error, "strerror", "") or error)
    raise protocols.ConfigError(
        f"--workdir={file.parent}: its {file.name} is not the settings of a run ({problem}); put back the file as the "
        "run wrote it, or use another workdir"
    )


def _refuse_if_in_use(workdir: Path) -> None:
    """Takes the workdir's lock, kept until `release` or exit. Raises ConfigError if a run lives in the workdir."""
    locked, record = _lock(workdir), _status(workdir)
    if locked and (record is None or not _lives_elsewhere(workdir, record)):
        return
    who = "a run that has just been started"
    if record is not None and not record["ended"]:
        who = f"the run of process {record['pid']} on {record['host']} (step {record['step']} of {record['steps']})"
    raise protocols.ConfigError(
        f"--workdir={workdir} is in use by {who}; wait for its end, use another workdir, or end it by giving this "
        "command with --take_over"
    )


def _lock(workdir: Path) -> bool:
    """Locks the workdir until `release` or the end of this process. Returns False if another local process holds it."""
    # O_CLOEXEC: a child that outlives this process must not keep the lock.
    descriptor = os.open(workdir / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    _held.setdefault(workdir.resolve(), []).append(descriptor)
    return True


def release(workdir: Path) -> None:
    """Releases a workdir that this process holds, so that a later run in the same process may use it."""
    for descriptor in _held.pop(workdir.resolve(), []):
        os.close(descriptor)


def _status(workdir: Path) -> status.Record | None:
    try:
        return status.read(workdir)
    except protocols.DataError:  # another program's file, or damaged: lock and fencing tokens remain as protection
        return None


def _lives_elsewhere(workdir: Path, record: status.Record) -> bool:
    """Returns True if the run that wrote `record` lives on another host, which our lock may not reach."""
    # On the same machine, the lock has already decided.
    if record["ended"] or record["place"].split("/")[0] == machine.identity().split("/")[0]:
        return False
    print(
        f"A run of process {record['pid']} on {record['host']} has been in {workdir}; looking for "
        f"{status.WATCH_SECONDS:g} s whether it lives.",
        file=sys.stderr,
    )
    return status.changes_within(workdir, status.WATCH_SECONDS)
