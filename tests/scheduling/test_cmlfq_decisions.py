"""Where C-MLFQ sends a request of which it knows how much it has still to generate."""

from __future__ import annotations

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import registry

BUDGET = 1_000
"""Tokens that the narrow bucket is for."""

FAILED = protocols.CausalState("bash", 1_000, "failure")
WORKED = protocols.CausalState("bash", 1_000, "success")
AFTER = {FAILED: 30_000, WORKED: 50}
"""Tokens that followed each return in all trajectories so far."""


NARROW, WIDE = protocols.Instance("narrow", 1, 24), protocols.Instance("wide", 4, 8)


def taught(**settings) -> protocols.Scheduler:
    """It has seen thirty trajectories of each kind."""
    config = config_lib.SchedulerConfig(policy="cmlfq", max_remaining_tokens=(BUDGET,), **settings)
    scheduler = registry.create(config)
    scheduler.on_instance_change([NARROW, WIDE], 0.0)
    for index in range(30):
        for causal, tokens in AFTER.items():
            name = f"{causal.status}-{index}"
            arrive(scheduler, name)
            come_back(scheduler, name, causal)
            scheduler.on_finish(name, 10 + tokens, 3.0)
    return scheduler


def places(placements: list[protocols.Placement]) -> list[tuple[str, str]]:
    """Where each request is placed."""
    return [(placement.request_id, placement.instance) for placement in placements]


def arrive(scheduler: protocols.Scheduler, name: str) -> list[protocols.Placement]:
    return scheduler.on_arrival(protocols.RequestInfo(name, f"prompt-{name}", 0, 100, dispatch_version=0), 5.0)


def come_back(scheduler: protocols.Scheduler, name: str, causal: protocols.CausalState) -> list[protocols.Placement]:
    scheduler.on_tool_call(name, 10, 6.0)
    return scheduler.on_tool_return(name, causal, 200, 7.0)


def with_long_ones(scheduler: protocols.Scheduler, long: int, *others: str) -> None:
    """So many requests known to be long decode on the wide instance, the others on the narrow one."""
    names = [f"long-{index}" for index in range(long)]
    scheduler.on_instance_change([NARROW], 4.0)
    for name in [*names, *others]:
        assert places(arrive(scheduler, name)) == [(name, "narrow")]
    scheduler.on_instance_change([NARROW, WIDE], 5.5)
    for name in names:
        assert places(come_back(scheduler, name, FAILED)) == [(name, "wide")]


def only_move(placements: list[protocols.Placement]) -> protocols.Move:
    (placement,) = placements
    assert placement.move is not None
    return placement.move


def check_gain(move: protocols.Move, name: str, reason: str) -> None:
    assert (move.request, move.source, move.target, move.reason) == (name, "narrow", "wide", reason)
    assert move.expected_gain is not None
    assert 0 < move.expected_gain < 30_000, "seconds"


def test_a_decision_says_why_the_request_moves_and_what_it_gains():
    scheduler = taught()
    with_long_ones(scheduler, 4, "request", "stays")
    check_gain(only_move(come_back(scheduler, "request", FAILED)), "request", "tool_return")
    assert come_back(scheduler, "stays", WORKED) == [protocols.Placement("stays", "narrow")]
    move = only_move(scheduler.on_instance_change([WIDE], 10.0))
    assert move == protocols.Move("stays", "narrow", "wide", protocols.MoveReason.ENGINE_LOST)


@pytest.mark.parametrize(("causal", "instance"), [(FAILED, "wide"), (WORKED, "narrow")])
def test_what_a_tool_returned_sends_long_work_to_the_wide_instance_and_keeps_short_work_off_it(causal, instance):
    scheduler = taught()
    with_long_ones(scheduler, 4, "request")
    assert places(come_back(scheduler, "request", causal)) == [("request", instance)]


def test_long_work_stays_where_it_is_if_a_move_costs_more_than_it_gains():
    scheduler = taught(arguments={"move_margin": 1e9})
    with_long_ones(scheduler, 0, "request")
    assert places(come_back(scheduler, "request", FAILED)) == [("request", "narrow")]


def test_a_request_that_outruns_its_budget_moves_right_there():
    scheduler = taught()
    with_long_ones(scheduler, 4, "request")
    come_back(scheduler, "request", WORKED)
    assert scheduler.on_progress("request", BUDGET, 8.0) == []
    check_gain(only_move(scheduler.on_progress("request", 10 + BUDGET, 9.0)), "request", "budget_outrun")
    assert scheduler.on_progress("request", 20 + BUDGET, 10.0) == []


def test_a_request_that_outruns_its_budget_stays_until_another_instance_has_room():
    scheduler = taught()
    with_long_ones(scheduler, 8, "request")
    come_back(scheduler, "request", WORKED)
    assert scheduler.on_progress("request", 10 + BUDGET, 9.0) == []
    scheduler.on_finish("long-0", 1_000, 10.0)
    assert places(scheduler.on_progress("request", 10 + 8 * BUDGET, 11.0)) == [("request", "wide")]


def test_short_requests_that_would_wait_take_the_free_wide_slots():
    """Twenty short requests share one narrow slot while two long ones decode on the wide instance and six are free."""
    scheduler = taught()
    names = [f"short-{index}" for index in range(20)]
    with_long_ones(scheduler, 2, *names)
    for name in names:
        scheduler.on_tool_call(name, 10, 8.0)
    scheduler.on_instance_change([protocols.Instance("narrow", 1, 1), WIDE], 8.5)
    places = [item for name in names for item in scheduler.on_tool_return(name, WORKED, 200, 9.0)]
    assert sum(item.instance == "wide" for item in places) == 6


def test_an_instance_takes_no_more_than_its_cache_is_expected_to_hold_and_the_rest_wait():
    """Each is expected to come to hold about 15,000 tokens, half of a long one's 30,000 and of its context's growth."""
    scheduler = registry.create(config_lib.SchedulerConfig(policy="cmlfq", cache_share=1.0))
    scheduler.on_instance_change([protocols.Instance("only", 1, 24)], 0.0)
    for index in range(30):
        arrive(scheduler, f"past-{index}")
        come_back(scheduler, f"past-{index}", FAILED)
        scheduler.on_finish(f"past-{index}", 30_000, 3.0)
    scheduler.on_instance_change([protocols.Instance("only", 1, 24, cache_tokens=100_000)], 4.0)
    placed = [name for name in (f"request-{index}" for index in range(10)) if arrive(scheduler, name)]
    assert 2 <= len(placed) <= 6
    assert len(arrive(scheduler, "one more")) == 0
    finished = scheduler.on_finish(placed[0], 30_000, 8.0)
    assert [item.instance for item in finished] == ["only"]


def test_a_request_larger_than_the_cache_is_served_where_it_is_alone():
    scheduler = registry.create(config_lib.SchedulerConfig(policy="cmlfq"))
    scheduler.on_instance_change([protocols.Instance("only", 1, 24, cache_tokens=50)], 0.0)
    assert places(arrive(scheduler, "first")) == [("first", "only")]
    assert arrive(scheduler, "second") == []
    assert places(scheduler.on_finish("first", 10, 6.0)) == [("second", "only")]


def test_who_returns_to_a_cache_that_has_been_outgrown_goes_where_there_is_room():
    scheduler = registry.create(config_lib.SchedulerConfig(policy="cmlfq"))
    crowded = protocols.Instance("crowded", 1, 24, cache_tokens=20_000)
    scheduler.on_instance_change([crowded], 0.0)
    names = ["one", "two", "three"]
    assert [item.instance for name in names for item in arrive(scheduler, name)] == ["crowded"] * 3
    for name in names:  # each comes back with 8,000 tokens of context: together they no longer fit
        scheduler.on_tool_call(name, 10, 6.0)
        scheduler.on_tool_return(name, WORKED, 8_000, 7.0)
    scheduler.on_instance_change([crowded, protocols.Instance("roomy", 1, 24, cache_tokens=200_000)], 8.0)
    scheduler.on_tool_call("one", 20, 9.0)
    assert places(scheduler.on_tool_return("one", WORKED, 8_100, 10.0)) == [("one", "roomy")]
    scheduler.on_tool_call("two", 20, 11.0)
    assert places(scheduler.on_tool_return("two", WORKED, 8_100, 12.0)) == [("two", "crowded")]
