"""The training side of hybrid workers: replica processes, the parameters they hold, and the shares they compute.

A replica reads each version from the snapshot that the engines are given, after them and beside whatever the trainer
does next; the snapshot's memory is written again only once every replica has let go of it (`settle`).

An actor takes one call at a time, and giving a call up does not end it. So a replica whose load was given up is asked
for no other before `ensure`, which hears from it that the old call is over, or makes another process.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as configuration
from libra_jax import deadlines, protocols
from libra_jax.trainer_control import client as hybrid_client

Copies = Mapping[int, Sequence[protocols.WeightChunk]]
"""Host to a version's chunks as they are reached there; none where it could not be given them. Hosts that are missing
read the trainer's memory."""

LOAD_VERBS = 3
"""A whole weight update may take so many times `deadlines.publish`: its begin, its chunks together, and its end."""


@dataclass
class TrainingSide:
    """One worker's training side, over all its processes.

    Attributes:
      spec: how its actor is made.
      client: calls its process; None while there is none.
      version: the version whose parameters it holds; `NO_VERSION` for none.
      follows: it gets every version that is published.
      loading: the weight update under way.
      gave_up: a weight update was given up, and its actor may be in the middle of that still.
      load_seconds: that its last one took.
    """

    spec: protocols.ActorSpec
    client: hybrid_client.HybridClient | None = None
    version: int = protocols.NO_VERSION
    follows: bool = False
    loading: asyncio.Task[None] | None = None
    gave_up: bool = False
    load_seconds: float = 0.0


class TrainingSides:
    """All replicas of a run, by the name of their worker. Made inside the event loop it serves.

    Args:
      config: the run's configuration (`deadlines`, `elastic`, `rollout`).
      cluster: makes and ends the actors.
      specs: worker to how its replica is made.
      recorder: gets a span for each weight update and each share.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        cluster: protocols.Cluster,
        specs: Mapping[str, protocols.ActorSpec],
        recorder: protocols.Recorder,
    ) -> None:
        self._limits = config.deadlines
        self._late, self._late_seconds = config.elastic.late, config.elastic.late_seconds
        self._transport = {"kind": config.rollout.transport}
        self._cluster = cluster
        self._recorder = recorder
        self._replicas = {worker: TrainingSide(spec) for worker, spec in specs.items()}
        self._out = asyncio.Event()  # a snapshot may be read
        self._held: tuple[int, Sequence[protocols.WeightChunk]] = protocols.NO_VERSION, ()
        self._copies: dict[int, Sequence[protocols.WeightChunk]] = {}

    @property
    def hosts(self) -> set[int]:
        """Those that have a replica, where the run is laid out over several."""
        return {replica.spec.host for replica in self._replicas.values() if replica.spec.host is not None}

    async def start(self) -> None:
        """Starts every process and compiles, so that a borrow finds it warm; what fails is tried again then."""

        async def guarded(worker: str) -> None:
            try:
                await self.ensure(worker)
                await self.warm(worker)
            except protocols.ConfigError:
                raise
            except protocols.LibraError as error:
                self._recorder.note(f"The replica of {worker} is not ready, and is tried again when needed: {error}")
                await self.end(worker)

        await deadlines.together(*(guarded(worker) for worker in self._replicas))

    async def ensure(self, worker: str) -> None:
        """The worker has a replica process that is up; one that has died unseen is replaced."""
        replica = self._replicas[worker]
        _forget(replica)
        if replica.client is not None:
            try:
                await replica.client.leave()
                replica.gave_up = False
                return
            except protocols.LibraError:
                replica.client = None
        await self._stop(replica)  # of one that was lost, what is left
        name, client = replica.spec.name, self._client(replica)
        self._recorder.status(name, "starting its process")
        await client.make()
        self._recorder.status(name, "loading the model")
        await client.start()
        await client.init_weight_transfer(self._transport)
        replica.client, replica.gave_up = client, False
        self._recorder.status(name, "idle")

    def _client(self, replica: TrainingSide) -> hybrid_client.HybridClient:
        return hybrid_client.HybridClient(self._cluster, replica.spec, self._limits)

    def published(self, version: int, chunks: Sequence[protocols.WeightChunk], copies: Copies | None = None) -> None:
        """A snapshot is out: replicas that follow begin to read it, those of hosts with a copy of it from there."""
        self._held = version, chunks
        self._copies = dict(copies or {})
        self._out.set()
        for replica in self._replicas.values():
            if replica.follows and replica.version != version:
                self._load(replica)

    def copied(self, version: int, copies: Copies) -> None:
        """What is out has been copied to hosts anew."""
        if version == self._held[0]:
            self._copies.update(copies)

    async def settle(self) -> None:
        """Returns when no replica reads the present snapshot, which is about to be written over.

        One that takes much longer than it took before is given up: it holds no version, and follows none.
        """
        self._out.clear()
        self._held = protocols.NO_VERSION, ()
        reading = [replica for replica in self._replicas.values() if replica.loading is not None]
        loads = {replica.loading for replica in reading if replica.loading is not None}
        if loads:
            slowest = max(replica.load_seconds for replica in reading)
            await asyncio.wait(loads, timeout=max(self._late_seconds, self._late * slowest))
        for replica in reading:
            if replica.loading is not None:
                self._give_up(replica, "it was still reading a version when the next one came")

    def _give_up(self, replica: TrainingSide, why: str) -> None:
        """The replica has to be given parameters anew before it can be of use."""
        _forget(replica)
        self._recorder.note(f"{replica.spec.name} holds no parameters: {why}")

    async def fetch(self, worker: str) -> int:
        """Gives the worker's replica the version that is out, or the next to come; returns its bytes.

        Raises:
          LibraError: it could not be loaded, or none came.
        """
        replica = self._replicas[worker]
        while self._held[0] == protocols.NO_VERSION:  # one that came may be written over before this wakes
            what = f"{replica.spec.name}'s wait for a version to come out"
            await deadlines.within(self._limits.train_step, self._out.wait(), what, "train_step")
        nbytes = sum(chunk.nbytes for chunk in self._held[1])
        _check_ready(replica)
        self._load(replica)
        await self._loaded(replica)
        if replica.version == protocols.NO_VERSION:
            raise protocols.WorkerLost(f"{replica.spec.name} could not be given the parameters that are out")
        return nbytes

    def follow(self, worker: str) -> None:
        """From now on the worker's replica gets every version; one that came out meanwhile, too.

        Raises:
          WorkerLost: it cannot be given any.
        """
        replica = self._replicas[worker]
        _check_ready(replica)
        replica.follows = True
        if self._held[0] not in (protocols.NO_VERSION, replica.version):
            self._load(replica)

    def _load(self, replica: TrainingSide) -> None:
        """Begins to give a replica that is ready what is out, unless it is being given parameters already."""
        version, chunks = self._held
        assert version != protocols.NO_VERSION, f"nothing is out that {replica.spec.name} could be given"
        if replica.spec.host is not None:
            chunks = self._copies.get(replica.spec.host, chunks)
        if replica.loading is None:
            loading = asyncio.get_running_loop().create_task(self._update(replica, version, chunks))
            replica.loading = loading
            loading.add_done_callback(functools.partial(_ended, replica))

    async def _loaded(self, replica: TrainingSide) -> None:
        """Returns when no weight update is under way.

        Raises:
          DeadlineMissed: it took too long, and was given up.
        """
        if replica.loading is None:
            return
        what = f"{replica.spec.name}'s whole weight update"
        try:
            await deadlines.within(LOAD_VERBS * self._limits.publish, asyncio.wait({replica.loading}), what, "publish")
        except protocols.DeadlineMissed as error:
            self._give_up(replica, str(error))
            raise

    async def _update(self, replica: TrainingSide, version: int, chunks: Sequence[protocols.WeightChunk]) -> None:
        """The four verbs, as an engine's; what goes wrong leaves a replica without a version."""
        replica.version = protocols.NO_VERSION
        begin, client = asyncio.get_running_loop().time(), _up(replica)
        try:
            if not chunks:
                raise protocols.WorkerLost(f"version {version} could not be brought to its host")
            await client.start_weight_update(version)
            for chunk in chunks:
                await client.update_weights(chunk)
            await client.finish_weight_update(version)
        except protocols.LibraError as error:
            self._give_up(replica, str(error))
            return
        replica.version = version
        end = asyncio.get_running_loop().time()
        replica.load_seconds = end - begin
        self._recorder.span("weights", f"sync {replica.spec.name}", begin, end, {"policy_version": version})

    def follows(self, worker: str) -> bool:
        """The worker's replica gets every version."""
        return self._replicas[worker].follows

    def holds(self, worker: str, version: int) -> bool:
        """The worker's replica has the parameters of this version, or is reading them."""
        replica = self._replicas[worker]
        return replica.version == version or (replica.loading is not None and self._held[0] == version)

    async def warm(self, worker: str) -> None:
        """Compiles what the worker's replica has not compiled yet."""
        await _up(self._replicas[worker]).warm()

    async def join(self, worker: str, epoch: int, address: Mapping[str, Any]) -> None:
        """Connects the worker's replica to the trainer's channel."""
        await _up(self._replicas[worker]).join(epoch, address)

    async def leave(self, worker: str) -> None:
        """Takes channel and parameters from the worker's replica, or its life if it does not let go of them."""
        replica = self._replicas[worker]
        _forget(replica)
        if replica.client is None:  # one that was being made, perhaps, which nobody waits for any more
            await self._stop(replica)
            return
        try:
            await replica.client.leave()
            replica.gave_up = False
        except protocols.LibraError as error:
            self._recorder.note(f"{replica.spec.name} is ended: {error}")
            await self.end(worker)

    async def end(self, worker: str) -> None:
        """Ends the worker's replica process; a later `ensure` makes another."""
        replica = self._replicas[worker]
        _forget(replica)
        replica.client = None
        await self._stop(replica)

    async def contribute(
        self, worker: str, batch: protocols.TrainBatch, shares: Sequence[protocols.Share]
    ) -> Mapping[str, float]:
        """The worker's replica computes its share of a step, once it has its parameters; returns what it says of that.

        Raises:
          LibraError: it could not; whatever it sent the trainer does not count.
        """
        replica = self._replicas[worker]
        await self._loaded(replica)
        if replica.version != batch.policy_version:
            raise protocols.LibraError(f"{replica.spec.name} could not be given version {batch.policy_version}")
        begin = asyncio.get_running_loop().time()
        self._recorder.status(replica.spec.name, f"training step {batch.policy_version + 1}")
        told = await _up(replica).contribute(batch, shares)
        end = asyncio.get_running_loop().time()
        self._recorder.span(replica.spec.name, "share", begin, end, {"step": batch.policy_version + 1, **told})
        self._recorder.status(replica.spec.name, "idle")
        return told

    async def _stop(self, replica: TrainingSide) -> None:
        try:
            await self._client(replica).stop()
        except protocols.LibraError as error:
            self._recorder.note(f"{replica.spec.name} could not be stopped cleanly: {error}")


def _forget(replica: TrainingSide) -> None:
    """It holds no parameters and follows no version; a weight update under way is given up."""
    replica.follows, replica.version = False, protocols.NO_VERSION
    if (loading := replica.loading) is not None:
        replica.loading, replica.gave_up = None, True
        if loading is not asyncio.current_task():
            loading.cancel()


def _up(replica: TrainingSide) -> hybrid_client.HybridClient:
    """Returns the replica's client; raises WorkerLost if it has no process."""
    if replica.client is None:
        raise protocols.WorkerLost(f"{replica.spec.name} has no process")
    return replica.client


def _check_ready(replica: TrainingSide) -> None:
    """Raises WorkerLost if the replica cannot be given parameters: `ensure` makes it ready."""
    if replica.client is None:
        raise protocols.WorkerLost(f"{replica.spec.name} has no process, and cannot be given parameters")
    if replica.gave_up:
        raise protocols.WorkerLost(
            f"{replica.spec.name} may still be in a weight update that was given up, and cannot be given another"
        )


def _ended(replica: TrainingSide, loading: asyncio.Task[None]) -> None:
    if replica.loading is loading:  # else it was given up
        replica.loading = None
