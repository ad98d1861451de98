"""When a checkpoint is taken: the trainer saves while the run goes on, and the manifest follows at the next step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import checkpoints, deadlines


class Saver:
    """Saves and commits the run's checkpoints.

    Args:
      config: the run's configuration (`checkpoint`, `deadlines.checkpoint`).
      trainer: a `protocols.Trainer`, or its proxy.
      trainer_lock: held by whoever calls the trainer.
      workdir: the run's folder.
      recorder: gets a span for each checkpoint.
      state: the coordinator's part, as it is when called.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        trainer: Any,
        trainer_lock: asyncio.Lock,
        workdir: Path,
        recorder: protocols.Recorder,
        state: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._every = config.checkpoint.every
        self._deadline = config.deadlines.checkpoint
        self._trainer = trainer
        self._lock = trainer_lock
        self._files = checkpoints.Checkpoints(workdir, config.checkpoint.keep)
        self._recorder = recorder
        self._state = state
        self._pending: int | None = None
        self._held: list[int] = []  # the progress that the newest checkpoint, restored or begun, holds
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Seconds the run spent on checkpoints since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def restore(self, step: int) -> dict[str, Any]:
        """Restores the trainer from the checkpoint at `step`; returns the coordinator's part.

        Raises:
          DataError: the checkpoint cannot be read, or its parts are of different steps.
        """
        state = self._files.load(step)
        path = str(self._files.trainer_path(step))
        version = await self._ask(self._trainer.restore(path), "restore a checkpoint")
        if version != step:
            raise protocols.DataError(f"{path} holds version {version}, not {step}: remove that checkpoint.")
        self._held = _progress(state)
        return state

    async def at_step(self, step: int) -> None:
        """Commits the last checkpoint, and begins one if `step` is due."""
        await self.commit()
        if self._every and step % self._every == 0:
            await self.begin(step)

    async def now(self, step: int) -> bool:
        """Takes a checkpoint and commits it; returns False if the config turns checkpoints off."""
        await self.commit()
        if self._every:
            await self.begin(step)
            await self.commit()
        return bool(self._every)

    async def begin(self, step: int) -> None:
        """Begins a checkpoint, unless the newest one holds the same progress."""
        begin, state = asyncio.get_running_loop().time(), self._state()
        if _progress(state) == self._held:
            return
        path = self._files.begin(step, state)
        async with self._lock:
            await self._ask(self._trainer.save(str(path)), "begin a save")
        self._pending, self._held = step, _progress(state)
        self._count(begin, "save", step)

    async def commit(self) -> None:
        """Waits until the checkpoint begun last is durable, and writes its manifest."""
        if self._pending is not None:
            async with self._lock:
                await self.commit_held()

    async def commit_held(self) -> None:
        """Likewise, by whoever holds the trainer's lock."""
        if self._pending is None:
            return
        begin, step = asyncio.get_running_loop().time(), self._pending
        await self._ask(self._trainer.wait_saved(), "finish a save")
        self._files.commit(step)
        self._pending = None
        self._count(begin, "commit", step)

    async def _ask(self, work: Any, what: str) -> Any:
        return await deadlines.within(self._deadline, work, f"The trainer, asked to {what},", "checkpoint")

    def _count(self, begin: float, what: str, step: int) -> None:
        end = asyncio.get_running_loop().time()
        self._seconds += end - begin
        self._recorder.span("coordinator", f"checkpoint {what}", begin, end, {"step": step})


def _progress(state: Mapping[str, Any]) -> list[int]:
    """What tells two checkpoints apart that are worth having."""
    return [state["step"], state["warm_start_steps"], state["evaluated"]]
