"""The report's page: one HTML file that needs nothing else, on light and dark screens, from `templates/`."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import markupsafe

from libra_jax.telemetry import escapes, figures, samples


@dataclass(frozen=True)
class Table:
    """A table of texts: the heads of its columns, and its rows."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A card of the page; what it has is shown in the order of the attributes.

    Attributes:
      title: heading.
      picture: an `<svg>` element of `figures`.
      table: under the picture.
      samples: rollouts, each folded.
      text: shown as it is, in letters of one width.
      note: a line at the end.
      wide: takes the page's whole width.
      folded: closed until it is clicked.
    """

    title: str
    picture: str = ""
    table: Table | None = None
    samples: Sequence[samples.Sample] = ()
    text: str = ""
    note: str = ""
    wide: bool = False
    folded: bool = False


def render(title: str, heading: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """Returns the whole page.

    Args:
      title: of the browser's window.
      heading: above the page.
      lead: sentences under the heading; what is between double asterisks is bold.
      sections: cards, in order.
    """
    values = {"title": title, "heading": heading, "lead": lead, "sections": sections}
    return _environment().get_template("page.html.j2").render(values, light=figures.LIGHT, dark=figures.DARK)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("libra_jax.telemetry"),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bold"] = _bold
    return environment


def _visible(value: Any) -> Any:
    """Spells out control characters in everything that a template shows, before HTML's own escapes."""
    return value if isinstance(value, markupsafe.Markup) else escapes.visible(str(value), lines=True)


def _bold(sentence: str) -> markupsafe.Markup:
    """Returns a sentence as HTML in which `**this**` is bold."""
    escaped = str(markupsafe.escape(escapes.visible(sentence)))
    return markupsafe.Markup(re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escaped))
