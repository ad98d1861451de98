"""One trainer of one or several processes: each an actor, all called at once, and what process 0 answers counts.

Calls are collectives, as the processes' programs are: whoever is left out of one leaves the others waiting. So a call
goes to all processes at once, and where one fails, the set has failed: it is to be stopped, and nothing is retried.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from libra_jax import protocols
from libra_jax.coordinator import deadlines, failure

MakeProcess = Callable[[int, int], protocols.ActorSpec]
"""(process, processes) -> how to make that process of the trainer; the set gives it its name."""

ALONE = frozenset({"reserve", "stage_weights", "close_weights", "listen", "is_saved"})
"""Methods that concern process 0 alone: what it holds for others to read, and where it listens."""

VERDICT_SECONDS = 5.0
"""How long an error of one process waits for the others': where one was killed, its peers fail of that before its end
is noticed, and it is its name that counts."""


class ProcessSet:
    """`protocols.MovableTrainer` over one or several processes; every method that is not defined here is forwarded.

    With one process it is that actor: same calls, same errors. Like a trainer, it takes one call at a time.

    Args:
      cluster: makes the actors.
      make_process: says how.
      processes: how many.
      name: of the set. Its only actor has that name, too; several have `<name>.0`, `<name>.1`, ...

    Attributes:
      name: as given.
      processes: as given.
    """

    def __init__(
        self, cluster: protocols.Cluster, make_process: MakeProcess, *, processes: int = 1, name: str = "trainer"
    ) -> None:
        self.name = name
        self.processes = processes
        self._cluster = cluster
        names = [name] if processes == 1 else [f"{name}.{process}" for process in range(processes)]
        self._specs = [
            dataclasses.replace(make_process(process, processes), name=actor) for process, actor in enumerate(names)
        ]
        self._actors: list[Any] = []

    async def make(self) -> None:
        """Makes the actors, all at once.

        Raises:
          LibraError: one cannot be made (`protocols.Cluster.spawn`); `stop` reaps the others.
        """
        self._actors = await failure.together(*(self._cluster.spawn(spec) for spec in self._specs))

    async def start(self) -> protocols.TrainerInfo:
        """Lets the processes meet, and starts them (`protocols.Trainer.start`)."""
        await self._meet()
        return await self._call("start")

    async def stand_by(self) -> protocols.TrainerInfo:
        """Lets the processes meet, and readies them to take over (`protocols.MovableTrainer.stand_by`)."""
        await self._meet()
        return await self._call("stand_by")

    async def stop(self) -> None:
        """Ends and reaps every process, all at once: they leave together. Idempotent.

        Raises:
          LibraError: one did not end as it should; the others have been seen to.
        """
        ending = [self._cluster.stop(spec.name) for spec in self._specs]
        ended = await asyncio.gather(*ending, return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    def __getattr__(self, method: str) -> Callable[..., Any]:
        actors = self.__dict__.get("_actors", [])
        if method.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {method!r}")
        if not actors:
            raise AttributeError(f"{self.name} has no processes yet, and so no {method!r}: call make first")
        if len(actors) == 1 or method in ALONE:
            return getattr(actors[0], method)
        getattr(actors[0], method)  # an unknown one is refused as an actor does

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(method, *args, **kwargs)

        return call

    async def _meet(self) -> None:
        if self.processes > 1:
            address = await self._actors[0].reserve()
            await self._call("join", address)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if len(self._actors) == 1:
            return await getattr(self._actors[0], method)(*args, **kwargs)
        calls = [asyncio.ensure_future(getattr(actor, method)(*args, **kwargs)) for actor in self._actors]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if _errors(calls):
                raise await _verdict(calls)
            return calls[0].result()
        finally:
            for call in calls:
                deadlines.abandon(call)


class Serving:
    """Whichever set of processes trains now: what others hold as the trainer.

    Args:
      first: the set that serves at first.
      end: ends a set beside the run.

    Attributes:
      set: the one that serves.
    """

    def __init__(self, first: ProcessSet, end: Callable[[ProcessSet], None]) -> None:
        self.set = first
        self._end = end

    @property
    def processes(self) -> int:
        """Of the set that serves."""
        return self.set.processes

    def retire(self, before: ProcessSet) -> None:
        """Ends a set that has served."""
        self._end(before)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_") or method == "set":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {method!r}")
        return getattr(self.set, method)


def _errors(calls: list[asyncio.Future[Any]]) -> list[BaseException]:
    ended = [call for call in calls if call.done() and not call.cancelled()]
    return [error for call in ended if (error := call.exception()) is not None]


async def _verdict(calls: list[asyncio.Future[Any]]) -> BaseException:
    """The error to tell of those that come in: a lost process's before its peers', those before any other."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + VERDICT_SECONDS
    while True:
        errors = _errors(calls)
        running = {call for call in calls if not call.done()}
        lost = [error for error in errors if isinstance(error, protocols.WorkerLost)]
        named = [error for error in lost if not isinstance(error, protocols.PeerLost)]
        left = deadline - loop.time()
        if named or not running or left <= 0:
            return (named or lost or errors)[0]
        await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
