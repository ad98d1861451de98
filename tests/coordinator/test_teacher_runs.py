"""A run whose teacher is behind an endpoint: rollouts are scored while others run, and none is trained without."""

from __future__ import annotations

import asyncio
import json

import coordinator_doubles as doubles
import prompt_doubles
import pytest

from libra_jax import protocols

ALGORITHM = {"teacher": "http://127.0.0.1:1/v1", "kl_coefficient": 0.1}


class Teacher:
    """Takes a second for each rollout; fails for those that `fails` names."""

    def __init__(self, fails=lambda count: False):
        self.scored, self.fails, self.now, self.most = [], fails, 0, 0

    async def log_probs(self, token_ids):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(1.0)
        self.now -= 1
        self.scored.append(tuple(token_ids))
        if self.fails(len(self.scored)):
            raise protocols.TeacherFailed("the teacher m at http://x failed: ReadTimeout")
        return [-0.5] * len(token_ids)


def bench(tmp_path, teacher, **changes):
    config = doubles.make_config(rollout={"temperature": 1.0}, algorithm=ALGORITHM, **changes)
    return doubles.Bench(config, tmp_path, teacher=teacher)


def test_every_trained_rollout_is_scored_once_and_held_out_ones_never(tmp_path):
    teacher = Teacher()
    run = bench(tmp_path, teacher, evaluation={"every": 1, "tasks": 4})
    summary = run.run()
    assert summary.trained == 12
    assert len(teacher.scored) == 24
    assert teacher.most > 1, "rollouts wait for each other's scores"
    assert all(record["teacher/seconds"] == pytest.approx(1.0) for step, record in run.recorder.steps if step)


def test_a_group_whose_teacher_fails_is_replaced_and_counted(tmp_path):
    run = bench(tmp_path, Teacher(fails=lambda count: count == 5), coordinator={"max_replacements": 1.0})
    summary = run.run()
    assert summary.replaced == {"teacher": 1}
    assert summary.trained == 12
    assert any("(teacher): the teacher m at http://x failed" in note for note in run.recorder.notes)


def test_a_teacher_that_always_fails_ends_the_run_with_its_sentence(tmp_path):
    with pytest.raises(protocols.LibraError, match=r"the teacher m at http://x failed.* first of too many such groups"):
        bench(tmp_path, Teacher(fails=lambda count: True)).run()


def test_a_run_that_goes_on_with_a_teacher_scores_what_waited_without(tmp_path, monkeypatch):
    trained = []

    class Trainer(doubles.RecordingTrainer):
        async def train_step(self, batch, shares=()):
            trained.extend(item for group in batch.groups for item in group.trajectories)
            return await super().train_step(batch, shares)

    monkeypatch.setattr(prompt_doubles, "make_trainer", lambda log: Trainer(2.0, 3, log))

    def begun(scorer, **algorithm):
        config = doubles.make_config(
            steps=16,
            algorithm={"replay": "success", "replay_max_staleness": 40, **algorithm},
            coordinator={"max_staleness": 2, "groups_per_step": 2, "group_size": 1},
            checkpoint={"every": 1},
            rollout={"temperature": 1.0},
        )
        return doubles.Bench(
            config,
            tmp_path,
            make_environment=prompt_doubles.Named,
            tasks=prompt_doubles.Passes(),
            trainer_factory="prompt_doubles:make_trainer",
            teacher=scorer,
        )

    assert not prompt_doubles.run_for(begun(None), 15.0)
    newest = max(tmp_path.rglob("coordinator.json"))
    held = json.loads(newest.read_text())
    assert held["groups"]["finished"]
    assert held["replay"]["stored"]
    trained.clear()
    begun(Teacher(), **ALGORITHM).run()
    assert any(item.replayed for item in trained)
    assert all(len(item.teacher_log_probs) == len(item.token_ids) for item in trained)
