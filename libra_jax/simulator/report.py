"""What a comparison of policies leaves: entries for the JSON file, a table for the terminal, a picture.

An entry is one policy under one seed. Everything in it but `wall_seconds` repeats exactly for the same seed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from libra_jax.simulator import pictures

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
"""Of an entry, in this order."""

PICTURES = (".svg", ".png")


def policies(entries: Sequence[Entry]) -> list[str]:
    """Policies in the order in which they first appear."""
    return list(dict.fromkeys(entry["policy"] for entry in entries))


def step_seconds(entries: Sequence[Entry], policy: str) -> list[float]:
    """A policy's mean step time under each seed."""
    return [entry["step_seconds"]["mean"] for entry in entries if entry["policy"] == policy]


def mean_step_seconds(entries: Sequence[Entry], policy: str) -> float:
    """A policy's mean step time, mean over seeds."""
    return statistics.fmean(step_seconds(entries, policy))


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def to_json(
    entries: Sequence[Entry], bound_seconds: float, subject: Mapping[str, Any], config: Mapping[str, Any]
) -> str:
    """The output file: the entries, the bound (seconds a step, mean over seeds), and what was simulated.

    Args:
      entries: a policy and seed each.
      bound_seconds: what no policy can beat.
      subject: model, machine and lengths (`subject.Subject.as_json`).
      config: what all entries have in common.
    """
    ordered = [{key: entry[key] for key in KEYS} for entry in entries]
    written = {"for": subject, "policies": ordered, "bound_seconds": bound_seconds, "config": config}
    return json.dumps(written, indent=2) + "\n"


def table(entries: Sequence[Entry], bound_seconds: float) -> str:
    """One line a policy: means over seeds, the step time with its standard deviation and as a multiple of the bound."""
    header = (
        "policy", "step s", "+-", "p50", "p90", "p99", "x bound", "tokens/s", "train", "rollout", "moved", "one-shot",
        "again", "stale", "lost", "twice",
    )  # fmt: skip
    rows = [header, *(_row(entries, policy, bound_seconds) for policy in policies(entries))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    legend = (
        "moved: tokens of contexts that changed instance, over tokens generated; one-shot: requests whose first bucket "
        "after a tool return is that of their true length;\nagain: tokens prefilled a second time, over tokens "
        "prefilled; stale: versions behind, at most; twice: trained twice"
    )
    bound = f"bound: no policy takes less than {bound_seconds:.1f} s a step (mean over seeds)"
    replaced = [line for policy in policies(entries) if (line := _replaced(entries, policy))]
    if replaced:
        bound += "; it holds where nothing is replaced"
    return "\n".join([*lines, bound, legend, *replaced])


def _replaced(entries: Sequence[Entry], policy: str) -> str:
    """What a policy's runs gave up, and what is left to train on; empty where all was trained."""
    mine = [entry for entry in entries if entry["policy"] == policy]
    given_up, trained = (sum(entry[f"{kind}_trajectories"] for entry in mine) for kind in ("replaced", "trained"))
    mean = statistics.fmean(entry["trained_tokens_mean"] for entry in mine)
    share = given_up / max(1, given_up + trained)
    return (
        f"{policy}: {given_up:,} attempts replaced ({share:.1%} of those begun); those trained on generate {mean:,.0f} "
        "tokens in the mean"
        if given_up
        else ""
    )


def _row(entries: Sequence[Entry], policy: str, bound_seconds: float) -> tuple[str, ...]:
    mine = [entry for entry in entries if entry["policy"] == policy]

    def mean(*path: str) -> float:
        return statistics.fmean(_at(entry, path) for entry in mine)

    seconds = step_seconds(entries, policy)
    return (
        policy,
        f"{statistics.fmean(seconds):.1f}",
        f"{spread(seconds):.1f}" if len(seconds) > 1 else "-",
        *(f"{mean('step_seconds', name):.1f}" for name in ("p50", "p90", "p99")),
        f"{statistics.fmean(seconds) / bound_seconds:.2f}",
        f"{mean('tokens_per_second'):.0f}",
        *(f"{mean('utilisation', name):.0%}" for name in ("train", "rollout")),
        f"{mean('migrated_token_fraction'):.1%}",
        _accuracy(mine),
        f"{mean('kv_recompute_token_fraction'):.1%}",
        str(max(entry["staleness_max"] for entry in mine)),
        str(sum(entry["lost_trajectories"] for entry in mine)),
        str(sum(entry["duplicated_trajectories"] for entry in mine)),
    )


def _accuracy(entries: Sequence[Entry]) -> str:
    values = [entry["one_shot_routing_accuracy"] for entry in entries]
    known = [value for value in values if value is not None]  # None: no tool was ever called
    return f"{statistics.fmean(known):.1%}" if known else "-"


def _at(entry: Entry, path: Sequence[str]) -> float:
    value: Any = entry
    for name in path:
        value = value[name]
    return float(value)


def order(entries: Sequence[Entry]) -> list[str]:
    """Policies from the shortest mean step time to the longest."""
    return sorted(policies(entries), key=lambda policy: mean_step_seconds(entries, policy))


def write_picture(entries: Sequence[Entry], bound_seconds: float, path: Path, title: Sequence[str]) -> None:
    """Draws each policy's mean step time with its spread over seeds, and the bound as a line.

    Args:
      entries: as `table`.
      bound_seconds: as `table`.
      path: where to, .svg or .png.
      title: of the picture, its lines.
    """
    names = policies(entries)
    seeds = len({entry["seed"] for entry in entries})
    with pictures.drawn(path, 0.2 + pictures.bars_height(names), title) as axes:
        means = [mean_step_seconds(entries, name) for name in names]
        pictures.bars(axes, names, means, [spread(step_seconds(entries, name)) for name in names], "{:.0f}")
        label = f"bound: no policy takes less than {bound_seconds:.0f} s"
        axes.axvline(bound_seconds, color="#c44e52", linewidth=1.5, label=label)
        of_seeds = f"\nmean of {seeds} seeds ± standard deviation" if seeds > 1 else ""
        axes.set_xlabel(f"seconds a training step{of_seeds}")
