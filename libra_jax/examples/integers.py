"""Integer operations in words, for a Python interpreter: "846 xor 357 minus 120".

A problem has one or two operations, applied from left to right. A demonstration calls the tool `python` once per
operation. The interpreter keeps the last value as `_`, so the second call is `_-120`. One problem in 16 asks for the
remainder of a division by zero: the tool fails, and the answer is "error".

A character model of half a million parameters can learn these tasks on a CPU, like those of the calculator. All numbers
and results have three digits, and words are padded with spaces. So the copied text lies at a constant distance. A
random guess is right once in 900 rollouts.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping, Sequence

from libra_jax import config as config_lib
from libra_jax.rollouts import splits

TOOL = "python"
FAILED = "error"
"""Answer to a problem that has no result."""

WIDTH = 24
"""Number of characters to which prompts are padded with spaces."""

_CYCLE = 16
_LEAST, _MOST = 100, 999
_REMAINDER = "mod"
_OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", operator.add),
    "minus": ("-", operator.sub),
    "xor": ("^", operator.xor),
    "or": ("|", operator.or_),
    "and": ("&", operator.and_),
    _REMAINDER: ("%", operator.mod),
}
_LONGEST_WORD = max(map(len, _OPERATIONS))


def _draw(index: int, rng: random.Random, steps: Sequence[int], width: int) -> tuple[str, Mapping[str, object]]:
    """Draws a problem. Returns its text, and a payload with the calls that solve it."""
    value = rng.randint(_LEAST, _MOST)
    words = [str(value)]
    worked: list[tuple[str, str]] = []
    if index % _CYCLE == _CYCLE - 1:
        words += [_REMAINDER.ljust(_LONGEST_WORD), "000"]
        code, answer = f"{value}%000", FAILED
        # What Python 3.11 prints in a sandbox. Other versions draw other marks below the code.
        marks = " " + "~" * code.index("%") + "^" + "~" * len(code.partition("%")[2])
        printed = (
            f'Traceback (most recent call last):\n  File "<python 1>", line 1, in <module>\n    {code}\n    {marks}\n'
            "ZeroDivisionError: integer modulo by zero\n"
        )
        worked.append((code, printed))
    else:
        before = str(value)
        for _ in range(steps[index % len(steps)]):
            while True:
                word, operand = rng.choice(tuple(_OPERATIONS)), rng.randint(_LEAST, _MOST)
                result = _OPERATIONS[word][1](value, operand)
                # Three digits keep the width. A number modulo a larger one is the number itself, which needs no tool.
                if _LEAST <= result <= _MOST and (word != _REMAINDER or operand <= value):
                    break
            value = result
            # Padded, so that the next number stands at the same distance from every word.
            words += [word.ljust(_LONGEST_WORD), str(operand)]
            worked.append((f"{before}{_OPERATIONS[word][0]}{operand}", f"{value}\n"))
            before = "_"  # the interpreter's name for the last value
        answer = str(value)
    prompt = " ".join(words)
    calls = [{"tool": TOOL, "arguments": {"code": code}, "returned": returned} for code, returned in worked]
    return prompt.strip(), {"prompt": prompt.ljust(width), "answer": answer, "worked": calls}


def task_source(path: str = "", seed: int = 0, steps: Sequence[int] = (1, 2), width: int = WIDTH) -> splits.Tasks:
    """Returns generated problems for the environment `math`.

    Args:
      path: Must be empty.
      seed: Seed of the training stream.
      steps: Numbers of operations per problem, taken in turn. Each is 1 to 4.
      width: Number of characters to which prompts are padded. 0 suits pretrained models.
    """
    config_lib.check(
        not path,
        "task.path",
        "is for files, and these problems are generated; libra_jax.environments.datasets:task_source reads one",
    )
    good = bool(steps) and all(isinstance(count, int) and 1 <= count <= 4 for count in steps)
    config_lib.check(good, "task.arguments.steps", f"{steps!r} must hold whole numbers from 1 to 4")
    config_lib.check(
        isinstance(width, int) and width >= 0, "task.arguments.width", f"must not be negative, not {width!r}"
    )
    return splits.generated("integers", seed, lambda index, rng: _draw(index, rng, tuple(steps), width))
