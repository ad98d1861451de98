"""The training side of a hybrid worker on virtual time, and its gradient channel to the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from libra_jax import protocols
from libra_jax.planning.costs import costs


@dataclass
class SimulatedChannels:
    """The gradient channels between a simulated trainer and its hybrid workers.

    Attributes:
      listening: by worker, the membership generation under which the trainer listens for it.
      connected: by worker, the membership generation under which it has connected.
      sums: by worker, gradient sums that the trainer has not taken yet: generation, version, and the sequences summed
        over.
      arrived: set when something has changed.
    """

    listening: dict[str, int] = field(default_factory=dict)
    connected: dict[str, int] = field(default_factory=dict)
    sums: dict[str, tuple[int, int, Sequence[int]]] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, worker: str, generation: int, version: int, part: Sequence[int]) -> None:
        """Delivers a worker's gradient sums."""
        self.sums[worker] = generation, version, part
        self.arrived.set()

    async def receive(self, share: protocols.Share, version: int, seconds: float) -> Sequence[int] | None:
        """Returns the sequences that a worker has summed over for this version; drops sums of other versions.

        Args:
          version: version of the step.
          seconds: deadline for the sums; after it the result is None.
        """
        loop = asyncio.get_running_loop()
        limit = loop.time() + seconds
        # A closed channel, or a newer membership generation, ends the wait at once.
        while self.listening.get(share.worker) == share.generation == self.connected.get(share.worker):
            if share.worker in self.sums:
                *key, part = self.sums.pop(share.worker)
                # Late sums of an earlier step may lie here still: gradients of older weights.
                if key == [share.generation, version]:
                    return part
                continue
            # One event for all workers, so that it tells only that something has changed, and the loop looks again.
            self.arrived.clear()
            remaining_seconds = limit - loop.time()
            if remaining_seconds <= 0:
                break
            try:
                await asyncio.wait_for(self.arrived.wait(), remaining_seconds)
            except TimeoutError:
                break
        return None

    def close(self, worker: str) -> None:
        """Closes a worker's channel and drops its content."""
        for table in (self.listening, self.connected, self.sums):
            table.pop(worker, None)
        self.arrived.set()


Masks = Callable[[str | None], bool]
"""Tells whether rollouts with this finish are left out of the loss (`TaskConfig.masks`)."""


def trained(batch: protocols.TrainBatch, masks: Masks | None) -> list[protocols.Trajectory]:
    """Returns the trajectories of a batch that the trainer packs; masked ones take none of its time.

    Args:
      masks: tells which rollouts are not trained; None trains all.
    """
    every = (trajectory for group in batch.groups for trajectory in group.trajectories)
    return [trajectory for trajectory in every if masks is None or not masks(trajectory.finish)]


def own_tokens(trajectory: protocols.Trajectory) -> int:
    """Returns the tokens of a trajectory that training processes: those of all its segments, shared ones once."""
    return sum(len(segment.token_ids) for segment in trajectory.segments)


def split(lengths: Sequence[int], shares: Sequence[protocols.Share]) -> tuple[list[int], dict[str, list[int]]]:
    """Returns the sequences of the core trainer, and those of each worker. Sequences are dealt in turn, so that each
    part has all lengths.

    Args:
      lengths: tokens of each sequence.
    """
    fractions = {"": 1.0 - sum(share.fraction for share in shares), **{item.worker: item.fraction for item in shares}}
    parts: dict[str, list[int]] = {worker: [] for worker in fractions}
    # Deals each sequence to the one that is owed the most tokens by its fraction.
    owed = dict.fromkeys(fractions, 0.0)
    for index, length in enumerate(lengths):
        for worker, fraction in fractions.items():
            owed[worker] += fraction * length
        chosen = max(owed, key=owed.__getitem__)
        owed[chosen] -= length
        parts[chosen].append(index)
    core = parts.pop("")
    return core, parts


def counted(part: Sequence[int], lengths: Sequence[int]) -> float:
    """Returns a part of a step's sequences, counted in sequences of the mean length: its micro-batches."""
    return len(lengths) * sum(lengths[index] for index in part) / max(1, sum(lengths))


@dataclass(eq=False)
class SimulatedTrainingSide(protocols.TrainingSide):
    """The training side of a hybrid worker on virtual time.

    Attributes:
      devices: number of the worker's devices.
      model: costs of training and loading.
      channels: gradient channels to the trainer.
      train_seconds: sequence lengths to seconds of computing their gradients.
      start_seconds: seconds until its process is up.
      warm_seconds: seconds of its first compilation.
      masks: tells which rollouts are not trained; None trains all.
      slowdown: factor on the time of its shares.
    """

    worker: str
    _: KW_ONLY
    devices: int
    model: costs.Costs
    channels: SimulatedChannels
    train_seconds: Callable[[Sequence[int]], float]
    start_seconds: float = 0.0
    warm_seconds: float = 0.0
    masks: Masks | None = None
    slowdown: float = field(default=1.0, init=False)
    _warmed: bool = field(default=False, init=False)
    _alive: bool = field(default=True, init=False)
    _version: int = field(default=protocols.NO_VERSION, init=False)
    _generation: int = field(default=0, init=False)

    def kill(self) -> None:
        """Dies as a process would: every running and later call raises `WorkerLost`. Idempotent."""
        # The channel of a dead training side may be that of the worker's next life.
        if self._alive:
            self._alive = False
            self.channels.close(self.worker)

    def _check_alive(self) -> None:
        if not self._alive:
            raise protocols.WorkerLost(f"the training side of {self.worker} is gone; it is restarted when it is needed")

    async def _called(self, call: str) -> None:
        """Begins a call that fault injection may break: it overrides this method."""
        self._check_alive()

    async def _take(self, seconds: float) -> None:
        self._check_alive()
        await asyncio.sleep(seconds)
        self._check_alive()  # killed meanwhile, a process would never have answered

    async def start(self) -> protocols.TrainerInfo:
        """Starts after `start_seconds`."""
        await self._take(self.start_seconds)
        return protocols.TrainerInfo(0, self.model.parameters, {"data": self.devices}, "simulated")

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        """Does nothing: the first weight verb."""
        self._check_alive()

    async def start_weight_update(self, policy_version: int) -> None:
        """Drops the held version: the second weight verb."""
        await self._called("start_weight_update")
        # A load that fails halfway leaves mixed weights, which are no version.
        self._version = protocols.NO_VERSION

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        """Takes as long as the chunk's share of the snapshot: the third weight verb."""
        await self._take(self.model.load_seconds(self.devices) / chunk.count)

    async def finish_weight_update(self, policy_version: int) -> None:
        """Holds the new version: the fourth weight verb."""
        self._check_alive()
        self._version = policy_version

    async def warm(self) -> None:
        """Compiles, at the first call only."""
        await self._called("warm")
        await self._take(0.0 if self._warmed else self.warm_seconds)
        self._warmed = True

    async def join(self, generation: int, address: Mapping[str, Any]) -> None:
        """Connects, if the trainer still listens under this membership generation."""
        await self._called("join")
        await self._take(0.0)
        if self.channels.listening.get(self.worker) != generation:
            raise protocols.LibraError(f"the trainer does not listen for {self.worker} under generation {generation}")
        self.channels.connected[self.worker] = self._generation = generation

    async def contribute(self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share]) -> Mapping[str, float]:
        """Computes its share, if the share is not empty, and sends it; does not wait for the core trainer."""
        await self._called("contribute")
        start_time = asyncio.get_running_loop().time()
        if self._version != batch.policy_version:
            raise protocols.LibraError(f"the training side of {self.worker} holds version {self._version}")
        lengths = [own_tokens(trajectory) for trajectory in trained(batch.rest, self.masks)]
        # Trainer and workers split by the same rule, so no list of sequences has to be sent.
        mine = split(lengths, shares)[1][self.worker]
        if not mine:
            return {"seconds": 0.0, "micro_batches": 0.0, "bytes": 0.0}
        training = self.train_seconds([lengths[index] for index in mine])
        # Gradient sums have twice the bytes of a synced snapshot: float32 against two bytes a value.
        sending = 2.0 * self.model.load_seconds(self.devices)
        await self._take(self.slowdown * (training + sending))
        self.channels.send(self.worker, self._generation, batch.policy_version, mine)
        seconds = asyncio.get_running_loop().time() - start_time
        return {"seconds": seconds, "micro_batches": counted(mine, lengths), "bytes": 2.0 * self.model.sync_bytes}

    async def leave(self) -> None:
        """Drops the version and the membership generation."""
        await self._called("leave")
        self._version, self._generation = protocols.NO_VERSION, 0

    async def shutdown(self) -> None:
        """Ends. Idempotent."""
        self.kill()
