"""Tasks that are episodes of a game, and what environments of games share. Each task is only a seed."""

from __future__ import annotations

from dataclasses import dataclass, field

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import thoughts
from libra_jax.rewards import answers
from libra_jax.rollouts import splits


def task_source(path: str = "", seed: int = 0) -> splits.Tasks:
    """Returns episodes by seed. A game may use the seed or ignore it."""
    config_lib.check(not path, "task.path", "episodes are drawn by seeds; no file is read")

    def make(split: str, seed: int, index: int) -> protocols.Task:
        number = splits.generator("episodes", seed, split, index).randrange(2**30)
        # Training episodes have even seeds and held-out episodes odd ones, so none is ever shared.
        return protocols.Task(f"episode-{split}-{index}", {"seed": 2 * number + (split == "evaluation")})

    return splits.Tasks(seed, make)


def move(output: str, answer: str) -> str:
    """Returns the part of an output that is a move: everything but thoughts if `answer` is "whole"."""
    return thoughts.split(output).answer.strip() if answer == "whole" else answers.final(output)


def check_reward(reward: str, max_steps: int, field: str = "task.environment_arguments") -> None:
    """Raises ConfigError if the settings of an `EpisodeTally` are invalid."""
    config_lib.check_choice(reward, ("return", "last"), f"{field}.reward")
    config_lib.check(max_steps >= 0, f"{field}.max_steps", f"must be 0 (no limit) or more, not {max_steps}")


@dataclass
class EpisodeTally:
    """The steps of one episode so far.

    Attributes:
      reward: Reward of the rollout: "return" (the sum of the rewards) or "last" (the last reward alone).
      max_steps: Number of steps after which the episode is cut off with its reward so far. 0: no limit.
      rewards: Rewards of the valid moves.
      steps: Number of moves, including invalid ones.
    """

    reward: str
    max_steps: int
    rewards: list[float] = field(default_factory=list)
    steps: int = 0

    def result(
        self, answer: protocols.ToolReturn, reward: float | None, *, over: bool = False, cut: bool = False
    ) -> protocols.StepResult:
        """Counts a move, and returns the result of the step.

        Args:
          answer: What the policy sees of the move.
          reward: Reward of the move. None if the move was not valid.
          over: Whether the game has ended.
          cut: Whether the game was cut off by its own limit.
        """
        self.steps += 1
        # Moves that were not valid count as steps, and have no reward.
        self.rewards += [] if reward is None else [reward]
        cut = cut or (not over and self.steps == self.max_steps)
        if not (over or cut):
            return protocols.StepResult(tool_returns=[answer])
        earned, last = sum(self.rewards), self.rewards[-1] if self.rewards else 0.0
        metrics = {
            "episode_return": earned,
            "episode_steps": float(self.steps),
            "episode_cut": float(cut),
            "no_moves": float(self.steps - len(self.rewards)),
        }
        total = earned if self.reward == "return" else last
        return protocols.StepResult(tool_returns=[answer], done=True, reward=total, metrics=metrics)
