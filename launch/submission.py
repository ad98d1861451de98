"""Submits the real runs of a sweep to launch/train.py here, or to launch/slurm.py or launch/kubernetes.py.

Each run has a workdir of its own in the sweep's folder. A record of the submitted runs lies there, so that the same
command submits nothing twice. The command waits for runs on this machine. It looks the other runs up in their
workdirs, if these are visible from here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
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

import real_results

from libra_jax import config as libra_config
from libra_jax import parent_death, protocols
from libra_jax.telemetry import files, metrics

LAUNCHERS = {"here": "train.py", "slurm": "slurm.py", "kubernetes": "kubernetes.py"}
"""Script of each launcher."""

SUBMIT_SECONDS = 180.0
"""Deadline for a launcher to submit a run, in seconds."""

LONGEST_TITLE = 120
"""Most characters of a run's name in a file name: a file system takes 255, the seed and the hash included."""

RECORD = "submitted.jsonl"


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
    config: libra_config.RunConfig
    steps: int | None
    workdir: Path
    settings: tuple[str, ...] = ()

    def command(self, launcher: str, extra: Sequence[str]) -> list[str]:
        """Returns the launcher's command for this run."""
        settings = [f"--config={self.file}", *self.settings, f"--config.seed={self.config.seed}"]
        settings += [f"--config.steps={self.steps}"] if self.steps else []
        script = Path(__file__).parent / LAUNCHERS[launcher]
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


def workdir(folder: Path, name: str, config: libra_config.RunConfig) -> Path:
    """Returns the folder of a run: named by its config, its seed and a hash of its settings."""
    return folder / f"{title(name)}-seed{config.seed}-{libra_config.digest(config)}"


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
    _check_apart(runs)
    answers = dict(_recorded(folder / RECORD))
    unfinished = [entry for entry in runs if not entry.done]
    left = [entry for entry in unfinished if again or entry.workdir.name not in answers]
    done, before = len(runs) - len(unfinished), len(unfinished) - len(left)
    _say(f"{len(runs)} runs: {done} done, {before} submitted before, {len(left)} now")
    if dry_run:
        for entry in left:
            print(shlex.join(entry.command(launcher, extra)))
        return
    failed, children = {}, _Children()
    threads = concurrent.futures.ThreadPoolExecutor(jobs if launcher == "here" else 1)
    with children.told_of_signals(), threads as pool:
        doing = {pool.submit(_launch, entry, launcher, extra, children): entry for entry in left}
        for number, future in enumerate(concurrent.futures.as_completed(doing), start=1):
            entry, (answer, problem) = doing[future], future.result()
            if problem:
                failed[entry.workdir.name] = problem
            elif launcher != "here":
                answers[entry.workdir.name] = answer
                _record(folder / RECORD, entry, launcher, answer)
            _say(f"[{number}/{len(left)}] {entry.workdir.name}: {problem or answer}")
    outcomes = [real_results.outcome(entry, answers, failed) for entry in runs]
    real_results.show(outcomes)
    print(f"wrote {' and '.join(map(str, real_results.write(folder, outcomes)))}")
    if children.stopped:
        _say("stopped; the same command goes on with the runs that are left.")
        raise SystemExit(os.EX_TEMPFAIL)
    if failed:
        named = "; ".join(f"{name}: {problem}" for name, problem in failed.items())
        raise protocols.LibraError(f"{len(failed)} of {len(left)} runs failed, the others are kept: {named}")


def _check_apart(runs: Sequence[Run]) -> None:
    """Refuses a run that has two names, for example by the values 1e-4 and 0.0001."""
    seen: dict[tuple[str, int, str], Run] = {}
    for entry in runs:
        known = entry.file, entry.config.seed, libra_config.digest(entry.config)
        if (other := seen.setdefault(known, entry)) is not entry:
            raise protocols.ConfigError(
                f"--sweep: {other.name!r} and {entry.name!r} are the same run; name each value once, and no field that "
                "changes nothing in a run"
            )


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
        program = parent_death.command(entry.command(launcher, extra))
        limit = None if here else SUBMIT_SECONDS  # a run has deadlines of its own
        try:
            status, printed = children.run(program, out, piped=not here, seconds=limit)
        except subprocess.TimeoutExpired:
            return "", f"launch/{script} did not submit it within {SUBMIT_SECONDS:g} s (log: {log})"
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


def _recorded(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the record's pairs of a workdir's name and the launcher's answer."""
    if path.exists():
        for record in files.whole_json_lines(path):
            yield str(record["run"]), str(record["answer"])


def _record(path: Path, entry: Run, launcher: str, answer: str) -> None:
    line = {"run": entry.workdir.name, "launcher": launcher, "answer": answer}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
