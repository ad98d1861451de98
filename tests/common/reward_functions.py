"""Reward functions of the tests, by factories as a config names them: good ones, and every kind of bad one."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import re
import signal
import threading
import time
from typing import Any

CALLS: list[tuple[str, str]] = []
"""What `counting` was asked: prompt and text."""

RELEASE = threading.Event()
"""Ends what hangs on a thread, so that no test leaves one behind."""


def let_go():
    """Ends what hangs, and sees that every thread of the rewards does."""
    RELEASE.set()
    deadline = time.monotonic() + 10
    while left := [t.name for t in threading.enumerate() if t.name in ("libra-rewards", "libra-off-loop")]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.01)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


NONSENSE: dict[str, Any] = {
    "text": "correct",
    "none": None,
    "nan": math.nan,
    "infinite": -math.inf,
    "huge": 10**400,
    "list": [1.0],
    "unprintable": Unprintable(),
    "metric": (1.0, {"f1": "high"}),
    "metrics": (1.0, [("f1", 1.0)]),
}


def constant(value=1.0):
    return lambda task, text: value


def recorded():
    """A factory that leaves a trace in its process."""
    CALLS.append(("made", ""))
    return constant()


def ending():
    os._exit(3)


def loading():
    """A factory that takes long."""
    time.sleep(3600)


def giving(kind):
    return lambda task, text: NONSENSE.get(kind, 0.5)


def share_of(letter):
    """The share of a letter in the text, and how often it is there."""

    def score(task, text):
        return text.count(letter) / max(len(text), 1), {"count": text.count(letter)}

    return score


def dialogue():
    def score(task, transcript):
        return len(transcript.messages) + (transcript.answer == "408") / 2

    return score


def reported(metric):
    return lambda task, transcript: transcript.metrics[metric]


def later(seconds=0.0):
    async def score(task, text):
        await asyncio.sleep(seconds)
        return float(len(text))

    return score


def rising():
    """Every call is worth one more than the call before."""
    calls = itertools.count(1)
    return lambda task, text: float(next(calls))


class Object:
    """A function that is an object, async, and closed."""

    closed = 0

    async def __call__(self, task, text):
        return 3.0

    async def close(self):
        type(self).closed += 1


def meddling():
    """Counts its calls in the task and in the transcript, as if these were its own."""

    def score(task, transcript):
        task.payload["seen"] = task.payload.get("seen", 0) + 1
        task.payload["answer"].pop()
        transcript.metrics["seen"] = transcript.metrics.get("seen", 0.0) + 1.0
        return task.payload["seen"] + transcript.metrics["seen"] + len(task.payload["answer"])

    return score


def counting(factor=1.0):
    def score(task, text):
        CALLS.append((task.prompt_id, text))
        return factor * len(text)

    return score


def varying():
    """Each call has another value than the one before."""
    calls = itertools.count()
    return lambda task, text: float(next(calls) % 5)


def failing(times=10**9):
    """Fails so many times, then answers."""
    left = [times]

    def score(task, text):
        if left[0]:
            left[0] -= 1
            raise ZeroDivisionError("oops")
        return 1.0

    return score


def leaving():
    def score(task, text):
        raise SystemExit(3)

    return score


def leaving_later():
    async def score(task, text):
        raise SystemExit(3)

    return score


def exits_in_the_background():
    """Starts a task that exits, waits for the text `wait`, and gives 0.75."""

    async def task_body():
        raise SystemExit(3)

    async def score(task, text):
        if text == "wait":
            await asyncio.sleep(0.2)
        else:
            score.task = asyncio.ensure_future(task_body())
        return 0.75

    return score


def cancelled():
    async def score(task, text):
        raise asyncio.CancelledError

    return score


def hanging(prompts=None):
    """A plain function that hangs, for these prompts (None: all)."""

    def score(task, text):
        if prompts is None or task.prompt_id in prompts:
            RELEASE.wait(60)
        return 0.25

    return score


def waiting():
    async def score(task, text):
        await asyncio.Event().wait()

    return score


def blocking(prompts):
    """An async function that blocks its event loop, as one does that calls what is not async."""

    async def score(task, text):
        if task.prompt_id in prompts:
            RELEASE.wait(60)
        return 0.5

    return score


def killing(text_of_death="poison", seconds=0.05):
    """Kills its process for one text, and takes a while for others."""

    def score(task, text):
        if text == text_of_death:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)
        return float(os.getpid())

    return score


def matching(pattern=r"(a+)+$"):
    """The number of its process, once a harmless-looking pattern is matched, which holds the interpreter's lock."""
    compiled = re.compile(pattern)

    def score(task, text):
        compiled.match(text)
        return float(os.getpid())

    return score


def nothing():
    return None


def of_one_argument():
    return lambda text: 1.0


def straight(task, text):
    return 1.0


def refusing():
    raise RuntimeError("no licence")


def exiting():
    """A function that ends its process when it is called."""

    def score(task, text):
        os._exit(4)

    return score
