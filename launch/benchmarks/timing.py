"""Times two sides in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable


def alternate(rounds: int, first: Callable[[], None], second: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Returns the seconds of each call, the two sides in turn; one call of each goes before and is not counted."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for side, work in enumerate((first, second)):
            start = time.perf_counter()
            work()
            if turn:
                seconds[side].append(time.perf_counter() - start)
    return seconds


async def alternate_async(
    rounds: int, first: Callable[[], Awaitable[None]], second: Callable[[], Awaitable[None]]
) -> tuple[list[float], list[float]]:
    """Does the same as `alternate`, for coroutine functions."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for side, work in enumerate((first, second)):
            start = time.perf_counter()
            await work()
            if turn:
                seconds[side].append(time.perf_counter() - start)
    return seconds


def median_ratio(numerator: list[float], denominator: list[float]) -> float:
    """Returns the median of the pairwise ratios, so that slow drift cancels."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))
