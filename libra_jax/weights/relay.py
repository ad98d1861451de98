"""A weight relay: keeps a host's copy of the weights, for the engines and training sides on this host.

Every host that needs weights runs one relay. The relay on the host of the trainer's first process is the root, and
reads the trainer's memory. The coordinator (`relay_tree`) arranges the relays in a tree. For each chunk it asks one
relay to send and the next one to receive, so that the bytes cross to each host once.

A link is a gradient channel (gloo) of two ends, and the receiving relay listens. gloo sends straight from one host's
shared memory and receives into the other's, so the relay copies nothing. It also unpickles nothing.

A difference may travel instead of a chunk (`differences`). The root keeps a copy of each chunk for this purpose, and
compares the next version with the copy. A relay changes its chunk in place, compares the checksum of the whole chunk,
and keeps the difference for the relays below.

The receiver compares each chunk's version, number and checksum with the coordinator's values, which come on a separate
connection. The checksum finds damage, and protects against no attacker. Links are neither encrypted nor authenticated.
They belong on a network that only the run can reach.

Thread-safety: one event loop calls. gloo's waits run on threads: one for receiving, and one for each sending link. Each
wait ends at its deadline. An aborted wait still runs until then, and the next wait queues behind it, so that no two
write the same memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any, NamedTuple, TypeVar

import numpy as np

from libra_jax import protocols
from libra_jax.utils import machine
from libra_jax.weights import differences, gradient_channel, memfd

MOST_COMPARERS = 4
"""Maximum number of threads that compare a chunk."""

T = TypeVar("T")


class _RelayLink(NamedTuple):
    """A link to a relay that receives from this one."""

    channel: gradient_channel.Channel
    thread: futures.ThreadPoolExecutor


class _Compared(NamedTuple):
    """A copy of the last compared chunk of a number."""

    version: int
    checksum: str
    data: np.ndarray


class _Difference(NamedTuple):
    """A difference that this relay can send: the checksums of the chunk without and with it, and its bytes."""

    base: str
    checksum: str | None
    data: np.ndarray


def create(name: str, link_seconds: float, cluster: str = "") -> RelayActor:
    """Creates the relay of this host.

    Args:
      name: name of the relay, for errors.
      link_seconds: deadline in seconds to connect a link, and for a chunk to cross it.
      cluster: address of the cluster's head (`config.cluster.address`). This host's own address is the one on that
        route.
    """
    # The sent memory is mapped read-only and never written here, which torch cannot know.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    return RelayActor(name, link_seconds, machine.cluster_address(cluster))


class RelayActor(protocols.Relay):
    """A host's weight relay. Every method raises LibraError with one sentence."""

    def __init__(self, name: str, link_seconds: float, host: str) -> None:
        self._name = name
        self._seconds = link_seconds
        self._host = host
        self._parent: gradient_channel.Channel | None = None
        self._children: dict[str, _RelayLink] = {}
        self._receiving = futures.ThreadPoolExecutor(1, f"{name} receives")
        self._memory: dict[int, memfd.Owner] = {}
        # Checksums of the chunks in memory; none while a chunk is written, or after it arrived damaged.
        self._held: dict[int, str] = {}
        self._peers = memfd.PeerMemory()
        self._comparing = futures.ThreadPoolExecutor(1, f"{name} compares")
        cores = len(os.sched_getaffinity(0))
        self._comparers = futures.ThreadPoolExecutor(min(MOST_COMPARERS, cores), f"{name} compares blocks")
        self._compared: dict[int, _Compared] = {}
        self._differences: dict[int, _Difference] = {}

    async def health(self) -> Mapping[str, float]:
        """Returns the bytes of this relay's copy, which also shows that it answers."""
        return {"bytes": float(sum(owner.nbytes for owner in self._memory.values()))}

    async def listen(self, generation: int) -> dict[str, Any]:
        if self._parent is not None:
            # One parent at a time: two could write into the same memory.
            self._parent.close("another took its place")
        listener = gradient_channel.ChannelListener(self._name, generation, 2, self._host)
        self._parent = gradient_channel.Channel(listener.address, 0, self._seconds, listener)
        return listener.address

    async def connect(self, child: str, generation: int, address: Mapping[str, Any]) -> None:
        if (address["worker"], address["generation"]) != (child, generation):
            raise protocols.LibraError(
                f"the link of {address['worker']} (generation {address['generation']}) is not the one to connect to "
                f"{child} in generation {generation}: call its listen first."
            )
        self._part_from(child)
        channel = gradient_channel.Channel(address, 1, self._seconds)
        self._children[child] = _RelayLink(channel, futures.ThreadPoolExecutor(1, f"{self._name} sends to {child}"))

    async def compare(self, chunk: protocols.WeightChunk) -> protocols.WeightDifference | None:
        """Compares a chunk of this host with the copy of the last compared one, and copies it instead of that one.

        Keeps the difference. There is none without a checksum, either.
        """
        data = self._read(chunk)
        return await _on(self._comparing, lambda: self._compare(chunk, data))

    async def send(
        self, chunk: protocols.WeightChunk, child: str, difference: protocols.WeightDifference | None = None
    ) -> None:
        """Sends a chunk of this host. Returns once the other relay has taken it."""
        link = self._children.get(child)
        if link is None:
            raise protocols.LibraError(f"{self._name} has no link to {child}: call connect first.")
        if difference is None:
            data = self._read(chunk)
        else:
            stored = self._differences.get(chunk.index)
            if stored is None or (stored.base, stored.checksum) != (difference.base, chunk.checksum):
                raise protocols.LibraError(f"{self._name} does not hold the difference of {_named(chunk)}.")
            data = stored.data
        # The channel was made for gradient sums: a chunk travels as a sum without metrics.
        header = gradient_channel.Header(
            worker=child,
            generation=link.channel.generation,
            version=chunk.policy_version,
            digest=chunk.checksum or "",
            first=chunk.index,
            last=chunk.index + 1,
            metrics={},
            maxima={},
        )
        await _on(link.thread, lambda: link.channel.send(header, [data], self._seconds))

    async def receive(
        self, chunk: protocols.WeightChunk, difference: protocols.WeightDifference | None = None
    ) -> protocols.WeightChunk:
        channel = self._parent
        if channel is None:
            raise protocols.LibraError(f"{self._name} has no link to receive over: call listen first.")
        return await _on(self._receiving, lambda: self._take(channel, chunk, difference))

    async def shutdown(self) -> None:
        """Closes every link and releases the memory. Engines that map the memory keep it. Idempotent."""
        for child in list(self._children):
            self._part_from(child)
        if self._parent is not None:
            self._parent.close()
            self._parent = None
        for threads in (self._receiving, self._comparing, self._comparers):
            threads.shutdown(wait=False, cancel_futures=True)
        for owner in self._memory.values():
            owner.close()
        self._memory.clear()
        self._held.clear()
        self._compared.clear()
        self._differences.clear()
        self._peers.close()

    def _read(self, chunk: protocols.WeightChunk) -> np.ndarray:
        return np.frombuffer(self._peers.map(chunk.transport), np.uint8, chunk.nbytes)

    def _compare(self, chunk: protocols.WeightChunk, data: np.ndarray) -> protocols.WeightDifference | None:
        if chunk.checksum is None:
            return None
        # Taken out first: after a failure, no half-changed copy is left.
        copy = self._compared.pop(chunk.index, None)
        if copy is None or len(copy.data) != len(data):
            purpose, free = f"the copy of {_named(chunk)}, which {self._name} compares", memfd.available_bytes()
            if len(data) > free:
                raise memfd.too_little(purpose, len(data), free)
            self._differences.pop(chunk.index, None)
            copy = _Compared(chunk.policy_version, chunk.checksum, data.copy())
        # A version that changes nothing has an empty difference. A chunk that is asked for again keeps the one it has.
        elif (copy.version, copy.checksum) != (chunk.policy_version, chunk.checksum):
            self._differences.pop(chunk.index, None)
            encoded = differences.encode(copy.data, data, self._comparers)
            if encoded is None:
                np.copyto(copy.data, data)
            else:
                differences.apply(copy.data, encoded)
                self._differences[chunk.index] = _Difference(copy.checksum, chunk.checksum, encoded)
            copy = _Compared(chunk.policy_version, chunk.checksum, copy.data)
        self._compared[chunk.index] = copy
        difference = self._differences.get(chunk.index)
        return None if difference is None else protocols.WeightDifference(difference.base, difference.data.nbytes)

    def _take(
        self,
        channel: gradient_channel.Channel,
        chunk: protocols.WeightChunk,
        difference: protocols.WeightDifference | None,
    ) -> protocols.WeightChunk:
        base = self._held.pop(chunk.index, None)
        self._differences.pop(chunk.index, None)
        if difference is not None and base != difference.base:
            raise protocols.LibraError(f"{self._name} does not hold what the difference of {_named(chunk)} changes.")
        owner = self._place(chunk)
        target = np.frombuffer(owner.buffer, np.uint8, chunk.nbytes)
        arriving = target if difference is None else np.empty(difference.nbytes, np.uint8)
        header, _ = channel.receive([("uint8", arriving.shape)], self._seconds, into=arriving)
        # The bytes came over an unauthenticated link; the expected values came from the coordinator.
        if (header.version, header.first) != (chunk.policy_version, chunk.index):
            raise protocols.LibraError(
                f"{self._name} was sent chunk {header.first} of version {header.version} instead of {_named(chunk)}."
            )
        if difference is not None:
            try:
                differences.apply(target, arriving)
            except ValueError as error:
                raise protocols.LibraError(f"{_named(chunk)} came to {self._name} damaged: {error}.") from error
        if chunk.checksum is not None:
            # With a difference, too, this is the checksum of the whole chunk.
            if (checksum := memfd.digest(target.data)) != chunk.checksum:
                raise protocols.LibraError(
                    f"{_named(chunk)} came to {self._name} damaged: checksum {checksum} instead of {chunk.checksum}."
                )
            self._held[chunk.index] = checksum
        if difference is not None:
            self._differences[chunk.index] = _Difference(difference.base, chunk.checksum, arriving)
        return dataclasses.replace(chunk, transport=owner.address)

    def _place(self, chunk: protocols.WeightChunk) -> memfd.Owner:
        # A chunk number has the same memory from version to version: engines have it mapped.
        owner = self._memory.get(chunk.index)
        if owner is None or owner.nbytes < chunk.nbytes:
            if owner is not None:
                # Engines that still map the smaller memory keep it until they drop the mapping.
                owner.close()
            purpose = f"the copy of the weights on the host of {self._name} (chunk {chunk.index} of {chunk.count})"
            owner = self._memory[chunk.index] = memfd.Owner(chunk.nbytes, purpose)
        return owner

    def _part_from(self, child: str) -> None:
        if (link := self._children.pop(child, None)) is not None:
            link.channel.close("its sender closed it")
            link.thread.shutdown(wait=False, cancel_futures=True)


def _named(chunk: protocols.WeightChunk) -> str:
    return f"chunk {chunk.index} of version {chunk.policy_version}"


async def _on(thread: futures.ThreadPoolExecutor, work: Callable[[], T]) -> T:
    try:
        running = asyncio.get_running_loop().run_in_executor(thread, work)
    except RuntimeError as error:  # the executor is shut down
        raise protocols.LibraError("the relay or its link has been closed.") from error
    return await running
