"""`report.html`: a run in one self-contained page, from the files that it left in its workdir."""

from __future__ import annotations

import html
import itertools
import json
import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra_jax.protocols import DataError
from libra_jax.scheduling import foresight
from libra_jax.telemetry import (
    causes_section,
    changes_section,
    console,
    figures,
    files,
    health_section,
    metrics,
    page,
    plan_section,
    pool_section,
    rewards_section,
    samples,
    samples_section,
    timeline,
    timeline_picture,
    tools_section,
    trace,
    transitions,
)

REPORT_FILE = "report.html"
CONFIG_FILE = "config.json"

PICTURED_STEPS = 3
"""Training steps that the timeline picture shows."""

PICTURED_SPANS = 4000
"""Spans in the timeline picture at most; the earliest go first."""

KEPT_SPANS = 20_000
"""Spans at the timeline's end that are held in memory."""

KEPT_ATTEMPTS = 20_000
"""Trajectories at the trace's end on which it is judged what tool returns foretell."""

WINDOW = 5
"""Steps, at most, whose mean reward is compared at either end of the run."""

REPLACED = "groups/replaced_"
"""What the name of a metric starts with that counts a step's replaced groups of one reason."""

PARTS_NOTE = (
    "Wait is the time in which training waited for rollouts, as in the console's lines. Generation that "
    "overlaps training costs no step time."
)

MOVES_NOTE = (
    "Requests that another instance went on with, a step. routing/move_seconds is how long they waited for its first "
    "tokens, the prefill of their context included; routing/stay_seconds how long those that did not move waited."
)

OUTCOMES = {"failure": "failed", "timeout": "timed out"}
"""What a tool call of a status did."""

REASONS = {
    "environment": "the environment kept crashing",
    "reward": "a reward function kept failing",
    "zero_variance": "all rewards of the group were equal",
    "stale": "the group would have passed the staleness bound",
    "redundant": "enough others had finished before it (coordinator.redundancy)",
}


@dataclass
class Run:
    """What a workdir holds.

    Attributes:
      steps: numbers of each step, ascending.
      spans: the last of the timeline.
      seconds: end of the timeline, in seconds of running time.
      lengths: generated tokens of each trajectory.
      tools: what the trajectories did with tools.
      foresight: how well tool returns foretold what was left; None where there were none.
      config: the resolved config, empty where there is none.
      decisions: the planner's, in order.
      pools: their sizes, in order.
      changes: transitions of workers and meshes, in order.
      config_history: settings that changed when the run went on, in order.
      samples: rollouts of the first and of the last step as text.
    """

    steps: dict[int, dict[str, float]]
    spans: list[timeline.Span]
    seconds: float
    lengths: list[int]
    tools: tools_section.Tally
    foresight: foresight.Foresight | None = None
    config: dict[str, Any] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    pools: list[timeline.PoolSizes] = field(default_factory=list)
    changes: list[transitions.Transition] = field(default_factory=list)
    config_history: list[dict[str, Any]] = field(default_factory=list)
    samples: list[samples.Sample] = field(default_factory=list)

    def curve(self, name: str) -> dict[int, float]:
        """Finite values by step, of the steps that have the number."""
        return {step: s[name] for step, s in self.steps.items() if name in s and math.isfinite(s[name])}


def load(workdir: Path) -> Run:
    """Reads a workdir, an interrupted run's too.

    Raises:
      DataError: nothing has been recorded in it, or it is a file.
    """
    if workdir.exists() and not workdir.is_dir():
        raise DataError(f"{workdir}: is no folder; give the --workdir of a run")
    spans: deque[timeline.Span] = deque(maxlen=KEPT_SPANS)
    pools: list[timeline.PoolSizes] = []
    seconds = 0.0
    for found in timeline.read_all(workdir / timeline.TIMELINE_FILE):
        if isinstance(found, timeline.Span):
            spans.append(found)
            seconds = max(seconds, found.end)
        else:
            pools.append(found)
            seconds = max(seconds, found.start)
    lengths: list[int] = []
    tools = tools_section.Tally()
    attempts: deque[foresight.Attempt] = deque(maxlen=KEPT_ATTEMPTS)
    for record in files.whole_json_lines(workdir / trace.TRACE_FILE):
        turns = [turn for turn in record.get("turns") or [] if isinstance(turn, dict)]
        lengths.append(sum(turn.get("generated_tokens") or 0 for turn in turns))
        tools.add(record)
        if trace.is_record(record):
            attempts.append(foresight.attempt(record))
    steps = metrics.read(workdir / metrics.METRICS_FILE)
    if not (steps or spans or lengths or pools):
        raise DataError(
            f"{workdir}: no run has recorded anything here (no {metrics.METRICS_FILE}, {timeline.TIMELINE_FILE} or "
            f"{trace.TRACE_FILE} with content); give the --workdir of a run"
        )
    try:
        config = json.loads((workdir / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        config = {}
    decisions = list(files.whole_json_lines(workdir / files.PLANS_FILE))
    changes = [transitions.parse(record) for record in files.whole_json_lines(workdir / files.TRANSITIONS_FILE)]
    known = config if isinstance(config, dict) else {}
    foretold = foresight.measure(attempts) if tools.tools else None
    history = list(files.whole_json_lines(workdir / files.CONFIG_HISTORY_FILE))
    shown = samples_section.ends(samples.read(workdir / samples.SAMPLES_FILE))
    return Run(steps, list(spans), seconds, lengths, tools, foretold, known, decisions, pools, changes, history, shown)


def write_report(workdir: Path) -> Path:
    """Writes `report.html` from the files of the workdir.

    Returns:
      The report's path.

    Raises:
      DataError: nothing has been recorded there, or the report cannot be written.
    """
    run = load(workdir)
    name = str(run.config.get("name") or workdir.resolve().name)
    text = page.render(f"{name} · Libra-JAX", name, sentences(run), sections(run))
    path = workdir / REPORT_FILE
    partial = path.with_name(REPORT_FILE + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"{path}: the report cannot be written ({error.strerror or error})") from error
    return path


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _went(name: str, first: float, last: float) -> str:
    verb = "stayed at" if abs(last - first) < 0.005 else "rose from" if last > first else "fell from"
    return f"{name} {verb} {first:z.2f}" + ("" if verb == "stayed at" else f" to <b>{last:z.2f}</b>")


def sentences(run: Run) -> list[str]:
    """The headline numbers, one HTML sentence each."""
    out = []
    planned = run.config.get("steps")
    done = max(run.steps, default=0)
    if run.steps:
        of = f" of {planned}" if isinstance(planned, int) and planned > done else ""
        time = f" in {console.seconds_text(run.seconds)}" if run.seconds else ""
        out.append(f"The run trained <b>{done}{of} step{'' if (done, of) == (1, '') else 's'}</b>{time}.")
    if rewards := list(run.curve("reward/mean").values()):
        size = min(WINDOW, len(rewards) // 2)  # two windows that share no step
        if size:
            means = f" (means of the first and the last {size} steps)" if size > 1 else ""
            out.append(_went("The training reward", _mean(rewards[:size]), _mean(rewards[-size:])) + f"{means}.")
        else:
            out.append(f"The training reward was <b>{rewards[0]:z.2f}</b>.")
    if scores := list(run.curve("evaluation/accuracy").items()):
        (first, before), (last, after) = scores[0], scores[-1]
        if last > first:
            out.append(_went("The score on held-out tasks", before, after) + ".")
        else:
            out.append(f"The score on held-out tasks was <b>{after:.2f}</b> at step {last}.")
    if run.lengths:
        calls = sum(one.outcomes.total() for one in run.tools.tools.values())
        called = f", with {calls:,} tool calls{_outcome(run, calls)}" if calls else ""
        out.append(f"It generated <b>{sum(run.lengths):,} tokens</b> in {len(run.lengths):,} trajectories{called}.")
    if turns := tools_section.sentence(run.tools):
        out.append(turns)
    if rates := run.curve("tokens_per_second"):
        seconds = run.curve("step/seconds")
        known = {step: seconds[step] for step in rates if seconds.get(step)} or dict.fromkeys(rates, 1.0)
        rate = sum(rates[step] * weight for step, weight in known.items()) / sum(known.values())
        out.append(f"It generated <b>{rate:,.0f} tokens a second</b> over all its steps.")
    if ages := run.curve("staleness/max"):
        age = max(ages.values())
        out.append(f"No group was older than {age:.0f} version{'' if age == 1 else 's'} when it was trained on.")
    if moves := moves_sentence(run):
        out.append(moves)
    if changes := pool_section.sentence(run.changes):
        out.append(changes)
    if skipped := sum(run.curve("skipped").values()):
        out.append(f"{skipped:.0f} steps were skipped because a number was not finite.")
    return out


def _outcome(run: Run, calls: int) -> str:
    """Failed tool calls, in counts: a share would round a few of them away."""
    counts = {status: sum(one.of_status(status) for one in run.tools.tools.values()) for status in trace.STATUSES}
    lost = [f"{counts[status]:,} {verb}" for status, verb in OUTCOMES.items() if counts[status]]
    return f" ({' and '.join(lost)})" if lost else ", all successful" if counts["success"] == calls else ""


def moves_sentence(run: Run) -> str:
    """What moves between instances came to; empty where there were none."""
    moves = run.curve("routing/moves")
    if not (count := sum(moves.values())):
        return ""
    tokens = sum(run.curve("routing/moved_tokens").values())
    times = "once" if count == 1 else f"{count:,.0f} times"
    text = f"Requests moved to another instance <b>{times}</b>, with {tokens / count:,.0f} tokens of context"
    waits = [list(run.curve(f"routing/{name}_seconds").values()) for name in ("move", "stay")]
    if all(waits):
        after_move, without = (f"{1e3 * _median(seconds):,.0f} ms" for seconds in waits)
        text += f"; first tokens came after {after_move}, those of requests that stayed after {without}"
    if right := run.curve("routing/one_shot_accuracy"):
        judged = run.curve("routing/judged")
        share = sum(value * judged[step] for step, value in right.items()) / sum(judged[step] for step in right)
        text += f". The first decision after a tool return named the right bucket for {share:.0%}"
    return text + "."


def sections(run: Run) -> list[page.Section]:
    """The page's pictures and tables, those that there is data for."""
    out: list[page.Section] = []
    rewards, evaluations = run.curve("reward/mean"), run.curve("evaluation/accuracy")
    if rewards or evaluations:
        out.append(
            page.Section(
                "Reward", figures.for_screens(lambda width: figures.reward(rewards, evaluations, width)), wide=True
            )
        )
    out.extend(rewards_section.sections(run.steps))
    if rates := run.curve("tokens_per_second"):
        out.append(page.Section("Generated tokens a second", figures.curve(rates, smooth=True)))
    if parts := step_parts(run):
        out.append(page.Section("Where a step's time goes", figures.step_times(parts), PARTS_NOTE))
    if ages := run.curve("staleness/max"):
        note = "Versions between a group's first dispatch and the step that trains on it; the oldest group of a step."
        out.append(page.Section("Staleness", figures.curve(ages, colour=figures.TEAL, stairs=True), note))
    if mismatch := run.curve("mismatch/kl"):
        note = "KL between what the engines and the trainer say of the same tokens under the same weights."
        out.append(page.Section("Mismatch", figures.curve(mismatch, colour=figures.ORANGE, log=True), note))
    if any((moves := run.curve("routing/moves")).values()):
        out.append(
            page.Section("Moves between instances", figures.curve(moves, colour=figures.TEAL, whole=True), MOVES_NOTE)
        )
    out.extend(health_section.sections(run.steps))
    if loss := run.curve("loss"):
        out.append(page.Section("Loss", figures.curve(loss, colour=figures.GREEN, zero=False)))
    out.extend(plan_section.sections(run.steps, run.decisions))
    out.extend(pool_section.sections(run.pools, run.changes, run.seconds))
    if run.lengths:
        out.append(page.Section("Trajectory lengths", figures.lengths(run.lengths)))
    out.extend(tools_section.sections(run.tools))
    out.extend(causes_section.sections(run.foresight))
    if picture := timeline_section(run.spans):
        out.append(picture)
    out.extend(samples_section.sections(run.samples))
    out.append(page.Section("Replaced groups", replaced_table(run), wide=True))
    out.extend(changes_section.sections(run.config_history))
    if run.steps:
        out.append(page.Section("All numbers", numbers_table(run), wide=True, folded=True))
    if run.config:
        text = html.escape(json.dumps(run.config, indent=2))
        out.append(page.Section("Config", f"<pre>{text}</pre>", wide=True, folded=True))
    return out


def step_parts(run: Run) -> dict[str, dict[int, float]]:
    """Seconds of each part of a step, by step."""
    waited = "rollout/wait_seconds" if run.curve("rollout/wait_seconds") else "rollout/seconds"
    named = {
        "wait": waited,
        "training": "train/seconds",
        "weight update": "sync/seconds",
        "checkpoint": "checkpoint/seconds",
    }
    curves = {part: curve for part, name in named.items() if any((curve := run.curve(name)).values())}
    steps = sorted(set().union(*curves.values())) if curves else []
    parts = {part: {step: curve.get(step, 0.0) for step in steps} for part, curve in curves.items()}
    if curves and (whole := run.curve("step/seconds")):
        known = {step: sum(part[step] for part in parts.values()) for step in steps}
        parts["other"] = {step: max(0.0, whole.get(step, 0.0) - known[step]) for step in steps}
    return parts


def timeline_section(spans: Sequence[timeline.Span]) -> page.Section | None:
    """The timeline's last few steps."""
    if not spans:
        return None
    trained = sorted(span.end for span in spans if timeline_picture.kind(span)[0] == "training")[-PICTURED_STEPS - 1 :]
    end = trained[-1] if len(trained) > 1 else max(span.end for span in spans)
    start = trained[0] if len(trained) > 1 else max(end - 30.0, min(span.start for span in spans))
    shown = [span for span in spans if span.end > start and span.start < end]
    if len(shown) > PICTURED_SPANS:
        shown = sorted(shown, key=lambda span: span.end)[-PICTURED_SPANS:]
        start = max(start, min(span.end for span in shown))
    if not shown or end <= start:
        return None
    note = f"The whole run is in {timeline.TIMELINE_FILE}: open it at ui.perfetto.dev."
    picture = figures.for_screens(lambda width: timeline_picture.lanes(shown, start, end, width))
    return page.Section("The last steps, by worker", picture, note, wide=True)


def replaced_table(run: Run) -> str:
    """Groups that were replaced instead of trained, by reason."""
    names = sorted({name for scalars in run.steps.values() for name in scalars if name.startswith(REPLACED)})
    counts = {name.removeprefix(REPLACED): sum(run.curve(name).values()) for name in names}
    if not any(counts.values()):
        return "<p>None: every prompt that was admitted was trained on.</p>"
    rows = [(reason, REASONS.get(reason, ""), f"{count:,.0f}") for reason, count in counts.items() if count]
    return page.table(("reason", "meaning", "groups"), rows)


def numbers_table(run: Run) -> str:
    """First, last, least and greatest value of everything that was measured."""
    names = sorted(set(itertools.chain.from_iterable(run.steps.values())))
    rows = []
    for name in names:
        values = list(run.curve(name).values())
        if values:
            rows.append((name, *(f"{value:z,.4g}" for value in (values[0], values[-1], min(values), max(values)))))
    return page.table(("name", "first", "last", "least", "greatest"), rows)
