"""Questions with a known answer from files of tasks, answered directly or with a calculator."""

from __future__ import annotations

import fractions
import re
from collections.abc import Mapping, Sequence

from libra_jax import config, protocols
from libra_jax.agents import arithmetic

MAX_CHARACTERS = 120
"""Longest expression in characters that the calculator accepts here."""

CALCULATOR_HINT = (
    "You can use a calculator: end your message with <tool_call>EXPRESSION</tool_call>, where EXPRESSION is made of "
    "numbers, + - * / ** and parentheses, and its value is returned to you. Give the answer in your last message."
)

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
# Bounded repetitions, so that a huge number in an output costs little.
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]{0,60}(?:\.\d{1,60})?(?:/\d{1,60})?")


def opening(prompt: str | Sequence[Mapping[str, str]], system: str = "") -> list[protocols.Message]:
    """Returns the first messages of a dialogue.

    Args:
      prompt: Text of the user's message, or messages with "role" and "content".
      system: System message. Empty means none.
    """
    posed = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    before = [protocols.Message("system", system)] if system else []
    return [*before, *(protocols.Message(item["role"], item["content"]) for item in posed)]


def final_answer(output: str) -> str:
    """Returns an output's answer: its last `<answer>` or `\\boxed{}` content, or else its text after `</think>`."""
    text = output.rpartition("</think>")[2]
    marked = TAGGED.findall(text) or _BOXED.findall(text)
    return str(marked[-1] if marked else text).strip()


def accepted_answers(task: protocols.Task) -> list[str]:
    """Returns all texts that answer a task: its `answer`, which is one text or a list of texts."""
    answer = task.payload["answer"]
    return [answer] if isinstance(answer, str) else list(answer)


def last_number(text: str) -> fractions.Fraction | None:
    """Returns the last number of a text, without thousands separators. None if the text has no number."""
    found = _NUMBER.findall(text)
    try:
        return fractions.Fraction(found[-1].replace(",", "")) if found else None
    except ZeroDivisionError:  # the pattern also takes fractions, such as 1/0
        return None


class QuestionEnvironment:
    """The environment of one rollout. The first output that calls no tool is the answer.

    Args:
      match: How the answer is compared: as "exact" text, or "numeric" (the last number of both texts).
      calculator: Whether the policy may call the calculator before it answers.
      system: System message. Empty means none, or with the calculator a hint on how to call it.

    Raises:
      ConfigError: `match` is neither.
    """

    def __init__(self, match: str = "exact", calculator: bool = False, system: str = "") -> None:
        config.check_choice(match, ("exact", "numeric"), "task.environment_arguments.match")
        self._match = match
        self._calculator = calculator
        self._system = system or (CALCULATOR_HINT if calculator else "")
        self._accepted: list[str] = []
        self.running_tool = arithmetic.TOOL if calculator else ""

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Returns the system message, if any, and the question."""
        self._accepted = accepted_answers(task)
        return opening(task.payload["prompt"], self._system)

    async def step(self, output: str) -> protocols.StepResult:
        """Runs the calculator if the output calls it. Otherwise scores the answer."""
        if not self._accepted:
            raise RuntimeError("step before reset")
        tool_return = arithmetic.answer_call(output, MAX_CHARACTERS) if self._calculator else None
        if tool_return is not None:
            return protocols.StepResult(tool_returns=[tool_return])
        given = final_answer(output)
        if self._match == "exact":
            right = given in (text.strip() for text in self._accepted)
        else:
            number = last_number(given)
            right = number is not None and number in map(last_number, self._accepted)
        return protocols.StepResult(done=True, reward=float(right))

    async def close(self) -> None:
        """Does nothing, because the environment holds no resource."""


environment = QuestionEnvironment
"""Factory that configs name."""
