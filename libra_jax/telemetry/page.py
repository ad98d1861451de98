"""The report's page: one HTML file that needs nothing else, on light and dark screens."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from libra_jax.telemetry import escapes

_STYLE = """
:root { color-scheme: light dark; --font: system-ui, -apple-system, "Segoe UI", Roboto, "Inter", sans-serif;
  --page: #f6f7f9; --surface: #ffffff; --ink: #1c2430; --muted: #667085; --grid: #e4e7ec;
  --blue: #2f6fed; --green: #159a62; --orange: #e2720c; --purple: #8457d8; --teal: #0e93a8; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0f1319; --surface: #171d26; --ink: #e6eaf0; --muted: #93a0b2; --grid: #2a3341;
  --blue: #6ea0ff; --green: #4cc38a; --orange: #f5a04b; --purple: #b394f4; --teal: #4fc3d6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 var(--font); }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 12px; letter-spacing: -0.01em; }
h1 small { display: block; font-size: 13px; font-weight: 500; color: var(--muted); letter-spacing: 0.02em; }
h2, summary { font-size: 15px; font-weight: 600; margin: 0 0 8px; }
.lead { max-width: 72ch; margin: 0 0 28px; padding: 0; list-style: none; }
.lead li { margin: 2px 0; }
.cards { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); grid-auto-flow: dense; gap: 16px; }
.card { background: var(--surface); border: 1px solid var(--grid); border-radius: 12px;
  padding: 16px 18px; min-width: 0; }
.wide { grid-column: 1 / -1; }
.card svg { display: block; width: 100%; max-width: 100%; height: auto; }
.card .narrow { display: none; }
.note, .card p { color: var(--muted); font-size: 13px; margin: 8px 0 0; }
summary { cursor: pointer; margin: 0; }
details[open] summary { margin-bottom: 10px; }
h3 { font-size: 13.5px; margin: 14px 0 4px; }
.sample { border-top: 1px solid var(--grid); padding: 8px 0; }
.sample summary { font-size: 13.5px; font-weight: 500; overflow-wrap: anywhere; }
.sample pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--muted);
  padding: 2px 0 2px 10px; max-height: 30em; overflow-y: auto; }
.sample pre.model { border-color: var(--blue); } .sample pre.tool { border-color: var(--purple); }
.card .who { margin: 10px 0 2px; }
pre { overflow-x: auto; font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--muted); }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--grid); }
tr:last-child td { border-bottom: 0; }
@media (max-width: 760px) { .cards { grid-template-columns: minmax(0, 1fr); }
  main { padding: 24px 12px 48px; } .card { padding: 14px; }
  .card .broad { display: none; } .card .narrow { display: block; }
  table { width: max-content; min-width: 100%; } td { max-width: 70vw; } }
@media print { body { background: none; } .card { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Section:
    """A card of the page.

    Attributes:
      title: heading, as text.
      body: HTML.
      note: a line under the body, as text.
      wide: takes the page's whole width.
      folded: closed until it is clicked.
    """

    title: str
    body: str
    note: str = ""
    wide: bool = False
    folded: bool = False


def _escaped(text: str) -> str:
    """Text as HTML shows it, which a model or a tool may have written."""
    return html.escape(escapes.visible(text, lines=True))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of texts."""
    head = "".join(f"<th>{_escaped(text)}</th>" for text in heads)
    lines = ("<tr>" + "".join(f"<td>{_escaped(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def standalone(picture: str) -> str:
    """An `<svg>` element of a page as the text of a file of its own, in the colours of a light page."""
    colours = dict(re.findall(r"--(\w+): (#\w+);", _STYLE.partition("@media")[0]))
    for name, colour in colours.items():
        picture = picture.replace(f"var(--{name})", colour)
    picture = picture.replace("var(--font)", "sans-serif")
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return picture.replace("<svg ", f'<svg {spaces} style="background: {colours["surface"]}" ', 1)


def render(title: str, heading: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole page.

    Args:
      title: of the browser's window, as text.
      heading: as text.
      lead: sentences under the heading, as HTML.
      sections: cards, in order.
    """
    items = "".join(f"<li>{sentence}</li>" for sentence in lead)
    cards = "\n".join(_card(section) for section in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escaped(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1><small>Libra-JAX run report</small>{_escaped(heading)}</h1>
<ul class="lead">{items}</ul>
<div class="cards">
{cards}
</div>
</main>
</body>
</html>
"""


def _card(section: Section) -> str:
    kind = "card wide" if section.wide else "card"
    note = f'<p class="note">{_escaped(section.note)}</p>' if section.note else ""
    title = _escaped(section.title)
    if section.folded:
        return f'<details class="{kind}"><summary>{title}</summary>{section.body}{note}</details>'
    return f'<section class="{kind}"><h2>{title}</h2>{section.body}{note}</section>'
