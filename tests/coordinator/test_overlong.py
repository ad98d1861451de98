"""`algorithm.overlong_buffer`: DAPO's soft penalty falls on training rewards alone, once."""

from __future__ import annotations

import coordinator_doubles as doubles
import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.coordinator import overlong


@hypothesis.given(most=st.integers(1, 10_000), data=st.data())
def test_the_penalty_is_zero_before_the_buffer_and_whole_at_the_limit(most, data):
    buffer = data.draw(st.integers(1, most))
    tokens = data.draw(st.integers(0, 2 * most))
    share = overlong.penalty(tokens, most, buffer)
    # Eq. 13 of DAPO, whose reward is the negative share.
    if tokens <= most - buffer:
        assert share == 0.0
    elif tokens <= most:
        assert share == pytest.approx(-((most - buffer) - tokens) / buffer)
    else:
        assert share == 1.0


SHORT = {"task": {"max_tokens": 16}, "algorithm": {"overlong_buffer": 12, "overlong_penalty": 0.5}}


def test_training_rewards_fall_and_nothing_else_sees_it(tmp_path):
    config = doubles.make_config(evaluation={"every": 4, "tasks": 3}, **SHORT)
    plain = doubles.make_config(evaluation={"every": 4, "tasks": 3}, task={"max_tokens": 16})
    shaped, reference = doubles.Bench(config, tmp_path / "shaped"), doubles.Bench(plain, tmp_path / "plain")
    shaped.run(), reference.run()
    rewards = {record["trajectory_id"]: record["reward"] for record in reference.recorder.trajectories}
    seen = set()
    for record in shaped.recorder.trajectories:
        generated = sum(turn["generated_tokens"] for turn in record["turns"])
        share = min(1.0, max(0.0, (generated - 4) / 12))
        assert record["reward"] == pytest.approx(rewards[record["trajectory_id"]] - 0.5 * share)
        seen.add(share > 0)
    assert seen == {False, True}
    for (_, with_penalty), (_, without) in zip(shaped.recorder.steps, reference.recorder.steps, strict=True):
        for name in ("agent/odd", "evaluation/accuracy"):
            assert with_penalty.get(name) == without.get(name)
        if "loss" in with_penalty:
            assert with_penalty["reward/mean"] == pytest.approx(
                without["reward/mean"] - with_penalty["reward/overlong"]
            )
            assert "reward/overlong" not in without


class Right(doubles.TwoTurns):
    """Every answer is right, so only lengths differ."""

    async def step(self, output: str) -> protocols.StepResult:
        result = await super().step(output)
        return protocols.StepResult(done=True, reward=1.0) if result.done else result


def test_the_zero_variance_filter_does_not_see_the_penalty(tmp_path):
    algorithm = {**SHORT["algorithm"], "overlong_buffer": 16, "filter": "zero_variance"}
    config = doubles.make_config(task={"max_tokens": 16}, algorithm=algorithm)
    with pytest.raises(protocols.LibraError, match=r"the same reward.*\(zero_variance 4\) and 0 trained"):
        doubles.Bench(config, tmp_path, make_environment=Right).run()


def test_a_resumed_run_takes_the_penalty_once(tmp_path):
    def rewards(bench):
        return {record["trajectory_id"]: record["reward"] for record in bench.recorder.trajectories}

    whole = doubles.Bench(doubles.make_config(**SHORT), tmp_path / "whole")
    whole.run()
    changes = {**SHORT, "coordinator": {"max_staleness": 1}, "checkpoint": {"every": 1}}
    first = doubles.Bench(doubles.make_config(steps=2, **changes), tmp_path / "parts")
    first.run()
    second = doubles.Bench(doubles.make_config(steps=4, **changes), tmp_path / "parts")
    second.run()
    assert rewards(first) | rewards(second) == rewards(whole)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"overlong_buffer": -1}, r"overlong_buffer: must not be negative"),
        ({"overlong_penalty": 0.5}, r"overlong_penalty: 0\.5 has no effect with algorithm\.overlong_buffer=0"),
        ({"overlong_buffer": 8, "overlong_penalty": 0.0}, r"overlong_penalty: must be positive"),
        ({"overlong_buffer": 129}, r"overlong_buffer: 129 tokens exceed the 128 that a rollout may generate"),
    ],
)
def test_settings_without_an_effect_are_refused(changes, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        doubles.make_config(algorithm=changes)


def test_a_buffer_beyond_the_context_is_refused():
    with pytest.raises(protocols.ConfigError, match=r"no rollout gets there: .* begins at 300 generated tokens"):
        doubles.make_config(algorithm={"overlong_buffer": 20}, rollout={"max_tokens": 80})
