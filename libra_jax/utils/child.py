"""A forked process in which a user's code is tried before a run, and which leaves nothing behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import connection, process
from typing import Any

from libra_jax.utils import parent_death


@contextlib.contextmanager
def forked(target: Callable[..., None], *arguments: object) -> Iterator[tuple[process.BaseProcess, Any]]:
    """Runs `target(*arguments, sender)` in a child, and yields the child and the connection that receives from it.

    The child's death ends a wait on the connection with EOFError. In the end the child is killed, with the processes
    that it has started, unless these have left its group. It also dies with this process.
    """
    context = multiprocessing.get_context("fork")  # only fork does not import the command's script a second time
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(os.getpid(), target, arguments, sender))
    with warnings.catch_warnings():
        # A notebook's process may hold JAX. The child neither uses JAX nor outlives a deadline of the parent.
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called|This process .* is multi-threaded")
        child.start()
    assert child.pid is not None
    sender.close()
    try:
        yield child, receiver
    finally:
        # SIGTERM would run the handler that the command has installed, which the child inherited.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()  # it may not have made its group yet
        child.join()
        receiver.close()


def _run(
    parent: int, target: Callable[..., None], arguments: tuple[object, ...], sender: connection.Connection
) -> None:
    os.setsid()
    parent_death.die_with_parent(parent)
    target(*arguments, sender)
