"""Steps that have nothing to learn from are counted, and after three in a row a sentence says what to look at."""

from __future__ import annotations

import coordinator_doubles as doubles
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import reports


class Idle(doubles.RecordingTrainer):
    """A trainer whose gradient is always zero."""

    async def train_step(self, batch: protocols.TrainBatch, shares=()) -> dict[str, float]:
        return {**await super().train_step(batch, shares), "grad_norm": 0.0, "groups/without_gradient": 1.0}


class Solved(doubles.TwoTurns):
    """Every answer is right."""

    async def step(self, output: str) -> protocols.StepResult:
        result = await super().step(output)
        return protocols.StepResult(done=True, reward=1.0) if result.done else result


def test_a_run_that_learns_nothing_says_once_what_to_look_at(tmp_path, monkeypatch):
    monkeypatch.setattr(doubles, "make_trainer", lambda log: Idle(0.05, 3, log))
    bench = doubles.Bench(doubles.make_config(steps=8), tmp_path, make_environment=Solved)
    bench.run()
    (note,) = [note for note in bench.recorder.notes if "nothing to learn from" in note]
    assert note.startswith("Steps 1 to 3 had nothing to learn from: every rollout had the reward 1;")
    assert "reward.functions" in note


def told(*steps, **groups):
    """What a watch says of steps that report these metrics."""
    notes: list[str] = []
    watch = reports.Watch(doubles.make_config(**groups), notes.append)
    for number, metrics in enumerate(steps, start=1):
        watch.look(number, {"reward/mean": 0.5, "reward/std": 0.5, "rollout/masked": 0.0, **metrics})
    return notes


def test_outputs_that_are_all_cut_off_are_told_of_at_once_and_once():
    fine = {"grad_norm": 0.1, "finish/length": 0.5}
    assert told(fine, fine) == []
    (note,) = told(fine, {**fine, "finish/length": 1.0}, {**fine, "finish/length": 1.0}, rollout={"max_tokens": 7})
    assert note.startswith("Step 2: 100% of the rollouts were cut off in an output of 7 tokens")
    assert "Raise rollout.max_tokens" in note


NOTHING = {"grad_norm": 0.0, "groups/without_gradient": 1.0}


@pytest.mark.parametrize(
    ("metrics", "groups", "advice"),
    [
        ({"rollout/masked": 1.0}, {}, "task.max_seconds"),
        ({"reward/mean": 0.0, "reward/std": 0.0}, {}, "every rollout had the reward 0"),
        ({"reward/std": 0.0}, {"coordinator": {"group_size": 1}}, "coordinator.group_size is 1"),
        ({}, {}, "rewards differ between prompts, never within a group"),
        ({"groups/without_gradient": 0.2}, {}, "gradient norm is 0 although rewards differ"),
        ({"grad_norm": 0.1, "groups/without_gradient": 0.0, "reward/std": 0.0}, {}, "every rollout had the reward 0.5"),
    ],
)
def test_the_sentence_names_the_reason(metrics, groups, advice):
    (note,) = told(*[{**NOTHING, **metrics}] * 5, **groups)
    assert advice in note
    assert ("had nothing to learn from" in note) == ("grad_norm" not in metrics)


def test_one_step_that_learns_begins_the_count_again():
    good = {"grad_norm": 0.3, "groups/without_gradient": 0.5}
    assert told(NOTHING, NOTHING, good, NOTHING, NOTHING, good) == []
    assert len(told(NOTHING, NOTHING, NOTHING, good, NOTHING, NOTHING, NOTHING)) == 1, "the same reason is told once"


def test_simulated_steps_have_no_gradient_to_speak_of():
    assert told(*[{"reward/std": 0.0}] * 5) == []


def test_group_estimators_are_those_that_compare_a_group():
    assert set(config_lib.ADVANTAGES) - set(config_lib.GROUP_ADVANTAGES) == {
        "reinforce_plus_plus",
        "distillation",
        "gae",
        "egae",
    }
