"""Tasks of the `reasoning-gym` package (github.com/open-thought/reasoning-gym), scored by the package itself."""

from __future__ import annotations

import difflib
import functools
import json
import warnings
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import dialogue
from libra_jax.rewards import answers
from libra_jax.rollouts import splits
from libra_jax.tools import toolbox, toolkit
from libra_jax.utils import deadlines

_CHUNK = 10_000
"""Number of items in one generated dataset. Later items come from a dataset with another seed."""

_REDRAWS = 64


@functools.cache
def package() -> Any:
    """Returns the package `reasoning_gym`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # one of its dependencies compares literals with "is"
            import reasoning_gym  # imported here: it is optional and takes a second to import
    except ModuleNotFoundError as error:
        raise protocols.ConfigError(
            "config.task.source: these tasks need the package reasoning-gym; install it with pip"
        ) from error
    return reasoning_gym


@functools.lru_cache(maxsize=32)
def _dataset(name: str, arguments: str, seed: int) -> Any:
    """Returns the package's dataset. `arguments` is JSON, which makes it a key for the cache."""
    names = package().factory.DATASETS
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise protocols.ConfigError(f"config.task.arguments.name: reasoning-gym has no task {name!r}{hint}")
    try:
        return package().create_dataset(name, seed=seed, size=_CHUNK, **json.loads(arguments))
    except (TypeError, ValueError, AssertionError) as error:
        raise protocols.ConfigError(
            f"config.task.arguments: reasoning-gym refuses these for {name!r} ({error})"
        ) from error


def task_source(path: str = "", seed: int = 0, name: str = "", **arguments: Any) -> splits.Tasks:
    """Returns tasks of the package. Half of all questions, chosen by hash, are held out for evaluation.

    Args:
      path: Must be empty.
      seed: Seed of the training stream.
      name: Name of the task, for example "chain_sum".
      **arguments: Settings of the task's own config, for example `max_terms=3`. Plain values only.
    """
    problem = "reasoning-gym reads no file; name a task as --config.task.arguments=\"{'name': 'chain_sum'}\""
    config_lib.check(not path, "task.path", problem)
    # Sorted JSON: a key for the cache, and a plain value for the payload.
    key = json.dumps(arguments, sort_keys=True)
    # Makes the dataset once now, so that a bad name or argument fails before the run.
    _dataset(name, key, 0)

    def make(split: str, seed: int, index: int) -> protocols.Task:
        chunk, offset = divmod(index, _CHUNK)
        # Redraws until the question falls on the wanted side of the held-out split.
        for redraw in range(_REDRAWS):
            dataset_seed = splits.generator("reasoning-gym", seed, split, chunk, redraw).randrange(2**31)
            text = _dataset(name, key, dataset_seed)[offset]["question"]
            if splits.held_out(text) == (split == "evaluation"):
                payload = {"name": name, "arguments": key, "seed": dataset_seed, "offset": offset, "question": text}
                return protocols.Task(f"{name}-{split}-{index}", payload)
        raise protocols.DataError(
            f"reasoning-gym task {name!r}: its questions repeat so much that none could be kept for {split}; "
            f"widen its ranges, as --config.task.arguments=\"{{'name': {name!r}, ...}}\""
        )

    return splits.Tasks(seed, make)


async def _verdict(task: protocols.Task, output: str, box: toolbox.Toolbox) -> dialogue.Verdict:
    del box
    payload = task.payload

    def score() -> float:
        dataset = _dataset(payload["name"], payload["arguments"], payload["seed"])
        entry = dataset[payload["offset"]]
        # The scorer uses the regenerated entry, so it has to be the one that the policy saw.
        if entry["question"] != payload["question"]:
            raise RuntimeError(f"reasoning-gym generated another question for {payload['name']!r} than before")
        return float(dataset.score_answer(answers.final(output), entry))

    # On a thread, because some scorers compute for a while.
    return dialogue.Verdict(await deadlines.off_loop(score))


def environment(tools: toolkit.Toolkit, system: str = "") -> dialogue.Dialogue:
    """Returns the environment for one rollout. The package scores the first output that calls no tool.

    Args:
      tools: Tools that the policy may call before it answers (`config.tools`). Without tools, its first output is the
        answer.
      system: System message, put before the description of the tools. Empty means none.
    """
    return dialogue.Dialogue(tools, functools.partial(dialogue.posed, key="question"), _verdict, system=system)
