"""Parts of the report's sections. The templates in `templates/` show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from libra_jax.telemetry import samples
from libra_jax.telemetry.report import pictures
from libra_jax.telemetry.report.recorded_run import RecordedRun


@dataclass(frozen=True)
class Table:
    """A table of texts: the headings of its columns, and its rows. Without rows, a section leaves it out."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Listing:
    """Text that is shown as it is, in a monospace font."""

    text: str


@dataclass(frozen=True)
class Rollouts:
    """Rollouts as text, each folded, under headings of their steps."""

    samples: Sequence[samples.Sample]


Part = pictures.Picture | Table | Rollouts | Listing | str
"""Part of a section. Each type has a macro of its name in `card.html.j2`. A text is a line of small print."""


Contents = Callable[[RecordedRun], Iterable[Part]]
"""Function that returns the parts of a section. A run that has none leaves the section out."""


def parts(contents: Contents, run: RecordedRun) -> list[Part]:
    """Returns the parts of a section. Empty if the run has none."""
    return [part for part in contents(run) if not isinstance(part, Table) or part.rows]
