"""Questions with a known answer from files of tasks, answered directly or with a calculator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import messages
from libra_jax.rewards import answers
from libra_jax.tools import arithmetic
from libra_jax.utils import deadlines

MAX_CHARACTERS = 120
"""Longest expression in characters that the calculator accepts here."""

CALCULATOR_HINT = (
    "You can use a calculator: end your message with <tool_call>EXPRESSION</tool_call>, where EXPRESSION is made of "
    "numbers, + - * / ** and parentheses, and its value is returned to you. Give the answer in your last message."
)


def opening(prompt: str | Sequence[Mapping[str, Any]], system: str = "") -> list[protocols.Message]:
    """Returns the first messages of a dialogue.

    Args:
      prompt: Text of the user's message, or messages as `messages.from_dict` reads them.
      system: System message. Empty means none.
    """
    question = [protocols.Message("user", prompt)] if isinstance(prompt, str) else map(messages.from_dict, prompt)
    return [*([protocols.Message("system", system)] if system else []), *question]


def grade(match: str, output: str, payload: Mapping[str, Any]) -> bool:
    """Returns whether an output answers a task: "exact", or "numeric" by the last numbers of both texts."""
    answer = answers.final(output)
    if match == "exact":
        return answers.equal(answer, payload)
    number = answers.last_number(answer)
    texts = map(answers.last_number, answers.accepted(payload))
    return number is not None and (number in texts or answers.equal_number(number, payload))


class QuestionEnvironment:
    """The environment of one rollout. The first output that calls no tool is the answer.

    Args:
      match: How the answer is compared: as "exact" text (answers that are numbers: by value), or "numeric" (the last
        number of both texts).
      calculator: Whether the policy may call the calculator before it answers.
      system: System message. Empty means none, or with the calculator a hint on how to call it.
    """

    def __init__(self, match: str = "exact", calculator: bool = False, system: str = "") -> None:
        config_lib.check_choice(match, ("exact", "numeric"), "task.environment_arguments.match")
        self._match = match
        self._calculator = calculator
        self._system = system or (CALCULATOR_HINT if calculator else "")
        self._task: protocols.Task | None = None
        self.running_tool = arithmetic.TOOL if calculator else ""

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Returns the system message, if any, and the question."""
        self._task = task
        return opening(task.payload["prompt"], self._system)

    async def step(self, output: str) -> protocols.StepResult:
        """Runs the calculator if the output calls it. Otherwise scores the answer."""
        if self._task is None:
            raise RuntimeError("step before reset")
        tool_return = arithmetic.answer_call(output, MAX_CHARACTERS) if self._calculator else None
        if tool_return is not None:
            return protocols.StepResult(tool_returns=[tool_return])
        right = await deadlines.off_loop(grade, self._match, output, self._task.payload)
        return protocols.StepResult(done=True, reward=float(right))

    async def close(self) -> None:
        """Does nothing, because the environment holds no resource."""


environment = QuestionEnvironment
"""Factory that configs name."""
