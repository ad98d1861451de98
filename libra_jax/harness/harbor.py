"""Harbor's task folders, which Terminal-Bench uses: an instruction, an environment, and tests that write a reward.

    config.task.source = "libra_jax.harness.harbor_tasks:task_source"
    config.task.path = "tasks"   # a folder of task folders
    config.task.environment = "libra_jax.harness.harbor:environment"
    config.task.environment_arguments = {"command": "my-agent --task {instruction}"}

A task folder has `instruction.md`, `task.toml`, `environment/` with a Dockerfile, and `tests/test.sh`. The agent works
in the task's own container, in the folder that the Dockerfile names. Then the tests run there, and write
`/logs/verifier/reward.txt` or `reward.json`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.harness import jobs
from libra_jax.harness.processes import commands, processes, program, workspace
from libra_jax.rollouts import tool_results
from libra_jax.utils import deadlines, resolving

_FIELD = "task.environment_arguments"
_LOGS = ("agent", "verifier", "artifacts")
_REWARD_BYTES = 2**20
_LIBRA = "/libra"
"""Where a container shows the agent its task file."""

_WAIT = ("sh", "-c", "while :; do sleep 3600 & wait; done")
"""The first process of a container, which also reaps the ended ones."""

_END_ALL = "kill -9 -1"
"""Ends what an agent left running in its container: the kernel leaves out the first process and the shell."""


@dataclass(frozen=True)
class InContainer:
    """Runs agent and tests in the task's own container, by podman or docker. See `jobs.AgentRunner`.

    Attributes:
      command: the agent's command, whose program the image has.
      settings: what all programs share.
      runtime: path of podman or docker.
      options: further words for its command `run`.
      build_seconds: seconds that the build of an image may take.
    """

    command: Sequence[str] | str
    settings: commands.ProgramSettings
    runtime: str
    options: Sequence[str]
    build_seconds: float

    async def run(self, job: jobs.Job) -> jobs.Finished:
        """See `jobs.AgentRunner`."""
        payload, root = job.task.payload, job.root
        for name in _LOGS:
            (root / "logs" / name).mkdir(parents=True)
        await deadlines.off_loop(_tell, root / "told", job.public)
        image = payload["image"] or await self._build(job)
        name = f"libra-{uuid.uuid4().hex}"
        start = [self.runtime, "run", "--rm", "--detach", "--network=host", f"--name={name}"]
        start += [f"--volume={root / 'logs'}:/logs", f"--volume={root / 'told'}:{_LIBRA}:ro", *self.options]
        try:
            await self._must(job, [*start, image, *_WAIT], self.build_seconds, name)
            variables = {
                **payload["variables"],
                "LIBRA_TASK_FILE": f"{_LIBRA}/{commands.TASK_NAME}",
                **job.endpoint.environment(),
                **self.settings.variables,
            }
            seconds = _seconds(self.settings, payload)
            agent_result = await self._inside(job, name, job.filled(self.command), variables, seconds)
            # The tests come in once the agent and all its processes are gone.
            await self._call(job, [self.runtime, "exec", name, "sh", "-c", _END_ALL], self.build_seconds, name)
            await deadlines.off_loop(_set_aside, root / "logs")
            copied = [self.runtime, "cp", f"{payload['folder']}/tests", f"{name}:/tests"]
            await self._must(job, copied, self.build_seconds, name)
            variables = {**payload["variables"], **payload["tests_variables"]}
            tests_result = await self._inside(
                job, name, ["bash", "/tests/test.sh"], variables, payload["tests_seconds"]
            )
        finally:
            await deadlines.finish(self._remove(job, name))
        verdict = await deadlines.off_loop(_verdict, root / "logs" / "verifier", tests_result)
        return jobs.Finished(
            job.task, agent_result.status, agent_result.output, agent_result.errors, agent_result.seconds, verdict
        )

    async def _build(self, job: jobs.Job) -> str:
        folder = Path(job.task.payload["folder"])
        image = f"libra-harbor-{folder.name.lower()}"
        # The runtime's own cache makes all builds after the first one quick.
        await self._must(job, [self.runtime, "build", "--tag", image, str(folder / "environment")], self.build_seconds)
        return image

    async def _inside(
        self, job: jobs.Job, name: str, command: Sequence[str], variables: Mapping[str, str], seconds: float
    ) -> processes.ProgramResult:
        words = [self.runtime, "exec", *(f"--env={key}" for key in variables), name, *command]
        return await self._call(job, words, seconds, name, variables)

    async def _must(self, job: jobs.Job, words: Sequence[str], seconds: float, name: str = "") -> None:
        result = await self._call(job, words, seconds, name)
        if result.status != 0:
            reason = result.errors.strip()[-400:] or f"no answer within {seconds:g} s"
            raise protocols.EnvironmentCrashed(f"{words[0]} {words[1]}, task {job.task.prompt_id}: {reason}")

    async def _call(
        self, job: jobs.Job, words: Sequence[str], seconds: float, name: str, variables: Mapping[str, str] | None = None
    ) -> processes.ProgramResult:
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


def _seconds(settings: commands.ProgramSettings, payload: Mapping[str, Any]) -> float:
    return min(settings.seconds, payload["agent_seconds"] or math.inf)


def _tell(folder: Path, task: protocols.Task) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    (folder / commands.TASK_NAME).write_text(commands.task_text(task))


def _set_aside(logs: Path) -> None:
    """Gives the tests an empty folder for their reward: the agent may have written a reward of its own."""
    # Renamed and not removed: the files may belong to another user, that of a container.
    with contextlib.suppress(FileNotFoundError):
        os.rename(logs / "verifier", logs / f"before-{uuid.uuid4().hex}")
    (logs / "verifier").mkdir()


def _verdict(folder: Path, tests_result: processes.ProgramResult) -> object:
    """Returns what the tests wrote. Tests that are late count as failed, because the agent's files may hang them."""
    overdue = tests_result.status is None
    if overdue:
        return {"reward": 0.0, "metrics": {"tests_overdue": 1.0}}
    try:
        if os.path.lexists(folder / "reward.json"):
            rewards = json.loads(workspace.read(folder / "reward.json", _REWARD_BYTES))
            if isinstance(rewards, Mapping):
                one = next(iter(rewards.values())) if len(rewards) == 1 else rewards.get("reward")
                numbers = {f"reward_{name}": value for name, value in rewards.items() if name != "reward"}
                return {"reward": one, "metrics": {**numbers, "tests_overdue": 0.0}}
            return {"reward": rewards, "metrics": {"tests_overdue": 0.0}}
        reward = float(workspace.read(folder / "reward.txt", _REWARD_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        output_tail = (tests_result.errors.strip() or tests_result.output.strip())[-400:]
        raise protocols.AttemptVoided(f"the tests gave no reward ({error}); they said last: {output_tail}") from error
    return {"reward": reward, "metrics": {"tests_overdue": 0.0}}


class WrittenReward:
    """Takes the reward that the tests wrote. See `scoring.Scorer`."""

    async def score(self, finished: jobs.Finished) -> protocols.Outcome:
        """See `scoring.Scorer`."""
        return jobs.outcome(finished.verdict, f"the tests of task {finished.task.prompt_id}")


def environment(
    command: Sequence[str] | str,
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
      command: The agent's command, as `harness:environment` takes it. `{instruction}` stands for the task. The image
        has the agent's program.
      options: Further words for the runtime's `run`.
      variables: Further environment variables of the agent.
      seconds: Deadline of the agent in seconds. The task's own counts if it is shorter.
      build_seconds: Seconds that the build of a container's image, or its start, may take.
      overdue: What a missed deadline is: "crash" (infrastructure, retried) or "score" (the tests judge what is left).
      exits: Exit statuses of the agent that are scored. Others are crashes.
      most: Number of agents that run at once.
      output_bytes: Last bytes of the program's output that are kept.
      status: "package.module:function" that reads the outcome of tool calls. Empty: the
        conventions of `rollouts.tool_results.status`.

    Raises:
      ConfigError: An argument is invalid, or a program is not on this machine.
    """
    for name, number in (("seconds", seconds), ("build_seconds", build_seconds), ("most", most)):
        config_lib.check(0 < number < math.inf, f"{_FIELD}.{name}", f"must be positive and finite, not {number}")
    config_lib.check_choice(overdue, ("crash", "score"), f"{_FIELD}.overdue")
    words = command if isinstance(command, str) else [str(word) for word in command]
    settings = commands.ProgramSettings(seconds, output_bytes, variables=dict(variables or {}))
    runtime = shutil.which("podman") or shutil.which("docker")
    if runtime is None:
        raise protocols.ConfigError(
            "config.task.environment: tasks of Harbor run in their own containers, and this machine has neither podman "
            "nor docker; install one, such as: apt-get install podman"
        )
    runner = InContainer(words, settings, runtime, tuple(options), build_seconds)
    reader = resolving.resolve(status, f"{_FIELD}.status") if status else tool_results.status
    name = command if isinstance(command, str) else words[0]
    return program.AgentHarness(name, runner, WrittenReward(), settings, tuple(exits), overdue, most, reader)
