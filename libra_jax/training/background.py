"""Compiles programs on a thread of its own while another thread trains, so that no step has to wait for them.

The thread only traces and compiles. It runs no program of a step; on GPUs, XLA tunes kernels by short runs of them,
which take time and memory beside the step. On several processes, each one compiles the same shapes in the same order,
because XLA's GPU compiler shares the work of tuning kernels between processes.

Thread-safety: one thread begins, waits and cancels. Any thread may read the attributes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from libra_jax.training import step


@dataclass(eq=False)
class Compilation:
    """Compiles programs for shapes, one after the other, until the first error.

    Attributes:
      programs: programs to compile. Another thread that needs one of them meanwhile waits for it.
      shapes: returns the shapes in the order of compilation. They may grow at their end.
      name: name of the thread.
      tell: called on the thread with the error that ends the compilation.
      done: number of shapes compiled.
      seconds: seconds that the thread has run, counted when it ends.
      error: the error that ended the compilation; None without one.
      cancelled: True after `cancel`.
    """

    programs: step.Programs
    shapes: Callable[[], Sequence[step.Shape]]
    name: str
    tell: Callable[[Exception], None] | None = None
    done: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)
    error: Exception | None = field(default=None, init=False)
    # The thread reads it without a lock, because it only ever becomes True.
    cancelled: bool = field(default=False, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    @property
    def running(self) -> bool:
        """True while the thread compiles."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self) -> None:
        """Starts the thread if shapes are missing. Does nothing while it runs, after an error, or after `cancel`.

        The thread inherits the CPU cores of the caller.
        """
        if self.running or self.error is not None or self.cancelled or self.done == len(self.shapes()):
            return
        # A daemon, because XLA cannot be interrupted: a process that does not wait for it can still end.
        self._thread = threading.Thread(target=self._compile, name=self.name, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` for the thread. Returns True if it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.running

    def cancel(self, seconds: float) -> bool:
        """Ends the compilation after the current shape. Waits at most `seconds`; returns True if it has ended."""
        self.cancelled = True
        return self.wait(seconds)

    def _compile(self) -> None:
        start = time.monotonic()
        try:
            while not self.cancelled and self.done < len(shapes := self.shapes()):
                self.programs.compile(*shapes[self.done])
                self.done += 1
        except Exception as error:  # a step that needs the program compiles it and raises the error then
            self.error = error
            if self.tell is not None:
                self.tell(error)
        finally:
            self.seconds += time.monotonic() - start
