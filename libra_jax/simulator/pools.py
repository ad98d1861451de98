"""Processes that simulate side by side, and end with the one that started them."""

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
"""In which an executor that is shut down drops the calls that wait: one whose workers vanish before that prints a
traceback about them."""

END_SECONDS = 10.0
"""In which a worker ends that is told to."""


@contextlib.contextmanager
def pool(workers: int) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """So many worker processes; an error or Ctrl-C in the block ends them at once, whatever they are at.

    They are spawned: what a child inherits by fork (event loops, threads) is not simulated by anyone.
    """
    before = set(multiprocessing.active_children())
    executor = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    )
    try:
        with _ignoring_interrupts():
            for _ in range(workers):  # each starts one
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
    """What is started in the block ignores Ctrl-C, which a terminal sends to all: the one that started it ends it."""
    if threading.current_thread() is not threading.main_thread():  # only that one may say so
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
