"""Expands a sweep into its runs, and submits real runs to launch/train.py here, or to a cluster's launcher.

A sweep is a product of configs, tried values and seeds. Each run has a workdir of its own in the sweep's folder. A
record of the submitted runs lies there, so that the same command submits nothing twice. The command waits for runs on
this machine. It looks the other runs up in their workdirs, if these are visible from here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from support import real_results

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.telemetry import escapes, files, metrics
from libra_jax.utils import parent_death

LAUNCHERS = {"here": "train.py", "slurm": "slurm.py", "kubernetes": "kubernetes.py"}
"""Script of each launcher."""

SUBMIT_SECONDS = 180.0
"""Deadline for a launcher to submit a run, in seconds."""

LONGEST_TITLE = 120
"""Most characters of a run's name in a file name: a file system takes 255, the seed and the hash included."""

RECORD = "submitted.jsonl"

MOST_CELLS = 1_000
"""Most settings of one sweep; each is run under every seed."""

SEEDED = "say seeds by --seeds=0,1,2, which the mean and the spread are over"


@dataclass(frozen=True)
class Cell:
    """One entry of the table: a setting that is run under every seed.

    Attributes:
      name: name in the table.
      file: the config file, with its variant behind a colon.
      settings: `--config.` flags of every run.
    """

    name: str
    file: str
    settings: tuple[str, ...] = ()


def taken(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into the script's own arguments and the runs' `--config.` flags.

    Args:
      arguments: as `sys.argv`.
    """
    ours = [argument for argument in arguments if not argument.lstrip("-").startswith("config.")]
    return ours, [f"--{argument.lstrip('-')}" for argument in arguments if argument not in ours]


def cells(configs: str, of: str | None, overrides: Sequence[str], sweeps: Sequence[str]) -> list[Cell]:
    """Returns every config with every combination of the tried values.

    Args:
      configs: files, or variants of `of`, separated by commas.
      of: file that has the variants.
      overrides: `--config.` flags of all runs.
      sweeps: fields with their values, as `optimizer.learning_rate=1e-4,3e-4`; several make a product.

    Raises:
      ConfigError: nothing is named, a file is missing, or values cannot be read.
    """
    names = list(dict.fromkeys(name.strip() for name in configs.split(",") if name.strip()))
    if not names:
        raise protocols.ConfigError("--configs: name at least one config file, or with --of one of its variants")
    for override in overrides:
        if override.split("=")[0] == "--config.seed":
            raise protocols.ConfigError(f"--config.seed: {SEEDED}")
    axes = list(map(_axis, sweeps))
    fields = [field for field, _ in axes]
    for field in fields:
        if fields.count(field) > 1 or f"--config.{field}" in [override.split("=")[0] for override in overrides]:
            raise protocols.ConfigError(f"--sweep={field}: is given twice; name all of its values in one flag")
    lasts = [field.rpartition(".")[2] for field in fields]
    # The whole field, if another one has the same last part.
    shown = {field: last if lasts.count(last) == 1 else field for field, last in zip(fields, lasts, strict=True)}
    count = len(names) * math.prod(len(values) for _, values in axes)
    if count > MOST_CELLS:
        raise protocols.ConfigError(f"--sweep: {count:,} combinations are more than {MOST_CELLS:,}; try fewer values")
    made = []
    for name in names:
        file = f"{of}:{name}" if of else name
        path = Path(file.partition(":")[0])
        if path.suffix != ".py" or not path.is_file():
            raise protocols.ConfigError(f"--configs: {path}: no such config file; variants of one file need --of=FILE")
        for values in itertools.product(*(values for _, values in axes)):
            chosen = list(zip(fields, values, strict=True))
            label = ", ".join(f"{shown[field]}={value}" for field, value in chosen)
            settings = (*overrides, *(f"--config.{field}={value}" for field, value in chosen))
            made.append(Cell(f"{name} {label}".strip(), file, settings))
    return made


def _axis(text: str) -> tuple[str, list[str]]:
    """Returns a field and its values."""
    field, equals, values = text.partition("=")
    field = field.strip().removeprefix("--").removeprefix("config.")
    found = list(dict.fromkeys(_split(values)))
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", field) or not found:
        raise protocols.ConfigError(
            f"--sweep: {text!r} names no field and values; they look like --sweep=optimizer.learning_rate=1e-4,3e-4"
        )
    if field == "seed":
        raise protocols.ConfigError(f"--sweep=seed: {SEEDED}")
    if field == "steps":
        raise protocols.ConfigError("--sweep=steps: runs that differ in their steps alone are one run; see --steps")
    return field, found


def _split(text: str) -> Iterator[str]:
    """Yields values between commas; a comma within brackets or quotation marks belongs to its value."""
    part, depth, quote = "", 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth and not quote:
            if part.strip():
                yield part.strip()
            part = ""
        else:
            part += letter
    if depth or quote:
        raise protocols.ConfigError(f"--sweep: {text!r} opens a bracket or a quotation mark that it does not close")
    if part.strip():
        yield part.strip()


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
      name: name of the config in the table.
      file: the config file, with its variant.
      config: its content, with the seed and steps.
      steps: training steps that the command asked for; None takes the config's.
      workdir: folder of the run.
      settings: `--config.` flags besides seed and steps.
    """

    name: str
    file: str
    config: config_lib.RunConfig
    steps: int | None
    workdir: Path
    settings: tuple[str, ...] = ()

    def command(self, launcher: str, extra: Sequence[str]) -> list[str]:
        """Returns the launcher's command for this run."""
        settings = [f"--config={self.file}", *self.settings, f"--config.seed={self.config.seed}"]
        settings += [f"--config.steps={self.steps}"] if self.steps else []
        script = Path(__file__).parents[1] / LAUNCHERS[launcher]
        return [sys.executable, str(script), *settings, f"--workdir={self.workdir}", *extra]

    @property
    def taken(self) -> int:
        """Number of recorded training steps."""
        return max(metrics.read(self.workdir / metrics.METRICS_FILE), default=0)

    @property
    def done(self) -> bool:
        """True if the run took all its steps."""
        return self.taken >= self.config.steps


def title(name: str) -> str:
    """Returns a run's name as a part of a file's name."""
    plain = name.replace(".py", "").replace("/", "-").replace(":", "-").strip("-.")
    return re.sub(r"[^\w.=+-]+", "-", plain)[:LONGEST_TITLE]


def workdir(folder: Path, name: str, config: config_lib.RunConfig) -> Path:
    """Returns the folder of a run: named by its config, its seed and a hash of its settings."""
    return folder / f"{title(name)}-seed{config.seed}-{config_lib.digest(config)}"


def run(
    runs: Sequence[Run], folder: Path, launcher: str, flags: str, *, jobs: int, again: bool, dry_run: bool = False
) -> None:
    """Submits the runs that are neither done nor submitted before; prints and writes the results of all.

    Args:
      runs: the sweep's runs.
      folder: the sweep's folder, which has its record.
      launcher: a key of `LAUNCHERS`.
      flags: further flags for the launcher, in one line as for a shell.
      jobs: number of simultaneous runs on this machine.
      again: also submits runs that were submitted before, unless they are done.
      dry_run: prints the launcher's commands instead.

    Raises:
      ConfigError: the flags cannot be read, or have the launcher submit nothing.
      LibraError: some runs could not be submitted, or failed here; the others were submitted.
    """
    try:
        extra = shlex.split(flags)
    except ValueError as error:
        raise protocols.ConfigError(f"--launcher_flags: cannot be read as a shell would ({error})") from error
    if {"--dry_run", "--dry_run=true"} & set(extra):
        raise protocols.ConfigError("--launcher_flags: has --dry_run, with which nothing is submitted; give it apart")
    seen: dict[tuple[str, int, str], Run] = {}
    for entry in runs:  # a run may have two names, by the values 1e-4 and 0.0001
        known = entry.file, entry.config.seed, config_lib.digest(entry.config)
        if (other := seen.setdefault(known, entry)) is not entry:
            raise protocols.ConfigError(
                f"--sweep: {other.name!r} and {entry.name!r} are the same run; name each value once, and no field that "
                "changes nothing in a run"
            )
    before = files.whole_json_lines(folder / RECORD) if (folder / RECORD).exists() else ()
    answers = {str(record["run"]): str(record["answer"]) for record in before}
    unfinished = [entry for entry in runs if not entry.done]
    left = [entry for entry in unfinished if again or entry.workdir.name not in answers]
    done, submitted = len(runs) - len(unfinished), len(unfinished) - len(left)
    say(f"{len(runs)} runs: {done} done, {submitted} submitted before, {len(left)} now")
    if dry_run:
        for entry in left:
            print(shlex.join(entry.command(launcher, extra)))
        return
    failed, children = {}, _Children()
    # A run here keeps its thread until it ends; another launcher only submits, which needs no second thread.
    threads = concurrent.futures.ThreadPoolExecutor(jobs if launcher == "here" else 1)
    with children.told_of_signals(), threads as pool:
        doing = {pool.submit(_launch, entry, launcher, extra, children): entry for entry in left}
        for number, future in enumerate(concurrent.futures.as_completed(doing), start=1):
            entry, (answer, problem) = doing[future], future.result()
            if problem:
                failed[entry.workdir.name] = problem
            elif launcher != "here":
                answers[entry.workdir.name] = answer
                line = {"run": entry.workdir.name, "launcher": launcher, "answer": answer}
                with (folder / RECORD).open("a") as file:
                    file.write(json.dumps(line) + "\n")
            say(f"[{number}/{len(left)}] {entry.workdir.name}: {problem or answer}")
    outcomes = [real_results.outcome(entry, answers, failed) for entry in runs]
    real_results.show(outcomes)
    print(f"wrote {' and '.join(map(str, real_results.write(folder, outcomes)))}")
    if children.stopped:
        say("stopped; the same command goes on with the runs that are left.")
        raise SystemExit(os.EX_TEMPFAIL)
    if failed:
        named = "; ".join(f"{name}: {problem}" for name, problem in failed.items())
        raise protocols.LibraError(f"{len(failed)} of {len(left)} runs failed, the others are kept: {named}")


class _Children:
    """The processes that launch runs. A signal to stop is passed on to them, and no further process begins.

    Attributes:
      stopped: True once a signal to stop came.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._running: set[subprocess.Popen[str]] = set()

    @contextlib.contextmanager
    def told_of_signals(self) -> Iterator[None]:
        """Passes SIGTERM and SIGHUP on inside the block: a run here then saves a checkpoint within its grace."""

        def stop(*_: object) -> None:
            self.stopped = True
            for process in tuple(self._running):
                process.terminate()

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, command: Sequence[str], out: TextIO, *, piped: bool, seconds: float | None) -> tuple[int, str]:
        """Returns the status of a process that has ended, and its standard output if `piped`.

        Args:
          command: command of the process.
          out: file for its output; only for standard error if `piped`.
          piped: returns its standard output.
          seconds: its deadline; None: no deadline.

        Raises:
          TimeoutExpired: it took longer, and was killed.
        """
        stdout = subprocess.PIPE if piped else out
        with subprocess.Popen(command, stdout=stdout, stderr=out, text=True) as process:
            self._running.add(process)
            try:
                if self.stopped:  # the signal came while the process was being started
                    process.terminate()
                answer, _ = process.communicate(timeout=seconds)
            except BaseException:
                process.kill()
                raise
            finally:
                self._running.discard(process)
        return process.returncode, answer or ""


def _launch(entry: Run, launcher: str, extra: Sequence[str], children: _Children) -> tuple[str, str]:
    """Launches a run, and waits for it if it runs here. Returns the answer or the problem; the other one is empty."""
    if children.stopped:
        return "", "not begun, because the sweep was stopped"
    here, script = launcher == "here", LAUNCHERS[launcher]
    entry.workdir.parent.mkdir(parents=True, exist_ok=True)
    log = entry.workdir.with_name(f"{entry.workdir.name}.log")
    with log.open("a+") as out:
        begun = out.tell()
        # Ends with this process, even if that is killed.
        program = parent_death.command(entry.command(launcher, extra))
        limit = None if here else SUBMIT_SECONDS  # a run has deadlines of its own
        try:
            status, printed = children.run(program, out, piped=not here, seconds=limit)
        except subprocess.TimeoutExpired:
            return "", f"launch/{script} did not submit it within {SUBMIT_SECONDS:g} s (log: {log})"
        # The log keeps what earlier starts of this run said.
        out.seek(begun)
        said = [line for line in out.read().splitlines() if line.strip()]
    if status:
        errors = [line for line in said if line.startswith("error: ")]
        last = (errors or said or ["it said nothing"])[-1].removeprefix("error: ")
        return "", f"{last} (status {status}, log: {log})"
    if here:
        return f"{entry.taken} steps", ""
    answer = [line for line in printed.splitlines() if line.strip()]
    return answer[-1] if answer else "submitted", ""


def say(line: str) -> None:
    """Prints a line about a sweep's progress on standard error; it may quote a run's log or a launcher's answer."""
    print(escapes.visible(line), file=sys.stderr, flush=True)
