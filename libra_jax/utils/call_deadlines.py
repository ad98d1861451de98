"""Waits that always end: coroutines under a deadline, and plain functions that cannot block the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from libra_jax.utils import user_code

T = TypeVar("T")

_semaphores: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = (
    weakref.WeakKeyDictionary()  # lets ended event loops go
)

STALL_SECONDS = 0.1
REAP_SECONDS = 5.0


def semaphore(name: str, count: int) -> asyncio.Semaphore:
    """Returns the semaphore of this name on this event loop. `count` is for the first caller."""
    return _semaphores.setdefault(asyncio.get_running_loop(), {}).setdefault(name, asyncio.Semaphore(count))


class Overdue(Exception):
    """The work missed its deadline. `reaped` tells whether the work ended when it was cancelled."""

    def __init__(self, reaped: bool) -> None:
        super().__init__(f"overdue, {'cancelled' if reaped else 'and deaf to cancellation'}")
        self.reaped = reaped


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. After `seconds` of the event loop's clock, cancels the work and raises `Overdue`.

    If the event loop stalled and noticed the deadline late, the work first gets the lost time again, up to `seconds`.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    due = loop.time() + seconds
    try:
        await _settled(task, seconds)
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
        if task.done() and not task.cancelled():
            task.exception()  # marks the error as retrieved, so that asyncio does not warn
    raise Overdue(task.done())


async def _settled(task: asyncio.Task[Any], seconds: float) -> None:
    """Waits for one task until it is done or `seconds` have passed.

    Same as `asyncio.wait`, with half of its overhead.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def release(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = loop.call_later(seconds, release)
    task.add_done_callback(release)
    try:
        await waiter
    finally:
        timer.cancel()
        task.remove_done_callback(release)


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a user's function. Awaits an async function; runs a plain function on its own thread.

    Raises:
      UserExit: The function raised what is no `Exception`, or a cancellation that nobody else asked for.
    """
    with user_code.contain_exits():
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        result = await off_loop(function, *arguments)
        # A plain function may return a coroutine, as a lambda around an async function does.
        return await result if inspect.isawaitable(result) else result


async def off_loop(function: Callable[..., T], *arguments: Any) -> T:
    """Runs a plain function on its own thread and returns the result. The thread never keeps the process alive.

    The function sees the caller's context variables.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        # The waiter was cancelled meanwhile, and nobody wants the result any more.
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            with user_code.contain_exits():
                result = context.run(function, *arguments)
        except BaseException as error:
            failure = user_code.for_future(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    # Not a thread pool, whose threads are joined at exit: a blocked one would keep the process alive.
    threading.Thread(target=body, name="libra-off-loop", daemon=True).start()
    return await future
