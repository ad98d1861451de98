"""What the typed clients of actors share: making and ending the actor, and a deadline with a sentence for each call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from libra_jax import config as configuration
from libra_jax import deadlines, protocols

P = ParamSpec("P")
T = TypeVar("T")

Limit = Literal["engine_start", "first_token", "publish", "shutdown", "train_step", "trainer_start", "transition"]
"""A field of `config.deadlines`."""


class ActorClient:
    """Calls one actor, for one life of its process: who makes the actor again makes another client.

    Args:
      cluster: makes and ends the actor.
      spec: how the actor is made.
      limits: the deadlines of the calls.
      kind: what the actor is, as errors say it before its name; empty if the name says so.
    """

    _start_limit: Limit = "engine_start"
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
        limit, making = self._start_limit, self._cluster.spawn(self._spec)
        seconds = getattr(self._limits, limit)
        self._handle = await deadlines.within(seconds, making, f"The making of {self._label}", limit)

    async def stop(self) -> None:
        """Ends and reaps the actor of that name, which another client may have made. Idempotent.

        Raises:
          LibraError: the actor did not end as it should.
        """
        stopping = self._cluster.stop(self.name)
        await deadlines.within(self._limits.shutdown, stopping, f"The end of {self._label}", "shutdown")

    @property
    def _actor(self) -> protocols.ActorHandle:
        if self._handle is None:
            raise protocols.WorkerLost(f"{self._subject} has no process: make it first")
        return self._handle

    async def _ask(
        self,
        limit: Limit,
        what: str,
        method: Callable[Concatenate[Any, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Calls a method of the actor's protocol within `config.deadlines.<limit>`; `what` completes "asked to"."""
        seconds, work = getattr(self._limits, limit), self._actor.call(method, *args, **kwargs)
        return await deadlines.within(seconds, work, f"{self._subject}, asked to {what},", limit)
