"""An environment of a user's own is played once before a run: what it raises or returns amiss is said by its name."""

import asyncio
import os
import subprocess
import sys
import time
import types

import psutil
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rollouts import rehearsal

TASK = protocols.Task("t", {"prompt": "1+1", "answer": "2"})


class Whole:
    """Poses the task and takes any answer; tells what it was given."""

    async def reset(self, task):
        return [protocols.Message("user", task.payload["prompt"])]

    async def step(self, output):
        return protocols.StepResult(done=True, reward=float(output == "2"))

    async def close(self):
        pass


class NotMade(Whole):
    def __init__(self):
        raise RuntimeError("no licence")


class NotPosed(Whole):
    async def reset(self, task):
        return task.payload["question"]


class PosedAsText(Whole):
    async def reset(self, task):
        return "1+1"


class NotScored(Whole):
    async def step(self, output):
        return protocols.StepResult(done=True, reward={}[output])


class ScoredNaN(Whole):
    async def step(self, output):
        return protocols.StepResult(done=True, reward=float("nan"))


class ScoredNothing(Whole):
    async def step(self, output):
        return protocols.StepResult(done=True)


class ScoredTooMuch(Whole):
    async def step(self, output):
        return protocols.StepResult(done=True, reward=10**400)


class NotClosed:
    reset, step = Whole.reset, Whole.step


def not_closed():
    return NotClosed()


class PosedByNoRole(Whole):
    async def reset(self, task):
        return [protocols.Message("usr", "1+1")]


class PosedAsNothing(Whole):
    async def reset(self, task):
        return []


class Exits(Whole):
    async def step(self, output):
        sys.exit(0)


class CancelsItself(Whole):
    async def step(self, output):
        raise asyncio.CancelledError


class Ending(Whole):
    async def step(self, output):
        os._exit(3)


@pytest.fixture
def play(monkeypatch):
    """What is said of an environment of this class."""
    module = types.ModuleType("rehearsed")
    monkeypatch.setitem(sys.modules, "rehearsed", module)

    def said(kind, **tools):
        setattr(module, kind.__name__, kind)
        run = config_lib.RunConfig()
        run.task.environment = f"rehearsed:{kind.__name__}"
        run.tools = config_lib.ToolsConfig(**tools)
        return rehearsal.play(run, TASK, "2")

    return said


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (NotMade, "RuntimeError: no licence"),
        (NotPosed, "reset raised KeyError: 'question' (tests/rollouts/test_rehearsal.py, line "),
        (PosedAsText, "reset returned str instead of a list of protocols.Message"),
        (NotScored, "step raised KeyError: '2'"),
        (ScoredNaN, "step gave the reward nan, which is not a finite number"),
        (ScoredNothing, "step gave the reward None, which is not a finite number"),
        (ScoredTooMuch, "step gave the reward 1000"),
        (not_closed, "rehearsed:not_closed makes a NotClosed, which has no method close"),
        (PosedByNoRole, "has no role 'usr'"),
        (PosedAsNothing, "reset returned no message"),
        (Exits, "step raised SystemExit: 0 (tests/rollouts/test_rehearsal.py"),
        (CancelsItself, "step raised CancelledError (tests/rollouts/test_rehearsal.py"),
        (Ending, "rehearsed:Ending ended its process (exit status 3)"),
    ],
)
def test_what_goes_wrong_is_said_with_the_field_and_what_it_was_given(play, kind, problem):
    found = play(kind)
    assert found.certain
    said = found.problem
    assert said.startswith("config.task.environment: ")
    assert problem in said
    assert said.endswith("; it was given the first task and the task's own answer")


class PaysForNothing(Whole):
    async def step(self, output):
        return protocols.StepResult(done=True, reward=float(output in "2"))


class FailsOnNothing(Whole):
    async def step(self, output):
        return protocols.StepResult(done=True, reward=float(output[0] == "2"))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [(PaysForNothing, "rehearsed:PaysForNothing paid 1, "), (FailsOnNothing, "step raised IndexError")],
)
def test_an_empty_output_that_earns_or_breaks_something_is_warned_of(play, kind, problem):
    found = play(kind)
    assert not found.certain
    assert problem in found.problem
    assert found.problem.endswith("; it was given the first task and an empty output")


class PosedAtLength(Whole):
    async def reset(self, task):
        return [protocols.Message("user", "1+1" * 1000)]


def test_a_first_task_that_a_run_would_replace_is_only_warned_of(play):
    found = play(PosedAtLength)
    assert not found.certain
    assert "tokens leaves no room to answer within rollout.max_context" in found.problem


class Asking(Whole):
    async def step(self, output):
        return protocols.StepResult(tool_returns=[protocols.ToolReturn("user", "success", "And?")])


def test_of_one_that_plays_and_of_one_that_is_not_played_nothing_is_said(play):
    assert play(Whole) == rehearsal.Rehearsed(reward=1.0)
    assert play(Asking) == rehearsal.Rehearsed(), "the rollout goes on"
    servers = {"mcpServers": {"time": {"command": "none-such", "args": []}}}
    assert play(NotPosed, mcp=servers, use=("time",)) == rehearsal.Rehearsed()


def test_one_that_takes_long_may_fail_and_its_processes_end(play, monkeypatch, tmp_path):
    class Slow(Whole):
        def reset(self, task):
            sleeping = subprocess.Popen(["sleep", "600"])
            (tmp_path / "pid").write_text(str(sleeping.pid))
            time.sleep(600)

    monkeypatch.setattr(rehearsal, "SECONDS", 3.0)
    found = play(Slow)
    assert not found.certain
    assert "rehearsed:Slow took more than 3 s; a run may wait longer" in found.problem
    started = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20
    while psutil.pid_exists(started) and psutil.Process(started).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the environment's own process outlives the dry run"
        time.sleep(0.05)


def test_an_argument_that_a_shipped_environment_refuses_is_refused_as_the_run_would():
    run = config_lib.RunConfig()
    run.task.environment = "libra_jax.environments.question:environment"
    run.task.environment_arguments = {"match": "fuzzy"}
    with pytest.raises(protocols.ConfigError, match=r"task\.environment_arguments\.match: .*fuzzy"):
        rehearsal.pose(run, TASK)
