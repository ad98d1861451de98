"""The instances of a simulated run, those that plans add included, and what they counted."""

from __future__ import annotations

from collections.abc import Sequence

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.planning import costs
from libra_jax.simulator import engine


class Fleet:
    """All instances that a run has had, and what they counted."""

    def __init__(self, config: configuration.RunConfig, slots: Sequence[int], model: costs.Costs) -> None:
        self._config = config
        self._model = model
        self._slots = slots or config.rollout.instance_slots
        self._by_degree = configuration.slots_by_degree(config.rollout.tensor_parallel, self._slots)
        self.counters: list[engine.Counters] = []
        self.degrees: list[int] = []

    def spec(self, number: int, degree: int, start_seconds: float = 0.0) -> protocols.ActorSpec:
        """How one is made; its slots are those of config's instances, or of its degree."""
        rollout, at_first = self._config.rollout, number < len(self._slots)
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
        }
        return protocols.ActorSpec(f"engine-{number}", "libra_jax.simulator.engine:create", arguments)

    def add(self, number: int, degree: int, others: Sequence[protocols.ActorSpec]) -> protocols.ActorSpec:
        """One that a plan adds (`coordinator.instances.MakeSpec`)."""
        return self.spec(number, degree, self._config.planner.start_seconds)

    def busy_share(self, seconds: float) -> float:
        """Share of the device-seconds in which instances ran steps."""
        busy = sum(degree * count.busy_seconds for degree, count in zip(self.degrees, self.counters, strict=True))
        if not self._config.planner.period:
            return busy / (sum(self.degrees) * seconds)
        return busy / sum(
            degree * count.alive_seconds for degree, count in zip(self.degrees, self.counters, strict=True)
        )
