"""Checks of a setting's value: each refusal names the field and what it may be."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

from libra_jax.protocols import ConfigError

DEGREES = (1, 2, 4, 8)
"""Tensor-parallel degrees of an instance."""


def check(condition: bool, field_name: str, problem: str) -> None:
    """Raises ConfigError naming the field unless `condition` holds."""
    if not condition:
        raise ConfigError(f"config.{field_name}: {problem}")


def either(values: Iterable[object]) -> str:
    """Returns values as a choice: "1, 2 or 4"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


MOST_OFFERED = 6
"""Largest number of divisors that a refusal offers."""


def divisors(number: int, near: int) -> str:
    """Returns the divisors of a positive number as a choice; of many, the ones nearest to `near`."""
    every = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return either(sorted(sorted(every, key=lambda divisor: abs(divisor - near))[:MOST_OFFERED]))


def multiples(step: int, near: int) -> str:
    """Returns the positive multiples of `step` below and above a number as a choice."""
    below = near // step * step
    return either(number for number in (below, below + step) if number)


ALIASES = {"gpu": "cuda", "fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}
"""What others call a choice, for the hint."""


def check_choice(value: str, choices: tuple[str, ...], field_name: str) -> None:
    """Raises ConfigError unless `value` is one of `choices`, offering the nearest."""
    if value not in choices:
        alias = ALIASES.get(value.lower())
        near = [alias] if alias in choices else difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"config.{field_name}: {value!r} is not one of {', '.join(choices)}{hint}")


LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""Sampling temperatures that vLLM 0.32 takes as they are (vllm/sampling_params.py). Below, it samples at the least one
with a log line, while the trainer would score at what was asked for; above, it refuses the request."""


def check_cores(cores: tuple[int, ...], field_name: str) -> None:
    """Raises ConfigError unless this process may run on each of the CPU cores."""
    here = sorted(os.sched_getaffinity(0))
    for core in cores:
        check(core in here, field_name, f"there is no core {core} for this process; it has {', '.join(map(str, here))}")
