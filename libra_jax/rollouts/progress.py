"""The progress of a rollout: tokens accounted for, seconds, streamed text, and room for tool returns."""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import itertools
from collections.abc import Callable, Sequence

from libra_jax import protocols
from libra_jax.chat import output_parsers, thoughts
from libra_jax.rollouts import tool_results
from libra_jax.tools.sandbox import limits
from libra_jax.utils import user_code


class ReplayDiffers(Exception):
    """The retained tokens differ from those that this environment and template produce."""


class Walk:
    """Walks along a trajectory. It checks the tokens that a resume retained, and appends new tokens after them.

    Args:
      trajectory: An empty trajectory, or one that was cut off anywhere.
      position: Number of tokens that a snapshot accounts for.
      turn: Number of outputs that a snapshot accounts for.

    Attributes:
      position: Number of tokens accounted for.
      turn: Number of outputs whose return, if any, is accounted for.
      generated: Number of tokens accounted for that the policy sampled.
    """

    def __init__(self, trajectory: protocols.Trajectory, position: int = 0, turn: int = 0) -> None:
        self._trajectory = trajectory
        self.position, self.turn = position, turn
        self.generated = sum(trajectory.loss_mask[:position])

    @property
    def at_end(self) -> bool:
        """Whether all retained tokens are accounted for."""
        return self.position == len(self._trajectory.token_ids)

    def append(self, tokens: Sequence[int], source: protocols.TokenSource) -> None:
        """Accounts for text. Appends what goes beyond the retained tokens; raises `ReplayDiffers` if those differ."""
        end = self.position + len(tokens)
        retained = self._trajectory.token_ids[self.position : end]
        sources = self._trajectory.sources[self.position : end]
        if list(retained) != list(tokens[: len(retained)]) or any(item != source for item in sources):
            raise ReplayDiffers
        # The rollout may have been cut off in the middle of this text.
        self._trajectory.append_text(tokens[len(retained) :], source)
        self.position = end

    def record(self, end: int, start_seconds: float) -> None:
        """Accounts for an output up to `end`, in the retained turn or, if the output has tokens, in a new one."""
        generated, turns = end - self.position, self._trajectory.turns
        self.position = end
        self.generated += generated
        if self.turn < len(turns):
            turns[self.turn].generated_tokens = generated
        elif generated:
            turns.append(protocols.Turn(generated_tokens=generated, start_seconds=start_seconds))


class Stopwatch:
    """Measures a rollout's seconds from its first token on. The wait for a place before that does not count.

    Args:
      trajectory: Trajectory that stores the seconds, so that the count continues after a resume.
      max_seconds: Seconds that the rollout may take. 0 means no limit.
    """

    def __init__(self, trajectory: protocols.Trajectory, max_seconds: float) -> None:
        self._trajectory, self._max_seconds = trajectory, max_seconds
        self._since: float | None = None
        # A resumed rollout has spent these seconds before.
        self._earlier = trajectory.seconds

    def over(self) -> bool:
        """Updates the seconds and returns whether the time is up."""
        if self._since is not None:
            self._trajectory.seconds = self._earlier + asyncio.get_running_loop().time() - self._since
        return 0 < self._max_seconds <= self._trajectory.seconds

    def tokens_came(self, timer: asyncio.Timeout | None = None) -> None:
        """Starts the stopwatch at the first token, and updates the seconds."""
        if self._since is None:
            self._since = asyncio.get_running_loop().time()
            if timer is not None:
                self.arm(timer)
        self.over()

    def arm(self, timer: asyncio.Timeout) -> None:
        """Sets the timer to the end of the time, if there is a limit and the stopwatch runs."""
        if self._max_seconds > 0 and self._since is not None:
            timer.reschedule(self._since + self._max_seconds - self._earlier)


class Hearing:
    """Passes one output to an environment, piece by piece, while its tokens arrive.

    Args:
      hear: The environment's `protocols.Listener.hear`.
      tokenizer: Tokenizer that decodes the tokens.
      trajectory: Trajectory that ends with the output.
      start: Position in the trajectory where the output begins.
      opening: Text in front of the output's own (`thoughts.opening`).

    Attributes:
      error: Exception that `hear` raised. `hear` is not called again after it.
    """

    def __init__(
        self,
        hear: Callable[[str], None],
        tokenizer: protocols.Tokenizer,
        trajectory: protocols.Trajectory,
        start: int,
        opening: str = "",
    ) -> None:
        self._hear, self._trajectory, self._end = hear, trajectory, start
        self._stream, self._stop_token_ids = output_parsers.TextStream(tokenizer), frozenset(tokenizer.stop_token_ids)
        self._opening = opening
        self.error: Exception | None = None

    def pass_on(self) -> None:
        """Passes on the text since the last call. Never raises, because its caller has to go on handling tokens."""
        if self.error is not None:
            return
        tokens = self._trajectory.token_ids[self._end :]
        stopped = bool(tokens) and tokens[-1] in self._stop_token_ids
        self._end += len(tokens)
        try:
            text = self._stream.feed(tokens[: len(tokens) - stopped])
            piece, self._opening = self._opening + text + (self._stream.finish() if stopped else ""), ""
            if piece:
                with user_code.contain_exits():
                    self._hear(piece)
        except Exception as error:
            self.error = error


def cut_to_fit(
    answers: Sequence[protocols.ToolReturn],
    tokens: Callable[[Sequence[protocols.ToolReturn]], int],
    room: int,
) -> Sequence[protocols.ToolReturn] | None:
    """Cuts the middles out of tool returns, with a mark, so that together they take at most `room` tokens.

    All returns are cut to the same number of characters, the largest that fits. So the longest returns lose most.

    Args:
      answers: Returns, in order.
      tokens: Counts the tokens of returns as rendered. More characters are assumed to need more tokens.
      room: Number of tokens that the returns may take. None is returned if there is no room even for the marks.
    """

    def cut(max_characters: int) -> Sequence[protocols.ToolReturn]:
        return [dataclasses.replace(answer, content=limits.cut(answer.content, max_characters)) for answer in answers]

    longest = max((len(answer.content) for answer in answers), default=0)
    # Binary search, because each probe renders all returns again.
    fits = bisect.bisect_right(range(longest + 1), room, key=lambda max_characters: tokens(cut(max_characters))) - 1
    return cut(fits) if fits >= 0 else None


def opening(tokenizer: protocols.Tokenizer, token_ids: Sequence[int], start: int) -> str:
    """Returns the beginning of a thought, if the template has written it before the output at `start`.

    Environments and rewards read this text before the output. Without it, a thought would pass for an answer.
    """
    return thoughts.opening(tokenizer.decode(token_ids[max(0, start - thoughts.TOKENS) : start]))


_FROM_BEST = ("success", "failure", "timeout")
"""Outcomes of tools. Of several in one turn, the worst counts."""


def record_returns(turn: protocols.Turn, answers: Sequence[protocols.ToolReturn]) -> None:
    """Records in a turn what its tools returned, at least one."""
    # Each tool's name once and in a fixed order, so that a replayed turn has the same causal state.
    turn.tool = "+".join(sorted({answer.tool for answer in answers}))
    turn.status = max((answer.status for answer in answers), key=_FROM_BEST.index)
    turn.call = "+".join(sorted({answer.call for answer in answers if answer.call}))
    errors = (answer.error or tool_results.error(answer.content) for answer in answers if answer.status != "success")
    turn.error = next(filter(None, errors), "")


def returns(turns: Sequence[protocols.Turn]) -> tuple[protocols.CausalState, ...]:
    """Returns what the tools of these turns returned, in order."""
    return tuple(
        protocols.CausalState(turn.tool, turn.payload_tokens, turn.status, turn.call, turn.error)
        for turn in turns
        if turn.tool is not None and turn.status is not None
    )


def policy_text(tokenizer: protocols.Tokenizer, trajectory: protocols.Trajectory) -> str:
    """Returns the outputs of a rollout's policy, without their stop tokens, joined by line breaks."""
    outputs = []
    for segment in trajectory.segments:
        end = 0
        for source, run in itertools.groupby(segment.sources):
            start, end = end, end + len(list(run))
            if source == protocols.TokenSource.MODEL:
                stopped = segment.token_ids[end - 1] in tokenizer.stop_token_ids
                text = tokenizer.decode(segment.token_ids[start : end - stopped])
                outputs.append(opening(tokenizer, segment.token_ids, start) + text)
    return "\n".join(outputs)
