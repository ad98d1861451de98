"""Costs of decoding, reading and moving a request, computed from a cost model as a scheduler asks for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from libra_jax import protocols
from libra_jax.planning.costs import costs


@dataclass(frozen=True)
class SchedulingCosts:
    """Costs for a scheduler (`scheduling.costs.Costs`), computed from a cost model.

    Attributes:
      transfer: allows to move key-value caches between instances; without it a moved request is prefilled again.
      models_by_accelerator: cost models of instances on other accelerators, by their sheets' names.
    """

    model: costs.Costs
    transfer: bool = False
    models_by_accelerator: Mapping[str, costs.Costs] = dataclasses.field(default_factory=dict)

    def decode_seconds(self, instance: protocols.Instance, decoding: int, context_tokens: int, tokens: int) -> float:
        """Returns the seconds in which one request of `context_tokens` gets `tokens`, among `decoding` similar ones."""
        degree = instance.tensor_parallel
        context = decoding * (context_tokens + tokens / 2)  # contexts grow by a token a step
        return tokens * self._model_of(instance).step_seconds(degree, max(1, decoding), context)

    def read_seconds(self, instance: protocols.Instance, tokens: int) -> float:
        """Returns the seconds that prefilling `tokens` adds to the steps of an instance on which others decode."""
        return tokens * self._model_of(instance).prefill_terms(instance.tensor_parallel).new

    def move_seconds(self, source: str | None, target: protocols.Instance, context_tokens: int) -> float:
        """Returns the seconds of bringing a request's context to `target`; 0 if the context is already there."""
        if source is None or source == target.name:
            return 0.0
        model = self._model_of(target)
        again = model.prefill_seconds(target.tensor_parallel, context_tokens)
        if not self.transfer:
            return again
        return min(again, model.transfer_seconds(target.tensor_parallel, context_tokens))

    def _model_of(self, instance: protocols.Instance) -> costs.Costs:
        return self.models_by_accelerator.get(instance.accelerator, self.model)
