"""Finds the line of a user's own code among frames of this package, of Python and of installed packages."""

from __future__ import annotations

import os
import sysconfig
import types
from collections.abc import Iterable
from pathlib import Path

_FOREIGN = (str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Folders of code that is not a user's."""


def place(frames: Iterable[tuple[str, int | None]]) -> str:
    """Returns the last place in a user's own code, such as `reward.py, line 37`. Empty if there is none.

    Args:
      frames: File and line of each frame, innermost last.
    """
    foreign = tuple(f"{folder}{os.sep}" for folder in _FOREIGN)
    own = [(file, line) for file, line in frames if os.path.isfile(file) and not file.startswith(foreign)]
    if not own:
        return ""
    file, line = own[-1]
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
