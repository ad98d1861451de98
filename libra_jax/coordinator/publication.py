"""Publication of a policy version: the trainer's snapshot, bucket by bucket, into every engine at once.

In-flight requests are kept: an engine is paused, given the weights through the four verbs, and resumed. Engines load a
bucket while the trainer stages the next (a bucket stays readable until the next snapshot is opened).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import deadlines, failure, instances, replicas


class Publisher:
    """Brings engines to the trainer's version.

    Args:
      config: the run's configuration (`deadlines.publish`).
      trainer: a `protocols.Trainer`, or its proxy.
      trainer_lock: held by whoever calls the trainer, because it takes one call at a time.
      engines: the rollout engines; one that fails is reported lost there, and the others go on.
      recorder: gets a span for each engine, all on the track `weights`.
      members: replicas that read the same snapshots, if there are any.

    Attributes:
      version: the version that the trainer holds; whoever trains sets it while holding the lock.
      served: the version that was published last: what a group dispatched now is dispatched at.
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
    ) -> None:
        self._members = members
        self._keeps = config.rollout.transport == "memfd"
        self._staged: tuple[int, Sequence[protocols.WeightBucket]] = protocols.NO_VERSION, ()
        self._seconds = config.deadlines.publish
        self._trainer = trainer
        self._lock = trainer_lock
        self._engines = engines
        self._recorder = recorder
        self.version = self.served = protocols.NO_VERSION
        engines.load_weights = self._catch_up

    async def publish(self, version: int) -> float:
        """Publishes `version`, which the trainer holds now, to every engine that is up; returns the seconds it took."""
        start = asyncio.get_running_loop().time()
        async with self._lock:
            self.version = version
            await self._send(version, [item for item in self._engines.loadable() if item.policy_version != version])
            self.served = version
        return asyncio.get_running_loop().time() - start

    async def _catch_up(self, engine: instances.Engine) -> None:
        """An engine that starts or wakes gets the published version before it serves.

        Where a snapshot's memory keeps what was published last, it is read from there: a training step may be long.
        """
        if self._keeps:
            async with self._engines.weights:
                version, buckets = self._staged
                if version not in (self.version, protocols.NO_VERSION) or engine.state != "loaded":
                    version = protocols.NO_VERSION
                if version != protocols.NO_VERSION:
                    await self._read(engine, version, buckets)
                    return
        async with self._lock:
            if engine.state == "loaded" and self.version != protocols.NO_VERSION:
                await self._send(self.version, [engine])

    async def _read(self, engine: instances.Engine, version: int, buckets: Sequence[protocols.WeightBucket]) -> None:
        updates = [_Update(engine, version, self._seconds, self._recorder)]
        for verb in (_Update.begin, *map(_loader, buckets), _Update.end):
            await self._each(updates, verb)
        if updates[0].going:
            self._engines.serve(engine)

    async def _send(self, version: int, engines: Sequence[instances.Engine]) -> None:
        if not engines and self._members is None:
            return
        if self._members is not None:
            await self._members.settle()
        async with self._engines.weights:
            staged = await self._publish(version, engines)
        if self._members is not None:
            self._members.published(version, staged)

    async def _publish(self, version: int, engines: Sequence[instances.Engine]) -> Sequence[protocols.WeightBucket]:
        self._staged = protocols.NO_VERSION, ()
        # Made before the first wait: an engine lost meanwhile is in another life, and left to its restart.
        up = [engine for engine in engines if engine.state in ("loaded", "serving")]  # others have gone since
        updates = [_Update(engine, version, self._seconds, self._recorder) for engine in up]
        count = await self._ask(self._trainer.open_weights(version), "open its weights")
        try:
            bucket = await self._ask(self._trainer.stage_weights(version, 0), "stage weights")
            staged = [bucket]
            await self._each(updates, _Update.begin)
            for index in range(count):
                loading = asyncio.ensure_future(self._each(updates, _loader(bucket)))
                try:
                    if index + 1 < count:
                        bucket = await self._ask(self._trainer.stage_weights(version, index + 1), "stage weights")
                        staged.append(bucket)
                    await loading
                finally:
                    deadlines.abandon(loading)
            await self._each(updates, _Update.end)
        finally:
            await self._ask(self._trainer.close_weights(version), "close its weights")
        for update in updates:
            if update.going:
                self._engines.serve(update.engine)
        self._staged = version, staged
        return staged

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

        await failure.together(*(guarded(update) for update in updates if update.going))


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

    @property
    def going(self) -> bool:
        """Whether the engine is still in the life in which the update began."""
        return self.engine.life == self.life

    async def ask(self, work: Coroutine[Any, Any, Any], what: str) -> None:
        await deadlines.within(self._seconds, work, f"Engine {self.engine.name}, asked to {what},", "publish")

    async def begin(self) -> None:
        self._start = asyncio.get_running_loop().time()
        self.engine.paused = True
        await self.ask(self.proxy.pause(), "pause")
        await self.ask(self.proxy.start_weight_update(self._version), "prepare for new weights")

    async def end(self) -> None:
        await self.ask(self.proxy.finish_weight_update(self._version), "finish its weight update")
        await self.ask(self.proxy.resume(), "resume")
        if not self.going:
            return
        self.engine.policy_version, self.engine.paused = self._version, False
        end = asyncio.get_running_loop().time()
        self._recorder.status(self.engine.name, f"serving version {self._version}")
        self._recorder.span("weights", f"sync {self.engine.name}", self._start, end, {"policy_version": self._version})
