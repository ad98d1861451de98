"""What benchmarks share: engines, an environment of one turn, and the timing of two sides in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import tokenizers

Figures = Mapping[str, float | str]
"""Measured values by name."""


def engine_spec(name: str, config: config_lib.RunConfig, model: Mapping[str, Any], **more: Any) -> protocols.ActorSpec:
    """Returns the spec of a vLLM engine of degree 1.

    Args:
      name: name of the instance.
      config: the run's configuration.
      model: content of the model's config.json.
      more: further arguments of `engines.vllm_engine.create`.
    """
    rollout = config_lib.to_dict(config.rollout)
    arguments = {"name": name, "model_config": model, "rollout": rollout, "tensor_parallel": 1, "seed": 0, **more}
    return protocols.ActorSpec(name, "libra_jax.engines.vllm_engine:create", arguments)


class OneTurn:
    """An environment that ends after one model output."""

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        return [protocols.Message("user", str(task.payload["prompt"]))]

    async def step(self, output: str) -> protocols.StepResult:
        return protocols.StepResult(done=True, reward=0.0)

    async def close(self) -> None: ...


class NeverStops(tokenizers.CharacterTokenizer):
    """The character tokenizer without a stop token, so that every turn has all its tokens."""

    stop_token_ids: tuple[int, ...] = ()


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
