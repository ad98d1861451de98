"""The report's section on plans: what was predicted beside what was measured, and each look for a better plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax.telemetry import figures, page

NOTE = (
    "Predicted before each step from the lengths of those before; a dotted line is a move to another plan. The present "
    "plan's step is with the ranges of lengths that suit it best."
)


def sections(steps: Mapping[int, Mapping[str, float]], decisions: Sequence[Mapping[str, Any]]) -> list[page.Section]:
    """The picture and the table of the decisions, as far as there is anything to show.

    Args:
      steps: numbers of each step.
      decisions: lines of `plans.jsonl`.
    """
    out = []
    predicted = {
        step: numbers["plan/step_seconds"] for step, numbers in steps.items() if "plan/step_seconds" in numbers
    }
    if predicted:
        measured = {step: _step_seconds(numbers) for step, numbers in steps.items() if "step/seconds" in numbers}
        training = {step: numbers["plan/train_seconds"] for step, numbers in steps.items() if step in predicted}
        moves = [int(decision["step"]) for decision in decisions if decision.get("moved")]
        picture = figures.for_screens(lambda width: figures.predicted(measured, predicted, training, moves, width))
        out.append(page.Section("Predicted and measured step times", picture, NOTE, wide=True))
    if decisions:
        heads = ("after step", "why it looked", "present, s", "best, s", "move, s", "decision", "best plan")
        out.append(page.Section("Looks for a better plan", page.table(heads, list(map(_row, decisions))), wide=True))
    return out


def _step_seconds(numbers: Mapping[str, float]) -> float:
    return numbers["step/seconds"] - numbers.get("evaluation/seconds", 0.0)


def _row(decision: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = (decision[name] for name in ("present_seconds", "best_seconds", "move_seconds"))
    seconds = ("∞" if number is None else f"{number:,.1f}" for number in numbers)
    verdict = f"{'moved' if decision['moved'] else 'stayed'}: {decision['reason']}"
    return str(decision["step"]), decision["why"], *seconds, verdict, described(decision["plan"])


def described(plan: Mapping[str, Any]) -> str:
    """A plan in a line."""
    mesh = plan["data"], plan["fsdp"], plan["tensor"]
    rollout = ", ".join(
        f"{bucket['count']} of degree {bucket['tensor_parallel']} to {bucket['max_remaining_tokens']:,} tokens"
        for bucket in plan["rollout"]
    )
    return f"train on {' x '.join(map(str, mesh))}; {rollout}"
