"""What serving costs, in seconds: handed to the schedulers, so that they know no engine and no hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from libra_jax import config as config_lib
from libra_jax import protocols

RATE_TOKENS = 256
"""Tokens over which a decode rate is taken."""

CONTEXT_BITS = 40
"""Bits of a context in the key of a rate: more than any context has."""


class Costs(Protocol):
    """Predictions for the present hardware. Pure functions: schedulers keep the results until instances change."""

    def decode_seconds(self, instance: protocols.Instance, decoding: int, context_tokens: int, tokens: int) -> float:
        """Returns the time for one request to generate `tokens` on `instance`.

        Args:
          instance: where.
          decoding: requests that decode there, this one included.
          context_tokens: its context when it starts; the others' contexts are taken to be as long.
          tokens: tokens to be generated.
        """
        ...

    def read_seconds(self, instance: protocols.Instance, tokens: int) -> float:
        """Returns the time that prefilling `tokens` adds to the steps of an instance on which others decode."""
        ...

    def move_seconds(self, source: str | None, target: protocols.Instance, context_tokens: int) -> float:
        """Returns the time to have the context's keys and values on `target`: a prefill, or a fetch in a simulation.

        Args:
          source: instance that holds them; None, or the target itself, if nothing has to move.
          target: where they are wanted.
          context_tokens: tokens of the context.
        """
        ...


class AcceleratorSpeed(NamedTuple):
    """How fast an accelerator is, where that of the coefficients is 1.

    Attributes:
      decode: speed of decoding, which memory limits.
      read: speed of prefilling, which arithmetic limits.
    """

    decode: float
    read: float


ALIKE = AcceleratorSpeed(1.0, 1.0)


@dataclass(frozen=True)
class LinearCosts:
    """Costs from a few coefficients: a step is a fixed part (weights) and a part for each request and its context.

    Attributes:
      coefficients: `scheduler.costs`, with their units.
      speeds: speeds of unlike accelerators, by the names in `rollout.accelerators`.
    """

    coefficients: config_lib.CostConfig = field(default_factory=config_lib.CostConfig)
    speeds: Mapping[str, AcceleratorSpeed] = field(default_factory=dict)

    def speed(self, degree: int) -> float:
        """Returns the speed of an instance of this degree relative to one device."""
        # Each further device adds less than a whole one, because collectives take a part of it.
        return 1.0 + (degree - 1) * self.coefficients.scaling

    def decode_seconds(self, instance: protocols.Instance, decoding: int, context_tokens: int, tokens: int) -> float:
        coefficients = self.coefficients
        mean_context = context_tokens + tokens / 2  # the context grows by a token a step
        step = (
            coefficients.step_seconds
            + (decoding - 1) * coefficients.request_seconds
            + decoding * mean_context * coefficients.context_seconds
        )
        return tokens * step / (self.speed(instance.tensor_parallel) * self._of(instance).decode)

    def read_seconds(self, instance: protocols.Instance, tokens: int) -> float:
        speed = self.speed(instance.tensor_parallel) * self._of(instance).read
        return tokens / (self.coefficients.prefill_tokens_per_second * speed)

    def move_seconds(self, source: str | None, target: protocols.Instance, context_tokens: int) -> float:
        if source is None or source == target.name:
            return 0.0
        # The target has no keys and values of the context, and computes them again.
        return self.read_seconds(target, context_tokens)

    def _of(self, instance: protocols.Instance) -> AcceleratorSpeed:
        return self.speeds.get(instance.accelerator, ALIKE)


@dataclass(eq=False)
class CostRates:
    """Seconds a token and seconds a move, asked of the costs once for each kind, number decoding and context.

    Contexts are rounded (`rounded`), so that the tables stay small.

    Attributes:
      costs: costs that are asked.
    """

    costs: Costs
    _decode: dict[protocols.Kind, dict[int, float]] = field(default_factory=dict, init=False)
    _read: dict[protocols.Kind, float] = field(default_factory=dict, init=False)
    _move: dict[tuple[protocols.Kind, int], float] = field(default_factory=dict, init=False)

    def clear(self) -> None:
        """Forgets the tables, so that recalibrated costs are asked again."""
        self._decode.clear()
        self._read.clear()
        self._move.clear()

    def rate_table(self, kind: protocols.Kind) -> dict[int, float]:
        """Returns the seconds a token that instances of this kind were asked for, by `packed` keys."""
        return self._decode.setdefault(kind, {})

    def decode(self, instance: protocols.Instance, decoding: int, context: int) -> float:
        """Returns seconds a token for one of `decoding` requests that have this rounded context each."""
        rates, key = self.rate_table(instance.kind), packed(decoding, context)
        rate = rates.get(key)
        if rate is None:
            # Over many tokens, since the context grows meanwhile and one token's time would leave that out.
            seconds = self.costs.decode_seconds(instance, decoding, context, RATE_TOKENS)
            rate = rates[key] = seconds / RATE_TOKENS
        return rate

    def read(self, instance: protocols.Instance) -> float:
        """Returns the seconds that a prefilled token adds to the steps of others."""
        rate = self._read.get(instance.kind)
        if rate is None:
            rate = self._read[instance.kind] = self.costs.read_seconds(instance, RATE_TOKENS) / RATE_TOKENS
        return rate

    def move(self, source: str, target: protocols.Instance, context: int) -> float:
        """Returns seconds to bring a rounded context there; 0 if the instance holds it already, or no instance does."""
        if not source or source == target.name:
            return 0.0
        key = target.kind, context  # where it comes from does not change the price
        seconds = self._move.get(key)
        if seconds is None:
            seconds = self._move[key] = self.costs.move_seconds(source, target, context)
        return seconds


def packed(decoding: int, context: int) -> int:
    """Returns the key of a number decoding and a rounded context: one number is found faster than a pair."""
    return decoding << CONTEXT_BITS | context


def rounded(context_tokens: int) -> int:
    """Returns the context rounded down to three significant bits."""
    shift = context_tokens.bit_length() - 3
    return context_tokens >> shift << shift if shift > 0 else context_tokens
