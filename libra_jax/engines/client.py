"""The typed client of a rollout engine. It knows protocols only, so the coordinator may import it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from libra_jax import clients, protocols
from libra_jax import config as configuration
from libra_jax.protocols import RolloutEngine


class EngineClient(clients.ActorClient, protocols.EngineClient):
    """A rollout engine, for one life of its processes. See `clients.ActorClient` for the arguments."""

    def __init__(
        self, cluster: protocols.Cluster, spec: protocols.ActorSpec, limits: configuration.DeadlineConfig
    ) -> None:
        super().__init__(cluster, spec, limits, kind="engine")

    async def start(self) -> protocols.EngineInfo:
        return await self._ask("engine_start", "start", RolloutEngine.start)

    def generate(self, request: protocols.GenerationRequest) -> AsyncGenerator[protocols.TokenDelta, None]:
        return self._actor.stream(RolloutEngine.generate, request)

    async def hand_over(self, request: protocols.GenerationRequest) -> Mapping[str, Any]:
        return await self._ask("first_token", "hand a request over", RolloutEngine.hand_over, request)

    async def pause(self) -> None:
        await self._ask("weight_sync", "pause", RolloutEngine.pause)

    async def resume(self) -> None:
        await self._ask("weight_sync", "resume", RolloutEngine.resume)

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        await self._ask("weight_sync", "open its weight transport", RolloutEngine.init_weight_transfer, transport)

    async def start_weight_update(self, policy_version: int) -> None:
        await self._ask("weight_sync", "prepare for new weights", RolloutEngine.start_weight_update, policy_version)

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        await self._ask("weight_sync", f"load weight chunk {chunk.index}", RolloutEngine.update_weights, chunk)

    async def finish_weight_update(self, policy_version: int) -> None:
        await self._ask("weight_sync", "finish its weight update", RolloutEngine.finish_weight_update, policy_version)

    async def sleep(self) -> None:
        await self._ask("transition", "sleep", RolloutEngine.sleep)

    async def wake(self) -> None:
        await self._ask("transition", "wake up", RolloutEngine.wake)

    async def health(self) -> Mapping[str, float]:
        return await self._ask("first_token", "answer a health check", RolloutEngine.health)

    async def shutdown(self) -> None:
        await self._ask("shutdown", "shut down", RolloutEngine.shutdown)
