"""Reports a comparison of policies: entries for the JSON file, a table for the terminal, a picture.

An entry is one policy under one seed. Every value but `wall_seconds` repeats exactly for the same seed.
"""

from __future__ import annotations

import contextlib
import json
import operator
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
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
def picture_axes(path: Path, height: float, title: Sequence[str], rows: Sequence[float] = (1.0,)) -> Iterator[Any]:
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
    while len(names) > 1 and all(
        len(name_words) > shared + 1 and name_words[shared] == words[0][shared] for name_words in words
    ):
        shared += 1
    plain = [" ".join(name_words[shared:]) for name_words in words]
    return ["\n".join(textwrap.wrap(name, LABEL)) for name in plain]


def bars(axes: Any, names: Sequence[str], means: Sequence[float], spreads: Sequence[float], format_: str) -> None:
    """Draws a bar for each name, its spread if it has one, and the mean in figures to the right of both.

    Args:
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
    # Figures stand beyond the spread, so the axis needs its ends and not only the means.
    ends = [mean + sign * spread for mean, spread in zip(means, spreads, strict=True) for sign in (-1, 1)]
    low, high = min(0.0, *ends), max(0.0, *ends)
    for place, mean, spread in zip(places, means, spreads, strict=True):
        axes.annotate(format_.format(mean), (mean + spread, place), (5, 0), textcoords="offset points", va="center")
    room = 0.25 * (high - low) or 1.0  # for the figures to the right of the longest bar
    axes.set_xlim(low, high + room)


Entry = Mapping[str, Any]

KEYS = (
    "policy",
    "seed",
    "tokens_per_second",
    "step_seconds",
    "utilisation",
    "migrated_token_fraction",
    "one_shot_routing_accuracy",
    "kv_recompute_token_fraction",
    "staleness_max",
    "lost_trajectories",
    "duplicated_trajectories",
    "replaced_trajectories",
    "trained_trajectories",
    "trained_tokens_mean",
    "wall_seconds",
)
"""Keys of an entry, in this order."""

PICTURES = (".svg", ".png")


def policies(entries: Sequence[Entry]) -> list[str]:
    """Returns the policies in the order in which they first appear."""
    return list(dict.fromkeys(entry["policy"] for entry in entries))


def step_seconds(entries: Sequence[Entry], policy: str) -> list[float]:
    """Returns a policy's mean step time under each seed."""
    return [entry["step_seconds"]["mean"] for entry in entries if entry["policy"] == policy]


def mean_step_seconds(entries: Sequence[Entry]) -> dict[str, float]:
    """Returns each policy's mean step time, mean over seeds: the shortest first."""
    means = {policy: statistics.fmean(step_seconds(entries, policy)) for policy in policies(entries)}
    return dict(sorted(means.items(), key=operator.itemgetter(1)))


def spread(values: Sequence[float]) -> float:
    """Returns the sample standard deviation; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def to_json(
    entries: Sequence[Entry], bound_seconds: float, subject: Mapping[str, Any], config: Mapping[str, Any]
) -> str:
    """Returns the output file: the entries, the bound (seconds a step, mean over seeds), and the simulated subject.

    Args:
      entries: an entry for each policy and seed.
      bound_seconds: seconds a step that no policy can beat.
      subject: model, machine and lengths (`comparison.Subject`).
      config: settings that all entries have in common.
    """
    # In one order of keys, so that two outputs can be compared line by line.
    ordered = [{key: entry[key] for key in KEYS} for entry in entries]
    content = {"for": subject, "policies": ordered, "bound_seconds": bound_seconds, "config": config}
    return json.dumps(content, indent=2) + "\n"


def table(entries: Sequence[Entry], bound_seconds: float) -> str:
    """Returns a line for each policy: means over seeds, step time with its spread and as a multiple of the bound."""
    header = (
        "policy", "step s", "+-", "p50", "p90", "p99", "x bound", "tokens/s", "train", "rollout", "moved", "one-shot",
        "again", "stale", "lost", "twice",
    )  # fmt: skip
    legend = (
        "moved: tokens of contexts that changed instance, over tokens generated; one-shot: requests whose first bucket "
        "after a tool return is that of their true length;\nagain: tokens prefilled a second time, over tokens "
        "prefilled; stale: versions behind, at most; twice: trained twice"
    )
    bound = f"bound: no policy takes less than {bound_seconds:.1f} s a step (mean over seeds)"
    rows: list[tuple[str, ...]] = [header]
    replaced = []
    for policy in policies(entries):
        mine = [entry for entry in entries if entry["policy"] == policy]

        def mean(name: str, inner: str = "", mine: Sequence[Entry] = mine) -> float:
            return statistics.fmean(float(entry[name][inner] if inner else entry[name]) for entry in mine)

        seconds = step_seconds(entries, policy)
        # None: no tool was ever called.
        accuracies = [value for entry in mine if (value := entry["one_shot_routing_accuracy"]) is not None]
        rows.append(
            (
                policy,
                f"{statistics.fmean(seconds):.1f}",
                f"{spread(seconds):.1f}" if len(seconds) > 1 else "-",
                *(f"{mean('step_seconds', name):.1f}" for name in ("p50", "p90", "p99")),
                f"{statistics.fmean(seconds) / bound_seconds:.2f}",
                f"{mean('tokens_per_second'):.0f}",
                *(f"{mean('utilisation', name):.0%}" for name in ("train", "rollout")),
                f"{mean('migrated_token_fraction'):.1%}",
                f"{statistics.fmean(accuracies):.1%}" if accuracies else "-",
                f"{mean('kv_recompute_token_fraction'):.1%}",
                str(max(entry["staleness_max"] for entry in mine)),
                str(sum(entry["lost_trajectories"] for entry in mine)),
                str(sum(entry["duplicated_trajectories"] for entry in mine)),
            )
        )
        lost, trained = (sum(entry[f"{kind}_trajectories"] for entry in mine) for kind in ("replaced", "trained"))
        # Replacing drops the long rollouts first, so such a policy's step time is of easier work: the reader must know.
        if lost:
            replaced.append(
                f"{policy}: {lost:,} rollouts replaced ({lost / (lost + trained):.1%} of those begun); those trained "
                f"on generate {mean('trained_tokens_mean'):,.0f} tokens in the mean"
            )
    if replaced:
        bound += "; it holds where nothing is replaced"
    return "\n".join([*aligned(rows), bound, legend, *replaced])


def aligned(rows: Sequence[Sequence[str]], left_columns: int = 1) -> list[str]:
    """Returns rows of texts as aligned lines, the first `left_columns` flush left and the others flush right."""
    columns = []
    for at, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if at < left_columns else cell.rjust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def write_picture(entries: Sequence[Entry], bound_seconds: float, path: Path, title: Sequence[str]) -> None:
    """Draws each policy's mean step time with its spread over seeds, and the bound as a line.

    Args:
      path: file to write, .svg or .png.
    """
    names = policies(entries)
    seeds = len({entry["seed"] for entry in entries})
    with picture_axes(path, 0.2 + bars_height(names), title) as axes:
        means = [statistics.fmean(step_seconds(entries, name)) for name in names]
        bars(axes, names, means, [spread(step_seconds(entries, name)) for name in names], "{:.0f}")
        label = f"bound: no policy takes less than {bound_seconds:.0f} s"
        axes.axvline(bound_seconds, color="#c44e52", linewidth=1.5, label=label)
        of_seeds = f"\nmean of {seeds} seeds ± standard deviation" if seeds > 1 else ""
        axes.set_xlabel(f"seconds a training step{of_seeds}")
