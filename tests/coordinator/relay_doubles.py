"""Hosts without bytes: relays, engines and a trainer that say on which host a chunk is; a link takes a second."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import coordinator_doubles as doubles

from libra_jax import protocols
from libra_jax.coordinator import instances, weight_sync
from libra_jax.engines import fake_engine
from libra_jax.telemetry import memory
from libra_jax.trainer_control import client
from libra_jax.weights import relay_tree

LINK_SECONDS = LOAD_SECONDS = 1.0
NBYTES = 1000
LIMITS = {"weight_sync": 30.0, "engine_start": 60.0, "first_token": 20.0, "shutdown": 5.0}

Fault = Callable[["Relay", str, protocols.WeightChunk], Awaitable[protocols.WeightChunk | None]]
"""(relay, "compare", "send" or "receive", chunk): raises, hangs, or returns what is sent instead."""


def seconds() -> float:
    return asyncio.get_running_loop().time()


async def no_fault(relay: Relay, verb: str, chunk: protocols.WeightChunk) -> None:
    return None


class Link:
    """What a relay sends, until an end of it dies."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.broken = asyncio.Event()

    async def use(self, work: Coroutine[Any, Any, Any]) -> Any:
        task, broken = asyncio.ensure_future(work), asyncio.ensure_future(self.broken.wait())
        try:
            await asyncio.wait({task, broken}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise protocols.LibraError("the link broke")
            return task.result()
        finally:
            task.cancel()
            broken.cancel()


class Relay(protocols.Relay):
    """A weight relay without bytes."""

    def __init__(self, hosts: Hosts, host: int) -> None:
        self.hosts, self.host, self.name = hosts, host, f"relay-{host}"
        self.dead = False
        self.parent = Link()
        self.children: dict[str, Link] = {}
        self.compared: dict[int, str | None] = {}
        self.made: dict[int, protocols.WeightDifference] = {}
        self.held: dict[int, str | None] = {}
        if host in hosts.unmakable:
            raise protocols.LibraError("no such host")

    def kill(self) -> None:
        self.dead = True
        for link in (self.parent, *self.children.values()):
            link.broken.set()

    def _check(self) -> None:
        if self.dead:
            raise protocols.WorkerLost(f"actor '{self.name}' is lost")

    async def health(self) -> Mapping[str, float]:
        self._check()
        return {}

    async def listen(self, generation: int) -> Mapping[str, Any]:
        self._check()
        self.parent.broken.set()
        self.parent = self.hosts.links[self.name, generation] = Link()
        return {"worker": self.name, "generation": generation}

    async def connect(self, child: str, generation: int, address: Mapping[str, Any]) -> None:
        self._check()
        assert address == {"worker": child, "generation": generation}
        self.children[child] = self.hosts.links[child, generation]

    async def compare(self, chunk: protocols.WeightChunk) -> protocols.WeightDifference | None:
        self._check()
        await self.hosts.fault(self, "compare", chunk)
        before = self.compared.get(chunk.index)
        self.compared[chunk.index] = chunk.checksum
        if before is not None and before != chunk.checksum:
            self.made[chunk.index] = protocols.WeightDifference(before, NBYTES // 100)
        return self.made.get(chunk.index)

    async def send(
        self, chunk: protocols.WeightChunk, child: str, difference: protocols.WeightDifference | None = None
    ) -> None:
        self._check()
        assert difference is None or self.made[chunk.index] == difference, "a relay sends a difference that it has"
        assert chunk.transport == {"host": self.host}, "a relay sends what lies on its host"
        link, taken = self.children[child], asyncio.get_running_loop().create_future()
        sent = await self.hosts.fault(self, "send", chunk) or chunk
        self.hosts.sent.append((self.host, child))
        if difference is not None:
            self.hosts.changes.append((child, chunk.policy_version, chunk.index))
        link.queue.put_nowait((sent, taken))
        await link.use(_result(taken))
        self._check()

    async def receive(
        self, chunk: protocols.WeightChunk, difference: protocols.WeightDifference | None = None
    ) -> protocols.WeightChunk:
        self._check()
        held = self.held.pop(chunk.index, None)
        self.made.pop(chunk.index, None)
        assert difference is None or held == difference.base, "a relay changes the chunk that it holds"
        await self.hosts.fault(self, "receive", chunk)
        came, taken = await self.parent.use(self.parent.queue.get())
        begin = seconds()
        await self.parent.use(asyncio.sleep(LINK_SECONDS))
        self._check()
        taken.set_result(None)
        self.hosts.crossed.append((self.host, came.policy_version, came.index, begin, seconds()))
        same = ("policy_version", "index", "checksum")
        if any(getattr(came, name) != getattr(chunk, name) for name in same):
            raise protocols.LibraError(f"chunk {chunk.index} is another one, or damaged")
        self.held[chunk.index] = chunk.checksum
        if difference is not None:
            self.made[chunk.index] = difference
        return dataclasses.replace(chunk, transport={"host": self.host})

    async def shutdown(self) -> None:
        self.kill()


async def _result(future: asyncio.Future[None]) -> None:
    await future


class Engine(fake_engine.FakeEngine):
    """Reads nothing of another host's; notes when it loaded what."""

    def __init__(self, hosts: Hosts, name: str, host: int) -> None:
        super().__init__(name, doubles.chatter, 4, 256, 1, 2, 20_000.0, None)
        self.hosts, self.host = hosts, host

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        assert chunk.transport == {"host": self.host}, "an engine reads what lies on its host"
        begin = seconds()
        await asyncio.sleep(LOAD_SECONDS)
        await super().update_weights(chunk)
        self.hosts.loaded.append((self.name, chunk.policy_version, chunk.index, begin, seconds()))


class Trainer(doubles.RecordingTrainer):
    """Publishes on host 0; the chunks of `frozen` are the same in every version."""

    frozen: frozenset[int] = frozenset()

    async def stage_weights(self, policy_version: int, index: int) -> protocols.WeightChunk:
        made = await super().stage_weights(policy_version, index)
        same = index in self.frozen
        checksum = f"{'frozen' if same else policy_version}.{index}"
        there = {"host": 0}
        return dataclasses.replace(
            made, nbytes=NBYTES, transport=there, checksum=checksum, frozen="frozen" if same else ""
        )


class Hosts:
    """A run's weight sync over hosts: the trainer's, number 0, and others; each has the same number of engines.

    Attributes:
      sent: (host, relay) for each chunk that a relay sent.
      changes: (relay, version, index) for each chunk of which the difference was sent to a relay.
      crossed: (host, version, index, begin, end) for each that came to a host, damaged or not.
      loaded: (engine, version, index, begin, end).
    """

    def __init__(
        self, count: int, *, chunks: int = 4, engines: int = 1, fault: Fault = no_fault, full_sync_every: int = 1
    ) -> None:
        self.fault, self.unmakable = fault, set[int]()
        self.links: dict[tuple[str, int], Link] = {}
        self.sent: list[tuple[int, str]] = []
        self.changes: list[tuple[str, int, int]] = []
        self.crossed: list[tuple[int, int, int, float, float]] = []
        self.loaded: list[tuple[str, int, int, float, float]] = []
        self.cluster, self.recorder = doubles.DirectCluster(), memory.MemoryRecorder()
        self.trainer = Trainer(0.0, chunks, "")
        rollout = {"restarts": 2, "health_seconds": 1000.0, "full_sync_every": full_sync_every}
        self.config = doubles.make_config(deadlines=LIMITS, rollout=rollout)
        processes = client.TrainerProcesses(
            doubles.Handed(self.trainer), lambda *_: protocols.ActorSpec("trainer", "", {})
        )
        self.client = client.TrainerActorClient(processes, self.config.deadlines)
        self.names = {host: [f"engine-{host}.{number}" for number in range(engines)] for host in range(count)}
        self.run = doubles.run_context(self.config, self.cluster, self.recorder)
        specs = [self._spec(name, "Engine", host, name=name) for host, names in self.names.items() for name in names]
        self.engines = instances.Instances(self.run, specs)
        relay_specs = {host: self._spec(f"relay-{host}", "Relay", host) for host in range(count)}
        self.relays = relay_tree.RelayTree(self.config, cluster=self.cluster, specs=relay_specs, recorder=self.recorder)
        self.publisher = self.make_publisher()
        self.run.events.subscribe(protocols.EngineLoaded, self._bring_weights)

    async def _bring_weights(self, event: protocols.EngineLoaded) -> None:
        await self.publisher.catch_up(self.engines.engines[event.name])

    def make_publisher(self, **further: Any) -> weight_sync.WeightSync:
        return weight_sync.WeightSync(
            self.config,
            trainer=self.client,
            engines=self.engines,
            recorder=self.recorder,
            hosts=self.relays,
            **further,
        )

    def _spec(self, actor: str, kind: str, host: int, **arguments: Any) -> protocols.ActorSpec:
        return protocols.ActorSpec(actor, f"{__name__}:{kind}", {"hosts": self, "host": host, **arguments}, host=host)

    async def start(self) -> None:
        await self.client.make()
        await self.engines.start()
        await self.relays.start([host for host in self.names if host])

    async def publish(self, version: int) -> float:
        self.trainer.state["version"] = version
        return await self.publisher.sync_weights(version)

    def relay(self, host: int) -> Relay:
        return self.cluster.actors[f"relay-{host}"]

    def versions(self) -> list[int]:
        """What each host's first engine serves."""
        return [self.engines.engines[names[0]].policy_version for names in self.names.values()]

    def came(self, host: int) -> list[tuple[int, int]]:
        """(version, index) of what came to a host, in order."""
        return [(version, index) for number, version, index, *_ in self.crossed if number == host]


def on_clock(body: Callable[[Hosts], Coroutine[Any, Any, None]], count: int, **arguments: Any) -> Hosts:
    """Runs a body on hosts whose workers are up; afterwards none is left."""

    async def main() -> Hosts:
        hosts = Hosts(count, **arguments)
        await hosts.start()
        await body(hosts)
        await hosts.run.scope.cancel_background(5.0)
        await hosts.cluster.shutdown()
        return hosts

    return doubles.run_on_clock(main())
