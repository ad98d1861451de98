"""Waits that end: every wait on a worker has a deadline, and missing it names the worker."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from libra_jax import config, protocols, turns

T = TypeVar("T")

Limit = Literal[
    "checkpoint", "engine_start", "first_token", "publish", "shutdown", "train_step", "trainer_start", "transition"
]
"""A field of `config.deadlines`."""

SLICES = 8
"""A deadline is waited for in this many slices, so that a stall of the event loop uses up one of them at most."""


@dataclass(slots=True, eq=False)
class Wait:
    """A wait that is under way.

    Attributes:
      subject: who is waited for, and in what.
      seconds: the deadline.
      began: seconds on the event loop's clock.
      turn: whether the work waits for its turn, which does not count.
    """

    subject: str
    seconds: float
    began: float
    turn: turns.Turn


_waits: set[Wait] = set()


def waits() -> list[Wait]:
    """The waits under way in this process, for whoever watches the run; from any thread."""
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

    A slice that took more than twice its length was a stall of this process, not of the worker: it does not count,
    and the worker is polled again before the deadline is declared missed. Nor does a slice count in which the work
    was still waiting for its turn (`turns.queued`).

    Args:
      seconds: the deadline.
      awaitable: what to wait for; cancelled when the deadline passes.
      worker_and_what: subject of the error's sentence, such as "engine-1's weight update".
      field: the limit's name under `config.deadlines`, for the error.
      look: what the error says to do before the limit is raised.

    Raises:
      DeadlineMissed: `seconds` passed; the message names the worker.
    """
    loop = asyncio.get_running_loop()
    with turns.watched() as turn:
        task = asyncio.ensure_future(awaitable)
    length = seconds / SLICES
    left = SLICES
    wait = Wait(worker_and_what, seconds, loop.time(), turn)
    _waits.add(wait)
    try:
        while left:
            before, queued = loop.time(), turn.queued
            done, _ = await asyncio.wait({task}, timeout=length)
            if done:
                return task.result()
            if loop.time() - before < 2 * length and not (queued or turn.queued):
                left -= 1
    finally:
        _waits.discard(wait)
        abandon(task)
    raise protocols.DeadlineMissed(
        f"{worker_and_what} did not finish within {seconds:g} s: {look}, or raise config.deadlines.{field}."
    )


async def limited(limits: config.DeadlineConfig, limit: Limit, awaitable: Awaitable[T], worker_and_what: str) -> T:
    """Awaits a worker for at most `config.deadlines.<limit>` seconds. Raises as `within` does."""
    return await within(getattr(limits, limit), awaitable, worker_and_what, limit)


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Returns all results; the first error is raised at once, and the others are cancelled."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            abandon(task)


class _OwnThread(concurrent.futures.Executor):
    """Runs each function on a thread of its own, which never keeps the process alive."""

    def submit(self, function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def body() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*arguments, **keywords)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=body, name="libra-beside-the-run", daemon=True).start()
        return future


async def off_loop(function: Callable[..., T], *arguments: Any) -> T:
    """Returns the result of a function that reads the disk, run on a thread that nobody waits for once cancelled.

    A loop on a virtual clock runs it in place.
    """
    return await asyncio.get_running_loop().run_in_executor(_OwnThread(), function, *arguments)


def abandon(task: asyncio.Future[T]) -> None:
    """Cancels without waiting: a hung worker's answer, or its error, comes when it comes and is dropped."""
    if task.done():
        _forget(task)
    else:
        task.cancel()
        task.add_done_callback(_forget)


def _forget(task: asyncio.Future[T]) -> None:
    if not task.cancelled():
        task.exception()
