"""Lengths that are asked for: the log-normal has the mean and P90 given, and attempts are reshaped to it."""

import statistics

import pytest

from libra_jax import protocols
from libra_jax.simulator import scripts, workloads


def drawn(shape: str, count: int = 400) -> list[scripts.Script]:
    workload = workloads.Synthetic(shape, 0, count)
    return [workload.script(task, 0) for task in range(count)]


@pytest.mark.parametrize("pair", [(4000, 9000), (4000, 7000), (300, 310), (50_000, 50_000)])
def test_a_log_normal_has_the_mean_and_p90_that_are_asked_for(pair):
    mean, p90 = pair
    sample = scripts.LogNormal.fitted(mean, p90).sample(8192)
    assert statistics.fmean(sample) == pytest.approx(mean, rel=1e-3)
    assert sample == sorted(sample)
    assert sample[int(0.9 * len(sample))] == pytest.approx(p90, rel=5e-3)


@pytest.mark.parametrize("pair", [(4000, 9200), (4000, 3999), (4000, float("nan")), (float("inf"), 9), (-1, 5), (0, 0)])
def test_a_pair_that_no_log_normal_has_is_refused(pair):
    with pytest.raises(protocols.ConfigError, match="--generated_tokens: "):
        scripts.LogNormal.fitted(*pair)


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ({"generated": float("nan")}, "generated_tokens"),
        ({"generated": -4.0}, "generated_tokens"),
        ({"generated": 1e12}, "generated_tokens"),
        ({"turns": 0}, "turns"),
        ({"turns": 1001}, "turns"),
        ({"payload_tokens": -1}, "payload_tokens"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
    ],
)
def test_a_length_that_is_none_is_refused_by_its_flag(wanted, name):
    with pytest.raises(protocols.ConfigError, match=f"--{name}: .* out of range"):
        scripts.RequestedLengths(**wanted)


@pytest.mark.parametrize("shape", ["swe", "search", "math"])
def test_attempts_get_the_lengths_and_keep_their_order_and_turns(shape):
    before = drawn(shape)
    after = scripts.reshaped(before, scripts.RequestedLengths(scripts.LogNormal.fitted(4000, 7000)))
    assert statistics.fmean(script.generated_tokens for script in after) == pytest.approx(4000, rel=2e-3)
    order = sorted(range(len(before)), key=lambda index: before[index].generated_tokens)
    sizes = [after[index].generated_tokens for index in order]
    assert sizes == sorted(sizes)
    assert [len(script.turns) for script in after] == [len(script.turns) for script in before]


def test_turns_returns_and_prompts_are_those_asked_for():
    wanted = scripts.RequestedLengths(600.0, turns=4, payload_tokens=250, prompt_tokens=77)
    after = scripts.reshaped(drawn("search"), wanted)
    assert statistics.fmean(script.generated_tokens for script in after) == pytest.approx(600, rel=0.01)
    for script in after:
        assert (len(script.turns), script.prompt_tokens) == (4, 77)
        assert [turn.payload_tokens for turn in script.turns[:-1]] == [250] * 3
        assert all(turn.generated_tokens > 0 for turn in script.turns)
        assert max(turn.generated_tokens for turn in script.turns) <= script.generated_tokens / 4 + 4


def test_fewer_tokens_than_turns_leave_turns_out():
    after = scripts.reshaped(drawn("swe"), scripts.RequestedLengths(3.0))
    assert all(len(script.turns) <= script.generated_tokens for script in after)


@pytest.mark.parametrize(
    "wanted",
    [{"payload_tokens": 5}, {"turns": 1, "payload_tokens": 5}, {"turns": 3}, {"turns": 1, "payload_tokens": 0}],
)
def test_what_one_turn_cannot_have_is_refused(wanted):
    with pytest.raises(protocols.ConfigError, match=r"--(payload_tokens|turns): "):
        scripts.reshaped(drawn("math"), scripts.RequestedLengths(**wanted))
