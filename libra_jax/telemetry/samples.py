"""`samples.jsonl`: some rollouts of each step as text, one per line, and how they are shown.

A line is `{"step", "evaluation", "policy_version", "group_id", "rank", "of", "trajectory_id", "prompt_id", "reward",
"reward_parts", "finish", "token_versions", "prompt", "turns": [{"text", "generated_tokens", "tool", "status",
"tool_seconds", "returned"}]}`. `rollouts/samples.py` chooses the rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_jax.telemetry import escapes, files

SAMPLES_FILE = "samples.jsonl"

MOST_CHARACTERS = 20_000
"""Largest number of characters of a text in viewers and the report. The middle of a longer text is cut, with a mark."""


@dataclass(frozen=True)
class Piece:
    """A part of a rollout's text.

    Attributes:
      title: Author of the text, safe to show.
      text: The raw text.
      source: "prompt", "model" or "tool".
    """

    title: str
    text: str
    source: str

    def visible_text(self) -> str:
        """Returns the text for viewers: safe to show, and cut in the middle if it is very long."""
        text = self.text
        if len(text) > MOST_CHARACTERS:
            half = MOST_CHARACTERS // 2
            text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
        return escapes.visible(text, lines=True)


@dataclass(frozen=True)
class Sample:
    """A rollout as text.

    Attributes:
      step: Training step. For an evaluation, the evaluated version.
      evaluation: Whether the task is a held-out one.
      reward: Reward. NaN if the file has none.
      rank: Rank of the rollout by reward in its step. 1 is the best.
      of: Number of rollouts of the step.
      headline: The record's other values on one line, safe to show.
      pieces: Parts of the text, in order.
    """

    step: int
    evaluation: bool
    prompt_id: str
    reward: float
    rank: int
    of: int
    headline: str
    pieces: Sequence[Piece]

    @property
    def place(self) -> str:
        """The rollout's place by reward: "best", "worst" or "middle"."""
        return "best" if self.rank == 1 else "worst" if self.rank == self.of else "middle"

    def text(self) -> str:
        """Returns the rollout as plain text for viewers, safe to show."""
        sections = [f"== {piece.title} ==\n{piece.visible_text()}" for piece in self.pieces]
        return "\n".join([self.headline, *sections])


def read(path: Path) -> Iterator[Sample]:
    """Yields the samples of a file in order. Skips torn and damaged lines. A missing file has no samples."""
    for record in files.whole_json_lines(path):
        if isinstance(record.get("step"), int):
            yield parse(record)


def ends(samples: Iterable[Sample]) -> list[Sample]:
    """Returns the training samples of the last step and of the first. Holds no others in memory."""
    first: list[Sample] = []
    last: list[Sample] = []
    for sample in samples:
        if sample.evaluation:
            continue
        if not first or sample.step == first[0].step:
            first.append(sample)
        # The file is in the order of steps, so a new step ends the one that was kept until now.
        if last and sample.step != last[0].step:
            last.clear()
        last.append(sample)
    return last if not first or first[0].step == last[0].step else [*last, *first]


def parse(record: Mapping[str, Any]) -> Sample:
    """Returns a line as a sample. Missing values, or values of another type, are left out."""
    turns = record.get("turns")
    pieces = [Piece("prompt", str(record.get("prompt") or ""), "prompt")]
    for number, turn in enumerate(turns if isinstance(turns, list) else (), start=1):
        if not isinstance(turn, dict):
            continue
        tokens = turn.get("generated_tokens")
        count = f", {tokens:,} tokens" if isinstance(tokens, int) else ""
        pieces.append(Piece(f"turn {number}: policy{count}", str(turn.get("text") or ""), "model"))
        if turn.get("tool") or turn.get("returned"):
            title = f"turn {number}: environment"
            if tool := turn.get("tool"):
                seconds = _number(turn.get("tool_seconds"), 0)
                title = escapes.visible(f"turn {number}: {tool}, {turn.get('status')}, {seconds:.2f} s")
            pieces.append(Piece(title, str(turn.get("returned") or ""), "tool"))
    evaluated = bool(record.get("evaluation"))
    headline = [f"evaluation at version {record['step']}" if evaluated else f"step {record['step']}"]
    reward = f"reward {_number(record.get('reward')):.3g}"
    components = record.get("reward_parts")
    if isinstance(components, dict) and components:
        reward += " (" + ", ".join(f"{name} {_number(value):.3g}" for name, value in components.items()) + ")"
    headline += [reward, f"rank {record.get('rank')} of {record.get('of')}", f"finish {record.get('finish')}"]
    # An evaluation's rollouts are in no group, and their version is the headline's first part.
    if not evaluated:
        headline.append(f"policy version {record.get('policy_version')}, group {record.get('group_id')}")
    headline.append(f"rollout {record.get('trajectory_id')}")
    return Sample(
        step=record["step"],
        evaluation=evaluated,
        prompt_id=str(record.get("prompt_id") or ""),
        reward=_number(record.get("reward")),
        rank=int(_number(record.get("rank"), 0)),
        of=int(_number(record.get("of"), 0)),
        headline=escapes.visible(" · ".join(headline)),
        pieces=pieces,
    )


def _number(value: object, otherwise: float = math.nan) -> float:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else otherwise  # type: ignore[arg-type]
