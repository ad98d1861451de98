"""The report's page: one self-contained HTML file for light and dark screens, made from `templates/`."""

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
    """A table of texts: the headings of its columns, and its rows."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A card of the page. Its contents are shown in the order of the attributes.

    Attributes:
      title: Heading of the card.
      picture: An `<svg>` element of `figures`.
      table: Table under the picture.
      samples: Rollouts, each folded.
      text: Text that is shown as it is, in a monospace font.
      note: Line at the end.
      wide: Whether the card takes the page's whole width.
      folded: Whether the card is closed until it is clicked.
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
      title: Title of the browser's window.
      heading: Heading of the page.
      lead: Sentences under the heading. Parts between double asterisks are bold.
      sections: Cards, in order.
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
    """Spells out control characters in everything that a template shows. HTML's own escapes follow."""
    # Markup is text that was made safe already.
    return value if isinstance(value, markupsafe.Markup) else escapes.visible(str(value), lines=True)


def _bold(sentence: str) -> markupsafe.Markup:
    """Returns a sentence as HTML, with `**this**` in bold."""
    escaped = str(markupsafe.escape(escapes.visible(sentence)))
    return markupsafe.Markup(re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escaped))
