"""One place where anything that ends the run is reported, and that everything which waits listens to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from libra_jax import deadlines

T = TypeVar("T")


class Stopped(Exception):
    """The person running it asked the run to stop; not an error."""


class Ending:
    """The run's end, as soon as something calls for it. Made inside the event loop it serves."""

    def __init__(self) -> None:
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end.add_done_callback(lambda end: end.exception())
        self._hurry: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def called(self) -> bool:
        """Whether the run is to end."""
        return self._end.done()

    @property
    def hurried(self) -> bool:
        """Whether nothing is awaited to its end any more."""
        return self._hurry.done()

    def hurry(self) -> None:
        """What is awaited to its end because a person stops the run is left behind from now on."""
        if not self._hurry.done():
            self._hurry.set_result(None)

    def call(self, error: BaseException) -> None:
        """Ends the run with `error`; the first call counts."""
        if not self._end.done():
            self._end.set_exception(error)

    def check(self) -> None:
        """Raises what ends the run, if anything does."""
        if self._end.done():
            self._end.result()

    async def race(self, work: Coroutine[Any, Any, T], *, through_stop: bool = False) -> T:
        """Awaits `work`, or raises at once what ends the run; `work` is cancelled then, and not waited for.

        Args:
          work: what to await.
          through_stop: if a person or a scheduler stops the run meanwhile, `work` is awaited to its end first, unless
            there is no time for that (`hurry`).
        """
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._end}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and through_stop and isinstance(self._end.exception(), Stopped):
                either = {task, self._hurry}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._end.result()
            return task.result()
        finally:
            deadlines.abandon(task)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs `work` in the background; an error it raises ends the run."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.call(error)

    async def cancel_background(self, seconds: float) -> None:
        """Cancels everything started here and waits until it has ended, `seconds` at most.

        What has been cancelled before is closing what it holds, and is not interrupted in that.
        """
        tasks = set(self._tasks)
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
