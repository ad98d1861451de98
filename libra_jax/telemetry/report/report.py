"""`report.html`: a run as one self-contained page, made from the files in its workdir."""

from __future__ import annotations

import math
import os
import re
import statistics
from pathlib import Path

import jinja2
import markupsafe

from libra_jax.protocols import DataError, MoveReason
from libra_jax.telemetry import console, escapes, trace
from libra_jax.telemetry.report import charts, page, pictures, pool_report, recorded_run, run_report, tool_report
from libra_jax.telemetry.report.recorded_run import RecordedRun

REPORT_FILE = "report.html"

WINDOW = 5
"""Steps, at most, whose mean reward is compared at either end of the run."""

STUDENT = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306}
"""Student's t at 95% (two-sided), by degrees of freedom: those of two windows of 2 to `WINDOW` steps."""

OUTCOMES = {"failure": "failed", "timeout": "timed out"}
"""Verb for a tool call with each bad status."""


def write_report(workdir: Path) -> Path:
    """Writes `report.html` from the files of the workdir.

    Returns:
      Path of the report.

    Raises:
      DataError: No run has recorded anything there, or the report cannot be written.
    """
    run = recorded_run.load(workdir)
    name = str(run.config.get("name") or workdir.resolve().name)
    text = render(name, run)
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


def render(name: str, run: RecordedRun) -> str:
    """Returns the whole page of a run."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("libra_jax.telemetry.report"),
        # Everything that the templates show, a model's text too, passes `finalize` first and HTML's own escapes then.
        # Markup is text that was made safe already.
        autoescape=True,
        finalize=lambda value: (
            value if isinstance(value, markupsafe.Markup) else escapes.visible(str(value), lines=True)
        ),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bold": _bold, "parts": page.parts, "kind": lambda part: type(part).__name__}
    return environment.get_template("page.html.j2").render(
        {"name": name, "lead": sentences(run), "run": run, "charts": charts.CHARTS},
        run_report=run_report,
        pool_report=pool_report,
        tool_report=tool_report,
        light=pictures.LIGHT,
        dark=pictures.DARK,
    )


def _bold(sentence: str) -> markupsafe.Markup:
    """Returns a sentence as HTML, with `**this**` in bold."""
    escaped = str(markupsafe.escape(escapes.visible(sentence)))
    return markupsafe.Markup(re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escaped))


# Headline numbers -----------------------------------------------------------------------------------------------


def sentences(run: RecordedRun) -> list[str]:
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
        # In numbers: a share would round a few failures away.
        counts = {status: run.calls(status) for status in trace.STATUSES}
        calls = sum(counts.values())
        called = f", with {calls:,} tool calls" if calls else ""
        if lost := [f"{counts[status]:,} {verb}" for status, verb in OUTCOMES.items() if counts[status]]:
            called += f" ({' and '.join(lost)})"
        elif calls and counts["success"] == calls:
            called += ", all successful"
        out.append(f"It generated **{sum(run.lengths):,} tokens** in {len(run.lengths):,} trajectories{called}.")
    out.append(tool_report.sentence(run))
    if rates := run.curve("tokens_per_second"):
        seconds = run.curve("step/seconds")
        # Weighted by the steps' seconds: the mean of the rates would count a short step as much as a long one.
        weights = {step: seconds[step] for step in rates if seconds.get(step)} or dict.fromkeys(rates, 1.0)
        rate = sum(rates[step] * weight for step, weight in weights.items()) / sum(weights.values())
        out.append(f"It generated **{rate:,.0f} tokens a second** over all its steps.")
    if staleness := run.curve("staleness/max"):
        max_staleness = max(staleness.values())
        plural = "" if max_staleness == 1 else "s"
        out.append(f"No group was older than {max_staleness:.0f} version{plural} when it was trained on.")
    out += [_moves(run), pool_report.sentence(run.transitions)]
    if skipped := sum(run.values("skipped")):
        out.append(f"{skipped:.0f} steps were skipped because a number was not finite, or no token was trained.")
    return [sentence for sentence in out if sentence]


def _learning(run: RecordedRun) -> list[str]:
    """Returns sentences on how the reward and the score on held-out tasks changed."""
    out = []
    if rewards := run.values("reward/mean"):
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
    if scores := list(run.curve("evaluation/accuracy").items()):
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


def _moves(run: RecordedRun) -> str:
    """Returns how often requests moved between engines, and the cost. Empty if none moved."""
    moves = run.curve("routing/moves")
    if not (count := sum(moves.values())):
        return ""
    tokens = sum(run.values("routing/moved_tokens"))
    times = "once" if count == 1 else f"{count:,.0f} times"
    text = f"Requests moved to another instance **{times}**, with {tokens / count:,.0f} tokens of context"
    waits = [run.values(f"routing/{name}_seconds") for name in ("move", "stay")]
    if all(waits):
        # The high median is a time that was measured, and not a mean of two.
        after_move, without = (f"{1e3 * statistics.median_high(seconds):,.0f} ms" for seconds in waits)
        text += f"; first tokens came after {after_move}, those of requests that stayed after {without}"
    if right := run.curve("routing/one_shot_accuracy"):
        judged = run.curve("routing/judged")
        # Weighted by the rollouts that were judged, which differ from step to step.
        share = sum(value * judged[step] for step, value in right.items()) / sum(judged[step] for step in right)
        text += f". The first decision after a tool return named the right bucket for {share:.0%}"
    reasons = [f"{reason.replace('_', ' ')} {run.moves[reason]:,}" for reason in MoveReason if run.moves[reason]]
    return f"{text}. Moves of trained trajectories by reason: {', '.join(reasons)}." if reasons else text + "."
