"""The rule of the authors' code: where requests begin, where a limit sends them, and when they move."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_machine import create, places

from libra_jax import protocols
from libra_jax.scheduling.rivals import authors

NARROW, OTHER, WIDE = (protocols.Instance(name, degree, 8) for name, degree in (("a", 1), ("b", 1), ("c", 4)))
SHORT, LONG = (protocols.CausalState("bash", 10, status) for status in ("success", "failure"))


def made(most: int = 0, instances=(NARROW, OTHER, WIDE)):
    scheduler = create("cmlfq_authors", (1_000,), arguments={"max_residents": most})
    scheduler.on_instance_change(list(instances), 0.0)
    return scheduler


def arrive(scheduler, name: str, prompt: str = "p") -> str:
    return dict(places(scheduler.on_arrival(protocols.RequestInfo(name, prompt, 0, 10), 0.0)))[name]


def come_back(scheduler, name: str, causal=SHORT, tokens: int = 10) -> str:
    scheduler.on_tool_call(name, tokens, 0.0)
    return dict(places(scheduler.on_tool_return(name, causal, 30, 0.0)))[name]


def test_requests_begin_on_the_first_buckets_instance_with_the_fewest_live_ones():
    scheduler = made()
    assert [arrive(scheduler, f"r{index}") for index in range(3)] == ["a", "b", "a"]
    scheduler.on_tool_call("r1", 5, 0.0)
    assert arrive(scheduler, "r3") == "b", "a request whose tool runs is live"
    assert arrive(scheduler, "r4") == "a"


def test_the_limit_sends_requests_to_other_buckets_and_then_anywhere_but_never_holds_one_back():
    scheduler = made(most=1)
    assert [arrive(scheduler, f"r{index}") for index in range(4)] == ["a", "b", "c", "a"]


def test_a_turn_goes_to_its_instance_however_loaded_and_waits_for_a_slot_there():
    tight = protocols.Instance("a", 1, 1)
    scheduler = made(instances=(tight, WIDE))
    assert arrive(scheduler, "r0") == "a"
    scheduler.on_tool_call("r0", 5, 0.0)
    assert arrive(scheduler, "r1") == "a"
    assert scheduler.on_tool_return("r0", SHORT, 30, 0.0) == []
    assert places(scheduler.on_finish("r1", 5, 0.0)) == [("r0", "a")]


def test_one_finished_rollout_of_the_prompt_is_enough_to_follow():
    scheduler = made()
    arrive(scheduler, "past")
    come_back(scheduler, "past", LONG)
    scheduler.on_finish("past", 5_000, 0.0)
    arrive(scheduler, "now")
    assert come_back(scheduler, "now", LONG) == "c"
    arrive(scheduler, "unseen")
    # The root of the prompt's tree says 5,000 as well: a state that no one met is answered by it.
    assert come_back(scheduler, "unseen", SHORT) == "c"


def test_a_prompt_with_a_tree_never_asks_the_other_prompts():
    scheduler = made()
    for index in range(10):
        name, prompt, tokens = (f"long-{index}", "p", 1_500) if index < 2 else (f"short-{index}", "q", 20)
        arrive(scheduler, name, prompt)
        come_back(scheduler, name, LONG)
        scheduler.on_finish(name, tokens, 0.0)
    for name, wide in (("p", True), ("q", False), ("r", False)):  # of all, the mean is 328 and P90 1,510: r stays
        arrive(scheduler, name, name)
        assert (come_back(scheduler, name, LONG) == "c") == wide


def test_what_tools_returned_counts_as_length():
    scheduler = made()
    large = protocols.CausalState("bash", 6_000, "success")
    arrive(scheduler, "past")
    come_back(scheduler, "past", SHORT, 10)
    come_back(scheduler, "past", large, 20)
    scheduler.on_finish("past", 30, 0.0)
    arrive(scheduler, "now")
    assert come_back(scheduler, "now", SHORT) == "c"


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=300))
def test_mean_and_p90_are_numpys_of_all_and_of_the_latest(samples):
    node = authors.Node()
    for sample in samples:
        node.add(sample)
    assert node.mean == pytest.approx(np.mean(samples))
    assert node.p90 == pytest.approx(np.percentile(samples[-authors.WINDOW :], 90))


def test_payloads_have_three_sizes():
    statistics = authors.Statistics()
    track = statistics.start("p", 0)
    for payload in (0, 500, 501, 5_000, 5_001):
        statistics.observe(track, protocols.CausalState("bash", payload, "success"), 0)
    assert [size for _, size, _ in track.path] == [0, 0, 1, 1, 2]


def test_statistics_survive_json_and_add_up():
    first, second = made(), made()
    for scheduler, tokens in ((first, 40), (second, 5_000)):
        arrive(scheduler, "past")
        come_back(scheduler, "past", LONG)
        scheduler.on_finish("past", tokens, 0.0)
    first.merge(json.loads(json.dumps(second.snapshot())))
    assert first.statistics.shared.count == 2
    assert first.statistics.by_prompt["p"].mean == (40 + 5_000) / 2 + 10


def test_a_request_that_the_limit_sent_elsewhere_stays_while_its_bucket_does_not_change():
    wide = [protocols.Instance(name, 4, 8) for name in "cd"]
    scheduler = made(most=1, instances=(NARROW, *wide))
    for index in range(3):
        arrive(scheduler, f"past-{index}")
        come_back(scheduler, f"past-{index}", SHORT)
        scheduler.on_finish(f"past-{index}", 20, 0.0)
    assert [arrive(scheduler, name) for name in ("first", "second")] == ["a", "c"]
    assert [come_back(scheduler, "second", SHORT) for _ in range(3)] == ["c", "c", "c"]


def test_statistics_of_a_very_long_path_survive_json():
    scheduler = made()
    arrive(scheduler, "long")
    for tokens in range(1_000):
        come_back(scheduler, "long", SHORT, tokens)
    scheduler.on_finish("long", 1_001, 0.0)
    kept = json.loads(json.dumps(scheduler.snapshot()))
    again = made()
    again.restore(kept)
    assert json.loads(json.dumps(again.snapshot())) == kept
