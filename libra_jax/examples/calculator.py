"""The calculator: arithmetic that cannot be guessed and is easy with a tool.

The prompt is an expression. The policy calls `<tool_call>EXPRESSION</tool_call>`, reads the tool's return, and answers
with the value. If the tool failed (division by zero, or an expression that is too long), the right answer is "error".
The reward is 1 for an exact match, otherwise 0.

In stepwise mode, the tool does one operation per call. While several operations are left, it returns the remaining
expression under the name of the simplifier. Then several calls lead to the answer, and each return tells how much is
still to be generated.

A character model of half a million parameters can learn this on a CPU. Dialogues stay below 100 characters, and prompts
and tool returns are padded with spaces to fixed widths. So the copied text lies at a constant distance, and copying is
learned in a fraction of the steps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import question
from libra_jax.rewards import answers
from libra_jax.rollouts import splits
from libra_jax.tools import arithmetic

_CYCLE = 16
# A: three digits, B: two digits, D: one digit above 1, E: a multiple of the B that follows it.
_PATTERNS = {
    "plain": ("A+A", "A-A", "A*B", "E/B", "A*D"),
    "mixed": ("A+B*D", "(A+B)*D", "A*(B-D)", "A-(B+A)", "(A-D)*B"),
    "nested": ("(A-B)*(B+D)", "((A+B)*D)-A", "A-(B*(D+B))", "(A+(B-D))*B", "(E/B)+A"),
}
_BY_ZERO = ("A/0", "A/(B-B)", "B*(A/0)")
_OVERLONG = ("A*A+A*A+A", "(A+A)*A-A*B")


def _draw(pattern: str, rng: random.Random) -> str:
    """Returns an expression of the pattern's shape. The two-digit numbers of "(B-B)" are equal."""
    divisor = rng.randint(11, 99)
    same = str(rng.randint(10, 99))
    pieces = []
    # S is drawn once and E is a multiple of V: so B-B is zero, and a quotient is whole.
    for letter in pattern.replace("(B-B)", "(S-S)").replace("E/B", "E/V"):
        if letter == "A":
            pieces.append(str(rng.randint(101, 999)))
        elif letter == "B":
            pieces.append(str(rng.randint(10, 99)))
        elif letter == "D":
            pieces.append(str(rng.randint(2, 9)))
        elif letter == "E":
            pieces.append(str(divisor * rng.randint(101, 999)))
        elif letter == "V":
            pieces.append(str(divisor))
        else:
            pieces.append(same if letter == "S" else letter)
    return "".join(pieces)


def task_source(
    path: str = "",
    seed: int = 0,
    levels: Sequence[str] = tuple(_PATTERNS),
    max_characters: int = 16,
    period: int = 0,
    phases: Sequence[tuple[str, int]] = (),
    phase_tasks: int = 0,
) -> splits.Tasks:
    """Returns procedurally generated arithmetic tasks. Training and evaluation never share an expression.

    Each 16 consecutive tasks have the same mix: 15 solvable patterns in turn, and one failure. The failures alternate
    between a division by zero and an overlong expression. With phases, training tasks drift: `phase_tasks` of one phase
    are followed by those of the next, in a cycle. Held-out tasks go through all phases in turn.

    Args:
      path: Must be empty.
      seed: Seed of the training stream. The held-out stream is the same for all seeds.
      levels: Levels to draw from: "plain", "mixed" and "nested".
      max_characters: Longest expression that the tool accepts (16 to 18).
      period: Number of training tasks after which the same expressions repeat, under new prompt ids. 0: never. With a
        period, success rates of prompts are known (`algorithm.budget`, `task.order`).
      phases: Pairs (level, characters before the expression) that training tasks cycle through. They form a curriculum
        whose dialogues change their length. If given, `levels` is ignored.
      phase_tasks: Number of training tasks per phase.
    """
    source, field = "set task.source to libra_jax.environments.datasets:task_source", "task.arguments"
    config_lib.check(not path, "task.path", f"the calculator reads no file; {source}")
    drift = [(str(level), int(preamble)) for level, preamble in phases]
    for name, named in (("levels", list(levels)), ("phases", [level for level, _ in drift] or list(levels))):
        good = bool(named) and set(named) <= set(_PATTERNS)
        config_lib.check(good, f"{field}.{name}", f"{named!r} must name some of {', '.join(_PATTERNS)}")
    good = not drift or phase_tasks > 0
    config_lib.check(good, f"{field}.phase_tasks", f"{phase_tasks} must be positive where there are phases")
    config_lib.check(
        16 <= max_characters <= 18,
        f"{field}.max_characters",
        f"{max_characters} must lie in 16..18, so that the solvable expressions fit and the overlong ones do not",
    )
    config_lib.check(period >= 0, f"{field}.period", f"{period} must be 0 (never) or more")
    patterns = [pattern for level in levels for pattern in _PATTERNS[level]]

    def make(split: str, seed: int, index: int) -> protocols.Task:
        training = split == "train"
        # Held-out tasks never repeat, because an evaluation must not weigh some of them twice.
        place = index % period if period and training else index
        rng = splits.generator("calculator", seed, split, place)
        preamble, solvable = 0, patterns
        if drift:
            level, preamble = drift[(place // phase_tasks if training else place) % len(drift)]
            solvable = list(_PATTERNS[level])
        cycle, slot = divmod(place, _CYCLE)
        if slot == _CYCLE - 1:
            pattern = rng.choice(_OVERLONG if cycle % 2 else _BY_ZERO)
        else:
            pattern = solvable[(cycle * (_CYCLE - 1) + slot) % len(solvable)]
        # Redraws until the expression falls on the wanted side of the held-out split.
        while splits.held_out(expression := _draw(pattern, rng)) == training:
            pass
        tool_return = arithmetic.carry_out(expression, max_characters)
        answer = tool_return.content if tool_return.status == "success" else arithmetic.FAILED
        payload = {"expression": expression, "answer": answer, "max_characters": max_characters}
        payload = {**payload, "preamble": preamble} if preamble else payload
        first = "" if place == index else f"calculator-{split}-{place}"
        return protocols.Task(f"calculator-{split}-{index}", payload, repeats=first)

    return _Table(seed, make, period) if period else splits.Tasks(seed, make)


@dataclass(frozen=True)
class _Table(splits.Tasks):
    """Tasks whose training stream repeats after `period` tasks."""

    period: int

    def __len__(self) -> int:
        return self.period


@dataclass
class CalculatorEnvironment:
    """The environment of one rollout. Also demonstrates solved rollouts.

    Attributes:
      system: System message, for pretrained models that need instructions. Empty means none.
      delay: Seconds that each tool call takes.
      prompt_width: Characters to which prompts are padded with spaces. 0 suits pretrained models.
      return_width: Characters to which tool returns are padded with spaces. 0 suits pretrained models.
      stepwise: Do one operation per call. Set `return_width` to `prompt_width`, because expressions are returned.
    """

    system: str = ""
    delay: float = 0.0
    prompt_width: int = 20
    return_width: int = 8
    stepwise: bool = False
    _task: protocols.Task | None = field(default=None, init=False)
    running_tool: ClassVar[str] = arithmetic.TOOL

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Returns the expression, after the system message if there is one."""
        self._task = task
        return self._opening(task)

    async def step(self, output: str) -> protocols.StepResult:
        """Runs the calculator if the output calls it. Otherwise scores the output as the answer."""
        if self._task is None:
            raise RuntimeError("step before reset")
        payload = self._task.payload
        tool_return = arithmetic.answer_call(output, payload["max_characters"], stepwise=self.stepwise)
        if tool_return is None:
            return protocols.StepResult(done=True, reward=float(answers.final(output) == payload["answer"]))
        if self.delay > 0:
            await asyncio.sleep(self.delay)
        content = tool_return.content.ljust(self.return_width)
        return protocols.StepResult(tool_returns=[dataclasses.replace(tool_return, content=content)])

    async def close(self) -> None:
        """Does nothing, because the environment holds no resource."""

    def demonstration(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Returns the solved dialogue: the expression, the calls with their returns, and the answer."""
        messages, expression = self._opening(task), task.payload["expression"]
        while True:
            call = expression
            answer = arithmetic.carry_out(call, task.payload["max_characters"], stepwise=self.stepwise)
            expression = answer.content
            messages += [
                protocols.Message("assistant", f"<tool_call>{call}</tool_call>"),
                protocols.Message("tool", expression.ljust(self.return_width)),
            ]
            # The simplifier returns what is left to do, and the calculator itself the value.
            if answer.tool == arithmetic.TOOL:
                return [*messages, protocols.Message("assistant", task.payload["answer"])]

    def _opening(self, task: protocols.Task) -> list[protocols.Message]:
        preamble = self.system or " " * task.payload.get("preamble", 0)
        return question.opening(task.payload["expression"].ljust(self.prompt_width), preamble)


environment = CalculatorEnvironment
"""Factory that configs name."""
