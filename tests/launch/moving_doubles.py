"""An engine that decodes slowly, so that much can happen during a step, and a reward that any text gets."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from libra_jax import protocols
from libra_jax.engines import fake_engine

TOKENS_PER_SECOND = 20.0


def engine(**arguments: Any) -> fake_engine.FakeEngine:
    """Its output is the faster double's: which tokens come depends on the context alone."""
    return fake_engine.create(**arguments, tokens_per_second=TOKENS_PER_SECOND)


def reward() -> Callable[[protocols.Task, str], float]:
    """Between 0.5 and 1.5, by what was said: the loss is a smooth number, fit for a curve."""
    return lambda task, text: 0.5 + zlib.crc32(text.encode()) % 1000 / 1000
