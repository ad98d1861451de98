"""The progress of a rollout: its seconds, and the text that it streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from libra_jax import protocols
from libra_jax.chat import output_parsers
from libra_jax.utils import user_code


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
