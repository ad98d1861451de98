"""Tries a config's reward functions in a child process, before any worker starts.

A child, because a factory may take memory and devices that the run's actors need.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import connection

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rewards import actors, scoring
from libra_jax.utils import processes, resolving

TRY_SECONDS = 20.0
"""Seconds to wait for factories, and at most for each function's score of an example. A factory that loads a model is
slower, and not waited for."""


@dataclass(frozen=True)
class TrialRollout:
    """A rollout that no policy wrote.

    Attributes:
      task: Task of the rollout.
      transcript: What the functions get, or its text.
      silent: The same question with an empty output.
    """

    task: protocols.Task
    transcript: scoring.Transcript
    silent: scoring.Transcript = field(default_factory=lambda: scoring.Transcript(""))


@dataclass(frozen=True)
class Scored:
    """What a function made of an example.

    Attributes:
      name: Name of the function in the config.
      outcome: Its value, or its problem.
      takes_transcript: It gets the transcript, most of which is made up here, instead of the text.
      slow: It was not waited for, although a run would wait longer.
      silent: Its value for an empty output, or its problem with one. None if it was not tried.
    """

    name: str
    outcome: actors.RewardOutcome
    takes_transcript: bool
    slow: bool = False
    silent: actors.RewardOutcome | None = None

    @property
    def failed(self) -> bool:
        """True if the rollouts of a run would fail, too. What raises on a made-up transcript may work on a real one."""
        perhaps = self.slow or (self.takes_transcript and self.outcome.problem.startswith("raised"))
        return bool(self.outcome.problem) and not perhaps


def functions(reward: config_lib.RewardConfig, example: TrialRollout | None = None) -> list[Scored]:
    """Makes each function once, and has the user's own ones score an example.

    Factories that take longer than `TRY_SECONDS` are left to the run. A function that takes longer than
    `reward.seconds` has failed; one that is allowed more than `TRY_SECONDS`, and takes it, may fail. The functions
    after either are not tried.
    """
    if not reward.functions:
        return []
    problem, scores = "", list[Scored]()
    with processes.Peer(_try_functions, reward, example, name="the trial of functions", fork=True) as peer:
        try:
            if peer.pipe.poll(TRY_SECONDS):
                problem = peer.pipe.recv()
                scores += _receive_scores(peer, reward.seconds)
            peer.exit_status(actors.CLOSE_SECONDS)
        except EOFError:
            names = ", ".join(reward.functions)
            problem = f"a factory ended its process ({peer.exit_status(actors.CLOSE_SECONDS)}), of: {names}"
            problem = f"config.reward.functions: {problem}"
    if problem:
        raise protocols.ConfigError(problem)
    return scores


def _receive_scores(peer: processes.Peer, allowed: float) -> Iterator[Scored]:
    """Yields the scores of the functions that the child names, until it has died or a function is too slow.

    A run allows a call `allowed` seconds.
    """
    names, answers = list[str](), peer.pipe
    patience = min(allowed, TRY_SECONDS)
    try:
        if answers.poll(TRY_SECONDS):
            names = answers.recv()
        while names and answers.poll(patience):
            one = answers.recv()
            silent = answers.recv() if answers.poll(patience) else None
            yield dataclasses.replace(one, silent=silent)
            if silent is None:
                return
            del names[0]
        if names:
            problem = f"took more than {patience:g} s" + (" (config.reward.seconds)" if allowed <= TRY_SECONDS else "")
            # Whether it would take more than it is allowed is not known.
            yield Scored(
                names[0], actors.RewardOutcome(problem=problem), takes_transcript=False, slow=allowed > TRY_SECONDS
            )
    except EOFError:
        if names:
            outcome = actors.RewardOutcome(problem=f"ended its process ({peer.exit_status(actors.CLOSE_SECONDS)})")
            yield Scored(names[0], outcome, takes_transcript=False)


def _try_functions(
    answer: connection.Connection, reward: config_lib.RewardConfig, example: TrialRollout | None
) -> None:
    """Makes the functions, and sends the first problem, or an empty text. Then sends their scores of the example."""

    async def body() -> None:
        worker = actors.RewardWorker(reward.functions)
        try:
            transcript_flags = await worker.start()
        except protocols.LibraError as error:
            answer.send(str(error))
            return
        answer.send("")
        if example is None:
            return
        library_functions = [
            name
            for name, function in reward.parsed().items()
            if function.factory.startswith(resolving.SHIPPED) and function.factory != resolving.ITSELF
        ]
        user_functions = {name: takes for name, takes in transcript_flags.items() if name not in library_functions}
        answer.send(list(user_functions))
        for name, takes_transcript in user_functions.items():
            right, silent = (
                transcript if takes_transcript else transcript.text
                for transcript in (example.transcript, example.silent)
            )
            answer.send(Scored(name, await worker.score(name, example.task, right), takes_transcript))
            answer.send(await worker.score(name, example.task, silent))

    asyncio.run(body())
