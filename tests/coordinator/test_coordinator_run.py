"""Whole runs on doubles and a virtual clock: staleness, metrics, trace, warm start, evaluation, stopping."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import statistics
import tempfile
from pathlib import Path

import coordinator_doubles as doubles
import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.coordinator import checkpoints, reports
from libra_jax.rollouts import samples
from libra_jax.telemetry import files, recorder, trace
from libra_jax.telemetry import samples as telemetry_samples
from libra_jax.trainer_control import handover


def prompts(count: int) -> list[str]:
    return sorted(f"task-{index}" for index in range(count))


def long_tailed(index: int) -> float:
    return 5.0 if index % 7 == 3 else 0.01


class LongTailed(doubles.TwoTurns):
    tool_seconds = staticmethod(long_tailed)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_every_prompt_is_trained_once_within_the_staleness_bound(tmp_path, staleness):
    config = doubles.make_config(steps=6, coordinator={"max_staleness": staleness})
    bench = doubles.Bench(config, tmp_path, make_environment=LongTailed)
    summary = bench.run()
    assert (summary.steps, summary.policy_version, summary.trained) == (6, 6, 18)
    assert sorted(bench.trained["prompts"]) == prompts(18)
    assert max(bench.trained["staleness"]) == staleness


def test_asynchronous_training_overlaps_rollout_with_training(tmp_path):
    seconds = {}
    for staleness in (0, 1):
        config = doubles.make_config(steps=6, coordinator={"max_staleness": staleness})
        bench = doubles.Bench(config, tmp_path / str(staleness), trainer={"seconds": 4.0}, make_environment=LongTailed)
        bench.run()
        seconds[staleness] = sum(scalars["step/seconds"] for _, scalars in bench.recorder.steps)
    assert seconds[1] < 0.8 * seconds[0]


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    staleness=st.integers(0, 3),
    train_seconds=st.floats(0.0, 2.0),
    tool_seconds=st.lists(st.floats(0.0, 4.0), min_size=5, max_size=20),
)
def test_any_timing_keeps_the_bound_and_loses_nothing(staleness, train_seconds, tool_seconds):
    class Varied(doubles.TwoTurns):
        @staticmethod
        def tool_seconds(index: int) -> float:
            return tool_seconds[index % len(tool_seconds)]

    config = doubles.make_config(steps=5, coordinator={"max_staleness": staleness, "max_replacements": 50.0})
    with tempfile.TemporaryDirectory() as folder:
        bench = doubles.Bench(config, Path(folder), make_environment=Varied, trainer={"seconds": train_seconds})
        summary = bench.run()
        trained, ages = bench.trained["prompts"], bench.trained["staleness"]
    assert max(ages) <= staleness
    assert len(set(trained)) == len(trained) == 15
    assert set(trained) == set(prompts(15))
    assert not summary.replaced


def test_speed_is_told_for_each_device_and_without_a_peak_there_is_no_utilisation():
    trainer = {"tokens/processed": 3000.0, "train/devices": 4.0, "train/flops": 8e12}
    speed = reports.training_speed(trainer, 2.0, 5e12)
    assert speed["train/tokens_per_second"] == 1500
    assert speed["train/tokens_per_second_per_device"] == 375
    assert speed["train/mfu"] == pytest.approx(8e12 / (2 * 4 * 5e12))
    assert "train/mfu" not in reports.training_speed(trainer, 2.0, None)
    assert reports.training_speed({"loss": 0.5}, 2.0, 5e12) == {}  # a trainer that counts no work


def test_metrics_and_trace_say_what_happened(tmp_path):
    bench = doubles.Bench(doubles.make_config(coordinator={"max_staleness": 1}), tmp_path)
    summary = bench.run()
    assert [step for step, _ in bench.recorder.steps] == [1, 2, 3, 4]
    for step, scalars in bench.recorder.steps:
        rewards = [record["reward"] for record in bench.recorder.trajectories if record["step"] == step]
        assert scalars["policy_version"] == step
        assert scalars["reward/mean"] == pytest.approx(statistics.fmean(rewards))
        assert scalars["agent/odd"] == scalars["reward/mean"]
        assert scalars["loss"] == 0.5
        assert scalars["turns/mean"] == 2
        assert scalars["train/seconds"] == pytest.approx(0.05)
        assert scalars["staleness/max"] <= 1
        assert scalars["tokens_per_second"] == pytest.approx(scalars["tokens/generated"] / scalars["step/seconds"])
        assert scalars["rollout/tokens_per_second_per_device"] == scalars["tokens_per_second"] / 2
        assert summary.rewards[step] == scalars["reward/mean"]
    assert sum(scalars["tokens/generated"] for _, scalars in bench.recorder.steps) == sum(
        turn["generated_tokens"] for record in bench.recorder.trajectories for turn in record["turns"]
    )
    assert {name for track, name, *_ in bench.recorder.spans if track == "engine-0"} == {"generate"}
    updates = {name for track, name, *_ in bench.recorder.spans if track == "weights"}
    assert updates == {f"sync {name}" for name in ("engine-0", "engine-1")}
    assert {name for track, name, *_ in bench.recorder.spans if track == "trainer"} == {"train step"}


def test_samples_hold_best_and_worst_rollouts_of_steps_and_evaluations(tmp_path):
    config = doubles.make_config(evaluation={"every": 2, "tasks": 3})
    written = samples.Samples(2, 0, doubles.TokenText())
    bench = doubles.Bench(config, tmp_path, samples=written)
    bench.run()
    steps = [record for record in bench.recorder.samples if not record["evaluation"]]
    assert [record["step"] for record in steps] == [1, 1, 2, 2, 3, 3, 4, 4]
    for best, worst in zip(steps[::2], steps[1::2], strict=True):
        rewards = [one["reward"] for one in bench.recorder.trajectories if one["step"] == best["step"]]
        assert (best["reward"], worst["reward"], best["of"]) == (max(rewards), min(rewards), len(rewards))
        assert best["turns"][0]["returned"] == "50 51 1"
    held_out = [record for record in bench.recorder.samples if record["evaluation"]]
    assert [record["step"] for record in held_out] == [0, 0, 2, 2, 4, 4]
    assert {record["prompt_id"].rpartition("-")[0] for record in held_out} == {"held-out"}


def test_a_resumed_run_writes_the_samples_of_each_step_once(tmp_path):
    for steps in (2, 4):
        config = doubles.make_config(
            steps=steps, checkpoint={"every": 1}, telemetry={"console": False, "tensorboard": False}
        )
        recorder.cut_back(tmp_path, checkpoints.newest_step(tmp_path))
        files = recorder.create(config, tmp_path, lambda: 0.0)
        doubles.Bench(config, tmp_path, recorder=files, samples=samples.Samples(1, 0, doubles.TokenText())).run()
        files.close()
    assert [sample.step for sample in telemetry_samples.read(tmp_path / "samples.jsonl")] == [1, 2, 3, 4]


def test_the_trace_is_one_that_the_simulator_reads(tmp_path):
    bench = doubles.Bench(doubles.make_config(), tmp_path)
    bench.run()
    writer = files.LineFile(tmp_path / trace.TRACE_FILE, lambda key, sentence: pytest.fail(sentence))
    for record in bench.recorder.trajectories:
        writer.append(record)
    writer.close()
    records = trace.read(tmp_path / trace.TRACE_FILE)
    assert len(records) == 4 * 3 * 2
    assert len({record["trajectory_id"] for record in records}) == len(records)
    assert {record["turns"][0]["tool"] for record in records} == {"look"}


def test_tokens_carry_the_version_that_sampled_them_and_never_one_before_their_dispatch(tmp_path):
    seen = []

    class Watching(doubles.RecordingTrainer):
        async def train_step(self, batch, shares=()):
            seen.append(batch)
            return await super().train_step(batch, shares)

    bench = doubles.Bench(
        doubles.make_config(steps=6, coordinator={"max_staleness": 2}), tmp_path, make_environment=LongTailed
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "make_trainer", lambda log: Watching(0.05, 3, log))
        bench.run()
    versions = set()
    for batch, group in [(step, group) for step in seen for group in step.groups]:
        for trajectory in group.trajectories:
            sampled = [version for version in trajectory.policy_versions if version != protocols.NO_VERSION]
            assert sampled == sorted(sampled)
            assert group.dispatch_version <= sampled[0]
            assert sampled[-1] <= batch.policy_version
            versions.update(itertools.pairwise(sampled))
    assert any(before != after for before, after in versions), "no trajectory spans a weight update"


def test_warm_start_and_evaluations_come_where_the_config_says(tmp_path):
    config = doubles.make_config(warm_start={"steps": 3, "batch_size": 2}, evaluation={"every": 2, "tasks": 5}, steps=5)
    bench = doubles.Bench(config, tmp_path)
    summary = bench.run()
    assert bench.trained["warm"] == 3
    assert sorted(summary.accuracies) == [0, 2, 4, 5]
    assert [step for step, _ in bench.recorder.steps] == [0, 1, 2, 3, 4, 5]
    assert bench.recorder.steps[0][1]["warm_start/loss"] == 1.0
    evaluated = {step: "evaluation/accuracy" in scalars for step, scalars in bench.recorder.steps}
    assert evaluated == {0: True, 1: False, 2: True, 3: False, 4: True, 5: True}
    assert len(set(summary.accuracies.values())) == 1, "the double's answers do not depend on its weights"


def test_several_attempts_at_held_out_tasks_estimate_pass_at_k(tmp_path):
    config = doubles.make_config(evaluation={"every": 2, "tasks": 5, "attempts": 3, "temperature": 1.0}, steps=2)
    bench = doubles.Bench(config, tmp_path)
    bench.run()
    for _, scalars in bench.recorder.steps[::2]:
        found = [scalars[f"evaluation/pass_at_{k}"] for k in (1, 2, 3)]
        assert found == sorted(found)
        assert found[0] == pytest.approx(scalars["evaluation/accuracy"]), "rewards of the double are 0 and 1"


def test_few_held_out_tasks_are_evaluated_once_each(tmp_path):
    """A table gives its held-out rows again and again, with another epoch in their names."""

    class Few(doubles.Tasks):
        def evaluation_task(self, index):
            return protocols.Task(f"held-out-{index}", {"index": index % 3})

    config = doubles.make_config(evaluation={"every": 2, "tasks": 8, "attempts": 2, "temperature": 1.0}, steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "Tasks", Few)
        bench = doubles.Bench(config, tmp_path)
        bench.run()
    counts = {text.partition(" of ")[2] for _, text in bench.recorder.statuses if "rollouts" in text and " of " in text}
    assert counts == {"6 rollouts"}
    assert any(
        "evaluating 3 of 8 tasks, because the others have the same" in text for _, text in bench.recorder.statuses
    )


def test_an_engine_that_waits_for_its_first_weights_says_so(tmp_path):
    config = doubles.make_config(warm_start={"steps": 3, "batch_size": 2})
    bench = doubles.Bench(config, tmp_path, trainer={"seconds": 20.0})
    bench.run()
    told = [text for name, text in bench.recorder.statuses if name == "engine-0"]
    assert "no weights yet, 0 requests running" in told
    assert not [text for text in told if "-1" in text]
    assert [text for text in told if text.startswith("serving version 1")]


def test_long_waits_say_what_is_done(tmp_path):
    config = doubles.make_config(warm_start={"steps": 3, "batch_size": 2}, checkpoint={"every": 2})
    bench = doubles.Bench(config, tmp_path)
    bench.run()
    trainer = [text for name, text in bench.recorder.statuses if name == "trainer"]
    assert trainer[:4] == [
        "starting",
        "loading the model and making the optimizer's state",
        "idle",
        "warm start 0/3, compiling its programs first",
    ]
    steps = [text for text in trainer if text.startswith("training step")]
    assert steps[:2] == ["training step 1, compiling its programs first", "training step 2"]
    assert "writing the checkpoint of step 2" in trainer
    engine = [text for name, text in bench.recorder.statuses if name == "engine-0"]
    assert engine[:4] == [
        "starting its process",
        "loading the inference engine and the model",
        "opening the weight transport",
        "started, waits for its first weights",
    ]
    waits = [text for name, text in bench.recorder.statuses if name == "rollout"]
    assert any(re.fullmatch(r"training waits: \d groups ready of 3, \d running", text) for text in waits)


def test_a_warm_start_without_demonstrations_is_refused():
    config = doubles.make_config(warm_start={"steps": 3})
    with pytest.raises(protocols.ConfigError, match=r"warm_start\.steps.*calculator:environment offers no demonstr"):
        doubles.Bench(config, Path("unused"), demonstrator=None)


def test_the_warm_start_demonstrates_tasks_by_arguments_of_its_own(tmp_path):
    shown = []

    class Demonstrator:
        def demonstration(self, task):
            shown.append(task.payload["expression"])
            return [protocols.Message("user", "1"), protocols.Message("assistant", "3")]

    def settings(**arguments):
        warm = {"steps": 1, "batch_size": 15, "arguments": arguments}
        return doubles.make_config(warm_start=warm, task={"arguments": {"levels": ("nested",)}}, steps=1)

    doubles.Bench(settings(levels=("plain",)), tmp_path, demonstrator=Demonstrator()).run()
    solvable = shown[:14]
    assert len(shown) == 15
    assert not any("(" in expression for expression in solvable), "nested expressions have parentheses"
    with pytest.raises(protocols.ConfigError, match=r"config\.warm_start\.arguments.*levelz"):
        doubles.Bench(settings(levelz=("plain",)), tmp_path)


def test_the_trained_parameters_are_exported(tmp_path):
    doubles.Bench(doubles.make_config(), tmp_path, export=tmp_path / "model").run()
    assert (tmp_path / "model" / "config.json").exists()


def test_a_signal_stops_the_run_with_a_checkpoint_and_the_same_command_goes_on(tmp_path):
    config = doubles.make_config(steps=6, checkpoint={"every": 100}, coordinator={"max_staleness": 1})

    class Signalled(doubles.RecordingTrainer):
        async def train_step(self, batch, shares=()):
            if self.state["version"] == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.1)
            return await super().train_step(batch, shares)

    bench = doubles.Bench(config, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "make_trainer", lambda log: Signalled(0.05, 3, log))
        summary = bench.run()
    assert summary.stopped
    assert summary.steps == 3, "the step under way is taken to its end"
    assert summary.sentence == "Stopped at step 3; the same command goes on from the checkpoint there."
    assert [step for step, _ in bench.recorder.steps] == [1, 2, 3]
    resumed = doubles.Bench(config, tmp_path)
    assert not resumed.run().stopped
    assert [step for step, _ in resumed.recorder.steps] == [4, 5, 6]
    assert sorted(resumed.trained["prompts"]) == prompts(18)


def test_a_stop_during_the_warm_start_keeps_the_steps_taken(tmp_path):
    config = doubles.make_config(
        warm_start={"steps": 5, "batch_size": 2}, checkpoint={"every": 2}, evaluation={"every": 4, "tasks": 2}
    )

    class Signalled(doubles.RecordingTrainer):
        async def warm_start_step(self, sequences):
            if self.state["warm"] == 1:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.1)
            return await super().warm_start_step(sequences)

    bench = doubles.Bench(config, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "make_trainer", lambda log: Signalled(0.05, 3, log))
        assert bench.run().stopped
    assert bench.trained["warm"] == 2
    resumed = doubles.Bench(config, tmp_path)
    resumed.run()
    assert resumed.trained["warm"] == 5
    assert [step for step, _ in bench.recorder.steps + resumed.recorder.steps] == [0, 1, 2, 3, 4]
    assert "evaluation/accuracy" in resumed.recorder.steps[0][1]


def test_after_a_stop_in_the_warm_start_neither_a_stop_nor_a_kill_takes_a_step_of_it_back(tmp_path):
    config = doubles.make_config(warm_start={"steps": 5, "batch_size": 2}, checkpoint={"every": 2})

    def run_until(warm: int) -> dict[str, int]:
        class Ends(doubles.RecordingTrainer):
            async def warm_start_step(self, sequences):
                bench.coordinator.request_stop()
                if self.state["warm"] == warm - 1:
                    return await super().warm_start_step(sequences)
                raise AssertionError("a warm-start step was lost")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(doubles, "make_trainer", lambda log: Ends(0.05, 3, log))
            bench = doubles.Bench(config, tmp_path)
            assert bench.run().stopped
        return bench.trained

    for warm in (1, 2, 3, 4):
        assert run_until(warm)["warm"] == warm

    class Dies(doubles.RecordingTrainer):
        async def train_step(self, batch, shares=()):
            await asyncio.sleep(1.0)
            raise protocols.WorkerLost("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "make_trainer", lambda log: Dies(0.05, 3, log))
        with pytest.raises(protocols.WorkerLost, match="killed"):
            doubles.Bench(config, tmp_path).run()
    resumed = doubles.Bench(config, tmp_path)
    resumed.run()
    assert resumed.trained["warm"] == 5
    assert {name for track, name, *_ in resumed.recorder.spans if track == "trainer"} == {"train step"}


def test_the_snapshot_of_a_handover_outlives_neither_the_run_that_left_it_nor_the_start_of_the_next(tmp_path):
    left = tmp_path / handover.FOLDER / "trainer-1"

    class LeavesIt(doubles.RecordingTrainer):
        async def train_step(self, batch, shares=()):
            assert not left.exists()
            left.mkdir(parents=True)
            raise protocols.WorkerLost("killed")

    left.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "make_trainer", lambda log: LeavesIt(0.05, 3, log))
        with pytest.raises(protocols.WorkerLost, match="killed"):
            doubles.Bench(doubles.make_config(), tmp_path).run()
    assert not left.parent.exists()


@pytest.mark.parametrize("version", [0, 2, 4])
def test_an_evaluation_that_a_stop_cut_short_is_made_when_the_run_goes_on(tmp_path, version):
    config = doubles.make_config(checkpoint={"every": 1}, evaluation={"every": 2, "tasks": 3})

    class Signalled(doubles.Tasks):
        def evaluation_task(self, index):
            if coordinator._step == version:
                coordinator.request_stop()
            return super().evaluation_task(index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "Tasks", Signalled)
        bench = doubles.Bench(config, tmp_path, export=tmp_path / "model")
        coordinator = bench.coordinator
        summary = bench.run()
    assert (summary.stopped, summary.steps) == (True, version)
    assert version not in summary.accuracies
    resumed = doubles.Bench(config, tmp_path, export=tmp_path / "model")
    assert sorted(resumed.run().accuracies) == [item for item in (0, 2, 4) if item >= version]
    step, scalars = resumed.recorder.steps[0]
    assert (step, "evaluation/accuracy" in scalars) == (version, True)
    assert sorted(bench.trained["prompts"]) == prompts(12)


def test_a_finished_run_says_so_and_starts_nothing(tmp_path):
    config = doubles.make_config(checkpoint={"every": 2})
    doubles.Bench(config, tmp_path, export=tmp_path / "model").run()
    again = doubles.Bench(config, tmp_path, export=tmp_path / "model")
    assert again.run().sentence.startswith("This run has taken its 4 steps already: nothing is left to do.")
    assert again.cluster.spawned == []


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_finished_run_goes_on_when_more_steps_are_asked_for(tmp_path, staleness):
    for steps in (3, 5):
        config = doubles.make_config(
            steps=steps, coordinator={"max_staleness": staleness}, checkpoint={"every": 4}, evaluation={"every": 2}
        )
        bench = doubles.Bench(config, tmp_path)
        assert bench.run().steps == steps
    assert [step for step, _ in bench.recorder.steps] == [4, 5]
    assert sorted(bench.trained["prompts"]) == prompts(15)
    assert max(bench.trained["staleness"]) <= staleness


@pytest.mark.parametrize(("schedule", "told"), [("constant", False), ("cosine", True), ("linear", True)])
def test_a_run_that_goes_on_says_that_its_decayed_learning_rate_jumps(tmp_path, schedule, told):
    for steps in (2, 2, 4):
        config = doubles.make_config(steps=steps, optimizer={"schedule": schedule}, checkpoint={"every": 1})
        bench = doubles.Bench(config, tmp_path)
        bench.run()
        jumps = [note for note in bench.recorder.notes if "rate jumps" in note]
        assert len(jumps) == (told and steps == 4)
    assert not told or "ends at step 4 and no longer at step 2" in jumps[0]


def test_a_run_that_died_before_it_exported_its_further_steps_exports_them(tmp_path):
    class Fails(doubles.RecordingTrainer):
        async def export(self, path: str) -> None:
            raise protocols.DataError("the disk is full")

    model = tmp_path / "model"
    doubles.Bench(doubles.make_config(checkpoint={"every": 1}), tmp_path, export=model).run()
    first = (model / "config.json").stat().st_mtime_ns
    config = doubles.make_config(steps=5, checkpoint={"every": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "make_trainer", lambda log: Fails(0.05, 3, log))
        with pytest.raises(protocols.DataError, match="the disk is full"):
            doubles.Bench(config, tmp_path, export=model).run()
    again = doubles.Bench(config, tmp_path, export=model)
    assert again.run().sentence == "Trained 5 steps on 15 groups."
    assert (model / "config.json").stat().st_mtime_ns > first
