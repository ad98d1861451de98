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

from libra_jax import config, protocols
from libra_jax.agents import question
from libra_jax.agents.environments import dialogue
from libra_jax.agents.tools import toolbox, toolkit

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

TOOL = "search"
"""Name of the tool that demonstrations call."""


def normalised(text: str) -> str:
    """Returns the text without case, ASCII punctuation, English articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(given: str, accepted: Sequence[str]) -> float:
    """Returns 1 if the normalised answer is one of the normalised accepted answers, otherwise 0."""
    return float(normalised(given) in {normalised(answer) for answer in accepted})


def f1(given: str, accepted: Sequence[str]) -> float:
    """Returns the harmonic mean of precision and recall over words, against the accepted answer that fits best.

    Two texts without words agree.
    """
    return max((_f1(normalised(given).split(), normalised(answer).split()) for answer in accepted), default=0.0)


def _f1(given: Sequence[str], expected: Sequence[str]) -> float:
    if not given or not expected:
        return float(given == expected)
    shared = sum((collections.Counter(given) & collections.Counter(expected)).values())
    # The harmonic mean of shared / len(given) and shared / len(expected), simplified.
    return 2.0 * shared / (len(given) + len(expected))


def accepted_answers(task: protocols.Task) -> Sequence[str]:
    """Returns all accepted answers."""
    answer = task.payload["answer"]
    return [answer] if isinstance(answer, str) else list(answer)


def environment(tools: toolkit.Toolkit, match: str = "em", system: str = "") -> dialogue.Dialogue:
    """Returns the environment for one rollout.

    The answer is `<answer>` or `\\boxed{}` in the last output, or otherwise its text after `</think>`.

    Args:
      tools: Tools of the run.
      match: Metric that is the reward: "em" or "f1". Both are reported as metrics.
      system: System message, put before the description of the tools. Empty means none.

    Raises:
      ConfigError: `match` is neither.
    """
    config.check_choice(match, ("em", "f1"), "task.environment_arguments.match")

    async def pose(task: protocols.Task, _: toolbox.Toolbox) -> Sequence[protocols.Message]:
        return _posed(task)

    async def score(task: protocols.Task, output: str, _: toolbox.Toolbox) -> dialogue.Verdict:
        given, accepted = question.final_answer(output), accepted_answers(task)
        metrics = {"em": exact_match(given, accepted), "f1": f1(given, accepted)}
        return dialogue.Verdict(metrics[match], metrics)

    def demonstrate(task: protocols.Task) -> Sequence[protocols.Message]:
        return _demonstrated(task, tools, system)

    return dialogue.Dialogue(tools, pose, score, system=system, demonstrate=demonstrate)


def _posed(task: protocols.Task) -> list[protocols.Message]:
    prompt = task.payload["prompt"]
    if isinstance(prompt, str):
        return [protocols.Message("user", prompt)]
    return [protocols.Message(item["role"], item["content"]) for item in prompt]


def _demonstrated(task: protocols.Task, tools: toolkit.Toolkit, system: str) -> list[protocols.Message]:
    """Returns a dialogue of the lookups and the answer.

    Raises:
      ConfigError: The tasks have no lookups, or the system message describes the tools.
    """
    lookups = task.payload.get("lookups")
    config.check(
        lookups is not None,
        "warm_start.steps",
        f"task {task.prompt_id} has no lookups to demonstrate; set it to 0, or take tasks that do, such as those of "
        "libra_jax.agents.environments.acquaintances",
    )
    config.check(not tools.describe, "tools.describe", "must be False for a warm start: demonstrations describe none")
    messages = [protocols.Message("system", system)] if system else []
    messages += _posed(task)
    for query, passage in lookups or ():
        messages.append(protocols.Message("assistant", tools.format.write(TOOL, {"query": query})))
        messages.append(protocols.Message("tool", passage))
    return [*messages, protocols.Message("assistant", accepted_answers(task)[0])]
