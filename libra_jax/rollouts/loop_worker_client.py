"""The typed client of a loop worker. Commands and events travel by the worker's channel, if it has one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rollouts import channel
from libra_jax.utils import deadlines, typed_clients


class LoopWorkerClient(typed_clients.ActorClient):
    """A loop worker, for one life of its process. See `typed_clients.ActorClient` for the arguments."""

    def __init__(
        self, cluster: protocols.Cluster, spec: protocols.ActorSpec, limits: config_lib.DeadlineConfig
    ) -> None:
        super().__init__(cluster, spec, limits, kind="loop worker")
        self._connection: channel.Connection | None = None

    start = typed_clients.ClientMethod("engine_start", "start", protocols.LoopWorker.start)
    health = typed_clients.ClientMethod("first_token", "answer a health check", protocols.LoopWorker.health)
    _listen = typed_clients.ClientMethod("first_token", "open its channel", protocols.LoopWorker.listen)
    _tell = typed_clients.ClientMethod("first_token", "take commands", protocols.LoopWorker.tell)

    async def connect(self) -> None:
        """Opens the channel, once the worker has started."""
        address = await self._listen()
        if address is not None:
            connecting = channel.connect(address)
            self._connection = await deadlines.limited(
                self._limits, "first_token", connecting, f"The connection to {self._label}"
            )

    async def tell(self, commands: Sequence[protocols.WorkerCommand]) -> None:
        """Sends commands, after all earlier ones."""
        if self._connection is None:
            await self._tell(commands)
            return
        self._connection.send(commands)
        if not self._connection.backlog:
            return
        sending = self._connection.drain()
        try:
            await deadlines.limited(self._limits, "first_token", sending, f"{self._subject}, asked to take commands,")
        except OSError as error:
            raise protocols.WorkerLost(f"the connection to {self._label} broke ({error})") from error

    async def events(self) -> AsyncGenerator[Sequence[protocols.WorkerEvent], None]:
        """Yields the events, in order. Raises WorkerLost when the worker is gone."""
        if self._connection is None:
            async with contextlib.aclosing(self._actor.stream(protocols.LoopWorker.events)) as events:
                async for batch in events:
                    yield batch
        else:
            async for batch in self._connection.messages():
                yield batch
        raise protocols.WorkerLost(f"{self._label} sends no more events")

    def close(self) -> None:
        """Closes the channel. Idempotent."""
        if self._connection is not None:
            self._connection.close()
