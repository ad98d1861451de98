r"""Mathematics: a problem, optional tools from `config.tools`, and an answer that `math-verify` compares.

The answer is the text in `<answer>` or `\boxed{}` of the last output, or otherwise its last expression. Thoughts are
ignored. An answer is right if it equals an accepted answer mathematically: `\frac{1}{2}`, `0.5` and `1/2`
are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import thoughts
from libra_jax.environments import dialogue, question, verifier
from libra_jax.rewards import answers
from libra_jax.tools import toolbox, toolkit

LONGEST = 2000
"""Number of characters at the end of an output without a mark in which an answer is searched."""

_MOST_BOXES = 16
"""Number of boxes that may make up one answer."""

_PERCENT = re.compile(r"(?:[\s$]|\\[)\]])*(?:\\?%|[Pp](?:er)?ct|[Pp]ercent)")
_BETWEEN = re.compile(
    r"(?:[\s$,;]|\\[()\[\]]|\\q?quad|(?:\\text\{\s*)?(?:and|or)\b(?:\s*\})?)*\\(?:boxed|fbox)\s*\{", re.ASCII
)


def given_answer(output: str) -> str:
    """Returns the part of an output that holds its answer, in the form that `math-verify` reads best.

    Boxes with nothing but a comma, "and" or "or" between them are one answer. `math-verify` itself would join others,
    too, and would prefer the words "the final answer is" to a box.
    """
    text = thoughts.split(output).answer
    tagged = answers.tagged(text)
    text = text if tagged is None else tagged.strip()
    boxes = answers.boxes(text)[-_MOST_BOXES:]
    if not boxes:
        return text[-LONGEST:] if tagged is None else _marked(text)
    first = len(boxes) - 1
    while first and _BETWEEN.fullmatch(text, boxes[first - 1][1] + 1, boxes[first][0]):
        first -= 1
    joined = ", ".join(text[slice(*box)] for box in boxes[first:])
    percent = "\\%" if _PERCENT.match(text, boxes[-1][1] + 1) else ""
    return f"\\boxed{{{joined}{percent}}}"


def _marked(text: str) -> str:
    r"""Returns the text in `\boxed{}`, unless it has a mark already. Without a mark, LaTeX is not recognised."""
    # The end of a long text, because an answer stands last.
    text = text.strip()[-LONGEST:]
    return text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"


@dataclass(frozen=True)
class _Judge:
    """Poses the problems of one run, and compares the answers. `environment` documents the fields."""

    tools: toolkit.Toolkit
    system: str
    processes: int
    seconds: float

    async def pose(self, task: protocols.Task, box: toolbox.Toolbox) -> Sequence[protocols.Message]:
        """Returns the problem.

        Also starts the verifier if needed: a start takes seconds, and scoring has too few to spare.
        """
        del box
        await self._checker()
        return question.opening(task.payload["prompt"])

    async def verdict(self, task: protocols.Task, output: str, box: toolbox.Toolbox) -> dialogue.Verdict:
        """Returns reward 1 for a right answer, otherwise 0."""
        del box
        accepted = [text.strip() for text in answers.accepted(task.payload)]
        answer = answers.final(output)
        value = answers.number(answer)
        # Equal texts and equal numbers are equal answers. Only math-verify tells a list from a decimal comma.
        if answers.equal(answer, task.payload) or (value is not None and value in map(answers.number, accepted)):
            return dialogue.Verdict(1.0, {"answer_read": 1.0, "answer_overran": 0.0})
        checker = await self._checker()
        finding = await checker.check(given_answer(output), [_marked(text) for text in accepted])
        metrics = {"answer_read": float(finding.read), "answer_overran": float(finding.overran)}
        return dialogue.Verdict(float(finding.right), metrics)

    async def _checker(self) -> verifier.Verifier:
        # Half of a step's time is for the comparison. The other half is for the wait for a free process.
        wall_seconds = min(verifier.WALL_SECONDS, self.tools.call_seconds / 2)
        key = (verifier.Verifier, self.processes, self.seconds)
        return await self.tools.open_once(key, lambda: verifier.Verifier(self.processes, self.seconds, wall_seconds))

    def demonstration(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Turns a task's `worked` calls into a solved dialogue.

        Each call is {"tool": name, "arguments": {...}, "returned": text}.
        """
        worked: Sequence[Mapping[str, Any]] | None = task.payload.get("worked")
        if worked is None:
            raise protocols.DataError(
                f"task {task.prompt_id}: has no worked solution (`worked` in its payload) to demonstrate; set "
                "warm_start.steps to 0"
            )
        return dialogue.solved(
            question.opening(task.payload["prompt"], self.tools.system_message(self.system)),
            [(self.tools.format.write(call["tool"], call["arguments"]), call["returned"]) for call in worked],
            answers.accepted(task.payload)[0].strip(),
        )


def environment(
    tools: toolkit.Toolkit, system: str = "", processes: int = 2, seconds: float = 4.0
) -> dialogue.Dialogue:
    """Returns the environment for one rollout.

    A payload has a `prompt` and an `answer` (one text, or a list of texts that are all right).

    Args:
      tools: Tools that the policy may call before it answers (`config.tools`). Without tools, its first output is the
        answer.
      system: System message, put before the description of the tools. Empty means none.
      processes: Number of processes that compare the answers of all rollouts.
      seconds: Processor seconds that one comparison may take. An answer that takes longer, or longer than half of a
        step's wall-clock time, is wrong, and `answer_overran` counts it.
    """
    verifier.check_installed()
    field = "task.environment_arguments"
    valid_processes = isinstance(processes, int) and not isinstance(processes, bool) and processes > 0
    config_lib.check(valid_processes, f"{field}.processes", f"must be a positive whole number, not {processes!r}")
    max_seconds = verifier.WALL_SECONDS / 2
    valid_seconds = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= max_seconds
    config_lib.check(
        valid_seconds, f"{field}.seconds", f"must lie above 0 and at most at {max_seconds:g}, not {seconds!r}"
    )
    judge = _Judge(tools, system, processes, seconds)
    return dialogue.Dialogue(tools, judge.pose, judge.verdict, system=system, demonstrate=judge.demonstration)
