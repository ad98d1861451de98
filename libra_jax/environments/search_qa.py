"""Questions whose answers must be searched. The score is exact match or F1 against one or more accepted answers.

A task's payload has a `prompt` (a text, or messages) and an `answer` (a text, or a list of all accepted texts). Tasks
that can be demonstrated also have `lookups`: pairs of a query and the search tool's result for it. Texts are compared
without case, punctuation, articles and extra spaces. SQuAD's evaluation does the same, and Search-R1's after it:
Rajpurkar et al. 2016, arXiv 1606.05250, section 6.1; Jin et al. 2025, arXiv 2503.09516.
"""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Sequence

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import dialogue, question
from libra_jax.rewards import answers
from libra_jax.tools import toolbox, toolkit

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

TOOL = "search"
"""Name of the tool that demonstrations call."""


def normalised(text: str) -> str:
    """Returns the text without case, ASCII punctuation, English articles and extra spaces.

    A text that consists of articles or punctuation keeps them, or every such text would equal the empty one.
    """
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split() or plain.split() or text.lower().split())


def scores(prediction: str, accepted: Sequence[str]) -> dict[str, float]:
    """Returns how well an answer matches the accepted answer that fits best.

    "em" is 1 if the two texts are equal once normalised, otherwise 0. "f1" is the harmonic mean of precision and recall
    over their words. An empty answer is never right, as in Search-R1.
    """
    words, best = normalised(prediction).split(), 0.0
    right = [normalised(answer).split() for answer in accepted]
    for expected in right:
        shared = sum((collections.Counter(words) & collections.Counter(expected)).values())
        # The harmonic mean of shared / len(words) and shared / len(expected), simplified.
        best = max(best, 2.0 * shared / max(len(words) + len(expected), 1))
    return {"em": float(bool(words) and words in right), "f1": best}


def environment(tools: toolkit.Toolkit, match: str = "em", system: str = "") -> dialogue.Dialogue:
    """Returns the environment for one rollout.

    The answer is `<answer>` or `\\boxed{}` in the last output, or otherwise its text without thoughts.

    Args:
      tools: Tools of the run.
      match: Metric that is the reward: "em" or "f1". Both are reported as metrics.
      system: System message, put before the description of the tools. Empty means none.
    """
    config_lib.check_choice(match, ("em", "f1"), "task.environment_arguments.match")

    def score(task: protocols.Task, output: str, _: toolbox.Toolbox) -> dialogue.Verdict:
        metrics = scores(answers.final(output), answers.accepted(task.payload))
        return dialogue.Verdict(metrics[match], metrics)

    def demonstrate(task: protocols.Task) -> Sequence[protocols.Message]:
        lookups = task.payload.get("lookups")
        if lookups is None:
            raise protocols.ConfigError(
                f"config.warm_start.steps: task {task.prompt_id} has no lookups to demonstrate; set it to 0, or take "
                "tasks that do, such as those of libra_jax.examples.acquaintances"
            )
        problem = "must be False for a warm start: demonstrations describe none"
        config_lib.check(not tools.describe, "tools.describe", problem)
        return dialogue.solved(
            question.opening(task.payload["prompt"], system),
            [(tools.format.write(TOOL, {"query": query}), passage) for query, passage in lookups],
            answers.accepted(task.payload)[0],
        )

    return dialogue.Dialogue(tools, dialogue.posed, score, system=system, demonstrate=demonstrate)
