"""Runs an agent that is a Python function: in this process, or in a process with an interpreter of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hmac
import inspect
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_jax import protocols
from libra_jax.harness import jobs, private_view
from libra_jax.harness.processes import child, commands, processes, workspace
from libra_jax.utils import deadlines, resolving, user_code

_CHILD = str(Path(__file__).with_name("child.py"))
_CALL, _VERDICT, _VERDICT_BYTES = "call.json", "verdict", 2**22


@dataclass(frozen=True)
class InProcess:
    """Runs a function in this process: an async one on the run's event loop, a plain one on its own thread.

    This is the cheapest way: hundreds of agents share one process and its modules. The price: environment variables
    belong to the process, so the function takes the endpoint as an argument. A thread that overruns its deadline cannot
    be ended. It is left alone, and its next request to the closed session fails.

    The function also gets its working directory if it has the parameter `folder`.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    settings: commands.ProgramSettings

    async def run(self, job: jobs.Job) -> jobs.Finished:
        loop, settings = asyncio.get_running_loop(), self.settings
        start, arguments = loop.time(), dict(self.arguments)
        if "folder" in inspect.signature(self.function).parameters:
            arguments["folder"] = job.work
        status: int | None = 0
        verdict: object = None
        try:
            # A partial of an async function counts as async, so `call` takes both kinds.
            call = deadlines.call(functools.partial(self.function, **arguments), job.public.copy(), job.endpoint)
            verdict = await deadlines.cancel_after(settings.seconds, call)
        except deadlines.Overdue:
            status = None
        except (protocols.LibraError, asyncio.CancelledError):
            raise
        except Exception as raised:
            error = user_code.original(raised)
            subject = f"agent {resolving.shown(self.name)}, task {job.task.prompt_id}:"
            if isinstance(error, child.HiddenFieldError):
                raise protocols.EnvironmentCrashed(f"{subject} it {resolving.raised(error)}") from error
            raise jobs.failure(
                f"{subject} it {resolving.raised(error)}", _names(error), type(error).__name__
            ) from error
        result = processes.ProgramResult(status, seconds=loop.time() - start)
        return await deadlines.off_loop(commands.finished, job, settings, result, verdict)


def _names(error: BaseException | None) -> str:
    """Returns the names of an error's classes and of those that it came from; its own comes last."""
    if error is None:
        return ""
    classes = [kind.__name__ for kind in type(error).__mro__ if kind not in (Exception, BaseException, object)]
    return "\n".join([_names(error.__cause__ or error.__context__), *reversed(classes)])


@dataclass(frozen=True)
class InChild:
    """Runs a function in a process of its own, under any interpreter. That one need not have this package.

    The process has the variables of `Endpoint.environment()`, and the working directory of the rollout. It is told a
    secret before it runs any code of the agent, and seals its verdict with that. Commands that the model has it run
    cannot read the secret: they may destroy a verdict, and not forge one. The arguments are of JSON's types.
    """

    python: str
    function: str
    arguments: Mapping[str, Any]
    search: Sequence[str]
    settings: commands.ProgramSettings

    async def run(self, job: jobs.Job) -> jobs.Finished:
        key, sealed = secrets.token_hex(32), job.root / "told" / _VERDICT
        request = {
            "function": self.function,
            "arguments": dict(self.arguments),
            "search": list(self.search),
            "task": {**dataclasses.asdict(job.public), "payload": dict(job.public.payload)},
            "hidden": sorted(job.task.payload.keys() - set(job.public.payload)),
            "endpoint": dataclasses.asdict(job.endpoint),
            "verdict": str(sealed),
            "key": key,
        }
        request_file = await deadlines.off_loop(workspace.tell, job.root, _CALL, json.dumps(request))
        result = await processes.run(
            [
                *await deadlines.off_loop(private_view.own_processes, job.root),
                self.python,
                _CHILD,
                str(request_file),
            ],
            environment=commands.variables(self.settings, job.endpoint, workspace.folder_variables(job.root)),
            cwd=job.work,
            root=job.root,
            seconds=self.settings.seconds,
            most_bytes=self.settings.output_bytes,
        )
        verdict, hidden = await deadlines.off_loop(_read_verdict, sealed, key)
        if hidden:
            raise protocols.EnvironmentCrashed(f"agent {self.function}, task {job.task.prompt_id}: {hidden}")
        return await deadlines.off_loop(commands.finished, job, self.settings, result, verdict)


def _read_verdict(path: Path, key: str) -> tuple[object, str]:
    """Returns the verdict in a file, and what a hidden field says. None and no text if `child.py` sealed nothing."""
    try:
        seal, _, text = workspace.read(path, _VERDICT_BYTES).partition(b"\n")
        good = hmac.compare_digest(seal, hmac.digest(key.encode(), text, "sha256").hex().encode())
        verdict, hidden = json.loads(text) if good else (None, "")
    except (OSError, ValueError, RecursionError):
        return None, ""
    return verdict, hidden
