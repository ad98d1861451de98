"""Tasks of the `reasoning-gym` package (github.com/open-thought/reasoning-gym) by name, with its own scorers."""

from __future__ import annotations

import difflib
import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax import protocols
from libra_jax.agents import deadlines, question, splits

_CHUNK = 10_000
"""Items of one generated dataset; the next ones come from a dataset with another seed."""

_REDRAWS = 64


@functools.lru_cache(maxsize=32)
def _dataset(name: str, arguments: str, seed: int) -> Any:
    """The package's dataset; `arguments` as JSON."""
    package = _package()
    if name not in package.factory.DATASETS:
        near = difflib.get_close_matches(name, package.factory.DATASETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise protocols.ConfigError(f"config.task.arguments.name: reasoning-gym has no task {name!r}{hint}")
    try:
        return package.create_dataset(name, seed=seed, size=_CHUNK, **json.loads(arguments))
    except (TypeError, ValueError, AssertionError) as error:
        raise protocols.ConfigError(
            f"config.task.arguments: reasoning-gym refuses these for {name!r} ({error})"
        ) from error


@functools.cache
def _package() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # a package that it needs compares with literals by "is"
            import reasoning_gym  # here: it is optional, and takes a second to import
    except ModuleNotFoundError as error:
        raise protocols.ConfigError(
            "config.task.source: these tasks need the package reasoning-gym; install it with pip"
        ) from error
    return reasoning_gym


class GymTasks:
    """A procedural dataset by position; half of all questions, by hash, are held out for evaluation."""

    def __init__(self, name: str, seed: int, arguments: Mapping[str, Any]) -> None:
        self._name = name
        self._seed = seed
        self._arguments = json.dumps(dict(arguments), sort_keys=True)
        _dataset(name, self._arguments, 0)

    def task(self, index: int) -> protocols.Task:
        """The index-th training task."""
        return self._make("train", self._seed, index)

    def evaluation_task(self, index: int) -> protocols.Task:
        """The index-th held-out task; the same for every seed."""
        return self._make("evaluation", 0, index)

    def _make(self, split: str, seed: int, index: int) -> protocols.Task:
        chunk, offset = divmod(index, _CHUNK)
        for redraw in range(_REDRAWS):
            dataset_seed = splits.generator("reasoning-gym", seed, split, chunk, redraw).randrange(2**31)
            text = _dataset(self._name, self._arguments, dataset_seed)[offset]["question"]
            if splits.held_out(text) == (split == "evaluation"):
                payload = {
                    "name": self._name,
                    "arguments": self._arguments,
                    "seed": dataset_seed,
                    "offset": offset,
                    "question": text,
                }
                return protocols.Task(f"{self._name}-{split}-{index}", payload)
        raise protocols.DataError(
            f"reasoning-gym task {self._name!r}: its questions repeat so much that none could be kept for {split}; "
            f"widen its ranges, as --config.task.arguments=\"{{'name': {self._name!r}, ...}}\""
        )


class GymEnvironment:
    """One attempt at a question; the package scores the first output."""

    def __init__(self, system: str) -> None:
        self._system = system
        self._task: protocols.Task | None = None

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """The system message, if any, and the question."""
        self._task = task
        system = [protocols.Message("system", self._system)] if self._system else []
        return [*system, protocols.Message("user", task.payload["question"])]

    async def step(self, output: str) -> protocols.StepResult:
        """Scores the answer, off the event loop: some scorers compute for a while."""
        if self._task is None:
            raise RuntimeError("step before reset")
        reward = await deadlines.off_loop(_score, self._task.payload, question.final_answer(output))
        return protocols.StepResult(done=True, reward=reward)

    async def close(self) -> None:
        """Nothing is held."""


def _score(payload: Mapping[str, Any], answer: str) -> float:
    dataset = _dataset(payload["name"], payload["arguments"], payload["seed"])
    entry = dataset[payload["offset"]]
    if entry["question"] != payload["question"]:
        raise RuntimeError(f"reasoning-gym generated another question for {payload['name']!r} than before")
    return float(dataset.score_answer(answer, entry))


def task_source(path: str = "", seed: int = 0, name: str = "", **arguments: Any) -> GymTasks:
    """Tasks of the package by its task name.

    Args:
      path: must be empty: nothing is read.
      seed: of the training stream.
      name: e.g. "chain_sum".
      **arguments: of the task's own config, e.g. `max_terms=3`; plain values.

    Raises:
      ConfigError: a path is given, the package is missing, or it refuses name or arguments.
    """
    if path:
        raise protocols.ConfigError(
            "config.task.path: reasoning-gym reads no file; name a task as "
            "--config.task.arguments=\"{'name': 'chain_sum'}\""
        )
    return GymTasks(name, seed, arguments)


def environment(system: str = "") -> GymEnvironment:
    """A fresh attempt; `system` is a system message, empty for none."""
    return GymEnvironment(system)
