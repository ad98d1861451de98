"""A fake engine that hands keys and values over, as engines with `rollout.kv_transfer` do."""

from __future__ import annotations

import asyncio
from typing import Any

from libra_jax import protocols
from libra_jax.engines import fake_engine

ASKED: list[tuple[str, protocols.GenerationRequest]] = []
"""(engine, request) of every generation, in order."""


class HandingEngine:
    """Forwards to a fake engine, and writes down what it is asked for."""

    def __init__(self, engine: fake_engine.FakeEngine, refuses: bool) -> None:
        self._engine = engine
        self._refuses = refuses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, request: protocols.GenerationRequest) -> Any:
        ASKED.append((self._engine.name, request))
        return self._engine.generate(request)

    async def hand_over(self, request: protocols.GenerationRequest) -> dict[str, Any]:
        await asyncio.sleep(0.01)
        if self._refuses:
            raise protocols.LibraError(f"engine {self._engine.name} keeps nothing")
        return {"engine": self._engine.name, "tokens": len(request.token_ids)}


def create(refuses: bool = False, **arguments: Any) -> HandingEngine:
    return HandingEngine(fake_engine.create(**arguments), refuses)
