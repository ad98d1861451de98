"""The report's sections on learning, time, plans and samples; tools and pools have modules of their own."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import protocols
from libra_jax.telemetry import samples
from libra_jax.telemetry.report import page, timeline

Steps = Mapping[int, Mapping[str, float]]
"""Numbers of each step, by their names in `metrics.jsonl`."""

PARTS_NOTE = (
    "Wait is the time in which training waited for rollouts, as in the console's lines. Generation that "
    "overlaps training costs no step time."
)

PLAN_NOTE = (
    "Predicted before each step from the lengths of those before; a dotted line is a move to another plan. The present "
    "plan's step is with the ranges of lengths that suit it best."
)

MEAN_STEPS = 5
"""Steps that values of reward functions are means of."""

REWARDS_NOTE = (
    f"Each function's own value before its weight, mean of {MEAN_STEPS} steps (of half of them, where there are fewer "
    f"than {2 * MEAN_STEPS}). Seconds are those of calls that were made; values that were known already cost none."
)

SAMPLES_NOTE = (
    "Rollouts as the policy saw and wrote them, special tokens spelled out; control characters are shown as escapes. "
    f"All that were saved: python launch/show.py <workdir>, and {samples.SAMPLES_FILE}."
)

MOST_SAMPLES = 2
"""Best, and worst, rollouts of the last step that are shown; of the first step it is one of each."""

PART_COLOURS = {
    "wait": page.BLUE,
    "training": page.GREEN,
    "weight update": page.ORANGE,
    "checkpoint": page.PURPLE,
    "other": page.MUTED,
}
"""Parts of a step's time, in the order in which they are stacked."""

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


@dataclass(frozen=True)
class Plot:
    """A half-width picture of one or several metrics.

    Attributes:
      curves: label of each metric in the picture, by the metric's name.
      note: how to read it.
      colour: of the first curve.
      scale: of the vertical axis.
      percent: the metrics are shares.
      integers: the metrics are whole numbers.
      smooth: draws means of five steps, if there are many.
      moving: leaves the picture out if all values are zero.
    """

    title: str
    curves: Mapping[str, str]
    note: str = ""
    colour: str = page.BLUE
    scale: page.Scale = "zero"
    percent: bool = False
    integers: bool = False
    smooth: bool = False
    moving: bool = False


PLOTS = (
    Plot("Generated tokens a second", {"tokens_per_second": ""}, smooth=True),
    Plot(
        "Tokens a second and device",
        {"train/tokens_per_second_per_device": "trained", "rollout/tokens_per_second_per_device": "generated"},
        "Trained: tokens of the batch over the trainer's own seconds, prompts and tool returns included, for each of "
        "its devices. Generated: sampled tokens over the step's seconds, for each device of the engines.",
        colour=page.GREEN,
        smooth=True,
    ),
    Plot(
        "Model FLOPs utilisation of training",
        {"train/mfu": ""},
        "6ND and causal attention of the batch without padding, over the trainer's own seconds and its devices' peak. "
        "The first step of a start compiles its programs.",
        colour=page.PURPLE,
        percent=True,
    ),
    Plot(
        "Staleness",
        {"staleness/max": ""},
        "Versions between a group's first dispatch and the step that trains on it; the oldest group of a step.",
        colour=page.TEAL,
        integers=True,
    ),
    Plot(
        "Mismatch",
        {"mismatch/kl": ""},
        "KL between what the engines and the trainer say of the same tokens under the same weights.",
        colour=page.ORANGE,
        scale="log",
    ),
    Plot(
        "Moves between instances",
        {"routing/moves": ""},
        "Requests that another instance went on with, a step. routing/move_seconds is how long they waited for its "
        "first tokens, the prefill of their context included; routing/stay_seconds how long those that did not move "
        "waited.",
        colour=page.TEAL,
        integers=True,
        moving=True,
    ),
    Plot(
        "Entropy",
        {"entropy": "nats a token"},
        "A fall to zero early is a policy that has stopped to explore; a steady rise is one that unlearns.",
    ),
    Plot(
        "Gradient norm",
        {"grad_norm": "before clipping"},
        "Zero is a step without a signal. Jumps by orders of magnitude ask for a lower learning rate.",
    ),
    Plot(
        "KL",
        {"kl/reference": "to the reference", "kl/behaviour": "to the sampling policy", "offpolicy/kl": "off-policy"},
        "Nats a token. To the reference it grows as the policy learns; to the sampling policy it should stay small.",
        scale="log",
    ),
    Plot(
        "Clip fraction",
        {"clip/high_fraction": "high", "clip/low_fraction": "low", "clip/dual_fraction": "dual"},
        "Share of tokens whose ratio the loss clips. Much above a fifth is a step that is too large.",
        percent=True,
    ),
    Plot(
        "Reward spread",
        {"reward/std": "standard deviation"},
        "Over all rollouts of a step. Near zero there is nothing to learn from.",
    ),
    Plot(
        "Groups without a gradient",
        {"groups/without_gradient": "share of groups"},
        "Share of groups whose rollouts all have the same reward, so that they teach nothing.",
        percent=True,
    ),
    Plot(
        "Lengths",
        {"tokens/mean": "tokens a rollout"},
        "Generated tokens, mean of each step. Growth without reward, or a collapse, is often a reward that is gamed.",
    ),
    Plot("Loss", {"loss": ""}, colour=page.GREEN, scale="free"),
)


def curve(steps: Steps, name: str) -> dict[int, float]:
    """Returns a metric's finite values by step, of the steps that have it."""
    return {step: scalars[name] for step, scalars in steps.items() if name in scalars and math.isfinite(scalars[name])}


def reward(steps: Steps) -> list[page.Section]:
    """Returns training reward and held-out score in one picture, and the functions that the reward is made of."""
    rewards, evaluations = curve(steps, "reward/mean"), curve(steps, "evaluation/accuracy")
    out = []
    if rewards or evaluations:
        curves = [
            page.Line(rewards, "reward of the step", width=2.4, smooth=True),
            page.Line(evaluations, "held-out tasks", page.ORANGE, dashed=True, width=1.2, marker="D"),
        ]
        out.append(page.Section("Reward", page.lines(curves, 3.6, wide=True, scale="share"), wide=True))
    names = {name for scalars in steps.values() for name in scalars if name.startswith("reward/")}
    # One slash, because the further numbers of a function have two.
    functions = {name for name in names - {"reward/mean", "reward/std"} if name.count("/") == 1}
    # The environment's own reward alone is the curve above.
    if functions <= {"reward/environment"}:
        return out
    lines, rows = [], []
    for index, name in enumerate(sorted(functions, key=lambda name: (name == "reward/environment", name))):
        called, step_rewards = name.removeprefix("reward/"), curve(steps, name)
        colour, dashed = page.COLOURS[index % len(page.COLOURS)], index // len(page.COLOURS) % 2 == 1
        lines.append(page.Line(page.moving_mean(step_rewards, MEAN_STEPS), called, colour, dashed))
        values = list(step_rewards.values())
        # As in the report's first sentence: windows that share no step.
        size = max(1, min(MEAN_STEPS, len(values) // 2))
        seconds = list(curve(steps, f"reward_seconds/{called}").values())
        row = (
            called,
            f"{sum(values[:size]) / size:z.3f}" if values else "",
            f"{sum(values[-size:]) / size:z.3f}" if len(values) > 1 else "",
            f"{sum(seconds) / len(seconds):.3g}" if seconds else "",
        )
        rows.append(row)
    table = page.Table(("function", "first", "last", "seconds a call"), rows)
    picture = page.lines(lines, 3.0, wide=True)
    return [*out, page.Section("What the reward is made of", picture, table, note=REWARDS_NOTE, wide=True)]


def plots(steps: Steps) -> list[page.Section]:
    """Returns the picture of each of `PLOTS` that the run has numbers for."""
    out = []
    for plot in PLOTS:
        lines = []
        for index, (name, called) in enumerate(plot.curves.items()):
            colour = page.COLOURS[index] if index else plot.colour
            stairs = plot.integers and not plot.moving
            lines.append(page.Line(curve(steps, name), called, colour, smooth=plot.smooth, stairs=stairs))
        if any(any(line.values.values()) if plot.moving else line.values for line in lines):
            picture = page.lines(lines, scale=plot.scale, percent=plot.percent, integers=plot.integers)
            out.append(page.Section(plot.title, picture, note=plot.note))
    return out


def step_parts(steps: Steps) -> dict[str, dict[int, float]]:
    """Returns seconds of each part of a step, by step."""
    named = {
        "wait": "rollout/wait_seconds" if curve(steps, "rollout/wait_seconds") else "rollout/seconds",
        "training": "train/seconds",
        "weight update": "sync/seconds",
        "checkpoint": "checkpoint/seconds",
    }
    curves = {part: values for part, name in named.items() if any((values := curve(steps, name)).values())}
    numbers = sorted(set().union(*curves.values())) if curves else []
    parts = {part: {step: values.get(step, 0.0) for step in numbers} for part, values in curves.items()}
    if curves and (step_seconds := curve(steps, "step/seconds")):
        part_sums = {step: sum(part[step] for part in parts.values()) for step in numbers}
        # Never negative: parts may overlap, and a stack cannot show less than nothing.
        parts["other"] = {step: max(0.0, step_seconds.get(step, 0.0) - part_sums[step]) for step in numbers}
    return parts


def step_times(parts: Mapping[str, page.Curve]) -> list[page.Section]:
    """Returns the picture of a step's time by its parts."""

    def draw(axes: Any) -> None:
        page.stack(axes, parts, PART_COLOURS)
        axes.set_ylabel("seconds")
        page.legend_above(axes, 3)

    return [page.Section("Where a step's time goes", page.figure(draw), note=PARTS_NOTE)] if parts else []


def plan(steps: Steps, decisions: Sequence[Mapping[str, Any]]) -> list[page.Section]:
    """Returns predicted and measured step times, and each look for a better plan.

    Args:
      steps: numbers of each step.
      decisions: lines of `plans.jsonl`.
    """
    out = []
    if predicted := curve(steps, "plan/step_seconds"):
        evaluations = curve(steps, "evaluation/seconds")
        # Predictions are of steps without an evaluation.
        measured = {step: value - evaluations.get(step, 0.0) for step, value in curve(steps, "step/seconds").items()}
        training = curve(steps, "plan/train_seconds")
        lines = [
            page.Line(measured, "step, measured"),
            page.Line(predicted, "step, predicted", page.ORANGE, dashed=True, width=1.6),
            page.Line(training, "training, predicted", page.GREEN, dashed=True, width=1.4),
        ]
        moves = [int(decision["step"]) for decision in decisions if decision.get("moved")]
        picture = page.lines(lines, 3.0, wide=True, ylabel="seconds", scale="zero", marks={"move": moves})
        out.append(page.Section("Predicted and measured step times", picture, note=PLAN_NOTE, wide=True))
    if decisions:
        heads = ("after step", "why it looked", "present, s", "best, s", "move, s", "decision", "best plan")
        rows = []
        for decision in decisions:
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
            looked = str(decision["step"]), decision["why"]
            rows.append((*looked, *seconds, verdict, f"train on {mesh}; {rollout}"))
        table = page.Table(heads, rows)
        out.append(page.Section("Looks for a better plan", table=table, wide=True))
    return out


def lengths(generated_tokens: Sequence[int]) -> list[page.Section]:
    """Returns a histogram of generated tokens a trajectory, with a logarithmic axis if the tail is long."""
    import numpy

    if not generated_tokens:
        return []
    # A logarithmic axis has no place for 0.
    values = numpy.maximum(1, numpy.asarray(generated_tokens))
    low, high = values.min(), values.max()

    def draw(axes: Any) -> None:
        if high > page.FAR * numpy.median(values):
            bins = numpy.geomspace(low, high + 1, 31)
            axes.set_xscale("log")
        else:
            # Whole widths: a bin between two whole numbers would stay empty.
            width = max(1, -(-int(high - low + 1) // 30))
            bins = numpy.arange(low, high + width + 1, width)
        axes.hist(values, bins=bins, color=page.PURPLE, alpha=0.85)
        places = {name: numpy.percentile(values, part) for name, part in (("median", 50), ("P90", 90))}
        for place in places.values():
            axes.axvline(place, color=page.INK, linewidth=1, linestyle=(0, (2, 2)))
        text = " · ".join(f"{name} {place:,.0f}" for name, place in {**places, "longest": high}.items())
        axes.set_title(text, loc="left", fontsize=page.FONT)
        axes.set(xlabel="generated tokens", ylabel="trajectories")
        page.whole_ticks(axes.yaxis)
        axes.xaxis.set_major_formatter(page.thousands)

    return [page.Section("Trajectory lengths", page.figure(draw))]


def replaced(steps: Steps) -> page.Section:
    """Returns the table of groups that were replaced instead of trained, by reason."""
    names = sorted({name for scalars in steps.values() for name in scalars if name.startswith(REPLACED)})
    counts = {name.removeprefix(REPLACED): sum(curve(steps, name).values()) for name in names}
    if not any(counts.values()):
        none = "None: every prompt that was admitted was trained on."
        return page.Section("Replaced groups", note=none, wide=True)
    rows = [(reason, REASONS.get(reason, ""), f"{count:,.0f}") for reason, count in counts.items() if count]
    return page.Section("Replaced groups", table=page.Table(("reason", "meaning", "groups"), rows), wide=True)


def numbers(steps: Steps) -> list[page.Section]:
    """Returns the table of first, last, least and greatest value of every metric."""
    rows = []
    for name in sorted(set(itertools.chain.from_iterable(steps.values()))):
        if values := list(curve(steps, name).values()):
            rows.append((name, *(f"{value:z,.4g}" for value in (values[0], values[-1], min(values), max(values)))))
    table = page.Table(("name", "first", "last", "least", "greatest"), rows)
    return [page.Section("All numbers", table=table, wide=True, folded=True)] if steps else []


def config_changes(history: Sequence[Mapping[str, Any]]) -> list[page.Section]:
    """Returns the table of settings that changed while the run went on, from the lines of `config_history.jsonl`."""
    rows = [
        (f"{entry.get('step', 0):,}", name, json.dumps(values[0]), json.dumps(values[1]))
        for entry in history
        for name, values in (entry.get("changes") or {}).items()
    ]
    note = "Settings that the run went on with from this step, each with its value before and after."
    table = page.Table(("step", "setting", "before", "after"), rows)
    return [page.Section("Changed settings", table=table, note=note, wide=True)] if rows else []


def rollouts(candidates: Sequence[samples.Sample]) -> list[page.Section]:
    """Returns best and worst rollouts of one or two steps, as `samples.ends` returns them; nothing without samples."""
    selection: list[samples.Sample] = []
    for step in dict.fromkeys(sample.step for sample in candidates):
        ranked = sorted((sample for sample in candidates if sample.step == step), key=lambda sample: sample.rank)
        size = min(MOST_SAMPLES if step == candidates[0].step else 1, (len(ranked) + 1) // 2)
        selection += [*ranked[:size], *ranked[max(size, len(ranked) - size) :]]
    return [page.Section("Samples", samples=selection, note=SAMPLES_NOTE, wide=True)] if selection else []


# Timeline -------------------------------------------------------------------------------------------------------

_KINDS = (
    ("weight update", page.ORANGE, ("sync", "weight", "publish", "pause")),
    ("evaluation", page.TEAL, ("eval",)),
    ("checkpoint", page.MUTED, ("checkpoint", "save")),
    ("training", page.GREEN, ("train", "warm", "grad", "step")),
    ("generating", page.BLUE, ("generate", "decode", "prefill")),
)
"""Name and colour of each kind of span, and how names or tracks of its spans begin."""


def last_steps(spans: Sequence[protocols.Span]) -> list[page.Section]:
    """Returns the picture of what each worker did in the last few steps."""
    if not spans:
        return []
    trained = sorted(span.end for span in spans if _kind(span)[0] == "training")[-PICTURED_STEPS - 1 :]
    end = trained[-1] if len(trained) > 1 else max(span.end for span in spans)
    start = trained[0] if len(trained) > 1 else max(end - 30.0, min(span.start for span in spans))
    recent_spans = [span for span in spans if span.end > start and span.start < end]
    if len(recent_spans) > PICTURED_SPANS:
        recent_spans = sorted(recent_spans, key=lambda span: span.end)[-PICTURED_SPANS:]
        start = max(start, min(span.end for span in recent_spans))
    if not recent_spans or end <= start:
        return []
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
            axes.axhline(top, color=page.GRID, linewidth=0.8)
            named = page.label(f"{track}  {busy_share(tracks[track], start, end):.0%} busy")
            axes.text(-0.008, top + height / 2, named, transform=axes.get_yaxis_transform(), ha="right", va="center")
            top += height
        for (name, colour), rectangles in boxes.items():
            # All of a colour are one path, which takes far fewer bytes than an element each.
            compound_path = path.Path.make_compound_path(*rectangles)
            axes.add_patch(patches.PathPatch(compound_path, facecolor=colour, edgecolor="none", alpha=0.9, label=name))
        axes.set(xlim=(0, end - start), ylim=(top, 0), yticks=[], xlabel="seconds")
        axes.grid(False)
        page.legend_above(axes, len(boxes))

    picture = page.figure(draw, 0.8 + 0.36 * sum(heights.values()), wide=True)
    note = f"The whole run is in {timeline.TIMELINE_FILE}: open it at ui.perfetto.dev."
    return [page.Section("The last steps, by worker", picture, note=note, wide=True)]


def _kind(span: protocols.Span) -> tuple[str, str]:
    """Returns the kind and colour of a span, by its name, else by its track."""
    if span.track.startswith("tool"):
        return "tool call", page.PURPLE
    for text in (span.name.lower(), span.track.lower()):
        for name, colour, prefixes in _KINDS:
            if text.startswith(prefixes):
                return name, colour
    return "other", page.MUTED


def busy_share(spans: Sequence[protocols.Span], start: float, end: float) -> float:
    """Returns the part of [start, end] in which at least one span is open."""
    covered, covered_until = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        # From where the earlier spans ended, so that time under several spans counts once.
        covered += max(0.0, min(span.end, end) - max(span.start, covered_until))
        covered_until = max(covered_until, min(span.end, end))
    return covered / (end - start)
