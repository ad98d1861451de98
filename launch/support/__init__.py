"""Modules that the commands in launch/ share. Importing the package first explains a missing module in one sentence.

Each command imports from here before it imports a package that may be missing: pyproject.toml orders imports so.
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
