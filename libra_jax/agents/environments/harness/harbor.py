"""Harbor's task folders, which Terminal-Bench uses: an instruction, an environment, and tests that write a reward.

    config.task.source = "libra_jax.agents.environments.harness.harbor_tasks:task_source"
    config.task.path = "tasks"   # a folder of task folders
    config.task.environment = "libra_jax.agents.environments.harness.harbor:environment"
    config.task.environment_arguments = {"command": "my-agent --task {instruction}"}

A task folder has `instruction.md`, `task.toml`, `environment/` with a Dockerfile, and `tests/test.sh`. The agent works
in the folder that the Dockerfile names. Then the tests run there, and write `/logs/verifier/reward.txt` or
`reward.json`.

Without a container, which `allow_unsafe` has to permit, the files of the host's system stand in for those of the image
(`scene.Scene`). That suits tasks whose Dockerfile only copies files. A Dockerfile that runs commands is refused, unless
the host has what they install.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_jax import config, protocols
from libra_jax.agents import deadlines, resolving, wire
from libra_jax.agents.environments.harness import (
    commands,
    confined,
    harbor_tasks,
    jobs,
    processes,
    program,
    scene,
)

_FIELD = "task.environment_arguments"
_LOGS = ("agent", "verifier", "artifacts")
_SOCKET = "gateway"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


_WAIT = ("sh", "-c", "while :; do sleep 3600 & wait; done")
"""The first process of a container, which also reaps the ended ones."""

_END_ALL = "kill -9 -1"
"""Ends what an agent left running in its container: the kernel leaves out the first process and the shell."""


@dataclass(frozen=True)
class InScene:
    """Runs agent and tests in a scene. See `jobs.Runner`.

    Attributes:
      command: the agent's command.
      settings: what all programs share.
      bubblewrap: path of bubblewrap.
      shown: folders of the host that the agent needs, read-only under their own paths.
      internet: the scene has the host's network.
      lenient: instructions of a Dockerfile that need an image are passed over.
    """

    command: Sequence[str] | str
    settings: commands.Settings
    bubblewrap: str
    shown: Sequence[str]
    internet: bool
    lenient: bool

    async def run(self, job: jobs.Job) -> jobs.Finished:
        """See `jobs.Runner`."""
        payload, root = job.task.payload, job.root
        recipe = await deadlines.off_loop(self._prepare, job)
        writable = {recipe.folder: str(job.work), "/logs": str(root / "logs"), "/root": str(root / "home")}
        told = {scene.LIBRA: str(root / "told")}
        readable = {path: path for path in self.shown}
        socket = "" if self.internet else f"{scene.LIBRA}/{_SOCKET}"
        shown = {**readable, **told}
        place = scene.Scene(self.bubblewrap, writable, shown, recipe.folder, isolated=not self.internet, socket=socket)
        parts = urllib.parse.urlsplit(job.endpoint.url)
        door = confined.Door(root / "told" / _SOCKET, parts.hostname or "127.0.0.1", parts.port or 80)
        near = dataclasses.replace(job, endpoint=dataclasses.replace(job.endpoint, url=place.reached(job.endpoint.url)))
        await door.open()
        try:
            ended = await self._run(
                near,
                place,
                near.filled(self.command),
                {
                    **recipe.variables,
                    **payload["variables"],
                    "LIBRA_TASK_FILE": f"{scene.LIBRA}/{commands.TASK_NAME}",
                    **near.endpoint.environment(),
                    **self.settings.variables,
                },
                _seconds(self.settings, payload),
            )
        finally:
            await processes.uncancelled(door.close())
        # The tests come in once the agent and all its processes are gone.
        await deadlines.off_loop(_set_aside, root / "logs")
        tests = {"/tests": f"{payload['folder']}/tests"}
        # A fresh home: Python and shells run code that they find in the agent's.
        clean = {**writable, "/root": str(root / "tmp")}
        judging = scene.Scene(self.bubblewrap, clean, tests, recipe.folder, isolated=not self.internet)
        judged = await self._run(
            near,
            judging,
            ["bash", "/tests/test.sh"],
            {**recipe.variables, **payload["variables"], **payload["tests_variables"]},
            payload["tests_seconds"],
        )
        verdict = await deadlines.off_loop(_verdict, root / "logs" / "verifier", judged)
        return jobs.Finished(job.task, ended.status, ended.output, ended.errors, ended.seconds, verdict)

    def _prepare(self, job: jobs.Job) -> harbor_tasks.Recipe:
        folder = Path(job.task.payload["folder"])
        dockerfile = folder / "environment" / "Dockerfile"
        recipe = harbor_tasks.read_recipe(dockerfile.read_text() if dockerfile.exists() else "")
        if job.task.payload["workdir"]:
            recipe = dataclasses.replace(recipe, folder=job.task.payload["workdir"])
        if recipe.unmet and not self.lenient:
            raise protocols.ConfigError(
                f"config.{_FIELD}.container: {folder} needs its container, because its Dockerfile says "
                f"{recipe.unmet[0]!r:.80}; set container=True, or lenient=True if this host has what that makes"
            )
        for source, place in recipe.copies:
            inside = os.path.relpath(place, recipe.folder)
            if inside.startswith(".."):
                raise protocols.ConfigError(
                    f"config.{_FIELD}.container: {folder} needs its container, because its Dockerfile copies to {place}"
                )
            _copy(folder / "environment" / source, job.work / inside)
        for name in _LOGS:
            (job.root / "logs" / name).mkdir(parents=True)
        _tell(job.root / "told", job.public)
        return recipe

    async def _run(
        self,
        job: jobs.Job,
        place: scene.Scene,
        command: Sequence[str],
        variables: Mapping[str, str],
        seconds: float,
    ) -> processes.Ended:
        paths = f"{os.path.dirname(scene.backends.INTERPRETER)}:{_PATH}"
        known = {"PATH": paths, "LANG": "C.UTF-8", "HOME": "/root", **variables}
        return await processes.run(
            place.wrapped(command),
            environment=known,
            cwd=job.work,
            root=job.root,
            seconds=seconds,
            most_bytes=self.settings.output_bytes,
        )


@dataclass(frozen=True)
class InContainer:
    """Runs agent and tests in the task's own container, by podman or docker. See `jobs.Runner`.

    Attributes:
      command: the agent's command, whose program the image has.
      settings: what all programs share.
      runtime: path of podman or docker.
      options: further words for its command `run`.
      build_seconds: seconds that the build of an image may take.
    """

    command: Sequence[str] | str
    settings: commands.Settings
    runtime: str
    options: Sequence[str]
    build_seconds: float

    async def run(self, job: jobs.Job) -> jobs.Finished:
        """See `jobs.Runner`."""
        payload, root = job.task.payload, job.root
        for name in _LOGS:
            (root / "logs" / name).mkdir(parents=True)
        await deadlines.off_loop(_tell, root / "told", job.public)
        image = payload["image"] or await self._build(job)
        name = f"libra-{uuid.uuid4().hex}"
        start = [self.runtime, "run", "--rm", "--detach", "--network=host", f"--name={name}"]
        start += [f"--volume={root / 'logs'}:/logs", f"--volume={root / 'told'}:{scene.LIBRA}:ro", *self.options]
        try:
            await self._must(job, [*start, image, *_WAIT], self.build_seconds, name)
            variables = {
                **payload["variables"],
                "LIBRA_TASK_FILE": f"{scene.LIBRA}/{commands.TASK_NAME}",
                **job.endpoint.environment(),
                **self.settings.variables,
            }
            seconds = _seconds(self.settings, payload)
            ended = await self._inside(job, name, job.filled(self.command), variables, seconds)
            # The tests come in once the agent and all its processes are gone.
            await self._call(job, [self.runtime, "exec", name, "sh", "-c", _END_ALL], self.build_seconds, name)
            await deadlines.off_loop(_set_aside, root / "logs")
            copied = [self.runtime, "cp", f"{payload['folder']}/tests", f"{name}:/tests"]
            await self._must(job, copied, self.build_seconds, name)
            variables = {**payload["variables"], **payload["tests_variables"]}
            judged = await self._inside(job, name, ["bash", "/tests/test.sh"], variables, payload["tests_seconds"])
        finally:
            await processes.uncancelled(self._remove(job, name))
        verdict = await deadlines.off_loop(_verdict, root / "logs" / "verifier", judged)
        return jobs.Finished(job.task, ended.status, ended.output, ended.errors, ended.seconds, verdict)

    async def _build(self, job: jobs.Job) -> str:
        folder = Path(job.task.payload["folder"])
        image = f"libra-harbor-{folder.name.lower()}"
        # The runtime's own cache makes all builds after the first one quick.
        await self._must(job, [self.runtime, "build", "--tag", image, str(folder / "environment")], self.build_seconds)
        return image

    async def _inside(
        self, job: jobs.Job, name: str, command: Sequence[str], variables: Mapping[str, str], seconds: float
    ) -> processes.Ended:
        words = [self.runtime, "exec", *(f"--env={key}" for key in variables), name, *command]
        return await self._call(job, words, seconds, name, variables)

    async def _must(self, job: jobs.Job, words: Sequence[str], seconds: float, name: str = "") -> None:
        ended = await self._call(job, words, seconds, name)
        if ended.status != 0:
            said = ended.errors.strip()[-400:] or f"no answer within {seconds:g} s"
            raise protocols.EnvironmentCrashed(f"{words[0]} {words[1]}, task {job.task.prompt_id}: {said}")

    async def _call(
        self, job: jobs.Job, words: Sequence[str], seconds: float, name: str, variables: Mapping[str, str] | None = None
    ) -> processes.Ended:
        return await processes.run(
            words,
            environment={**os.environ, **(variables or {})},
            cwd=job.work,
            root=job.root,
            seconds=seconds,
            most_bytes=self.settings.output_bytes,
            orphaned=[self.runtime, "rm", "--force", name] if name else (),
        )

    async def _remove(self, job: jobs.Job, name: str) -> None:
        await self._call(job, [self.runtime, "rm", "--force", name], processes.REAP_SECONDS, "")


def _seconds(settings: commands.Settings, payload: Mapping[str, Any]) -> float:
    return min(settings.seconds, payload["agent_seconds"] or math.inf)


def _tell(folder: Path, task: protocols.Task) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    (folder / commands.TASK_NAME).write_text(commands.task_text(task))


def _copy(source: Path, target: Path) -> None:
    """Copies a file, or what a folder holds, as a Dockerfile's COPY does."""
    if source.is_dir():
        inner = target if source.name in (".", "") or target.name != source.name else target.parent
        shutil.copytree(source, inner, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("Dockerfile"))
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _set_aside(logs: Path) -> None:
    """Gives the tests an empty folder for their reward: the agent may have written a reward of its own."""
    # Renamed and not removed: the files may belong to another user, that of a container.
    with contextlib.suppress(FileNotFoundError):
        os.rename(logs / "verifier", logs / f"before-{uuid.uuid4().hex}")
    (logs / "verifier").mkdir()


def _verdict(folder: Path, judged: processes.Ended) -> object:
    """Returns what the tests wrote. Tests that are late count as failed, because the agent's files may hang them."""
    overdue = judged.status is None
    if overdue:
        return {"reward": 0.0, "metrics": {"tests_overdue": 1.0}}
    try:
        if (folder / "reward.json").exists():
            rewards = json.loads((folder / "reward.json").read_text())
            if isinstance(rewards, Mapping):
                one = next(iter(rewards.values())) if len(rewards) == 1 else rewards.get("reward")
                numbers = {f"reward_{name}": value for name, value in rewards.items() if name != "reward"}
                return {"reward": one, "metrics": {**numbers, "tests_overdue": 0.0}}
            return {"reward": rewards, "metrics": {"tests_overdue": 0.0}}
        reward = float((folder / "reward.txt").read_text())
    except (OSError, ValueError) as error:
        said = (judged.errors.strip() or judged.output.strip())[-400:]
        raise protocols.AttemptVoided(f"the tests gave no reward ({error}); they said last: {said}") from error
    return {"reward": reward, "metrics": {"tests_overdue": 0.0}}


class Written:
    """Takes the reward that the tests wrote. See `scoring.Scorer`."""

    async def score(self, finished: jobs.Finished) -> protocols.Outcome:
        """See `scoring.Scorer`."""
        return jobs.outcome(finished.verdict, f"the tests of task {finished.task.prompt_id}")


def environment(
    command: Sequence[str] | str,
    container: bool = False,
    allow_unsafe: bool = False,
    shown: Sequence[str] = (),
    internet: bool = False,
    lenient: bool = False,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    seconds: float = 900.0,
    build_seconds: float = 600.0,
    overdue: str = "crash",
    exits: Sequence[int] = (0,),
    most: int = 16,
    output_bytes: int = 65_536,
    status: str = "",
) -> program.AgentHarness:
    """Returns the harness of one rollout of a task of `harbor_tasks.task_source`.

    Args:
      command: The agent's command, as `harness:environment` takes it. `{instruction}` stands for the task.
      container: Whether the task's own container is used, which takes podman or docker. Its image has the agent's
        program.
      allow_unsafe: Permits tasks without their container. They run the agent as this host's user, in bubblewrap, with
        no filter of system calls and no limits.
      shown: Folders of this host that the agent needs, such as its virtual environment. Without a container only.
      internet: Whether agent and tests have this host's network. Otherwise they reach the session alone. Containers
        always have it.
      lenient: Whether tasks run without their container even if their Dockerfile runs commands.
      options: Further words for the runtime's `run`.
      variables: Further environment variables of the agent.
      seconds: Deadline of the agent in seconds. The task's own counts if it is shorter.
      build_seconds: Seconds that the build of a container's image, or its start, may take.
      overdue: What a missed deadline is: "crash" (infrastructure, retried) or "score" (the tests judge what is left).
      exits: Exit statuses of the agent that are scored. Others are crashes.
      most: Number of agents that run at once.
      output_bytes: Last bytes of the program's output that are kept.
      status: "package.module:function" that reads the outcome of tool calls. Empty: the conventions of `wire.status`.

    Raises:
      ConfigError: An argument is invalid, or a program is not on this machine.
    """
    for name, number in (("seconds", seconds), ("build_seconds", build_seconds), ("most", most)):
        config.check(0 < number < math.inf, f"{_FIELD}.{name}", f"must be positive and finite, not {number}")
    config.check_choice(overdue, ("crash", "score"), f"{_FIELD}.overdue")
    words = command if isinstance(command, str) else [str(word) for word in command]
    settings = commands.Settings(seconds, output_bytes, variables=dict(variables or {}))
    runner: jobs.Runner
    if container:
        for name, given in (("shown", shown), ("lenient", lenient), ("allow_unsafe", allow_unsafe)):
            config.check(not given, f"{_FIELD}.{name}", "is for tasks without their container")
        runtime = shutil.which("podman") or shutil.which("docker")
        if runtime is None:
            raise protocols.ConfigError(f"config.{_FIELD}.container: needs podman or docker, and neither is here")
        runner = InContainer(words, settings, runtime, tuple(options), build_seconds)
    else:
        config.check(
            allow_unsafe,
            f"{_FIELD}.container",
            "must be True: without its container, a task runs the agent as this host's user, with no filter of system "
            "calls and no limits of memory, processes or files; set allow_unsafe=True for agents that you trust",
        )
        config.check(not options, f"{_FIELD}.options", "needs container=True")
        bubblewrap = shutil.which("bwrap")
        if bubblewrap is None:
            raise protocols.ConfigError(f"config.{_FIELD}: {scene.backends.INSTALL}; or set container=True")
        runner = InScene(words, settings, bubblewrap, tuple(map(os.path.abspath, shown)), internet, lenient)
    reader = resolving.resolve(status, f"{_FIELD}.status") if status else wire.status
    name = command if isinstance(command, str) else words[0]
    return program.AgentHarness(name, runner, Written(), settings, tuple(exits), overdue, most, reader)
