"""Questions with a known answer from files of tasks, answered directly or with a calculator."""

from __future__ import annotations

import fractions
import re
from collections.abc import Sequence

from libra_jax import config, protocols
from libra_jax.agents import arithmetic

MAX_CHARACTERS = 120
"""Longest expression in characters that the calculator accepts here."""

CALCULATOR_HINT = (
    "You can use a calculator: end your message with <tool_call>EXPRESSION</tool_call>, where EXPRESSION is made of "
    "numbers, + - * / ** and parentheses, and its value is returned to you. Give the answer in your last message."
)

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
# Bounded repetitions, so that a huge number in an output costs little.
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]{0,60}(?:\.\d{1,60})?(?:/\d{1,60})?")


def final_answer(output: str) -> str:
    """Returns an output's answer: its last `<answer>` or `\\boxed{}` content, or else its text after `</think>`."""
    text = output.rpartition("</think>")[2]
    marked = _TAGGED.findall(text) or _BOXED.findall(text)
    return str(marked[-1] if marked else text).strip()


def last_number(text: str) -> fractions.Fraction | None:
    """Returns the last number of a text, without thousands separators. None if the text has no number."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return fractions.Fraction(found[-1].replace(",", ""))
    except ZeroDivisionError:
        return None


class QuestionEnvironment:
    """The environment of one rollout. The first output that calls no tool is the answer."""

    def __init__(self, match: str, calculator: bool, system: str) -> None:
        config.check_choice(match, ("exact", "numeric"), "task.environment_arguments.match")
        self._match = match
        self._calculator = calculator
        self._system = system or (CALCULATOR_HINT if calculator else "")
        self._answer: str | list[str] | None = None
        self.running_tool = arithmetic.TOOL if calculator else ""

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Returns the system message, if any, and the question."""
        self._answer = task.payload["answer"]
        prompt = task.payload["prompt"]
        system = [protocols.Message("system", self._system)] if self._system else []
        if isinstance(prompt, str):
            return [*system, protocols.Message("user", prompt)]
        return [*system, *(protocols.Message(item["role"], item["content"]) for item in prompt)]

    async def step(self, output: str) -> protocols.StepResult:
        """Runs the calculator if the output calls it. Otherwise scores the answer."""
        if self._answer is None:
            raise RuntimeError("step before reset")
        if self._calculator:
            tool_return = arithmetic.answer_call(output, MAX_CHARACTERS)
            if tool_return is not None:
                return protocols.StepResult(tool_returns=[tool_return])
        return protocols.StepResult(done=True, reward=self._score(final_answer(output), self._answer))

    async def close(self) -> None:
        """Does nothing, because the environment holds no resource."""

    def _score(self, given: str, expected: str | list[str]) -> float:
        if isinstance(expected, list):  # a list holds several accepted answers
            return max(self._score(given, item) for item in expected)
        if self._match == "exact":
            return float(given == expected.strip())
        number = last_number(given)
        return float(number is not None and number == last_number(expected))


def environment(match: str = "exact", calculator: bool = False, system: str = "") -> QuestionEnvironment:
    """Returns the environment for one rollout.

    Args:
      match: How the answer is compared: as "exact" text, or "numeric" (the last number of both texts).
      calculator: Whether the policy may call the calculator before it answers.
      system: System message. Empty means none, or with the calculator a hint on how to call it.

    Raises:
      ConfigError: `match` is neither.
    """
    return QuestionEnvironment(match, calculator, system)
