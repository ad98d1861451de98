"""Tasks of the `reasoning-gym` package (github.com/open-thought/reasoning-gym), scored by the package itself."""

from __future__ import annotations

import difflib
import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax import protocols
from libra_jax.agents import deadlines, question, splits
from libra_jax.agents.environments import dialogue
from libra_jax.agents.tools import toolbox, toolkit

_CHUNK = 10_000
"""Number of items in one generated dataset. Later items come from a dataset with another seed."""

_REDRAWS = 64


@functools.lru_cache(maxsize=32)
def _dataset(name: str, arguments: str, seed: int) -> Any:
    """Returns the package's dataset. `arguments` is JSON, which makes it a key for the cache."""
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
            warnings.simplefilter("ignore", SyntaxWarning)  # one of its dependencies compares literals with "is"
            import reasoning_gym  # imported here: it is optional and takes a second to import
    except ModuleNotFoundError as error:
        raise protocols.ConfigError(
            "config.task.source: these tasks need the package reasoning-gym; install it with pip"
        ) from error
    return reasoning_gym


class GymTasks:
    """A procedural dataset, read by position. Half of all questions, chosen by hash, are held out for evaluation."""

    def __init__(self, name: str, seed: int, arguments: Mapping[str, Any]) -> None:
        self._name = name
        self._seed = seed
        self._arguments = json.dumps(dict(arguments), sort_keys=True)
        # Makes the dataset once now, so that a bad name or argument fails before the run.
        _dataset(name, self._arguments, 0)

    def task(self, index: int) -> protocols.Task:
        """Returns the training task with this index."""
        return self._make("train", self._seed, index)

    def evaluation_task(self, index: int) -> protocols.Task:
        """Returns the held-out task with this index. It is the same for every training seed."""
        return self._make("evaluation", 0, index)

    def _make(self, split: str, seed: int, index: int) -> protocols.Task:
        chunk, offset = divmod(index, _CHUNK)
        # Redraws until the question falls on the wanted side of the held-out split.
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


async def _pose(task: protocols.Task, box: toolbox.Toolbox) -> Sequence[protocols.Message]:
    del box
    return [protocols.Message("user", task.payload["question"])]


async def _verdict(task: protocols.Task, output: str, box: toolbox.Toolbox) -> dialogue.Verdict:
    """Scores the answer on a thread, because some scorers compute for a while."""
    del box
    return dialogue.Verdict(await deadlines.off_loop(_score, task.payload, question.final_answer(output)))


def _score(payload: Mapping[str, Any], answer: str) -> float:
    dataset = _dataset(payload["name"], payload["arguments"], payload["seed"])
    entry = dataset[payload["offset"]]
    # The scorer uses the regenerated entry, so it has to be the one that the policy saw.
    if entry["question"] != payload["question"]:
        raise RuntimeError(f"reasoning-gym generated another question for {payload['name']!r} than before")
    return float(dataset.score_answer(answer, entry))


def task_source(path: str = "", seed: int = 0, name: str = "", **arguments: Any) -> GymTasks:
    """Returns tasks of the package, chosen by task name.

    Args:
      path: Must be empty, because nothing is read.
      seed: Seed of the training stream.
      name: Name of the task, for example "chain_sum".
      **arguments: Settings of the task's own config, for example `max_terms=3`. Plain values only.

    Raises:
      ConfigError: A path is given, the package is missing, or it refuses the name or the arguments.
    """
    if path:
        raise protocols.ConfigError(
            "config.task.path: reasoning-gym reads no file; name a task as "
            "--config.task.arguments=\"{'name': 'chain_sum'}\""
        )
    return GymTasks(name, seed, arguments)


def environment(tools: toolkit.Toolkit, system: str = "") -> dialogue.Dialogue:
    """Returns the environment for one rollout. The package scores the first output that calls no tool.

    Args:
      tools: Tools that the policy may call before it answers (`config.tools`). Without tools, its first output is the
        answer.
      system: System message, put before the description of the tools. Empty means none.
    """
    return dialogue.Dialogue(tools, _pose, _verdict, system=system)
