"""The relay of a host: published weights from another host, into memory that this host's engines and replicas read.

Each host that needs the weights and has not the trainer's first process has one; so has the host of that process,
where its memory is read. The coordinator (`coordinator.relays`) arranges them in a tree and asks, bucket by bucket, a
relay to send and the next one to receive, so that the bytes come to a host once. They travel over torch.distributed's
gloo, as gradient sums do: a link is a side channel of two ends, whose receiving relay listens. Nothing is copied on the
way: gloo sends from the shared memory here, and receives into the shared memory there. Nothing that arrives is
unpickled.

A bucket that arrived is compared with what the coordinator was told of it over its own connection: version, number and
checksum. The links are neither encrypted nor closed to others: they belong on a network that only the run can reach, as
the trainer's own collectives do; what somebody else writes into them is refused by its checksum.

Thread-safety: one event loop calls; gloo's waits are on threads, one for what is received and one a link for what is
sent, and each ends at its deadline. What is given up goes on until then, and what comes next waits behind it, so that
no two write the same memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import mmap
import warnings
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any, NamedTuple, TypeVar

import numpy as np

from libra_jax import protocols
from libra_jax.interop import addresses, memfd, side_channel

T = TypeVar("T")


class _Link(NamedTuple):
    """To a relay that takes from this one."""

    channel: side_channel.Channel
    thread: futures.ThreadPoolExecutor


def create(name: str, link_seconds: float, cluster: str = "") -> Relay:
    """Makes the relay of this host.

    Args:
      name: its name, as errors show it.
      link_seconds: deadline for a link to stand, and for a bucket to cross it.
      cluster: address of the cluster's head (`config.cluster.address`), towards which this host's own is looked up.
    """
    # What is sent has been mapped read-only, so that nothing here writes to it; torch could not know.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    return Relay(name, link_seconds, addresses.in_cluster(cluster))


class Relay:
    """Implements `protocols.Relay`. Every method raises LibraError with one sentence."""

    def __init__(self, name: str, link_seconds: float, host: str) -> None:
        self._name = name
        self._seconds = link_seconds
        self._host = host
        self._parent: side_channel.Channel | None = None
        self._children: dict[str, _Link] = {}
        self._receiving = futures.ThreadPoolExecutor(1, f"{name} receives")
        self._memory: dict[int, memfd.Owner] = {}
        self._mappings: dict[tuple[int, int, int], mmap.mmap] = {}

    async def health(self) -> Mapping[str, float]:
        """It is there; bytes of the copy that it keeps."""
        return {"bytes": float(sum(owner.nbytes for owner in self._memory.values()))}

    async def listen(self, epoch: int) -> dict[str, Any]:
        """Opens the link over which this relay receives from now on; returns its address, plain values.

        Raises:
          SideChannelError: this host cannot be listened at.
        """
        if self._parent is not None:
            self._parent.close("another took its place")
        listener = side_channel.Listener(self._name, epoch, 2, self._host)
        self._parent = side_channel.Channel(listener.address, 0, self._seconds, listener)
        return listener.address

    async def connect(self, child: str, epoch: int, address: Mapping[str, Any]) -> None:
        """Begins to connect to the relay that listens there; an earlier link to it is closed.

        Raises:
          LibraError: the address is another relay's, or of another epoch.
        """
        if (address["member"], address["epoch"]) != (child, epoch):
            raise protocols.LibraError(
                f"the link of {address['member']} (epoch {address['epoch']}) is not the one to connect to {child} in "
                f"epoch {epoch}: call its listen first."
            )
        self._part_from(child)
        channel = side_channel.Channel(address, 1, self._seconds)
        self._children[child] = _Link(channel, futures.ThreadPoolExecutor(1, f"{self._name} sends to {child}"))

    async def send(self, bucket: protocols.WeightBucket, child: str) -> None:
        """Sends a bucket that lies on this host; returns when the other relay has taken it.

        Raises:
          SideChannelError: the link is gone, or it was not taken in time.
          SharedMemoryError: the bucket cannot be read here.
        """
        link = self._children.get(child)
        if link is None:
            raise protocols.LibraError(f"{self._name} has no link to {child}: call connect first.")
        data = np.frombuffer(self._mapping(bucket.transport), np.uint8, bucket.nbytes)
        header = side_channel.Header(
            member=child,
            epoch=link.channel.epoch,
            version=bucket.policy_version,
            digest=bucket.checksum or "",
            first=bucket.index,
            last=bucket.index + 1,
            metrics={},
            maxima={},
        )
        await _on(link.thread, lambda: link.channel.send_bytes(header, data, self._seconds))

    async def receive(self, bucket: protocols.WeightBucket) -> protocols.WeightBucket:
        """Receives a bucket and keeps it until the next of that number; returns it as engines of this host reach it.

        Args:
          bucket: as it is on the host that sends.

        Raises:
          SideChannelError: the link is gone, or nothing came in time.
          SharedMemoryError: there is too little memory here.
          LibraError: what came is another bucket, or damaged.
        """
        channel = self._parent
        if channel is None:
            raise protocols.LibraError(f"{self._name} has no link to receive over: call listen first.")
        return await _on(self._receiving, lambda: self._take(channel, bucket))

    async def shutdown(self) -> None:
        """Closes every link and gives the memory back; engines that map it keep it as long. Idempotent."""
        for child in list(self._children):
            self._part_from(child)
        if self._parent is not None:
            self._parent.close()
            self._parent = None
        self._receiving.shutdown(wait=False, cancel_futures=True)
        for owner in self._memory.values():
            owner.close()
        self._memory.clear()
        self._mappings.clear()

    def _take(self, channel: side_channel.Channel, bucket: protocols.WeightBucket) -> protocols.WeightBucket:
        owner = self._room(bucket)
        target = np.frombuffer(owner.buffer, np.uint8, bucket.nbytes)
        header = channel.receive_bytes(target, self._seconds)
        named = f"bucket {bucket.index} of version {bucket.policy_version}"
        if (header.version, header.first) != (bucket.policy_version, bucket.index):
            raise protocols.LibraError(
                f"{self._name} was sent bucket {header.first} of version {header.version} in place of {named}."
            )
        if bucket.checksum is not None and (checksum := memfd.digest(target.data)) != bucket.checksum:
            raise protocols.LibraError(
                f"{named} came to {self._name} damaged: checksum {checksum} instead of {bucket.checksum}."
            )
        return dataclasses.replace(bucket, transport=owner.address)

    def _room(self, bucket: protocols.WeightBucket) -> memfd.Owner:
        """Memory for a bucket, the same from version to version."""
        owner = self._memory.get(bucket.index)
        if owner is None or owner.nbytes < bucket.nbytes:
            if owner is not None:
                owner.close()
            purpose = f"the copy of the weights on the host of {self._name} (bucket {bucket.index} of {bucket.count})"
            owner = self._memory[bucket.index] = memfd.Owner(bucket.nbytes, purpose)
        return owner

    def _mapping(self, address: Mapping[str, Any]) -> mmap.mmap:
        key = (address["pid"], address["fd"], address["inode"])
        if key not in self._mappings:
            # A trainer that has moved to other processes publishes from there: what those before published can go.
            self._mappings = {old: kept for old, kept in self._mappings.items() if old[0] == address["pid"]}
            self._mappings[key] = memfd.open_peer(address)
        return self._mappings[key]

    def _part_from(self, child: str) -> None:
        if (link := self._children.pop(child, None)) is not None:
            link.channel.close("its sender closed it")
            link.thread.shutdown(wait=False, cancel_futures=True)


async def _on(thread: futures.ThreadPoolExecutor, work: Callable[[], T]) -> T:
    try:
        running = asyncio.get_running_loop().run_in_executor(thread, work)
    except RuntimeError as error:  # the thread takes nothing more
        raise protocols.LibraError("the relay or its link has been closed.") from error
    return await running
