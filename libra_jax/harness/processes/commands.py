"""Runs an agent as a program of its own: outside of any sandbox, or in a container. `keeper.py` ends its processes."""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_jax import protocols
from libra_jax.harness import jobs, private_view
from libra_jax.harness.processes import processes, workspace
from libra_jax.utils import deadlines

KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "NO_PROXY", "no_proxy")
"""Variables of this process that an agent gets. Others may hold keys of the run's user."""

TASK_NAME = "task.json"


@dataclass(frozen=True)
class ProgramSettings:
    """What all programs of a harness share. `factory.environment` has the fields; `template` is its `workspace`."""

    seconds: float
    output_bytes: int
    collect: Sequence[str] = ()
    most_bytes: int = 2**25
    fields: Sequence[str] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: str = ""
    template: str = ""


def task_text(task: protocols.Task) -> str:
    """Returns a public task as JSON."""
    return json.dumps({"prompt_id": task.prompt_id, **task.payload})


def variables(settings: ProgramSettings, endpoint: protocols.Endpoint, places: Mapping[str, str]) -> dict[str, str]:
    """Returns an agent's complete environment. `places` are variables that name folders and files."""
    inherited_variables = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {**inherited_variables, **places, **endpoint.environment(), **settings.variables}


@dataclass(frozen=True)
class CommandContainer:
    """A container in which a command runs.

    Attributes:
      runtime: path of podman or docker.
      image: the image. It is never pulled.
      options: further words for `run`, such as "--memory=2g".
      folder: where the working directory is in the container.
    """

    runtime: str
    image: str
    options: Sequence[str] = ()
    folder: str = "/workspace"

    def wrapped(
        self, command: Sequence[str], environment: Mapping[str, str], root: Path
    ) -> tuple[list[str], list[str]]:
        """Returns the command that runs another one in a container, and the command that removes the container."""
        name = f"libra-{uuid.uuid4().hex}"
        words = [self.runtime, "run", "--rm", "--init", "--pull=never", f"--name={name}"]
        # The gateway listens on the host's loopback, which a network of the container's own does not reach.
        words += ["--network=host", f"--workdir={self.folder}", f"--volume={root / 'work'}:{self.folder}"]
        words += [f"--volume={root / 'told'}:/libra:ro"]
        # By name alone: a value in the words would be readable in the list of processes.
        words += [f"--env={name}" for name in environment]
        return [*words, *self.options, self.image, *command], [self.runtime, "rm", "--force", name]


@dataclass(frozen=True)
class Command:
    """Runs a command, which has placeholders (`jobs.Job.filled`): in a container, or outside of any."""

    command: Sequence[str] | str
    settings: ProgramSettings
    container: CommandContainer | None = None

    async def run(self, job: jobs.Job) -> jobs.Finished:
        settings, root = self.settings, job.root
        after: list[str] = []
        task_file = await deadlines.off_loop(workspace.tell, root, TASK_NAME, task_text(job.public))
        command = job.filled(self.command)
        places = {"LIBRA_TASK_FILE": f"/libra/{TASK_NAME}" if self.container else str(task_file)}
        if self.container is not None:
            inside = {**places, **job.endpoint.environment(), **settings.variables}
            command, after = self.container.wrapped(command, inside, root)
            # The runtime's client needs this process's own environment; the container gets only what `inside` names.
            environment = {**os.environ, **inside}
        else:
            environment = variables(settings, job.endpoint, {**workspace.folder_variables(root), **places})
            command = [*await deadlines.off_loop(private_view.own_processes, root), *command]
        result = await processes.run(
            command,
            environment=environment,
            cwd=job.work,
            root=root,
            seconds=settings.seconds,
            most_bytes=settings.output_bytes,
            after=after,
        )
        return await deadlines.off_loop(finished, job, settings, result)


def finished(
    job: jobs.Job, settings: ProgramSettings, result: processes.ProgramResult, verdict: object = None
) -> jobs.Finished:
    """Returns the end of an agent, with the files that it left. Reads files."""
    files, refused = workspace.collect(job.work, settings.collect, settings.most_bytes)
    return jobs.Finished(job.task, result.status, result.output, result.errors, result.seconds, verdict, files, refused)
