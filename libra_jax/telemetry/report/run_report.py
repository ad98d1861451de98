"""The report on a run as a whole: its reward, times, plans, lengths, samples and settings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from libra_jax import protocols
from libra_jax.telemetry import samples
from libra_jax.telemetry.report import page, pictures, timeline
from libra_jax.telemetry.report.pictures import Curves, Line
from libra_jax.telemetry.report.recorded_run import RecordedRun

MEAN_STEPS = 5
"""Steps that values of reward functions are means of."""

MOST_SAMPLES = 2
"""Best, and worst, rollouts of the last step that are shown; of the first step it is one of each."""

STEP_PARTS = {
    "wait": ("rollout/wait_seconds", pictures.BLUE),
    "training": ("train/seconds", pictures.GREEN),
    "weight update": ("sync/seconds", pictures.ORANGE),
    "checkpoint": ("checkpoint/seconds", pictures.PURPLE),
    "other": ("", pictures.MUTED),
}
"""Metric and colour of each part of a step's time, in the order in which they are stacked."""

PICTURED_STEPS = 3
"""Training steps that the timeline picture shows."""

PICTURED_SPANS = 4000
"""Spans in the timeline picture at most; the earliest are left out."""

REPLACED = "groups/replaced_"
"""Start of the names of metrics that count a step's replaced groups of one reason."""

REASONS = {
    "environment": "the environment kept crashing",
    "reward": "a reward function kept failing",
    "zero_variance": "all rewards of the group were equal",
    "filter": "your filter replaced the group (algorithm.filter)",
    "redundant": "enough others had finished before it (coordinator.redundancy)",
}

_KINDS = (
    ("weight update", pictures.ORANGE, ("sync", "weight", "publish", "pause")),
    ("evaluation", pictures.TEAL, ("eval",)),
    ("checkpoint", pictures.MUTED, ("checkpoint", "save")),
    ("training", pictures.GREEN, ("train", "warm", "grad", "step")),
    ("generating", pictures.BLUE, ("generate", "decode", "prefill")),
)
"""Name and colour of each kind of span, and how names or tracks of its spans begin."""


def reward_functions(run: RecordedRun) -> Iterator[page.Part]:
    """Yields curves and table of the functions that the reward is made of."""
    names = {name for scalars in run.steps.values() for name in scalars if name.startswith("reward/")}
    # One slash, because the further numbers of a function have two.
    functions = {name for name in names - {"reward/mean", "reward/std"} if name.count("/") == 1}
    # The environment's own reward alone is the curve of the mean reward.
    if functions <= {"reward/environment"}:
        return
    lines, rows = [], []
    for index, name in enumerate(sorted(functions, key=lambda name: (name == "reward/environment", name))):
        called, values = name.removeprefix("reward/"), run.values(name)
        colour, dashed = pictures.COLOURS[index % len(pictures.COLOURS)], index // len(pictures.COLOURS) % 2 == 1
        lines.append(Line(pictures.moving_mean(run.curve(name), MEAN_STEPS), called, colour, dashed))
        # As in the report's first sentence: windows that share no step.
        size = max(1, min(MEAN_STEPS, len(values) // 2))
        first, last = values[:size], values[-size:] if len(values) > 1 else []
        columns = ((first, "z.3f"), (last, "z.3f"), (run.values(f"reward_seconds/{called}"), ".3g"))
        rows.append((called, *(f"{sum(part) / len(part):{form}}" if part else "" for part, form in columns)))
    yield from Curves(lines, 3.0, scale="free")(run)
    yield page.Table(("function", "first", "last", "seconds a call"), rows)


def step_parts(run: RecordedRun) -> dict[str, dict[int, float]]:
    """Returns seconds of each part of a step, by step."""
    curves = {part: run.curve(metric) for part, (metric, _) in STEP_PARTS.items()}
    # Without the wait itself, the time of the rollout is nearest to it.
    curves["wait"] = curves["wait"] or run.curve("rollout/seconds")
    curves = {part: values for part, values in curves.items() if any(values.values())}
    numbers = sorted(set().union(*curves.values())) if curves else []
    parts = {part: {step: values.get(step, 0.0) for step in numbers} for part, values in curves.items()}
    if curves and (step_seconds := run.curve("step/seconds")):
        part_sums = {step: sum(part[step] for part in parts.values()) for step in numbers}
        # Never negative: parts may overlap, and a stack cannot show less than nothing.
        parts["other"] = {step: max(0.0, step_seconds.get(step, 0.0) - part_sums[step]) for step in numbers}
    return parts


def step_times(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the picture of a step's time by its parts."""
    parts = step_parts(run)

    def draw(axes: Any) -> None:
        pictures.stack(axes, parts, {part: colour for part, (_, colour) in STEP_PARTS.items()})
        axes.set_ylabel("seconds")
        pictures.legend_above(axes, 3)

    if parts:
        yield pictures.Picture(draw)


def predicted_steps(run: RecordedRun) -> Iterator[page.Part]:
    """Yields predicted and measured step times."""
    if not (predicted := run.curve("plan/step_seconds")):
        return
    evaluations = run.curve("evaluation/seconds")
    # Predictions are of steps without an evaluation.
    measured = {step: value - evaluations.get(step, 0.0) for step, value in run.curve("step/seconds").items()}
    lines = [
        Line(measured, "step, measured"),
        Line(predicted, "step, predicted", pictures.ORANGE, dashed=True, width=1.6),
        Line("plan/train_seconds", "training, predicted", pictures.GREEN, dashed=True, width=1.4),
    ]
    moves = [int(decision["step"]) for decision in run.decisions if decision.get("moved")]
    yield from Curves(lines, 3.0, ylabel="seconds", marks={"move": moves})(run)


def decisions(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the table of the planner's looks for a better plan."""
    rows = []
    for decision in run.decisions:
        numbers = (decision[name] for name in ("present_seconds", "best_seconds", "move_seconds"))
        # JSON has no infinity, so a plan that cannot run has null.
        seconds = ("∞" if number is None else f"{number:,.1f}" for number in numbers)
        verdict = f"{'moved' if decision['moved'] else 'stayed'}: {decision['reason']}"
        best = decision["plan"]
        mesh = " x ".join(str(best[axis]) for axis in ("data", "fsdp", "tensor"))
        rollout = ", ".join(
            f"{bucket['count']} of degree {bucket['tensor_parallel']} to {bucket['max_remaining_tokens']:,} tokens"
            for bucket in best["rollout"]
        )
        plan = f"train on {mesh}; {rollout}"
        rows.append((str(decision["step"]), decision["why"], *seconds, verdict, plan))
    yield page.Table(("after step", "why it looked", "present, s", "best, s", "move, s", "decision", "best plan"), rows)


def lengths(run: RecordedRun) -> Iterator[page.Part]:
    """Yields a histogram of generated tokens a trajectory, with a logarithmic axis if the tail is long."""
    import numpy

    if not run.lengths:
        return
    # A logarithmic axis has no place for 0.
    values = numpy.maximum(1, numpy.asarray(run.lengths))
    low, high = values.min(), values.max()

    def draw(axes: Any) -> None:
        if high > pictures.FAR * numpy.median(values):
            bins = numpy.geomspace(low, high + 1, 31)
            axes.set_xscale("log")
        else:
            # Whole widths: a bin between two whole numbers would stay empty.
            width = max(1, -(-int(high - low + 1) // 30))
            bins = numpy.arange(low, high + width + 1, width)
        axes.hist(values, bins=bins, color=pictures.PURPLE, alpha=0.85)
        places = {name: numpy.percentile(values, part) for name, part in (("median", 50), ("P90", 90))}
        for place in places.values():
            axes.axvline(place, color=pictures.INK, linewidth=1, linestyle=(0, (2, 2)))
        text = " · ".join(f"{name} {place:,.0f}" for name, place in {**places, "longest": high}.items())
        axes.set_title(text, loc="left", fontsize=pictures.FONT)
        axes.set(xlabel="generated tokens", ylabel="trajectories")
        pictures.whole_ticks(axes.yaxis)
        axes.xaxis.set_major_formatter(pictures.thousands)

    yield pictures.Picture(draw)


def last_steps(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the picture of what each worker did in the last few steps."""
    if not (spans := run.spans):
        return
    trained = sorted(span.end for span in spans if _kind(span)[0] == "training")[-PICTURED_STEPS - 1 :]
    end = trained[-1] if len(trained) > 1 else max(span.end for span in spans)
    start = trained[0] if len(trained) > 1 else max(end - 30.0, min(span.start for span in spans))
    recent_spans = [span for span in spans if span.end > start and span.start < end]
    if len(recent_spans) > PICTURED_SPANS:
        recent_spans = sorted(recent_spans, key=lambda span: span.end)[-PICTURED_SPANS:]
        start = max(start, min(span.end for span in recent_spans))
    if not recent_spans or end <= start:
        return
    # One band a track, and one line in it a lane.
    tracks: dict[str, list[protocols.Span]] = {}
    for span in sorted(recent_spans, key=lambda span: (timeline.row_order(span.track), span.track)):
        tracks.setdefault(span.track, []).append(span)
    used = {track: sorted({span.lane for span in track_spans}) for track, track_spans in tracks.items()}
    heights = {track: min(3.2, 0.8 + 0.08 * len(used[track])) for track in tracks}

    def draw(axes: Any) -> None:
        from matplotlib import patches, path

        boxes: dict[tuple[str, str], list[Any]] = {}
        top = 0.0
        for track, height in heights.items():
            thick = (height - 0.3) / len(used[track])
            for span in tracks[track]:
                low = top + 0.15 + used[track].index(span.lane) * thick
                left_x, right_x, high = max(span.start, start) - start, min(span.end, end) - start, low + 0.86 * thick
                corners = [(left_x, low), (right_x, low), (right_x, high), (left_x, high)]
                boxes.setdefault(_kind(span), []).append(path.Path([*corners, corners[0]], closed=True))
            axes.axhline(top, color=pictures.GRID, linewidth=0.8)
            named = pictures.label(f"{track}  {busy_share(tracks[track], start, end):.0%} busy")
            axes.text(-0.008, top + height / 2, named, transform=axes.get_yaxis_transform(), ha="right", va="center")
            top += height
        for (name, colour), rectangles in boxes.items():
            # All of a colour are one path, which takes far fewer bytes than an element each.
            compound_path = path.Path.make_compound_path(*rectangles)
            axes.add_patch(patches.PathPatch(compound_path, facecolor=colour, edgecolor="none", alpha=0.9, label=name))
        axes.set(xlim=(0, end - start), ylim=(top, 0), yticks=[], xlabel="seconds")
        axes.grid(False)
        pictures.legend_above(axes, len(boxes))

    yield pictures.Picture(draw, 0.8 + 0.36 * sum(heights.values()))


def _kind(span: protocols.Span) -> tuple[str, str]:
    """Returns the kind and colour of a span, by its name, else by its track."""
    if span.track.startswith("tool"):
        return "tool call", pictures.PURPLE
    for text in (span.name.lower(), span.track.lower()):
        for name, colour, prefixes in _KINDS:
            if text.startswith(prefixes):
                return name, colour
    return "other", pictures.MUTED


def busy_share(spans: Sequence[protocols.Span], start: float, end: float) -> float:
    """Returns the part of [start, end] in which at least one span is open."""
    covered, covered_until = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        # From where the earlier spans ended, so that time under several spans counts once.
        covered += max(0.0, min(span.end, end) - max(span.start, covered_until))
        covered_until = max(covered_until, min(span.end, end))
    return covered / (end - start)


def rollouts(run: RecordedRun) -> Iterator[page.Part]:
    """Yields best and worst rollouts of one or two steps."""
    selection: list[samples.Sample] = []
    for step in dict.fromkeys(sample.step for sample in run.samples):
        ranked = sorted((sample for sample in run.samples if sample.step == step), key=lambda sample: sample.rank)
        size = min(MOST_SAMPLES if step == run.samples[0].step else 1, (len(ranked) + 1) // 2)
        selection += [*ranked[:size], *ranked[max(size, len(ranked) - size) :]]
    if selection:
        yield page.Rollouts(selection)


def replaced(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the table of groups that were replaced instead of trained, by reason."""
    names = sorted({name for scalars in run.steps.values() for name in scalars if name.startswith(REPLACED)})
    counts = {name.removeprefix(REPLACED): sum(run.values(name)) for name in names}
    rows = [(reason, REASONS.get(reason, ""), f"{count:,.0f}") for reason, count in counts.items() if count]
    yield page.Table(("reason", "meaning", "groups"), rows)
    if not rows:
        yield "None: every prompt that was admitted was trained on."


def config_changes(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the table of settings that changed while the run went on."""
    rows = [
        (f"{entry.get('step', 0):,}", name, json.dumps(values[0]), json.dumps(values[1]))
        for entry in run.config_history
        for name, values in (entry.get("changes") or {}).items()
    ]
    yield page.Table(("step", "setting", "before", "after"), rows)


def numbers(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the table of first, last, least and greatest value of every metric."""
    rows = []
    for name in sorted(set(itertools.chain.from_iterable(run.steps.values()))):
        if values := run.values(name):
            rows.append((name, *(f"{value:z,.4g}" for value in (values[0], values[-1], min(values), max(values)))))
    yield page.Table(("name", "first", "last", "least", "greatest"), rows)


def config(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the resolved config."""
    if run.config:
        yield page.Listing(json.dumps(run.config, indent=2))
