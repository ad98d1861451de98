"""`coordinator.redundancy`: more groups than a step needs. The first to finish train, the rest is reported."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import coordinator_doubles as doubles
import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols


class Watched(doubles.TwoTurns):
    """Counts what is open, and what was closed."""

    open = closed = 0

    async def reset(self, task):
        type(self).open += 1
        return await super().reset(task)

    async def close(self):
        await asyncio.sleep(0.5)  # as a sandbox takes a moment to end
        type(self).open -= 1
        type(self).closed += 1


def reported(bench: doubles.Bench) -> dict[str, float]:
    """Groups replaced by reason, as the metrics of the steps tell."""
    counts: dict[str, float] = {}
    for _, scalars in bench.recorder.steps:
        for name, value in scalars.items():
            if name.startswith("groups/replaced_"):
                reason = name.removeprefix("groups/replaced_")
                counts[reason] = counts.get(reason, 0) + value
    return counts


def test_the_first_groups_to_finish_train_and_the_others_are_given_up_whole(tmp_path):
    """Of every five tasks, two are slow: three train, and two are aborted, closed and reported."""

    class Racing(Watched):
        tool_seconds = staticmethod(lambda index: 50.0 if index % 5 in (0, 3) else 0.01)

    config = doubles.make_config(coordinator={"redundancy": 0.5}, task={"tool_seconds": 100.0})
    bench = doubles.Bench(config, tmp_path, make_environment=Racing)
    summary = bench.run()
    assert sorted(bench.trained["prompts"]) == sorted(f"task-{index}" for index in range(20) if index % 5 not in (0, 3))
    assert summary.replaced == reported(bench) == {"redundant": 8}
    assert all(scalars["groups/replaced_redundant"] == 2 for _, scalars in bench.recorder.steps)
    assert all(scalars["tokens/replaced"] > 0 for _, scalars in bench.recorder.steps)
    assert sum(scalars["step/seconds"] for _, scalars in bench.recorder.steps) < 50.0
    assert (Racing.open, Racing.closed) == (0, 4 * 5 * 2)
    assert "biased towards short rollouts" in " ".join(bench.recorder.notes)
    traced = {record["prompt_id"] for record in bench.recorder.trajectories}
    assert traced == set(bench.trained["prompts"]), "no attempt of a group that was given up is in the trace"


def test_it_is_off_by_default(tmp_path):
    bench = doubles.Bench(doubles.make_config(), tmp_path)
    assert bench.run().replaced == {}
    assert not [note for note in bench.recorder.notes if "redundancy" in note]


def test_groups_given_up_do_not_count_towards_the_cap_on_replacements(tmp_path):
    config = doubles.make_config(coordinator={"redundancy": 3.0, "max_replacements": 0.0})
    bench = doubles.Bench(config, tmp_path)
    assert bench.run().replaced == {"redundant": 4 * 9}


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    staleness=st.integers(0, 3),
    redundancy=st.sampled_from([0.1, 0.34, 1.0, 2.5]),
    train_seconds=st.floats(0.0, 2.0),
    tool_seconds=st.lists(st.floats(0.0, 4.0), min_size=5, max_size=20),
    crashing=st.integers(0, 30),
)
def test_any_timing_keeps_the_bound_and_every_prompt_is_trained_once_or_reported(
    staleness, redundancy, train_seconds, tool_seconds, crashing
):
    class Varied(Watched):
        @staticmethod
        def tool_seconds(index: int) -> float:
            return tool_seconds[index % len(tool_seconds)]

        async def step(self, output):
            if self._index == crashing:
                raise OSError("gone")
            return await super().step(output)

    config = doubles.make_config(
        steps=5,
        coordinator={
            "max_staleness": staleness,
            "redundancy": redundancy,
            "max_replacements": 50.0,
        },
        task={"environment_retries": 1, "retry_seconds": 0.1},
    )
    with tempfile.TemporaryDirectory() as folder:
        bench = doubles.Bench(config, Path(folder), make_environment=Varied, trainer={"seconds": train_seconds})
        summary = bench.run()
        trained, ages = bench.trained["prompts"], bench.trained["staleness"]
        begun = bench.coordinator._parts.batches.data_position
    assert max(ages) <= staleness
    assert len(set(trained)) == len(trained) == 15
    assert f"task-{crashing}" not in trained
    assert sum(summary.replaced.values()) == begun - 15
    assert summary.replaced == reported(bench)
    assert summary.replaced["redundant"] <= 5 * config.coordinator.spare_groups
    assert set(summary.replaced) <= {"redundant", "environment"}
    assert Varied.open == 0


class DiesInStep(doubles.RecordingTrainer):
    """Ends the run, as a kill would, in the training step after `last`."""

    last = 0

    async def train_step(self, batch: protocols.TrainBatch, shares=()):
        if self.state["version"] == self.last:
            raise protocols.WorkerLost("killed")
        return await super().train_step(batch, shares)


@hypothesis.settings(max_examples=8)
@hypothesis.given(
    staleness=st.integers(0, 2),
    every=st.integers(1, 3),
    dies_at=st.lists(st.integers(1, 5), max_size=3).map(sorted),
    tool_seconds=st.lists(st.floats(0.0, 2.0), min_size=3, max_size=9),
)
def test_wherever_it_dies_what_it_trains_and_what_it_reports_add_up(
    tmp_path_factory, staleness, every, dies_at, tool_seconds
):
    class Varied(doubles.TwoTurns):
        @staticmethod
        def tool_seconds(index: int) -> float:
            return tool_seconds[index % len(tool_seconds)]

    workdir = tmp_path_factory.mktemp("run")
    config = doubles.make_config(
        steps=6, coordinator={"max_staleness": staleness, "redundancy": 0.5}, checkpoint={"every": every, "keep": 1}
    )
    for last in [*dies_at, 1000]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DiesInStep, "last", last)
            patch.setattr(doubles, "make_trainer", lambda log: DiesInStep(0.3, 3, log))
            bench = doubles.Bench(config, workdir, make_environment=Varied)
            if last < 6:
                with pytest.raises(protocols.WorkerLost, match="killed"):
                    bench.run()
            else:
                summary = bench.run()
    trained, begun = bench.trained["prompts"], bench.coordinator._parts.batches.data_position
    assert len(set(trained)) == len(trained) == 18
    assert set(trained) <= {f"task-{index}" for index in range(begun)}
    assert summary.replaced == {"redundant": begun - 18}
    assert max(bench.trained["staleness"]) <= staleness


@pytest.mark.parametrize(
    ("redundancy", "groups", "spare"), [(0.0, 32, 0), (0.1, 30, 3), (0.25, 32, 8), (0.01, 8, 1), (1.5, 3, 5)]
)
def test_the_share_is_rounded_up_to_groups(redundancy, groups, spare):
    config = config_lib.CoordinatorConfig(groups_per_step=groups, redundancy=redundancy)
    assert config.spare_groups == spare


@pytest.mark.parametrize("redundancy", [-0.1, float("nan"), float("inf")])
def test_a_share_that_cannot_be_is_refused_by_name(redundancy):
    with pytest.raises(protocols.ConfigError, match=r"config\.coordinator\.redundancy: must"):
        config_lib.CoordinatorConfig(redundancy=redundancy)
