"""The tree of a run's weight relays: brings each version to hosts other than the trainer's.

The root relay reads the trainer's memory. Every other relay receives each chunk once, from its parent, and passes it on
to at most `FAN_OUT` children. So the trainer's host sends `FAN_OUT` copies for any number of hosts. The last host has a
chunk after as many hops as the tree is deep. Chunks are pipelined: a version of S bytes in b chunks takes about FAN_OUT
x S / bandwidth x (1 + depth / b).

With `rollout.full_sync_every`, a host that holds a chunk of the version before receives its changed elements only. The
root compares each chunk with its copy of that version. A host without that chunk gets the whole one: a new host, or one
whose relay was restarted. So does a host below a relay that got the whole chunk itself, or whose chunk has another
checksum than the trainer's once it is changed.

The coordinator makes two calls for each chunk and host. They cost it 0.5 ms of CPU, measured with doubles of 1,280
hosts; Ray adds its own cost. With that many hosts, use larger chunks (`rollout.chunk_mib`).

A chunk may fail to arrive, because the parent is lost or slow, or because the bytes are damaged. Then it is requested
once more, from the root over a new link. If that fails too, or exceeds `deadlines.weight_sync`, its relay is dropped.
The relay is restarted when its host next needs weights. Callers that wait for that host's copy get the error; other
hosts continue. A restarting relay holds up no other host.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.utils import deadlines, typed_clients

FAN_OUT = 2
"""Maximum number of relays to which one relay passes a chunk on."""

ANSWER_SECONDS = 15.0
"""Seconds for a relay to answer if no engine waits for its copy."""

MAKE_SECONDS = 60.0
"""Seconds for the restart of a relay if only training sides wait for its copy, and no engine."""

T = TypeVar("T")

Chunks = Sequence["asyncio.Future[protocols.WeightChunk]"]
"""The chunks of a version, in order, each resolved on arrival."""

Differences = Sequence["asyncio.Future[protocols.WeightDifference | None]"]
"""The differences of the chunks, in order, each resolved once its chunk is compared; None for a whole chunk."""


def expected(count: int) -> list[asyncio.Future[protocols.WeightChunk]]:
    """Returns `count` chunks that have not arrived yet."""
    return [asyncio.get_running_loop().create_future() for _ in range(count)]


class RelayActorClient(typed_clients.ActorClient, protocols.RelayClient):
    """A weight relay, for one life of its process. See `typed_clients.ActorClient` for the arguments."""

    health = typed_clients.ClientMethod("weight_sync", "answer", protocols.Relay.health)
    listen = typed_clients.ClientMethod("weight_sync", "open a link", protocols.Relay.listen)
    connect = typed_clients.ClientMethod("weight_sync", "connect a link", protocols.Relay.connect)
    compare = typed_clients.ClientMethod("weight_sync", "compare chunk {0.index}", protocols.Relay.compare)
    send = typed_clients.ClientMethod("weight_sync", "send chunk {0.index} to {1}", protocols.Relay.send)
    receive = typed_clients.ClientMethod("weight_sync", "receive chunk {0.index}", protocols.Relay.receive)
    shutdown = typed_clients.ClientMethod("shutdown", "shut down", protocols.Relay.shutdown)


@dataclass
class HostRelay:
    """The relay of one host, across all its processes.

    Attributes:
      host: number of the host.
      client: calls the present process; None without a process.
      life: number of processes so far.
      generation: number of links so far over which the relay received.
      link: the sending host, and the life of its relay; None without a link.
      chunks: chunks on its host, by number, with the checksum of each as staged.
      changes: the difference by which each chunk came, by number; none for a chunk that came whole.
      making: lock held while the process is checked or restarted.
    """

    spec: protocols.ActorSpec
    host: int
    client: protocols.RelayClient | None = None
    life: int = 0
    generation: int = 0
    link: tuple[int, int] | None = None
    chunks: dict[int, protocols.WeightChunk] = field(default_factory=dict)
    changes: dict[int, protocols.WeightDifference] = field(default_factory=dict)
    making: asyncio.Lock = field(default_factory=asyncio.Lock)

    def called(self) -> protocols.RelayClient:
        """Returns the client. Raises WorkerLost if the relay has been dropped."""
        if self.client is None:
            raise protocols.WorkerLost(f"{self.spec.name} has been dropped")
        return self.client


class RelayTree:
    """All weight relays of a run; passes on one version at a time. Create it inside the event loop that it serves.

    Args:
      config: the run's configuration (`deadlines`, `rollout.full_sync_every`).
      specs: how to make each host's relay. The lowest number is the host of the trainer's first process.
      recorder: gets a span for each host that received a version, on the track `weights`.

    Attributes:
      sent_bytes: bytes that hosts received of the last version.
      whole_bytes: bytes of the chunks that these brought to the hosts.
    """

    def __init__(
        self,
        config: config_lib.RunConfig,
        *,
        cluster: protocols.Cluster,
        specs: Mapping[int, protocols.ActorSpec],
        recorder: protocols.Recorder,
    ) -> None:
        self._limits = config.deadlines
        self._cluster = cluster
        self._recorder = recorder
        self._relays = {host: HostRelay(spec, host) for host, spec in specs.items()}
        self._root = self._relays[min(specs)]
        self._full_every = config.rollout.full_sync_every
        self.sent_bytes = self.whole_bytes = 0

    def serve(self, host: int | None) -> bool:
        """Returns whether workers of this host read a relay's copy instead of the trainer's memory."""
        return host is not None and host != self._root.host

    async def start(self, hosts: Collection[int]) -> None:
        """Starts the relays of these hosts before the first version. A relay that fails is tried again at that version.

        Raises:
          ConfigError: a relay can never be started.
        """
        relays = [self._relays[host] for host in sorted(hosts)]
        if relays:
            errors = await deadlines.together(*map(self._made, [self._root, *relays]))
            for error in errors:
                if isinstance(error, protocols.ConfigError):
                    raise error

    async def ready(self, host: int | None) -> protocols.LibraError | None:
        """Restarts a host's missing relay before an engine waits for its copy. Returns the error if that failed."""
        return await self._made(self._relays[host]) if host is not None and self.serve(host) else None

    async def pass_on(
        self, staged: Chunks, copies: Mapping[int, Chunks], needed: Collection[int], lent: Collection[int] = ()
    ) -> None:
        """Brings a version to hosts. Resolves `copies` on arrival, or fails a host's copies with its relay's error.

        Args:
          staged: the chunks on the trainer's host, each resolved once it is staged.
          copies: the chunks of each host, all still unresolved.
          needed: hosts with engines to load, whose missing relays are restarted. Other hosts get the version if their
            relay answers. If a host is being replaced, its relay is restarted once an engine comes back there
            (`ready`).
          lent: hosts with engines asleep, whose devices train. A missing relay is restarted if that is quick.
        """
        begin = asyncio.get_running_loop().time()
        self.sent_bytes = self.whole_bytes = 0
        differences: Differences = [asyncio.get_running_loop().create_future() for _ in staged]
        await self._made(self._root)  # if that fails, each fetch from the root reports the error
        hosts = [self._relays[host] for host in sorted(copies)]
        standing = [relay for relay in hosts if relay.client is not None]
        # A complete tree by position among the standing relays: children of place p are 2p + 2 and 2p + 3.
        above = {
            relay.host: self._root if place < FAN_OUT else standing[place // FAN_OUT - 1]
            for place, relay in enumerate(standing)
        }
        answering = {
            relay.host: asyncio.ensure_future(self._answers(relay, patient=relay.host in {*needed, *lent}))
            for relay in hosts
        }

        async def give(relay: HostRelay) -> None:
            error = await asyncio.shield(answering[relay.host])
            if error is not None and relay.host in needed:
                error = await self._made(relay)
            elif error is not None and relay.host in lent:
                try:
                    error = await asyncio.wait_for(self._made(relay), MAKE_SECONDS)
                except TimeoutError:
                    error = protocols.WorkerLost(f"{relay.spec.name} could not be restarted within {MAKE_SECONDS:g} s")
            if error is not None:
                _fail(copies[relay.host], error)
                return
            parent = above.get(relay.host, self._root)
            if parent is not self._root and await asyncio.shield(answering[parent.host]) is not None:
                parent = self._root  # only its own host waits for a restarting relay
            # A link ends with the life of either relay.
            if relay.link != (parent.host, parent.life):
                try:
                    await self._connect(parent, relay)
                except protocols.LibraError as fault:  # its first chunk is then requested from the root
                    self._recorder.note(f"{relay.spec.name} cannot receive from {parent.spec.name}: {fault}")
            await self._supply(relay, staged, copies, differences, begin)

        try:
            await deadlines.together(self._compare(staged, differences), *map(give, hosts))
        finally:
            for answer in answering.values():
                deadlines.abandon(answer)

    async def _compare(self, staged: Chunks, differences: Differences) -> None:
        """Compares each chunk with the version before, for the hosts that hold that version."""
        for chunk, place in zip(staged, differences, strict=True):
            if self._full_every == 1:
                place.set_result(None)
                continue
            source = await asyncio.shield(chunk)
            full = not source.policy_version % self._full_every
            if full or source.frozen:
                place.set_result(None)  # before the root copies the chunk, because no host has to wait for the copy
            if source.frozen:  # it is not sent again
                continue
            try:
                difference = await self._root.called().compare(source)
            except protocols.LibraError as error:
                difference = None
                self._recorder.note(
                    f"Chunk {source.index} of version {source.policy_version} could not be compared with the version "
                    f"before ({error}); hosts get the whole chunk."
                )
            if not full:
                place.set_result(difference)

    async def _supply(
        self, relay: HostRelay, staged: Chunks, copies: Mapping[int, Chunks], differences: Differences, begin: float
    ) -> None:
        """Brings all chunks of a version to one host, and records the cost."""
        arrived = 0
        for number, chunk in enumerate(staged):
            source = await asyncio.shield(chunk)
            try:
                copy = relay.chunks.get(number)
                if copy is not None and source.frozen and copy.frozen == source.frozen:
                    # Weights under an adapter: the same bytes in every version.
                    copy = relay.chunks[number] = dataclasses.replace(copy, policy_version=source.policy_version)
                # An unchanged chunk is not sent again: a restarted trainer may stage other bytes under the same number.
                # Without a checksum, nothing proves that the bytes are unchanged.
                if (
                    copy is None
                    or copy.checksum is None
                    or (copy.policy_version, copy.checksum) != (source.policy_version, source.checksum)
                ):
                    copy = await self._fetch(relay, source, copies, differences[number])
                    change = relay.changes.get(number)
                    nbytes = copy.nbytes if change is None else change.nbytes
                    arrived += nbytes
                    self.sent_bytes += nbytes
                    self.whole_bytes += copy.nbytes
            except protocols.LibraError as error:
                self._drop(relay, error)
                _fail(copies[relay.host], error)
                return
            copies[relay.host][number].set_result(copy)
        end = asyncio.get_running_loop().time()
        arguments = {"policy_version": source.policy_version, "bytes": arrived}
        self._recorder.span("weights", f"copy to host {relay.host}", begin, end, arguments)
        self._recorder.status(relay.spec.name, f"keeps version {source.policy_version}")

    async def _fetch(
        self,
        relay: HostRelay,
        chunk: protocols.WeightChunk,
        copies: Mapping[int, Chunks],
        compared: asyncio.Future[protocols.WeightDifference | None],
    ) -> protocols.WeightChunk:
        """Brings a chunk to a host: from its parent as soon as the parent has it, or from the root."""
        above, source = self._root, chunk
        if relay.link is not None and relay.link[0] != self._root.host:
            try:
                source = await asyncio.shield(copies[relay.link[0]][chunk.index])
                above = self._relays[relay.link[0]]
            except protocols.LibraError:
                relay.link = None  # the parent has been dropped
        change, copy = await asyncio.shield(compared), relay.chunks.get(chunk.index)
        # Only the root has all differences; another relay has those that it received itself.
        sendable = above is self._root or above.changes.get(chunk.index) == change
        if change is not None and (copy is None or copy.checksum != change.base or not sendable):
            change = None

        async def twice() -> protocols.WeightChunk:
            try:
                if relay.link != (above.host, above.life):
                    raise protocols.WorkerLost(f"{relay.spec.name} has no link to {above.spec.name}")
                return await self._transfer(above, relay, source, change)
            except protocols.LibraError as error:
                what, suffix = ("Chunk", "") if change is None else ("The difference of chunk", ", whole")
                self._recorder.note(
                    f"{what} {chunk.index} of version {chunk.policy_version} did not come to host {relay.host} "
                    f"from host {above.host} ({error}); it is asked for again{suffix}."
                )
            # A failed link cannot be used again. The root may be lost, too; the first caller to find that restarts it.
            if (error_of_root := await self._made(self._root)) is not None:
                raise error_of_root
            await self._connect(self._root, relay)
            return await self._transfer(self._root, relay, chunk)

        # The wait for the parent's copy is outside: a slow parent has its own deadline, and is not this relay's fault.
        what = f"{relay.spec.name}, asked to bring chunk {chunk.index} to host {relay.host},"
        return await deadlines.within(self._limits.weight_sync, twice(), what, "weight_sync")

    async def _transfer(
        self,
        above: HostRelay,
        relay: HostRelay,
        source: protocols.WeightChunk,
        change: protocols.WeightDifference | None = None,
    ) -> protocols.WeightChunk:
        relay.chunks.pop(source.index, None)  # its memory is overwritten
        relay.changes.pop(source.index, None)
        sending = above.called().send(source, relay.spec.name, change)
        _, copy = await deadlines.together(sending, relay.called().receive(source, change))
        assert isinstance(copy, protocols.WeightChunk)
        relay.chunks[source.index] = copy
        if change is not None:
            relay.changes[source.index] = change
        return copy

    async def _connect(self, above: HostRelay, relay: HostRelay) -> None:
        relay.link = None
        # Each link has a number of its own, by which the address of an earlier one is refused.
        relay.generation += 1
        sender, receiver = above.called(), relay.called()
        address = await receiver.listen(relay.generation)
        await sender.connect(relay.spec.name, relay.generation, address)
        relay.link = above.host, above.life

    async def _made(self, relay: HostRelay) -> protocols.LibraError | None:
        """Restarts a relay's process if it does not answer. Returns the error if that failed."""
        async with relay.making:
            try:
                if await self._answers(relay, patient=True) is None:
                    return None
                self._recorder.status(relay.spec.name, "starting its process")
                client = RelayActorClient(self._cluster, relay.spec, self._limits)
                try:
                    await client.stop()  # remains of a dropped process
                except protocols.LibraError as error:
                    self._recorder.note(f"{relay.spec.name} could not be stopped cleanly: {error}")
                await client.make()
                relay.client = client
                # A link knows the life of its ends, so every link of the former process is void now.
                relay.life += 1
                self._recorder.status(relay.spec.name, "idle")
            except protocols.ConfigError as error:  # the cluster has no room for the run, and this error ends the run
                return error
            except protocols.LibraError as error:
                self._recorder.note(f"{relay.spec.name} is not there, and is tried again when it is needed: {error}")
                return error
        return None

    async def _answers(self, relay: HostRelay, *, patient: bool) -> protocols.LibraError | None:
        """Drops a relay that does not answer, and returns the error. An impatient caller waits `ANSWER_SECONDS`."""
        if relay.client is None:
            return protocols.WorkerLost(f"{relay.spec.name} is not there")
        seconds = self._limits.weight_sync if patient else min(self._limits.weight_sync, ANSWER_SECONDS)
        try:
            await deadlines.within(
                seconds, relay.client.health(), f"{relay.spec.name}, asked to answer,", "weight_sync"
            )
        except protocols.LibraError as error:
            self._drop(relay, error)
            return error
        return None

    def _drop(self, relay: HostRelay, error: protocols.LibraError) -> None:
        """Stops using a relay's process. `_made` later ends and restarts it."""
        if relay.client is None:
            return
        relay.client, relay.link = None, None
        # The copies were in the memory of the process that is given up.
        relay.chunks.clear()
        relay.changes.clear()
        self._recorder.status(relay.spec.name, "lost")
        self._recorder.note(f"The relay of host {relay.host} is dropped, and made again when it is needed: {error}")


def _fail(copies: Chunks, error: protocols.LibraError) -> None:
    for copy in copies:
        if not copy.done():
            copy.set_exception(error)
            copy.exception()  # marks it as seen, because perhaps no call awaits it
