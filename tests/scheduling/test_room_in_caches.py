"""Admission by the room in caches, for any policy, and limits on the live requests of an instance."""

from __future__ import annotations

import pytest
from scheduler_machine import create, places

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import residents

SMALL, LARGE = (protocols.Instance(name, 1, 24, cache_tokens=tokens) for name, tokens in (("s", 10_000), ("l", 40_000)))
STATE = protocols.CausalState("bash", 10, "success")
ANY_BUT_AUTHORS = [name for name in config_lib.POLICIES if name != "cmlfq_authors"]


def arrive(scheduler, name: str, context: int = 4_000) -> list[str]:
    placed = scheduler.on_arrival(protocols.RequestInfo(name, f"prompt-{name}", 0, context), 0.0)
    return [instance for request, instance in places(placed) if request == name]


@pytest.mark.parametrize("policy", ANY_BUT_AUTHORS)
def test_with_admission_by_cache_no_policy_fills_a_cache_beyond_its_share(policy):
    scheduler = create(policy, (), admission="cache", cache_share=1.0)
    scheduler.on_instance_change([SMALL], 0.0)
    served = [name for name in "abcde" if arrive(scheduler, name)]
    assert 1 <= len(served) <= 2
    scheduler.on_tool_call(served[0], 5, 1.0)
    assert not arrive(scheduler, "f"), "a request whose tool runs comes back to its context"
    freed = scheduler.on_finish(served[0], 4_000, 2.0)
    assert len(freed) == 1


@pytest.mark.parametrize("policy", ["least_loaded", "sticky", "heddle", "mlfq"])
def test_as_published_they_admit_by_slots(policy):
    scheduler = create(policy, ())
    scheduler.on_instance_change([SMALL], 0.0)
    assert all(arrive(scheduler, name) for name in "abcdefgh")


def test_sticky_cache_begins_where_there_is_most_room_and_stays():
    scheduler = create("sticky_cache", ())
    scheduler.on_instance_change([SMALL, LARGE], 0.0)
    # An eighth of the large cache after the first, two fifths of the small one after the second.
    assert [arrive(scheduler, name) for name in "abcd"] == [["s"], ["l"], ["l"], ["l"]]
    scheduler.on_tool_call("a", 5, 1.0)
    for name in "bcd":
        scheduler.on_finish(name, 5, 1.0)
    assert places(scheduler.on_tool_return("a", STATE, 8_000, 2.0)) == [("a", "s")]


@pytest.mark.parametrize("policy", ["sticky_cache", "cmlfq"])
def test_a_request_that_comes_back_to_an_outgrown_cache_goes_where_there_is_room(policy):
    scheduler = create(policy, ())
    scheduler.on_instance_change([SMALL], 0.0)
    assert arrive(scheduler, "a")
    assert arrive(scheduler, "b", 3_000)
    for name, context in (("b", 9_000), ("a", 6_000)):  # more than it holds, once both have returned
        scheduler.on_tool_call(name, 5, 1.0)
        scheduler.on_instance_change([SMALL, LARGE] if name == "a" else [SMALL], 1.0)
        placed = scheduler.on_tool_return(name, STATE, context, 2.0)
    assert places(placed) == [("a", "l")]


@pytest.mark.parametrize("policy", ANY_BUT_AUTHORS)
def test_a_request_whose_context_is_there_goes_on_though_others_wait_for_room(policy):
    scheduler = create(policy, (), admission="cache", cache_share=1.0)
    for name in "abcdefgh":  # before any instance serves, as after a restart
        assert not arrive(scheduler, name)
    served = [request for request, _ in places(scheduler.on_instance_change([SMALL], 0.0))]
    assert 1 <= len(served) <= 2
    for name in served:
        scheduler.on_tool_call(name, 5, 1.0)
    for name in served:
        assert places(scheduler.on_tool_return(name, STATE, 4_100, 2.0)) == [(name, "s")]


class Exchanging(residents.ResidentScheduler):
    """Sends each request that comes back to the instance that does not hold its context."""

    by_cache = True

    def route(self, request, now, *, returned=False):
        others = [server for server in self.servers.values() if server is not request.home]
        request.target = others[0] if returned else None
        return 0


@pytest.mark.skipif(not residents.__file__.endswith(".py"), reason="a compiled class has no subclasses in Python")
def test_requests_that_wait_for_room_beside_each_other_do_not_wait_forever():
    scheduler = Exchanging(config_lib.SchedulerConfig(cache_share=1.0, ageing_seconds=1e9))
    twins = [protocols.Instance(name, 1, 4, cache_tokens=10_000) for name in "xy"]
    scheduler.on_instance_change(twins, 0.0)
    assert sorted(arrive(scheduler, "a", 6_000) + arrive(scheduler, "b", 6_000)) == ["x", "y"]
    for name in "ab":
        scheduler.on_tool_call(name, 5, 1.0)
    assert scheduler.on_tool_return("a", STATE, 6_100, 2.0) == [], "b comes back to its context"
    # Now both wait for the room that the other one's context takes, and nothing else will happen.
    assert places(scheduler.on_tool_return("b", STATE, 6_100, 2.0)) == [("a", "x")]
    assert scheduler.on_tool_call("a", 10, 3.0) == []
    assert places(scheduler.on_tool_return("a", STATE, 6_200, 4.0)) == [("b", "y")], "b has waited longer"


def test_requests_go_on_turn_by_turn_though_no_cache_has_room_for_two():
    scheduler = create("cmlfq", (), admission="cache", cache_share=0.01)
    scheduler.on_instance_change([SMALL, LARGE], 0.0)
    live, turns = set("abcd"), 0
    running = [request for name in "abcd" for request in arrive(scheduler, name) and [name]]
    while live:
        assert running, "nothing decodes, and no one's tool runs"
        name, turns = running.pop(0), turns + 1
        generated = 5 * turns
        if turns % 5:
            placed = scheduler.on_tool_call(name, generated, float(turns))
            placed += scheduler.on_tool_return(name, STATE, 4_000 + 30 * turns, float(turns))
        else:
            live.remove(name)
            placed = scheduler.on_finish(name, generated, float(turns))
        running += [request for request, _ in places(placed)]


def test_an_unknown_admission_is_refused():
    with pytest.raises(protocols.ConfigError, match=r"scheduler\.admission: 'cach' is not one of .*'cache'"):
        config_lib.SchedulerConfig(admission="cach")


@pytest.mark.parametrize("policy", ["sticky_cache", "clairvoyant"])
def test_those_who_stay_stay_under_any_admission(policy):
    scheduler = create(policy, (), admission="slots")
    scheduler.on_instance_change([SMALL, LARGE], 0.0)
    (home,) = arrive(scheduler, "a")
    scheduler.on_tool_call("a", 5, 1.0)
    scheduler.on_instance_change([SMALL, LARGE, protocols.Instance("free", 1, 24, cache_tokens=90_000)], 1.0)
    assert places(scheduler.on_tool_return("a", STATE, 4_100, 2.0)) == [("a", home)]


def test_heddle_displaces_nobody_for_a_request_that_has_no_room():
    scheduler = create("heddle", (), admission="cache", cache_share=1.0)
    scheduler.on_instance_change([protocols.Instance("only", 1, 2, cache_tokens=10_000)], 0.0)
    served = [name for name in "ab" if arrive(scheduler, name, 3_000)]
    for name in "cdef":
        scheduler.on_arrival(protocols.RequestInfo(name, name, 0, 9_000), 0.0)
        assert scheduler.servers["only"].load == len(served)
