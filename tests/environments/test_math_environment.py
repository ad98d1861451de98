"""Mathematics: answers compared by math-verify in processes of their own, whatever the policy answers."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys

import psutil
import pytest
import sandboxes

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import math, verifier
from libra_jax.tools import toolkit

pytest.importorskip("math_verify")

ENDLESS = "\\boxed{9^{9^{9^{9}}}}"


def kit(*tools, call_seconds=50.0, **arguments):
    return toolkit.Toolkit(config_lib.ToolsConfig(use=tools, **arguments), config_lib.SandboxConfig(), call_seconds)


def judged(*cases, call_seconds=50.0, **arguments):
    """The verdicts on (output, answer)."""
    arguments = {"processes": 1, **arguments}  # each process takes seconds to import what it needs

    async def body():
        async with kit(call_seconds=call_seconds) as tools:
            results = []
            for output, answer in cases:
                environment = math.environment(tools, **arguments)
                await environment.reset(protocols.Task("t", {"prompt": "?", "answer": answer}))
                async with asyncio.timeout(call_seconds):
                    results.append(await environment.step(output))
                await environment.close()
            return results

    return asyncio.run(body())


def test_answers_are_compared_as_mathematics():
    right = [
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("So it is \\boxed{1/2}.", "\\frac12"),
        ("<think>\\boxed{7}</think>Answer: 34", "34"),
        ("<answer> 1,024 </answer>", "1024"),
        ("<answer>x^2+2x+1</answer>", "(x+1)^2"),
        ("The answer is $3\\sqrt{2}$", "\\sqrt{18}"),
        ("\\boxed{2}, no: \\boxed{3}", "3"),
        ("\\boxed{\\{1,2\\}}", "\\{2,1\\}"),
        ("7", ["5", "7.0"]),
        ("error", "error"),
    ]
    wrong = [
        ("\\boxed{0.51}", "0.5"),
        ("34", "43"),
        ("", "3"),
        ("I do not know", "3"),
        ("\\boxed{(}", "3"),
        ("34" + " " * math.LONGEST + "so", "34"),
        ("7", ["5", "6"]),
        ("nan", "0"),
    ]
    results = judged(*right, *wrong)
    assert all(result.done for result in results)
    assert [result.reward for result in results] == [1.0] * len(right) + [0.0] * len(wrong)
    assert [result.metrics["answer_read"] for result in results[-6:-4]] == [0.0, 0.0]


def test_an_answer_that_takes_for_ever_to_compare_is_wrong_and_counted():
    first, second = judged((ENDLESS, "3"), ("\\boxed{6/2}", "3"), seconds=0.5, processes=1)
    assert (first.reward, first.metrics["answer_overran"]) == (0.0, 1.0)
    assert (second.reward, second.metrics["answer_overran"]) == (1.0, 0.0)


def test_an_answer_that_takes_longer_than_its_step_has_is_wrong_and_counted_and_no_crash(monkeypatch):
    monkeypatch.setattr(verifier, "_ENOUGH", 0.05)  # whatever else runs here
    (result,) = judged((ENDLESS, "3"), call_seconds=3.0, seconds=30.0, processes=1)
    assert (result.reward, result.metrics["answer_overran"]) == (0.0, 1.0)


@pytest.fixture
def unused(monkeypatch):
    """No process starts, and a comparison fails: an answer that equals an accepted text needs none."""

    async def opened(self):
        pass

    async def refused(*_):
        raise AssertionError("it was compared")

    monkeypatch.setattr(verifier.Verifier, "open", opened)
    monkeypatch.setattr(verifier.Verifier, "check", refused)


@pytest.mark.usefixtures("unused")
def test_a_text_equal_to_the_answer_needs_no_comparison():
    (result,) = judged(("<answer>(2, 3]</answer>", "(2, 3]"))
    assert result.reward == 1.0


# The processes --------------------------------------------------------------------------------------------------------


def workers():
    return [child for child in psutil.Process().children() if any("verifier_worker" in word for word in _words(child))]


def _words(process):
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def test_a_process_that_dies_stands_still_or_is_given_up_is_replaced_and_no_answer_is_mixed_up():
    async def body():
        checker = verifier.Verifier(processes=1, seconds=30.0)
        await checker.open()
        workers()[0].kill()
        with pytest.raises(protocols.EnvironmentCrashed, match="ended with status -9 as it compared one"):
            await checker.check("2", ["3"])
        assert (await checker.check("\\boxed{3}", ["3"])).right
        workers()[0].suspend()
        checker._wall_seconds = 0.5
        with pytest.raises(protocols.EnvironmentCrashed, match=r"stood still for 0\.5 s"):
            await checker.check("2", ["3"])
        checker._wall_seconds = 50.0
        assert (await checker.check("\\boxed{3}", ["3"])).right
        (process,) = workers()
        given_up = asyncio.create_task(checker.check(ENDLESS, ["3"]))
        await asyncio.sleep(0.3)
        given_up.cancel()
        await asyncio.wait([given_up])
        assert given_up.cancelled()
        assert await sandboxes.gone([process]) == []
        assert (await checker.check("\\boxed{3}", ["3"])).right
        await checker.close()
        await checker.close()
        with pytest.raises(protocols.EnvironmentCrashed, match="was closed"):
            await checker.check("2", ["3"])
        assert workers() == []

    asyncio.run(body())


def test_a_reset_starts_the_processes_and_checks_wait_for_one_and_get_their_own_answers():
    async def body():
        async with kit() as tools:
            await math.environment(tools, processes=2).reset(protocols.Task("t", {"prompt": "?", "answer": "1"}))
            assert len(workers()) == 2, "no step waits for them"
            checker = await tools.open_once((verifier.Verifier, 2, 4.0), None)
            findings = await asyncio.gather(*(checker.check(f"\\boxed{{{n}}}", [str(n % 5)]) for n in range(30)))
            assert len(workers()) == 2
            return [finding.right for finding in findings]

    assert asyncio.run(body()) == [n < 5 for n in range(30)]


PARENT = """
import asyncio, os
from libra_jax.environments import verifier

async def body():
    checker = verifier.Verifier()
    await checker.open()
    print(*(process.process.pid for process in checker._live), flush=True)
    await asyncio.sleep(60)

asyncio.run(body())
"""


def test_processes_die_with_their_parent():
    path = os.pathsep.join(place for place in sys.path if place)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        assert parent.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    assert len(processes) == 2
    assert asyncio.run(sandboxes.gone(processes)) == []


def test_a_missing_package_is_a_sentence(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "antlr4" else found(name))
    verifier.check_installed.cache_clear()
    try:
        with pytest.raises(
            protocols.ConfigError, match=r"needs the package math-verify \(there is no antlr4\); install"
        ):
            math.environment(kit())
    finally:
        verifier.check_installed.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"processes": 0}, r"environment_arguments\.processes: must be a positive whole number, not 0"),
        ({"processes": True}, r"environment_arguments\.processes: must be a positive whole number, not True"),
        ({"seconds": 0}, r"environment_arguments\.seconds: must lie above 0 and at most at 30, not 0"),
        ({"seconds": "4"}, r"environment_arguments\.seconds: must lie above 0 and at most at 30, not '4'"),
    ],
)
def test_limits_that_cannot_be_are_refused(arguments, problem):
    with pytest.raises(protocols.ConfigError, match=problem):
        math.environment(kit(), **arguments)


# Tools and demonstrations ---------------------------------------------------------------------------------------------

WORKED = [{"tool": "calculator", "arguments": {"expression": "6*7"}, "returned": "42"}]


@pytest.mark.usefixtures("unused")
@pytest.mark.parametrize("style", ["hermes", "tags"])
@pytest.mark.parametrize("describe", [True, False])
def test_a_demonstration_is_what_the_environment_would_say_and_is_rewarded(style, describe):
    task = protocols.Task("t", {"prompt": "Six by seven?", "answer": ["42", "42.0"], "worked": WORKED})

    async def body():
        async with kit("calculator", format=style, describe=describe) as tools:
            environment = math.environment(tools, system="Compute.", processes=1)
            shown = list(environment.demonstration(task))
            opening = list(await environment.reset(task))
            called, answer = [message.content for message in shown if message.role == "assistant"]
            (returned,) = (await environment.step(called)).tool_returns
            last = await environment.step(answer)
            await environment.close()
            return shown, opening, returned, last

    shown, opening, returned, last = asyncio.run(body())
    assert shown[: len(opening)] == opening
    assert ("calculator" in opening[0].content) == describe
    assert shown[-2] == protocols.Message("tool", returned.content)
    assert last.reward == 1.0


def test_a_task_without_a_worked_solution_says_so_where_a_demonstration_is_asked_for():
    environment = math.environment(kit())
    with pytest.raises(protocols.DataError, match=r"task t: has no worked solution .*warm_start\.steps"):
        environment.demonstration(protocols.Task("t", {"prompt": "?", "answer": "1"}))


@pytest.mark.usefixtures("unused")
def test_a_prompt_of_messages_is_posed_as_it_is():
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]

    async def body():
        async with kit() as tools:
            return await math.environment(tools, processes=1).reset(
                protocols.Task("t", {"prompt": asked, "answer": "1"})
            )

    assert list(asyncio.run(body())) == [protocols.Message("system", "s"), protocols.Message("user", "q")]


# What attempts of a run share -----------------------------------------------------------------------------------------


class Kept:
    """Counts what becomes of it."""

    def __init__(self, log):
        self._log = log
        log.append("made")

    async def open(self):
        await asyncio.sleep(0)
        self._log.append("opened")

    async def close(self):
        self._log.append("closed")


def test_what_environments_share_is_made_once_and_closed_with_the_tools():
    log = []

    async def body():
        async with kit() as tools:
            kept = await asyncio.gather(*(tools.open_once("a", lambda: Kept(log)) for _ in range(3)))
            assert len(set(map(id, kept))) == 1
            assert log == ["made", "opened"]
        assert log == ["made", "opened", "closed"]

    asyncio.run(body())
