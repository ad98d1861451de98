"""Schedulers by the name that `config.scheduler.policy` gives them."""

from __future__ import annotations

from collections.abc import Callable

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.scheduling import least_loaded, round_robin

SCHEDULERS: dict[str, Callable[[], protocols.Scheduler]] = {
    "least_loaded": least_loaded.LeastLoaded,
    "round_robin": round_robin.RoundRobin,
}


def create(name: str) -> protocols.Scheduler:
    """A fresh scheduler.

    Raises:
      ConfigError: no scheduler has that name (the nearest is offered).
    """
    configuration.check_choice(name, tuple(SCHEDULERS), "scheduler.policy")
    return SCHEDULERS[name]()
