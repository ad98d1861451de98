"""Pictures that are read on a phone as well as on paper: narrow, in large letters, with the legend below the axes."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WIDTH = 4.6
"""Inches. On a phone's 360 CSS pixels the letters are then about as large as in print."""

LETTERS = 11
"""Points of every text; a phone shows them about 12 pixels high."""

COLUMNS = 48
"""Characters of a title's line."""


@contextlib.contextmanager
def drawn(path: Path, height: float, title: Sequence[str], rows: int = 1) -> Iterator[Any]:
    """Yields the axes of a picture, one below the other if there are several, and writes the file at the end.

    Args:
      path: where to, .svg or .png.
      height: of the axes, in inches; title and legend come on top.
      title: its lines; long ones are broken.
      rows: how many axes.
    """
    from matplotlib import figure, rc_context  # only here: a picture is all that needs it

    lines = [part for line in title for part in textwrap.wrap(line, COLUMNS)]
    with rc_context({"svg.hashsalt": "libra-jax", "font.size": LETTERS}):
        picture = figure.Figure(figsize=(WIDTH, height + 0.19 * len(lines)), layout="constrained")
        axes = picture.subplots(rows, squeeze=False)[:, 0]
        for one in axes:
            one.spines[["top", "right"]].set_visible(False)
        picture.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=LETTERS)
        yield axes if rows > 1 else axes[0]
        labelled = [pair for one in axes[:1] for pair in zip(*one.get_legend_handles_labels(), strict=True)]
        if labelled:
            handles, labels = zip(*labelled, strict=True)
            columns = 2 if max(map(len, labels)) < 22 else 1
            rows_of_legend = -(-len(labels) // columns)
            picture.set_figheight(picture.get_figheight() + 0.22 * rows_of_legend)
            picture.legend(handles, labels, loc="outside lower left", frameon=False, ncols=columns, fontsize=LETTERS)
        picture.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def bars(axes: Any, names: Sequence[str], means: Sequence[float], spreads: Sequence[float], format_: str) -> None:
    """Draws a bar for each name, the spread where there is one, and the mean in figures to the right of both.

    Args:
      axes: to draw on.
      names: of the bars, from the top.
      means: of each.
      spreads: standard deviation of each; 0 for none.
      format_: format of the means, as "{:.1f}".
    """
    places = range(len(names))
    errors = list(spreads) if any(spreads) else None
    axes.barh(places, list(means), xerr=errors, color="#4c78a8", ecolor="#333333", capsize=3, height=0.6)
    axes.set_yticks(list(places), list(names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    most = max((mean + spread for mean, spread in zip(means, spreads, strict=True)), default=0.0)
    for place, mean, spread in zip(places, means, spreads, strict=True):
        axes.annotate(format_.format(mean), (mean + spread, place), (5, 0), textcoords="offset points", va="center")
    axes.set_xlim(0.0, 1.25 * most or 1.0)
