"""Publication of a policy version: the trainer's snapshot, bucket by bucket, into every engine at once.

In-flight requests are kept: an engine is paused, given the weights through the four verbs, and resumed. Engines load a
bucket while the trainer stages the next (a bucket stays readable until the next snapshot is opened). Engines of another
host read its relay's copy of it, and load a bucket while the next one crosses the link (`relays`); each host's go at
their own pace.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from libra_jax import config as configuration
from libra_jax import deadlines, protocols, turns
from libra_jax.coordinator import instances, relays, replicas


class Publisher:
    """Brings engines to the trainer's version.

    Args:
      config: the run's configuration (`deadlines.publish`).
      trainer: a `protocols.Trainer`, or its proxy.
      trainer_lock: held by whoever calls the trainer, because it takes one call at a time.
      engines: the rollout engines; one that fails is reported lost there, and the others go on.
      recorder: gets a span for each engine, all on the track `weights`.
      members: replicas that read the same snapshots, if there are any.
      hosts: how weights come to hosts other than the trainer's, where the run is laid out over several.

    Attributes:
      version: the version that the trainer holds; whoever trains sets it while holding the lock.
      served: the version that was published last: what a group dispatched now is dispatched at.

    `catch_up` is what `engines.load_weights` calls, unless whoever made this puts something around it.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        trainer: Any,
        trainer_lock: asyncio.Lock,
        engines: instances.Instances,
        recorder: protocols.Recorder,
        members: replicas.Replicas | None = None,
        hosts: relays.Relays | None = None,
    ) -> None:
        self._members = members
        self._hosts = hosts
        self._keeps = config.rollout.transport == "memfd"
        self._staged: tuple[int, Sequence[protocols.WeightBucket]] = protocols.NO_VERSION, ()
        self._seconds = config.deadlines.publish
        self._checksum = config.rollout.checksum
        self._trainer = trainer
        self._lock = trainer_lock
        self._engines = engines
        self._recorder = recorder
        self.version = self.served = protocols.NO_VERSION
        self._waiting: set[str] = set()
        engines.load_weights = self.catch_up

    async def publish(self, version: int) -> float:
        """Publishes `version`, which the trainer holds now, to every engine that is up; returns the seconds it took."""
        start = asyncio.get_running_loop().time()
        async with self._lock:
            self.version = version
            await self._send(version, [item for item in self._up() if item.policy_version != version])
            self.served = version
        return asyncio.get_running_loop().time() - start

    async def renew(self) -> None:
        """Publishes again what the trainer holds, to every engine: another trainer holds it. With the lock held."""
        if self.served != protocols.NO_VERSION:
            await self._send(self.version, self._up())

    def _up(self) -> list[instances.Engine]:
        """Engines that can be given weights; one whose host's relay is being made catches up by itself after that."""
        return [item for item in self._engines.loadable() if item.name not in self._waiting]

    async def catch_up(self, engine: instances.Engine) -> None:
        """An engine that starts or wakes gets the published version before it serves.

        Where a snapshot's memory keeps what was published last, it is read from there: a training step may be long.
        """
        if engine.state != "loaded":  # asked again after the trainer's loss, it may be lost meanwhile, or up to date
            return
        if self._hosts is not None:
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
                version, buckets = self._staged
                if version not in (self.version, protocols.NO_VERSION) or engine.state != "loaded":
                    version = protocols.NO_VERSION
                if version != protocols.NO_VERSION:
                    await self._read(engine, version, buckets)
                    return
        with turns.queued():  # a step may be long, and so may be the making of a trainer anew
            await self._lock.acquire()
        try:
            if engine.state == "loaded" and self.version != protocols.NO_VERSION:
                await self._send(self.version, [engine])
        finally:
            self._lock.release()

    async def _read(self, engine: instances.Engine, version: int, buckets: Sequence[protocols.WeightBucket]) -> None:
        updates = [_Update(engine, version, self._seconds, self._recorder)]
        staged = relays.expected(len(buckets))
        for bucket, place in zip(buckets, staged, strict=True):
            place.set_result(bucket)
        copies = await self._spread(updates, staged)
        if updates[0].going:
            self._engines.serve([engine])
        if self._members is not None:
            self._members.copied(version, copies)

    async def _send(self, version: int, engines: Sequence[instances.Engine]) -> None:
        if not engines and self._members is None:
            return
        if self._members is not None:
            await self._members.settle()
        async with self._engines.weights:
            staged, copies = await self._publish(version, engines)
        if self._members is not None:
            self._members.published(version, staged, copies)

    async def _publish(
        self, version: int, engines: Sequence[instances.Engine]
    ) -> tuple[Sequence[protocols.WeightBucket], replicas.Copies]:
        self._staged = protocols.NO_VERSION, ()
        # Made before the first wait: an engine lost meanwhile is in another life, and left to its restart.
        up = [engine for engine in engines if engine.state in ("loaded", "serving")]  # others have gone since
        updates = [_Update(engine, version, self._seconds, self._recorder) for engine in up]
        count = await self._ask(self._trainer.open_weights(version), "open its weights")
        staged = relays.expected(count)
        try:
            try:
                copies = await self._spread(updates, staged, self._stage(version, staged))
            finally:
                await self._ask(self._trainer.close_weights(version), "close its weights")
        except protocols.TrainerLost as error:
            for update in updates:
                if update.half:  # it holds some of the new weights, and nobody has the rest
                    self._engines.lost(update.engine, update.life, error)
            self._serve(update for update in updates if update.ended)
            raise
        self._serve(updates)
        self._staged = version, [bucket.result() for bucket in staged]
        return self._staged[1], copies

    def _serve(self, updates: Iterable[_Update]) -> None:
        self._engines.serve(update.engine for update in updates if update.going)

    async def _stage(self, version: int, staged: relays.Buckets) -> None:
        for index, bucket in enumerate(staged):
            bucket.set_result(await self._ask(self._trainer.stage_weights(version, index), "stage weights"))

    async def _spread(
        self, updates: Sequence[_Update], staged: relays.Buckets, *staging: Coroutine[Any, Any, None]
    ) -> replicas.Copies:
        """Gives engines a version, and its buckets to their hosts and those of replicas; returns the hosts' copies.

        Args:
          updates: the engines' parts.
          staged: the buckets on the trainer's host, as they come.
          staging: what makes them come, if they have not.
        """
        groups: dict[int | None, list[_Update]] = {}
        for update in updates:
            groups.setdefault(self._copied_to(update.engine.spec.host), []).append(update)
        if staging and self._members is not None:  # of a whole publication, not of one engine's catching up
            for host in self._members.hosts:
                groups.setdefault(self._copied_to(host), [])
        copies = {host: relays.expected(len(staged)) for host in groups if host is not None}
        work = [self._load(group, staged if host is None else copies[host]) for host, group in groups.items()]
        if self._hosts is not None and copies:
            needed = {host for host in copies if groups[host]}
            lent = {item.spec.host for item in self._engines.engines.values() if item.state == "asleep"}
            work.append(self._hosts.pass_on(staged, copies, needed, {host for host in copies if host in lent}))
        await deadlines.together(*staging, *work)
        return {
            host: () if any(bucket.exception() for bucket in copy) else [bucket.result() for bucket in copy]
            for host, copy in copies.items()
        }

    def _copied_to(self, host: int | None) -> int | None:
        """The host whose relay's copy workers there read; None if they read the trainer's memory."""
        return host if self._hosts is not None and self._hosts.serve(host) else None

    async def _load(self, updates: Sequence[_Update], buckets: relays.Buckets) -> None:
        """The engines of one host get the version, as its buckets come there."""
        for index, place in enumerate(buckets):
            try:
                bucket = await relays.came(place)
            except protocols.LibraError as error:  # its relay is given up, and they cannot be given the rest
                for update in updates:
                    self._engines.lost(update.engine, update.life, error)
                return
            if not index:
                await self._each(updates, _Update.begin)
            if not self._checksum:  # it is there for relays, which have compared it, or for replicas
                bucket = dataclasses.replace(bucket, checksum=None)
            await self._each(updates, _loader(bucket))
        await self._each(updates, _Update.end)

    async def forget(self) -> None:
        """The trainer whose memory holds what was published last is about to end: nobody reads it any more."""
        async with self._engines.weights:
            self._staged = protocols.NO_VERSION, ()
        if self._members is not None:
            await self._members.settle()

    async def _ask(self, work: Coroutine[Any, Any, Any], what: str) -> Any:
        return await deadlines.within(self._seconds, work, f"The trainer, asked to {what},", "publish")

    async def _each(self, updates: Sequence[_Update], verb: Callable[[_Update], Coroutine[Any, Any, None]]) -> None:
        async def guarded(update: _Update) -> None:
            try:
                await verb(update)
            except Exception as error:  # whatever went wrong, its weights cannot be trusted any more
                self._engines.lost(update.engine, update.life, error)

        await deadlines.together(*(guarded(update) for update in updates if update.going))


def _loader(bucket: protocols.WeightBucket) -> Callable[[_Update], Coroutine[Any, Any, None]]:
    async def load(update: _Update) -> None:
        await update.ask(update.proxy.update_weights(bucket), f"load weight bucket {bucket.index}")

    return load


class _Update:
    """One engine's part in one publication."""

    def __init__(self, engine: instances.Engine, version: int, seconds: float, recorder: protocols.Recorder) -> None:
        self.engine = engine
        self.life = engine.life
        self.proxy = engine.proxy
        self._version = version
        self._seconds = seconds
        self._recorder = recorder
        self._start = 0.0
        self._begun = self.ended = False

    @property
    def half(self) -> bool:
        """Whether the engine has begun to take the version and has not got all of it."""
        return self.going and self._begun and not self.ended

    @property
    def going(self) -> bool:
        """Whether the engine is still in the life in which the update began."""
        return self.engine.life == self.life

    async def ask(self, work: Coroutine[Any, Any, Any], what: str) -> None:
        await deadlines.within(self._seconds, work, f"Engine {self.engine.name}, asked to {what},", "publish")

    async def begin(self) -> None:
        self._start, self._begun = asyncio.get_running_loop().time(), True
        self.engine.paused = True
        await self.ask(self.proxy.pause(), "pause")
        await self.ask(self.proxy.start_weight_update(self._version), "prepare for new weights")

    async def end(self) -> None:
        await self.ask(self.proxy.finish_weight_update(self._version), "finish its weight update")
        await self.ask(self.proxy.resume(), "resume")
        self.ended = True
        if not self.going:
            return
        self.engine.policy_version, self.engine.paused = self._version, False
        end = asyncio.get_running_loop().time()
        self._recorder.status(self.engine.name, f"serving version {self._version}")
        self._recorder.span("weights", f"sync {self.engine.name}", self._start, end, {"policy_version": self._version})
