"""Routing as the coordinator measures it."""

from __future__ import annotations

import dataclasses

import coordinator_doubles as doubles
import handing_engine
import pytest

from libra_jax import protocols
from libra_jax.coordinator import routing

INSTANCES = [protocols.Instance("narrow", 1, 4), protocols.Instance("wide", 2, 4)]


def make() -> routing.Routing:
    config = doubles.make_config(scheduler={"max_remaining_tokens": (100,)}, rollout={"tensor_parallel": (1, 2)})
    made = routing.Routing(config)
    made.instances(INSTANCES)
    return made


def placed(instance: str, source: str = "") -> protocols.Placement:
    """A decision, after `source` served the request."""
    moves = source and source != instance
    move = protocols.Move("task-1/0", source, instance, protocols.MoveReason.TOOL_RETURN) if moves else None
    return protocols.Placement("task-1/0", instance, move)


@pytest.mark.parametrize(
    ("first", "generated", "right"), [("narrow", 110, 1), ("narrow", 111, 0), ("wide", 111, 1), ("wide", 110, 0)]
)
def test_the_first_decision_after_the_first_tool_return_is_judged_by_the_true_remaining_length(first, generated, right):
    made, route = make(), routing.Route()
    made.decided(route, placed("wide" if first == "narrow" else "narrow"))
    made.returned(route, 10)
    made.decided(route, placed(first))
    made.returned(route, 60)
    made.decided(route, placed("wide"))
    made.finished(route, generated)
    counts = made.take_counts()
    assert (counts.judged, counts.right) == (1, right)
    assert made.take_counts() == routing.RoutingCounts()


def test_while_the_wide_instance_is_away_long_requests_are_judged_wrong():
    made, route = make(), routing.Route()
    made.instances(INSTANCES[:1])
    made.returned(route, 10)
    made.decided(route, placed("narrow"))
    made.finished(route, 500)
    assert (made.counts.judged, made.counts.right) == (1, 0)


def test_an_attempt_without_a_tool_return_is_not_judged():
    made, route = make(), routing.Route()
    made.decided(route, placed("narrow"))
    made.finished(route, 500)
    assert made.counts.judged == 0
    assert "routing/one_shot_accuracy" not in made.counts.metrics()


def test_moves_are_counted_with_their_context_when_another_instance_serves():
    made, route = make(), routing.Route()
    places = [("", "narrow", 10), ("narrow", "narrow", 40), ("narrow", "wide", 90), ("wide", "narrow", 100)]
    for turn, (source, instance, context) in enumerate(places):
        made.decided(route, placed(instance, source))
        made.served(route, turn, context)
    assert made.take_counts().metrics() == {"routing/moves": 2.0, "routing/moved_tokens": 190.0}
    assert [(turn, move.source, move.target) for turn, move in route.moves] == [
        (2, "narrow", "wide"),
        (3, "wide", "narrow"),
    ]


def test_of_moves_that_no_stream_followed_only_the_whole_way_counts():
    made, route = make(), routing.Route()
    for place in (placed("narrow"), placed("wide", "narrow")):  # moved before the first stream: nothing has to follow
        made.decided(route, place)
    made.served(route, 0, 10)
    assert route.moves == []
    made.decided(route, placed("narrow", "wide"))
    made.decided(route, placed("other", "narrow"))
    made.served(route, 0, 20)
    assert [(move.source, move.target) for _, move in route.moves] == [("wide", "other")]
    made.decided(route, placed("wide", "other"))
    made.decided(route, placed("other", "wide"))
    made.served(route, 0, 30)
    assert made.counts.moves == 1


def test_waits_for_first_tokens_are_told_apart_by_whether_the_request_moved():
    made, route = make(), routing.Route()
    waits = [("narrow", 9.0), ("narrow", 1.0), ("wide", 14.0), ("wide", 12.0), ("narrow", 6.0), ("wide", 19.0)]
    source = ""
    for instance, seconds in waits:
        made.decided(route, placed(instance, source))
        made.served(route, 0, 10)
        made.answered(route, seconds)
        source = instance
    metrics = made.take_counts().metrics()
    assert len(route.moves) == 3
    assert metrics["routing/move_seconds"] == pytest.approx((14 + 6 + 19) / 3)
    assert metrics["routing/stay_seconds"] == pytest.approx((1 + 12) / 2), "the very first wait is neither"


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
    told = [
        move for record in bench.recorder.trajectories for turn in record["turns"] for move in turn.get("moves", [])
    ]
    assert len(told) == sum(step["routing/moves"] for step in steps)
    assert {move["reason"] for move in told} == {"tool_return"}
    assert all(move["source"] != move["target"] and move["expected_gain"] is None for move in told)
    assert sum(step["routing/judged"] for step in steps) == 4 * 3 * 2, "every attempt called a tool once"
    assert all(step["routing/one_shot_accuracy"] == 1.0 for step in steps), "there is one bucket"


def run_with_transfers(tmp_path, kv_transfer, **arguments):
    """(engine, request) of every generation, and the run's scalars, where engines can hand keys and values over."""
    config = doubles.make_config(scheduler={"policy": "round_robin"}, rollout={"kv_transfer": kv_transfer})
    factory = "handing_engine:create"
    specs = [
        dataclasses.replace(spec, factory=factory, arguments={**spec.arguments, **arguments})
        for spec in doubles.engine_specs(config, count=3)
    ]
    handing_engine.ASKED.clear()
    bench = doubles.Bench(config, tmp_path, specs=specs)
    bench.run()
    return list(handing_engine.ASKED), [scalars for _, scalars in bench.recorder.steps]


def test_the_instance_that_a_request_leaves_hands_its_context_over_where_the_config_says_so(tmp_path):
    asked, steps = run_with_transfers(tmp_path, "nixl")
    last, moved = {}, 0
    for engine, request in asked:
        name = request.request_id.partition("#")[0]
        if last.get(name, engine) == engine:
            assert request.kv_source is None
        else:
            moved += 1
            assert request.kv_source == {"engine": last[name], "tokens": len(request.token_ids)}
        last[name] = engine
    assert moved == sum(step["routing/moves"] for step in steps) > 0
    assert moved == sum(step["routing/transferred"] for step in steps if step["routing/moves"])


@pytest.mark.parametrize(("kv_transfer", "refuses"), [("none", False), ("nixl", True)])
def test_a_context_that_nobody_hands_over_is_computed_again(kv_transfer, refuses, tmp_path):
    asked, steps = run_with_transfers(tmp_path, kv_transfer, refuses=refuses)
    assert all(request.kv_source is None for _, request in asked)
    assert sum(step["routing/moves"] for step in steps) > 0
    assert not any("routing/transferred" in step for step in steps)
