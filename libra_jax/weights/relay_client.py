"""The typed client of a weight relay. It knows protocols only, so the coordinator may import it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libra_jax import clients, protocols
from libra_jax.protocols import Relay


class RelayClient(clients.ActorClient, protocols.RelayClient):
    """A weight relay, for one life of its process. See `clients.ActorClient` for the arguments."""

    async def health(self) -> Mapping[str, float]:
        return await self._ask("weight_sync", "answer", Relay.health)

    async def listen(self, epoch: int) -> Mapping[str, Any]:
        return await self._ask("weight_sync", "open a link", Relay.listen, epoch)

    async def connect(self, child: str, epoch: int, address: Mapping[str, Any]) -> None:
        await self._ask("weight_sync", "connect a link", Relay.connect, child, epoch, address)

    async def send(self, chunk: protocols.WeightChunk, child: str) -> None:
        await self._ask("weight_sync", f"send chunk {chunk.index} to {child}", Relay.send, chunk, child)

    async def receive(self, chunk: protocols.WeightChunk) -> protocols.WeightChunk:
        return await self._ask("weight_sync", f"receive chunk {chunk.index}", Relay.receive, chunk)

    async def shutdown(self) -> None:
        await self._ask("shutdown", "shut down", Relay.shutdown)
