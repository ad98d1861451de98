"""The regression against numpy's least squares, the mixture, and what is learnt from the course of requests."""

from __future__ import annotations

import json
import math
import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling.prediction import correction, evidence, features, mixture, prefix_tree, regression

NUMBERS = st.floats(-2, 2).map(lambda value: round(value, 2))
SAMPLES = st.lists(st.tuples(st.tuples(NUMBERS, NUMBERS, NUMBERS), NUMBERS), min_size=1, max_size=12)
SKETCHES = st.lists(st.floats(0, 1e5), min_size=6, max_size=6).map(lambda values: tuple(sorted(values)))


def regressed(samples, prior: float = 2.0) -> regression.Ridge:
    ridge = regression.Ridge(3, prior)
    for found, target in samples:
        ridge.add(list(found), target, 1.0)
    return ridge


@hypothesis.given(SAMPLES)
def test_sweeps_reach_the_ridge_solution(samples):
    ridge = regressed(samples)
    for _ in range(400):
        ridge.sweep()
    x, y = (np.array(values, float) for values in zip(*samples, strict=True))
    expected = np.linalg.solve(x.T @ x + 2.0 * np.eye(3), x.T @ y)
    assert ridge.weights == pytest.approx(list(expected), abs=1e-3)


@hypothesis.given(SAMPLES, SAMPLES)
def test_merged_regressions_hold_the_samples_of_both(first, second):
    one, other, both = regressed(first), regressed(second), regressed([*first, *second])
    one.merge(other, 0.5)
    again = regression.Ridge(3, 2.0)
    again.restore(json.loads(json.dumps(one.snapshot())))
    assert again.snapshot() == one.snapshot()
    for ridge in (again, both):
        for _ in range(400):
            ridge.sweep()
    assert again.weights == pytest.approx(both.weights, abs=1e-3)


def test_a_sample_that_fades_is_one_of_less_weight():
    ridge, lighter = (regression.Ridge(1, 1.0) for _ in range(2))
    ridge.add([1.0], 8.0, 1.0)
    ridge.fade(0.5)
    lighter.add([1.0], 8.0, 0.5)
    for each in (ridge, lighter):
        each.sweep()
    assert ridge.weights == lighter.weights


@hypothesis.given(st.lists(NUMBERS, min_size=1, max_size=120))
def test_errors_are_the_latest_half(errors):
    window = regression.Residuals(40)
    for error in errors:
        window.add(error)
    window.settle()
    kept = min(40, max(min(len(errors), regression.FEWEST_ERRORS), (len(errors) + 1) // 2))
    assert window.quantiles == prefix_tree.sketch_of(sorted(errors[-kept:]))


@hypothesis.given(SKETCHES, st.floats(0, 20), st.floats(0, 5))
def test_probabilities_ascend_from_0_to_1(sketch, log, further):
    logs = mixture.logs_of(sketch)
    assert 0.0 <= mixture.below(logs, log) <= mixture.below(logs, log + further) <= 1.0
    assert 0.0 < mixture.loss(logs, log) < 11.0


@hypothesis.given(SKETCHES)
def test_logarithms_keep_the_tokens(sketch):
    assert mixture.tokens_of(mixture.logs_of(sketch)) == pytest.approx(sketch, rel=1e-9, abs=1e-9)


def test_certainty_that_is_right_costs_least_and_twice_the_truth_is_no_hit():
    sure, unsure = mixture.logs_of((500.0,) * 6), mixture.logs_of((100.0, 300.0, 500.0, 700.0, 1_000.0, 3_000.0))
    right, wrong = math.log2(501), math.log2(1_001)
    assert mixture.loss(sure, right) < 0.2 < mixture.loss(unsure, right)
    assert mixture.loss(sure, wrong) > mixture.loss(unsure, wrong)


def test_the_mixture_follows_whichever_predicts_better():
    mixed = mixture.Mixture(3.0)
    assert 0.5 < mixed.share < 0.95
    for _ in range(20):
        mixed.add(-1.0, 2.0)
    assert mixed.share < 0.01
    for _ in range(100):
        mixed.add(1.0, 2.0)
    assert mixed.share > 0.99
    assert mixed.average([0.0] * 6, [9.0] * 6) == pytest.approx([9.0] * 6, abs=0.1)


def test_names_of_calls_tell_edits_and_tests():
    assert features.kind_of("Edit", "success")[:2] == (True, False)
    assert features.kind_of("str_replace", "failure")[:2] == (True, False)
    assert features.kind_of("run_tests", "success")[:2] == (False, True)
    assert features.kind_of("bash", "success")[:2] == (False, False)


def test_an_error_that_comes_again_is_a_repeat_and_so_is_a_tool_that_fails_twice():
    progress = features.Progress()
    for state, repeated in (
        (protocols.CausalState("bash", 10, "failure", error="ImportError"), False),
        (protocols.CausalState("read", 10, "success"), False),
        (protocols.CausalState("bash", 10, "failure", error="ImportError"), True),
        (protocols.CausalState("edit", 10, "failure"), False),
        (protocols.CausalState("edit", 10, "failure"), True),
    ):
        progress.returned(state, progress.marked + 7)
        assert progress.repeated == repeated
    assert (progress.turns, progress.failures, progress.run, progress.errors) == (5, 4, 3, 2)
    assert (progress.last, progress.recent, progress.edits) == (7, 7.0, 2)


def halved(known: evidence.Evidence, rng: random.Random, name: str) -> None:
    """A request that calls six tools, after which each edit has halved what is left."""
    track, left = known.start(name, 0), rng.randint(3_000, 6_000)
    for index in range(6):
        tool = rng.choice(("edit", "read"))
        known.observe(track, protocols.CausalState(tool, 100, "success"), 20 * (index + 1))
        known.predict(track, 20 * (index + 1))
        left //= 2 if tool == "edit" else 1
    known.finish(track, 120 + left)


def after(known: evidence.Evidence, tools: tuple[str, ...]) -> prefix_tree.Sketch:
    track = known.start("asked", 0)
    for index, tool in enumerate(tools):
        known.observe(track, protocols.CausalState(tool, 100, "success"), 20 * (index + 1))
    return known.predict(track, 20 * len(tools))


FEW, MANY = (("read",) * 5 + ("edit",)), (("edit",) * 6)
"""Two courses with the same last return."""


def test_two_courses_that_end_alike_are_told_apart():
    known, rng = evidence.Evidence(config_lib.SchedulerConfig()), random.Random(0)
    for index in range(300):
        halved(known, rng, str(index))
    assert after(known, FEW)[2] > 2 * after(known, MANY)[2]


def test_what_courses_taught_outlives_a_restart_and_adds_up():
    known, again, joined = (evidence.Evidence(config_lib.SchedulerConfig()) for _ in range(3))
    rng = random.Random(1)
    for index in range(150):
        halved(known, rng, str(index))
    kept = json.loads(json.dumps(known.snapshot()))
    again.restore(kept)
    joined.merge(kept)
    assert json.loads(json.dumps(again.snapshot())) == kept
    assert after(again, FEW) == after(joined, FEW)
    assert after(again, FEW) == pytest.approx(after(known, FEW), rel=0.05)  # whose nodes' sketches may lag behind
    joined.merge(kept)
    assert after(joined, FEW)[2] > 2 * after(joined, MANY)[2]


def test_a_snapshot_of_before_courses_were_judged_is_taken_as_it_is():
    known, older = (evidence.Evidence(config_lib.SchedulerConfig()) for _ in range(2))
    halved(known, random.Random(2), "one")
    kept = known.snapshot()
    del kept["correction"]
    older.restore(kept)
    assert older.by_suffix.clock == 1


def test_a_long_request_is_learnt_from_at_a_few_evenly_spaced_returns():
    course = correction.Course()
    for mark in range(1_000):
        course.keep(correction.Row(mark, 0.0, 1.0, [], []))
    marks = [row.mark for row in course.rows]
    assert len(marks) <= correction.MOST_ROWS
    assert marks == list(range(0, 1_000, course.stride))[: len(marks)]
    assert marks[-1] > 500
