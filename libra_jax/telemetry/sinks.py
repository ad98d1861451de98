"""Where a run's events go besides its files: TensorBoard, and Weights & Biases if the config asks for it."""

from __future__ import annotations

import importlib
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from libra_jax import config as config_lib
from libra_jax.protocols import ConfigError
from libra_jax.telemetry import escapes, files, samples

TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE = "wandb_run_id"
SAMPLE_COLUMNS = ["step", "rank", "reward", "rollout", "prompt", "turns"]
"""Columns of the table of samples in Weights & Biases."""


class Sink:
    """Receives the events of a run.

    A sink ignores events that it does not override. A lost disk or viewer raises nothing.
    """

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes a training step's numbers."""

    def sample(self, sample: samples.Sample) -> None:
        """Takes a rollout as text, before the numbers of its step."""

    def status(self, worker: str, text: str) -> None:
        """Takes what a worker is doing now."""

    def note(self, text: str) -> None:
        """Takes a sentence for the person who watches the run."""

    def flush(self) -> None:
        """Passes everything taken so far to the operating system."""

    def close(self) -> None:
        """Ends the sink."""


def _import_tensorboardx() -> tuple[ModuleType, ModuleType]:
    """Returns tensorboardX's modules for event messages and record framing.

    tensorboardX imports torch if it is installed, only to recognise its tensors. Telemetry uses plain numbers. A
    process without torch, such as the simulator, must not pay seconds and hundreds of megabytes. So torch is hidden
    meanwhile.
    """
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` raise ImportError
    try:
        events = importlib.import_module("tensorboardX.proto.event_pb2")
        records = importlib.import_module("tensorboardX.record_writer")
    finally:
        if hidden:
            del sys.modules["torch"]
    return events, records


class TensorBoardSink(Sink):
    """Writes the scalars of a step as one TensorBoard event.

    tensorboardX builds the messages, but this class writes the file. The thread of tensorboardX's writer dies on a full
    disk, and its bounded queue would then block the event loop forever.

    Args:
      workdir: Folder of the run. Events go to `tensorboard/<name of the workdir>` in it, one file per session.
      warn: Called with the warning of a full disk.
      guard: Returns whether this run may still write there.
    """

    def __init__(self, workdir: Path, warn: files.Warn, guard: files.Guard = files.always) -> None:
        self._events, self._records = _import_tensorboardx()
        # TensorBoard names a run after the folder with its events. A resumed run keeps the folder of its first session,
        # even if its workdir was renamed. Runs of an older version that wrote into `tensorboard` itself continue there.
        parent = workdir / TENSORBOARD_FOLDER
        run_folders = [path.parent for path in (*parent.glob("*.libra"), *parent.glob("*/*.libra"))]
        folder = min(run_folders, default=parent / (workdir.resolve().name or "run"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            earlier = [int(name.suffixes[-2][1:]) for name in folder.glob("events.out.tfevents.*.libra")]
        except OSError as error:
            warn(str(folder), f"{folder.name} cannot be made ({error.strerror or error}); the run goes on without it.")
            earlier = []
        # TensorBoard reads a folder's files in the order of their names, so the names number the sessions.
        number = max(earlier, default=-1) + 1
        self._file = files.RecordFile(folder / f"events.out.tfevents.{number:010d}.libra", warn, guard)
        # TensorBoard expects the version of the format in the first event of a file.
        self._write(self._events.Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._purge = number > 0

    def _write(self, event: Any) -> None:
        data = event.SerializeToString()
        checksum = self._records.masked_crc32c
        length = struct.pack("<Q", len(data))
        # TFRecord framing: length, checksum of the length, data, checksum of the data.
        self._file.write(length + struct.pack("<I", checksum(length)) + data + struct.pack("<I", checksum(data)))

    def _begin(self, step: int) -> None:
        """Voids the events of earlier sessions from this session's first step on."""
        if self._purge:
            self._purge = False
            # TensorBoard drops what earlier files have from a START's step on, so redone steps are not drawn twice.
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(self._events.Event(wall_time=time.time(), step=step, session_log=start))

    def sample(self, sample: samples.Sample) -> None:
        """Appends the best and the worst rollout of a step as text. All others are only in `samples.jsonl`."""
        if sample.place == "middle":
            return
        self._begin(sample.step)
        event = self._events.Event(wall_time=time.time(), step=sample.step)
        kind = "evaluation_samples" if sample.evaluation else "samples"
        value = event.summary.value.add(tag=f"{kind}/{sample.place}/text_summary")
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = 7  # DT_STRING in TensorFlow's types
        value.tensor.tensor_shape.dim.add(size=1)
        # TensorBoard renders Markdown. Indented lines are code, and unlike a fence, no text in them can end the block.
        indented = "".join(f"    {line}\n" for line in sample.text().splitlines())
        value.tensor.string_val.append(indented.encode("utf-8", "replace"))
        self._write(event)

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends one step's event."""
        self._begin(step)
        event = self._events.Event(wall_time=time.time(), step=step)
        for name, value in scalars.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._write(event)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandbSink(Sink):
    """Sends the scalars to Weights & Biases. A resumed workdir continues its run there.

    Raises:
      ConfigError: The package is missing, or does not start a run.
    """

    def __init__(self, run_config: config_lib.RunConfig, workdir: Path, warn: files.Warn) -> None:
        self._warn = warn
        self._rows: dict[str, list[list[Any]]] = {}
        try:
            self._wandb = wandb = importlib.import_module("wandb")
        except ImportError:
            raise ConfigError(
                "config.telemetry.wandb_project: the wandb package is not installed; "
                'install it with `pip install wandb`, or set the field to "" to leave it out'
            ) from None
        id_file = workdir / WANDB_ID_FILE
        try:
            self._run = wandb.init(
                project=run_config.telemetry.wandb_project,
                name=run_config.name,
                # A resumed workdir has the id of its run there.
                id=id_file.read_text().strip() if id_file.is_file() else None,
                resume="allow",
                dir=str(workdir),
                config=escapes.redacted(config_lib.to_dict(run_config)),
            )
            # Written at once, so that a run that is killed early is continued there, too.
            id_file.write_text(f"{self._run.id}\n")
        except Exception as error:  # the errors of init have no common base class
            raise ConfigError(f"config.telemetry.wandb_project: Weights & Biases did not start: {error}") from error

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Passes one step's numbers and samples to the package's own sender process."""
        # Emptied first, so that an error of the package does not let rows pile up step by step.
        rows, self._rows = self._rows, {}
        try:
            tables = {kind: self._wandb.Table(columns=SAMPLE_COLUMNS, data=data) for kind, data in rows.items()}
            self._run.log({**scalars, **tables}, step=step)
        except Exception as error:  # losing a viewer never stops a run, and the package may raise any error
            self._warn("wandb", f"Weights & Biases does not take metrics any more ({error}); the run goes on without.")

    def sample(self, sample: samples.Sample) -> None:
        """Keeps a rollout for the table that is sent with the step's numbers."""
        kind = "evaluation_samples" if sample.evaluation else "samples"
        # `samples.parse` puts the prompt first, even an empty one.
        prompt, *turns = (f"{piece.title}\n{piece.visible_text()}" for piece in sample.pieces)
        row = [sample.step, sample.rank, sample.reward, sample.headline, prompt, "\n".join(turns)]
        self._rows.setdefault(kind, []).append(row)

    def close(self) -> None:
        try:
            self._run.finish()
        except Exception as error:
            self._warn("wandb", f"Weights & Biases did not finish its run ({error}).")
