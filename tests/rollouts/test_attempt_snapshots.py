"""Attempts in flight after a kill: taken up from their environment's snapshot, replayed, or begun anew and reported."""

import json

import dialogue_doubles
import loop_doubles as doubles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_resumed_attempts import same

from libra_jax import protocols
from libra_jax.coordinator import records
from libra_jax.simulator import clock

OUTPUTS = ["one", "three", "five", "done"]


class Killed(Exception):
    """Stands for kill -9."""


class Dies(doubles.ScriptedSampler):
    """Kills the run once so many tokens have been sampled."""

    def __init__(self, outputs, tokens):
        super().__init__(outputs, delta=1)
        self.left = tokens

    def append(self, trajectory, tokens):
        if self.left == 0:
            raise Killed
        self.left -= 1
        super().append(trajectory, tokens)


class Sums:
    """An environment with a state: each return is the sum of the lengths of the outputs so far. Notes its steps."""

    def __init__(self, steps, gives=lambda total: {"total": total}):
        self.steps, self.gives, self.total, self.opened = steps, gives, 0, []

    async def reset(self, task):
        self.opened.append("reset")
        self.total = 0
        return [protocols.Message("user", "q")]

    async def step(self, output):
        self.steps.append(output)
        if output == "done":
            return protocols.StepResult(done=True, reward=float(self.total))
        self.total += len(output)
        returned = protocols.ToolReturn("sum", "success", str(self.total))
        return protocols.StepResult(tool_returns=[returned], metrics={"total": self.total})

    async def snapshot(self):
        return self.gives(self.total)

    async def restore(self, task, state):
        self.opened.append("restore")
        self.total = state["total"]

    async def close(self):
        pass


def checkpointed(trajectory):
    """What a checkpoint brings back of it."""
    group = protocols.Group(0, doubles.task_of(), 0, [trajectory])
    (kept,) = records.decode_group(json.loads(json.dumps(records.encode_group(group)))).trajectories
    return kept


def killed(environment, tokens, outputs=OUTPUTS):
    """What a run leaves that is killed once it has sampled so many tokens."""
    trajectory = protocols.Trajectory("t/0", "t")
    with pytest.raises(Killed):
        doubles.attempt([], environment=environment, sampler=Dies(outputs, tokens), trajectory=trajectory)
    return checkpointed(trajectory)


TOKENS = sum(len(output) + 1 for output in OUTPUTS)


@given(st.integers(0, TOKENS - 1))
@settings(max_examples=TOKENS)
def test_an_attempt_is_taken_up_from_its_snapshot_and_no_tool_runs_again(tokens):
    whole, _ = doubles.attempt(OUTPUTS, environment=Sums([]))
    steps = []
    left = killed(Sums(steps), tokens)
    environment = Sums(steps)
    resumed, _ = doubles.attempt(OUTPUTS, environment=environment, trajectory=left)
    same(resumed, whole)
    assert steps == OUTPUTS
    assert environment.opened == (["restore"] if tokens >= len("one") + 1 else ["reset"])
    doubles.check_books(resumed)


@pytest.mark.parametrize(("tokens", "again"), [(10, ["one", "three"]), (16, ["one", "three", "five"])])
def test_an_environment_without_a_snapshot_is_stepped_through_its_outputs_again(tokens, again):
    steps = []
    left = killed(Sums(steps, lambda total: None), tokens)
    assert left.snapshot is None
    assert steps == again
    environment = Sums(steps, lambda total: None)
    resumed, _ = doubles.attempt(OUTPUTS, environment=environment, trajectory=left)
    assert (resumed.reward, resumed.metrics["replay_differs"]) == (12.0, 0.0)
    assert steps == again + OUTPUTS
    assert environment.opened == ["reset"]


def test_what_came_after_the_last_snapshot_is_stepped_again():
    steps = []

    def once(total):
        return {"total": total} if total == 3 else None

    left = killed(Sums(steps, once), 16)
    resumed, _ = doubles.attempt(OUTPUTS, environment=Sums(steps, once), trajectory=left)
    assert steps == ["one", "three", "five", "three", "five", "done"]
    assert resumed.reward == 12.0


def test_an_attempt_that_cannot_be_taken_up_begins_anew_and_says_so():
    class Other(Sums):
        async def restore(self, task, state):
            self.total = 100

    steps = []
    left = killed(Sums(steps, lambda total: {"total": total} if total == 3 else None), 16)
    environment = Other(steps)
    resumed, sampler = doubles.attempt(OUTPUTS, environment=environment, trajectory=left)
    whole, _ = doubles.attempt(OUTPUTS, environment=Sums([]))
    assert resumed.metrics["replay_differs"] == 1.0
    assert resumed.token_ids == whole.token_ids
    assert environment.opened == ["reset"]
    assert sampler.events.count("sample") == len(OUTPUTS)


def test_a_snapshot_counts_for_nothing_where_the_environment_cannot_restore():
    class Forgets(Sums):
        restore = None

    steps = []
    left = killed(Sums(steps), 16)
    resumed, _ = doubles.attempt(OUTPUTS, environment=Forgets(steps), trajectory=left)
    assert resumed.reward == 12.0
    assert steps == ["one", "three", "five", *OUTPUTS]


def test_limits_count_what_came_before_the_snapshot():
    left = killed(Sums([]), 16)
    allowed = doubles.loop.Limits(4, 40, 200, 5.0, 1.0, rollout_tokens=18)
    resumed, sampler = doubles.attempt(OUTPUTS, environment=Sums([]), trajectory=left, limits=allowed)
    assert (resumed.finish, resumed.generated_tokens, resumed.metrics["turns"]) == ("max_tokens", 18, 4.0)
    assert sampler.requests[0].max_tokens == 2


@pytest.mark.parametrize("state", [{"total": {1, 2}}, {"total": object()}])
def test_a_snapshot_that_a_checkpoint_cannot_hold_is_a_crash_that_says_so(state):
    with pytest.raises(protocols.EnvironmentCrashed, match=r"Sums, task t: snapshot gave a state that is not JSON"):
        doubles.attempt(OUTPUTS, environment=Sums([], lambda total: state))


def test_a_dialogue_without_a_sandbox_calls_no_tool_again():
    look = dialogue_doubles.Clocked()
    outputs = ["<look>a</look>", "<look>b</look>", "done"]

    def dies():
        trajectory = protocols.Trajectory("t/0", "t")

        async def main():
            environment, sampler = dialogue_doubles.make(look), Dies(outputs, 20)
            await doubles.run(trajectory=trajectory, environment=environment, sampler=sampler)

        with pytest.raises(Killed):
            clock.run(main())
        return checkpointed(trajectory)

    resumed, _ = dialogue_doubles.attempt(outputs, dialogue_doubles.make(look), trajectory=dies())
    assert look.ended == ["a", "b"]
    assert (resumed.reward, resumed.metrics["replay_differs"]) == (1.0, 0.0)
    assert [turn.tool for turn in resumed.turns] == ["look", "look", None]
