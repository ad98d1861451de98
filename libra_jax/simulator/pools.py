"""Pools of processes that simulate side by side and end with the process that started them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from libra_jax import parent_death

DROP_SECONDS = 0.2
"""Seconds for a stopped executor to drop its waiting calls. If its workers vanish earlier, it prints a traceback
about the calls."""

END_SECONDS = 10.0
"""Seconds within which a killed worker ends."""


@contextlib.contextmanager
def pool(workers: int) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Yields a pool of `workers` processes; an error or Ctrl-C in the block ends them at once, even during a call.

    The processes are spawned, because event loops and threads that a fork inherits would break the simulation.
    """
    # Other code may have children, too; only this pool's are killed.
    before = set(multiprocessing.active_children())
    executor = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    )
    try:
        with _ignoring_interrupts():
            for _ in range(workers):  # each call starts one worker
                executor.submit(os.getpid)
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        time.sleep(DROP_SECONDS)
        mine = set(multiprocessing.active_children()) - before
        for worker in mine:
            worker.kill()
        for worker in mine:
            worker.join(END_SECONDS)
        raise
    executor.shutdown()


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Makes processes started in the block ignore Ctrl-C, which a terminal sends to all; their parent ends them."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _begin(parent: int) -> None:
    if sys.platform == "linux":
        parent_death.die_with_parent(parent)
