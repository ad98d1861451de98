"""What learns from finished requests how long others will be: the part of a policy that knows of lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from libra_jax import protocols
from libra_jax.scheduling.prediction import paths


class PredictionLearner(Protocol):
    """Learns from finished requests how long others will be. `evidence.Evidence` documents the methods."""

    def start(self, prompt_id: str, generated_tokens: int, segment: int = 0) -> paths.RequestTrack:
        """Returns the empty path of a request that has arrived."""
        ...

    def observe(self, track: paths.RequestTrack, causal_state: protocols.CausalState, generated_tokens: int) -> None:
        """Adds a tool return to a path."""
        ...

    def finish(self, track: paths.RequestTrack, generated_tokens: int, *, learn: bool) -> None:
        """Ends a path; its length is evidence for others if `learn`."""
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """Returns JSON-able statistics."""
        ...

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replaces the statistics by those of a snapshot."""
        ...

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        """Adds the statistics of another coordinator's snapshot."""
        ...
