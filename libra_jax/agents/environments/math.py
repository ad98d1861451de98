r"""Mathematics: a problem, tools if `config.tools` names some, and an answer that `math-verify` compares.

The answer is what the last output has in `<answer>` or `\boxed{}`, else the last expression in it; nothing inside of
`<think>` counts. It is right if it equals one of the accepted answers as mathematics: `\frac{1}{2}`, `0.5` and `1/2`
are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax import protocols
from libra_jax.agents import question
from libra_jax.agents.environments import dialogue, verifier
from libra_jax.agents.tools import toolbox, toolkit

LONGEST = 2000
"""Characters at the end of an output in which an answer is looked for."""

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def given_answer(output: str) -> str:
    """The part of an output that holds its answer, as `math-verify` reads it best."""
    text = output.rpartition("</think>")[2]
    marked = _TAGGED.findall(text)
    return _marked(marked[-1]) if marked else text[-LONGEST:]


def _marked(text: str) -> str:
    r"""The text in `\boxed{}`: outside of some mark, LaTeX is not seen as such."""
    text = text.strip()[-LONGEST:]
    return text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"


class _Judge:
    """Compares the answers of one run's attempts.

    Args:
      tools: the run's tools, which keep the verifier.
      processes: see `verifier.Verifier`.
      seconds: see `verifier.Verifier`.
    """

    def __init__(self, tools: toolkit.Toolkit, processes: int, seconds: float) -> None:
        self._tools, self._processes, self._seconds = tools, processes, seconds

    async def pose(self, task: protocols.Task, box: toolbox.Toolbox) -> Sequence[protocols.Message]:
        """The problem. The verifier is started here where it is not: that takes seconds, and a step has few."""
        del box
        await self._checker()
        return _messages(task)

    async def verdict(self, task: protocols.Task, output: str, box: toolbox.Toolbox) -> dialogue.Verdict:
        """1 for a right answer, else 0."""
        del box
        accepted = _accepted(task)
        if question.final_answer(output) in accepted:  # the same text is the same answer
            return dialogue.Verdict(1.0, {"answer_read": 1.0, "answer_overran": 0.0})
        checker = await self._checker()
        finding = await checker.check(given_answer(output), [_marked(text) for text in accepted])
        metrics = {"answer_read": float(finding.read), "answer_overran": float(finding.overran)}
        return dialogue.Verdict(float(finding.right), metrics)

    async def _checker(self) -> verifier.Verifier:
        # The other half of a step is for the wait for a process.
        wall_seconds = min(verifier.WALL_SECONDS, self._tools.call_seconds / 2)
        key = (verifier.Verifier, self._processes, self._seconds)
        return await self._tools.kept(key, lambda: verifier.Verifier(self._processes, self._seconds, wall_seconds))


def _accepted(task: protocols.Task) -> Sequence[str]:
    answer = task.payload["answer"]
    return [answer.strip()] if isinstance(answer, str) else [text.strip() for text in answer]


def _messages(task: protocols.Task) -> list[protocols.Message]:
    prompt = task.payload["prompt"]
    if isinstance(prompt, str):
        return [protocols.Message("user", prompt)]
    return [protocols.Message(item["role"], item["content"]) for item in prompt]


class _Demonstrator:
    """Turns a task's `worked` calls into a solved dialogue.

    Each is {"tool": name, "arguments": {...}, "returned": text}.
    """

    def __init__(self, tools: toolkit.Toolkit, system: str) -> None:
        self._tools, self._system = tools, system

    def __call__(self, task: protocols.Task) -> Sequence[protocols.Message]:
        worked: Sequence[Mapping[str, Any]] | None = task.payload.get("worked")
        if worked is None:
            raise protocols.DataError(
                f"task {task.prompt_id}: has no worked solution (`worked` in its payload) to demonstrate; set "
                "warm_start.steps to 0"
            )
        told = self._tools.format.instructions(self._tools.schemas) if self._described() else ""
        system = "\n\n".join(part for part in (self._system, told) if part)
        messages = [*([protocols.Message("system", system)] if system else []), *_messages(task)]
        for call in worked:
            written = self._tools.format.write(call["tool"], call["arguments"])
            messages += [protocols.Message("assistant", written), protocols.Message("tool", call["returned"])]
        return [*messages, protocols.Message("assistant", _accepted(task)[0])]

    def _described(self) -> bool:
        return self._tools.describe and bool(self._tools.schemas)


def environment(
    tools: toolkit.Toolkit, system: str = "", processes: int = 2, seconds: float = 4.0
) -> dialogue.Dialogue:
    """A fresh attempt at a problem: `prompt` and `answer` (a text, or a list of which each is right) in the payload.

    Args:
      tools: what the policy may call before it answers (`config.tools`); none: its first output is the answer.
      system: system message, before the description of the tools; empty is none.
      processes: processes that compare the answers of all attempts.
      seconds: of processor time that comparing one answer may take; past them, or half of a step's time by
        the clock on the wall, it is wrong, and `answer_overran` counts it.

    Raises:
      ConfigError: `math-verify` is not installed, or an argument is out of range.
    """
    verifier.check_installed()
    verifier.check_limits(processes, seconds)
    judge = _Judge(tools, processes, seconds)
    return dialogue.Dialogue(tools, judge.pose, judge.verdict, system=system, demonstrate=_Demonstrator(tools, system))
