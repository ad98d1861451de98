"""Routing as the coordinator measures it."""

from __future__ import annotations

import coordinator_doubles as doubles
import pytest

from libra_jax import protocols
from libra_jax.coordinator import routing

INSTANCES = [protocols.Instance("narrow", 1, 4), protocols.Instance("wide", 2, 4)]


def make() -> routing.Routing:
    made = routing.Routing(doubles.make_config(scheduler={"max_remaining_tokens": (100,)}))
    made.instances(INSTANCES)
    return made


@pytest.mark.parametrize(
    ("first", "generated", "right"), [("narrow", 110, 1), ("narrow", 111, 0), ("wide", 111, 1), ("wide", 110, 0)]
)
def test_the_first_decision_after_the_first_tool_return_is_judged_by_the_true_remaining_length(first, generated, right):
    made, route = make(), routing.Route()
    made.decided(route, "wide" if first == "narrow" else "narrow")
    made.returned(route, 10)
    made.decided(route, first)
    made.returned(route, 60)
    made.decided(route, "wide")
    made.finished(route, generated)
    counts = made.take_counts()
    assert (counts.judged, counts.right) == (1, right)
    assert made.take_counts() == routing.RoutingCounts()


def test_an_attempt_without_a_tool_return_is_not_judged():
    made, route = make(), routing.Route()
    made.decided(route, "narrow")
    made.finished(route, 500)
    assert made.counts.judged == 0
    assert "routing/one_shot_accuracy" not in made.counts.metrics()


def test_moves_are_counted_with_their_context_when_another_instance_serves():
    made, route = make(), routing.Route()
    for instance, context in (("narrow", 10), ("narrow", 40), ("wide", 90), ("narrow", 100)):
        made.served(route, instance, context)
    assert made.take_counts().metrics() == {"routing/moves": 2.0, "routing/moved_tokens": 190.0}


def test_waits_for_first_tokens_are_told_apart_by_whether_the_request_moved():
    made, route = make(), routing.Route()
    for instance, seconds in (("narrow", 9.0), ("narrow", 1.0), ("wide", 4.0), ("wide", 2.0), ("narrow", 6.0)):
        made.served(route, instance, 10)
        made.answered(route, seconds)
    metrics = made.take_counts().metrics()
    assert route.moves == 2
    assert (metrics["routing/move_seconds"], metrics["routing/stay_seconds"]) == (5.0, 1.5), "first waits are neither"


def test_a_run_reports_its_routing(tmp_path):
    config = doubles.make_config(scheduler={"policy": "round_robin"})
    bench = doubles.Bench(config, tmp_path, specs=doubles.engine_specs(config, count=3))
    bench.run()
    steps = [scalars for _, scalars in bench.recorder.steps]
    assert sum(step["routing/moves"] for step in steps) > 0
    moves = [step["agent/moves"] * 3 * 2 for step in steps]
    assert moves == pytest.approx([step["routing/moves"] for step in steps]), (
        "synchronous: none is left to a later step"
    )
    assert all(step["routing/move_seconds"] > 0 for step in steps if step["routing/moves"])
    assert sum(step["routing/judged"] for step in steps) == 4 * 3 * 2, "every attempt called a tool once"
    assert all(step["routing/one_shot_accuracy"] == 1.0 for step in steps), "there is one bucket"
