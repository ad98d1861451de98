"""The actor that holds reward functions and calls them. A function's failure is returned, not raised.

Each call of a plain function runs on its own thread. Async functions run on a separate event loop of the actor. So
neither blocks the event loop that the actor lives on, which is the run's own if actors are embedded.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import math
import numbers
import reprlib
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from libra_jax import config, protocols
from libra_jax.agents import deadlines, resolving
from libra_jax.agents.rewards import scoring

MOST_HUNG = 32
"""Number of abandoned calls of plain functions that still run. From this number on, the actor asks to be replaced."""

PING_SECONDS = 2.0
CLOSE_SECONDS = 5.0

UNWIND_SECONDS = 2.0
"""Seconds that cancelled work of the event loop may take to unwind."""

_LONGEST_PROBLEM = 400

Function = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
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


def check(name: str, function: config.RewardFunctionConfig) -> Callable[..., Any]:
    """Checks the arguments of a function's factory and returns the factory. Does not call it.

    Raises:
      ConfigError: The factory cannot be found, takes other arguments, or is the reward function itself.
    """
    field_name = f"reward.functions.{name}"
    factory = resolving.resolve(function.factory, f"{field_name}.factory")
    try:
        resolving.check_arguments(factory, function.factory, function.arguments, f"{field_name}.arguments")
    except protocols.ConfigError as error:
        if [*inspect.signature(factory).parameters][:1] != ["task"]:
            raise
        raise protocols.ConfigError(
            f"config.{field_name}.factory: {function.factory} scores attempts itself, as it takes a task; name a "
            "factory, which returns such a function"
        ) from error
    return factory


def make(name: str, function: config.RewardFunctionConfig) -> tuple[Function, bool]:
    """Returns the function that a factory makes, and whether the function takes a transcript.

    Raises:
      ConfigError: See `check`. Also if the factory raises, or if its result cannot be called with two arguments.
    """
    field_name = f"reward.functions.{name}"
    made = resolving.call(check(name, function), function.factory, function.arguments, f"{field_name}.arguments")
    where = f"{field_name}.factory"
    config.check(callable(made), where, f"{function.factory} must return a function of (task, text), not {made!r}")
    try:
        signature = inspect.signature(made)
        signature.bind(None, "")
    except ValueError:  # a function written in C may have no readable signature
        return made, False
    except TypeError as error:
        raise protocols.ConfigError(
            f"config.{where}: {function.factory} must return a function of (task, text), and what it returns takes "
            f"{signature} ({error})"
        ) from error
    second = [*signature.parameters][1:2]
    return made, second == ["transcript"]


class RewardWorker:
    """Holds functions by name. Their calls interleave. Create it inside an event loop.

    Args:
      functions: Functions in the form of `config.RewardConfig.functions`.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        self._config = config.RewardConfig(functions=functions).parsed()
        self._functions: dict[str, Function] = {}
        self._loop = _LoopThread("libra-rewards")
        self._running: set[object] = set()  # calls of plain functions that have not returned
        self._given_up: set[object] = set()  # the calls of `_running` that nobody waits for

    async def start(self) -> dict[str, bool]:
        """Makes the functions. Returns for each whether it takes a transcript.

        Raises:
          ConfigError: See `make`.
        """
        made = {name: await deadlines.off_loop(make, name, function) for name, function in self._config.items()}
        self._functions = {name: function for name, (function, _) in made.items()}
        return {name: takes_transcript for name, (_, takes_transcript) in made.items()}

    async def score(self, name: str, task: protocols.Task, given: str | scoring.Transcript) -> Outcome:
        """Calls a function. The caller sets the deadline."""
        began = asyncio.get_running_loop().time()
        try:
            value = await self._call(self._functions[name], task, given)
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            # Distinguishes a cancelled caller, which has to be cancelled, from a function that cancelled itself.
            if waiting is not None and waiting.cancelling():
                raise
            return Outcome(problem="was cancelled from within")
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            return Outcome(problem=_shortened(resolving.raised(error)))
        return _read(value, asyncio.get_running_loop().time() - began)

    async def trouble(self) -> str:
        """Returns why this actor should be replaced, as the end of a sentence. Empty if it should not be."""
        hung = len(self._given_up & self._running)
        if hung >= MOST_HUNG:
            return f"has {hung} calls that hang"
        return "" if await self._loop.answers(PING_SECONDS) else "has an async function that blocks its event loop"

    async def shutdown(self) -> None:
        """Closes the functions that have a method `close`, and ends the event loop."""
        for function in self._functions.values():
            if callable(close := getattr(function, "close", None)):
                # The run is over, or the actor is broken: nothing can be done about an error.
                with contextlib.suppress(Exception):
                    await deadlines.within(CLOSE_SECONDS, self._call(close))
        await self._loop.close(CLOSE_SECONDS)

    async def _call(self, function: Function, *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await self._loop.run(function, *arguments)
        value = await self._on_thread(function, *arguments)
        if not inspect.isawaitable(value):
            return value
        return await self._loop.run(_awaited, value)

    async def _on_thread(self, function: Function, *arguments: Any) -> Any:
        call = object()

        def body() -> Any:
            try:
                return function(*arguments)
            finally:
                self._running.discard(call)
                self._given_up.discard(call)

        self._running.add(call)
        try:
            return await deadlines.off_loop(body)
        except asyncio.CancelledError:
            self._given_up.add(call)
            raise


class _LoopThread:
    """Runs coroutines for other event loops on a thread with its own loop.

    The thread is a daemon, so a thread that is blocked forever does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            if left := asyncio.all_tasks(self._loop):
                for task in left:
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(left, timeout=UNWIND_SECONDS))
        finally:
            self._loop.close()
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # nobody waits for the end any more
                self._ended.set_result(None)

    async def run(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Returns the result of `await function(*arguments)` on that loop.

        If cancelled, cancels the call without waiting.
        """

        async def work() -> Any:
            try:
                return await function(*arguments)
            except (SystemExit, KeyboardInterrupt) as error:  # these would end the loop for all calls
                raise RuntimeError(f"{type(error).__name__}: {error}") from error

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._loop))

    async def answers(self, seconds: float) -> bool:
        """Returns whether the loop accepts new work within `seconds`."""
        ping = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop))
        done, _ = await asyncio.wait({ping}, timeout=seconds)
        ping.cancel()
        return bool(done)

    async def close(self, seconds: float) -> None:
        """Cancels the work and ends the thread. A blocked thread is left behind after `seconds`."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.wait({asyncio.wrap_future(self._ended)}, timeout=seconds)


async def _awaited(value: Any) -> Any:
    return await value


def _read(value: object, seconds: float) -> Outcome:
    """Reads a function's return value: a number, or a number and metrics."""
    metrics: Any = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metrics = value
    number = _finite(value)
    if number is None:
        return Outcome(problem=f"gave {reprlib.repr(value)}, which is not a finite number")
    numbers_told = {str(key): _finite(told) for key, told in metrics.items()}
    wrong = [key for key, told in numbers_told.items() if told is None]
    if wrong:
        return Outcome(problem=f"gave a metric {wrong[0]!r} that is not a finite number")
    return Outcome(number, {key: told for key, told in numbers_told.items() if told is not None}, seconds)


def _finite(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:  # an integer beyond all floats
        return None
    return number if math.isfinite(number) else None


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_PROBLEM else f"{line[:_LONGEST_PROBLEM]}..."


def create(functions: Mapping[str, Mapping[str, Any]]) -> RewardWorker:
    """Makes the actor from functions in the form of `config.RewardConfig.functions`."""
    return RewardWorker(functions)
