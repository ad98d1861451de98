"""What the benchmark's attempts do: one turn of a fixed number of tokens, no tool."""

from __future__ import annotations

from collections.abc import Sequence

from libra_jax import protocols
from libra_jax.agents import tokenizers


class SingleTurn:
    """An environment whose attempt is one model output, whatever it says."""

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        return [protocols.Message("user", str(task.payload["prompt"]))]

    async def step(self, output: str) -> protocols.StepResult:
        return protocols.StepResult(done=True, reward=0.0)

    async def close(self) -> None: ...


def single_turn() -> SingleTurn:
    """A fresh environment."""
    return SingleTurn()


class NeverStops(tokenizers.CharacterTokenizer):
    """The character tokenizer without a stop token, so that every turn has all its tokens."""

    stop_token_ids: tuple[int, ...] = ()
