"""Trajectories: token in, token out. What was sampled is never decoded and tokenized again."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from libra_jax.protocols.generation import NO_VERSION, TokenDelta
from libra_jax.protocols.moves import Move
from libra_jax.protocols.tasks import Message, Task


class TokenSource(enum.IntEnum):
    """Who wrote a token."""

    PROMPT = 0
    MODEL = 1
    TOOL = 2


ToolStatus = Literal["success", "failure", "timeout"]
LIMITS = ("length", "max_turns", "max_tokens", "max_seconds", "max_context")
"""Limits that may end an attempt; `length` is that of one output (`rollout.max_tokens`)."""

FINISHES = ("answered", *LIMITS)
"""Why an attempt ended: the environment ended it, or an output, or the attempt, met a limit."""


@dataclass(frozen=True)
class CausalState:
    """What a tool return says about what comes next (C-MLFQ, arXiv 2606.03077 section 4)."""

    tool: str
    payload_tokens: int
    status: ToolStatus


@dataclass
class Turn:
    """One model output and the tool return that followed it, as the trace records them.

    Attributes:
      generated_tokens: tokens the policy sampled in this turn, its stop token included.
      tool: name of the tool called, or None for a turn without a call; of several at once, all, sorted and joined by
        "+".
      status: outcome of the call, or None without a call; of several, the worst.
      payload_tokens: tokens that the tool returns appended to the context.
      tool_seconds: time the tool took after the output had ended, or several together, without the wait for what they
        need (`Queued`); after one that calls none, the environment's step, scoring for example.
      start_seconds: event-loop time at which the turn's generation was asked for.
      moves: moves after which other instances went on with the output, in order.
    """

    generated_tokens: int
    tool: str | None = None
    status: ToolStatus | None = None
    payload_tokens: int = 0
    tool_seconds: float = 0.0
    start_seconds: float = 0.0
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True)
class AttemptSnapshot:
    """Where an attempt can be taken up without its past being replayed.

    Attributes:
      state: what the environment needs for it (`Resumable.snapshot`); JSON-able.
      position: tokens of the trajectory up to there.
      turn: outputs up to there.
      metrics: that the environment had reported by then.
      messages: the dialogue up to there.
    """

    state: Mapping[str, Any]
    position: int
    turn: int
    metrics: Mapping[str, float]
    messages: Sequence[Message] = ()


@dataclass
class Trajectory:
    """One agent's attempt, token by token. The five per-token lists always have the same length.

    Attributes:
      trajectory_id: `<prompt_id>/<sample index>`, unique in a run.
      prompt_id: the task this attempts.
      token_ids: every token of the context, in order.
      sources: a `TokenSource` for each token.
      loss_mask: True for each token that is trained on (the model's own, stop tokens included).
      log_probs: behaviour log-probability of each sampled token at the sampling temperature; 0.0 elsewhere.
      policy_versions: version that sampled each token; `NO_VERSION` elsewhere.
      turns: one entry a model output.
      reward: scalar reward, None until the environment has scored the attempt.
      environment_reward: the environment's own part of `reward`, before weights and reward functions; 0 where a limit
        ended the attempt, None where the environment gave no finite number.
      finish: why it ended, one of `FINISHES`.
      metrics: numbers the environment reports, averaged into the step's metrics under `agent/`; `moves`, the times that
        another instance went on with it; and what reward functions report, under names of their own (`reward.../...`).
      start_seconds: event-loop time at which the attempt began.
      seconds: from its first token on, tools and waits included, over all runs that had a part in it; counted only
        where they are limited, or the environment hears outputs.
      snapshot: the latest that its environment gave.
    """

    trajectory_id: str
    prompt_id: str
    token_ids: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    finish: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    start_seconds: float = 0.0
    seconds: float = 0.0
    snapshot: AttemptSnapshot | None = None
    environment_reward: float | None = None

    def append_text(self, token_ids: Sequence[int], source: TokenSource) -> None:
        """Appends tokens that no policy sampled (prompt or tool return)."""
        count = len(token_ids)
        self.token_ids.extend(token_ids)
        self.sources.extend([int(source)] * count)
        self.loss_mask.extend([False] * count)
        self.log_probs.extend([0.0] * count)
        self.policy_versions.extend([NO_VERSION] * count)

    def append_sampled(self, delta: TokenDelta) -> None:
        """Appends sampled tokens with their behaviour log-probabilities and versions."""
        count = len(delta.token_ids)
        self.token_ids.extend(delta.token_ids)
        self.sources.extend([int(TokenSource.MODEL)] * count)
        self.loss_mask.extend([True] * count)
        self.log_probs.extend(delta.log_probs)
        self.policy_versions.extend(delta.policy_versions)

    def clear(self) -> None:
        """Drops every token and turn, and what it took to get there; name, metrics and outcome stay."""
        self.seconds, self.snapshot = 0.0, None
        for values in (
            self.token_ids,
            self.sources,
            self.loss_mask,
            self.log_probs,
            self.policy_versions,
            self.turns,
        ):
            values.clear()

    def context(self) -> Sequence[int]:
        """The tokens as they are now, for an engine to continue: later changes of the trajectory do not show."""
        return tuple(self.token_ids)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, which comes first."""
        return next(
            (at for at, source in enumerate(self.sources) if source != TokenSource.PROMPT),
            len(self.sources),
        )

    @property
    def generated_tokens(self) -> int:
        """Tokens the policy sampled, over all turns."""
        return sum(self.loss_mask)


@dataclass
class Group:
    """The attempts at one prompt that are compared with each other and trained together.

    Attributes:
      group_id: admission number, unique and increasing in a run.
      task: what is attempted.
      dispatch_version: policy version at the group's first dispatch; its staleness is counted from here.
      trajectories: finished attempts, in sample order.
    """

    group_id: int
    task: Task
    dispatch_version: int
    trajectories: list[Trajectory] = field(default_factory=list)
