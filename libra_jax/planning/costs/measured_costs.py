"""Measured costs of engines, training steps and weight updates, with the methods of `costs.CostModel`.

`planning.costs.calibration` fits them to what a run measured. Times are seconds, lengths tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from libra_jax import protocols
from libra_jax.models import rows
from libra_jax.planning.costs import costs


@dataclass(frozen=True)
class EngineCosts:
    """Costs of an engine of one tensor-parallel degree, in seconds.

    Attributes:
      step: fixed time of a step: launching it, reading the weights.
      request: time that each decoding request adds to a step.
      context: time that each token of decoding context adds to a step: reading its keys and values.
      prefill_token: time of each prefilled token that is new to the instance.
      cached_token: time of each token of a prefilled context that the instance has seen.
      prefill_request: time of each prefilled request.
      wait: remaining time of each stream; not a cost of the engine, and not used by `Calibration`.
    """

    step: float
    request: float
    context: float
    prefill_token: float
    cached_token: float
    prefill_request: float
    wait: float = 0.0

    def scaled(self, factor: float) -> EngineCosts:
        """Returns an engine that takes `factor` times as long for everything."""
        return EngineCosts(**{name: factor * value for name, value in vars(self).items()})


@dataclass(frozen=True)
class TrainCosts:
    """Costs of a training step, in seconds.

    Attributes:
      step: fixed time of a step.
      column: time of each column of the computed rows, padding included.
    """

    step: float
    column: float


@dataclass(frozen=True)
class UpdateCosts:
    """Costs of a weight update, in seconds.

    Attributes:
      gather: time in which the trainer puts a snapshot together, and the remaining time of an update.
      load: time in which an instance takes the snapshot, from its pause to its resumption.
    """

    gather: float
    load: float


@dataclass(frozen=True)
class MeasuredEngines(costs.RolloutTimes):
    """Measured costs of rollout, with the methods of `costs.CostModel` and the same meaning.

    Attributes:
      engines: costs by tensor-parallel degree.
      chunk_tokens: prefill tokens that share one engine step.
      cache_tokens: tokens that the cache of an instance of each degree holds. A recording does not contain them. The
        cache of a missing degree never fills, so nothing is pre-empted there.
    """

    engines: Mapping[int, EngineCosts]
    chunk_tokens: int = 2048
    cache_tokens: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def scaled(self, factors: Mapping[int, float]) -> Self:
        """Returns the same costs with engines that take `factors[degree]` times as long."""
        engines = {degree: engine.scaled(factors.get(degree, 1.0)) for degree, engine in self.engines.items()}
        return dataclasses.replace(self, engines=engines)

    def kv_tokens(self, degree: int) -> int:
        """Returns the tokens that an instance's cache holds; see `cache_tokens`."""
        # 2**40: no limit.
        return self.cache_tokens.get(degree, 2**40)

    def context_seconds(self, degree: int) -> float:
        """Returns the seconds that each token of decoding context adds to a step."""
        return self._engine(degree).context

    def fixed_seconds(self, degree: int, decoding: int, prefill: float = 0.0) -> float:
        """Returns the seconds of one step of `decoding` requests and `prefill` new tokens, apart from contexts."""
        engine = self._engine(degree)
        return engine.step + engine.request * decoding + engine.prefill_token * prefill

    def attention_seconds(self, degree: int, new: int, cached: int) -> float:
        """Returns the additional seconds of prefilling one request behind `cached` tokens."""
        engine = self._engine(degree)
        return engine.prefill_request + engine.cached_token * cached

    def prefill_terms(self, degree: int) -> costs.PrefillTerms:
        """Returns the seconds that prefilling adds to steps in which others decode."""
        engine = self._engine(degree)
        return costs.PrefillTerms(engine.prefill_token, engine.cached_token, 0.0, engine.prefill_request)

    def _engine(self, degree: int) -> EngineCosts:
        try:
            return self.engines[degree]
        except KeyError:
            raise protocols.ConfigError(
                f"config.rollout.tensor_parallel: no instance of degree {degree} was measured, only of "
                f"{', '.join(map(str, sorted(self.engines)))}"
            ) from None


@dataclass(frozen=True, kw_only=True)
class Calibration(MeasuredEngines):
    """All measured costs, with the methods of `costs.CostModel` and the same meaning.

    Attributes:
      train: costs of the trainer, with the devices that it had.
      update: costs of a weight update.
      rows: rows of the trainer.
      parameters: parameters of the model; no cost depends on them.
      sync_bytes: bytes of a weight sync; no cost depends on them.
    """

    train: TrainCosts
    update: UpdateCosts
    rows: rows.RowShape
    parameters: int = 0
    sync_bytes: int = 0

    def train_seconds(self, lengths: Sequence[int], devices: int) -> float:
        """Returns the seconds of a training step on sequences of these lengths; `devices` must be the measured ones."""
        return self.train.step + self.train.column * rows.processed_columns(lengths, self.rows)

    def gather_seconds(self, devices: int) -> float:
        """Returns the seconds in which the trainer puts a snapshot together."""
        return self.update.gather

    def load_seconds(self, degree: int) -> float:
        """Returns the seconds in which an instance receives a snapshot and puts it in place."""
        return self.update.load

    def transfer_seconds(self, degree: int, context: int) -> float:
        """Returns the seconds of prefilling a moved request again, because no transfer was measured."""
        return self.prefill_seconds(degree, context)
