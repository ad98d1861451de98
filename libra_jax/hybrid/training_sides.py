"""The training sides of hybrid workers: their processes, the parameters they hold, and the shares they compute.

A training side reads each version from the snapshot of a weight sync, after the engines and while the trainer
continues. The snapshot's memory is rewritten only after every training side has released it (`settle`).

An actor takes one call at a time, and an aborted call continues in the actor. So a training side whose weight update
was aborted gets no further call before `ensure`. `ensure` waits until the old call is over, or restarts the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import protocols
from libra_jax.trainer_control import client as hybrid_client
from libra_jax.utils import deadlines, run_context

Copies = Mapping[int, Sequence[protocols.WeightChunk]]
"""The chunks of a version on each host; empty if the host's relay failed.

Workers of a host without an entry read the trainer's memory.
"""

LOAD_VERBS = 3
"""Deadline of a whole weight update, in units of `deadlines.weight_sync`: its start, all its chunks, and its end."""


@dataclass
class TrainingSide:
    """One worker's training side, across all its processes.

    Attributes:
      spec: how to make its actor.
      client: calls the present process; None without a process.
      version: version of its parameters; `NO_VERSION` without parameters.
      follows: True if it receives every version.
      loading: the weight update under way.
      aborted: True if a weight update was aborted, with which the actor may still be busy.
      load_seconds: seconds of the last weight update.
    """

    spec: protocols.ActorSpec
    client: hybrid_client.HybridActorClient | None = None
    version: int = protocols.NO_VERSION
    follows: bool = False
    loading: asyncio.Task[None] | None = None
    aborted: bool = False
    load_seconds: float = 0.0


class TrainingSides:
    """The training sides of all hybrid workers, by worker name. Create it inside the event loop that it serves.

    Args:
      run: what the parts of the run share (`deadlines`, `elastic`, `rollout`). The recorder gets a span for each weight
        update and each share.
      specs: how to make the training side of each worker.

    Attributes:
      hosts: hosts of the training sides, if the run spans several hosts.
    """

    def __init__(self, run: run_context.RunContext, specs: Mapping[str, protocols.ActorSpec]) -> None:
        config = run.config
        self._limits = config.deadlines
        self._late, self._late_seconds = config.elastic.late_factor, config.elastic.late_min_seconds
        self._transport = {"kind": config.rollout.transport}
        self._cluster = run.cluster
        self._recorder = run.recorder
        self._clock = run.clock
        self._sides = {worker: TrainingSide(spec) for worker, spec in specs.items()}
        self.hosts = {spec.host for spec in specs.values() if spec.host is not None}
        # Set while a snapshot may be read.
        self._out = asyncio.Event()
        self._held: tuple[int, Sequence[protocols.WeightChunk]] = protocols.NO_VERSION, ()
        self._copies: dict[int, Sequence[protocols.WeightChunk]] = {}

    async def start(self) -> None:
        """Starts and warms every process. A process that fails is tried again at its first switch to training."""

        async def guarded(worker: str) -> None:
            try:
                await self.ensure(worker)
                await self.warm(worker)
            except protocols.ConfigError:
                raise
            except protocols.LibraError as error:
                self._recorder.note(
                    f"The training side of {worker} is not ready, and is tried again when needed: {error}"
                )
                await self.end(worker)

        await deadlines.together(*(guarded(worker) for worker in self._sides))

    async def ensure(self, worker: str) -> None:
        """Makes sure that the worker's process answers. Restarts it if it has died unnoticed."""
        side = self._sides[worker]
        _forget(side)
        if side.client is not None:
            try:
                # An actor serves one call at a time, so an answer also means that an aborted update is over.
                await side.client.leave()
                side.aborted = False
                return
            except protocols.LibraError:
                side.client = None
        # Remains of a lost process hold the devices and the name.
        await self._stop(side)
        name = side.spec.name
        client = hybrid_client.HybridActorClient(self._cluster, side.spec, self._limits)
        self._recorder.status(name, "starting its process")
        await client.make()
        self._recorder.status(name, "loading the model")
        await client.start()
        await client.init_weight_transfer(self._transport)
        side.client, side.aborted = client, False
        self._recorder.status(name, "idle")

    def offer(self, version: int, chunks: Sequence[protocols.WeightChunk], copies: Copies | None = None) -> None:
        """Offers a new snapshot. Training sides that follow start to read it, or their host's copy."""
        self._held = version, chunks
        self._copies = dict(copies or {})
        self._out.set()
        for side in self._sides.values():
            # A version is offered again if an engine has caught up by a new snapshot.
            if side.follows and side.version != version:
                self._load(side)

    def add_copies(self, version: int, copies: Copies) -> None:
        """Adds copies of the offered snapshot on further hosts."""
        if version == self._held[0]:
            self._copies.update(copies)

    async def settle(self) -> None:
        """Withdraws the present snapshot, and waits until no training side reads it.

        An update that takes much longer than the last one is aborted; that training side then follows no version.
        """
        self._out.clear()
        self._held = protocols.NO_VERSION, ()
        reading = [side for side in self._sides.values() if side.loading is not None]
        loads = {side.loading for side in reading if side.loading is not None}
        if loads:
            slowest = max(side.load_seconds for side in reading)
            await asyncio.wait(loads, timeout=max(self._late_seconds, self._late * slowest))
        for side in reading:
            if side.loading is not None:
                self._abort(side, "it was still reading a version when the next one came")

    def _abort(self, side: TrainingSide, why: str) -> None:
        """Aborts an update. The training side then holds no parameters until `fetch`."""
        _forget(side)
        self._recorder.note(f"{side.spec.name} holds no parameters: {why}")

    async def fetch(self, worker: str) -> int:
        """Gives the worker the offered version, or the next one. Returns its size in bytes.

        Raises:
          LibraError: the version could not be loaded, or none was offered in time.
        """
        side = self._sides[worker]
        # An offer may be withdrawn before this task wakes.
        while self._held[0] == protocols.NO_VERSION:
            what = f"{side.spec.name}'s wait for a version to come out"
            await deadlines.within(self._limits.train_step, self._out.wait(), what, "train_step")
        nbytes = sum(chunk.nbytes for chunk in self._held[1])
        _check_ready(side)
        self._load(side)
        await self._loaded(side)
        if side.version == protocols.NO_VERSION:
            raise protocols.WorkerLost(f"{side.spec.name} could not be given the parameters that are out")
        return nbytes

    def follow(self, worker: str) -> None:
        """Gives the worker every version from now on, including the offered one.

        Raises:
          WorkerLost: the training side is not ready.
        """
        side = self._sides[worker]
        _check_ready(side)
        side.follows = True
        if self._held[0] not in (protocols.NO_VERSION, side.version):
            self._load(side)

    def _load(self, side: TrainingSide) -> None:
        """Starts a weight update with the offered version, unless one is under way."""
        version, chunks = self._held
        assert version != protocols.NO_VERSION, f"nothing is out that {side.spec.name} could be given"
        if side.spec.host is not None:
            chunks = self._copies.get(side.spec.host, chunks)
        if side.loading is None:
            loading = asyncio.get_running_loop().create_task(self._update(side, version, chunks))
            side.loading = loading

            def ended(loading: asyncio.Task[None]) -> None:
                # Otherwise it was aborted, and another update may be under way by now.
                if side.loading is loading:
                    side.loading = None

            loading.add_done_callback(ended)

    async def _loaded(self, side: TrainingSide) -> None:
        """Waits until no weight update is under way."""
        if side.loading is None:
            return
        what = f"{side.spec.name}'s whole weight update"
        try:
            await deadlines.within(
                LOAD_VERBS * self._limits.weight_sync, asyncio.wait({side.loading}), what, "weight_sync"
            )
        except protocols.DeadlineMissed as error:
            self._abort(side, str(error))
            raise

    async def _update(self, side: TrainingSide, version: int, chunks: Sequence[protocols.WeightChunk]) -> None:
        """Runs the weight verbs. After a failure, the training side holds no version."""
        side.version = protocols.NO_VERSION
        # During the update the parameters are of two versions, so the side holds none.
        begin, client = self._clock(), _up(side)
        try:
            if not chunks:
                raise protocols.WorkerLost(f"version {version} could not be brought to its host")
            await client.start_weight_update(version)
            for chunk in chunks:
                await client.update_weights(chunk)
            await client.finish_weight_update(version)
        except protocols.LibraError as error:
            self._abort(side, str(error))
            return
        side.version = version
        end = self._clock()
        side.load_seconds = end - begin
        self._recorder.span("weights", f"sync {side.spec.name}", begin, end, {"policy_version": version})

    def follows(self, worker: str) -> bool:
        """Returns whether the worker receives every version."""
        return self._sides[worker].follows

    def holds(self, worker: str, version: int) -> bool:
        """Returns whether the worker holds this version, or is reading it."""
        side = self._sides[worker]
        return side.version == version or (side.loading is not None and self._held[0] == version)

    async def warm(self, worker: str) -> None:
        """Compiles the worker's gradient steps, if they are not compiled yet."""
        await _up(self._sides[worker]).warm()

    async def join(self, worker: str, generation: int, address: Mapping[str, Any]) -> None:
        """Connects the worker to the trainer's gradient channel."""
        await _up(self._sides[worker]).join(generation, address)

    async def leave(self, worker: str) -> None:
        """Takes gradient channel and parameters from the worker. Ends its process if it does not release them."""
        side = self._sides[worker]
        _forget(side)
        # An aborted call may still be making its process.
        if side.client is None:
            await self._stop(side)
            return
        try:
            await side.client.leave()
            side.aborted = False
        except protocols.LibraError as error:
            self._recorder.note(f"{side.spec.name} is ended: {error}")
            await self.end(worker)

    async def end(self, worker: str) -> None:
        """Ends the worker's process. A later `ensure` starts another."""
        side = self._sides[worker]
        _forget(side)
        side.client = None
        await self._stop(side)

    async def contribute(
        self, worker: str, batch: protocols.TrainBatch, shares: Sequence[protocols.Share]
    ) -> Mapping[str, float]:
        """Lets the worker compute its share of a step as soon as it holds the parameters. Returns its metrics.

        Raises:
          LibraError: it could not compute the share. Sums that it has already sent do not count.
        """
        side = self._sides[worker]
        # A step may begin while the worker still reads the step's parameters (`holds`).
        await self._loaded(side)
        if side.version != batch.policy_version:
            raise protocols.LibraError(f"{side.spec.name} could not be given version {batch.policy_version}")
        begin = self._clock()
        self._recorder.status(side.spec.name, f"training step {batch.policy_version + 1}")
        told = await _up(side).contribute(batch, shares)
        end = self._clock()
        self._recorder.span(side.spec.name, "share", begin, end, {"step": batch.policy_version + 1, **told})
        self._recorder.status(side.spec.name, "idle")
        return told

    async def _stop(self, side: TrainingSide) -> None:
        try:
            await hybrid_client.HybridActorClient(self._cluster, side.spec, self._limits).stop()
        except protocols.LibraError as error:
            self._recorder.note(f"{side.spec.name} could not be stopped cleanly: {error}")


def _forget(side: TrainingSide) -> None:
    """Clears the training side's version, stops its following, and aborts a weight update under way."""
    side.follows, side.version = False, protocols.NO_VERSION
    if (loading := side.loading) is not None:
        side.loading, side.aborted = None, True
        # An update that fails calls this from its own task, which must not cancel itself.
        if loading is not asyncio.current_task():
            loading.cancel()


def _up(side: TrainingSide) -> hybrid_client.HybridActorClient:
    """Returns the training side's client. Raises WorkerLost if it has no process."""
    if side.client is None:
        raise protocols.WorkerLost(f"{side.spec.name} has no process")
    return side.client


def _check_ready(side: TrainingSide) -> None:
    """Raises WorkerLost if the training side is not ready for parameters; `ensure` makes it ready."""
    if side.client is None:
        raise protocols.WorkerLost(f"{side.spec.name} has no process, and cannot be given parameters")
    if side.aborted:
        raise protocols.WorkerLost(
            f"{side.spec.name} may still be in a weight update that was aborted, and cannot be given another"
        )
