"""Weight sync: brings every rollout engine to the trainer's version.

The trainer takes a snapshot of its parameters and stages it chunk by chunk. All engines load a chunk while the trainer
stages the next. Requests in flight are kept: an engine pauses, loads the weights through the four weight verbs, and
resumes. A chunk stays readable until the next snapshot is opened.

Engines on the trainer's host read the snapshot itself. Engines on another host read the copy of their host's weight
relay, and load a chunk while the next one crosses the network (`relay_tree`). A slow host does not hold up the others.

This module only plans and calls; the bytes move between the processes of trainer, relays and engines.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence
from typing import Any, Literal

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import instances
from libra_jax.hybrid import training_sides
from libra_jax.utils import deadlines, turns
from libra_jax.weights import relay_tree


class WeightSync:
    """Brings engines and the training sides of hybrid workers to the trainer's version.

    Args:
      config: the run's configuration (`deadlines.weight_sync`).
      trainer: takes the snapshots.
      engines: the rollout engines. An engine that fails is reported lost there, and the others continue.
      recorder: gets a span for each engine, on the track `weights`.
      sides: training sides that read the same snapshots; None without hybrid workers.
      hosts: the weight relays; None if the run has one host.

    Attributes:
      version: the trainer's version. A caller that trains sets it while it holds the trainer's lock.
      served: version of the last completed sync, which is the dispatch version of a group dispatched now.
      nbytes: bytes of the last sync that an engine had to load. Frozen weights count in the first sync only.
      paused_seconds: seconds for which an engine stopped in the last sync, mean over engines.
      sent_bytes: bytes that weight relays sent to other hosts in the last sync; 0 without relays.
      whole_bytes: bytes of the chunks that these brought there.
    """

    def __init__(
        self,
        config: config_lib.RunConfig,
        *,
        trainer: protocols.WeightSource,
        engines: instances.Instances,
        recorder: protocols.Recorder,
        sides: training_sides.TrainingSides | None = None,
        hosts: relay_tree.RelayTree | None = None,
    ) -> None:
        self._sides = sides
        self._hosts = hosts
        # Only shared memory still holds the chunks after a sync; the other transports send each version once.
        self._keeps = config.rollout.transport == "memfd"
        self._staged: tuple[int, Sequence[protocols.WeightChunk]] = protocols.NO_VERSION, ()
        self._checksum = config.rollout.checksum
        self._trainer = trainer
        self._engines = engines
        self._recorder = recorder
        self.version = self.served = protocols.NO_VERSION
        self.nbytes = self.sent_bytes = self.whole_bytes = 0
        self.paused_seconds = 0.0
        self._at_once = config.rollout.sync_at_once
        self._frozen = ""  # digest of the frozen weights that engines hold under an adapter
        self._waiting: set[str] = set()

    async def sync_weights(self, version: int) -> float:
        """Sends the trainer's present version to every engine that is up. Returns the seconds this took."""
        start = asyncio.get_running_loop().time()
        async with self._trainer.lock:
            # Only under the lock, because a step that trains sets it there, too.
            self.version = version
            await self._send(version, [item for item in self._up() if item.policy_version != version])
            self.served = version
        return asyncio.get_running_loop().time() - start

    async def resync(self) -> None:
        """Sends the version to every engine again, because a restarted trainer holds it. The caller holds the lock."""
        if self.served != protocols.NO_VERSION:
            await self._send(self.version, self._up())

    async def catch_up(self, engine: instances.RolloutInstance) -> None:
        """Sends the present version to an engine that starts or wakes, before it serves.

        If the last snapshot is still in shared memory, the engine reads it there and does not wait for a training step.
        """
        if engine.state != "loaded":  # a repeated call after a loss of the trainer, while the engine moved on
            return
        if self._hosts is not None:
            # Taken before the wait: an engine that was restarted meanwhile must not be reported lost.
            life = engine.life
            self._waiting.add(engine.name)
            try:
                error = await self._hosts.ready(engine.spec.host)
            finally:
                self._waiting.discard(engine.name)
            if error is not None:
                self._engines.lost(engine, life, error)
                return
        if self._keeps:
            async with self._engines.weights:
                version, chunks = self._staged
                # A staged snapshot of another version is useless: a new one is opened below.
                if engine.state == "loaded" and version == self.version != protocols.NO_VERSION:
                    updates = [_Update(self._engines, engine, version, self._recorder)]
                    staged = relay_tree.expected(len(chunks))
                    for chunk, place in zip(chunks, staged, strict=True):
                        place.set_result(chunk)
                    copies = await self._spread(updates, staged)
                    if updates[0].going:
                        self._engines.serve([engine])
                    if self._sides is not None:
                        self._sides.add_copies(version, copies)
                    return
        with turns.queued():  # a training step, or a restart of the trainer, may be long
            await self._trainer.lock.acquire()
        try:
            if engine.state == "loaded" and self.version != protocols.NO_VERSION:
                await self._send(self.version, [engine])
        finally:
            self._trainer.lock.release()

    async def release(self) -> None:
        """Forgets the last snapshot, because the trainer whose memory holds it is about to end."""
        async with self._engines.weights:
            self._staged = protocols.NO_VERSION, ()
        if self._sides is not None:
            await self._sides.settle()

    def _up(self) -> list[instances.RolloutInstance]:
        """Returns the engines to load. An engine that waits for its host's relay catches up afterwards."""
        return [item for item in self._engines.loadable() if item.name not in self._waiting]

    async def _send(self, version: int, engines: Sequence[instances.RolloutInstance]) -> None:
        """Opens a new snapshot, sends it to the engines, and offers it to the training sides. Needs the lock."""
        if not engines and self._sides is None:
            return
        if self._sides is not None:
            await self._sides.settle()  # the new snapshot overwrites the memory that they read
        async with self._engines.weights:
            self._staged = protocols.NO_VERSION, ()
            # Made before the first await: if an engine is lost meanwhile, its life changes and its update is dropped.
            up = [engine for engine in engines if engine.state in ("loaded", "serving")]
            updates = [_Update(self._engines, engine, version, self._recorder) for engine in up]
            destinations = [
                protocols.WeightDestination(engine.name, engine.info.tensor_parallel if engine.info else 1, engine.life)
                for engine in up
            ]
            staged = relay_tree.expected(await self._trainer.open_weights(version, destinations))
            try:
                try:
                    copies = await self._spread(updates, staged, self._stage(version, staged))
                finally:
                    await self._trainer.close_weights(version)
            except protocols.TrainerLost as error:
                for update in updates:
                    # The engine holds part of the new weights, and the rest is lost with the trainer.
                    if update.going and update.begun and not update.ended:
                        self._engines.lost(update.engine, update.life, error)
                self._engines.serve(update.engine for update in updates if update.ended and update.going)
                raise
            self._engines.serve(update.engine for update in updates if update.going)
            paused = [update.paused for update in updates if update.ended]
            self.paused_seconds = sum(paused) / max(1, len(paused))
            # Only now may an engine that starts later read the snapshot from memory.
            self._staged = version, [chunk.result() for chunk in staged]
            chunks = self._staged[1]
            self.nbytes = sum(chunk.nbytes for chunk in chunks if not chunk.frozen or chunk.frozen != self._frozen)
            self._frozen = next((chunk.frozen for chunk in chunks if chunk.frozen), "")
            if self._hosts is not None:
                self.sent_bytes, self.whole_bytes = self._hosts.sent_bytes, self._hosts.whole_bytes
        if self._sides is not None:
            self._sides.offer(version, chunks, copies)

    async def _stage(self, version: int, staged: relay_tree.Chunks) -> None:
        for index, chunk in enumerate(staged):
            chunk.set_result(await self._trainer.stage_weights(version, index))

    async def _spread(
        self, updates: Sequence[_Update], staged: relay_tree.Chunks, *staging: Coroutine[Any, Any, None]
    ) -> training_sides.Copies:
        """Brings a version to all hosts and loads it into the engines. Returns the hosts' copies.

        Args:
          updates: one update for each engine.
          staged: the chunks on the trainer's host, each resolved once it is staged.
          staging: stages the chunks; left out if all are staged.
        """
        readers: list[tuple[int | None, list[_Update]]] = [(update.engine.spec.host, [update]) for update in updates]
        if staging and self._sides is not None:  # training sides read whole syncs, not one engine's catch-up
            readers += [(host, []) for host in self._sides.hosts]
        groups: dict[int | None, list[_Update]] = {}
        for host, mine in readers:
            # None: the workers of a host without a relay read the trainer's memory.
            relayed = host if self._hosts is not None and self._hosts.serve(host) else None
            groups.setdefault(relayed, []).extend(mine)
        copies = {host: relay_tree.expected(len(staged)) for host in groups if host is not None}
        work = [self._in_turns(group, staged if host is None else copies[host]) for host, group in groups.items()]
        if self._hosts is not None and copies:
            needed = {host for host in copies if groups[host]}
            lent = {item.spec.host for item in self._engines.engines.values() if item.state == "asleep"}
            work.append(self._hosts.pass_on(staged, copies, needed, {host for host in copies if host in lent}))
        await deadlines.together(*staging, *work)
        return {
            host: () if any(chunk.exception() for chunk in copy) else [chunk.result() for chunk in copy]
            for host, copy in copies.items()
        }

    async def _in_turns(self, updates: Sequence[_Update], chunks: relay_tree.Chunks) -> None:
        """Loads the version into the engines of one host, `rollout.sync_at_once` of them at a time."""
        size = self._at_once or max(1, len(updates))
        for first in range(0, max(1, len(updates)), size):
            await self._load(updates[first : first + size], chunks)

    async def _load(self, updates: Sequence[_Update], chunks: relay_tree.Chunks) -> None:
        """Loads the version into some engines of one host, chunk by chunk on arrival."""
        for index, place in enumerate(chunks):
            try:
                chunk = await asyncio.shield(place)
            except protocols.LibraError as error:  # the host's relay failed, so the rest cannot arrive
                for update in updates:
                    self._engines.lost(update.engine, update.life, error)
                return
            # Paused only now, when there is something to load: until the first chunk comes, the engine decodes.
            if not index:
                await deadlines.together(*(update.run("begin") for update in updates))
            if not self._checksum:  # the checksum was for relays, which have compared it, or for training sides
                chunk = dataclasses.replace(chunk, checksum=None)
            await deadlines.together(*(update.run("load", chunk) for update in updates))
        await deadlines.together(*(update.run("end") for update in updates))


class _Update:
    """One engine's part of a weight sync.

    Attributes:
      life: life of the engine in which the update began; a later life never gets part of it.
      begun: the engine has begun to load the version.
      ended: the engine serves the version.
      paused: seconds for which the engine stopped.
    """

    def __init__(
        self,
        engines: instances.Instances,
        engine: instances.RolloutInstance,
        version: int,
        recorder: protocols.Recorder,
    ) -> None:
        self.engine = engine
        self.life = engine.life
        self.begun = self.ended = False
        self.paused = 0.0
        self._engines = engines
        self._client = engine.client
        self._version = version
        self._recorder = recorder
        self._start = 0.0

    @property
    def going(self) -> bool:
        """True while the engine is in the life in which the update began."""
        return self.engine.life == self.life

    async def run(self, verb: Literal["begin", "load", "end"], chunk: protocols.WeightChunk | None = None) -> None:
        """Freezes decoding, loads one chunk, or lets the engine serve the version. Reports a failing engine lost."""
        if not self.going:
            return
        engine, version, client = self.engine, self._version, self._client
        try:
            if client is None:
                raise protocols.WorkerLost(f"engine {engine.name} was lost before its weight update")
            if verb == "begin":
                self._start, self.begun = asyncio.get_running_loop().time(), True
                self._engines.froze(engine)
                await client.pause()
                await client.start_weight_update(version)
            elif verb == "load":
                assert chunk is not None
                await client.update_weights(chunk)
            else:
                await client.finish_weight_update(version)
                await client.resume()
                self.ended = True
                end = asyncio.get_running_loop().time()
                self.paused = end - self._start
                if self.going:
                    self._engines.went_on(engine, version)
                    self._recorder.status(engine.name, f"serving version {version}")
                    self._recorder.span("weights", f"sync {engine.name}", self._start, end, {"policy_version": version})
        except Exception as error:  # after any failure the engine's weights cannot be trusted
            self._engines.lost(engine, self.life, error)
