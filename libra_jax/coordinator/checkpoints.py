"""Writes and reads composite checkpoints: one directory a step, whose manifest is renamed into place last.

    <workdir>/checkpoints/step-00000020/trainer/          the trainer's own
                                        coordinator.json  data position, groups waiting and in flight, statistics
                                        routing.bin       experts of the groups' tokens; only with routing replay
                                        manifest.json     names the parts and each file's checksum; without it the
                                                          directory is no checkpoint

A kill at any point leaves either the old newest checkpoint or the new one, plus remains that the next save removes. A
second checkpoint of the same step gives its parts other names, and counts once its manifest has been renamed. From a
run's second start on, manifest and parts have its fencing token in their names (`manifest-2.json`). So a superseded
run's late rename touches no file of its successor (`fencing`). `checkpoint_store` finds and verifies checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from libra_jax import protocols
from libra_jax.coordinator import checkpoint_store as store
from libra_jax.coordinator import prompts, records, replay
from libra_jax.hybrid import hybrid
from libra_jax.utils import checksums

EXPORT = "config.json"


class GroupsState(TypedDict):
    """The groups that no batch has taken yet, and the counts of all groups."""

    trained: int
    scored: NotRequired[int]
    """Missing in checkpoints of earlier versions."""
    replaced: dict[str, int]
    replaced_tokens: int
    replaced_rollouts: NotRequired[int]
    first_replacement: str
    finished: list[records.GroupRecord]
    running: list[records.GroupRecord]


class Allocation(TypedDict):
    """An engine that served when the checkpoint began."""

    name: str
    slots: int


class CoordinatorState(TypedDict):
    """The coordinator's part of a checkpoint."""

    step: int
    planned_steps: NotRequired[int]
    """`config.steps` of the run, at which its learning-rate schedule ends."""
    evaluated: int
    """Version of the last evaluation."""
    data_position: int
    prompts: NotRequired[prompts.PromptsState]
    replay: NotRequired[replay.ReplayState]
    warm_start_steps: int
    scheduler: Mapping[str, Any]
    allocation: list[Allocation]
    groups: GroupsState
    records: NotRequired[protocols.Records | None]
    planner: NotRequired[Mapping[str, Any] | None]
    hybrid: NotRequired[hybrid.HybridState | None]


class Encoded(NamedTuple):
    """The coordinator's part of a checkpoint, ready to be written.

    Attributes:
      text: JSON of the part.
      routing: experts of all trajectories, in the order of their places.
      records: the run's records by then, for the manifest.
    """

    text: str
    routing: Sequence[records.RoutingRecord]
    records: protocols.Records | None


def encode(state: CoordinatorState) -> Encoded:
    """Encodes the coordinator's part. Later changes of what `state` refers to have no effect on the result."""
    routings: list[records.RoutingRecord] = []
    end = 0

    def place(value: object) -> records.RoutingPlace:
        nonlocal end
        if not isinstance(value, records.RoutingRecord):
            raise TypeError(f"a checkpoint cannot hold {value!r}")
        entry: records.RoutingPlace = {"first": end, "nbytes": sum(map(len, value.rows)), "tokens": len(value.rows)}
        routings.append(value)
        end += entry["nbytes"]
        return entry

    return Encoded(json.dumps(state, default=place), routings, state.get("records"))


def newest_step(workdir: Path) -> int:
    """Returns the step of the newest checkpoint that counts, -1 if there is none. Its files are not verified."""
    return max(store.counting(workdir), default=-1)


def is_exported(workdir: Path, step: int, model: Path) -> bool:
    """Returns True if `model` holds the weights of `step`, written after that step's manifest.

    If a file differs from what was written, the export does not count, and the run writes it again.
    """
    # An export older than the manifest is from before the run continued.
    checkpoint, exported = store.counting(workdir).get(step), model / EXPORT
    manifest = store.directory(workdir, step) / f"{store.MANIFEST}.json" if checkpoint is None else checkpoint.manifest
    if not exported.exists() or exported.stat().st_mtime_ns < manifest.stat().st_mtime_ns:
        return False
    try:
        problem = checksums.problem(model, checksums.read_seal(model))
    except FileNotFoundError:  # an earlier version, or a trainer without checksums, wrote it
        return True
    except (OSError, ValueError) as error:
        problem = f"{checksums.SEAL} cannot be used ({error})"
    if problem:
        logging.getLogger(__name__).warning("%s: %s; the run writes its weights there again.", model, problem)
    return not problem


def teach(scheduler: protocols.Scheduler, workdirs: Sequence[str]) -> None:
    """Merges into the scheduler what the schedulers of other runs had learnt at their newest checkpoints.

    Args:
      scheduler: a scheduler that has seen no request yet.
      workdirs: `config.scheduler.learnt_from`.

    Raises:
      ConfigError: a folder holds no checkpoint, or its run's policy learns nothing.
      DataError: no checkpoint of a folder can be read.
    """
    for workdir in workdirs:
        search = store.find(Path(workdir), trainer=False)
        for sentence in search.skipped:
            logging.getLogger(__name__).warning("config.scheduler.learnt_from: %s", sentence)
        if search.stored is None:
            raise protocols.ConfigError(
                f"config.scheduler.learnt_from: {workdir} holds no checkpoint; name the workdir of a run that wrote one"
            )
        stored = store.checked(Path(workdir), search.stored, trainer=False)
        learnt = Checkpoints(Path(workdir), keep=1).load(stored, routing=False)["scheduler"]
        if not learnt:
            raise protocols.ConfigError(
                f"config.scheduler.learnt_from: the scheduler of {workdir} learns nothing; leave it out"
            )
        scheduler.merge(learnt)


class Checkpoints:
    """The checkpoints of one run.

    Args:
      keep: number of newest checkpoints to keep.
      fencing: the run's fencing token, checked before each write. None disables fencing.

    Attributes:
      restarts: number of trainers that were lost. Part of the names of later parts, because a lost trainer may still be
        writing to the present ones.
    """

    def __init__(self, workdir: Path, keep: int, fencing: protocols.FencingToken | None = None) -> None:
        self._workdir = workdir
        self._folder = workdir / store.FOLDER
        self._keep = keep
        self._fencing = fencing
        # Part of the names of the files that this run writes; empty at a workdir's first start.
        self._suffix = f"-{fencing.number}" if fencing is not None and fencing.number > 1 else ""
        # Names of the parts of the checkpoint that is being written, and the checksums of the coordinator's files.
        self._parts: dict[str, str] = {}
        self._sums: dict[str, checksums.Sum] = {}
        self._records: protocols.Records | None = None
        self.restarts = 0
        # Manifests beyond the checkpoint that the run resumed from: they do not count any more.
        self._skipped: set[Path] = set()

    def newest(self) -> int:
        """Returns the step of the newest checkpoint that counts, -1 if there is none. Its files are not verified."""
        return max(self._counting(), default=-1)

    def go_on_from(self, stored: store.Stored) -> None:
        """Resumes from `stored`. Skipped checkpoints beyond it no longer count."""
        self._skipped = store.beyond(self._workdir, stored)

    def trainer_path(self, chosen: int | store.Stored) -> Path:
        """Returns the path of the trainer's part of a checkpoint.

        Args:
          chosen: a result of `find`, or the step of a checkpoint that counts.

        Raises:
          DataError: the manifest cannot be used.
        """
        stored = self._chosen(chosen)
        return stored.manifest.parent / stored.record["trainer"]

    def write(self, step: int, encoded: Encoded) -> Path:
        """Writes the coordinator's part of a new checkpoint. The trainer saves to the returned path.

        An earlier checkpoint of the same step counts until this one is committed. May run on another thread than the
        other methods, one call at a time.

        Raises:
          CheckpointFailed: the disk refused a write; the message names its directory.
          Superseded: the workdir has been taken over.
        """
        directory = store.directory(self._workdir, step)
        with _writing(directory):
            self._check_fencing()
            if (counting := self._counting().get(step)) is not None:
                _remove_strangers(counting)
            else:
                # Remains of a killed run, or a damaged checkpoint.
                store.remove(directory)
                directory.mkdir(parents=True, exist_ok=True)
                (directory / store.UNFINISHED).touch()
            # Part names never repeat within a step: a superseded run, a lost trainer or the committed checkpoint may
            # own the others.
            suffix, path = self._suffix, directory / store.COORDINATOR
            suffix += f"-restart{self.restarts}" if self.restarts else ""
            suffix += "-again" if (directory / f"{path.stem}{suffix}{path.suffix}").exists() else ""
            name, data = f"{path.stem}{suffix}{path.suffix}", encoded.text.encode()
            parts, sums = {"coordinator": name, "trainer": f"{store.TRAINER}{suffix}"}, {}
            sums[name] = checksums.Sum(len(data), checksums.of_bytes(data))
            _write_durably(directory / name, [data])
            if encoded.routing:
                parts["routing"] = f"{store.ROUTING}{suffix}.bin"
                _write_durably(directory / parts["routing"], (b"".join(item.rows) for item in encoded.routing))
                sums |= checksums.of_files(directory, [parts["routing"]])
            self._parts, self._sums, self._records = parts, sums, encoded.records
        return directory / parts["trainer"]

    def commit(self, step: int) -> None:
        """Makes the checkpoint count once all its parts are durable, and removes checkpoints that are too old.

        Raises:
          CheckpointFailed: the disk refused a write; the message names its directory.
          Superseded: the workdir has been taken over.
        """
        fencing_token = {} if self._fencing is None else {"fencing_token": self._fencing.number}
        directory = store.directory(self._workdir, step)
        path = directory / f"{store.MANIFEST}{self._suffix}.json"
        with _writing(directory):
            trainer = directory / self._parts["trainer"]
            try:
                # The trainer's own seal, if it made one, saves a second read of its files.
                sums = checksums.read_seal(trainer) | checksums.of_files(trainer, [checksums.SEAL])
            except FileNotFoundError:
                sums = checksums.of_files(trainer, checksums.files_of(trainer))
            except ValueError as error:
                raise protocols.CheckpointFailed(f"The checkpoint {directory} is damaged already ({error}).") from error
            sums = self._sums | {f"{trainer.name}/{file}": item for file, item in sums.items()}
            manifest = {
                "format": store.FORMAT,
                "step": step,
                **self._parts,
                **fencing_token,
                "files": sums,
                "records": self._records,
            }
            text = checksums.sealed(json.dumps(manifest).encode())
            _write_durably(path, [text], check=self._check_fencing)
            # Again before any removal: the write may have taken long.
            self._check_fencing()
            # The new manifest has replaced a skipped one of the same name.
            self._skipped.discard(path)
            store.remove_strangers(directory, (path.name, *self._parts.values()))
            kept_directories = {
                store.directory(self._workdir, item) for item in sorted(self._counting())[-self._keep :]
            }
            for folder in store.folders(self._workdir):
                if folder not in kept_directories:
                    self._check_fencing()
                    store.remove(folder)

    def discard(self, step: int) -> None:
        """Removes the parts of an aborted checkpoint. A committed checkpoint of the same step stays."""
        if self._fencing is not None and not self._fencing.may_write():
            return
        with contextlib.suppress(OSError, ValueError, protocols.DataError):
            if (counting := self._counting().get(step)) is not None:
                _remove_strangers(counting)
            else:
                store.remove(store.directory(self._workdir, step))

    def _counting(self) -> dict[int, store.Stored]:
        return store.counting(self._workdir, self._skipped)

    def _check_fencing(self) -> None:
        if self._fencing is not None:
            self._fencing.check()

    def load(self, chosen: int | store.Stored, *, routing: bool = True) -> CoordinatorState:
        """Verifies and returns the coordinator's part of a checkpoint.

        Args:
          chosen: a result of `find`, or the step of a checkpoint that counts.
          routing: also read the experts of tokens, most of the bytes; if False, the groups cannot be decoded.

        Raises:
          DataError: it is damaged, or another version of this program wrote it.
        """
        stored = self._chosen(chosen)
        record, directory = stored.record, stored.manifest.parent
        name, apart = record["coordinator"], record.get("routing") if routing else None
        try:
            text, expected = checksums.read_bytes(directory / name), checksums.from_json(record["files"])
            if (
                problem := checksums.problem(directory, {file: expected[file] for file in (name, apart) if file})
            ) != "":
                raise ValueError(problem)
            hook = _with_routing(checksums.read_bytes(directory / apart)) if apart else None
            state: CoordinatorState = json.loads(text, object_hook=hook)
            return state
        except (OSError, ValueError, KeyError) as error:
            raise _unreadable(directory, error) from error

    def _chosen(self, chosen: int | store.Stored) -> store.Stored:
        if isinstance(chosen, store.Stored):
            return chosen
        counting = self._counting().get(chosen)
        if counting is None:
            raise _unreadable(store.directory(self._workdir, chosen), "its manifest is missing or damaged")
        return counting


def _unreadable(directory: Path, why: object) -> protocols.DataError:
    return protocols.DataError(
        f"The checkpoint {directory} cannot be read ({why}): give the same command again to go on from the one before "
        "it."
    )


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Turns an error of the disk into a sentence about what it means for the run."""
    try:
        yield
    except (OSError, protocols.DataError) as error:
        raise protocols.CheckpointFailed(
            f"The checkpoint {directory} cannot be written ({getattr(error, 'strerror', None) or error}): see to the "
            "disk, and the same command goes on from the checkpoint before it."
        ) from error


def _remove_strangers(counting: store.Stored) -> None:
    """Removes files of this program that lie beside a manifest and are not named in it."""
    record = counting.record
    named = [record[part] for part in ("coordinator", "trainer", "routing") if part in record]
    store.remove_strangers(counting.manifest.parent, (counting.manifest.name, *named))


def _with_routing(data: bytes) -> Callable[[Any], object]:
    """Returns a hook of the JSON reader: it replaces each place in the file of all experts by the experts there."""

    def read(value: dict[str, Any]) -> object:
        place = value.get("routing")
        # Any part of the state may hold trajectories: waiting groups, and stored successes.
        if isinstance(place, dict) and place.keys() == records.RoutingPlace.__annotations__.keys():
            width = max(1, place["nbytes"] // place["tokens"])
            starts = range(place["first"], place["first"] + place["nbytes"], width)
            value["routing"] = records.RoutingRecord(tuple(data[start : start + width] for start in starts))
        return value

    return read


def _write_durably(path: Path, pieces: Iterable[bytes], check: Callable[[], None] = lambda: None) -> None:
    """Writes a file durably under another name, then renames it into place. `check` may refuse before the rename."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())
    check()
    os.replace(partial, path)
    # A rename is durable only once its directory is, and a new directory only once its parent is.
    for folder in (path.parent, path.parent.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
