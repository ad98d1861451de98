"""How well outcomes foretell what is left: in worlds where it is known, and against scipy's analysis of variance."""

from __future__ import annotations

import math
import random
import statistics

import hypothesis
import pytest
from hypothesis import strategies as st
from scipy import stats

from libra_jax import protocols
from libra_jax.scheduling.prediction import paths, prediction_quality


def rollout(prompt, step, turns):
    """Turns as (tokens, tool, status, payload); the last one's return ends it."""
    generated = tuple(tokens for tokens, *_ in turns)
    returns = tuple(protocols.CausalState(tool, payload, status) for _, tool, status, payload in turns[:-1])
    return prediction_quality.RecordedRollout(prompt, step, generated, returns)


def world(left, steps=12, size=32, seed=0):
    """Rollouts whose one tool return has status success or failure; `left(rng, status)` tokens come after it."""
    rng = random.Random(seed)
    rollouts = []
    for step in range(steps):
        for index in range(size):
            status = rng.choice(("success", "failure"))
            turns = [(rng.randint(5, 20), "python", status, 30), (left(rng, status), None, None, 0)]
            rollouts.append(rollout(f"{step}/{index}", step, turns))
    return rollouts


def test_an_outcome_that_decides_everything_is_found_to():
    found = prediction_quality.measure(
        world(lambda rng, status: {"success": 10, "failure": 90}[status] + rng.randint(-2, 2))
    )
    assert found.explained > 0.99
    assert found.path_explained > 0.9
    assert {state.status: round(state.mean) for state in found.states} == {"success": 10, "failure": 90}
    assert {state.status: state.p90 for state in found.states} == {"success": 12, "failure": 92}
    assert found.by_state > found.majority + 0.15
    assert found.by_path > found.majority + 0.15
    assert found.bits > 1.0 > 10 * found.bits_error
    assert found.covered > 0.6


def test_an_outcome_that_says_nothing_is_found_to():
    found = prediction_quality.measure(world(lambda rng, status: rng.randint(1, 300), steps=40))
    assert abs(found.explained) < 0.02
    assert found.by_state == pytest.approx(1 / 3, abs=0.05)
    assert found.by_path == pytest.approx(1 / 3, abs=0.05)
    assert found.path_explained < 0.05
    assert abs(found.bits) < 0.08, "where nothing tells, predictions are nearly those of one distribution"
    assert found.covered == pytest.approx(prediction_quality.COVERED, abs=0.05)


def test_what_the_whole_course_shows_is_learnt():
    """Each edit of a rollout leaves half as much to do, and no tool return tells how many there were before."""
    rng = random.Random(3)
    rollouts = []
    for step in range(16):
        for index in range(16):
            left, turns = rng.randint(3_000, 6_000), []
            for tool in rng.choices(("edit", "read"), k=6):
                turns.append((20, tool, "success", 100))
                left //= 2 if tool == "edit" else 1
            rollouts.append(rollout(f"{step}/{index}", step, [*turns, (left + 60, None, None, 0)]))
    found = prediction_quality.measure(rollouts)
    assert found.bits > 0.1 > 2 * found.bits_error


def test_nothing_of_a_trajectory_is_known_before_it_ends():
    """Every step has a length of its own: what the step before taught is always wrong, however the buckets are cut."""
    lengths = {step: (10, 100, 1000)[step % 3] for step in range(30)}
    rollouts = [
        rollout(f"{step}/{index}", step, [(5, "python", "success", 30), (lengths[step], None, None, 0)])
        for step in range(30)
        for index in range(20)
    ]
    found = prediction_quality.measure(rollouts)
    assert found.by_state < 0.5
    assert found.by_path < 0.5


@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(["success", "failure"]), st.integers(0, 400)),
        min_size=2,
        max_size=60,
    )
)
def test_the_variance_between_states_is_that_of_an_analysis_of_variance(samples):
    rollouts = [
        rollout(str(index), 0, [(3, tool, status, 10), (tokens, None, None, 0)])
        for index, (tool, status, tokens) in enumerate(samples)
    ]
    found = prediction_quality.measure(rollouts)
    groups: dict[tuple[str, str], list[int]] = {}
    for tool, status, tokens in samples:
        groups.setdefault((tool, status), []).append(tokens)
    values = [tokens for *_, tokens in samples]
    assert sum(state.count for state in found.states) == len(values)
    if len(values) <= len(groups) or statistics.pvariance(values) == 0:
        assert math.isnan(found.explained)
    elif len(groups) == 1:
        assert found.explained == pytest.approx(0.0, abs=1e-9)
    elif not any(statistics.pvariance(group) for group in groups.values()):
        assert found.explained == 1.0
    else:
        between, within = len(groups) - 1, len(values) - len(groups)
        ratio = stats.f_oneway(*groups.values()).statistic
        assert found.explained == pytest.approx(between * (ratio - 1) / (between * ratio + within), abs=1e-6)


def test_every_return_that_is_followed_by_an_output_counts_once():
    turns = [(4, "a", "success", 10), (6, "b", "timeout", 5000), (8, None, None, 0)]
    found = prediction_quality.measure([rollout("p", step, turns) for step in (1, 2)])
    assert [(state.tool, state.count, state.mean, state.p90) for state in found.states] == [
        ("a", 2, 14.0, 14),
        ("b", 2, 8.0, 8),
    ]
    assert found.judged == 2
    assert sum(map(sum, found.confusion)) == 2


def test_without_a_tool_return_there_is_nothing_to_judge():
    assert prediction_quality.measure([]) is None
    assert prediction_quality.measure([rollout("p", 1, [(40, None, None, 0)])]) is None
    assert prediction_quality.measure([rollout("p", 1, [])]) is None


def test_a_single_step_has_states_but_no_verdict():
    found = prediction_quality.measure([rollout("p", 1, [(4, "a", "success", 10), (8, None, None, 0)])] * 3)
    assert (found.judged, found.states[0].count) == (0, 3)
    assert math.isnan(found.majority)
    assert math.isnan(found.by_path)


def test_an_output_without_a_call_is_the_environments_return_as_in_the_agent_loop():
    record = {"prompt_id": "p", "turns": [{"generated_tokens": 3, "payload_tokens": 9}, {"generated_tokens": 4}]}
    (read,) = prediction_quality.rollouts(record)
    assert read == prediction_quality.RecordedRollout(
        "p", None, (3, 4), (protocols.CausalState("environment", 9, "success"),)
    )


@pytest.mark.parametrize("payload", [0, 1, 63, 64, 127, 128, 5000, 100_000, 2**17, 2**20])
def test_a_size_class_is_told_as_a_range_that_holds_its_payloads(payload):
    _, size_class, _ = paths.causal_key(protocols.CausalState("tool", payload, "success"))
    text = prediction_quality.told(size_class).replace(",", "")
    numbers = [int(word) for word in text.split() if word.isdigit()]
    if text.startswith("under"):
        assert payload < numbers[0]
    elif text.endswith("more"):
        assert payload >= numbers[0]
    else:
        assert numbers[0] <= payload <= numbers[1]


def test_each_segment_of_a_rollout_is_read_as_a_request():
    turns = [
        {"generated_tokens": tokens, "tool": "t", "status": "success", "payload_tokens": 9, "segment": place}
        for tokens, place in ((3, 0), (4, 1), (5, 0), (6, 1))
    ]
    first, second = prediction_quality.rollouts({"prompt_id": "p", "step": 2, "turns": turns})
    assert (first.generated, second.generated) == ((3, 5), (4, 6))
    assert len(first.returns) == len(second.returns) == 1


@hypothesis.given(
    st.lists(st.floats(0, 1e5), min_size=6, max_size=6).map(sorted).map(tuple), st.floats(0, 20), st.floats(0, 5)
)
def test_probabilities_ascend_from_0_to_1(sketch, log, further):
    logs = prediction_quality.logs_of(sketch)
    assert 0.0 <= prediction_quality.below(logs, log) <= prediction_quality.below(logs, log + further) <= 1.0
    assert 0.0 < prediction_quality.loss(logs, log) < 11.0


def test_certainty_that_is_right_costs_least_and_twice_the_truth_is_no_hit():
    sketches = (500.0,) * 6, (100.0, 300.0, 500.0, 700.0, 1_000.0, 3_000.0)
    sure, unsure = map(prediction_quality.logs_of, sketches)
    right, wrong = math.log2(501), math.log2(1_001)
    assert prediction_quality.loss(sure, right) < 0.2 < prediction_quality.loss(unsure, right)
    assert prediction_quality.loss(sure, wrong) > prediction_quality.loss(unsure, wrong)
