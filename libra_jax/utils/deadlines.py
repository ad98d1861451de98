"""Waits that always end.

A wait on a worker names the worker if its deadline passes (`within`). A wait on a user's code ends the code
(`cancel_after`). Plain functions run on threads of their own, so that they cannot block the event loop (`off_loop`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.utils import turns, user_code

T = TypeVar("T")

Limit = Literal[
    "checkpoint", "engine_start", "first_token", "weight_sync", "shutdown", "train_step", "trainer_start", "transition"
]
"""Name of a field of `config.deadlines`."""

SILENT_SECONDS = 30.0
"""Seconds without an answer to a health check after which a sentence names the worker."""

SLICES = 8
"""Number of slices into which a deadline is split. A stall of the event loop then uses up at most one slice."""


@dataclass(slots=True, eq=False)
class Wait:
    """A wait that is under way.

    Attributes:
      subject: Who is waited for, and for what.
      seconds: Deadline in seconds.
      began: Start in seconds on the event loop's clock.
      turn: Tells whether the work waits for its turn. This time does not count.
    """

    subject: str
    seconds: float
    began: float
    turn: turns.Turn


_waits: set[Wait] = set()


def waits() -> list[Wait]:
    """Returns the waits under way in this process, for viewers of the run. Any thread may call it."""
    return list(_waits)


async def within(
    seconds: float,
    awaitable: Awaitable[T],
    worker_and_what: str,
    field: str,
    *,
    look: str = "look at its log in the workdir",
) -> T:
    """Awaits, for at most `seconds` of the event loop's own time.

    A slice that took more than twice its length was a stall of this process, not of the worker. It does not count, so
    the worker is polled again before the deadline counts as missed. A slice in which the work still waited for its turn
    (`turns.queued`) does not count either.

    Args:
      seconds: Deadline in seconds.
      awaitable: Work to wait for. It is cancelled when the deadline passes.
      worker_and_what: Subject of the error's sentence, such as "engine-1's weight update".
      field: Name of the limit under `config.deadlines`, for the error.
      look: Advice in the error before the hint to raise the limit.

    Raises:
      DeadlineMissed: `seconds` have passed. The message names the worker.
    """
    loop = asyncio.get_running_loop()
    # A task copies the context in which it is made, so the work's `queued` blocks find this turn.
    with turns.watched() as turn:
        task = asyncio.ensure_future(awaitable)
    length = seconds / SLICES
    slices_left = SLICES
    wait = Wait(worker_and_what, seconds, loop.time(), turn)
    _waits.add(wait)
    try:
        while slices_left:
            before, queued = loop.time(), turn.queued
            done, _ = await asyncio.wait({task}, timeout=length)
            if done:
                return task.result()
            if loop.time() - before < 2 * length and not (queued or turn.queued):
                slices_left -= 1
    finally:
        _waits.discard(wait)
        abandon(task)
    raise protocols.DeadlineMissed(
        f"{worker_and_what} did not finish within {seconds:g} s: {look}, or raise config.deadlines.{field}."
    )


@contextlib.contextmanager
def noticing(silent: Callable[[], None]) -> Iterator[None]:
    """Calls `silent` if the block lasts for `SILENT_SECONDS`, a stall of the event loop aside."""
    loop = asyncio.get_running_loop()
    half = SILENT_SECONDS / 2
    # Two timers, because a stall lets only the first one fire before the block goes on.
    timers: list[asyncio.TimerHandle] = []
    timers.append(loop.call_later(half, lambda: timers.append(loop.call_later(half, silent))))
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


async def limited(limits: config_lib.DeadlineConfig, limit: Limit, awaitable: Awaitable[T], worker_and_what: str) -> T:
    """Awaits a worker for at most `config.deadlines.<limit>` seconds. Raises the errors of `within`."""
    return await within(getattr(limits, limit), awaitable, worker_and_what, limit)


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Runs coroutines concurrently and returns all results.

    The first error is raised at once and cancels the others.
    """
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            abandon(task)


STALL_SECONDS = 0.1
"""Seconds of lateness from which `cancel_after` takes its event loop for stalled."""

REAP_SECONDS = 5.0
"""Seconds that cancelled work may take to end."""


class Overdue(Exception):
    """The work missed its deadline. `reaped` tells whether the work ended when it was cancelled."""

    def __init__(self, reaped: bool) -> None:
        super().__init__(f"overdue, {'cancelled' if reaped else 'and deaf to cancellation'}")
        self.reaped = reaped


async def cancel_after(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. After `seconds` of the event loop's clock, cancels the work and raises `Overdue`.

    If the event loop stalled and noticed the deadline late, the work first gets the lost time again, up to `seconds`.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    due = loop.time() + seconds
    try:
        await asyncio.wait({task}, timeout=seconds)
        late = loop.time() - due
        if not task.done() and late > STALL_SECONDS:
            # Once and no more, or on a loop that always stalls no deadline would ever pass.
            await asyncio.wait({task}, timeout=min(late, seconds))
        if task.done():
            with user_code.contain_exits():  # the work may have cancelled its own task
                return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=REAP_SECONDS)
        if task.done():
            _forget(task)
    raise Overdue(task.done())


async def finish(work: Awaitable[T]) -> T:
    """Awaits `work` to its end, even if the caller is cancelled in the meantime. `work` must bound its own time.

    A second cancellation ends the wait, and the work goes on.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(_forget)
    try:
        await asyncio.wait({task})  # cancelling this wait does not cancel the work
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
    return task.result()


class _OwnThread(concurrent.futures.Executor):
    """Runs each function on its own thread, which never keeps the process alive."""

    def submit(self, function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def body() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*arguments, **keywords)
            except BaseException as error:
                future.set_exception(user_code.for_future(error))
            else:
                future.set_result(result)

        # Not a thread pool, whose threads are joined at exit: a blocked one would keep the process alive.
        threading.Thread(target=body, name="libra-off-loop", daemon=True).start()
        return future


async def off_loop(function: Callable[..., T], *arguments: Any) -> T:
    """Returns the result of a plain function. If cancelled, no one waits for the function's thread.

    The function sees the caller's context variables. A loop on a virtual clock runs the function in place.

    Raises:
      UserExit: The function raised what is no `Exception`.
    """
    context = contextvars.copy_context()

    def body() -> T:
        with user_code.contain_exits():
            return context.run(function, *arguments)

    return await asyncio.get_running_loop().run_in_executor(_OwnThread(), body)


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a user's function. Awaits an async function; runs a plain function on its own thread.

    Raises:
      UserExit: The function raised what is no `Exception`, or a cancellation that no one else asked for.
    """
    with user_code.contain_exits():
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        result = await off_loop(function, *arguments)
        # A plain function may return a coroutine, as a lambda around an async function does.
        return await result if inspect.isawaitable(result) else result


_semaphores: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = (
    weakref.WeakKeyDictionary()  # lets ended event loops go
)


def semaphore(name: str, count: int) -> asyncio.Semaphore:
    """Returns the semaphore of this name on this event loop. `count` is for the first caller."""
    return _semaphores.setdefault(asyncio.get_running_loop(), {}).setdefault(name, asyncio.Semaphore(count))


def abandon(task: asyncio.Future[T]) -> None:
    """Cancels a task without waiting for it. A late answer or error of a hung worker is dropped."""
    if task.done():
        _forget(task)
    else:
        task.cancel()
        task.add_done_callback(_forget)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]], seconds: float | None = None) -> None:
    """Cancels tasks, and waits for at most `seconds` until they have ended. Their results and errors are dropped."""
    futures = set(tasks)
    for future in futures:
        abandon(future)
    if futures:
        await asyncio.wait(futures, timeout=seconds)


def _forget(task: asyncio.Future[T]) -> None:
    if not task.cancelled():
        # Reading the error marks it as retrieved, so that asyncio does not warn.
        task.exception()
