"""Processes that simulate side by side, and end with the one that started them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator

from libra_jax import parent_death


@contextlib.contextmanager
def pool(workers: int) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """So many worker processes; an error or Ctrl-C in the block ends them at once, whatever they are at.

    They are spawned: what a child inherits by fork (event loops, threads) is not simulated by anyone.
    """
    executor = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    )
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        executor.shutdown()


def _begin(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends its workers
    parent_death.die_with_parent(parent)
