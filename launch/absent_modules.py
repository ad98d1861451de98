"""Explains in one sentence which module a script lacks, and with what Python to run it.

Each script imports this module before any module that may be missing.
"""

from __future__ import annotations

import sys
import types

_usual = sys.excepthook


def _explain(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Handles an uncaught exception; Python ends with exit status 1 afterwards."""
    if not isinstance(error, ModuleNotFoundError):
        _usual(kind, error, trace)
        return
    print(
        f"error: {sys.executable} has no module {error.name}: run bash launch/setup.sh once, then "
        f".venv/bin/python {sys.argv[0]}",
        file=sys.stderr,
    )


sys.excepthook = _explain
