"""The loop of a rollout that a harness drives: opens a session for it, waits for its end, and scores it."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from libra_jax import protocols
from libra_jax.rollouts import deadline_environment, loop, progress, session, tool_results
from libra_jax.utils import deadlines, resolving, turns, user_code, user_values


class SessionResources:
    """What sessions need beside their rollouts.

    Args:
      gateway: gives sessions an address.
      make_form: makes the chat format of the policy's model. Called at the first use: runs without harnesses need none.
      strict: refuse requests for other sampling than the run's, or with fields that sessions do not use.

    Attributes:
      remarks: what agents met that their users should know, and how often, until somebody takes it.
    """

    def __init__(
        self,
        gateway: protocols.Gateway,
        make_form: Callable[[], protocols.ChatFormat],
        *,
        strict: bool = False,
    ) -> None:
        self.gateway = gateway
        self.strict = strict
        self.remarks: collections.Counter[str] = collections.Counter()
        self._make_form = make_form
        self._form: protocols.ChatFormat | None = None
        self._making = asyncio.Lock()

    async def form(self) -> protocols.ChatFormat:
        """Returns the chat format of the policy's model.

        It is made in a thread: to import vLLM's parsers takes seconds, in which other rollouts go on.
        """
        async with self._making:
            if self._form is None:
                self._form = await asyncio.to_thread(self._make_form)
            return self._form


_HINTS = ("temperature", "tool_choice", *(field.name for field in dataclasses.fields(protocols.SamplingOptions)))
"""Hints with a metric of their own, `hint/<name>`. Names of unknown fields are without number."""


def _refusals(conversation: session.RolloutSession) -> str:
    return (
        f"the endpoint refused {conversation.refusals} of its requests ({conversation.refusal}); "
        if conversation.refusals
        else ""
    )


async def run_harness(
    setup: loop.RolloutSetup, harness: protocols.Harness, host: SessionResources, *, score_void: bool = False
) -> protocols.Trajectory:
    """Runs a rollout to its end, from the current state of its trajectory, and returns that same object.

    The counterpart of `loop.run_rollout` for harnesses, with the same results: `trajectory.reward`, `trajectory.finish`
    and the same metrics, and `hints`, `hint/<name>` and `refused_requests` beside them. If the rollout met a limit, the
    reward is 0 unless `reward` gives another.

    A harness is silent while none of its requests is under way. It may be silent for `limits.reset_seconds` before its
    first request and for `limits.tool_seconds` afterwards.

    Args:
      setup: the rollout's trajectory, task, sampler and so on. The tokenizer only decodes what a scorer reads.
      harness: drives the rollout. Closed in every case. One that breaks or is silent for too long has crashed.
      host: what the session needs.
      score_void: a voided attempt has the reward 0, because another one went before. Else AttemptVoided is raised if
        the agent's side left nothing to score.
    """
    trajectory, kind = setup.trajectory, type(harness)
    name = f"harness {kind.__module__}:{kind.__qualname__}, task {setup.task.prompt_id}"
    try:
        if trajectory.finish is None or trajectory.reward is None:
            await _HarnessRollout(**vars(setup), harness=harness, host=host, name=name, score_void=score_void).run()
    finally:
        await deadline_environment.close(harness.close, setup.limits.reset_seconds, trajectory.metrics)
    return trajectory


@dataclass(kw_only=True)
class _HarnessRollout(loop.RolloutSetup):
    """A rollout that a harness drives, continued from the current state of its trajectory."""

    harness: protocols.Harness
    host: SessionResources
    name: str
    score_void: bool

    async def run(self) -> None:
        """Runs the harness, takes its outcome, and scores the rollout."""
        watch = progress.Stopwatch(self.trajectory, self.limits.rollout_seconds)
        read_status = getattr(self.harness, "status", None)
        conversation = session.RolloutSession(
            self.trajectory,
            form=await self.host.form(),
            sampler=self.sampler,
            limits=self.limits,
            read_status=tool_results.checked(read_status, self.crash) if callable(read_status) else tool_results.status,
            on_tokens=watch.tokens_came,
            strict=self.host.strict,
        )
        endpoint = await self.host.gateway.open(conversation, reachable=conversation.set_reachable)
        with turns.watched() as turn:
            work = asyncio.ensure_future(deadlines.call(self.harness.run, self.task.copy(), endpoint))
        void: protocols.AttemptVoided | None = None
        try:
            await self._wait(work, conversation, watch, turn)
            # Decided before the harness is cancelled: it may answer that with a result, an error, or nothing.
            late = not work.done() and not conversation.broken.done()
        except protocols.AttemptVoided as error:
            late, void = False, error
        finally:
            await deadlines.cancel_all((work,), self.limits.reset_seconds)
            await self.host.gateway.close(endpoint)
            conversation.close()
        if conversation.broken.done():
            raise conversation.broken.result()
        finish = "max_seconds" if late else conversation.limit or "answered"
        outcome = protocols.Outcome(0.0)
        if finish == "answered":
            try:
                if void is not None:
                    raise void
                outcome = self._outcome(work)
            except (protocols.AgentFailed, protocols.AttemptVoided) as failure:
                outcome = self._failed(failure, conversation)
            if not any(segment.turns for segment in self.trajectory.segments):
                reason = _refusals(conversation) or "ended without a request to its endpoint: "
                raise self.crash("run", f"{reason}point the agent's client at its url")
        await self._finish(conversation, finish, outcome)

    async def _wait(
        self,
        work: asyncio.Future[protocols.Outcome],
        conversation: session.RolloutSession,
        watch: progress.Stopwatch,
        turn: turns.Turn,
    ) -> None:
        """Waits until the harness ends, the rollout's time is up, or the session breaks."""
        limits, clock = self.limits, asyncio.get_running_loop().time
        wait_start = clock()
        while not work.done() and not conversation.broken.done() and not watch.over():
            allowed, setting = (limits.tool_seconds, "tool_seconds")
            if not conversation.answered:
                allowed, setting = max((allowed, setting), (limits.reset_seconds, "reset_seconds"))
            if turn.queued:
                # The run's own queue is no silence of the agent.
                conversation.idle_since = clock()
                if clock() - wait_start >= limits.wait_seconds:
                    raise self.crash(
                        "run",
                        f"waited more than {limits.wait_seconds:g} s (config.task.wait_seconds) for what other "
                        "rollouts hold; raise that, or let more agents run at once (environment_arguments.most)",
                    )
            silent = conversation.silent_seconds
            if silent >= allowed:
                problem = self.crash("run", f"asked for nothing for {allowed:g} s (config.task.{setting})")
                raise protocols.AttemptVoided(str(problem))
            # Nothing wakes this wait when a queue ends, or when the first output is delivered.
            pause = min(allowed, limits.wait_seconds) / 8 if turn.queued else min(allowed - silent, limits.tool_seconds)
            # The stopwatch starts at the first token, which wakes no one here.
            if limits.rollout_seconds:
                pause = min(
                    pause, max(limits.rollout_seconds - self.trajectory.seconds, 0.0), limits.rollout_seconds / 8
                )
            ends: set[asyncio.Future[Any]] = {work, conversation.broken}
            await asyncio.wait(ends, timeout=pause, return_when=asyncio.FIRST_COMPLETED)

    def crash(self, verb: str, problem: str) -> protocols.EnvironmentCrashed:
        """Returns the error that says what the harness did."""
        return protocols.EnvironmentCrashed(f"{self.name}: {verb} {problem}")

    def _outcome(self, work: asyncio.Future[protocols.Outcome]) -> protocols.Outcome:
        """Returns the checked result of the harness."""
        try:
            with user_code.contain_exits():  # the harness may have cancelled its own task
                outcome = work.result()
        except (protocols.WorkerLost, protocols.DeadlineMissed) as error:
            raise self.crash("run", f"lost a worker: {error}") from error
        except protocols.LibraError:
            raise
        except Exception as error:
            raise self.crash("run", resolving.raised(error)) from error
        if not isinstance(outcome, protocols.Outcome):
            raise self.crash("run", f"returned {type(outcome).__name__} instead of an Outcome")
        if problem := user_values.metrics_problem(outcome.metrics):
            raise self.crash("run", f"gave {problem}")
        for value in (outcome.reward, *outcome.segment_rewards.values()):
            # A scorer may replace the harness's own reward, but not a segment's.
            if not user_values.is_finite(value) and (self.reward is None or value is not outcome.reward):
                raise self.crash("run", f"gave the reward {user_values.shown(value)}, which is not a finite number")
        return outcome

    def _failed(
        self, failure: protocols.AgentFailed | protocols.AttemptVoided, conversation: session.RolloutSession
    ) -> protocols.Outcome:
        """Returns the outcome of a rollout that the agent's own side ended. Raises if the rollout is to be repeated."""
        sentence = f"{_refusals(conversation)}{failure}"
        if not conversation.answered:  # the model cannot be the cause
            raise self.crash("run", sentence) from failure
        # What the model wrote may be what broke the agent. A request that the API refused may be another's fault.
        if isinstance(failure, protocols.AgentFailed) and not conversation.refusals:
            self.host.remarks[f"agents that end by {failure.reason} after an output (reward 0)"] += 1
            return protocols.Outcome(0.0, {"agent_failed": 1.0})
        if not self.score_void:
            raise protocols.AttemptVoided(f"{self.name}: {sentence}") from failure
        reason = sentence.replace(f"task {self.task.prompt_id}", "a task")  # told once, and not by task
        self.host.remarks[f"attempts that left nothing to score, twice (reward 0): {reason}"] += 1
        return protocols.Outcome(0.0, {"agent_voided": 1.0})

    async def _finish(self, conversation: session.RolloutSession, finish: str, outcome: protocols.Outcome) -> None:
        trajectory = self.trajectory
        self._set_segment_rewards(outcome)
        metrics = {name: float(value) for name, value in outcome.metrics.items()}
        await self.end(finish, outcome.reward, conversation.dialogue, metrics)
        trajectory.metrics["hints"] = float(conversation.hints.total())
        trajectory.metrics["refused_requests"] = float(conversation.refusals)
        for name in ("agent_failed", "agent_voided"):  # means over all rollouts
            trajectory.metrics.setdefault(name, 0.0)
        trajectory.metrics |= {
            f"hint/{name}": float(conversation.hints[name]) for name in _HINTS if conversation.hints[name]
        }
        self.host.remarks.update({f"requests with {name}": count for name, count in conversation.hints.items()})
        if conversation.refusal:
            self.host.remarks[f"refused requests: {conversation.refusal}"] += conversation.refusals

    def _set_segment_rewards(self, outcome: protocols.Outcome) -> None:
        segments = self.trajectory.segments
        if outcome.segment_rewards and self.reward is not None:
            raise self.crash(
                "run",
                "gave rewards of segments, and config.reward.functions scores whole rollouts instead of the harness: "
                "let one of the two score",
            )
        for index, value in outcome.segment_rewards.items():
            if index not in range(len(segments)):
                raise self.crash("run", f"gave a reward to segment {index} of {len(segments)}")
            if index:
                segments[index].reward = float(value)
            elif value != outcome.reward:
                raise self.crash(
                    "run",
                    f"gave segment 0 the reward {value!r}, and the rollout {outcome.reward!r}: the first segment has "
                    "the rollout's reward, so give the other segments rewards of their own",
                )
