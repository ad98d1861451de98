"""Agents that are Python functions: in the run's process, or under an interpreter of their own."""

import os
import sys
from pathlib import Path

import harness_agents
import harness_doubles
import pytest

from libra_jax import protocols
from libra_jax.examples.outside import verifiers_v1

AGENTS = "harness_agents"
HERE = str(Path(__file__).parents[1] / "common")
TASK = harness_doubles.task(question="6*7", answer="42")


def run(name, **arguments):
    with harness_doubles.model(lambda messages: str(eval(messages[-1]["content"]))) as model:
        arguments.setdefault("fields", ["question", "answer"])
        return harness_doubles.run(TASK, model, callable=f"{AGENTS}:{name}", **arguments)


def test_a_plain_function_runs_on_a_thread_with_its_arguments():
    assert run("plain", arguments={"bonus": 0.5}).reward == 1.5


def test_an_async_function_gets_a_folder_and_gives_metrics():
    outcome = run("asynchronous", collect=["seen"], score="harness_doubles:judge")
    assert harness_doubles.judge.seen.files["seen"].content == b"42"
    assert harness_doubles.judge.seen.verdict == {"reward": 1.0, "metrics": {"asked": 1}}
    assert outcome.reward == 0.25


@pytest.mark.parametrize("name", ["isolated", "isolated_later"])
def test_a_function_runs_under_an_interpreter_of_its_own(name):
    bare = os.path.realpath(sys.executable)  # outside of the virtual environment, so without this package
    outcome = run(name, python=bare, search=[HERE])
    assert outcome.reward == 1.0
    assert outcome.metrics["process"] != os.getpid()


@pytest.mark.parametrize("python", ["", sys.executable])
def test_a_function_that_raises_has_crashed_and_says_where(python):
    search = {"python": python, "search": [HERE]} if python else {}
    with pytest.raises(protocols.EnvironmentCrashed, match=r"ValueError: no idea"):
        run("broken", **search)


@pytest.mark.parametrize("python", ["", sys.executable])
def test_a_function_without_a_verdict_has_crashed(python):
    search = {"python": python, "search": [HERE]} if python else {}
    with pytest.raises(protocols.EnvironmentCrashed, match="verdict"):
        run("forgetful", **search)


@pytest.mark.parametrize("python", ["", sys.executable])
@pytest.mark.parametrize("access", ["get", "contains", "item"])
def test_a_hidden_field_is_refused_by_name_in_every_access(python, access):
    search = {"python": python, "search": [HERE]} if python else {}
    sees = dict(fields=["question"], arguments={"access": access}, **search)
    with pytest.raises(protocols.EnvironmentCrashed, match=r"does not see the task's field 'answer'"):
        run("curious", **sees)
    assert run("curious", **{**sees, "arguments": {"access": access, "field": "absent"}}).reward == 0.5


def test_an_overdue_function_is_cancelled_or_left_to_its_thread():
    with pytest.raises(protocols.EnvironmentCrashed, match="took more than"):
        run("endless", seconds=0.1)
    with pytest.raises(protocols.EnvironmentCrashed, match="took more than"):
        run("endless_later", seconds=0.1)
    assert harness_agents.endless_later.ended


def test_a_function_may_return_an_outcome(monkeypatch):
    outcome = protocols.Outcome(0.5, {"steps": 1.0}, {2: 1.0})
    monkeypatch.setattr(harness_agents, "given", lambda task, endpoint: outcome, raising=False)
    found = run("given")
    assert (found.reward, found.segment_rewards) == (0.5, {2: 1.0})
    assert found.metrics["steps"] == 1.0


def test_a_scorer_may_change_its_task_and_no_other_sees_it(monkeypatch):
    def scorer(finished):
        finished.task.payload["answer"] = "changed"
        return 1.0

    monkeypatch.setattr(harness_agents, "scorer", scorer, raising=False)
    assert run("plain", score=f"{AGENTS}:scorer").reward == 1.0
    assert TASK.payload["answer"] == "42"


@pytest.mark.parametrize(
    ("verdict", "problem"),
    [
        (protocols.Outcome(None), "gave the reward None, which is not a finite number"),
        (protocols.Outcome(10**400), "gave the reward 1000.*, which is not a finite number"),
        (protocols.Outcome(1.0, {"size": 10**400}), "gave the metric 'size' = 1000.*, which is not a finite number"),
        (protocols.Outcome(1.0, {"a b": 1.0}), "gave a metric the name 'a b'"),
        (protocols.Outcome(1.0, {}, {1: None}), "gave the reward None, which is not a finite number"),
    ],
)
@pytest.mark.parametrize("score", ["verdict", "harness_doubles:judge"])
def test_a_verdict_that_no_record_can_hold_is_void(monkeypatch, verdict, problem, score):
    monkeypatch.setattr(harness_agents, "unusable", lambda task, endpoint: verdict, raising=False)
    if score == "verdict" or verdict.metrics:
        with pytest.raises(protocols.AttemptVoided, match=problem):
            run("unusable", score=score)
    else:
        assert run("unusable", score=score).reward == 0.25, "the scorer gives the reward"


@pytest.mark.parametrize("tasks", [2, 3, 1319])
def test_held_out_tasks_of_verifiers_are_never_trained(tasks):
    trained = {verifiers_v1.place_of(seed, tasks) for seed in range(0, 10_000, 2)}
    held_out = {verifiers_v1.place_of(seed, tasks) for seed in range(1, 10_000, 2)}
    assert not trained & held_out
    assert len(trained | held_out) == tasks - tasks % 2
