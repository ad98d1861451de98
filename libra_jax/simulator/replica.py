"""A simulated replica, the training side of a hybrid worker on virtual time, and its channel to the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax import protocols
from libra_jax.planning import costs


@dataclass
class Channels:
    """The gradient channels between a simulated trainer and its replicas.

    Attributes:
      listening: of each member, the epoch under which the trainer listens for it.
      connected: of each member, the epoch under which it has connected.
      sums: what members have sent and the trainer has not taken yet: epoch, version and the sequences summed over.
      arrived: something has changed.
    """

    listening: dict[str, int] = field(default_factory=dict)
    connected: dict[str, int] = field(default_factory=dict)
    sums: dict[str, tuple[int, int, Sequence[int]]] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, member: str, epoch: int, version: int, part: Sequence[int]) -> None:
        """A member's sums arrive."""
        self.sums[member] = epoch, version, part
        self.arrived.set()

    async def receive(self, share: protocols.Share, version: int, seconds: float) -> Sequence[int] | None:
        """The sequences that a member has summed over for this version; others are dropped.

        Args:
          share: the member's.
          version: of the step.
          seconds: until they have to be there; else it is None.
        """
        loop = asyncio.get_running_loop()
        limit = loop.time() + seconds
        while self.listening.get(share.member) == share.epoch == self.connected.get(share.member):
            if share.member in self.sums:
                *found, part = self.sums.pop(share.member)
                if found == [share.epoch, version]:
                    return part
                continue
            self.arrived.clear()
            left = limit - loop.time()
            if left <= 0:
                break
            try:
                await asyncio.wait_for(self.arrived.wait(), left)
            except TimeoutError:
                break
        return None

    def close(self, member: str) -> None:
        """The channel is gone, and what was in it."""
        for held in (self.listening, self.connected, self.sums):
            held.pop(member, None)
        self.arrived.set()


Masks = Callable[[str | None], bool]
"""Whether rollouts that ended so are left out of the loss (`TaskConfig.masks`)."""


def masks_none(_: str | None) -> bool:
    """All rollouts are trained."""
    return False


def trained(batch: protocols.TrainBatch, masks: Masks) -> list[protocols.Trajectory]:
    """Returns the trajectories of a batch that the trainer packs: masked ones take none of its time."""
    every = (trajectory for group in batch.groups for trajectory in group.trajectories)
    return [trajectory for trajectory in every if not masks(trajectory.finish)]


def split(lengths: Sequence[int], shares: Sequence[protocols.Share]) -> tuple[list[int], dict[str, list[int]]]:
    """Which sequences the core computes, and which each member: in turn, so that each has its part of all lengths.

    Args:
      lengths: tokens of each.
      shares: of the step.
    """
    fractions = {"": 1.0 - sum(share.fraction for share in shares), **{item.member: item.fraction for item in shares}}
    parts: dict[str, list[int]] = {member: [] for member in fractions}
    owed = dict.fromkeys(fractions, 0.0)
    for index, length in enumerate(lengths):
        for member, fraction in fractions.items():
            owed[member] += fraction * length
        chosen = max(owed, key=owed.__getitem__)
        owed[chosen] -= length
        parts[chosen].append(index)
    core = parts.pop("")
    return core, parts


def counted(part: Sequence[int], lengths: Sequence[int]) -> float:
    """A part of a step's sequences, in sequences of the mean length: its micro-batches."""
    return len(lengths) * sum(lengths[index] for index in part) / max(1, sum(lengths))


class Replica(protocols.Replica):
    """The training side of a hybrid worker on virtual time; made by `create`.

    Attributes:
      slowdown: factor on the time of its shares.
    """

    def __init__(
        self,
        member: str,
        devices: int,
        model: costs.Costs,
        channels: Channels,
        train_seconds: Callable[[Sequence[int]], float],
        start_seconds: float,
        warm_seconds: float,
        masks: Masks = masks_none,
    ) -> None:
        self.member = member
        self._masks = masks
        self.slowdown = 1.0
        self._train_seconds = train_seconds
        # Sums have the bytes of a published snapshot twice over: float32 for two bytes a value.
        self._send_seconds = 2.0 * model.load_seconds(devices)
        self._devices = devices
        self._model = model
        self._channels = channels
        self._start_seconds = start_seconds
        self._warm_seconds = warm_seconds
        self._warmed = False
        self._alive = True
        self._version = protocols.NO_VERSION
        self._epoch = 0

    def kill(self) -> None:
        """Dies as a process would: every running and later call raises `WorkerLost`."""
        self._alive = False
        self._channels.close(self.member)

    def _check_alive(self) -> None:
        if not self._alive:
            raise protocols.WorkerLost(f"the replica of {self.member} is gone; it is made anew when it is needed")

    async def _take(self, seconds: float) -> None:
        self._check_alive()
        await asyncio.sleep(seconds)
        self._check_alive()

    async def start(self) -> protocols.TrainerInfo:
        """Is up."""
        await self._take(self._start_seconds)
        return protocols.TrainerInfo(0, self._model.parameters, {"data": self._devices}, "simulated")

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        """First weight verb."""
        self._check_alive()

    async def start_weight_update(self, policy_version: int) -> None:
        """Second weight verb."""
        self._check_alive()
        self._version = protocols.NO_VERSION

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        """Third weight verb: takes as long as its share of the snapshot."""
        await self._take(self._model.load_seconds(self._devices) / chunk.count)

    async def finish_weight_update(self, policy_version: int) -> None:
        """Fourth weight verb."""
        self._check_alive()
        self._version = policy_version

    async def warm(self) -> None:
        """Compiles once."""
        await self._take(0.0 if self._warmed else self._warm_seconds)
        self._warmed = True

    async def join(self, epoch: int, address: Mapping[str, Any]) -> None:
        """Connects, if the trainer still listens under that epoch."""
        await self._take(0.0)
        if self._channels.listening.get(self.member) != epoch:
            raise protocols.LibraError(f"the trainer does not listen for {self.member} under epoch {epoch}")
        self._channels.connected[self.member] = self._epoch = epoch

    async def contribute(self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share]) -> Mapping[str, float]:
        """Computes its share, if there is anything in it, and sends it; the core is not waited for."""
        began = asyncio.get_running_loop().time()
        self._check_alive()
        if self._version != batch.policy_version:
            raise protocols.LibraError(f"the replica of {self.member} holds version {self._version}")
        lengths = [len(trajectory.token_ids) for trajectory in trained(batch, self._masks)]
        mine = split(lengths, shares)[1][self.member]
        if not mine:
            return {"seconds": 0.0, "micro_batches": 0.0, "bytes": 0.0}
        training = self._train_seconds([lengths[index] for index in mine])
        await self._take(self.slowdown * (training + self._send_seconds))
        self._channels.send(self.member, self._epoch, batch.policy_version, mine)
        seconds = asyncio.get_running_loop().time() - began
        return {"seconds": seconds, "micro_batches": counted(mine, lengths), "bytes": 2.0 * self._model.weight_bytes}

    async def leave(self) -> None:
        """Holds nothing any more."""
        self._check_alive()
        self._version, self._epoch = protocols.NO_VERSION, 0

    async def shutdown(self) -> None:
        """Ends. Idempotent."""
        self.kill()


def create(
    member: str,
    *,
    devices: int,
    model: costs.Costs,
    channels: Channels,
    train_seconds: Callable[[Sequence[int]], float],
    start_seconds: float = 0.0,
    warm_seconds: float = 0.0,
    masks: Masks = masks_none,
) -> Replica:
    """Makes a simulated replica.

    Args:
      member: its worker's name.
      devices: of the worker.
      model: what training and loading cost.
      channels: to the trainer.
      train_seconds: of its gradients of sequences of these lengths.
      start_seconds: until its process is up.
      warm_seconds: of its first compilation.
      masks: tells which rollouts are not trained.
    """
    return Replica(member, devices, model, channels, train_seconds, start_seconds, warm_seconds, masks)
