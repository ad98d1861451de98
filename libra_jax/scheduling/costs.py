"""What serving costs, in seconds: handed to the schedulers, so that they know no engine and no hardware."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from libra_jax import config as configuration
from libra_jax import protocols


class Costs(Protocol):
    """Predictions of the present hardware. Pure functions; schedulers keep what they return until instances change."""

    def decode_seconds(self, instance: protocols.Instance, decoding: int, context_tokens: int, tokens: int) -> float:
        """Time for one request to generate `tokens` on `instance`.

        Args:
          instance: where.
          decoding: requests that decode there, this one included.
          context_tokens: its context when it starts; the others' are taken to be as long.
          tokens: to be generated.
        """
        ...

    def move_seconds(self, source: str | None, target: protocols.Instance, context_tokens: int) -> float:
        """Time to have the context's keys and values on `target`: prefilled again or transferred, whichever is less.

        Args:
          source: instance that holds them; None, or the target itself, where nothing has to move.
          target: where they are wanted.
          context_tokens: tokens of the context.
        """
        ...


@dataclass(frozen=True)
class LinearCosts:
    """Costs from a few coefficients: a step is a fixed part (weights) and a part for each request and its context.

    Attributes:
      coefficients: `scheduler.costs`, with their units.
      transfers: engines hand keys and values over (`rollout.kv_transfer`), where that takes less than a prefill.
    """

    coefficients: configuration.CostConfig = field(default_factory=configuration.CostConfig)
    transfers: bool = False

    def speed(self, degree: int) -> float:
        """How many times faster an instance of this degree is than one device."""
        return 1.0 + (degree - 1) * self.coefficients.scaling

    def decode_seconds(self, instance: protocols.Instance, decoding: int, context_tokens: int, tokens: int) -> float:
        known = self.coefficients
        mean_context = context_tokens + tokens / 2
        step = (
            known.step_seconds
            + (decoding - 1) * known.request_seconds
            + decoding * mean_context * known.context_seconds
        )
        return tokens * step / self.speed(instance.tensor_parallel)

    def move_seconds(self, source: str | None, target: protocols.Instance, context_tokens: int) -> float:
        if source is None or source == target.name:
            return 0.0
        known = self.coefficients
        prefill = context_tokens / (known.prefill_tokens_per_second * self.speed(target.tensor_parallel))
        return min(prefill, context_tokens / known.transfer_tokens_per_second) if self.transfers else prefill
