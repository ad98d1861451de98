"""Degenerate outputs: whatever reads an output takes time that grows with its length, and not with its square."""

import asyncio
import threading
import time

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import formats, thoughts
from libra_jax.environments import episodes, math, question, search_qa
from libra_jax.rewards import judge
from libra_jax.rollouts import deadline_environment, loop, tool_results
from libra_jax.tools import arithmetic, toolkit

SCHEMAS = [{"function": {"name": "search", "parameters": {"properties": {"q": {"type": "string"}}, "required": ["q"]}}}]
UNITS = (
    *(
        "<answer>",
        "</answer>",
        "<answer></answer>",
        "\\boxed{",
        "\\boxed ",
        "\\fbox{}",
        "\\boxed{1}, ",
        "{",
        "}",
        "\\{",
    ),
    *("<think>", "</think>", "<think></think>", "<tool_call>", "</tool_call>", "<tool_call></tool_call>", "<search>"),
    *(
        '{"a": ',
        '{"',
        '{"score": 1} ',
        '<tool_call>{"x</tool_call>',
        '<tool_call>{"' + "<tool_call></tool_call>" * 16,
        "<search><q></search>",
        "</q>",
    ),
    *(
        "1",
        "1,",
        "1e",
        "1 ",
        "10^",
        "1\\,",
        "\\frac{1",
        "\\frac",
        "1\\times",
        "-",
        "a ",
        "the ",
        " ",
        "\n",
        "$",
        "Error ",
        "é",
    ),
)


def graded(match):
    async def grade(text):
        environment = question.environment(match=match)
        await environment.reset(protocols.Task("t", {"prompt": "?", "answer": "42"}))
        await environment.step(text)

    return lambda text: asyncio.run(grade(text))


def called(style):
    def read(text):
        parser = formats.named(style).parser(SCHEMAS)
        parser.feed(text)
        parser.finish()

    return read


READERS = {
    "exact": graded("exact"),
    "numeric": graded("numeric"),
    "math": math.given_answer,
    "search_qa": lambda text: search_qa.scores(text, ["the answer", text[:50]]),
    "final move": lambda text: episodes.move(text, "final"),
    "whole move": lambda text: episodes.move(text, "whole"),
    "calculator": lambda text: arithmetic.answer_call(text, 120),
    "thoughts": thoughts.split,
    "hermes": called("hermes"),
    "tags": called("tags"),
    "judge": lambda text: judge.read_score(text),
    "return": lambda text: (tool_results.status(None, protocols.Message("tool", text)), tool_results.error(text)),
}
SHORT, LONGER = 8_000, 16
"""Characters of the shorter output, and how many times as long the longer one is."""

SHORT_OF_MARKS = 46_000
"""Characters of Hermes' shorter output of marks: what copies the rest at each mark is quick until the rest is long."""

FLOOR_SECONDS, MOST_GROWTH = 0.05, 4 * LONGER
"""Linear readers grow by `LONGER`, quadratic ones by its square. What takes no time at all is not compared."""


def seconds(read, text, times):
    found = []
    for _ in range(times):
        began = time.process_time()
        read(text)
        found.append(time.process_time() - began)
    return min(found)


@pytest.mark.parametrize("name", list(READERS))
def test_time_grows_with_the_length_of_an_output(name):
    read, slow = READERS[name], []
    for unit in UNITS:
        short = unit * ((SHORT_OF_MARKS if name == "hermes" and "<" in unit else SHORT) // len(unit))
        took = seconds(read, short * LONGER, 1)
        # A busy machine may disturb one measurement, so only what looks slow is measured again.
        if took > FLOOR_SECONDS and took > MOST_GROWTH * max(seconds(read, short, 1), 1e-4):
            growth = min(took, seconds(read, short * LONGER, 2)) / max(seconds(read, short, 3), 1e-4)
            slow += [(unit, growth)] if growth > MOST_GROWTH else []
    assert slow == []


@pytest.mark.parametrize(
    ("module", "name", "make"),
    [
        (question, "grade", lambda tools: question.environment()),
        (search_qa, "scores", search_qa.environment),
    ],
)
def test_a_grader_that_hangs_leaves_the_event_loop_and_keeps_the_deadline(module, name, make, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(module, name, lambda *_: release.wait(60), raising=False)

    async def body():
        async with toolkit.Toolkit(config_lib.ToolsConfig(), config_lib.SandboxConfig()) as tools:
            task = protocols.Task("t", {"prompt": "?", "answer": "42"})
            limits = loop.Limits(1, 1, 1, tool_seconds=0.2, temperature=1.0)
            environment = deadline_environment.DeadlineEnvironment(make(tools), task, limits)
            await environment.reset()
            try:
                with pytest.raises(protocols.EnvironmentCrashed, match=r"step took more than 0\.2 s"):
                    await environment.step("42")
            finally:
                release.set()
                await environment.close({})

    asyncio.run(body())
