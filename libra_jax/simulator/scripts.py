"""Scripts of simulated rollouts: the contract between workloads and the simulated machines.

A script is fixed before the rollout begins, so that every scheduling policy is measured on the same work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from libra_jax import protocols


@dataclass(frozen=True)
class Script:
    """One rollout, as it would run without any fault.

    Attributes:
      prompt_tokens: tokens of the prompt; the same for all samples of a task.
      turns: model outputs and the tool returns that follow them, at least one; the last turn's return ends the rollout.
        A turn generates at least one token, the stop token. `tool` None is a turn that calls no tool.
      limit: one of `protocols.LIMITS` that ended the recorded rollout; None if no limit did.
    """

    prompt_tokens: int
    turns: tuple[protocols.Turn, ...]
    limit: str | None = None

    @property
    def generated_tokens(self) -> int:
        """Tokens that the policy samples, over all turns."""
        return sum(max(1, turn.generated_tokens) for turn in self.turns)

    @property
    def context_tokens(self) -> int:
        """Tokens of the whole context when the rollout ends, without the last turn's tool return, which is never
        shown."""
        return self.prompt_tokens + self.generated_tokens + sum(turn.payload_tokens for turn in self.turns[:-1])


class Workload(Protocol):
    """Scripts by position: pure and seeded, so that any call may be repeated."""

    def script(self, task_index: int, sample: int) -> Script:
        """Returns the script of one sample of the `task_index`-th task; any index >= 0 is valid."""
        ...
