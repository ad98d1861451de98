"""What a reward function may know of a finished attempt, and what an attempt's scorer answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from libra_jax import protocols


@dataclass(frozen=True)
class Transcript:
    """A finished attempt. A reward function gets it in place of the text if its second parameter is `transcript`.

    Attributes:
      text: the whole attempt, prompt and tool returns included, special tokens spelled out; what other functions get.
      answer: the policy's last output where that ended the attempt, else empty. Special tokens are spelled out as the
        tokenizer does, the stop token is left out.
      finish: why it ended, one of `protocols.FINISHES`.
      messages: the dialogue as the policy saw it, its own outputs included; the last may have been cut off.
      tools: what each turn's calls came to, in order.
      metrics: numbers that the environment reported.
      environment_reward: the environment's own; 0 where a limit ended the attempt, None where it gave none that is a
        finite number.
    """

    text: str
    answer: str = ""
    finish: str = "answered"
    messages: tuple[protocols.Message, ...] = ()
    tools: tuple[protocols.CausalState, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    environment_reward: float | None = None


@dataclass(frozen=True)
class Score:
    """What an attempt is worth.

    Attributes:
      reward: a finite number.
      metrics: further numbers, added to the attempt's own; those named `reward.../...` keep that name in reports.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


Scorer = Callable[[protocols.Task, Transcript], Awaitable[Score]]
"""Scores finished attempts; raises EnvironmentCrashed (RewardFailed if a retry of the attempt would not help)."""
