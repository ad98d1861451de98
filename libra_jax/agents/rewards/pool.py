"""The actors that hold reward functions. Chooses which actor a call goes to, and restarts a broken actor.

Actors are used instead of a `pebble.ProcessPool`. A run on several hosts has actors on them. And calls of an async
function interleave in one process (`reward.concurrency`), where a pool would need one process per call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from libra_jax import config, protocols
from libra_jax.agents import deadlines
from libra_jax.agents.rewards import scoring, worker

FACTORY = "libra_jax.agents.rewards.worker:create"

LOOK_SECONDS = 10.0
"""Seconds that an actor with an overdue call has to answer that it works."""

STOP_SECONDS = 120.0
"""Seconds to wait for the end of replaced actors when the run ends."""


class Lost(Exception):
    """An actor was lost during a call, by this call's fault or a concurrent one's. The message ends a sentence."""


@dataclass
class _Place:
    """The place of an actor, and of its replacement after the actor is lost."""

    name: str
    actor: protocols.ActorHandle | None = None
    made: int = 0
    calls: int = 0
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Pool:
    """Sends calls to the least busy actor. Belongs to one event loop.

    Args:
      reward: Settings with the functions, the number of actors, the deadline and the restarts.
      cluster: Cluster that makes the actors.
      note: Called with a sentence when an actor is restarted.
      start_seconds: Seconds that an actor may take to start.
    """

    def __init__(
        self,
        reward: config.RewardConfig,
        cluster: protocols.Cluster,
        note: Callable[[str], None],
        start_seconds: float,
    ) -> None:
        self._config = reward
        self._cluster = cluster
        self._note = note
        self._start_seconds = start_seconds
        self._places = [_Place(f"reward-{number}") for number in range(reward.actors)]
        self._alone, self._one_at_a_time = _Place("reward-alone"), asyncio.Lock()
        self._restarts = 0
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self) -> dict[str, bool]:
        """Makes the actors. Returns for each function whether it takes a transcript.

        Raises:
          ConfigError: A factory cannot be called, or does not make a function of two arguments.
          LibraError: An actor did not start.
        """
        tasks = [asyncio.ensure_future(self._make(place)) for place in self._places]
        try:
            return (await asyncio.gather(*tasks))[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def ask(
        self, name: str, task: protocols.Task, given: str | scoring.Transcript, *, alone: bool
    ) -> worker.Outcome:
        """Calls a function.

        Args:
          name: Name of the function.
          task: Task of the rollout.
          given: The text or the transcript.
          alone: Call it in an actor where nothing else runs. If that actor is lost, this call is to blame.

        Raises:
          Lost: The actor was lost. The next call makes another.
          WorkerLost: More actors were lost than `reward.restarts` allows.
        """
        if not alone:
            return await self._ask(min(self._places, key=lambda place: place.calls), name, task, given)
        async with self._one_at_a_time:
            return await self._ask(self._alone, name, task, given)

    async def _ask(
        self, place: _Place, name: str, task: protocols.Task, given: str | scoring.Transcript
    ) -> worker.Outcome:
        place.calls += 1
        try:
            async with place.changing:
                if place.actor is None:
                    await self._make(place)
                actor = place.actor
            assert actor is not None
            try:
                work = actor.call(worker.RewardWorker.score, name, task, given)
                return await deadlines.within(self._config.seconds, work)
            except deadlines.Overdue:
                problem = f"took more than {self._config.seconds:g} s (config.reward.seconds)"
                # An overdue call alone does not condemn its actor: other calls may be running well in it.
                if trouble := await _trouble(actor):
                    await self._give_up(place, actor, trouble)
                    raise Lost(problem) from None
                return worker.Outcome(problem=problem)
            except protocols.WorkerLost as error:
                await self._give_up(place, actor, f"is gone ({error})")
                raise Lost("brought down the actor that ran it") from error
        finally:
            place.calls -= 1

    async def close(self) -> None:
        """Waits for the end of replaced actors. The current actors end with the cluster."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=STOP_SECONDS)
        for task in self._ending:
            task.cancel()

    async def _give_up(self, place: _Place, sick: protocols.ActorHandle, trouble: str) -> None:
        """Ends an actor, unless another call has done so. The next call makes another."""
        async with place.changing:
            if place.actor is not sick:
                return
            name = _name(place)
            if self._restarts >= self._config.restarts:
                raise protocols.WorkerLost(
                    f"the reward actor {name} {trouble}; actors were restarted {self._restarts} times, and "
                    "config.reward.restarts allows no more: mend the function, or raise it"
                )
            self._restarts += 1
            self._note(
                f"The reward actor {name} {trouble}; it is restarted ({self._restarts} of "
                f"{self._config.restarts} times)."
            )
            place.actor = None
            self._end(name)

    def _end(self, name: str) -> None:
        """Ends an actor in the background, because ending may take long. Errors are ignored."""

        async def end() -> None:
            with contextlib.suppress(protocols.LibraError):
                await self._cluster.stop(name)

        ending = asyncio.get_running_loop().create_task(end())
        # asyncio itself keeps only weak references to tasks.
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _make(self, place: _Place) -> dict[str, bool]:
        # A name that was used before would collide with the old actor, which may still be ending.
        place.made += 1
        name = _name(place)
        actor = await self._cluster.spawn(
            protocols.ActorSpec(name, FACTORY, {"functions": dict(self._config.functions)})
        )
        try:
            found = await deadlines.within(self._start_seconds, actor.call(worker.RewardWorker.start))
        except deadlines.Overdue:
            self._end(name)
            raise protocols.DeadlineMissed(
                f"the reward actor {name} did not start within {self._start_seconds:g} s: see what its factories do, "
                "or raise config.deadlines.reward_start"
            ) from None
        except BaseException:
            self._end(name)
            raise
        place.actor = actor
        return found


def _name(place: _Place) -> str:
    return place.name if place.made == 1 else f"{place.name}.{place.made}"


async def _trouble(actor: protocols.ActorHandle) -> str:
    """Returns what is wrong with an actor after a call was overdue. Empty if the actor works."""
    try:
        return await deadlines.within(LOOK_SECONDS, actor.call(worker.RewardWorker.trouble))
    except deadlines.Overdue:
        return "answers nobody"
    except protocols.WorkerLost as error:
        return f"is gone ({error})"
