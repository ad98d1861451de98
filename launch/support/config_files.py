"""Watches the evaluation of a user's config file: names the line of its errors, and ends a file that never returns."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import faulthandler
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax import protocols

NOTICE_SECONDS = 10.0
"""Seconds of evaluation after which a notice says which file is being evaluated."""

LIMIT_SECONDS = 120.0
"""Seconds of evaluation after which the process ends; long, because a config may import JAX from a slow file system."""

LIMIT_VARIABLE = "LIBRA_JAX_CONFIG_SECONDS"
"""Environment variable that replaces `LIMIT_SECONDS`."""

_GIL_SECONDS = 5.0
"""Seconds beyond the limit after which a file whose C code holds the interpreter's lock is ended too."""


@contextlib.contextmanager
def watched(file: str) -> Iterator[None]:
    """Says which config file is being evaluated if the block takes long, and ends the process at the limit.

    The process ends with exit status 2, because the file's code may catch every exception.

    Args:
      file: path of the config file; empty watches nothing.
    """
    if not file:
        yield
        return
    limit, returned = LIMIT_SECONDS, threading.Event()
    with contextlib.suppress(KeyError, ValueError):
        limit = max(0.1, float(os.environ[LIMIT_VARIABLE]))
    arguments = (file, limit, threading.get_ident(), returned)
    threading.Thread(target=_watch, args=arguments, name="libra-config-watch", daemon=True).start()
    # Code such as 10**10**10 never lets another thread run. faulthandler's own thread needs no Python.
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may be closed or replaced
        faulthandler.dump_traceback_later(limit + _GIL_SECONDS, exit=True)
    try:
        yield
    finally:
        returned.set()
        faulthandler.cancel_dump_traceback_later()


def sentence(error: BaseException, file: str) -> str | None:
    """Describes an error that the evaluation of a config file raised, with the file's line.

    Args:
      error: what was raised. Libraries may have wrapped the file's own error.
      file: path of the config file.

    Returns:
      One sentence, or None if the error was raised elsewhere.
    """
    link: BaseException | None = error
    while link is not None:
        # The innermost frame of the file counts. A SyntaxError has no frame in it, and its text repeats file and line.
        lines = [frame.lineno or 1 for frame in traceback.extract_tb(link.__traceback__) if _same(frame.filename, file)]
        said = str(link)
        if isinstance(link, SyntaxError) and link.filename and _same(str(link.filename), file):
            lines, said = [link.lineno or 1], link.msg
        if lines:
            line, text = lines[-1], " ".join(said.split())
            if not isinstance(link, protocols.LibraError):
                text = f"{type(link).__name__}: {text}" if text else type(link).__name__
                text += _hint(link)
            return f"--config={file}, line {line}: {text}"
        link = link.__cause__ or link.__context__
    return None


def _hint(error: BaseException) -> str:
    """Offers the name that a mistyped group, field or keyword of a config may mean; empty if the error is another."""
    group: object = None
    if isinstance(error, AttributeError):
        group, name = error.obj, error.name or ""
    elif unexpected := _KEYWORD.match(str(error)):
        group, name = getattr(config_lib, unexpected[1], None), unexpected[2]
    if dataclasses.is_dataclass(group):
        return f"; {config_lib.nearest(name, [item.name for item in dataclasses.fields(group)])}"
    near = difflib.get_close_matches(name, dir(group), n=1) if group is config_lib else []
    return f"; did you mean {near[0]}?" if near else ""


_KEYWORD = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")
"""Python's refusal of a keyword that a class does not take."""


# Comparing names first avoids a look at the file system for most frames.
def _same(one: str, other: str) -> bool:
    return Path(one).name == Path(other).name and os.path.realpath(one) == os.path.realpath(other)


def _watch(file: str, limit: float, thread: int, returned: threading.Event) -> None:
    if returned.wait(min(NOTICE_SECONDS, limit / 2)):
        return
    notice = f"{file} is still being evaluated{_place(file, thread)}; it may take {limit:g} s ({LIMIT_VARIABLE})."
    print(notice, file=sys.stderr, flush=True)
    if returned.wait(limit - min(NOTICE_SECONDS, limit / 2)):
        return
    print(
        f"error: --config={file}: did not return within {limit:g} s{_place(file, thread)}; mend the file, or allow "
        f"more seconds by {LIMIT_VARIABLE} in the environment",
        file=sys.stderr,
        flush=True,
    )
    # `sys.exit` would only end this thread.
    os._exit(2)


def _place(file: str, thread: int) -> str:
    """Describes the file's line at which a thread is."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if _same(frame.f_code.co_filename, file):
            return f", at line {frame.f_lineno}"
        frame = frame.f_back
    return ""
