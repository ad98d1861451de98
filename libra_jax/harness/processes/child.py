"""Calls one function in a process of its own, and writes what it returns, sealed with a secret of the run.

Standard library only: the interpreter may be that of another virtual environment, without this package.
"""

from __future__ import annotations

import asyncio
import ctypes
import hmac
import importlib
import inspect
import json
import os
import sys
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

_PR_SET_DUMPABLE = 4


class HiddenFieldError(LookupError):
    """A field that the agent must not see. It is no KeyError, because code for a missing field must not catch it."""


class Payload(dict[str, Any]):
    """The fields of a payload that an agent sees. Those that it must not see are refused by name."""

    hidden: Collection[str] = ()

    def __init__(self, fields: Mapping[str, Any], hidden: Collection[str] = ()) -> None:
        super().__init__(fields)
        self.hidden = frozenset(hidden)

    def _check(self, name: object) -> None:
        if name in self.hidden:
            raise HiddenFieldError(
                f"the agent does not see the task's field {name!r}: name it in environment_arguments.fields, or score "
                "with it in a function (environment_arguments.score)"
            )

    def __missing__(self, name: str) -> Any:
        self._check(name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        self._check(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field's value, or the default if the task has no such field."""
        self._check(name)
        return super().get(name, default)


def main(path: str) -> None:
    """Calls the function that a file of JSON describes. Removes the file, which holds the secret."""
    with open(path) as file:
        request = json.load(file)
    os.unlink(path)
    # Other processes of the same user can then neither read this one's memory nor trace it.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    key = request.pop("key").encode()
    # This file's own folder comes first otherwise, and its neighbours would hide modules of the same names.
    sys.path[0:1] = request["search"]
    endpoint = SimpleNamespace(**request["endpoint"])
    task = SimpleNamespace(**{**request["task"], "payload": Payload(request["task"]["payload"], request["hidden"])})
    module, _, name = request["function"].partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    arguments = request["arguments"]
    if "folder" in inspect.signature(function).parameters:
        arguments["folder"] = os.getcwd()
    result: Any = None
    hidden = ""  # sealed, because what this process prints may come from the model
    try:
        result = function(task, endpoint, **arguments)
        if inspect.isawaitable(result):

            async def awaited() -> Any:
                return await result

            result = asyncio.run(awaited())
    except HiddenFieldError as error:
        hidden = str(error)
    # An object with fields, such as a dataclass, is a mapping of them.
    text = json.dumps([result, hidden], default=lambda value: getattr(value, "__dict__", str(value))).encode()
    # Not through a link or a pipe, which the agent's processes may have put there.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(request["verdict"], flags), "wb") as sealed:
        sealed.write(hmac.digest(key, text, "sha256").hex().encode() + b"\n" + text)


if __name__ == "__main__":
    main(sys.argv[1])
