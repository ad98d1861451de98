"""The data that a reward function gets about a finished rollout, and the score that it gives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from libra_jax import protocols


@dataclass(frozen=True)
class Transcript:
    """A finished rollout. A reward function gets it instead of the text if its second parameter is named `transcript`.

    Attributes:
      text: What the policy wrote: its outputs, joined by line breaks, without the prompt and tool returns. Thoughts are
        in it (`libra_jax.chat.thoughts.split` takes them out), and stop tokens are not. Other functions get this.
      answer: The policy's last output if it ended the rollout, otherwise empty. Thoughts and white space at the ends
        are left out.
      finish: Why the rollout ended, one of `protocols.FINISHES`.
      messages: The dialogue as the policy saw it, with its own outputs. The last one may be cut off.
      tools: Results of each turn's calls, in order.
      metrics: Numbers that the environment reported.
      environment_reward: The environment's own reward. 0 if a limit ended the rollout. None if the environment gave no
        finite number.
      dialogue: The whole rollout as text, with prompt and tool returns. Special tokens are spelled out.
    """

    text: str
    answer: str = ""
    finish: str = "answered"
    messages: tuple[protocols.Message, ...] = ()
    tools: tuple[protocols.CausalState, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    environment_reward: float | None = None
    dialogue: str = ""


@dataclass(frozen=True)
class Score:
    """The score of a rollout.

    Attributes:
      reward: A finite number.
      metrics: Further numbers, added to the rollout's own. Names of the form `reward.../...` are kept in reports.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


Scorer = Callable[[protocols.Task, Transcript], Awaitable[Score]]
"""Function that scores finished rollouts.

Raises EnvironmentCrashed, or RewardFailed if a new rollout would not help.
"""
