"""Damages one file of a run's folder, lets the run go on, and tells what came of it.

The run is a real one, save for its engine: the JAX trainer writes Orbax checkpoints. A trial goes as far as the
restored state and ends there, so that two hundred of them fit into some minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import os
import random
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import wiring, workdirs
from libra_jax.cluster import resolved_run
from libra_jax.coordinator import checkpoint_store, saving
from libra_jax.coordinator import run as coordinator
from libra_jax.telemetry import files as files_lib
from libra_jax.tools import toolkit
from libra_jax.training import trainer

STEPS, EVERY, PAGE = 3, 1, 4096

RECORDS = (
    "metrics.jsonl",
    "trace.jsonl",
    "samples.jsonl",
    "plans.jsonl",
    "transitions.jsonl",
    "config_history.jsonl",
    "timeline.json",
)

UNREAD = {
    ".lock": "an empty file that is locked; its content means nothing",
    "report.html": "made from the records at the end; no run reads it",
    "tensorboard": "TensorBoard's own checksums guard each event, and no run reads them",
    "status.json": "written again every second; a start looks in it for another run, and the lock decides",
}
"""Files that a run never goes on from, and why damage to them may pass without a sentence."""


class Restored(protocols.LibraError):
    """Ends a trial when the run has gone on from a checkpoint."""


def settings(steps: int = STEPS) -> config_lib.RunConfig:
    """A run of a few seconds."""
    return config_lib.parse(
        config_lib.RunConfig,
        {
            "name": "damage",
            "steps": steps,
            "task": {
                "source": "libra_jax.examples.calculator:task_source",
                "environment": "libra_jax.examples.calculator:environment",
                "max_turns": 2,
            },
            "model": {"preset": "libra-tiny", "attention_chunk": 64},
            "rollout": {"engine": "fake", "slots": 4, "max_context": 64, "max_tokens": 8},
            "trainer": {"platform": "cpu", "row_tokens": 64, "rows_per_micro_batch": 2, "max_skipped_steps": 2},
            "coordinator": {"groups_per_step": 2, "group_size": 2},
            "checkpoint": {"every": EVERY, "keep": 3},
            "telemetry": {"report": False},
            # Rewards that differ within a group: the weights of each checkpoint have to differ, too.
            "reward": {"functions": {"varying": {"factory": "reward_functions:varying"}}},
        },
    )


@dataclass
class Outcome:
    """What came of a trial.

    Attributes:
      file: that was damaged, inside the workdir.
      how: it was damaged.
      said: everything that the run said.
      step: of the checkpoint that it went on from; None if it ended before.
      state: digest of the restored train state and of the coordinator's part.
      weights: digest of the restored parameters alone.
      error: the sentence that it ended with, "" for none; a traceback if it was no sentence.
      crashed: whether it was no sentence.
      records: lines of each record file when the run went on.
    """

    file: str
    how: str
    said: str = ""
    step: int | None = None
    state: str = ""
    weights: str = ""
    error: str = ""
    crashed: bool = False
    records: dict[str, list[bytes]] = field(default_factory=dict)

    @property
    def told(self) -> bool:
        """Whether a sentence names what was damaged."""
        parts, text = Path(self.file).parts, self.said + self.error
        if parts[0] != "checkpoints":
            return Path(self.file).name in text
        return any(parts[1] in line and parts[2].removesuffix("/") in line for line in text.splitlines())

    @property
    def what(self) -> str:
        """The column of the table that it counts in."""
        if self.crashed:
            return "crashed"
        if self.step is None:
            return "ended with a sentence"
        went_on = "went on" if self.step == STEPS else "went on from the one before"
        return f"{went_on}, {'with a sentence' if self.told else 'harmless'}"


def prepare(workdir: Path) -> None:
    """A workdir of two starts of a run, with the records of a planner and of hybrid workers beside its own."""
    run(settings(STEPS - 1), workdir)
    run(settings(STEPS), workdir)
    for name in (files_lib.PLANS_FILE, files_lib.TRANSITIONS_FILE):
        lines = [files_lib.json_line({"step": step, "worker": "rollout-1"}) for step in range(1, STEPS + 1)]
        (workdir / name).write_bytes(b"".join(lines))


def good(base: Path, scratch: Path) -> dict[int, Outcome]:
    """What a run restores from each of its checkpoints, as long as nothing is damaged."""
    found = {}
    for step in range(1, STEPS + 1):
        workdir = scratch / "good"
        shutil.rmtree(workdir, ignore_errors=True)
        shutil.copytree(base, workdir)
        for later in range(step + 1, STEPS + 1):
            shutil.rmtree(workdir / "checkpoints" / f"step-{later:08d}")
        found[step] = go_on(settings(STEPS + 1), workdir, Outcome("", ""))
    return found


def run(config: config_lib.RunConfig, workdir: Path) -> None:
    """The run as launch/train.py makes it."""

    async def go() -> None:
        async with toolkit.Toolkit(config.tools, config.sandbox, config.task.call_seconds) as tools:
            opened = workdirs.open_workdir(config, str(workdir))
            await wiring.train(
                resolved_run.resolve(config, need_weights=True),
                opened,
                tools,
                take_fencing_token=lambda: workdirs.take_fencing_token(opened),
            )

    # A lock is held until its process ends, and here one process stands for several.
    with mock.patch.object(workdirs, "_lock", return_value=True):
        asyncio.run(go())


def go_on(config: config_lib.RunConfig, workdir: Path, outcome: Outcome) -> Outcome:
    """Gives the command again, up to the restored state."""
    restore, restore_trainer = saving.Saver.restore, trainer.TrainerActor.restore
    compile_ = trainer.learner_lib.Learner.compile
    written, log = io.StringIO(), io.StringIO()
    trainers: list[trainer.TrainerActor] = []

    def noted(actor: trainer.TrainerActor, path: str) -> int:
        trainers.append(actor)
        return restore_trainer(actor, path)

    async def restored(saver: saving.Saver, stored: checkpoint_store.Stored) -> dict[str, Any]:
        state = await restore(saver, stored)
        outcome.step, outcome.state = stored.step, _digest(state, trainers[-1])
        outcome.weights = _of_leaves(hashlib.sha256(), trainers[-1].running().learner.state.params)
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == coordinator.OLDER))
        outcome.records = {name: _lines(workdir / name) for name in RECORDS}
        raise Restored("restored")

    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    saving.Saver.restore, trainer.TrainerActor.restore = restored, noted
    trainer.learner_lib.Learner.compile = lambda *_: None
    try:
        with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
            run(config, workdir)
    except Restored:
        pass
    except protocols.LibraError as error:
        outcome.error = str(error)
    except Exception:
        outcome.error, outcome.crashed = traceback.format_exc(), True
    finally:
        saving.Saver.restore, trainer.TrainerActor.restore = restore, restore_trainer
        trainer.learner_lib.Learner.compile = compile_
        logging.getLogger().removeHandler(handler)
    outcome.said = written.getvalue() + log.getvalue()
    return outcome


def _digest(state: Any, actor: trainer.TrainerActor) -> str:
    """Of the coordinator's part, and of each number of the train state in its place."""
    digest = hashlib.sha256(repr(state).encode())
    digest.update(str(actor._skipped_in_a_row).encode())
    return _of_leaves(digest, actor.running().learner.state)


def _of_leaves(digest: hashlib._Hash, tree: Any) -> str:
    for leaf in jax.tree.leaves(tree):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def files(workdir: Path) -> list[str]:
    """Every file of a workdir."""
    return sorted(str(path.relative_to(workdir)) for path in workdir.rglob("*") if path.is_file())


def kind(file: str) -> str:
    """The row of the table that a file counts in."""
    parts = Path(file).parts
    if parts[0] == "checkpoints":
        name = parts[2]
        return (
            "checkpoint: trainer's " + ("arrays" if parts[3] in ("d", "ocdbt.process_0") else "other files")
            if (name.startswith("trainer"))
            else f"checkpoint: {name.split('-')[0].split('.')[0]}.json"
        )
    return parts[0] if len(parts) == 1 else f"{parts[0]}/"


def flip_a_bit(data: bytearray, chance: random.Random) -> str:
    """Flips one bit."""
    place, bit = chance.randrange(len(data)), chance.randrange(8)
    data[place] ^= 1 << bit
    return f"bit {bit} of byte {place} flipped"


def zero_a_page(data: bytearray, chance: random.Random) -> str:
    """Zeroes a page, as far as the file goes."""
    begin = chance.randrange(0, len(data), PAGE)
    end = min(len(data), begin + PAGE)
    data[begin:end] = bytes(end - begin)
    return f"bytes {begin} to {end} zeroed"


def damage(file: Path, chance: random.Random) -> str:
    """Damages a file in one of the two ways; returns how, "" if the file has nothing to damage."""
    before = bytearray(file.read_bytes())
    if not any(before):
        return ""
    after = bytearray(before)
    ways: list[Callable[[bytearray, random.Random], str]] = [flip_a_bit, zero_a_page]
    way, how = chance.choice(ways), ""
    while after == before:  # a page that is zero already is none
        how = way(after, chance)
    file.write_bytes(after)
    return how


def trials(base: Path, scratch: Path, count: int, seed: int) -> Iterator[Outcome]:
    """Damages files of copies of a workdir, one a trial: the files in turn, so that each is met."""
    chance = random.Random(seed)
    names = files(base)
    chance.shuffle(names)
    made = 0
    while made < count:
        for name in names:
            workdir = scratch / "trial"
            shutil.rmtree(workdir, ignore_errors=True)
            shutil.copytree(base, workdir)
            how = damage(workdir / name, chance)
            if not how:
                continue
            outcome = Outcome(name, how)
            # What was exported is looked at by a run that has nothing left to train.
            yield go_on(settings(STEPS if name.startswith("model/") else STEPS + 1), workdir, outcome)
            made += 1
            if made == count:
                break
    os.sync()
