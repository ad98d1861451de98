"""Tools that work in a sandbox's workspace: a Python interpreter, a shell and an editor. They share one session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra_jax import protocols
from libra_jax.tools.sandbox import backends, limits, pool


def _schema(required: tuple[str, ...], **properties: Mapping[str, Any]) -> Mapping[str, Any]:
    # Without further properties: the policy gets an error for a misspelt argument.
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _returned(tool: str, outcome: limits.SandboxOutcome) -> protocols.ToolReturn:
    # The sandbox's own seconds: they leave out the wait for a sandbox, which is no work of the tool.
    return protocols.ToolReturn(tool, outcome.status, outcome.text, outcome.seconds)


@dataclass
class _InSession:
    """What the tools share: the session of the rollout's sandbox."""

    session: pool.SandboxSession


class Python(_InSession):
    """A Python interpreter that keeps its variables over calls."""

    name = "python"
    description = (
        "Runs Python code and returns what it prints and the value of a last expression. Variables, imports and files "
        "are kept for the next call. There is no network."
    )
    parameters = _schema(("code",), code={"type": "string", "description": "The code to run."})

    async def call(self, arguments: Mapping[str, Any]) -> protocols.ToolReturn:
        return _returned(self.name, await self.session.python(arguments["code"]))


class Shell(_InSession):
    """A bash shell that keeps its folder, variables and functions over calls."""

    name = "shell"
    description = (
        "Runs a command in bash and returns its output. The current folder, variables and files are kept for the next "
        "call; what runs in the background ends with the call. There is no network."
    )
    parameters = _schema(("command",), command={"type": "string", "description": "The command to run."})

    async def call(self, arguments: Mapping[str, Any]) -> protocols.ToolReturn:
        return _returned(self.name, await self.session.shell(arguments["command"]))


_NEEDS = {"view": (), "create": ("text",), "replace": ("old", "new")}


class Edit(_InSession):
    """Views, creates and changes files of the workspace, and no files outside."""

    name = "edit"
    description = (
        f"Works on a file below {backends.WORKSPACE}. view shows its lines with their numbers (or a folder's entries), "
        "create writes it whole, replace changes a text that is in it exactly once."
    )
    parameters = _schema(
        ("command", "path"),
        command={"type": "string", "enum": list(_NEEDS)},
        path={"type": "string", "description": "Of the file, from the workspace."},
        text={"type": "string", "description": "create: the file's content."},
        old={"type": "string", "description": "replace: the present text."},
        new={"type": "string", "description": "replace: the text that takes its place."},
        first={"type": "integer", "minimum": 1, "description": "view: the first line shown."},
        last={"type": "integer", "minimum": 1, "description": "view: the last line shown."},
    )

    async def call(self, arguments: Mapping[str, Any]) -> protocols.ToolReturn:
        command = arguments["command"]
        for needed in _NEEDS[command]:
            if needed not in arguments:
                return protocols.ToolReturn(self.name, "failure", f"error: {command} needs {needed!r}")
        return _returned(self.name, await self.session.edit(arguments))
