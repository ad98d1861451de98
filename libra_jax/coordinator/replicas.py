"""The training side of hybrid workers: replica processes, the parameters they hold, and the shares they compute.

A replica reads each version from the snapshot that the engines are given, after them and beside whatever the trainer
does next; the snapshot's memory is written again only once every replica has let go of it (`settle`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import deadlines, failure


@dataclass
class Replica:
    """One worker's training side, over all its processes.

    Attributes:
      spec: how its actor is made.
      proxy: the actor, a `protocols.Replica`; None while there is no process.
      version: the version whose parameters it holds; `NO_VERSION` for none.
      follows: it gets every version that is published.
      loading: the weight update under way.
      load_seconds: that its last one took.
    """

    spec: protocols.ActorSpec
    proxy: Any = None
    version: int = protocols.NO_VERSION
    follows: bool = False
    loading: asyncio.Task[None] | None = None
    load_seconds: float = 0.0


class Replicas:
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
        self._replicas = {worker: Replica(spec) for worker, spec in specs.items()}
        self._out = asyncio.Event()  # a snapshot may be read
        self._held: tuple[int, Sequence[protocols.WeightBucket]] = protocols.NO_VERSION, ()

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

        await failure.together(*(guarded(worker) for worker in self._replicas))

    async def ensure(self, worker: str) -> None:
        """The worker has a replica process that is up; one that has died unseen is replaced."""
        replica = self._replicas[worker]
        if replica.proxy is not None:
            try:
                await self._ask(replica, replica.proxy.leave(), "answer", "transition")
                return
            except protocols.LibraError:
                replica.proxy = None
        await self._stop(replica)  # of one that was lost, what is left
        name, seconds = replica.spec.name, self._limits.trainer_start
        self._recorder.status(name, "starting")
        making = self._cluster.spawn(replica.spec)
        proxy = await deadlines.within(seconds, making, f"The making of {name}", "trainer_start")
        await deadlines.within(seconds, proxy.start(), f"The start of {name}", "trainer_start")
        opening = proxy.init_weight_transfer(self._transport)
        await deadlines.within(self._limits.publish, opening, f"Opening {name}'s weight transport", "publish")
        replica.proxy = proxy
        self._recorder.status(name, "idle")

    def published(self, version: int, buckets: Sequence[protocols.WeightBucket]) -> None:
        """A snapshot is out: replicas that follow begin to read it."""
        self._held = version, buckets
        self._out.set()
        for worker, replica in self._replicas.items():
            if replica.follows and replica.version != version:
                self._load(worker, replica)

    async def settle(self) -> None:
        """Returns when no replica reads the present snapshot, which is about to be written over.

        One that takes much longer than it took before is given up: it holds no version, and follows none.
        """
        self._out.clear()
        reading = [replica for replica in self._replicas.values() if replica.loading is not None]
        loads = {replica.loading for replica in reading if replica.loading is not None}
        if loads:
            slowest = max(replica.load_seconds for replica in reading)
            await asyncio.wait(loads, timeout=max(self._late_seconds, self._late * slowest))
        for replica in reading:
            if replica.loading is not None:
                self._give_up(replica, "it was still reading a version when the next one came")
        self._held = protocols.NO_VERSION, ()

    def _give_up(self, replica: Replica, why: str) -> None:
        """The replica has to be given parameters anew before it can be of use."""
        if replica.loading is not None and replica.loading is not asyncio.current_task():
            replica.loading.cancel()
        replica.follows, replica.version = False, protocols.NO_VERSION
        self._recorder.note(f"{replica.spec.name} holds no parameters: {why}")

    async def fetch(self, worker: str) -> int:
        """Gives the worker's replica the version that is out, or the next to come; returns its bytes.

        Raises:
          LibraError: it could not be loaded.
        """
        await self._out.wait()
        replica, nbytes = self._replicas[worker], sum(bucket.nbytes for bucket in self._held[1])
        if replica.loading is None:
            self._load(worker, replica)
        assert replica.loading is not None
        await asyncio.wait({replica.loading})
        if replica.version == protocols.NO_VERSION:
            raise protocols.WorkerLost(f"{replica.spec.name} could not be given the parameters that are out")
        return nbytes

    def follow(self, worker: str) -> None:
        """From now on the worker's replica gets every version; one that came out meanwhile, too."""
        replica = self._replicas[worker]
        replica.follows = True
        if self._held[0] not in (protocols.NO_VERSION, replica.version):
            self._load(worker, replica)

    def _load(self, worker: str, replica: Replica) -> None:
        if replica.loading is None and replica.proxy is not None:
            loading = asyncio.get_running_loop().create_task(self._update(replica, *self._held))
            replica.loading = loading
            loading.add_done_callback(lambda _: setattr(replica, "loading", None))

    async def _update(self, replica: Replica, version: int, buckets: Sequence[protocols.WeightBucket]) -> None:
        """The four verbs, as an engine's; what goes wrong leaves a replica without a version."""
        replica.version = protocols.NO_VERSION
        begin, proxy = asyncio.get_running_loop().time(), replica.proxy
        if version == protocols.NO_VERSION:
            return
        try:
            await self._ask(replica, proxy.start_weight_update(version), "prepare for new parameters")
            for bucket in buckets:
                await self._ask(replica, proxy.update_weights(bucket), f"load weight bucket {bucket.index}")
            await self._ask(replica, proxy.finish_weight_update(version), "finish its weight update")
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
        replica = self._replicas[worker]
        what = "compile its gradient steps"
        await self._ask(replica, replica.proxy.warm(), what, "trainer_start")

    async def join(self, worker: str, epoch: int, address: Mapping[str, Any]) -> None:
        """Connects the worker's replica to the trainer's channel."""
        replica = self._replicas[worker]
        await self._ask(replica, replica.proxy.join(epoch, address), "join training", "transition")

    async def leave(self, worker: str) -> None:
        """Takes channel and parameters from the worker's replica, or its life if it does not let go of them."""
        replica = self._replicas[worker]
        replica.follows, replica.version = False, protocols.NO_VERSION
        if replica.proxy is None:
            return
        try:
            await self._ask(replica, replica.proxy.leave(), "leave training", "transition")
        except protocols.LibraError as error:
            self._recorder.note(f"{replica.spec.name} is ended: {error}")
            await self.end(worker)

    async def end(self, worker: str) -> None:
        """Ends the worker's replica process; a later `ensure` makes another."""
        replica = self._replicas[worker]
        replica.follows, replica.version, replica.proxy = False, protocols.NO_VERSION, None
        if replica.loading is not None:
            replica.loading.cancel()
        await self._stop(replica)

    async def contribute(
        self, worker: str, batch: protocols.TrainBatch, shares: Sequence[protocols.Share]
    ) -> Mapping[str, float]:
        """The worker's replica computes its share of a step, once it has its parameters; returns what it says of that.

        Raises:
          LibraError: it could not; whatever it sent the trainer does not count.
        """
        replica = self._replicas[worker]
        if replica.loading is not None:
            await asyncio.wait({replica.loading})
        if replica.version != batch.policy_version:
            raise protocols.LibraError(f"{replica.spec.name} could not be given version {batch.policy_version}")
        begin = asyncio.get_running_loop().time()
        self._recorder.status(replica.spec.name, f"training step {batch.policy_version + 1}")
        work = replica.proxy.contribute(batch, shares)
        told: Mapping[str, float] = await self._ask(replica, work, "compute its share of a step", "train_step")
        end = asyncio.get_running_loop().time()
        self._recorder.span(replica.spec.name, "share", begin, end, {"step": batch.policy_version + 1, **told})
        self._recorder.status(replica.spec.name, "idle")
        return told

    async def _stop(self, replica: Replica) -> None:
        try:
            stopping = self._cluster.stop(replica.spec.name)
            what = f"The end of {replica.spec.name}"
            await deadlines.within(self._limits.shutdown, stopping, what, "shutdown")
        except protocols.LibraError as error:
            self._recorder.note(f"{replica.spec.name} could not be stopped cleanly: {error}")

    async def _ask(self, replica: Replica, work: Any, what: str, field: str = "publish") -> Any:
        seconds = getattr(self._limits, field)
        return await deadlines.within(seconds, work, f"{replica.spec.name}, asked to {what},", field)
