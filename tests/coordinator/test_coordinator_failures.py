"""Environments, rewards, tasks and trainers that fail: retried or replaced, with the reason, never scored as zero."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import coordinator_doubles as doubles
import pytest

from libra_jax import protocols
from libra_jax.rewards import scoring

ALL = sorted(f"task-{index}" for index in range(12))


class Breaking(doubles.TwoTurns):
    """Breaks at the final step of chosen tasks, the given number of times each."""

    times: dict[int, int]
    broken: dict[int, int]

    async def step(self, output: str) -> protocols.StepResult:
        result = await super().step(output)
        if result.done and self.broken.get(self._index, 0) < self.times.get(self._index, 0):
            self.broken[self._index] = self.broken.get(self._index, 0) + 1
            return self.breaks(result)
        return result

    def breaks(self, result: protocols.StepResult) -> protocols.StepResult:
        raise RuntimeError("the sandbox is gone")


class Unscored(Breaking):
    def breaks(self, result: protocols.StepResult) -> protocols.StepResult:
        return protocols.StepResult(done=True, reward=float("nan"))


@pytest.mark.parametrize("kind", [Breaking, Unscored])
def test_an_environment_that_breaks_is_retried_afresh(tmp_path, kind):
    kind.times, kind.broken = {3: 2}, {}
    bench = doubles.Bench(doubles.make_config(), tmp_path, make_environment=kind)
    summary = bench.run()
    assert summary.replaced == {}
    assert sorted(bench.trained["prompts"]) == ALL
    assert doubles.turns_of(bench) == doubles.reference_tokens(tmp_path)
    steps = [scalars for _, scalars in bench.recorder.steps]
    wasted = sum(scalars["tokens/generated"] - scalars["tokens/trained"] for scalars in steps)
    broken = [record for record in bench.recorder.trajectories if record["prompt_id"] == "task-3"]
    assert wasted == sum(turn["generated_tokens"] for record in broken for turn in record["turns"])


@pytest.mark.parametrize(("kind", "why"), [(Breaking, "the sandbox is gone"), (Unscored, "nan")])
def test_a_group_whose_environment_keeps_breaking_is_replaced_with_the_reason(tmp_path, kind, why):
    kind.times, kind.broken = {3: 1000}, {}
    bench = doubles.Bench(doubles.make_config(), tmp_path, make_environment=kind)
    summary = bench.run()
    assert summary.replaced == {"environment": 1}
    assert "task-3" not in bench.trained["prompts"]
    assert "task-12" in bench.trained["prompts"]
    assert summary.trained == 12
    assert any("task-3 was replaced (environment)" in note and why in note for note in bench.recorder.notes)


class Choosy(doubles.TokenText):
    """Refuses the messages of task 3, as a chat template may."""

    asked = 0

    def render(self, messages: Sequence[protocols.Message], *, first: bool, generation_prompt: bool) -> list[int]:
        if messages[0].content == "13":
            self.asked += 1
            raise protocols.DataError("the chat template refuses a dialogue with the roles user, user (alternate!)")
        return super().render(messages, first=first, generation_prompt=generation_prompt)


def test_a_task_that_the_chat_template_refuses_is_replaced_by_name(tmp_path):
    """It is not tried again, and the other tasks train."""
    tokenizer, config = Choosy(), doubles.make_config()
    bench = doubles.Bench(config, tmp_path, tokenizer=tokenizer)
    summary = bench.run()
    assert summary.replaced == {"task": 1}
    assert "task-3" not in bench.trained["prompts"]
    assert "task-12" in bench.trained["prompts"]
    (note,) = [note for note in bench.recorder.notes if "task-3 was replaced (task)" in note]
    assert "task task-3: the chat template refuses a dialogue" in note
    assert tokenizer.asked <= config.coordinator.group_size


def test_a_run_whose_every_task_is_refused_ends_with_the_reason(tmp_path):
    class Refusing(doubles.TokenText):
        def render(self, messages: Sequence[protocols.Message], *, first: bool, generation_prompt: bool) -> list[int]:
            raise protocols.DataError("the chat template refuses a dialogue with the roles user, user")

    bench = doubles.Bench(doubles.make_config(), tmp_path, tokenizer=Refusing())
    with pytest.raises(protocols.LibraError, match=r"^task task-\d: the chat template refuses .* too many such groups"):
        bench.run()


def test_a_demonstration_without_an_answer_is_left_out_by_name(tmp_path):
    class Demonstrator(doubles.Tasks):
        broken = "task-1000000001"

        def demonstration(self, task: protocols.Task) -> Sequence[protocols.Message]:
            messages = super().demonstration(task)
            if "task-1000000002" in task.prompt_id:
                raise KeyError("answer")
            return messages[:1] if self.broken in task.prompt_id else messages

    config = doubles.make_config(warm_start={"steps": 2, "batch_size": 2})
    bench = doubles.Bench(config, tmp_path, demonstrator=Demonstrator())
    bench.run()
    assert bench.trained["warm"] == 2
    left_out = [text for _, text in bench.recorder.statuses if "leaves out the demonstration of task-" in text]
    assert ["task-1000000001" in left_out[0], "raised KeyError" in left_out[1], len(left_out)] == [True, True, 2]
    Demonstrator.broken = "task-"
    with pytest.raises(protocols.LibraError, match="its demonstration must begin with a prompt"):
        doubles.Bench(config, tmp_path / "none", demonstrator=Demonstrator()).run()


def test_a_reward_that_always_raises_ends_the_run_with_one_sentence(tmp_path):
    async def reward(task: protocols.Task, transcript: scoring.Transcript) -> scoring.Score:
        raise KeyError("answer")

    config = doubles.make_config(reward={"functions": {"mine": {"factory": "mine:reward"}}})
    bench = doubles.Bench(config, tmp_path, reward=reward)
    with pytest.raises(protocols.LibraError) as raised:
        bench.run()
    sentence = str(raised.value)
    assert "4 groups were replaced (reward 4) and 0 trained" in sentence
    assert "config.coordinator.max_replacements = 1 allows 1 x (0 scored + 3 of a step) = 3" in sentence
    assert "reward mine:reward" in sentence
    assert sentence.startswith("reward, task ")
    assert "KeyError: 'answer'" in sentence.partition(". This was the first of too many such groups: ")[0]
    assert "\n" not in sentence


def test_an_environment_factory_that_always_raises_ends_the_run_with_one_sentence(tmp_path):
    def make_environment() -> protocols.Environment:
        raise OSError("no sandbox here")

    bench = doubles.Bench(doubles.make_config(), tmp_path, make_environment=make_environment)
    with pytest.raises(protocols.LibraError, match=r"calculator:environment raised OSError: no sandbox here"):
        bench.run()


def test_the_error_adds_up_reasons_and_says_the_cap(tmp_path):
    """Of six groups, those of odd numbers fail by the reward and the others by the environment."""

    async def reward(task: protocols.Task, transcript: scoring.Transcript) -> scoring.Score:
        raise KeyError("answer")

    class Breaking(doubles.TwoTurns):
        async def step(self, output: str) -> protocols.StepResult:
            if self._index % 2:
                raise RuntimeError("no display here")
            return await super().step(output)

    config = doubles.make_config(
        coordinator={"max_replacements": 1.5},
        reward={"functions": {"mine": {"factory": "mine:reward"}}},
        task={"environment_retries": 0},
    )
    bench = doubles.Bench(config, tmp_path, reward=reward, make_environment=Breaking)
    with pytest.raises(protocols.LibraError, match=r"5 groups were replaced \(environment \d \+ reward \d\)") as raised:
        bench.run()
    numbers = re.search(r"environment (\d) \+ reward (\d)", str(raised.value))
    assert sum(map(int, numbers.groups())) == 5
    assert "max_replacements = 1.5 allows 1.5 x (0 scored + 3 of a step) = 4.5" in str(raised.value)


class NeverScoring(doubles.TwoTurns):
    """Breaks wherever it would score an attempt."""

    async def step(self, output: str) -> protocols.StepResult:
        result = await super().step(output)
        if result.done:
            raise RuntimeError("no display here")
        return result


def test_an_environment_that_always_raises_ends_a_run_whose_attempts_are_mostly_cut_off(tmp_path):
    """Nine groups of ten run into max_tokens and would train, each reward 0, and the tenth is replaced."""
    config = doubles.make_config(steps=40)
    specs = doubles.engine_specs(config, 1, script="coordinator_doubles:rambling")
    bench = doubles.Bench(config, tmp_path, specs=specs, make_environment=NeverScoring)
    with pytest.raises(protocols.LibraError, match=r"no display here.*\(environment 4\).*scored rollouts of 0 groups"):
        bench.run()


def test_a_tool_that_hangs_is_a_timeout_that_the_policy_sees(tmp_path):
    class Hanging(doubles.TwoTurns):
        tool_seconds = staticmethod(lambda index: 1e6 if index == 5 else 0.01)

    bench = doubles.Bench(doubles.make_config(task={"tool_seconds": 8.0}), tmp_path, make_environment=Hanging)
    summary = bench.run()
    assert summary.replaced == {}
    assert sorted(bench.trained["prompts"]) == ALL
    statuses = {record["prompt_id"]: record["turns"][0]["status"] for record in bench.recorder.trajectories}
    assert {prompt for prompt, status in statuses.items() if status == "timeout"} == {"task-5"}


class Alternating(doubles.TwoTurns):
    """Rewards 0 and 1 in turn, save for chosen tasks, which are always right."""

    easy: set[int]
    turn = 0

    async def step(self, output: str) -> protocols.StepResult:
        result = await super().step(output)
        if not result.done:
            return result
        type(self).turn += 1
        return protocols.StepResult(done=True, reward=1.0 if self._index in self.easy else float(self.turn % 2))


def test_groups_without_variance_are_replaced_and_counted(tmp_path):
    Alternating.easy = {4, 8}
    config = doubles.make_config(
        algorithm={"filter": "zero_variance"}, rollout={"slots": 1}, scheduler={"ordering": "fcfs"}
    )
    bench = doubles.Bench(config, tmp_path, make_environment=Alternating, specs=doubles.engine_specs(config, 1))
    summary = bench.run()
    assert summary.replaced["zero_variance"] >= 2
    assert summary.trained == 12
    for group in {record["group_id"] for record in bench.recorder.trajectories}:
        rewards = {item["reward"] for item in bench.recorder.trajectories if item["group_id"] == group}
        assert rewards == {0.0, 1.0}
    assert sum(scalars["groups/replaced"] for _, scalars in bench.recorder.steps) == summary.replaced["zero_variance"]


def test_too_many_groups_without_variance_end_the_run_with_the_counts(tmp_path):
    Alternating.easy = set(range(1000))
    bench = doubles.Bench(
        doubles.make_config(algorithm={"filter": "zero_variance"}), tmp_path, make_environment=Alternating
    )
    with pytest.raises(protocols.LibraError, match=r"4 groups were replaced \(zero_variance 4\) and 0 trained"):
        bench.run()


def test_an_evaluation_leaves_out_what_could_not_be_scored(tmp_path):
    Breaking.times, Breaking.broken = {1: 1000}, {}
    config = doubles.make_config(evaluation={"every": 4, "tasks": 4}, coordinator={"max_replacements": 10.0})
    bench = doubles.Bench(config, tmp_path, make_environment=Breaking)
    bench.run()
    assert [s["evaluation/unscored"] for _, s in bench.recorder.steps if "evaluation/unscored" in s] == [1, 1]


class BreakingTasks(doubles.Tasks):
    """Tasks of which one, and what is held out, cannot be had."""

    def task(self, index: int) -> protocols.Task:
        if index == 4:
            raise KeyError("row")
        return super().task(index)

    def evaluation_task(self, index: int) -> protocols.Task:
        raise OSError("no file")

    def demonstration(self, task: protocols.Task) -> Sequence[protocols.Message]:
        raise RuntimeError("unsolved")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, r"config\.task\.source: task\(4\) of my_tasks:make raised KeyError: 'row'"),
        ({"evaluation": {"every": 1}}, r"source: evaluation_task\(0\) of my_tasks:make raised OSError: no file"),
        ({"warm_start": {"steps": 1}}, r"environment: the demonstration of task-\d+ of my_dice:make raised Run"),
    ],
)
def test_the_users_code_that_raises_late_is_named_with_its_field(changes, problem, tmp_path):
    config = doubles.make_config(task={"source": "my_tasks:make", "environment": "my_dice:make"}, **changes)
    tasks = BreakingTasks()
    with pytest.raises(protocols.ConfigError, match=problem):
        doubles.Bench(config, tmp_path, tasks=tasks, demonstrator=tasks).run()


# The trainer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_trainer_ends_the_run_with_a_sentence_that_names_it(tmp_path, monkeypatch, how):
    class Failing(doubles.RecordingTrainer):
        async def train_step(self, batch: protocols.TrainBatch, shares=()):
            if self.state["version"] == 1 and how == "dies":
                raise protocols.WorkerLost("actor 'trainer' died; restart it to go on")
            if self.state["version"] == 1:
                await asyncio.sleep(1e6)
            return await super().train_step(batch, shares)

    monkeypatch.setattr(doubles, "make_trainer", lambda log: Failing(0.05, 3, log))
    bench = doubles.Bench(doubles.make_config(deadlines={"train_step": 90.0}), tmp_path)
    expected = "'trainer' died" if how == "dies" else r"trainer, asked to take a training step, did not.*within 90 s"
    with pytest.raises(protocols.LibraError, match=expected):
        bench.run()
