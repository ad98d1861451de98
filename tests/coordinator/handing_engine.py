"""A fake engine that hands keys and values over, as engines with `rollout.kv_transfer` do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from libra_jax import protocols
from libra_jax.engines import fake_engine

ASKED: list[tuple[str, protocols.GenerationRequest]] = []
"""(engine, request) of every generation, in order."""


class HandingEngine(fake_engine.FakeEngine):
    """A fake engine that writes down its requests and hands over keys and values, or refuses to."""

    refuses = False

    def generate(self, request: protocols.GenerationRequest) -> AsyncIterator[protocols.TokenDelta]:
        ASKED.append((self.name, request))
        return super().generate(request)

    async def hand_over(self, request: protocols.GenerationRequest) -> dict[str, Any]:
        await asyncio.sleep(0.01)
        if self.refuses:
            raise protocols.LibraError(f"engine {self.name} keeps nothing")
        return {"engine": self.name, "tokens": len(request.token_ids)}


def create(refuses: bool = False, **arguments: Any) -> HandingEngine:
    made = fake_engine.create(**arguments, kind=HandingEngine)
    assert isinstance(made, HandingEngine)
    made.refuses = refuses
    return made
