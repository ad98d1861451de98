"""One trainer of one or several processes: each an actor, all called at once, and what process 0 answers counts.

Calls are collectives, as the processes' programs are: whoever is left out of one leaves the others waiting. So a call
goes to all processes at once, and where one fails, the set has failed: it is to be ended, and nothing is retried. The
same set may be made again, from nothing (`recovery`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

from libra_jax import deadlines, protocols

MakeProcess = Callable[[int, int], protocols.ActorSpec]
"""(process, processes) -> how to make that process of the trainer; the set gives it its name."""

ALONE = frozenset({"reserve", "stage_weights", "close_weights", "listen", "is_saved"})
"""Methods that concern process 0 alone: what it holds for others to read, and where it listens."""

AT_ANY_TIME = frozenset({"give_up_step", "listen", "connect", "dismiss"})
"""Methods that whoever calls them holds no lock for (`protocols.Trainer`)."""

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
        """Makes the actors, all at once; those of a set that was killed, again.

        Raises:
          LibraError: one cannot be made (`protocols.Cluster.spawn`); `stop` reaps the others.
        """
        self._actors = await deadlines.together(*(self._cluster.spawn(spec) for spec in self._specs))

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
        await self._end(self._cluster.stop)

    async def kill(self) -> None:
        """Ends and reaps every process without asking it: those that are left wait for the lost one, or soon would.

        Raises:
          LibraError: one did not end as it should; the others have been seen to.
        """
        self._actors = []
        await self._end(self._cluster.kill)

    async def _end(self, end: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        ended = await asyncio.gather(*(end(spec.name) for spec in self._specs), return_exceptions=True)
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
      lost: the error by which it is known to be gone; None while it is not. Nothing is asked of it then.
    """

    def __init__(self, first: ProcessSet, end: Callable[[ProcessSet], None]) -> None:
        self.set = first
        self.lost: BaseException | None = None
        self._catching_up = False
        self._life = 0
        self._end = end

    @property
    def processes(self) -> int:
        """Of the set that serves."""
        return self.set.processes

    def made_anew(self) -> None:
        """The set that was lost has been made again, and is to catch up: it is asked by who sees to that alone."""
        self.lost, self._catching_up, self._life = None, True, self._life + 1

    def caught_up(self) -> None:
        """Whoever has a call for it may ask it again."""
        self._catching_up = False

    def hand_over(self, successor: ProcessSet) -> None:
        """Another set serves from now on; what befell the one before is none of its concern."""
        self.set, self.lost, self._life = successor, None, self._life + 1

    def retire(self, before: ProcessSet) -> None:
        """Ends a set that has served."""
        self._end(before)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_") or method in ("set", "lost"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {method!r}")

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.lost is not None:
                raise protocols.TrainerLost(str(self.lost))
            if self._catching_up and method in AT_ANY_TIME:
                raise protocols.TrainerLost(f"{self.set.name} was lost, and is being made anew")
            asked = self.set, self._life
            try:
                return await getattr(self.set, method)(*args, **kwargs)
            except protocols.WorkerLost as error:
                if asked == (self.set, self._life):  # else it has handed over, or was made anew
                    self.lost = self.lost or error
                raise protocols.TrainerLost(str(error)) from error

        return call


def sizes(info: protocols.TrainerInfo) -> protocols.MeshSizes:
    """Of the mesh that a trainer tells of."""
    return protocols.MeshSizes(info.mesh["data"], info.mesh.get("fsdp", 1), info.mesh.get("tensor", 1))


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
