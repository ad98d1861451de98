"""Routing as the coordinator measures it."""

from __future__ import annotations

import coordinator_doubles as doubles
import pytest

from libra_jax import protocols
from libra_jax.coordinator import routing
from libra_jax.rollouts import moves

INSTANCES = [protocols.Instance("narrow", 1, 4), protocols.Instance("wide", 2, 4)]


def make() -> routing.Routing:
    config = doubles.make_config(scheduler={"max_remaining_tokens": (100,)}, rollout={"tensor_parallel": (1, 2)})
    made = routing.Routing(config)
    made.instances(INSTANCES)
    return made


def move(source: str, target: str) -> protocols.Move | None:
    """A decision, after `source` served the request."""
    moves = source and source != target
    return protocols.Move("task-1/0", source, target, protocols.MoveReason.TOOL_RETURN) if moves else None


@pytest.mark.parametrize(
    ("first", "generated", "right"), [("narrow", 110, 1), ("narrow", 111, 0), ("wide", 111, 1), ("wide", 110, 0)]
)
def test_the_first_decision_after_the_first_tool_return_is_judged_by_the_true_remaining_length(first, generated, right):
    made, decision = make(), routing.JudgedRequest()
    made.decided(decision, "wide" if first == "narrow" else "narrow")
    made.returned(decision, 10)
    made.decided(decision, first)
    made.returned(decision, 60)
    made.decided(decision, "wide")
    made.finished(decision, generated)
    counts = made.take_counts()
    assert (counts.judged, counts.right) == (1, right)
    assert made.take_counts() == routing.RoutingCounts()


def test_while_the_wide_instance_is_away_long_requests_are_judged_wrong():
    made, decision = make(), routing.JudgedRequest()
    made.instances(INSTANCES[:1])
    made.returned(decision, 10)
    made.decided(decision, "narrow")
    made.finished(decision, 500)
    assert (made.counts.judged, made.counts.right) == (1, 0)


def test_an_attempt_without_a_tool_return_is_not_judged():
    made, decision = make(), routing.JudgedRequest()
    made.decided(decision, "narrow")
    made.finished(decision, 500)
    assert made.counts.judged == 0
    assert "routing/one_shot_accuracy" not in routing.metrics(made.counts, protocols.StreamCounts())


def test_moves_are_counted_with_their_context_when_another_instance_serves():
    route, counts = moves.Route(), protocols.StreamCounts()
    places = [("", "narrow", 10), ("narrow", "narrow", 40), ("narrow", "wide", 90), ("wide", "narrow", 100)]
    for turn, (source, instance, context) in enumerate(places):
        route.take_placement(move(source, instance))
        route.begin_stream(turn, context, counts)
    shown = routing.metrics(routing.RoutingCounts(), counts)
    assert shown == {"routing/moves": 2.0, "routing/moved_tokens": 190.0}
    assert [(turn, each.source, each.target) for turn, each in route.moves] == [
        (2, "narrow", "wide"),
        (3, "wide", "narrow"),
    ]


def test_of_moves_that_no_stream_followed_only_the_whole_way_counts():
    route, counts = moves.Route(), protocols.StreamCounts()
    for way in (move("", "narrow"), move("narrow", "wide")):  # moved before the first stream: nothing has to follow
        route.take_placement(way)
    route.begin_stream(0, 10, counts)
    assert route.moves == []
    route.take_placement(move("wide", "narrow"))
    route.take_placement(move("narrow", "other"))
    route.begin_stream(0, 20, counts)
    assert [(each.source, each.target) for _, each in route.moves] == [("wide", "other")]
    route.take_placement(move("other", "wide"))
    route.take_placement(move("wide", "other"))
    route.begin_stream(0, 30, counts)
    assert counts.moves == 1


def test_waits_for_first_tokens_are_told_apart_by_whether_the_request_moved():
    route, counts = moves.Route(), protocols.StreamCounts()
    waits = [("narrow", 9.0), ("narrow", 1.0), ("wide", 14.0), ("wide", 12.0), ("narrow", 6.0), ("wide", 19.0)]
    source = ""
    for instance, seconds in waits:
        route.take_placement(move(source, instance))
        route.begin_stream(0, 10, counts)
        route.record_answer(seconds, counts)
        source = instance
    shown = routing.metrics(routing.RoutingCounts(), counts)
    assert len(route.moves) == 3
    assert shown["routing/move_seconds"] == pytest.approx((14 + 6 + 19) / 3)
    assert shown["routing/stay_seconds"] == pytest.approx((1 + 12) / 2), "the very first wait is neither"


def test_a_run_reports_its_routing(tmp_path):
    config = doubles.make_config(scheduler={"policy": "round_robin"})
    bench = doubles.Bench(config, tmp_path, specs=doubles.engine_specs(config, count=3))
    bench.run()
    steps = [scalars for _, scalars in bench.recorder.steps]
    assert sum(step["routing/moves"] for step in steps) > 0
    moved = [step["agent/moves"] * 3 * 2 for step in steps]
    assert moved == pytest.approx([step["routing/moves"] for step in steps]), (
        "synchronous: none is left to a later step"
    )
    assert all(step["routing/move_seconds"] > 0 for step in steps if step["routing/moves"])
    told = [
        move for record in bench.recorder.trajectories for turn in record["turns"] for move in turn.get("moves", [])
    ]
    assert len(told) == sum(step["routing/moves"] for step in steps)
    assert {move["reason"] for move in told} == {"tool_return"}
    assert all(move["source"] != move["target"] and move["expected_gain"] is None for move in told)
    assert sum(step["routing/judged"] for step in steps) == 4 * 3 * 2, "every attempt called a tool once"
    assert all(step["routing/one_shot_accuracy"] == 1.0 for step in steps), "there is one bucket"
