"""The actors that hold reward functions, and the pool that sends calls to them and restarts broken ones.

A function's failure is returned, not raised. Each call of a plain function runs on its own thread. Async functions run
on a separate event loop of the actor. So neither blocks the event loop that the actor lives on, which is the run's own
if actors are embedded.

Actors are used instead of a `pebble.ProcessPool`. A run on several hosts has actors on them. And calls of an async
function interleave in one process (`reward.concurrency`), where a pool would need one process per call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rewards import scoring
from libra_jax.utils import deadlines, resolving, user_code, user_values

MOST_HUNG = 32
"""Number of abandoned calls of plain functions that still run. From this number on, the actor asks to be replaced."""

PING_SECONDS = 2.0
CLOSE_SECONDS = 5.0

UNWIND_SECONDS = 2.0
"""Seconds that cancelled work of the event loop may take to unwind."""

LOOK_SECONDS = 10.0
"""Seconds that an actor with an overdue call has to answer that it works."""

STOP_SECONDS = 120.0
"""Seconds to wait for the end of replaced actors when the run ends."""

_LONGEST_PROBLEM = 400

_log = logging.getLogger(__name__)

Function = Callable[..., Any]
T = TypeVar("T")


@dataclass(frozen=True)
class RewardOutcome:
    """The result of a call.

    Attributes:
      value: A finite number.
      metrics: Further numbers that the function reports.
      seconds: Duration of the call in seconds.
      problem: What the function did wrong, as the end of a sentence. Empty if nothing.
    """

    value: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    problem: str = ""


def check(name: str, function: config_lib.RewardFunctionConfig) -> Callable[..., Any]:
    """Checks the arguments of a function's factory and returns the factory. Does not call it."""
    field_name = f"reward.functions.{name}"
    factory = resolving.resolve(function.factory, f"{field_name}.factory")
    try:
        resolving.check_arguments(factory, function.factory, function.arguments, f"{field_name}.arguments")
    except protocols.ConfigError as error:
        if [*inspect.signature(factory).parameters][:1] != ["task"]:
            raise
        raise protocols.ConfigError(
            f"config.{field_name}.factory: {function.factory} scores rollouts itself, as it takes a task; name a "
            "factory, which returns such a function"
        ) from error
    return factory


def make(name: str, function: config_lib.RewardFunctionConfig) -> tuple[Function, bool]:
    """Returns the function that a factory makes, and whether the function takes a transcript."""
    field_name = f"reward.functions.{name}"
    reward_function = resolving.call(
        check(name, function), function.factory, function.arguments, f"{field_name}.arguments"
    )
    where, called = f"{field_name}.factory", resolving.shown(function.factory, function.arguments)
    config_lib.check(
        callable(reward_function), where, f"{called} must return a function of (task, text), not {reward_function!r}"
    )
    try:
        signature = inspect.signature(reward_function)
        signature.bind(None, "")
    except ValueError:  # a function written in C may have no readable signature
        return reward_function, False
    except TypeError as error:
        if function.factory == resolving.ITSELF:
            problem = f"{called} must take (task, text) or (task, transcript), and takes {signature}"
        else:
            problem = (
                f"{called} must return a function of (task, text), and what it returns takes {signature} ({error})"
            )
        raise protocols.ConfigError(f"config.{where}: {problem}") from error
    # The name of the parameter tells: a transcript and a text are passed in the same place.
    second = [*signature.parameters][1:2]
    return reward_function, second == ["transcript"]


class RewardWorker:
    """Holds functions by name. Their calls interleave. Create it inside an event loop.

    Args:
      functions: Functions in the form of `config.RewardConfig.functions`.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        self._config = config_lib.RewardConfig(functions=functions).parsed()
        self._functions: dict[str, Function] = {}
        self._loop = _LoopThread("libra-rewards")
        self._running: set[object] = set()  # calls of plain functions that have not returned
        self._given_up: set[object] = set()  # the calls of `_running` that no one waits for

    async def start(self) -> dict[str, bool]:
        """Makes the functions. Returns for each whether it takes a transcript."""
        pairs = {name: await deadlines.off_loop(make, name, function) for name, function in self._config.items()}
        self._functions = {name: function for name, (function, _) in pairs.items()}
        return {name: takes_transcript for name, (_, takes_transcript) in pairs.items()}

    async def score(self, name: str, task: protocols.Task, rollout: str | scoring.Transcript) -> RewardOutcome:
        """Calls a function. The caller sets the deadline."""
        start = asyncio.get_running_loop().time()
        try:
            # An embedded actor shares the data with the task source, and with other functions and rollouts.
            if not isinstance(rollout, str):
                rollout = dataclasses.replace(rollout, metrics=dict(rollout.metrics))
            with user_code.contain_exits():
                value = await self._call(self._functions[name], task.copy(), rollout)
        except Exception as error:
            # One line, because it becomes part of a sentence.
            line = " ".join(resolving.raised(error).split())
            return RewardOutcome(problem=line if len(line) <= _LONGEST_PROBLEM else f"{line[:_LONGEST_PROBLEM]}...")
        seconds = asyncio.get_running_loop().time() - start
        # A function returns a number, or a number and metrics.
        metrics: Any = {}
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
            value, metrics = value
        numbers: list[float] = []
        names = [str(key) for key in metrics]
        for metric, number in zip([None, *names], [value, *metrics.values()], strict=True):
            if not user_values.is_finite(number):
                wrong = (
                    f"gave {user_values.shown(number)}, which" if metric is None else f"gave a metric {metric!r} that"
                )
                return RewardOutcome(problem=f"{wrong} is not a finite number")
            numbers.append(float(number))
        return RewardOutcome(numbers[0], dict(zip(names, numbers[1:], strict=True)), seconds)

    async def trouble(self) -> str:
        """Returns why this actor should be replaced, as the end of a sentence. Empty if it should not be."""
        hung = len(self._given_up & self._running)
        if hung >= MOST_HUNG:
            return f"has {hung} calls that hang"
        try:
            await deadlines.cancel_after(PING_SECONDS, self._loop.run(asyncio.sleep, 0))
        except deadlines.Overdue:
            return "has an async function that blocks its event loop"
        except RuntimeError:
            return "has lost its event loop"
        return ""

    async def shutdown(self) -> None:
        """Closes the functions that have a method `close`, and ends the event loop."""
        for function in self._functions.values():
            if callable(close := getattr(function, "close", None)):
                # The run is over, or the actor is broken: nothing can be done about an error.
                with contextlib.suppress(Exception):
                    await deadlines.cancel_after(CLOSE_SECONDS, self._call(close))
        await self._loop.close(CLOSE_SECONDS)

    async def _call(self, function: Function, *arguments: Any) -> Any:
        """Awaits an async function on the actor's own loop, and runs a plain function on a thread."""
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await self._loop.run(function, *arguments)
        call = object()

        def body() -> Any:
            try:
                return function(*arguments)
            finally:
                self._running.discard(call)
                self._given_up.discard(call)

        self._running.add(call)
        try:
            value = await deadlines.off_loop(body)
        except asyncio.CancelledError:
            self._given_up.add(call)
            raise
        return await self._loop.run(lambda: value) if inspect.isawaitable(value) else value


class _LoopThread:
    """Runs coroutines for other event loops on a thread with its own loop.

    The thread is a daemon, so a thread that is blocked forever does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopping = False
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._stopping:
                try:
                    self._loop.run_forever()
                except (SystemExit, KeyboardInterrupt) as error:  # the other calls must go on
                    _log.warning("A task that a reward function started %s.", resolving.raised(error))
            if tasks := asyncio.all_tasks(self._loop):
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=UNWIND_SECONDS))
        finally:
            self._loop.close()
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # no one waits for the end any more
                self._ended.set_result(None)

    async def run(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Returns the result of `await function(*arguments)` on that loop.

        If cancelled, cancels the call without waiting.
        """

        async def work() -> Any:
            with user_code.contain_exits():
                return await function(*arguments)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._loop))

    async def close(self, seconds: float) -> None:
        """Cancels the work and ends the thread. A blocked thread is left behind after `seconds`."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stop)
        await asyncio.wait({asyncio.wrap_future(self._ended)}, timeout=seconds)

    def _stop(self) -> None:
        self._stopping = True
        self._loop.stop()


class Lost(Exception):
    """An actor was lost during a call, by this call's fault or a concurrent one's. The message ends a sentence."""


@dataclass
class _Place:
    """The place of an actor, and of its replacement after the actor is lost. `name` is the present actor's."""

    base: str
    name: str = ""
    actor: protocols.ActorHandle | None = None
    starts: int = 0
    calls: int = 0
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)


class RewardPool:
    """Sends calls to the least busy actor. Belongs to one event loop. Arguments: see `composition.open_scorer`."""

    def __init__(
        self,
        reward: config_lib.RewardConfig,
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
        """Makes the actors. Returns for each function whether it takes a transcript."""
        return (await all_of(self._make(place) for place in self._places))[0]

    async def ask(
        self, name: str, task: protocols.Task, rollout: str | scoring.Transcript, *, alone: bool
    ) -> RewardOutcome:
        """Calls a function.

        Args:
          name: Name of the function.
          task: Task of the rollout.
          rollout: The text or the transcript.
          alone: Call it in an actor where nothing else runs. If that actor is lost, this call is to blame.

        Raises:
          Lost: The actor was lost. The next call makes another.
          WorkerLost: More actors were lost than `reward.restarts` allows.
        """
        place = self._alone if alone else min(self._places, key=lambda place: place.calls)
        # Counted before the first wait, so that calls made at the same moment spread over the actors.
        place.calls += 1
        try:
            async with self._one_at_a_time if alone else contextlib.nullcontext():
                # The first call that finds no actor makes one, and the others wait for it.
                async with place.changing:
                    if place.actor is None:
                        await self._make(place)
                    actor = place.actor
                assert actor is not None
                try:
                    work = actor.call(RewardWorker.score, name, task, rollout)
                    return await deadlines.cancel_after(self._config.seconds, work)
                except deadlines.Overdue:
                    problem = f"took more than {self._config.seconds:g} s (config.reward.seconds)"
                    # An overdue call alone does not condemn its actor: other calls may be running well in it.
                    if trouble := await _trouble(actor):
                        await self._give_up(place, actor, trouble)
                        raise Lost(problem) from None
                    return RewardOutcome(problem=problem)
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
            name = place.name
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
        ending = asyncio.ensure_future(self._cluster.stop(name))
        # asyncio itself keeps only weak references to tasks.
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        # An error counts as retrieved, so that asyncio does not warn.
        ending.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _make(self, place: _Place) -> dict[str, bool]:
        # A name that was used before would collide with the old actor, which may still be ending.
        place.starts += 1
        place.name = name = place.base if place.starts == 1 else f"{place.base}.{place.starts}"
        factory = f"{RewardWorker.__module__}:{RewardWorker.__qualname__}"
        actor = await self._cluster.spawn(
            protocols.ActorSpec(name, factory, {"functions": dict(self._config.functions)})
        )
        try:
            takes_transcript = await deadlines.cancel_after(self._start_seconds, actor.call(RewardWorker.start))
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
        return takes_transcript


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines concurrently and returns their results. The first error cancels the others and is raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _trouble(actor: protocols.ActorHandle) -> str:
    """Returns what is wrong with an actor after a call was overdue. Empty if the actor works."""
    try:
        return await deadlines.cancel_after(LOOK_SECONDS, actor.call(RewardWorker.trouble))
    except deadlines.Overdue:
        return "answers no one"
    except protocols.WorkerLost as error:
        return f"is gone ({error})"
