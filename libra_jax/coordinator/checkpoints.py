"""Composite checkpoints: a directory a step, whose manifest is renamed into place last.

    <workdir>/checkpoints/step-00000020/trainer/          the trainer's own
                                        coordinator.json  data position, groups waiting and in flight, statistics
                                        manifest.json     names the parts; without it the directory is no checkpoint

A kill at any point leaves either the old newest checkpoint or the new one, and rubbish that the next save removes. A
second checkpoint of the same step gives its parts other names, and counts from the renaming of its manifest. From a
run's second start on, manifest and parts have its epoch in their names (`manifest-2.json`), so that what a superseded
run still renames meets nothing of its successor's (`fencing`).
"""

from __future__ import annotations

import array
import base64
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from libra_jax import protocols
from libra_jax.coordinator import fencing

FOLDER, MANIFEST, COORDINATOR, TRAINER = "checkpoints", "manifest", "coordinator.json", "trainer"
FORMAT = 4


def newest_step(workdir: Path) -> int:
    """The step of the newest checkpoint in a run's folder, -1 if there is none."""
    return max(_counting(workdir), default=-1)


def is_exported(workdir: Path, step: int, model: Path) -> bool:
    """Whether `model`, written after the last checkpoint, is of `step`: one from before the run went on is older."""
    manifest, exported = _manifest(workdir, step), model / "config.json"
    return exported.exists() and exported.stat().st_mtime_ns >= manifest.stat().st_mtime_ns


def teach(scheduler: protocols.Scheduler, workdirs: Sequence[str]) -> None:
    """Adds to what the scheduler knows what those of other runs had learnt at their newest checkpoints.

    Args:
      scheduler: has seen no request yet.
      workdirs: `config.scheduler.learnt_from`.

    Raises:
      ConfigError: a folder holds no checkpoint, or its run's policy learns nothing.
      DataError: a checkpoint cannot be read.
    """
    for workdir in workdirs:
        step = newest_step(Path(workdir))
        if step < 0:
            raise protocols.ConfigError(
                f"config.scheduler.learnt_from: {workdir} holds no checkpoint; name the workdir of a run that wrote one"
            )
        learnt = Checkpoints(Path(workdir), keep=1).load(step)["scheduler"]
        if not learnt:
            raise protocols.ConfigError(
                f"config.scheduler.learnt_from: the scheduler of {workdir} learns nothing; leave it out"
            )
        scheduler.merge(learnt)


class Checkpoints:
    """The checkpoints of one run.

    Args:
      workdir: the run's folder.
      keep: newest checkpoints kept.
      epoch: the run's own, looked at before each write; None: nobody else can be in that folder.
    """

    def __init__(self, workdir: Path, keep: int, epoch: fencing.Epoch | None = None) -> None:
        self._workdir = workdir
        self._folder = workdir / FOLDER
        self._keep = keep
        self._epoch = epoch
        self._parts: dict[str, str] = {}  # names of the parts of the checkpoint begun last
        self._disowned = 0

    def newest(self) -> int:
        """The step of the newest checkpoint, -1 if there is none."""
        return newest_step(self._workdir)

    def trainer_path(self, step: int) -> Path:
        """Where the trainer's part of the checkpoint is."""
        manifest = _manifest(self._workdir, step)
        return manifest.parent / json.loads(manifest.read_text())["trainer"]

    def begin(self, step: int, state: Mapping[str, Any]) -> Path:
        """Writes the coordinator's part of a new checkpoint; the trainer saves to the returned path.

        One of the same step counts until this one is committed.

        Raises:
          CheckpointFailed: it cannot be written; the message names its directory.
          Superseded: the workdir has been taken over.
        """
        directory = _directory(self._folder, step)
        with _writing(directory):
            self._check_epoch()
            if (manifest := _counting(self._workdir).get(step)) is not None:
                _remove_strangers(manifest)
            else:
                _remove(directory)  # an earlier run was killed while it wrote this one
                directory.mkdir(parents=True)
            suffix, path = self._suffix(), directory / COORDINATOR
            suffix += f"-anew{self._disowned}" if self._disowned else ""
            suffix += "-again" if (directory / f"{path.stem}{suffix}{path.suffix}").exists() else ""
            self._parts = {"coordinator": f"{path.stem}{suffix}{path.suffix}", "trainer": f"{TRAINER}{suffix}"}
            _write_durably(directory / self._parts["coordinator"], json.dumps(state))
        return directory / self._parts["trainer"]

    def commit(self, step: int) -> None:
        """Makes the checkpoint count, once all its parts are durable, and removes those that are too old.

        Raises:
          CheckpointFailed: it cannot be written; the message names its directory.
          Superseded: the workdir has been taken over.
        """
        epoch = {} if self._epoch is None else {"epoch": self._epoch.number}
        manifest = {"format": FORMAT, "step": step, **self._parts, **epoch}
        directory = _directory(self._folder, step)
        path = directory / f"{MANIFEST}{self._suffix()}.json"
        with _writing(directory):
            _write_durably(path, json.dumps(manifest), check=self._check_epoch)
            self._check_epoch()  # again before anything is removed: writing may have taken long
            _remove_strangers(path)
            kept = {_directory(self._folder, item) for item in sorted(_counting(self._workdir))[-self._keep :]}
            for other in self._folder.iterdir():
                if other not in kept:
                    self._check_epoch()
                    _remove(other)

    def disown(self) -> None:
        """Who wrote until now is lost, and may write on all the same: parts have other names from now on."""
        self._disowned += 1

    def discard(self, step: int) -> None:
        """Removes what has been written of the checkpoint begun last, which is given up; another of its step stays."""
        if self._epoch is not None and not self._epoch.may_write():
            return
        directory = _directory(self._folder, step)
        with contextlib.suppress(OSError, ValueError):
            if (manifest := _counting(self._workdir).get(step)) is not None:
                _remove_strangers(manifest)
            else:
                _remove(directory)

    def _suffix(self) -> str:
        """Of the names of what this run writes: none at its first start."""
        return f"-{self._epoch.number}" if self._epoch is not None and self._epoch.number > 1 else ""

    def _check_epoch(self) -> None:
        if self._epoch is not None:
            self._epoch.check()

    def load(self, step: int) -> dict[str, Any]:
        """The coordinator's part of a checkpoint.

        Raises:
          DataError: it cannot be read, or another version of this program wrote it.
        """
        path = _manifest(self._workdir, step)
        directory = path.parent
        try:
            manifest = json.loads(path.read_text())
            if manifest["format"] != FORMAT:
                raise protocols.DataError(
                    f"{path} has format {manifest['format']}, this program reads {FORMAT}: go on with "
                    "the version that wrote it, or choose another --workdir."
                )
            return json.loads((directory / manifest["coordinator"]).read_text())
        except (OSError, ValueError, KeyError) as error:
            raise protocols.DataError(
                f"The checkpoint {directory} cannot be read ({error}): remove that directory to go on from the one "
                "before it."
            ) from error


def _directory(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Says in a sentence what a disk that refuses means for the run."""
    try:
        yield
    except OSError as error:
        raise protocols.CheckpointFailed(
            f"The checkpoint {directory} cannot be written ({error.strerror or error}): see to the disk, and the same "
            "command goes on from the checkpoint before it."
        ) from error


def _counting(workdir: Path) -> dict[int, Path]:
    """Manifests of the checkpoints that count, by step: of those that are not void, the latest epoch's (`fencing`)."""
    limits, found = fencing.limits(workdir), dict[int, tuple[int, Path]]()
    for manifest in (workdir / FOLDER).glob(f"step-*/{MANIFEST}*.json"):
        step, epoch = int(manifest.parent.name.removeprefix("step-")), _epoch_of(manifest)
        if not _is_void(step, epoch, limits):
            found[step] = max(found.get(step, (-1, manifest)), (epoch, manifest))
    return {step: manifest for step, (_, manifest) in found.items()}


def _manifest(workdir: Path, step: int) -> Path:
    """That of a step's checkpoint; where there is none, where the first start's would be."""
    return _counting(workdir).get(step) or _directory(workdir / FOLDER, step) / f"{MANIFEST}.json"


def _is_void(step: int, epoch: int, limits: Mapping[int, int]) -> bool:
    """Whether a run wrote this manifest that had been superseded by one which had gone on before this step."""
    return any(later > epoch and step > went_on_at for later, went_on_at in limits.items())


def _epoch_of(manifest: Path) -> int:
    """0 for one written before there were epochs, or that cannot be read: its reader will say so."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return int(json.loads(manifest.read_text()).get("epoch", 0))
    return 0


def _write_durably(path: Path, text: str, check: Callable[[], None] = lambda: None) -> None:
    """Writes a file under another name and renames it into place; `check` may refuse right before."""
    partial = path.with_suffix(".partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    check()
    os.replace(partial, path)
    _sync_directory(path.parent)
    _sync_directory(path.parent.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(directory: Path) -> None:
    """Removes a checkpoint or what is left of one; the manifest first, so that half of it never counts."""
    for manifest in directory.glob(f"{MANIFEST}*.json"):
        manifest.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _remove_strangers(manifest: Path) -> None:
    """Removes what lies beside a checkpoint's manifest and is not named in it."""
    named = json.loads(manifest.read_text())
    for path in manifest.parent.iterdir():
        if path.name in (manifest.name, named["coordinator"], named["trainer"]):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


# Groups as JSON: the per-token lists as packed numbers, because spelling out millions of floats would stall the loop.


def encode_group(group: protocols.Group) -> dict[str, Any]:
    """A group, finished or running, as plain JSON values."""
    return {
        "group_id": group.group_id,
        "prompt_id": group.task.prompt_id,
        "payload": dict(group.task.payload),
        "dispatch_version": group.dispatch_version,
        "trajectories": [_encode_trajectory(trajectory) for trajectory in group.trajectories],
    }


def decode_group(record: Mapping[str, Any]) -> protocols.Group:
    """The group that `encode_group` was given."""
    return protocols.Group(
        group_id=record["group_id"],
        task=protocols.Task(record["prompt_id"], record["payload"]),
        dispatch_version=record["dispatch_version"],
        trajectories=[_decode_trajectory(item) for item in record["trajectories"]],
    )


_PACKED = {"token_ids": "q", "sources": "b", "loss_mask": "b", "log_probs": "d", "policy_versions": "q"}


def _encode_trajectory(trajectory: protocols.Trajectory) -> dict[str, Any]:
    packed = {
        name: base64.b64encode(array.array(code, getattr(trajectory, name)).tobytes()).decode()
        for name, code in _PACKED.items()
    }
    return {
        **packed,
        "trajectory_id": trajectory.trajectory_id,
        "prompt_id": trajectory.prompt_id,
        "turns": [asdict(turn) for turn in trajectory.turns],
        "reward": trajectory.reward,
        "environment_reward": trajectory.environment_reward,
        "finish": trajectory.finish,
        "metrics": dict(trajectory.metrics),
        "start_seconds": trajectory.start_seconds,
        "seconds": trajectory.seconds,
        "snapshot": asdict(trajectory.snapshot) if trajectory.snapshot is not None else None,
    }


def _decode_trajectory(record: Mapping[str, Any]) -> protocols.Trajectory:
    fields = dict(record)
    for name, code in _PACKED.items():
        fields[name] = array.array(code, base64.b64decode(record[name])).tolist()
    fields["loss_mask"] = [bool(value) for value in fields["loss_mask"]]
    fields["turns"] = [protocols.Turn(**turn) for turn in record["turns"]]
    if fields.get("snapshot") is not None:
        messages = tuple(protocols.Message(**message) for message in fields["snapshot"]["messages"])
        fields["snapshot"] = protocols.AttemptSnapshot(**{**fields["snapshot"], "messages": messages})
    return protocols.Trajectory(**fields)
