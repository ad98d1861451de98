"""Finds the checkpoints in a run's folder and verifies them.

A checkpoint counts if it has a manifest that no later start of the run has voided (`fencing`). It verifies if every
file in its manifest has the recorded size and checksum. The manifest carries its own checksum. A run resumes from the
newest checkpoint that verifies, and says which newer ones it skipped and why.

This module reads and removes only file names that this program writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra_jax import protocols
from libra_jax.coordinator import fencing
from libra_jax.utils import checksums

FOLDER, MANIFEST, COORDINATOR, TRAINER, ROUTING = "checkpoints", "manifest", "coordinator.json", "trainer", "routing"
FORMAT = 7

UNFINISHED = "unfinished"
"""A file in the folder of a checkpoint that is being written or removed: without it, a missing manifest is damage."""

_STEP = re.compile(r"step-(\d{8,})")
_MANIFEST = re.compile(r"manifest(?:-(\d+))?\.json")
_SUFFIX = r"(-\d+)?(-restart\d+)?(-again)?"
_OURS = re.compile(
    rf"{UNFINISHED}|manifest(-\d+)?\.(json|partial)|coordinator{_SUFFIX}\.(json|partial)"
    rf"|routing{_SUFFIX}\.(bin|partial)"
    rf"|trainer{_SUFFIX}(\.orbax-checkpoint-tmp.*)?"
)


@dataclass(frozen=True)
class Stored:
    """One checkpoint as found on disk.

    Attributes:
      step: training step of the run.
      fencing_token: fencing token of the start that wrote it; 0 if that start had none.
      manifest: path of its manifest, even if that file is missing.
      record: content of the manifest; empty if it cannot be used.
      problem: reason why the manifest cannot be used; empty if it can.
      void: True if a later start resumed from before this step.
    """

    step: int
    fencing_token: int
    manifest: Path
    record: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    void: bool = False


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest checkpoint that verifies.

    Attributes:
      step: training step of the run; -1 if no checkpoint exists.
      skipped: one sentence for each newer checkpoint that does not verify.
      seconds: seconds spent on checksums.
      nbytes: bytes verified.
      stored: the verified checkpoint. A step may have further manifests. None if no checkpoint exists.
    """

    step: int = -1
    skipped: Sequence[str] = ()
    seconds: float = 0.0
    nbytes: int = 0
    stored: Stored | None = None

    @property
    def records(self) -> protocols.Records | None:
        """The run's records at the checkpoint. None without one, or if an earlier version wrote it."""
        return None if self.stored is None else self.stored.record.get("records")

    def sentence(self) -> str:
        """Returns a sentence about what was verified; empty if no checkpoint exists."""
        if self.step < 0:
            return ""
        return f"The checkpoint at step {self.step} verifies: {self.nbytes / 1e6:,.1f} MB in {self.seconds:.2f} s."


_verified: dict[tuple[Any, ...], tuple[str, float]] = {}
"""Cache of verification: a problem ("" if none) and the seconds that the check took.

The key holds the manifest's text and the inode, size and time of each file. Without the cache, a start would read every
file several times.
"""


def directory(workdir: Path, step: int) -> Path:
    """Returns the folder of a step's checkpoint."""
    return workdir / FOLDER / f"step-{step:08d}"


def find(workdir: Path, *, trainer: bool = True) -> NewestCheckpoint:
    """Returns the newest checkpoint that verifies.

    Args:
      trainer: also verify the trainer's files; if False, only the coordinator's.

    Raises:
      DataError: checkpoints exist and none verifies (nothing has been removed), a folder cannot be listed, or another
        version of this program wrote one.
    """
    skipped: list[str] = []
    # The newest step first; within a step, the latest token.
    for stored in sorted(_read(workdir), key=lambda item: (item.step, item.fencing_token), reverse=True):
        why, seconds, nbytes = verify(stored, trainer)
        # A void checkpoint is no damage: a successor resumed from before it, so it is passed over without a sentence.
        if not why and not stored.void:
            return NewestCheckpoint(stored.step, tuple(skipped), seconds, nbytes, stored)
        if why:
            skipped.append(f"The checkpoint {stored.manifest.parent} is skipped: {why}.")
    if skipped:
        raise protocols.DataError(
            f"No checkpoint in {workdir / FOLDER} can be used, and nothing has been removed: put back one from a copy, "
            f"or begin in another --workdir. {' '.join(skipped)}"
        )
    return NewestCheckpoint()


def damaged(workdir: Path, before: int) -> list[str]:
    """Verifies the checkpoints before a step, to which a run would fall back. Returns a sentence for each damaged one.

    Raises:
      DataError: another version of this program wrote one.
    """
    older = [stored for stored in _read(workdir) if stored.step < before]
    problems = [(stored, verify(stored, trainer=True)[0]) for stored in sorted(older, key=lambda item: item.step)]
    return [
        f"The checkpoint {stored.manifest.parent} cannot be used any more, should the run need it: {why}."
        for stored, why in problems
        if why
    ]


def beyond(workdir: Path, stored: Stored) -> set[Path]:
    """Returns the manifests of later checkpoints and the other manifests of the same step."""
    return {item.manifest for item in _read(workdir) if item.step >= stored.step} - {stored.manifest}


def counting(workdir: Path, without: Collection[Path] = ()) -> dict[int, Stored]:
    """Returns the checkpoints that count, by step. If a step has several, the latest fencing token wins.

    This function does not read their files.

    Args:
      without: manifests to ignore.
    """
    by_step: dict[int, Stored] = {}
    for stored in sorted(_read(workdir), key=lambda item: item.fencing_token):
        if not stored.void and not stored.problem and stored.manifest not in without:
            by_step[stored.step] = stored
    return by_step


def verify(stored: Stored, trainer: bool = True) -> tuple[str, float, int]:
    """Returns why a checkpoint cannot be used ("" if it can), the seconds this took, and the bytes read."""
    if stored.problem:
        return stored.problem, 0.0, 0
    start, folder = time.monotonic(), stored.manifest.parent
    files = checksums.from_json(stored.record["files"])
    if not trainer:
        files = {stored.record["coordinator"]: files[stored.record["coordinator"]]}
    nbytes = sum(item.size for item in files.values())
    signatures: list[tuple[int, int, int]] = []
    for name in files:
        try:
            status = (folder / name).stat()
            signatures.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            signatures.append((0, 0, 0))
    # A file that changed has another signature, and is read again.
    key = (str(stored.manifest), json.dumps(stored.record), *signatures)
    if key not in _verified:
        problem = checksums.problem(folder, files)
        _verified[key] = problem, time.monotonic() - start
    return *_verified[key], nbytes


def checked(workdir: Path, stored: Stored, trainer: bool = True) -> Stored:
    """Returns a checkpoint. Raises DataError if it is damaged, or of another run than the workdir's `status.json`."""
    why, records = verify(stored, trainer)[0], checksums.known_records(workdir)
    if records and (run := (stored.record.get("records") or records)["run"]) != records["run"]:
        why = why or f"it is of the run {run} instead of {records['run']}"
    if why:
        raise protocols.DataError(f"The checkpoint {stored.manifest.parent} cannot be used: {why}; take it away.")
    return stored


def _read(workdir: Path) -> list[Stored]:
    """Returns every checkpoint on disk, except those being written or removed. Raises DataError as `find`."""
    checkpoints, empty = list[Stored](), list[Stored]()
    step_folders: list[Path] = []
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            step_folders = folders(workdir)
        limits = dict(fencing.limits(workdir))
        for folder in step_folders:
            step, path = int(folder.name.removeprefix("step-")), folder / f"{MANIFEST}.json"
            # A superseded run may still be removing an old checkpoint.
            with contextlib.suppress(FileNotFoundError):
                entries = os.listdir(folder)
                names = [name for name in entries if _OURS.fullmatch(name)]
                if manifests := [manifest for name in names if (manifest := _MANIFEST.fullmatch(name))]:
                    checkpoints += [_read_manifest(folder / item[0], step, int(item[1] or 1)) for item in manifests]
                elif not entries:
                    empty.append(Stored(step, 0, path, problem="it is empty, as a kill may leave it"))
                # The marker file, or partial files alone, mean a write or removal that was cut off, which is no damage.
                elif UNFINISHED not in names and not all(name.endswith(".partial") for name in names):
                    checkpoints.append(Stored(step, 0, path, problem="its manifest is missing"))
    except OSError as error:
        raise protocols.DataError(f"{error.filename} cannot be listed ({error.strerror}); put it back") from error
    checkpoints += empty if checkpoints else []  # a kill of the first save may leave an empty folder alone
    # A token's file may be damaged. Its run resumed from no later than the earliest step that it wrote.
    for stored in checkpoints:
        if not stored.problem:
            limits[stored.fencing_token] = min(limits.get(stored.fencing_token, stored.step), stored.step)
    # A later start that resumed from an earlier step has left a checkpoint behind.
    return [
        dataclasses.replace(
            stored,
            void=any(later > stored.fencing_token and stored.step > resumed for later, resumed in limits.items()),
        )
        for stored in checkpoints
    ]


def _read_manifest(path: Path, step: int, fencing_token: int) -> Stored:
    """Reads a manifest and checks its version and step."""
    try:
        text = checksums.read_bytes(path)
        number = FORMAT
        if is_whole := checksums.is_whole(text):
            number = checksums.unsealed(text).get("format", FORMAT)
        elif is_whole is None:
            # An intact manifest of format 4, which had no checksums yet, is no damage.
            with contextlib.suppress(ValueError, AttributeError):
                record = json.loads(text)
                if {"format", "step", "coordinator", "trainer"} <= record.keys() <= {*_FIRST_FIELDS}:
                    number = 4 if record["format"] == 4 else number
        if number != FORMAT:
            raise protocols.DataError(
                f"{path} has format {number}, this program reads {FORMAT}: go on with the version that wrote it, or "
                "choose another --workdir."
            )
        # Refuses a damaged manifest.
        record = checksums.unsealed(text)
        if record.get("step") != step:
            raise ValueError(f"it is of step {record.get('step')}")
    except (OSError, ValueError) as error:
        return Stored(step, fencing_token, path, problem=f"{path.name} cannot be used ({error})")
    return Stored(step, int(record.get("fencing_token", 0)), path, record)


_FIRST_FIELDS = ("format", "step", "coordinator", "trainer", "epoch")
"""Fields of a manifest of format 4."""


def remove(folder: Path) -> None:
    """Removes a checkpoint or its remains. Files that this program did not write stay."""
    with contextlib.suppress(OSError):
        # The marker comes first: if this process dies below, a missing manifest then reads as removal, not as damage.
        (folder / UNFINISHED).touch()
    for manifest in [path for path in folder.glob(f"{MANIFEST}*.json") if _MANIFEST.fullmatch(path.name)]:
        manifest.unlink(missing_ok=True)
    remove_strangers(folder, (UNFINISHED,))
    # The marker goes last, for the same reason.
    (folder / UNFINISHED).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # foreign files keep the folder
        folder.rmdir()


def remove_strangers(folder: Path, named: Sequence[str]) -> None:
    """Removes this program's files from a checkpoint's folder, except those in `named`."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name in named or not _OURS.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def folders(workdir: Path) -> list[Path]:
    """Returns the folders of all checkpoints, including unfinished ones. Skips names that are not this program's."""
    return [path for path in (workdir / FOLDER).iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
