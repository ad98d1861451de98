"""Actors that the cluster tests make, by name, in this process or in Ray's."""

from __future__ import annotations

import asyncio
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing import shared_memory
from typing import Any

from libra_jax.protocols import ActorAddress, DataError, TrainBatch
from libra_jax.utils import turns


class Pickled:
    """Counts how often it leaves this process."""

    times = 0

    def __reduce__(self) -> tuple[Any, ...]:
        Pickled.times += 1
        return Pickled, ()


class OwnExit(BaseException):
    """As panics of Rust extensions raise it."""


class Counter:
    """A sync actor."""

    def __init__(self, start: int = 0) -> None:
        self.made_on = threading.get_ident()
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def threads(self) -> tuple[int, int]:
        return self.made_on, threading.get_ident()

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def rewards(self, batch: TrainBatch, factor: float) -> list[float]:
        return [factor * item.reward for group in batch.groups for item in group.trajectories]

    def fail(self, kind: str) -> None:
        if kind == "ours":
            raise DataError("tasks.jsonl line 3 is not JSON; mend the line")
        if kind == "exit":
            raise SystemExit(2)
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "stop":
            raise StopIteration("end")
        if kind == "own":
            raise OwnExit("panic")
        raise ValueError("first line\nsecond line")

    def _private(self) -> None: ...


class Streamer:
    """An async actor; `closed` counts the streams that were closed."""

    def __init__(self, log: str = "") -> None:
        self.loop = asyncio.get_running_loop()
        self.gate = asyncio.Event()
        self.closed = 0
        self.yielded = 0
        self.noting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.log = log
        self.made_with = os.environ.get("LIBRA_TEST_VARIABLE")
        self.started_with: str | None = None

    async def start(self) -> None:
        await asyncio.sleep(0.01)
        self.started_with = os.environ.get("LIBRA_TEST_VARIABLE")

    async def environment(self) -> tuple[str | None, str | None]:
        return self.made_with, self.started_with

    async def pid(self) -> int:
        return os.getpid()

    async def wait(self) -> str:
        await self.gate.wait()
        return "opened"

    async def open(self) -> None:
        self.gate.set()

    async def count_closed(self) -> int:
        return self.closed

    async def numbers(self, count: int, *, fail_at: int = -1) -> AsyncIterator[int]:
        try:
            for number in range(count):
                if number == fail_at:
                    raise DataError(f"number {number} is bad; leave it out")
                yield number
                await asyncio.sleep(0)
        finally:
            self.closed += 1

    async def forever(self) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            self.closed += 1

    async def counted(self, count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            self.yielded = number
            yield bytes(1000)
            await asyncio.sleep(0)

    async def count_yielded(self) -> int:
        return self.yielded

    async def note_cancellation(self) -> None:
        self.noting.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def until_noting(self) -> None:
        await self.noting.wait()

    async def until_cancelled(self) -> None:
        await self.cancelled.wait()

    def wrapped(self, count: int) -> AsyncIterator[int]:
        return self.numbers(count)

    async def child(self) -> tuple[int, str]:
        """Makes a process, and shared memory with it, that outlive their parent unless somebody sees to it."""
        self.memory = shared_memory.SharedMemory(create=True, size=4096)
        process = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "import time; time.sleep(600)")
        self.process: Any = process
        return process.pid, self.memory.name

    async def shutdown(self) -> None:
        if self.log:
            record(self.log)


class SlowStarter:
    """Its `start` ends when it is told to."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def start(self) -> None:
        await self.gate.wait()

    async def open(self) -> None:
        self.gate.set()


class EarlyTurn(SlowStarter):
    """Its `start` ends its turn, then goes on until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.read = threading.Event()

    def note(self) -> None:
        self.started_with = os.environ.get("LIBRA_TEST_VARIABLE")
        turns.ending()()
        self.read.set()

    async def start(self) -> None:
        self.note()
        await super().start()

    async def begun(self) -> None:
        await asyncio.to_thread(self.read.wait)


class EarlyTurnOnThread(EarlyTurn):
    """The same with a sync `start`."""

    def start(self) -> None:
        self.note()
        self.told.wait(30)

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    async def open(self) -> None:
        self.told.set()


def record(path: str) -> None:
    pathlib.Path(path).write_text("shutdown")


class Stubborn:
    """Its shutdown fails, or never returns."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def shutdown(self) -> None:
        if self.mode == "hang":
            await asyncio.Event().wait()
        raise OSError("device is busy")


def streamer(log: str = "") -> Streamer:
    """A factory function: its return annotation says that an event loop is needed."""
    return Streamer(log)


async def async_factory() -> Counter:
    await asyncio.sleep(0)
    return Counter(7)


def failing() -> Counter:
    subprocess.run(["true"], check=True)
    raise RuntimeError("no accelerator found")


not_callable = 3


class Reader:
    """An async actor that calls another one, by its address."""

    async def read(self, address: ActorAddress, count: int) -> list[int]:
        return [number async for number in address.handle().stream(Streamer.numbers, count)]

    async def ask(self, address: ActorAddress) -> int:
        return await address.handle().call(Streamer.pid)

    async def hold(self, address: ActorAddress) -> None:
        async for _ in address.handle().stream(Streamer.forever):
            pass
