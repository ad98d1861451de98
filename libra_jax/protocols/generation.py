"""Tokens asked for and streamed back: what a trajectory and an engine say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
NO_VERSION = -1
"""Policy version of a token that no policy sampled."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Temperature only: the log-prob contract (engines/logprob_contract.py) says why.

    Attributes:
      temperature: 0 means greedy.
      max_tokens: at most this many tokens are generated.
      stop_token_ids: generation ends with, and returns, the first of these.
    """

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class GenerationRequest:
    """Tokens to continue.

    Attributes:
      request_id: unique among the engine's requests.
      token_ids: the whole context, retained tokens of a failed attempt included.
      sampling: how tokens are drawn.
      kv_source: what `RolloutEngine.hand_over` of another engine returned for this context; None: it is prefilled.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    kv_source: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TokenDelta:
    """Tokens that streamed in since the last delta; the three tuples have the same length.

    Attributes:
      token_ids: the new tokens.
      log_probs: their log-probability at the sampling temperature (processed log-probs), natural log.
      policy_versions: the version whose weights sampled each.
      finish_reason: set on the last delta only.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: FinishReason | None = None
