"""Calls one function in a process of its own, and writes what it returns.

Standard library only: the interpreter may be that of another virtual environment, without this package.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
from types import SimpleNamespace
from typing import Any


def main(path: str) -> None:
    """Calls the function that a file of JSON describes."""
    with open(path) as file:
        asked = json.load(file)
    # This file's own folder comes first otherwise, and its neighbours would hide modules of the same names.
    sys.path[0:1] = asked["search"]
    endpoint = SimpleNamespace(**asked["endpoint"])
    task = SimpleNamespace(**asked["task"])
    module, _, name = asked["function"].partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    arguments = asked["arguments"]
    if "folder" in inspect.signature(function).parameters:
        arguments["folder"] = os.getcwd()
    found = function(task, endpoint, **arguments)
    if inspect.isawaitable(found):

        async def awaited() -> Any:
            return await found

        found = asyncio.run(awaited())
    with open(asked["verdict"], "w") as file:
        # An object with fields, such as a dataclass, is a mapping of them.
        json.dump(found, file, default=lambda other: getattr(other, "__dict__", str(other)))


if __name__ == "__main__":
    main(sys.argv[1])
