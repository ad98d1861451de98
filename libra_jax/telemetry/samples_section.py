"""The report's section of samples: best and worst rollouts of the first and of the last step, as text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from libra_jax.telemetry import page, samples

EACH = 2
"""Best, and worst, rollouts of the last step that are shown; of the first step it is one of each."""

NOTE = (
    "Rollouts as the policy saw and wrote them, special tokens spelled out; control characters are shown as escapes. "
    f"All that were saved: python launch/show.py <workdir>, and {samples.SAMPLES_FILE}."
)


def ends(found: Iterable[samples.Sample]) -> list[samples.Sample]:
    """Returns the training samples of the last step and of the first, holding no others in memory."""
    first: list[samples.Sample] = []
    last: list[samples.Sample] = []
    for sample in found:
        if sample.evaluation:
            continue
        if not first or sample.step == first[0].step:
            first.append(sample)
        if last and sample.step != last[0].step:
            last.clear()
        last.append(sample)
    return last if not first or first[0].step == last[0].step else [*last, *first]


def sections(found: Sequence[samples.Sample]) -> list[page.Section]:
    """Returns one folded text a rollout; nothing without samples.

    Args:
      found: the samples of one or two steps, as `ends` returns them.
    """
    if not found:
        return []
    out = []
    for step in dict.fromkeys(sample.step for sample in found):
        ranked = sorted((sample for sample in found if sample.step == step), key=lambda sample: sample.rank)
        each = EACH if step == found[0].step else 1
        size = min(each, (len(ranked) + 1) // 2)
        shown = [*ranked[:size], *ranked[max(size, len(ranked) - size) :]]
        out += [f"<h3>Step {step}</h3>", *map(_sample, shown)]
    return [page.Section("Samples", "".join(out), NOTE, wide=True)]


def _sample(sample: samples.Sample) -> str:
    pieces = "".join(
        f'<p class="who">{html.escape(piece.title)}</p><pre class="{piece.source}">{html.escape(piece.shown())}</pre>'
        for piece in sample.pieces
    )
    head = f"{sample.place}: {sample.headline}" if sample.place != "middle" else sample.headline
    return f'<details class="sample"><summary>{html.escape(head)}</summary>{pieces}</details>'
