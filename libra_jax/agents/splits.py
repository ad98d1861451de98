"""Randomness by position, and a split that no seed can blur: both from hashes, so that they never change."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from libra_jax import protocols


def generator(*key: object) -> random.Random:
    """Returns a random generator that depends on `key` only, in every process and Python version alike."""
    text = "\x1f".join(map(str, key))
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big"))


def held_out(text: str) -> bool:
    """Returns whether a problem's text belongs to evaluation: true of half of all texts, with any seed."""
    return bool(hashlib.sha256(text.encode()).digest()[0] & 1)


@dataclass(frozen=True)
class Generated:
    """Tasks made up by position. Half of all problems are held out, so training and evaluation never share one.

    Attributes:
      name: first part of the tasks' ids.
      seed: seed of the training stream. The held-out stream is the same for all seeds.
      draw: draws the problem at an index: the text that decides the half, and the payload.
      stream: name of the random stream; empty: `name`.
    """

    name: str
    seed: int
    draw: Callable[[int, random.Random], tuple[str, Mapping[str, Any]]]
    stream: str = ""

    def task(self, index: int) -> protocols.Task:
        """Returns the index-th training task."""
        return self._make("train", self.seed, index)

    def evaluation_task(self, index: int) -> protocols.Task:
        """Returns the index-th held-out task."""
        return self._make("evaluation", 0, index)

    def _make(self, split: str, seed: int, index: int) -> protocols.Task:
        rng = generator(self.stream or self.name, seed, split, index)
        while True:
            text, payload = self.draw(index, rng)
            if held_out(text) == (split == "evaluation"):
                return protocols.Task(f"{self.name}-{split}-{index}", payload)
