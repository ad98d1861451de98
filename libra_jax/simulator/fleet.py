"""The instances of a simulated run, including those that plans add, and their counters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.planning import costs
from libra_jax.simulator import engine, replica

REPLICA_BYTES = 6
"""Bytes of each parameter on a hybrid worker's training side: its synced value, and a gradient sum in float32."""


class Fleet:
    """All instances that a run has had, and their counters."""

    def __init__(
        self, config: configuration.RunConfig, slots: Sequence[int], model: costs.Costs, warm_seconds: float = 0.0
    ) -> None:
        self._warm_seconds = warm_seconds
        self._config = config
        self._model = model
        self._slots = slots or config.rollout.instance_slots
        self._by_degree = configuration.slots_by_degree(config.rollout.tensor_parallel, self._slots)
        self.counters: list[engine.Counters] = []
        self.degrees: list[int] = []

    def spec(self, number: int, degree: int, start_seconds: float = 0.0) -> protocols.ActorSpec:
        """Returns the spec of an instance; its slots are those of the config's instance, or of its degree."""
        rollout, at_first = self._config.rollout, number < len(self._slots)
        # Counters are kept here, because an engine's restarts make new engines.
        self.counters.append(engine.Counters())
        self.degrees.append(degree)
        arguments = {
            "name": f"engine-{number}",
            "degree": degree,
            "slots": self._slots[number] if at_first else self._by_degree.get(degree, rollout.slots),
            "max_context": rollout.max_context,
            "stream_interval": rollout.stream_interval,
            "model": self._model,
            "counters": self.counters[-1],
            "start_seconds": start_seconds,
            "wake_seconds": self._config.planner.start_seconds,
        }
        return protocols.ActorSpec(f"engine-{number}", "libra_jax.simulator.engine:create", arguments)

    def replica(
        self,
        engine_spec: protocols.ActorSpec,
        channels: replica.Channels,
        train_seconds: Callable[[int, Sequence[int]], float],
    ) -> protocols.ActorSpec:
        """Returns the spec of a hybrid worker's training side.

        Args:
          engine_spec: spec of its rollout side.
          channels: gradient channels to the trainer.
          train_seconds: (devices, sequence lengths) to training seconds.

        Raises:
          ConfigError: its devices do not hold the parameters and gradient sums.
        """
        degree, member = engine_spec.arguments["degree"], engine_spec.name
        self._check_memory(degree)
        arguments = {
            "member": member,
            "devices": degree,
            "model": self._model,
            "channels": channels,
            "train_seconds": functools.partial(train_seconds, degree),
            "warm_seconds": self._warm_seconds,
            "masks": self._config.task.masks,
        }
        return protocols.ActorSpec(f"replica-{member}", "libra_jax.simulator.replica:create", arguments)

    def _check_memory(self, degree: int) -> None:
        if not isinstance(self._model, costs.CostModel):
            return
        need = REPLICA_BYTES * self._model.parameters / degree
        room = self._model.sheet.memory_bytes * self._model.coefficients.memory_fraction
        if need > room:
            raise protocols.ConfigError(
                f"config.elastic.hybrid: a replica on {degree} {self._model.sheet.name} needs {need / 1e9:.0f} GB a "
                f"device for parameters and gradient sums, and has {room / 1e9:.0f}; make wider instances hybrid"
            )

    def add(self, number: int, degree: int, others: Sequence[protocols.ActorSpec]) -> protocols.ActorSpec:
        """Returns the spec of an instance that a plan adds (`coordinator.instances.MakeSpec`)."""
        return self.spec(number, degree, self._config.planner.start_seconds)

    def busy_share(self, seconds: float) -> float:
        """Returns the share of the device-seconds in which instances ran steps."""
        busy = sum(degree * count.busy_seconds for degree, count in zip(self.degrees, self.counters, strict=True))
        # A fixed layout counts all devices for the whole run; a changing layout counts each instance while it lives.
        if not self._config.planner.period and not self._config.elastic.hybrid:
            return busy / (sum(self.degrees) * seconds)
        return busy / sum(
            degree * count.alive_seconds for degree, count in zip(self.degrees, self.counters, strict=True)
        )
