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
from collections.abc import Mapping
from typing import Any

import ray
import ray.exceptions

from libra_jax.cluster import actors, ray_batches, ray_calls, ray_host, ray_placement, ray_runtime
from libra_jax.protocols import ActorSpec, ConfigError, DeadlineMissed, WorkerLost

_log = logging.getLogger(__name__)

_CONCURRENT_CALLS = 10_000  # calls to one actor; open streams count too, and other calls must never queue behind them

DRIVER = "driver"
"""Name of this process among the callers of an actor."""

_Host = ray.remote(ray_host.RayHost)


class _Actor(ray_calls.Caller):
    """The driver's end of one actor process."""

    def __init__(self, spec: ActorSpec, where: Mapping[str, Any], batches: ray_batches.StoredBatches) -> None:
        """Starts the actor's process.

        Args:
          where: Ray's options for the actor's place, beside its resources.
        """
        self.spec = spec
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
        handle: Any = _Host.options(**options).remote(spec, [os.path.abspath(path) for path in sys.path])
        super().__init__(spec.name, handle, caller=DRIVER, birth=ray_host.Birth(), batches=batches)
        self.death: asyncio.Future[Any] = asyncio.ensure_future(self.handle.until_death.remote())
        # Retrieved here, so that asyncio does not report the error of a call that no one awaits.
        self.death.add_done_callback(lambda death: death.cancelled() or death.exception())
        self.stopping = False

    @property
    def gone(self) -> bool:
        return self.stopping or self.death.done()

    def lost(self, error: BaseException | None = None) -> WorkerLost:
        """Returns the error of every call after the process is gone."""
        return actors.lost(self.name, "has been stopped") if self.stopping else super().lost(error)

    async def kill(self, seconds: float) -> bool:
        """Ends the process and its leftovers; returns False if they still exist after `seconds`."""
        self.stopping = True
        # Once another part has shut Ray down, its actors have ended, and any question to Ray would restart it.
        running = ray.is_initialized()
        if running:
            ray.kill(self.handle, no_restart=True)
            await asyncio.wait({self.death}, timeout=seconds)
        await self.end_receiving(seconds if running else 0.0)
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
        placement: ray_placement.RayPlacement | None = None,
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
        self._batches = ray_batches.StoredBatches()

    async def spawn(self, spec: ActorSpec) -> actors.Handle:
        """Starts the actor and returns its handle.

        Raises:
          ConfigError: the factory does not exist on the actor's host; no cluster answers at the address; the cluster
            does not match the run (`ray_placement.RayPlacement.place`); or this machine lacks the GPUs.
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
                free = ray.available_resources()
                raise DeadlineMissed(
                    f"actor {spec.name!r} was not placed within {self._start_seconds:g} s: it asks for {spec.cpus:g} "
                    f"CPUs and {spec.gpus:g} GPUs, and {free.get('CPU', 0):g} and {free.get('GPU', 0):g} are free in "
                    "all; ask for less, or raise config.deadlines.cluster_start"
                ) from None
            methods = await actor.remote(actor.handle.make)
            address = ray_calls.Address(spec.name, methods, actor.handle, actor.birth)
        except BaseException:
            if self._placement is not None and not actor.stopping:
                self._placement.doubt(spec.host)
            if self._actors.get(spec.name) is actor:  # otherwise `kill` was called meanwhile
                del self._actors[spec.name]
            await actor.kill(self._shutdown_seconds)
            raise
        return actors.Handle(spec.name, methods, actor.call, actor.stream, address)

    def _ended(self, actor: _Actor) -> None:
        """Warns at once of an unexpected end, because the next caller of the actor may notice it much later."""
        if actor.birth.pid and not actor.stopping:
            _log.warning("Actor %s has ended unasked (process %d).", actor.spec.name, actor.birth.pid)
        # Streams of other actors that the process read go on without a reader. At the end of a run, all actors end.
        if ray.is_initialized():
            for survivor in self._actors.values():
                if not survivor.gone:
                    survivor.handle.forget.remote(actor.handle._actor_id.hex())
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
