"""Calls functions of a repository in a sandbox, and writes what they return as lines of JSON.

A sandbox gets this file as text, with a call of `main` at its end. Standard library only. The host trusts nothing that
this process says (`calls.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
from typing import Any

_PLAIN = (type(None), bool, int, float, str)


def _check_plain(value: Any) -> None:
    """Raises TypeError for a value that JSON would change: a tuple, a subclass, a key that is no text."""
    if type(value) is list:
        for item in value:
            _check_plain(item)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError
            _check_plain(item)
    elif not any(type(value) is plain for plain in _PLAIN):  # a metaclass may say that it is equal to all
        raise TypeError(f"{type(value).__name__} is no plain type")


def _answer(number: int, function: str, arguments: list[Any]) -> str:
    module, _, name = function.partition(":")
    called = getattr(importlib.import_module(module), name)
    # Outside of the `try`: a function that is missing, or does not take these arguments, has not raised.
    with contextlib.suppress(ValueError):  # a function of C may have no signature
        inspect.signature(called, follow_wrapped=False).bind(*arguments)
    try:
        value = called(*arguments)
    except BaseException as error:  # SystemExit too: the next calls still have to be made
        return json.dumps([number, None, str(type(error).__name__)])
    _check_plain(value)
    return json.dumps([number, value, None])


def main(request: dict[str, Any]) -> None:
    """Makes the calls. What the functions print goes nowhere."""
    answers, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    workspace = os.getcwd()
    sys.path[:0] = [os.path.join(workspace, "src"), workspace]
    for number, (function, arguments) in enumerate(request["calls"]):
        try:
            text = _answer(number, function, arguments)
        except BaseException:  # no such function, or a value that is no JSON
            continue
        if len(text) <= request["most_bytes"]:
            buffer = memoryview(f"{text}\n".encode())
            while buffer:
                buffer = buffer[os.write(answers, buffer) :]
