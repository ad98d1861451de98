"""Randomness by position, and a train/evaluation split. Both come from hashes, so no seed or version changes them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from libra_jax import protocols


def generator(*key: object) -> random.Random:
    """Returns a random generator that depends only on `key`. It is the same in every process and Python version."""
    # The separator keeps keys such as ("a", "bc") and ("ab", "c") apart.
    text = "\x1f".join(map(str, key))
    # Not `hash` of the text, which differs between processes.
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big"))


def held_out(text: str) -> bool:
    """Returns whether a problem's text belongs to evaluation. True for half of all texts, independent of any seed."""
    return bool(hashlib.sha256(text.encode()).digest()[0] & 1)


@dataclass(frozen=True)
class Tasks:
    """Tasks by position. The held-out stream is the same for every training seed.

    Attributes:
      seed: Seed of the training stream.
      make: Makes the task of a split ("train" or "evaluation"), a seed and an index. Held-out tasks have seed 0.
    """

    seed: int
    make: Callable[[str, int, int], protocols.Task]

    def task(self, index: int) -> protocols.Task:
        """Returns the training task with this index."""
        return self.make("train", self.seed, index)

    def evaluation_task(self, index: int) -> protocols.Task:
        """Returns the held-out task with this index."""
        return self.make("evaluation", 0, index)


def generated(
    name: str, seed: int, draw: Callable[[int, random.Random], tuple[str, Mapping[str, Any]]], stream: str = ""
) -> Tasks:
    """Returns generated tasks. Half of all problems are held out, so training and evaluation never share one.

    Args:
      name: First part of the tasks' ids.
      seed: Seed of the training stream.
      draw: Draws the problem at an index. Returns the text that decides the split, and the payload.
      stream: Name of the random stream. Empty means `name`.
    """

    def make(split: str, seed: int, index: int) -> protocols.Task:
        rng = generator(stream or name, seed, split, index)
        # Redraws until the problem falls on the wanted side of the split.
        while True:
            text, payload = draw(index, rng)
            if held_out(text) == (split == "evaluation"):
                return protocols.Task(f"{name}-{split}-{index}", payload)

    return Tasks(seed, make)
