"""Seeds of deterministic simulations, in batches that are a test each.

LIBRA_JAX_SIMULATIONS sets how many are tried (default 300); LIBRA_JAX_SIMULATION_SEED repeats one alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any


def batches(size: int) -> list[range]:
    """All seeds, so many at a time."""
    count, only = int(os.environ.get("LIBRA_JAX_SIMULATIONS", "300")), os.environ.get("LIBRA_JAX_SIMULATION_SEED")
    if only:
        return [range(int(only), int(only) + 1)]
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def each(seeds: Iterable[int], check: Callable[[int], Any], told: Callable[[int], Any] = lambda seed: "") -> None:
    """Checks one after the other; what fails names its seed, and what else is told of it."""
    for seed in seeds:
        try:
            check(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}: {told(seed)}")
            raise
