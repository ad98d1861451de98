"""The relays of a run: how published weights come to hosts other than the one of the trainer's first process.

They form a tree whose root reads the trainer's memory, and every other one of which receives each chunk once, from
the one above it, and passes it on to at most `FAN_OUT` below. The trainer's host so sends `FAN_OUT` copies however many
hosts there are, and the last host has a chunk after as many hops as the tree is deep; chunks follow each other, so
that a version of S bytes in b chunks takes about FAN_OUT x S / bandwidth x (1 + depth / b). It costs the coordinator
two calls a chunk and host, beside the engines' own: with doubles of 1,280 hosts 0.5 ms of its CPU in all, to which
come Ray's for each call. Where hosts are so many, larger chunks (`rollout.bucket_mib`) make up for it.

A chunk that does not come as it should, because the one above is gone or slow or it arrived damaged, is asked for once
more, from the root over a new link. A relay to which it does not come then either, or not within `deadlines.publish`,
is given up, and made again when its host next needs weights; whoever waits for its copy learns why, and the others go
on. Each host sees to its own relay: one that is made anew, on a host that takes a lost one's place perhaps, is in
nobody's way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from libra_jax import config as configuration
from libra_jax import deadlines, protocols

FAN_OUT = 2
"""Relays, at most, to which one passes a chunk on."""

ANSWER_SECONDS = 15.0
"""For a relay to say that it is there, where nobody waits for what it brings."""

MAKE_SECONDS = 60.0
"""For a relay to be made anew, where a replica waits for what it brings, and no engine."""

T = TypeVar("T")

Chunks = Sequence["asyncio.Future[protocols.WeightChunk]"]
"""The chunks of a version, in order, as they come."""


def expected(count: int) -> list[asyncio.Future[protocols.WeightChunk]]:
    """Chunks that have not come yet."""
    return [asyncio.get_running_loop().create_future() for _ in range(count)]


async def came(awaited: asyncio.Future[T]) -> T:
    """Awaits a chunk, or what several wait for; whoever is cancelled in this leaves it to come for others."""
    await asyncio.wait({awaited})
    return awaited.result()


@dataclass
class Relay:
    """The relay of one host, over all its processes.

    Attributes:
      spec: how its actor is made.
      host: its number among the run's.
      proxy: the actor, a `protocols.Relay`; None while there is none.
      life: counts its processes.
      epoch: counts the links over which it received.
      link: the host that it receives from, and the life of the relay there; None while it has no link.
      kept: the chunks that lie on its host, by number, with the checksum of each as published.
      making: held while its process is looked after.
    """

    spec: protocols.ActorSpec
    host: int
    proxy: Any = None
    life: int = 0
    epoch: int = 0
    link: tuple[int, int] | None = None
    kept: dict[int, protocols.WeightChunk] = field(default_factory=dict)
    making: asyncio.Lock = field(default_factory=asyncio.Lock)


class RelayTree:
    """All relays of a run. Made inside the event loop it serves; one version, or one host, at a time.

    Args:
      config: the run's configuration (`deadlines`).
      cluster: makes and ends the actors.
      specs: host to how its relay is made; the lowest number is the host of the trainer's first process.
      recorder: gets a span for each host that was given a version, on the track `weights`.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        cluster: protocols.Cluster,
        specs: Mapping[int, protocols.ActorSpec],
        recorder: protocols.Recorder,
    ) -> None:
        self._limits = config.deadlines
        self._cluster = cluster
        self._recorder = recorder
        self._relays = {host: Relay(spec, host) for host, spec in specs.items()}
        self._root = self._relays[min(specs)]

    def serve(self, host: int | None) -> bool:
        """Whether workers of this host read a relay's copy, and not the trainer's memory."""
        return host is not None and host != self._root.host

    async def start(self, hosts: Collection[int]) -> None:
        """Makes the relays that these hosts need, so that the first version finds them; what fails is tried then again.

        Raises:
          ConfigError: one cannot be made at all.
        """
        wanted = [self._relays[host] for host in sorted(hosts)]
        if wanted:
            made = await deadlines.together(*map(self._made, [self._root, *wanted]))
            for error in made:
                if isinstance(error, protocols.ConfigError):
                    raise error

    async def ready(self, host: int | None) -> protocols.LibraError | None:
        """Sees to it that a host's relay is there, before anybody waits for what it brings; returns why it is not."""
        return await self._made(self._relays[host]) if host is not None and self.serve(host) else None

    async def pass_on(
        self, staged: Chunks, copies: Mapping[int, Chunks], needed: Collection[int], lent: Collection[int] = ()
    ) -> None:
        """Gives hosts a version; `copies` come as they do, or all with the error for which their host is given up.

        Args:
          staged: its chunks on the trainer's host, as they come.
          copies: for each host, its chunks there; none has come yet.
          needed: hosts that have engines to be given the version. Others get it if their relay is there: one that is
            not, because its host is being replaced, say, is made when an engine of its host comes back (`ready`).
          lent: hosts that have engines asleep, whose devices train: their relays are made, too, where that is quick.
        """
        begin = asyncio.get_running_loop().time()
        await self._made(self._root)  # if it cannot be, whoever fetches from it learns why
        hosts = [self._relays[host] for host in sorted(copies)]
        standing = [relay for relay in hosts if relay.proxy is not None]
        above = {
            relay.host: self._root if place < FAN_OUT else standing[place // FAN_OUT - 1]
            for place, relay in enumerate(standing)
        }
        answering = {
            relay.host: asyncio.ensure_future(self._answers(relay, patient=relay.host in {*needed, *lent}))
            for relay in hosts
        }

        async def give(relay: Relay) -> None:
            error = await came(answering[relay.host])
            if error is not None and relay.host in needed:
                error = await self._made(relay)
            elif error is not None and relay.host in lent:
                error = await self._made_soon(relay)
            if error is not None:
                _fail(copies[relay.host], error)
                return
            parent = above.get(relay.host, self._root)
            if parent is not self._root and await came(answering[parent.host]) is not None:
                parent = self._root  # whoever is made anew is waited for by its own host alone
            if relay.link != (parent.host, parent.life):
                await self._try_to_connect(parent, relay)
            await self._supply(relay, staged, copies, begin)

        try:
            await deadlines.together(*map(give, hosts))
        finally:
            for answer in answering.values():
                deadlines.abandon(answer)

    async def _supply(self, relay: Relay, staged: Chunks, copies: Mapping[int, Chunks], begin: float) -> None:
        arrived = 0
        for number, chunk in enumerate(staged):
            source = await came(chunk)
            try:
                held = relay.kept.get(number)
                if held is None or held.checksum is None or not _same(held, source):
                    held = await self._fetch(relay, source, copies)
                    arrived += held.nbytes
            except protocols.LibraError as error:
                self._give_up(relay, error)
                _fail(copies[relay.host], error)
                return
            copies[relay.host][number].set_result(held)
        end = asyncio.get_running_loop().time()
        told = {"policy_version": source.policy_version, "bytes": arrived}
        self._recorder.span("weights", f"copy to host {relay.host}", begin, end, told)
        self._recorder.status(relay.spec.name, f"keeps version {source.policy_version}")

    async def _fetch(
        self, relay: Relay, chunk: protocols.WeightChunk, copies: Mapping[int, Chunks]
    ) -> protocols.WeightChunk:
        """A chunk comes to a host: from the relay above once that has it, else from the root."""
        above, source = self._root, chunk
        if relay.link is not None and relay.link[0] != self._root.host:
            try:
                source = await came(copies[relay.link[0]][chunk.index])
                above = self._relays[relay.link[0]]
            except protocols.LibraError:
                relay.link = None  # that host is given up
        what = f"{relay.spec.name}, asked to bring chunk {chunk.index} to host {relay.host},"
        work = self._fetch_from(above, relay, source, chunk)
        return await deadlines.within(self._limits.publish, work, what, "publish")

    async def _fetch_from(
        self, above: Relay, relay: Relay, source: protocols.WeightChunk, chunk: protocols.WeightChunk
    ) -> protocols.WeightChunk:
        try:
            if relay.link != (above.host, above.life):
                raise protocols.WorkerLost(f"{relay.spec.name} has no link to {above.spec.name}")
            return await self._transfer(above, relay, source)
        except protocols.LibraError as error:
            self._recorder.note(
                f"Chunk {chunk.index} of version {chunk.policy_version} did not come to host {relay.host} from host "
                f"{above.host} ({error}); it is asked for again."
            )
        # A link that has failed is used no more. The root may be gone, too: whoever finds that first makes it again.
        if (error_of_root := await self._made(self._root)) is not None:
            raise error_of_root
        await self._connect(self._root, relay)
        return await self._transfer(self._root, relay, chunk)

    async def _transfer(self, above: Relay, relay: Relay, source: protocols.WeightChunk) -> protocols.WeightChunk:
        relay.kept.pop(source.index, None)  # it is written over
        if above.proxy is None or relay.proxy is None:
            raise protocols.WorkerLost(f"{(relay if relay.proxy is None else above).spec.name} has been given up")
        work = above.proxy.send(source, relay.spec.name), relay.proxy.receive(source)
        _, copy = await deadlines.together(*work)
        relay.kept[source.index] = copy
        return copy

    async def _try_to_connect(self, above: Relay, relay: Relay) -> None:
        """One that stays without a link is given another when the first chunk is due."""
        try:
            await self._connect(above, relay)
        except protocols.LibraError as error:
            self._recorder.note(f"{relay.spec.name} cannot receive from {above.spec.name}: {error}")

    async def _connect(self, above: Relay, relay: Relay) -> None:
        relay.link = None
        relay.epoch += 1
        for end in (above, relay):
            if end.proxy is None:
                raise protocols.WorkerLost(f"{end.spec.name} has been given up")
        address = await self._ask(relay, relay.proxy.listen(relay.epoch), "open a link")
        await self._ask(above, above.proxy.connect(relay.spec.name, relay.epoch, address), "connect a link")
        relay.link = above.host, above.life

    async def _made(self, relay: Relay) -> protocols.LibraError | None:
        """Sees to it that a relay's process is there; returns why it is not."""
        async with relay.making:
            try:
                if await self._answers(relay, patient=True) is not None:
                    await self._make(relay)
            except protocols.ConfigError as error:  # the cluster does not hold the run, which ends for it and says so
                return error
            except protocols.LibraError as error:
                self._recorder.note(f"{relay.spec.name} is not there, and is tried again when it is needed: {error}")
                return error
        return None

    async def _made_soon(self, relay: Relay) -> protocols.LibraError | None:
        try:
            return await asyncio.wait_for(self._made(relay), MAKE_SECONDS)
        except TimeoutError:
            return protocols.WorkerLost(f"{relay.spec.name} could not be made anew within {MAKE_SECONDS:g} s")

    async def _answers(self, relay: Relay, *, patient: bool) -> protocols.LibraError | None:
        """Whether a relay's process is there; returns why it is not, and one that does not answer is given up."""
        if relay.proxy is None:
            return protocols.WorkerLost(f"{relay.spec.name} is not there")
        seconds = self._limits.publish if patient else min(self._limits.publish, ANSWER_SECONDS)
        try:
            what = f"{relay.spec.name}, asked to answer,"
            await deadlines.within(seconds, relay.proxy.health(), what, "publish")
        except protocols.LibraError as error:
            self._give_up(relay, error)
            return error
        return None

    async def _make(self, relay: Relay) -> None:
        name, seconds = relay.spec.name, self._limits.engine_start
        self._recorder.status(name, "starting its process")
        stopping = self._cluster.stop(name)  # of one that was given up, what is left
        try:
            await deadlines.within(self._limits.shutdown, stopping, f"The end of {name}", "shutdown")
        except protocols.LibraError as error:
            self._recorder.note(f"{name} could not be stopped cleanly: {error}")
        making = self._cluster.spawn(relay.spec)
        relay.proxy = await deadlines.within(seconds, making, f"The making of {name}", "engine_start")
        relay.life += 1
        self._recorder.status(name, "idle")

    def _give_up(self, relay: Relay, error: protocols.LibraError) -> None:
        if relay.proxy is None:
            return
        relay.proxy, relay.link = None, None
        relay.kept.clear()
        self._recorder.status(relay.spec.name, "lost")
        self._recorder.note(f"The relay of host {relay.host} is given up, and made again when it is needed: {error}")

    async def _ask(self, relay: Relay, work: Coroutine[Any, Any, Any], what: str) -> Any:
        seconds = self._limits.publish
        return await deadlines.within(seconds, work, f"{relay.spec.name}, asked to {what},", "publish")


def _same(held: protocols.WeightChunk, source: protocols.WeightChunk) -> bool:
    """The bytes are those that are asked for: of this version, and of no other trainer that had it before."""
    return (held.policy_version, held.checksum) == (source.policy_version, source.checksum)


def _fail(copies: Chunks, error: protocols.LibraError) -> None:
    for copy in copies:
        if not copy.done():
            copy.set_exception(error)
            copy.exception()  # seen: perhaps nobody waits for it
