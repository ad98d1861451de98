"""Requests for tokens and the streamed replies: the interface between a trajectory and an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
NO_VERSION = -1
"""Policy version of a token that no policy sampled."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings. Temperature only; the log-prob contract (engines/logprob_contract.py) gives the reason.

    Attributes:
      temperature: sampling temperature; 0 means greedy.
      max_tokens: maximum number of generated tokens.
      stop_token_ids: tokens that end the generation; the first one sampled is returned.
    """

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class GenerationRequest:
    """A context to continue.

    Attributes:
      request_id: unique among the engine's requests.
      token_ids: the whole context, including the tokens kept from a failed engine.
      sampling: sampling settings.
      kv_source: result of another engine's `RolloutEngine.hand_over` for this context; None: prefill the context.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    kv_source: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TokenDelta:
    """Tokens since the last delta; the three tuples have the same length.

    Attributes:
      token_ids: the new tokens.
      log_probs: natural log-probabilities at the sampling temperature (processed log-probs).
      policy_versions: version whose weights sampled each token.
      finish_reason: reason for the end; set on the last delta only.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: FinishReason | None = None
