"""The report's section on causal states: what was left to generate after each, and how well that could be foretold."""

from __future__ import annotations

import math

from libra_jax.scheduling import foresight
from libra_jax.telemetry import escapes, figures, page, tools_picture

TITLE = "What tool returns foretell"

NOTE = (
    "A causal state is a tool, the size of what it returned and what came of the call: what C-MLFQ goes by. Left: "
    "tokens that the attempt went on to generate."
)

MOST_STATES = 12
"""Causal states that are pictured, the most frequent ones."""

HEADS = ("tool", "payload, tokens", "status", "returns", "left, mean", "left, P90")


def sections(found: foresight.Foresight | None) -> list[page.Section]:
    """The picture, the verdict under it, and the table of all states; none where no tool returned."""
    if found is None:
        return []
    states = {label(state): (state.mean, state.p90) for state in found.states[:MOST_STATES]}
    picture = figures.for_screens(lambda width: tools_picture.left(states, width))
    out = [page.Section(TITLE, picture, f"{NOTE} {' '.join(sentences(found))}", wide=True)]
    out.append(page.Section("Causal states", page.table(HEADS, rows(found)), wide=True, folded=True))
    return out


def label(state: foresight.State) -> str:
    """A state in a line."""
    return escapes.visible(f"{state.tool}, {state.status}, {foresight.told(state.size_class)}")


def rows(found: foresight.Foresight) -> list[tuple[str, ...]]:
    """A row of texts a state, for `HEADS`."""
    return [
        (
            escapes.visible(state.tool),
            foresight.told(state.size_class),
            state.status,
            f"{state.count:,}",
            f"{state.mean:,.1f}",
            f"{state.p90:,}",
        )
        for state in found.states
    ]


def sentences(found: foresight.Foresight) -> list[str]:
    """How well what is left was foretold, as plain text."""
    count = sum(state.count for state in found.states)
    out = [
        f"Causal states alone account for {_explained(found.explained)} of the variance of what is left after "
        f"{count:,} returns."
    ]
    if not found.judged:
        return [*out, "There is no second step to judge predictions on."]
    limits = " and ".join(f"{bound:,}" for bound in found.bounds)
    buckets = f"the right one of {len(found.bounds) + 1} buckets (up to {limits} tokens left, or more)"
    out.append(
        f"By what had been seen before, the state alone named {buckets} for {_share(found.by_state)} of "
        f"{found.judged:,} returns, all that C-MLFQ knows for {_share(found.by_path)}; naming the fullest bucket each "
        f"time is right for {_share(found.majority)}."
        if found.bounds
        else "What is left is always the same: there is nothing to foretell."
    )
    if not math.isnan(found.path_explained):
        out.append(f"C-MLFQ's mean prediction accounts for {_explained(found.path_explained)} of the variance.")
    return out


def _share(value: float) -> str:
    return "an unknown share" if math.isnan(value) else f"{value:z.0%}"


def _explained(value: float) -> str:
    """A share of variance; predictions that are worse than the mean explain none of it."""
    return _share(value) if math.isnan(value) or value > 0 else "none"
