"""What the typed clients of actors share: making and ending the actor, and a deadline with a sentence for each call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from libra_jax import config as configuration
from libra_jax import deadlines, protocols

P = ParamSpec("P")
T = TypeVar("T")


class ActorClient:
    """Calls one actor, for one life of its process: who makes the actor again makes another client.

    Args:
      cluster: makes and ends the actor.
      spec: how the actor is made.
      limits: the deadlines of the calls.
      kind: what the actor is, as errors say it before its name; empty if the name says so.
    """

    _start_limit: deadlines.Limit = "engine_start"
    """Deadline for the making of the actor."""

    def __init__(
        self,
        cluster: protocols.Cluster,
        spec: protocols.ActorSpec,
        limits: configuration.DeadlineConfig,
        *,
        kind: str = "",
    ) -> None:
        self._cluster = cluster
        self._spec = spec
        self._limits = limits
        self._label = f"{kind} {spec.name}" if kind else spec.name
        self._subject = f"{kind.capitalize()} {spec.name}" if kind else spec.name
        self._handle: protocols.ActorHandle | None = None

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._spec.name

    async def make(self) -> None:
        """Makes the actor.

        Raises:
          DeadlineMissed: that took too long.
          LibraError: the actor cannot be made (`protocols.Cluster.spawn`).
        """
        making = self._cluster.spawn(self._spec)
        self._handle = await deadlines.limited(self._limits, self._start_limit, making, f"The making of {self._label}")

    async def stop(self) -> None:
        """Ends and reaps the actor of that name, which another client may have made. Idempotent.

        Raises:
          LibraError: the actor did not end as it should.
        """
        stopping = self._cluster.stop(self.name)
        await deadlines.limited(self._limits, "shutdown", stopping, f"The end of {self._label}")

    @property
    def _actor(self) -> protocols.ActorHandle:
        if self._handle is None:
            raise protocols.WorkerLost(f"{self._subject} has no process: make it first")
        return self._handle

    async def _ask(
        self,
        limit: deadlines.Limit,
        what: str,
        method: Callable[Concatenate[Any, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Calls a method of the actor's protocol within `config.deadlines.<limit>`; `what` completes "asked to"."""
        work = self._actor.call(method, *args, **kwargs)
        return await deadlines.limited(self._limits, limit, work, f"{self._subject}, asked to {what},")
