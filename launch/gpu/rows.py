"""What a case of `launch/gpu_check.py` measures, and the JSON and the Markdown that the script writes of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from libra_jax import protocols
from libra_jax.telemetry import files

Value = float | int | str
Figures = Mapping[str, Value]
"""Measured values by name; the name ends with the unit."""

State = Literal["passed", "failed", "left out"]


class LeftOut(protocols.LibraError):
    """Raised by a case that has nothing to measure here; the message says why."""


def is_installed(package: str) -> bool:
    """Returns whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@dataclass(frozen=True)
class Bench:
    """Where the cases run.

    Attributes:
      platform: "gpu", or "cpu" for a dry run with tiny sizes.
      scratch: folder for files of the cases; it is removed in the end.
      traces: folder for profiles of training steps; empty for none.
      results: folder for archives of whole runs; empty for none.
    """

    platform: str
    scratch: str
    traces: str = ""
    results: str = ""

    @property
    def tiny(self) -> bool:
        """Whether sizes are those of a dry run."""
        return self.platform != "gpu"


@dataclass(frozen=True)
class Outcome:
    """What a case measured.

    Attributes:
      figures: measured values.
      problem: sentence about a value out of its bounds, which fails the case; empty if there is none.
    """

    figures: Figures
    problem: str = ""


@dataclass(frozen=True)
class Row:
    """The result of a case.

    Attributes:
      case: name of the case.
      state: "passed", "failed" or "left out".
      seconds: seconds that the case took.
      reason: why it failed or was left out; empty if it passed.
      figures: what it measured, also if a value fails the case.
    """

    case: str
    state: State
    seconds: float = 0.0
    reason: str = ""
    figures: Figures = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """Where and with what a report was measured.

    Attributes:
      platform: JAX's platform name.
      device: name of the device.
      devices: number of devices.
      memory_bytes: bytes of a device that JAX may use; 0 if it does not say.
      driver: version of NVIDIA's driver; empty without one.
      processor: name of the processor.
      cores: processor cores that this process may use.
      versions: versions of Python and of the packages, by name.
      commit: commit of the code; empty outside of a repository.
      date: date and time in UTC.
    """

    platform: str
    device: str
    devices: int
    memory_bytes: int
    driver: str
    processor: str
    cores: int
    versions: Mapping[str, str]
    commit: str
    date: str


@dataclass(frozen=True)
class Report:
    """All that a call of the script measured.

    Attributes:
      machine: where it was measured.
      command: the command.
      minutes: the budget.
      seconds: seconds that everything took.
      rows: results in the order of the cases.
    """

    machine: Machine
    command: str
    minutes: float
    seconds: float
    rows: Sequence[Row]

    @property
    def failed(self) -> bool:
        """Whether a case failed."""
        return any(row.state == "failed" for row in self.rows)


def write(report: Report, file: Path) -> Path:
    """Writes a report as JSON, and its tables as Markdown beside it. Returns the path of the Markdown.

    Raises:
      DataError: a file cannot be written.
    """
    tables = file.with_suffix(".md")
    try:
        file.write_text(json.dumps(files.finite(dataclasses.asdict(report)), indent=2) + "\n")
        tables.write_text(markdown(report))
    except OSError as error:
        raise protocols.DataError(f"--output: {file} cannot be written ({error.strerror or error})") from error
    return tables


def markdown(report: Report) -> str:
    """Returns a table of the machine, and one for each group of cases."""
    machine = report.machine
    title = f"{machine.device}" if machine.platform == "gpu" else f"DRY RUN on {machine.device}, tiny sizes"
    memory = f", {machine.memory_bytes / 1e9:.1f} GB of memory for JAX" if machine.memory_bytes else ""
    lines = [
        f"### {title}",
        "",
        f"{machine.date}, commit {machine.commit or 'unknown'}, `{report.command}`: {report.seconds:.0f} s. "
        f"{machine.devices} x {machine.device}{memory}; {machine.processor}, {machine.cores} cores"
        f"{f'; driver {machine.driver}' if machine.driver else ''}. "
        + ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        + ".",
        "",
    ]
    for group, rows in itertools.groupby(report.rows, key=lambda row: row.case.partition("/")[0]):
        alike = list(rows)
        names = list(dict.fromkeys(name for row in alike for name in row.figures))
        header = ["case", "state", *(name.replace("_", " ") for name in names)]
        lines += [f"#### {group}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        for row in alike:
            cells = [row.case, row.state + (f": {row.reason}" if row.reason else "")]
            cells += [text(row.figures[name]) if name in row.figures else "" for name in names]
            # A reason may hold the character that separates columns.
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def text(value: Value) -> str:
    """Returns a value for people, with three digits."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
