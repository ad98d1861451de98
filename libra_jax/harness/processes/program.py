"""The harness of one rollout: makes its folder, runs the agent, and scores what it left."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from libra_jax import protocols
from libra_jax.harness import jobs, scoring
from libra_jax.harness.processes import commands, workspace
from libra_jax.rewards.repair import snapshots
from libra_jax.rollouts import tool_results
from libra_jax.utils import deadlines, scratch, turns

_SHOWN = 400


@dataclass
class AgentHarness:
    """Runs one agent on one task. See `protocols.Harness` and `protocols.ReadsStatus`.

    What the agent did is data: its files, its exit status among `exits`, its verdict. What may be its own doing or the
    machine's voids the attempt (`protocols.AttemptVoided`): another exit status, a missed deadline unless `overdue` is
    "score", a scorer that raises. A program that does not start is a crash, which is retried and never scored.

    `factory.environment` documents the fields.
    """

    name: str
    runner: jobs.AgentRunner
    scorer: scoring.RolloutScorer
    settings: commands.ProgramSettings
    exits: Sequence[int]
    overdue: str
    most: int
    read_status: tool_results.ReadStatus
    demonstrate: dataclasses.InitVar[Callable[[protocols.Task], Sequence[protocols.Message]] | None] = None
    _task: asyncio.Task[protocols.Outcome] | None = field(default=None, init=False)

    def __post_init__(self, demonstrate: Callable[[protocols.Task], Sequence[protocols.Message]] | None) -> None:
        # Set only if it exists: the warm start looks for this attribute.
        if demonstrate is not None:
            self.demonstration = demonstrate

    async def run(self, task: protocols.Task, endpoint: protocols.Endpoint) -> protocols.Outcome:
        """Runs the agent to its end and returns its outcome. See `protocols.Harness`."""
        place = deadlines.semaphore(f"harness {self.name} {self.most}", self.most)
        with turns.queued():
            await place.acquire()
        try:
            # A task of its own, so that `close` can end it.
            self._task = asyncio.get_running_loop().create_task(self._run(task, endpoint))
            try:
                return await self._task
            finally:
                await self.close()
        finally:
            place.release()

    def status(
        self, call: protocols.ToolCall | None, message: protocols.Message
    ) -> tuple[str, protocols.ToolStatus] | None:
        """See `protocols.ReadsStatus`."""
        return self.read_status(call, message)

    async def close(self) -> None:
        """Ends the agent, if it still runs, with all its processes, and removes its folder. See `protocols.Harness`."""
        running, self._task = self._task, None
        if running is not None and not running.done():
            await deadlines.finish(deadlines.cancel_all((running,)))

    async def _run(self, task: protocols.Task, endpoint: protocols.Endpoint) -> protocols.Outcome:
        settings, subject = self.settings, f"agent {self.name}, task {task.prompt_id}:"
        files = await deadlines.off_loop(snapshots.of_task, task, settings.files, settings.most_bytes)
        root = workspace.fresh()
        try:
            await deadlines.finish(deadlines.off_loop(workspace.fill, root, settings.template, files))
            public = jobs.public(task, settings.fields)
            finished = await self.runner.run(jobs.Job(task, public, endpoint, root))
            if finished.status is None and self.overdue == "crash":
                raise protocols.AttemptVoided(
                    f"{subject} it took more than {settings.seconds:g} s (environment_arguments.seconds)"
                )
            if finished.status is not None and finished.status not in self.exits:
                output_tail = (finished.errors.strip() or finished.output.strip())[-_SHOWN:]
                sentence = (
                    f"{subject} it exited with status {finished.status} (environment_arguments.exits has those that "
                    f"are scored); it said last: {output_tail or 'nothing'}"
                )
                # A signal's status is beyond 128: the machine's end of the agent, or a command's of the model.
                raise (
                    jobs.failure(sentence, output_tail) if finished.status < 126 else protocols.AttemptVoided(sentence)
                )
            outcome = await self.scorer.score(finished)
            run_metrics = {"harness_seconds": finished.seconds, "harness_overdue": float(finished.status is None)}
            metrics = {**run_metrics, **jobs.metrics(finished.verdict), **outcome.metrics}
            return scoring.checked(protocols.Outcome(outcome.reward, metrics, outcome.segment_rewards), subject)
        except (protocols.WorkerLost, protocols.DeadlineMissed) as error:  # a sandbox
            raise protocols.EnvironmentCrashed(f"{subject} it lost a worker: {error}") from error
        finally:
            await deadlines.finish(deadlines.off_loop(scratch.remove, root))
