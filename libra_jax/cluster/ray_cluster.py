"""The Ray backend: every actor in its own process, on this host or on any node of a cluster.

Ray places the actor, detects its death and kills it. The coordinator decides about restarts (`spawn` again).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pathlib
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from libra_jax.cluster import actors, ray_batches, ray_host, ray_placement, ray_runtime
from libra_jax.protocols import ActorSpec, ConfigError, DeadlineMissed, WorkerLost

_log = logging.getLogger(__name__)

_CONCURRENT_CALLS = 10_000  # calls to one actor; open streams count too, and other calls must never queue behind them

_Host = ray.remote(ray_host.RayHost)


@dataclass
class _Reader:
    """The driver's end of a stream.

    Attributes:
      came: batches of items in order; None ends the stream, WorkerLost fails it.
      ended: True once the end is in `came`, so that the actor's end needs no call to close.
    """

    came: asyncio.Queue[ray_host.Outcome | WorkerLost | None] = field(default_factory=asyncio.Queue)
    ended: bool = False


class _Actor:
    """The driver's end of one actor process."""

    def __init__(self, spec: ActorSpec, where: Mapping[str, Any], batches: ray_batches.Batches) -> None:
        """Starts the actor's process.

        Args:
          spec: how the actor is made.
          where: Ray's options for the actor's place, beside its resources.
          batches: the cluster's batches in the object store.
        """
        self.spec = spec
        self._batches = batches
        options: dict[str, Any] = {
            "num_cpus": spec.cpus,
            "num_gpus": spec.gpus,
            "max_concurrency": _CONCURRENT_CALLS,
            # The coordinator decides about restarts, and a call that Ray repeats could act twice.
            "max_restarts": 0,
            "max_task_retries": 0,
            **where,
        }
        if spec.environment:
            options["runtime_env"] = {"env_vars": dict(spec.environment)}
        # Absolute, because the process may start in another folder.
        self.handle: Any = _Host.options(**options).remote(spec, [os.path.abspath(path) for path in sys.path])
        self.death: asyncio.Future[Any] = asyncio.ensure_future(self.handle.until_death.remote())
        # Retrieved here, so that asyncio does not report the error of a call that nobody awaits.
        self.death.add_done_callback(lambda death: death.cancelled() or death.exception())
        self.birth = ray_host.Birth()
        self.stopping = False
        self._streams = 0
        self._readers: dict[int, _Reader] = {}
        self._receiving: asyncio.Task[None] | None = None

    def _lost(self, error: BaseException | None = None) -> WorkerLost:
        """Returns the error of every call after the process is gone."""
        if self.stopping:
            return actors.lost(self.spec.name, "has been stopped")
        if not self.birth.pid:
            why = actors.summary(error) if error else "Ray gives no reason"
            return actors.lost(self.spec.name, f"is lost: its process did not start ({why})")
        why = "cannot be reached" if isinstance(error, ray.exceptions.ActorUnavailableError) else "died"
        return actors.lost(self.spec.name, f"is lost: its process {self.birth.pid} {why}")

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of a sync or async method. Raises the errors of `actors.Handle.call`."""
        if self.stopping or self.death.done():
            raise self._lost()
        async with self._batches.replacing(args) as sent:
            return await self.remote(self.handle.call, method, sent, kwargs)

    async def remote(self, host_method: Any, *args: Any) -> Any:
        """Calls a method of the host process. If the caller cancels the call, cancels it there too.

        Raises:
          WorkerLost: the process is gone.
          LibraError: the method failed.
        """
        reference = host_method.remote(*args)
        try:
            outcome = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except ray.exceptions.RayError as error:
            raise self._lost(error) from error
        return outcome.unwrap() if isinstance(outcome, ray_host.Outcome) else outcome

    async def stream(self, method: str, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Yields the items of a stream method. Closing the generator closes the actor's generator.

        Raises:
          WorkerLost: the actor is gone.
          LibraError: the method raised an error.
        """
        if self.stopping or self.death.done():
            raise self._lost()
        number, reader = self._streams, _Reader()
        self._streams += 1
        self._readers[number] = reader
        if self._receiving is None:
            self._receiving = asyncio.get_running_loop().create_task(self._receive())
        opening = asyncio.ensure_future(self.handle.open_stream.remote(number, method, args, kwargs))

        def opened(_: asyncio.Future[Any]) -> None:
            # A stream that could not be opened sends no news.
            if not opening.cancelled() and (error := opening.exception()) is not None:
                reader.came.put_nowait(self._lost(error))
                reader.ended = True

        opening.add_done_callback(opened)
        taken = 0
        try:
            while (outcome := await reader.came.get()) is not None:
                if isinstance(outcome, WorkerLost):
                    raise outcome
                taken += 1
                # Acknowledged at half of UNREAD, so that the actor's end rarely has to wait for the acknowledgement.
                if taken % (ray_host.UNREAD // 2) == 0:
                    self.handle.read_stream.remote(number, ray_host.UNREAD // 2)
                for item in outcome.unwrap():
                    yield item
        finally:
            del self._readers[number]
            if not reader.ended:
                with contextlib.suppress(ray.exceptions.RayError):  # the process is gone, and its streams with it
                    await self.handle.close_stream.remote(number)

    async def _receive(self) -> None:
        """Asks for news of all streams while the actor lives."""
        while True:
            try:
                news: ray_host.News = await self.handle.news.remote()
            except ray.exceptions.RayError as error:
                self._receiving = None
                for reader in self._readers.values():
                    reader.came.put_nowait(self._lost(error))
                    reader.ended = True
                return
            for number, outcomes in news.items():
                # The stream may have been closed here while its last news were on the way.
                if number in self._readers:
                    for outcome in outcomes:
                        self._readers[number].came.put_nowait(outcome)
                    self._readers[number].ended |= outcomes[-1] is None

    async def kill(self, seconds: float) -> bool:
        """Ends the process and its leftovers; returns False if they still exist after `seconds`."""
        self.stopping = True
        # Once another part has shut Ray down, its actors have ended, and any question to Ray would restart it.
        running = ray.is_initialized()
        if running:
            ray.kill(self.handle, no_restart=True)
            await asyncio.wait({self.death}, timeout=seconds)
        if self._receiving is not None:
            # The call for news fails by itself when Ray has noticed the end of the process.
            await asyncio.wait({self._receiving}, timeout=seconds if running else 0.0)
        if self._receiving is not None:
            self._receiving.cancel()
        if not running:
            return True
        deadline = asyncio.get_running_loop().time() + seconds
        # Only processes of this host can be looked up.
        here = self.birth.node == ray.get_runtime_context().get_node_id()
        while here and any(map(_runs, (self.birth.pid, self.birth.guard_pid))):
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.02)
        return self.death.done()


class RayCluster:
    """`protocols.Cluster` on Ray. The first `spawn` starts or joins Ray."""

    def __init__(
        self,
        address: str = "",
        *,
        start_seconds: float = 60.0,
        shutdown_seconds: float = 60.0,
        object_store_mib: int = 256,
        placement: ray_placement.Placement | None = None,
    ) -> None:
        """Prepares the cluster; Ray itself starts later.

        Args:
          address: `host:port` of a Ray head, from a node of its cluster; empty starts Ray on this machine.
          start_seconds: seconds for Ray to start, and for Ray to place an actor.
          shutdown_seconds: seconds for an actor to stop.
          object_store_mib: shared memory of an embedded Ray, in MiB; objects beyond it spill to disk.
          placement: placement of actors on the run's hosts; None: any node with room.
        """
        self._placement = placement
        self._embedded = not address
        self._start_seconds = start_seconds
        self._shutdown_seconds = shutdown_seconds
        self._runtime = ray_runtime.RayRuntime(
            address, object_store_mib=object_store_mib, start_seconds=start_seconds, hosts=placement is not None
        )
        self._actors: dict[str, _Actor] = {}
        self._batches = ray_batches.Batches()

    async def spawn(self, spec: ActorSpec) -> actors.Handle:
        """Starts the actor and returns its handle.

        Raises:
          ConfigError: the factory does not exist on the actor's host; no cluster answers at the address; the cluster
            does not match the run (`ray_placement.Placement.place`); or this machine lacks the GPUs.
          DeadlineMissed: Ray did not place the actor in time: its resources are taken or missing, or its host is gone.
          LibraError: the factory failed, or the name is taken.
          WorkerLost: the process died while it made the actor.
        """
        if spec.name in self._actors and self._actors[spec.name].death.done():
            del self._actors[spec.name]
        actors.check_name_free(spec.name, self._actors)
        await self._runtime.ensure()
        there = ray.cluster_resources().get("GPU", 0.0)
        # At once, because an embedded Ray never gets more GPUs; a joined cluster may.
        if self._embedded and spec.gpus > there:
            raise ConfigError(
                f"config.cluster.address: actor {spec.name!r} asks for {spec.gpus:g} GPUs, and this machine has "
                f"{there:g}; set config.trainer.platform=cpu if the trainer is to do without, or name a cluster that "
                "has them"
            )
        where: dict[str, Any] = {}
        if self._placement is not None:
            spec, where = await self._placement.place(spec)
        # Again, because another `spawn` may have taken the name meanwhile.
        actors.check_name_free(spec.name, self._actors)
        actor = self._actors[spec.name] = _Actor(spec, where, self._batches)
        actor.death.add_done_callback(lambda _: self._ended(actor))
        try:
            try:
                actor.birth = await asyncio.wait_for(actor.remote(actor.handle.born), self._start_seconds)
            except TimeoutError:
                left = ray.available_resources()
                raise DeadlineMissed(
                    f"actor {spec.name!r} was not placed within {self._start_seconds:g} s: it asks for {spec.cpus:g} "
                    f"CPUs and {spec.gpus:g} GPUs, and {left.get('CPU', 0):g} and {left.get('GPU', 0):g} are free in "
                    "all; ask for less, or raise config.deadlines.cluster_start"
                ) from None
            methods = await actor.remote(actor.handle.make)
        except BaseException:
            if self._placement is not None and not actor.stopping:
                self._placement.doubt(spec.host)
            if self._actors.get(spec.name) is actor:  # otherwise `kill` was called meanwhile
                del self._actors[spec.name]
            await actor.kill(self._shutdown_seconds)
            raise
        return actors.Handle(spec.name, methods, actor.call, actor.stream)

    def _ended(self, actor: _Actor) -> None:
        """Warns at once of an unexpected end, because the next caller of the actor may notice it much later."""
        if actor.birth.pid and not actor.stopping:
            _log.warning("Actor %s has ended unasked (process %d).", actor.spec.name, actor.birth.pid)
        # The host may be gone with the actor.
        if self._placement is not None and not actor.stopping:
            self._placement.doubt(actor.spec.host)

    async def stop(self, name: str) -> None:
        """Ends the actor and reaps its process and its children. Does nothing if it was stopped before.

        Raises:
          DeadlineMissed: the actor did not stop in time and was killed; the message names the call it was in.
          LibraError: its `shutdown` failed.
        """
        actor = self._actors.pop(name, None)
        if actor is None:
            return
        try:
            if not actor.death.done():
                stopping = actor.remote(actor.handle.stop, self._shutdown_seconds)
                # From here on, the end of the process is no surprise, and other calls tell that the actor was stopped.
                actor.stopping = True
                with contextlib.suppress(WorkerLost):  # it died first
                    # Longer than the actor's own deadline, whose error names the call that the actor was in.
                    await asyncio.wait_for(stopping, self._shutdown_seconds + 10.0)
        except TimeoutError:
            raise DeadlineMissed(
                f"actor {name!r} did not answer {self._shutdown_seconds:g} s after it was asked to stop, and was killed"
            ) from None
        finally:
            dead = await actor.kill(self._shutdown_seconds)
        self._check_dead(actor, dead)

    async def kill(self, name: str) -> None:
        """Ends the actor without calling it, because it may wait forever for a lost peer. Does nothing if it is gone.

        Raises:
          DeadlineMissed: its process or the process's children did not end in time.
        """
        actor = self._actors.pop(name, None)
        if actor is None:
            return
        dead = await actor.kill(self._shutdown_seconds)
        if self._placement is not None:  # the host may be gone before Ray knows
            self._placement.doubt(actor.spec.host)
        self._check_dead(actor, dead)

    def _check_dead(self, actor: _Actor, dead: bool) -> None:
        if dead:
            return
        if self._placement is not None:
            self._placement.doubt(actor.spec.host)
        raise DeadlineMissed(
            f"actor {actor.spec.name!r}: process {actor.birth.pid} still ran {self._shutdown_seconds:g} s after it was "
            "killed"
        )

    async def shutdown(self) -> None:
        """Stops every actor, the last started first, then an embedded Ray. Raises one LibraError for all failures."""
        try:
            await actors.stop_all(self.stop, self._actors)
        finally:
            if self._placement is not None:
                await self._placement.end()
            await self._runtime.end(self._shutdown_seconds)


def _runs(pid: int) -> bool:
    """Returns True if a process of this host runs; a zombie does not count."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
