"""Draws pictures that are readable on a phone and on paper: narrow, in large letters, with the legend below the
axes."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WIDTH = 4.6
"""Width of a picture, in inches. On a phone of 360 CSS pixels the letters are then about as large as in print."""

LETTERS = 11
"""Size of every text, in points; a phone shows it about 12 pixels high."""

LABEL = 20
"""Most characters of a line of a bar's name."""

COLUMNS = 48
"""Most characters of a title's line."""


BAR = 0.36
"""Inches of a bar whose name takes one line, with the gap to the next."""


def bars_height(names: Sequence[str]) -> float:
    """Returns the inches that bars of these names take, their axis included."""
    lines = max(name.count("\n") + 1 for name in short(names))
    return 0.9 + BAR * len(names) * (1.0 + 0.4 * (lines - 1))


@contextlib.contextmanager
def drawn(path: Path, height: float, title: Sequence[str], rows: Sequence[float] = (1.0,)) -> Iterator[Any]:
    """Yields the axes of a picture (one below the other if there are several), and writes the file at the end.

    Args:
      path: file to write, .svg or .png.
      height: inches of the axes; title and legend come on top.
      title: lines of the title; long lines are broken.
      rows: relative height of each axes.
    """
    from matplotlib import figure, rc_context  # imported only here: nothing else needs it

    lines = [part for line in title for part in textwrap.wrap(line, COLUMNS)]
    # A fixed salt and no date: the same data gives the same file.
    with rc_context({"svg.hashsalt": "libra-jax", "font.size": LETTERS}):
        picture = figure.Figure(figsize=(WIDTH, height + 0.19 * len(lines)), layout="constrained")
        axes = picture.subplots(len(rows), squeeze=False, height_ratios=rows)[:, 0]
        for one in axes:
            one.spines[["top", "right"]].set_visible(False)
        picture.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=LETTERS)
        yield axes if len(rows) > 1 else axes[0]
        labelled = [pair for one in axes[:1] for pair in zip(*one.get_legend_handles_labels(), strict=True)]
        if labelled:
            handles = [handle for handle, _ in labelled]
            labels = [textwrap.fill(label, COLUMNS - 6) for _, label in labelled]
            columns = 2 if max(map(len, labels)) < 22 else 1
            rows_of_legend = -(-sum(label.count("\n") + 1 for label in labels) // columns)
            picture.set_figheight(picture.get_figheight() + 0.22 * rows_of_legend)
            picture.legend(handles, labels, loc="outside lower left", frameon=False, ncols=columns, fontsize=LETTERS)
        picture.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def short(names: Sequence[str]) -> list[str]:
    """Returns the names without the words that all of them begin with, broken into lines of `LABEL` characters."""
    words = [name.split() for name in names]
    shared = 0
    # At least one word of each name must stay.
    while len(names) > 1 and all(len(each) > shared + 1 and each[shared] == words[0][shared] for each in words):
        shared += 1
    plain = [" ".join(each[shared:]) for each in words]
    return ["\n".join(textwrap.wrap(name, LABEL)) for name in plain]


def bars(axes: Any, names: Sequence[str], means: Sequence[float], spreads: Sequence[float], format_: str) -> None:
    """Draws a bar for each name, its spread if it has one, and the mean in figures to the right of both.

    Args:
      axes: axes to draw on.
      names: names of the bars, from the top.
      means: mean of each bar.
      spreads: standard deviation of each bar; 0 for none.
      format_: format of the means, as "{:.1f}".
    """
    places = range(len(names))
    errors = list(spreads) if any(spreads) else None
    axes.barh(places, list(means), xerr=errors, color="#4c78a8", ecolor="#333333", capsize=3, height=0.6)
    axes.set_yticks(list(places), short(names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    ends = [mean + sign * spread for mean, spread in zip(means, spreads, strict=True) for sign in (-1, 1)]
    least, most = min(0.0, *ends), max(0.0, *ends)
    for place, mean, spread in zip(places, means, spreads, strict=True):
        axes.annotate(format_.format(mean), (mean + spread, place), (5, 0), textcoords="offset points", va="center")
    room = 0.25 * (most - least) or 1.0  # for the figures to the right of the longest bar
    axes.set_xlim(least, most + room)
