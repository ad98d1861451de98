"""Finds the line of a user's own code among other frames, and keeps its exceptions from ending the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sysconfig
import threading
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

_FOREIGN = (str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Folders of code that is not a user's."""


def place(frames: Iterable[tuple[str, int | None]]) -> str:
    """Returns the last place in a user's own code, such as `reward.py, line 37`. Empty if there is none.

    Args:
      frames: File and line of each frame, innermost last.
    """
    foreign = tuple(f"{folder}{os.sep}" for folder in _FOREIGN)
    user_frames = [(file, line) for file, line in frames if os.path.isfile(file) and not file.startswith(foreign)]
    if not user_frames:
        return ""
    file, line = user_frames[-1]
    near = os.path.relpath(file)
    return f"{file if near.startswith('..') else near}, line {line}"


def running(frame: types.FrameType | None) -> str:
    """Returns the place in a user's own code that an event loop is running. Empty if it runs none.

    Args:
      frame: Innermost frame of the event loop's thread.
    """
    frames: list[tuple[str, int | None]] = []
    while frame is not None and not frame.f_code.co_filename.endswith(os.path.join("asyncio", "events.py")):
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return place(reversed(frames))


class SignalExit(SystemExit):
    """The end of this process that one of our signal handlers asks for. It may interrupt user code."""


class UserExit(Exception):
    """Stands for an exception of user code that a task must not raise, such as SystemExit, its `__cause__`."""


def exit_of(error: BaseException) -> UserExit:
    """Returns the error that stands for an exception of user code."""
    user_exit = UserExit(f"{type(error).__name__}: {error}")
    user_exit.__cause__ = error
    return user_exit


def for_future(error: BaseException) -> BaseException:
    """Returns an exception of user code in a form that a future passes on, and that ends no event loop."""
    passes = isinstance(error, Exception | asyncio.CancelledError) and not isinstance(error, StopIteration)
    return error if passes else exit_of(error)


def original(error: BaseException) -> BaseException:
    """Returns the exception that user code raised."""
    return error.__cause__ if isinstance(error, UserExit) and error.__cause__ is not None else error


@contextlib.contextmanager
def contain_exits() -> Iterator[None]:
    """Raises `UserExit` instead of what would end more than the call: a process, an event loop, or a task.

    Call user code inside it, in the innermost task: a SystemExit that leaves a task ends the event loop.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs on this thread
            task = None
        if isinstance(error, asyncio.CancelledError):  # the run, or a deadline, asked for it
            passes = task is not None and task.cancelling() > 0
        elif isinstance(error, GeneratorExit):  # Python closes a coroutine or a generator outside of a task
            passes = task is None
        else:  # signals reach no other thread
            at_signal = isinstance(error, KeyboardInterrupt | SignalExit)
            passes = at_signal and threading.current_thread() is threading.main_thread()
        if passes:
            raise
        raise exit_of(error) from error
