"""The process in which cases run.

JAX and torch live in the worker alone. A case that hangs, dies or leaves a broken device is ended with it, and the next
case gets a new worker. All processes of the script are descendants of one.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from libra_jax import protocols

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Call:
    """A function, as "module:function", and its arguments."""

    target: str
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What a call returned, or the sentence of the error that it raised.

    Attributes:
      value: what it returned.
      error: empty if it returned.
      kind: name of the error's type.
    """

    value: object = None
    error: str = ""
    kind: str = ""


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent dies, so that it can reap them (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def serve(pipe: connection.Connection, environment: Mapping[str, str], path: Sequence[str]) -> None:
    """Answers one `Call` after the other, until None comes (`processes.Peer`).

    Args:
      pipe: brings calls and takes replies.
      environment: environment variables, set before anything is imported here.
      path: folders to import from, beside those of the other process.
    """
    os.environ.update(environment)
    sys.path.extend(folder for folder in path if folder not in sys.path)
    while (call := pipe.recv()) is not None:
        try:
            module, _, name = call.target.partition(":")
            function: Any = getattr(importlib.import_module(module), name)
            reply = Reply(function(*call.arguments))
        except Exception as error:
            if os.environ.get("LIBRA_JAX_TRACEBACK"):
                traceback.print_exc()
            kind, said = type(error).__name__, " ".join(str(error).split())[:400]
            reply = Reply(error=said if isinstance(error, protocols.LibraError) else f"{kind}: {said}", kind=kind)
        pipe.send(reply)
