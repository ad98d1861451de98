"""Several adapters over one copy of the frozen weights, trained in turn by one learner.

All tenants have adapters of one rank and of the same projections, so one set of compiled programs serves them. No
program consumes the frozen weights, so the tenants' states share their arrays.

Thread-safety: none; one thread makes and uses the tenants, and nobody else uses the learner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax import protocols
from libra_jax.data import packing
from libra_jax.training import learner as learner_lib
from libra_jax.training import state as state_lib


class Tenants:
    """Holds the states of tenants by name, each with an adapter, optimizer moments and a step number of its own.

    Args:
      learner: learner of a model with an adapter, in a state whose frozen weights the tenants share.

    Raises:
      LibraError: the learner's model has no adapter, or the learner holds no state.
    """

    def __init__(self, learner: learner_lib.Learner) -> None:
        self._base = learner.train_state().base
        if self._base is None:
            raise protocols.LibraError("tenants share frozen weights: set model.lora.rank above 0.")
        self._learner = learner
        self._states: dict[str, state_lib.TrainState] = {}

    def names(self) -> tuple[str, ...]:
        """Returns the names of the tenants, in the order in which they came."""
        return tuple(self._states)

    def add(self, name: str, seed: int, adapter: Any = None) -> None:
        """Adds a tenant.

        Args:
          seed: seed of its random key, and of its adapter if none is given.
          adapter: leaves of its adapter on the learner's mesh, which the tenant takes over; None draws one.

        Raises:
          LibraError: a tenant of this name exists.
        """
        if name in self._states:
            raise protocols.LibraError(f"there is a tenant {name!r} already: remove it first, or choose another name.")
        self._learner.begin(adapter, self._base, seed)
        self._states[name] = self._learner.train_state()

    def remove(self, name: str) -> state_lib.TrainState:
        """Removes a tenant and returns its state."""
        self.state(name)
        return self._states.pop(name)

    def state(self, name: str) -> state_lib.TrainState:
        """Returns the state of a tenant. The tenant's next update consumes all of it but the frozen weights.

        Raises:
          LibraError: there is no such tenant.
        """
        if name not in self._states:
            raise protocols.LibraError(f"there is no tenant {name!r}; the tenants are {', '.join(self._states)}.")
        return self._states[name]

    def update(
        self,
        name: str,
        loss: str,
        packed: packing.Packed,
        learning_rate: float,
        extras: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, float]:
        """Takes one step of a tenant, and returns its metrics. See `Learner.update`.

        Raises:
          LibraError: there is no such tenant, or the step failed.
        """
        self._learner.state = self.state(name)
        try:
            return self._learner.update(loss, packed, learning_rate, extras)
        finally:
            self._states[name] = dataclasses.replace(self._learner.train_state(), base=self._base)
