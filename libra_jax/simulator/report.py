"""Reports a comparison of policies: entries for the JSON file, a table for the terminal, a picture.

An entry is one policy under one seed. Every value but `wall_seconds` repeats exactly for the same seed.
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
"""Keys of an entry, in this order."""

PICTURES = (".svg", ".png")


def policies(entries: Sequence[Entry]) -> list[str]:
    """Returns the policies in the order in which they first appear."""
    return list(dict.fromkeys(entry["policy"] for entry in entries))


def step_seconds(entries: Sequence[Entry], policy: str) -> list[float]:
    """Returns a policy's mean step time under each seed."""
    return [entry["step_seconds"]["mean"] for entry in entries if entry["policy"] == policy]


def mean_step_seconds(entries: Sequence[Entry], policy: str) -> float:
    """Returns a policy's mean step time, mean over seeds."""
    return statistics.fmean(step_seconds(entries, policy))


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
      subject: model, machine and lengths (`subject.Subject.as_json`).
      config: settings that all entries have in common.
    """
    ordered = [{key: entry[key] for key in KEYS} for entry in entries]
    written = {"for": subject, "policies": ordered, "bound_seconds": bound_seconds, "config": config}
    return json.dumps(written, indent=2) + "\n"


def table(entries: Sequence[Entry], bound_seconds: float) -> str:
    """Returns a line for each policy: means over seeds, step time with its spread and as a multiple of the bound."""
    header = (
        "policy", "step s", "+-", "p50", "p90", "p99", "x bound", "tokens/s", "train", "rollout", "moved", "one-shot",
        "again", "stale", "lost", "twice",
    )  # fmt: skip
    rows = [header, *(_row(entries, policy, bound_seconds) for policy in policies(entries))]
    legend = (
        "moved: tokens of contexts that changed instance, over tokens generated; one-shot: requests whose first bucket "
        "after a tool return is that of their true length;\nagain: tokens prefilled a second time, over tokens "
        "prefilled; stale: versions behind, at most; twice: trained twice"
    )
    bound = f"bound: no policy takes less than {bound_seconds:.1f} s a step (mean over seeds)"
    replaced = [line for policy in policies(entries) if (line := _replaced(entries, policy))]
    if replaced:
        bound += "; it holds where nothing is replaced"
    return "\n".join([*aligned(rows), bound, legend, *replaced])


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Returns rows of texts as aligned lines, the first `left` columns flush left and the others flush right."""
    columns = []
    for at, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if at < left else cell.rjust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def _replaced(entries: Sequence[Entry], policy: str) -> str:
    """Returns a sentence about a policy's replaced rollouts and the rest that was trained on; empty if none was
    replaced."""
    mine = [entry for entry in entries if entry["policy"] == policy]
    lost, trained = (sum(entry[f"{kind}_trajectories"] for entry in mine) for kind in ("replaced", "trained"))
    mean = statistics.fmean(entry["trained_tokens_mean"] for entry in mine)
    share = lost / max(1, lost + trained)
    return (
        f"{policy}: {lost:,} rollouts replaced ({share:.1%} of those begun); those trained on generate {mean:,.0f} "
        "tokens in the mean"
        if lost
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
    """Returns the policies from the shortest mean step time to the longest."""
    return sorted(policies(entries), key=lambda policy: mean_step_seconds(entries, policy))


def write_picture(entries: Sequence[Entry], bound_seconds: float, path: Path, title: Sequence[str]) -> None:
    """Draws each policy's mean step time with its spread over seeds, and the bound as a line.

    Args:
      entries: as for `table`.
      bound_seconds: as for `table`.
      path: file to write, .svg or .png.
      title: lines of the picture's title.
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
