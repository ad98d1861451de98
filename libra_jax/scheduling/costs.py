"""What serving costs, in seconds: handed to the schedulers, so that they know no engine and no hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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

    The defaults are of the order of a 14-billion-parameter model on 80 GB GPUs; only their ratios decide anything.

    Attributes:
      step_seconds: one decode step of one request with no context, at tensor-parallel degree 1.
      request_seconds: what each further request adds to the step.
      context_seconds: what each token of context adds to the step.
      scaling: share of every further device that tensor parallelism turns into speed (1: perfect).
      prefill_tokens_per_second: at degree 1.
    """

    step_seconds: float = 0.02
    request_seconds: float = 1e-4
    context_seconds: float = 1e-7
    scaling: float = 0.7
    prefill_tokens_per_second: float = 6000.0

    def speed(self, degree: int) -> float:
        """How many times faster an instance of this degree is than one device."""
        return 1.0 + (degree - 1) * self.scaling

    def decode_seconds(self, instance: protocols.Instance, decoding: int, context_tokens: int, tokens: int) -> float:
        mean_context = context_tokens + tokens / 2
        step = (
            self.step_seconds + (decoding - 1) * self.request_seconds + decoding * mean_context * self.context_seconds
        )
        return tokens * step / self.speed(instance.tensor_parallel)

    def move_seconds(self, source: str | None, target: protocols.Instance, context_tokens: int) -> float:
        if source is None or source == target.name:
            return 0.0
        return context_tokens / (self.prefill_tokens_per_second * self.speed(target.tensor_parallel))
