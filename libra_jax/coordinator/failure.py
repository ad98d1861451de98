"""Holds the end of a run: everything that ends the run reports it here, and everything that waits listens here."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from libra_jax import deadlines

T = TypeVar("T")


class Stopped(Exception):
    """Raised if a person or a scheduler stops the run; not an error."""


class Ending:
    """The end of the run, and the background tasks that end with it. Create it inside the event loop that it serves."""

    def __init__(self) -> None:
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Retrieve the exception, or asyncio warns about it if nobody awaits the end.
        self._end.add_done_callback(lambda end: end.exception())
        self._hurry: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def called(self) -> bool:
        """True once the run is to end."""
        return self._end.done()

    @property
    def hurried(self) -> bool:
        """True once no work may be awaited to its end any more."""
        return self._hurry.done()

    def hurry(self) -> None:
        """Lets `race` abandon work that it awaits through a stop."""
        if not self._hurry.done():
            self._hurry.set_result(None)

    def call(self, error: BaseException) -> None:
        """Ends the run with `error`. Later calls have no effect."""
        if not self._end.done():
            self._end.set_exception(error)

    def check(self) -> None:
        """Raises the error that ends the run, if there is one."""
        if self._end.done():
            self._end.result()

    async def race(self, work: Coroutine[Any, Any, T], *, through_stop: bool = False) -> T:
        """Awaits `work`, or raises the run's end at once. In that case `work` is cancelled and not awaited.

        Args:
          work: the coroutine to await.
          through_stop: if True and a person or a scheduler stops the run, `work` is still awaited to its end, unless
            `hurry` is called.
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
        """Runs `work` in the background. An error in `work` ends the run."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.call(error)

    async def cancel_background(self, seconds: float) -> None:
        """Cancels every background task and waits at most `seconds` for all to end.

        A task that was cancelled before is closing its resources. It is not interrupted in that.
        """
        tasks = set(self._tasks)
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
