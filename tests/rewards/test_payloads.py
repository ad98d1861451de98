"""What user code does to a task's payload reaches no other rollout, no other function and not the stored task."""

import copy
import threading
import time

import loop_doubles as doubles
import pytest
import test_harness_loop
import test_rewards

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import filters

PAYLOAD = {"prompt": "q", "answer": ["1", "2", "3"], "deep": {"list": [{"x": 1}]}}


def meddle(payload):
    """Writes at every depth; returns what it found."""
    found = copy.deepcopy(dict(payload))
    payload["prompt"] = "changed"
    payload["answer"].pop()
    payload["deep"]["list"][0]["x"] += 1
    del payload["deep"]
    return found


@pytest.fixture
def task():
    """A task, which has to stay as it is."""
    task = protocols.Task("t", copy.deepcopy(PAYLOAD))
    yield task
    assert task.payload == PAYLOAD


class Meddles(doubles.Probe):
    """Meddles with what each method gets, and with the state that it gave."""

    def __init__(self):
        super().__init__()
        self.found, self.state = [], {"steps": [0]}

    async def reset(self, task):
        self.found.append(meddle(task.payload))
        return [protocols.Message("user", "q")]

    async def restore(self, task, state):
        self.found.append(meddle(task.payload))
        assert state == {"steps": [0]}
        state["steps"].append(7)

    async def snapshot(self):
        return self.state

    async def step(self, output):
        if output == "answer":
            return protocols.StepResult(done=True, reward=1.0)
        return protocols.StepResult(messages=[protocols.Message("user", "more")])


def test_an_environment_has_a_payload_and_states_of_its_own(task):
    environment = Meddles()
    trajectory = protocols.Trajectory("t/0", "t")
    doubles.attempt(["more", "answer"], environment=environment, task=task, trajectory=trajectory)
    environment.state["steps"].append(1)
    assert trajectory.snapshot.state == {"steps": [0]}
    for _ in range(2):
        trajectory.reward = trajectory.finish = None
        doubles.attempt(["more", "answer"], environment=environment, task=task, trajectory=trajectory)
    assert environment.found == [PAYLOAD] * 3


def test_reward_functions_share_neither_payload_nor_transcript(task):
    functions = {name: test_rewards.of("meddling") for name in "abc"}
    for _ in range(2):
        found = test_rewards.score(functions, task=task)
        assert [found.metrics[f"reward/{name}"] for name in "abc"] == [4.0] * 3


def test_a_harness_has_a_payload_of_its_own():
    found = []

    class Meddling(test_harness_loop.Asking):
        async def run(self, task, endpoint):
            found.append(dict(task.payload))
            task.payload["question"] = "changed"
            return await super().run(task, endpoint)

    for _ in range(2):
        test_harness_loop.run(test_harness_loop.answers, make=Meddling)
    assert found == [{"question": "how many"}] * 2


def test_a_filter_has_a_payload_of_its_own(task, monkeypatch):
    seen = []

    def own(group):
        seen.append(meddle(group.task.payload))

    run = config_lib.RunConfig()
    run.algorithm.filter = "mine:own"
    monkeypatch.setattr("libra_jax.utils.resolving.resolve", lambda *_: own)
    _, chosen = filters.make(run)
    group = protocols.Group(0, task, 0)
    assert [chosen(group), chosen(group)] == [None, None]
    assert seen == [PAYLOAD] * 2


@pytest.mark.parametrize("kind", ["list", "tuple", "lock", "own mapping"])
def test_a_copy_keeps_the_types_and_shares_what_has_no_copy(kind):
    class Own(dict):
        pass

    lock = threading.Lock()
    value = {"list": [1, [2]], "tuple": (1, [2]), "lock": lock, "own mapping": Own(a=[1])}[kind]
    task = protocols.Task("t", {"value": value}, repeats="s")
    copied = task.copy()
    assert (copied.prompt_id, copied.repeats, type(copied.payload["value"])) == ("t", "s", type(value))
    assert copied.payload == task.payload
    assert (copied.payload["value"] is value) == (kind == "lock")


def test_a_copy_of_a_large_payload_is_cheap():
    text = protocols.Task("t", {"text": "x" * 2**20})
    rows = protocols.Task("t", {"rows": [{"name": f"row {row}", "value": row / 7} for row in range(25_000)]})
    for task, most in ((text, 0.01), (rows, 1.0)):
        began = time.perf_counter()
        task.copy()
        assert time.perf_counter() - began < most
