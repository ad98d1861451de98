"""Reports a twin: a table for the terminal, a JSON file, a picture."""

from __future__ import annotations

import json
from pathlib import Path

from libra_jax.simulator import pictures, report, twin

FEW_STEPS = 8
"""Number of held-out steps below which their mean error says little."""


def table(made: twin.Twin) -> str:
    """Returns a line for each held-out step, with measured and predicted seconds of its parts, and the verdict."""
    columns = [f"{part} {kind}" for part in twin.PARTS for kind in ("s", "twin")]
    rows = [("step", *columns, "error")]
    pairs = list(zip(made.measured, made.predicted, strict=True))
    for number, (measured, predicted) in list(enumerate(pairs, start=1))[made.calibrated :]:
        seconds = (getattr(parts, part) for part in twin.PARTS for parts in (measured, predicted))
        error = (predicted.total - measured.total) / measured.total
        rows.append((str(number), *(f"{value:.3f}" for value in seconds), f"{error:+.1%}"))
    return "\n".join([*report.aligned(rows, left=0), "", *sentences(made)])


def sentences(made: twin.Twin) -> list[str]:
    """Returns the fitted costs, and how well they predict."""
    steps = len(made.measured)
    lines = [f"calibrated on steps 1-{made.calibrated}, predicted steps {made.calibrated + 1}-{steps}"]
    for degree, engine in sorted(made.model.engines.items()):
        lines.append(
            f"engine of degree {degree}: a step {1e3 * engine.step:.2f} ms + {1e6 * engine.request:.1f} us a request + "
            f"{1e6 * engine.context:.3f} us a token of context; prefill {1e6 * engine.prefill_token:.1f} us a token + "
            f"{1e6 * engine.cached_token:.1f} us a token seen before + {1e6 * engine.prefill_request:.0f} us a request "
            f"(levelled by {made.level:.3f})"
        )
    train, update = made.model.train, made.model.update
    lines += [
        f"training step: {train.step:.3f} s + {1e6 * train.column:.1f} us a column; "
        f"weight update: {update.gather + update.load:.3f} s",
        "mean absolute error of the predicted steps: "
        + ", ".join(f"{part} {made.error(part):.1%}" for part in twin.PARTS)
        + f" (of those it was calibrated on: total {made.error(held_out=False):.1%})",
        f"error of predicting the mean of steps 1-{made.calibrated} for each: {made.constant_error:.1%}",
        _spread(made),
        f"target: an error of at most max({twin.TARGET:.0%}, {twin.SPREADS:g} x spread) = {made.threshold:.1%}: "
        + ("met" if made.met else "NOT met")
        + f" with {made.error():.1%}",
    ]
    if steps - made.calibrated < FEW_STEPS:
        lines.append(
            f"This is the mean of {steps - made.calibrated} steps, which says little: record a run of "
            f"{2 * FEW_STEPS} steps or more."
        )
    return lines


def _spread(made: twin.Twin) -> str:
    if made.spread is None:
        return "spread of steps that did the same work: not known, as no two of the predicted steps did"
    return (
        f"spread of steps that did the same work: {made.spread:.1%} "
        f"({made.repeated} predicted steps of {made.kinds} kinds)"
    )


def to_json(made: twin.Twin) -> str:
    """Returns the content of `table` as a JSON object."""
    model = made.model
    return (
        json.dumps(
            {
                "calibrated_steps": made.calibrated,
                "steps": [
                    {"step": number, "measured": vars(measured), "predicted": vars(predicted)}
                    for number, (measured, predicted) in enumerate(
                        zip(made.measured, made.predicted, strict=True), start=1
                    )
                ],
                "error": {part: made.error(part) for part in twin.PARTS},
                "error_of_calibrated_steps": {part: made.error(part, held_out=False) for part in twin.PARTS},
                "error_of_a_constant": made.constant_error,
                "spread": made.spread,
                "repeated_steps": made.repeated,
                "kinds_of_steps": made.kinds,
                "threshold": made.threshold,
                "met": made.met,
                "level": made.level,
                "engines": {str(degree): vars(engine) for degree, engine in sorted(model.engines.items())},
                "train": vars(model.train),
                "update": vars(model.update),
            },
            indent=2,
        )
        + "\n"
    )


def write_picture(made: twin.Twin, path: Path, title: str) -> None:
    """Draws measured and predicted seconds of each step, with a shade behind the steps that were fitted to.

    Args:
      made: the twin.
      path: file to write, .svg or .png.
      title: title of the picture.
    """
    numbers = range(1, len(made.measured) + 1)
    with pictures.drawn(path, 3.0, [title]) as axes:
        axes.axvspan(0.5, made.calibrated + 0.5, color="#eeeeee", linewidth=0, label="calibrated on")
        for part, colour in (("total", "#333333"), ("rollout", "#4c78a8"), ("train", "#54a24b")):
            axes.plot(numbers, [getattr(parts, part) for parts in made.measured], "o", color=colour, markersize=4)
            predicted = [getattr(parts, part) for parts in made.predicted]
            axes.plot(numbers, predicted, color=colour, linewidth=1.2, label=part)
        axes.set(xlim=(0.5, len(made.measured) + 0.5), xlabel="training step (dots measured, lines the twin)")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("seconds")
        axes.xaxis.get_major_locator().set_params(integer=True)
