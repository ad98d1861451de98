"""Tasks that are episodes of a game. Each task is only a seed."""

from __future__ import annotations

from libra_jax import config, protocols
from libra_jax.agents import splits


class SeedTasks:
    """Episodes by seed. Training episodes have even seeds, held-out episodes odd ones."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def task(self, index: int) -> protocols.Task:
        """Returns the training episode with this index."""
        return self._make("train", self._seed, index, 0)

    def evaluation_task(self, index: int) -> protocols.Task:
        """Returns the held-out episode with this index. It is the same for every training seed."""
        return self._make("evaluation", 0, index, 1)

    def _make(self, split: str, seed: int, index: int, odd: int) -> protocols.Task:
        drawn = splits.generator("episodes", seed, split, index).randrange(2**30)
        return protocols.Task(f"episode-{split}-{index}", {"seed": 2 * drawn + odd})


def task_source(path: str = "", seed: int = 0) -> SeedTasks:
    """Returns episodes by seed. A game may use the seed or ignore it.

    Args:
      path: Must be empty, because nothing is read.
      seed: Seed of the training stream.

    Raises:
      ConfigError: A path is given.
    """
    config.check(not path, "task.path", "episodes are drawn by seeds; no file is read")
    return SeedTasks(seed)
