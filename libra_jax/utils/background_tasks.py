"""Work in the background of something that ends: tasks that end with it, and whose errors end it."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundTasks(abc.ABC):
    """Background tasks of one lifetime. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @abc.abstractmethod
    def call(self, error: BaseException) -> None:
        """Ends the lifetime with `error`. Later calls have no effect."""

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs `work` in the background. An error in `work` ends the lifetime."""

        def on_end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.call(error)

        task = asyncio.get_running_loop().create_task(work, name=name)
        # The event loop keeps weak references only, so a task without another one may vanish before its end.
        self._tasks.add(task)
        task.add_done_callback(on_end)
        return task

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
