"""Workloads: pure scripts, the published shapes, and replay of recorded trajectories."""

import json
import math
import statistics
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.simulator import traces, workloads, world

TASKS = 320
EARLY, LATE = range(200), range(1_000_000, 1_000_200)
"""Tasks at the very start of a run planned to be endless, and tasks at the end of the drift."""


def scripts_of(shape, tasks, *, seed=0, variation=1.0, planned=TASKS, samples=16):
    workload = workloads.Synthetic(shape, seed, planned, variation)
    return [[workload.script(task, sample) for sample in range(samples)] for task in tasks]


def flat(groups):
    return [script for group in groups for script in group]


def mean_tokens(drawn):
    return statistics.fmean(script.generated_tokens for script in drawn)


@pytest.fixture(scope="module")
def late_swe():
    return flat(scripts_of("swe", LATE))


@given(
    shape=st.sampled_from(list(workloads.SHAPES)),
    seed=st.integers(0, 5),
    task=st.integers(0, 10_000),
    sample=st.integers(0, 31),
    variation=st.floats(0.0, 3.0),
)
def test_a_synthetic_script_is_pure_well_formed_and_within_its_context(shape, seed, task, sample, variation):
    workload = workloads.Synthetic(shape, seed, TASKS, variation)
    script = workload.script(task, sample)
    assert script == workloads.Synthetic(shape, seed, TASKS, variation).script(task, sample)
    assert script.prompt_tokens == workload.script(task, sample + 1).prompt_tokens
    assert all(turn.generated_tokens >= 1 and turn.payload_tokens >= 0 for turn in script.turns)
    assert all((turn.tool is None) == (turn.status is None) for turn in script.turns)
    assert script.turns[-1].tool is None
    assert script.context_tokens < 131_072


def test_seeds_give_other_work():
    first, second = (flat(scripts_of("swe", range(4), seed=seed)) for seed in (0, 1))
    assert first != second


def test_software_engineering_drifts_from_2500_to_11500_generated_tokens(late_swe):
    early = flat(scripts_of("swe", range(400), planned=10**9))
    assert mean_tokens(early) == pytest.approx(2_500, rel=0.15)
    assert mean_tokens(late_swe) == pytest.approx(11_500, rel=0.1)


def test_a_drift_that_reverses_is_longest_in_the_middle_and_ends_as_it_begins(late_swe):
    config = workloads.WorkloadConfig(drift="reverse")
    workload = workloads.create(config, seed=0, tasks=100_001, max_context=131_072)
    first, middle, last = (
        mean_tokens([workload.script(task, sample) for task in range(start, start + 200) for sample in range(16)])
        for start in (0, 49_900, 99_801)
    )
    assert middle == pytest.approx(mean_tokens(late_swe), rel=0.1)
    assert last == pytest.approx(first, rel=0.15)


def test_software_engineering_takes_at_most_twenty_turns_on_average(late_swe):
    assert statistics.fmean(len(script.turns) for script in late_swe) <= 20


def test_the_longest_tenth_of_a_batch_takes_over_half_of_its_rollout_time():
    """At one speed for all, what is left after nine in ten have ended is more than half of the whole."""
    for tasks, planned in ((EARLY, 10**9), (LATE, TASKS)):
        groups = scripts_of("swe", tasks, planned=planned)
        shares = []
        for start in range(0, len(groups), 32):
            lengths = sorted(script.generated_tokens for script in flat(groups[start : start + 32]))
            shares.append(1 - lengths[int(0.9 * len(lengths))] / lengths[-1])
        assert statistics.fmean(shares) > 0.5


def test_what_the_first_tool_returns_tells_how_long_an_attempt_becomes(late_swe):
    """Published: about 1k tokens lead to under 8k, 12.5k to 21k, repeated failures to over 40k."""
    small, large, failing = [], [], []
    for script in late_swe:
        failures = sum(turn.status in ("failure", "timeout") for turn in script.turns)
        if failures >= 10:
            failing.append(script)
        elif script.turns[0].payload_tokens > 8_000:
            large.append(script)
        elif max(turn.payload_tokens for turn in script.turns) < 8_000:
            small.append(script)
    assert statistics.fmean(script.generated_tokens < 8_000 for script in small) > 0.9
    assert mean_tokens(large) == pytest.approx(21_000, rel=0.15)
    assert mean_tokens(failing) > 40_000
    assert min(len(small), len(large), len(failing)) > 100


def test_a_prompt_alone_tells_little_and_less_with_more_variation():
    shares = []
    for variation in (0.5, 1.0, 2.0):
        groups = [
            [math.log(script.generated_tokens) for script in group]
            for group in scripts_of("swe", LATE[:100], variation=variation)
        ]
        total = statistics.pvariance([value for group in groups for value in group])
        shares.append(statistics.fmean(statistics.pvariance(group) for group in groups) / total)
    assert shares == sorted(shares)
    assert shares[1] > 0.6


def test_the_first_search_result_tells_the_bucket_of_91_in_100_requests():
    drawn = flat(scripts_of("search", range(400)))
    seen = defaultdict(Counter)
    for script in drawn:
        remaining = script.generated_tokens - script.turns[0].generated_tokens
        seen[script.turns[0].status][remaining > 2_000] += 1
    right = sum(max(counter.values()) for counter in seen.values())
    assert right / len(drawn) == pytest.approx(0.91, abs=0.02)
    assert statistics.median(script.generated_tokens for script in drawn) < 1_000


def test_mathematics_is_one_long_output_without_a_tool():
    drawn = flat(scripts_of("math", range(100)))
    assert all(len(script.turns) == 1 for script in drawn)
    assert mean_tokens(drawn) == pytest.approx(7_500, rel=0.15)


def record(trajectory_id="a/0", prompt_id="a", tokens=(30, 40, 50)):
    turns = [
        {"generated_tokens": count, "tool": "bash", "status": "success", "payload_tokens": 20, "tool_seconds": 1.5}
        for count in tokens
    ]
    turns[-1] |= {"tool": None, "status": None, "payload_tokens": 0, "tool_seconds": 0.0}
    return {
        "trajectory_id": trajectory_id,
        "prompt_id": prompt_id,
        "prompt_tokens": 100,
        "turns": turns,
        "mood": "good",
    }


@pytest.fixture
def write(tmp_path):
    def write(*records):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(item) + "\n" for item in records))
        return path

    return write


def replay(path, *, sigma=0.6, shuffle=True, max_context=131_072):
    return traces.load(path, seed=0, sigma=sigma, max_context=max_context, shuffle=shuffle)


def test_recorded_trajectories_come_first_and_as_they_were(write):
    workload = replay(write(record("a/0"), record("b/0", "b", (5, 6)), record("a/1", tokens=(7, 8))), shuffle=False)
    first, second, other = workload.script(0, 0), workload.script(0, 1), workload.script(1, 0)
    assert [turn.generated_tokens for turn in first.turns] == [30, 40, 50]
    assert first.turns[0] == protocols.Turn(30, "bash", "success", 20, 1.5)
    assert (second.generated_tokens, other.generated_tokens) == (15, 11)
    assert workload.script(2, 0) == first


def test_the_two_parts_of_a_trace_share_no_prompt_and_hold_them_all(write):
    path = write(*(record(f"{index}/0", str(index), (index + 1, 1)) for index in range(5)))
    even, odd = (
        traces.load(path, seed=0, sigma=0.0, max_context=1_000, part=part, shuffle=False) for part in ("even", "odd")
    )
    assert [even.script(index, 0).generated_tokens for index in range(3)] == [2, 4, 6]
    assert [odd.script(index, 0).generated_tokens for index in range(2)] == [3, 5]
    with pytest.raises(protocols.DataError, match="its odd prompts are none; it has 1 in all"):
        traces.load(write(record()), seed=0, sigma=0.0, max_context=1_000, part="odd")


def test_every_epoch_replays_every_prompt_once_in_another_order(write):
    workload = replay(write(*(record(f"{index}/0", str(index), (index + 1, 1)) for index in range(20))))
    epochs = [[workload.script(20 * epoch + index, 0).generated_tokens for index in range(20)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [index + 2 for index in range(20)]
    assert epochs[0] != epochs[1]


def test_without_variation_siblings_repeat_what_was_recorded(write):
    workload = replay(write(record()), sigma=0.0)
    assert workload.script(0, 0) == workload.script(0, 9)


def test_siblings_have_the_recorded_length_on_average_and_spread_by_the_width(write):
    path = write(record(tokens=(100,) * 40))
    for sigma in (0.3, 0.6):
        lengths = [replay(path, sigma=sigma).script(0, sample).generated_tokens for sample in range(1, 1_500)]
        assert statistics.fmean(lengths) == pytest.approx(4_000, rel=0.05)
        assert statistics.pstdev(map(math.log, lengths)) == pytest.approx(sigma, rel=0.15)


def test_longer_siblings_fail_more_often(write):
    workload = replay(write(record(tokens=(100,) * 40)))
    siblings = [workload.script(0, sample) for sample in range(1, 400)]
    longer = [script for script in siblings if len(script.turns) > 44]
    shorter = [script for script in siblings if len(script.turns) < 40]
    failures = [sum(turn.status == "failure" for script in kind for turn in script.turns) for kind in (shorter, longer)]
    assert failures[0] == 0 < failures[1]


@given(
    tokens=st.lists(st.integers(0, 500), min_size=1, max_size=8).filter(any),
    sigma=st.floats(0.0, 2.0),
    room=st.integers(1, 2_000),
    sample=st.integers(0, 40),
)
def test_a_made_sibling_is_well_formed_and_stays_within_the_context(tokens, sigma, room, sample):
    turns = tuple(protocols.Turn(count, "t", "success", 7, 0.5) for count in tokens[:-1])
    original = traces.scripts.Script(10, (*turns, protocols.Turn(tokens[-1])))
    workload = traces.RecordedWorkload(((original,),), 3, sigma, 10 + room)
    made = workload.script(5, sample)
    assert made == workload.script(5, sample)
    assert made.turns[-1].tool is None
    if sample > 0 and sigma > 0:
        assert all(turn.generated_tokens >= 1 for turn in made.turns)
        assert made.context_tokens < 10 + room or len(made.turns) == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no trajectory"),
        ("{]\n", "line 1: this is not JSON"),
        (json.dumps(record()) + "\n" + json.dumps(record(tokens=(3, -4))) + "\n", 'line 2, turn 1: "generated_tokens"'),
        (json.dumps({"trajectory_id": "a", "prompt_id": "a", "turns": []}) + "\n", 'line 1: "prompt_tokens"'),
        (json.dumps(record(tokens=(0, 0))) + "\n", "no turn generates a token"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused_by_file_and_line(tmp_path, text, sentence):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(protocols.DataError, match=r"bad\.jsonl") as error:
        traces.read(path)
    assert sentence in str(error.value)


def test_limits_that_would_cut_attempts_short_are_named_with_the_value_they_need():
    config = config_lib.RunConfig(
        steps=2,
        rollout=config_lib.RolloutConfig(max_context=4_096, max_tokens=2_048),
        trainer=config_lib.TrainerConfig(row_tokens=4_096),
    )
    workload = workloads.create(workloads.WorkloadConfig(), seed=0, tasks=64, max_context=4_096)
    with pytest.raises(protocols.ConfigError, match=r"rollout.max_context: 4096 cuts rollouts .*; give \d+"):
        workloads.check_fits(workload, config, world.SimulationConfig())


def test_an_unknown_shape_is_answered_with_the_nearest():
    with pytest.raises(protocols.ConfigError, match="did you mean 'search'"):
        workloads.WorkloadConfig(shape="serch")


def test_fitted_buckets_give_each_degree_tokens_in_proportion_to_its_devices(write):
    lengths = [10 * index for index in range(1, 101)]
    workload = replay(write(*(record(f"{length}/0", str(length), (length,)) for length in lengths)))
    drawn = [script for prompt in workload.prompts for script in prompt]
    kinds = [(degree, "") for degree in (1, 1, 1, 1, 2, 2, 4)]
    bounds = workloads.fitted_bounds(drawn, kinds)
    assert list(bounds) == sorted(set(bounds))
    below = [sum(length for length in lengths if length <= bound) / sum(lengths) for bound in bounds]
    assert below == pytest.approx([4 / 12, 8 / 12], abs=0.02)
    assert workloads.fitted_bounds(drawn, [(2, ""), (2, "")]) == ()
    unlike = [(degree, name) for degree, name in zip((1, 1, 1, 1, 2, 2, 4), "aaaabba", strict=True)]
    assert workloads.fitted_bounds(drawn, unlike) == bounds


def test_fitted_buckets_ascend_where_all_lengths_are_the_same(write):
    workload = replay(write(record("a/0", "a", (7,)), record("b/0", "b", (7,))))
    kinds = [(degree, "") for degree in (1, 2, 4, 8)]
    assert workloads.fitted_bounds([script for prompt in workload.prompts for script in prompt], kinds) == (7, 8, 9)
