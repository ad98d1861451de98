"""`report.html`: a run as one self-contained page, made from the files in its workdir."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra_jax import protocols
from libra_jax.protocols import DataError, MoveReason
from libra_jax.scheduling.prediction import prediction_quality
from libra_jax.telemetry import console, files, metrics, samples, trace
from libra_jax.telemetry.report import page, pool_report, sections, timeline, tool_report
from libra_jax.utils import checksums

REPORT_FILE = "report.html"
CONFIG_FILE = "config.json"

KEPT_SPANS = 20_000
"""Number of spans at the timeline's end that are held in memory."""

KEPT_ROLLOUTS = 20_000
"""Number of trajectories at the trace's end on which predictions from tool returns are judged."""

WINDOW = 5
"""Steps, at most, whose mean reward is compared at either end of the run."""

STUDENT = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306}
"""Student's t at 95% (two-sided), by degrees of freedom: those of two windows of 2 to `WINDOW` steps."""

OUTCOMES = {"failure": "failed", "timeout": "timed out"}
"""Verb for a tool call with each bad status."""


@dataclass
class Run:
    """The content of a workdir.

    Attributes:
      steps: numbers of each step, ascending.
      spans: the last of the timeline.
      seconds: end of the timeline, in seconds of running time.
      lengths: generated tokens of each trajectory.
      tools: what the trajectories did with tools.
      prediction_quality: how well tool returns predicted what was left; None if there were none.
      config: the resolved config, empty if there is none.
      decisions: the planner's, in order.
      pools: their sizes, in order.
      changes: transitions of workers and meshes, in order.
      config_history: settings that changed when the run went on, in order.
      samples: rollouts of the first and of the last step as text.
      moves: number of moves of the trajectories between instances, by reason.
    """

    steps: dict[int, dict[str, float]]
    spans: list[protocols.Span]
    seconds: float
    lengths: list[int]
    tools: tool_report.Tally
    prediction_quality: prediction_quality.PredictionQuality | None = None
    config: dict[str, Any] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    pools: list[timeline.PoolSizes] = field(default_factory=list)
    changes: list[pool_report.Transition] = field(default_factory=list)
    config_history: list[dict[str, Any]] = field(default_factory=list)
    samples: list[samples.Sample] = field(default_factory=list)
    moves: Counter[str] = field(default_factory=Counter)


def load(workdir: Path) -> Run:
    """Reads a workdir. The run may have been interrupted.

    Raises:
      DataError: No run has recorded anything in it, or it is a file.
    """
    if workdir.exists() and not workdir.is_dir():
        raise DataError(f"{workdir}: is no folder; give the --workdir of a run")
    spans: deque[protocols.Span] = deque(maxlen=KEPT_SPANS)
    pools: list[timeline.PoolSizes] = []
    seconds = 0.0
    for entry in timeline.read_all(workdir / timeline.TIMELINE_FILE):
        if isinstance(entry, protocols.Span):
            spans.append(entry)
            seconds = max(seconds, entry.end)
        else:
            pools.append(entry)
            seconds = max(seconds, entry.start)
    lengths: list[int] = []
    tools = tool_report.Tally()
    moves: Counter[str] = Counter()
    judged: deque[prediction_quality.Rollout] = deque(maxlen=KEPT_ROLLOUTS)
    for record in files.whole_json_lines(workdir / trace.TRACE_FILE):
        turns = [turn for turn in record.get("turns") or [] if isinstance(turn, dict)]
        lengths.append(sum(turn.get("generated_tokens") or 0 for turn in turns))
        tools.add(record)
        moves.update(trace.move_reasons(turns))
        if trace.is_record(record):
            judged.extend(prediction_quality.rollouts(record))
    steps = metrics.read(workdir / metrics.METRICS_FILE)
    if not (steps or spans or lengths or pools):
        raise DataError(
            f"{workdir}: no run has recorded anything here (no {metrics.METRICS_FILE}, {timeline.TIMELINE_FILE} or "
            f"{trace.TRACE_FILE} with content); give the --workdir of a run"
        )
    try:
        config = checksums.read_object(workdir / CONFIG_FILE)
    except (OSError, ValueError, RecursionError) as error:
        config = {}
        logging.getLogger(__name__).warning("%s is left out (%s).", workdir / CONFIG_FILE, error)
    transitions = files.whole_json_lines(workdir / files.TRANSITIONS_FILE)
    return Run(
        steps,
        list(spans),
        seconds,
        lengths,
        tools,
        prediction_quality.measure(judged) if tools.tools else None,
        config,
        decisions=list(files.whole_json_lines(workdir / files.PLANS_FILE)),
        pools=pools,
        changes=[pool_report.parse(record) for record in transitions],
        config_history=list(files.whole_json_lines(workdir / files.CONFIG_HISTORY_FILE)),
        samples=samples.ends(samples.read(workdir / samples.SAMPLES_FILE)),
        moves=moves,
    )


def write_report(workdir: Path) -> Path:
    """Writes `report.html` from the files of the workdir.

    Returns:
      Path of the report.

    Raises:
      DataError: No run has recorded anything there, or the report cannot be written.
    """
    run = load(workdir)
    name = str(run.config.get("name") or workdir.resolve().name)
    config = json.dumps(run.config, indent=2)
    cards = [
        *sections.reward(run.steps),
        *sections.step_times(sections.step_parts(run.steps)),
        *sections.plots(run.steps),
        *sections.plan(run.steps, run.decisions),
        *pool_report.sections(run.pools, run.changes, run.seconds),
        *sections.lengths(run.lengths),
        *tool_report.sections(run.tools),
        *tool_report.causes(run.prediction_quality),
        *sections.last_steps(run.spans),
        *sections.rollouts(run.samples),
        sections.replaced(run.steps),
        *sections.config_changes(run.config_history),
        *sections.numbers(run.steps),
        *([page.Section("Config", text=config, wide=True, folded=True)] if run.config else []),
    ]
    text = page.render(f"{name} · Libra-JAX", name, sentences(run), cards)
    path = workdir / REPORT_FILE
    # Renamed when it is complete, so that a reader never sees half a report.
    partial = path.with_name(REPORT_FILE + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"{path}: the report cannot be written ({error.strerror or error})") from error
    return path


# Headline numbers -----------------------------------------------------------------------------------------------


def sentences(run: Run) -> list[str]:
    """Returns the headline numbers, one sentence each. Parts between double asterisks are bold."""
    out = []
    planned = run.config.get("steps")
    done = max(run.steps, default=0)
    if run.steps:
        of = f" of {planned}" if isinstance(planned, int) and planned > done else ""
        time = f" in {console.seconds_text(run.seconds)}" if run.seconds else ""
        out.append(f"The run trained **{done}{of} step{'' if (done, of) == (1, '') else 's'}**{time}.")
    out += _learning(run)
    if run.lengths:
        calls = sum(one.outcomes.total() for one in run.tools.tools.values())
        called = f", with {calls:,} tool calls" if calls else ""
        # In numbers: a share would round a few failures away.
        counts = {status: sum(one.of_status(status) for one in run.tools.tools.values()) for status in trace.STATUSES}
        if lost := [f"{counts[status]:,} {verb}" for status, verb in OUTCOMES.items() if counts[status]]:
            called += f" ({' and '.join(lost)})"
        elif calls and counts["success"] == calls:
            called += ", all successful"
        out.append(f"It generated **{sum(run.lengths):,} tokens** in {len(run.lengths):,} trajectories{called}.")
    out.append(tool_report.sentence(run.tools))
    if rates := sections.curve(run.steps, "tokens_per_second"):
        seconds = sections.curve(run.steps, "step/seconds")
        # Weighted by the steps' seconds: the mean of the rates would count a short step as much as a long one.
        weights = {step: seconds[step] for step in rates if seconds.get(step)} or dict.fromkeys(rates, 1.0)
        rate = sum(rates[step] * weight for step, weight in weights.items()) / sum(weights.values())
        out.append(f"It generated **{rate:,.0f} tokens a second** over all its steps.")
    if staleness := sections.curve(run.steps, "staleness/max"):
        max_staleness = max(staleness.values())
        plural = "" if max_staleness == 1 else "s"
        out.append(f"No group was older than {max_staleness:.0f} version{plural} when it was trained on.")
    out += [_moves(run), pool_report.sentence(run.changes)]
    if skipped := sum(sections.curve(run.steps, "skipped").values()):
        out.append(f"{skipped:.0f} steps were skipped because a number was not finite, or no token was trained.")
    return [sentence for sentence in out if sentence]


def _learning(run: Run) -> list[str]:
    """Returns sentences on how the reward and the score on held-out tasks changed."""
    out = []
    if rewards := list(sections.curve(run.steps, "reward/mean").values()):
        size = min(WINDOW, len(rewards) // 2)  # the two windows must not share a step
        if size:
            before, after = map(statistics.fmean, (rewards[:size], rewards[-size:]))
            means = ""
            if size > 1:
                # The difference against its standard error, by Student's t. Windows of 2 steps need 4.3 errors.
                spread = statistics.variance(rewards[:size]) + statistics.variance(rewards[-size:])
                error, difference = math.sqrt(spread / size), abs(after - before)
                noise = ""
                if 0.005 <= difference <= STUDENT[2 * (size - 1)] * error:
                    vary = math.sqrt(size) * error / math.sqrt(2)
                    noise = f"; steps vary by {vary:.2f}, so the difference is within the noise"
                means = f" (means of the first and the last {size} steps{noise})"
            out.append(_change("The training reward", before, after) + f"{means}.")
        else:
            out.append(f"The training reward was **{rewards[0]:z.2f}**.")
    if scores := list(sections.curve(run.steps, "evaluation/accuracy").items()):
        (first_step, before), (last_step, after) = scores[0], scores[-1]
        if last_step > first_step:
            out.append(_change("The score on held-out tasks", before, after) + ".")
        else:
            out.append(f"The score on held-out tasks was **{after:.2f}** at step {last_step}.")
    return out


def _change(name: str, first: float, last: float) -> str:
    if abs(last - first) < 0.005:
        return f"{name} stayed at {first:z.2f}"
    return f"{name} {'rose' if last > first else 'fell'} from {first:z.2f} to **{last:z.2f}**"


def _moves(run: Run) -> str:
    """Returns how often requests moved between engines, and the cost. Empty if none moved."""
    moves = sections.curve(run.steps, "routing/moves")
    if not (count := sum(moves.values())):
        return ""
    tokens = sum(sections.curve(run.steps, "routing/moved_tokens").values())
    times = "once" if count == 1 else f"{count:,.0f} times"
    text = f"Requests moved to another instance **{times}**, with {tokens / count:,.0f} tokens of context"
    waits: list[Sequence[float]] = [
        list(sections.curve(run.steps, f"routing/{name}_seconds").values()) for name in ("move", "stay")
    ]
    if all(waits):
        # The high median is a time that was measured, and not a mean of two.
        after_move, without = (f"{1e3 * statistics.median_high(seconds):,.0f} ms" for seconds in waits)
        text += f"; first tokens came after {after_move}, those of requests that stayed after {without}"
    if right := sections.curve(run.steps, "routing/one_shot_accuracy"):
        judged = sections.curve(run.steps, "routing/judged")
        # Weighted by the rollouts that were judged, which differ from step to step.
        share = sum(value * judged[step] for step, value in right.items()) / sum(judged[step] for step in right)
        text += f". The first decision after a tool return named the right bucket for {share:.0%}"
    reasons = [f"{reason.replace('_', ' ')} {run.moves[reason]:,}" for reason in MoveReason if run.moves[reason]]
    return f"{text}. Moves of trained trajectories by reason: {', '.join(reasons)}." if reasons else text + "."
