"""Text environments with gymnasium's interface (gymnasium.farama.org), played move by move.

An observation is text, or the text that `render_mode="ansi"` draws. Highlighted characters are shown as [x], coloured
characters as (blue x). A move is the final answer of an output: the number or name of a choice, or any text if the
environment takes text. The result of a move is shown as a tool's return, so it is a causal state too. An invalid move
is a failure and costs a step. The environment's own code runs on threads.

    config.task.source = "libra_jax.environments.episodes:task_source"
    config.task.environment = "libra_jax.environments.gym_text:environment"
    config.task.environment_arguments = {
        "name": "FrozenLake-v1", "arguments": {"render_mode": "ansi"}, "actions": ["left", "down", "right", "up"]
    }

Other packages work too, if they have `make(name, **arguments)`, `reset(seed=)` and a `step` that returns five values.
Name their `make`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import episodes, question
from libra_jax.rollouts import splits
from libra_jax.utils import deadlines, resolving

_FIELD = "task.environment_arguments"
_ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_DEMONSTRATED_STEPS = 12


@dataclass(frozen=True)
class GameSettings:
    """The game to play, and how to read it. `environment` documents the fields."""

    name: str
    arguments: Mapping[str, Any]
    make: str
    actions: Sequence[str]
    answer: str
    observe: str
    reward: str
    max_steps: int


class Game:
    """One episode. Its methods make the environment's own calls, which may block.

    Attributes:
      names: Names of the choices, in their order. Empty if moves are texts.
    """

    def __init__(self, settings: GameSettings) -> None:
        self._settings = settings
        make = resolving.resolve(settings.make, f"{_FIELD}.make")
        try:
            self._game = make(settings.name, **settings.arguments)
        except Exception as error:  # packages raise their own types; gymnasium's messages suggest the nearest name
            raise protocols.ConfigError(
                f"config.{_FIELD}: {settings.make} cannot make {settings.name!r} with "
                f"{dict(settings.arguments)} ({error})"
            ) from error
        space = getattr(self._game, "action_space", None)
        # Spaces of choices may begin at another number than 0.
        choices, self._first = int(getattr(space, "n", 0)), int(getattr(space, "start", 0))
        config_lib.check(
            bool(choices) or space is None or type(space).__name__ == "Text",
            f"{_FIELD}.name",
            f"{settings.name} takes moves of {space}; only choices (Discrete) and texts (Text) can be written",
        )
        config_lib.check(
            len(settings.actions) in (0, choices),
            f"{_FIELD}.actions",
            f"has {len(settings.actions)} names, and {settings.name} has {choices} choices",
        )
        self._texts = space
        self.names = list(settings.actions) or [str(self._first + place) for place in range(choices)]

    def reset(self, seed: int) -> str:
        """Starts the episode and returns the first observation as text."""
        observation, _ = self._game.reset(seed=seed)
        return self._observation_text(observation)

    def step(self, action: object) -> tuple[str, float, bool, bool]:
        """Makes a move.

        Returns the observation, the reward, whether the episode is over, and whether it was cut off.
        """
        observation, reward, terminated, truncated, _ = self._game.step(action)
        over = bool(terminated or truncated)
        # The last observation is not shown: nothing follows it, and some games cannot draw it.
        return (
            "" if over else self._observation_text(observation),
            float(reward),
            over,
            bool(truncated and not terminated),
        )

    def move(self, output: str) -> tuple[object, str]:
        """Returns the move in an output, and why it is not a valid move. The second is empty if the move is valid."""
        text = episodes.move(output, self._settings.answer)
        if not self.names:
            good = self._texts is None or self._texts.contains(text)
            return text, "" if good else f"error: {text!r} is no move here"
        lowered = [name.lower() for name in self.names]
        if text.lower() in lowered:
            return self._first + lowered.index(text.lower()), ""
        # Nine digits at most: Python takes long to read a huge number, and refuses the longest ones.
        if re.fullmatch(r"-?\d{1,9}", text) and 0 <= int(text) - self._first < len(self.names):
            return int(text), ""
        choices = ", ".join(self.names) if len(self.names) <= 20 else f"{self.names[0]} to {self.names[-1]}"
        return None, f"error: {text[:40]!r} is no move; answer with one of {choices}"

    def close(self) -> None:
        """Releases the resources of the game."""
        getattr(self._game, "close", lambda: None)()

    def _observation_text(self, observation: object) -> str:
        if self._settings.observe:
            observation = resolving.resolve(self._settings.observe, f"{_FIELD}.observe")(observation)
        elif getattr(self._game, "render_mode", None) == "ansi":
            observation = self._game.render()
        config_lib.check(
            isinstance(observation, str),
            _FIELD,
            f"{self._settings.name} shows {type(observation).__name__}, which is no text; give it "
            "'arguments': {'render_mode': 'ansi'} where it has that, or name a function that writes it: "
            "'observe': 'package.module:function'",
        )
        return plain(str(observation)).strip("\n")


def plain(text: str) -> str:
    """Returns a terminal's text without its escape sequences.

    Shows highlighted parts as [x], coloured ones as (blue x).
    """
    result, closing, place = "", "", 0
    for match in _ESCAPE.finditer(text):
        result += text[place : match.start()]
        place = match.end()
        codes = [int(code) for code in match[1].split(";") if code]
        background = any(40 <= code <= 47 or code == 7 for code in codes)
        colour = next((_COLOURS[code - 30] for code in codes if 30 <= code <= 37), "")
        # A new colour or a reset ends the marked part before it.
        if background or colour or 0 in codes or not codes:
            result, closing = result + closing, ""
        if background:
            result, closing = result + "[", "]"
        elif colour:
            result, closing = f"{result}({colour} ", ")"
    return result + text[place:] + closing


class GymTextEnvironment:
    """The environment of one rollout: an episode.

    If moves are choices, it demonstrates their format with random moves.
    """

    def __init__(self, settings: GameSettings, system: str, choices: bool) -> None:
        self._settings, self._system = settings, system
        self._game: Game | None = None
        self._tally = episodes.EpisodeTally(settings.reward, settings.max_steps)
        if choices:
            self.demonstration: Callable[[protocols.Task], Sequence[protocols.Message]] = self._random_episode

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Returns the system message, if any, and the first observation."""
        # A replay that differed resets the same environment again.
        await self.close()
        self._tally = episodes.EpisodeTally(self._settings.reward, self._settings.max_steps)
        making = asyncio.ensure_future(deadlines.off_loop(Game, self._settings))
        try:
            self._game = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_discard)  # the thread cannot be stopped, and will make the game all the same
            raise
        return question.opening(await deadlines.off_loop(self._game.reset, task.payload["seed"]), self._system)

    async def step(self, output: str) -> protocols.StepResult:
        """Makes the move in the output."""
        if self._game is None:
            raise RuntimeError("step before reset")
        loop, name = asyncio.get_running_loop(), self._settings.name
        start = loop.time()
        action, problem = self._game.move(output)
        if problem:
            return self._tally.result(protocols.ToolReturn(name, "failure", problem), None)
        observation, reward, over, cut = await deadlines.off_loop(self._game.step, action)
        answer = protocols.ToolReturn(name, "success", observation, loop.time() - start)
        return self._tally.result(answer, reward, over=over, cut=cut)

    async def close(self) -> None:
        """Closes the episode."""
        game, self._game = self._game, None
        if game is not None:
            await deadlines.off_loop(game.close)

    def _random_episode(self, task: protocols.Task) -> list[protocols.Message]:
        game = Game(self._settings)
        rng = splits.generator("gymnasium-demonstration", task.payload["seed"])
        try:
            messages = question.opening(game.reset(task.payload["seed"]), self._system)
            while True:
                # Random moves will do, because only their format is to be learned.
                messages.append(protocols.Message("assistant", rng.choice(game.names)))
                observation, _, over, _ = game.step(game.move(messages[-1].content)[0])
                if over or len(messages) >= 2 * _DEMONSTRATED_STEPS:
                    return messages
                messages.append(protocols.Message("tool", observation))
        finally:
            game.close()


def _discard(making: asyncio.Future[Game]) -> None:
    if not making.cancelled() and making.exception() is None:
        # close may block, and this callback runs on the event loop.
        threading.Thread(target=making.result().close, name="libra-gym-close", daemon=True).start()


@functools.lru_cache(maxsize=8)
def _takes_choices(settings: str) -> bool:
    """Makes and closes one episode, so that an unusable game fails before the run. Returns whether moves are choices.

    `settings` is JSON, which makes it a key for the cache.
    """
    game = Game(GameSettings(**json.loads(settings)))
    try:
        game.reset(0)
    finally:
        game.close()
    return bool(game.names)


def environment(
    name: str,
    arguments: Mapping[str, Any] | None = None,
    make: str = "gymnasium:make",
    actions: Sequence[str] = (),
    answer: str = "final",
    observe: str = "",
    reward: str = "return",
    max_steps: int = 0,
    system: str = "",
) -> GymTextEnvironment:
    """Returns the environment for one rollout.

    Args:
      name: Name of the environment, for example "FrozenLake-v1".
      arguments: Keyword arguments to make it, for example {"render_mode": "ansi"}. Plain values only.
      make: "package.module:function" that makes it.
      actions: Names of its choices, in their order. Empty: their numbers.
      answer: Part of an output that is the move: "final" (its final answer) or "whole" (everything but thoughts).
      observe: "package.module:function" that turns an observation into text. Empty if observations are text, or if
        render mode "ansi" draws them.
      reward: Reward of the rollout: "return" (the sum of the rewards) or "last" (the last reward alone).
      max_steps: Number of moves after which the episode is cut off with its reward so far. 0: only the environment ends
        the episode. Set at most `task.max_turns`, because a rollout that runs out of turns has reward 0.
      system: System message. Empty means none.
    """
    config_lib.check_choice(answer, ("final", "whole"), f"{_FIELD}.answer")
    episodes.check_reward(reward, max_steps)
    settings = GameSettings(name, dict(arguments or {}), make, list(actions), answer, observe, reward, max_steps)
    return GymTextEnvironment(settings, system, _takes_choices(json.dumps(vars(settings))))
