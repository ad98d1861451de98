"""Every policy against a model: slots are never exceeded, no one is forgotten, starved or served twice."""

from __future__ import annotations

import math

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st
from scheduler_machine import AGEING, SchedulerMachine, create, places

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import levels, registry
from libra_jax.scheduling.prediction import paths
from libra_jax.scheduling.rivals import baselines, heddle


@pytest.mark.parametrize("policy", config_lib.POLICIES)
def test_slots_hold_and_no_one_starves(policy):
    machine = type(f"{policy}Machine", (SchedulerMachine,), {"policy": policy})
    settings = hypothesis.settings(max_examples=25, stateful_step_count=40)
    stateful.run_state_machine_as_test(machine, settings=settings)


@pytest.mark.parametrize("policy", ["cmlfq", "cmlfq_paper", "oracle"])
def test_after_a_plan_requests_go_by_its_buckets(policy):
    """What has been learnt says 300 tokens: the narrow bucket's under the first bounds, the wide one's under a plan."""
    scheduler = create(policy, (1_000,))
    narrow, wide = protocols.Instance("narrow", 1, 4), protocols.Instance("wide", 4, 4)
    scheduler.on_instance_change([narrow, wide], 0.0)
    before = scheduler.levels.of_length(300)
    scheduler.on_arrival(protocols.RequestInfo("decodes", "p", 0, 10), 0.0)
    scheduler.on_plan([protocols.PlannedBucket(1, 1, 100), protocols.PlannedBucket(4, 1, 9_000)], 1.0)
    assert (before, scheduler.levels.of_length(300)) == (0, 1)
    assert sum(server.load for server in scheduler.servers.values()) == 1, "a decoding request keeps its place"
    scheduler.on_instance_change([narrow], 2.0)
    scheduler.on_plan([protocols.PlannedBucket(1, 1, 9_000)], 2.0)
    assert scheduler.levels.count == 1
    placed = scheduler.on_arrival(protocols.RequestInfo("later", "p", 0, 10), 3.0)
    assert [placement.instance for placement in placed] == ["narrow"]


def arrive_at(scheduler: protocols.Scheduler, count: int) -> list[str]:
    placements = []
    for index in range(count):
        placements += scheduler.on_arrival(protocols.RequestInfo(f"r{index}", "p", 0, 10), 0.0)
    return [placement.instance for placement in placements]


def test_least_loaded_fills_instances_in_proportion_to_their_slots():
    scheduler = baselines.LeastLoaded()
    scheduler.on_instance_change([protocols.Instance("small", 1, 2), protocols.Instance("large", 4, 4)], 0.0)
    assert arrive_at(scheduler, 6) == ["large", "small", "large", "large", "small", "large"]


def test_round_robin_takes_turns_and_skips_the_full():
    scheduler = baselines.RoundRobin()
    scheduler.on_instance_change([protocols.Instance("a", 1, 1), protocols.Instance("b", 1, 3)], 0.0)
    assert arrive_at(scheduler, 4) == ["a", "b", "b", "b"]


EXPECTED = {"fcfs": [0, 1, 2, 3, 4], "group_completion": [2, 3, 0, 1, 4]}


@pytest.mark.parametrize("ordering", EXPECTED)
@pytest.mark.parametrize("policy", [name for name in config_lib.POLICIES if name != "heddle"])
def test_with_one_bucket_every_policy_is_its_ordering(policy, ordering):
    """Heddle's priority displaces whoever decodes, so that an ordering of those who wait alone does not describe it."""
    scheduler = create(policy, (), ordering=ordering)
    scheduler.on_instance_change([protocols.Instance("only", 1, 1)], 0.0)
    scheduler.on_arrival(protocols.RequestInfo("first", "p", 9, 10, 0, 0), 0.0)
    # groups 0 and 2 are of version 1 (three members live against one), group 1 of version 0 with two members
    for index, (group, version) in enumerate(((0, 1), (0, 1), (1, 0), (1, 0), (0, 1))):
        info = protocols.RequestInfo(f"r{index}", "p", group, 10, 0, version)
        assert scheduler.on_arrival(info, 0.0) == []
    served, current = [], "first"
    for _ in range(5):
        (placement,) = scheduler.on_finish(current, 0, 0.0)
        current = placement.request_id
        served.append(int(current[1:]))
    if ordering == "group_completion" and policy in ("oracle", "length_predictor"):
        assert served[:2] == sorted(served[:2]) or set(served[:2]) == {2, 3}  # then the longest first, which they know
        assert set(served[:2]) == {2, 3}
    else:
        assert served == EXPECTED[ordering]


@pytest.mark.parametrize("policy", [name for name in config_lib.POLICIES if name != "heddle"])
@hypothesis.settings(max_examples=60)
@hypothesis.given(events=st.lists(st.sampled_from(["arrive", "call", "return", "finish"]), max_size=60), data=st.data())
def test_with_one_bucket_nobody_is_passed_over_but_where_he_waits_for_his_own_instance(policy, events, data):
    """First come, first served, over three instances: the model looks at all who wait whenever somebody is placed."""
    scheduler = create(policy, (), ordering="fcfs", ageing_seconds=1e9)
    scheduler.on_instance_change([protocols.Instance(f"engine-{index}", 1, 2) for index in range(3)], 0.0)
    waiting: dict[str, int] = {}  # since which event
    decoding: dict[str, str] = {}
    home: dict[str, str] = {}
    away: list[str] = []
    for now, event in enumerate(events):
        pool = {"arrive": [f"r{now}"], "call": sorted(decoding), "return": away, "finish": sorted(decoding)}[event]
        if not pool:
            continue
        request = data.draw(st.sampled_from(pool))
        if event == "arrive":
            waiting[request] = now
            placed = scheduler.on_arrival(protocols.RequestInfo(request, "p", 0, 10, 0, 0), now)
        elif event == "return":
            away.remove(request)
            waiting[request] = now
            placed = scheduler.on_tool_return(request, protocols.CausalState("bash", 10, "success"), 20, now)
        else:
            del decoding[request]
            away += [request] if event == "call" else []
            placed = getattr(scheduler, "on_tool_call" if event == "call" else "on_finish")(request, 5, now)
        for placement in placed:
            since = waiting.pop(placement.request_id)
            earlier = [other for other, began in waiting.items() if began < since]
            moveable = [other for other in earlier if home.get(other, placement.instance) == placement.instance]
            assert not moveable, f"{placement} went before {moveable}"
            assert policy not in ("least_loaded", "round_robin") or not earlier
            decoding[placement.request_id] = home[placement.request_id] = placement.instance


def test_who_has_waited_for_the_ageing_bound_goes_first():
    scheduler = create("least_loaded", (), ordering="group_completion")
    scheduler.on_instance_change([protocols.Instance("only", 1, 1)], 0.0)
    scheduler.on_arrival(protocols.RequestInfo("first", "p", 0, 10, 0, 0), 0.0)
    scheduler.on_arrival(protocols.RequestInfo("young version", "p", 1, 10, 0, 5), 0.0)
    scheduler.on_arrival(protocols.RequestInfo("old version", "p", 2, 10, 0, 0), 1.0)
    assert [item.request_id for item in scheduler.on_finish("first", 5, AGEING)] == ["young version"]


def test_a_move_says_that_the_request_had_waited_too_long():
    scheduler = create("sticky", (), arguments={"threshold": 1e9})
    scheduler.on_instance_change([protocols.Instance("a", 1, 1), protocols.Instance("b", 1, 1)], 0.0)
    assert arrive_at(scheduler, 2) == ["a", "b"]
    scheduler.on_tool_call("r0", 5, 0.0)
    scheduler.on_arrival(protocols.RequestInfo("r2", "p", 0, 10), 0.0)  # takes a
    assert scheduler.on_tool_return("r0", protocols.CausalState("bash", 10, "success"), 20, 0.0) == []
    assert scheduler.on_finish("r1", 5, 1.0) == []
    (placement,) = (
        scheduler.on_progress("r2", 5, 2.0) or scheduler.on_arrival(protocols.RequestInfo("r3", "p", 0, 10), AGEING)[:1]
    )
    assert placement.move == protocols.Move("r0", "a", "b", protocols.MoveReason.AGING)


def test_sticky_returns_to_its_cache_until_another_instance_is_much_freer():
    scheduler = create("sticky", ())
    scheduler.on_instance_change([protocols.Instance("a", 1, 4), protocols.Instance("b", 1, 4)], 0.0)
    assert arrive_at(scheduler, 3) == ["a", "b", "a"]
    causal = protocols.CausalState("bash", 10, "success")
    scheduler.on_tool_call("r0", 5, 0.0)
    assert places(scheduler.on_tool_return("r0", causal, 20, 0.0)) == [("r0", "a")]
    scheduler.on_arrival(protocols.RequestInfo("r3", "p", 0, 10), 0.0)
    scheduler.on_arrival(protocols.RequestInfo("r4", "p", 0, 10), 0.0)  # on a, which now has three of four
    scheduler.on_finish("r1", 5, 0.0)
    scheduler.on_finish("r3", 5, 0.0)
    scheduler.on_tool_call("r0", 9, 0.0)
    assert places(scheduler.on_tool_return("r0", causal, 20, 0.0)) == [("r0", "b")]


def test_mlfq_demotes_at_the_quantum_and_migrates_right_there():
    scheduler = create("mlfq", (100,))
    scheduler.on_instance_change([protocols.Instance("narrow", 1, 2), protocols.Instance("wide", 4, 1)], 0.0)
    assert arrive_at(scheduler, 2) == ["narrow", "narrow"]
    assert scheduler.on_progress("r0", 99, 0.0) == []
    (placement,) = scheduler.on_progress("r0", 100, 0.0)
    assert placement.move == protocols.Move("r0", "narrow", "wide", protocols.MoveReason.BUDGET_OUTRUN)
    assert places(scheduler.on_progress("r1", 120, 0.0)) == [("r1", "")]
    assert places(scheduler.on_finish("r0", 130, 0.0)) == [("r1", "wide")]


def after_its_first_return(scheduler, name: str, causal: protocols.CausalState) -> str:
    """The instance that serves a new request of the prompt once its first tool has returned."""
    assert scheduler.on_arrival(protocols.RequestInfo(name, "p", 0, 10), 0.0)[0].instance == "narrow"
    scheduler.on_tool_call(name, 10, 0.0)
    return scheduler.on_tool_return(name, causal, 30, 0.0)[0].instance


def test_the_published_rule_jumps_where_mean_and_p90_of_enough_samples_agree():
    scheduler = create("cmlfq_paper", (100,))
    scheduler.on_instance_change([protocols.Instance("narrow", 1, 9), protocols.Instance("wide", 4, 9)], 0.0)
    short, long, mixed = (protocols.CausalState("bash", 10, status) for status in ("success", "failure", "timeout"))
    for index in range(paths.KNOWN_SAMPLES):
        for causal, total in ((short, 50), (long, 900), (mixed, 300 if index < 2 else 20)):
            name = f"past-{index}-{causal.status}"
            assert after_its_first_return(scheduler, name, causal) == "narrow"
            scheduler.on_finish(name, total + index, 0.0)
    served = {state.status: after_its_first_return(scheduler, state.status, state) for state in (short, long, mixed)}
    assert served == {"success": "narrow", "failure": "wide", "timeout": "narrow"}
    assert scheduler.servers["wide"].load == 1


def test_heddle_gives_the_place_of_a_short_request_to_a_long_one():
    scheduler = create("heddle", ())
    scheduler.on_instance_change([protocols.Instance("only", 1, 1)], 0.0)
    short, long = (protocols.CausalState("bash", 10, status) for status in ("success", "failure"))
    for index in range(20):
        for causal, total in ((short, 20), (long, 9_000)):
            name = f"past-{index}-{total}"
            scheduler.on_arrival(protocols.RequestInfo(name, name, 0, 10), 0.0)
            scheduler.on_tool_call(name, 10, 0.0)
            scheduler.on_tool_return(name, causal, 30, 0.0)
            scheduler.on_finish(name, total, 0.0)
    for name in ("a", "b"):
        scheduler.on_arrival(protocols.RequestInfo(name, name, 0, 10), 0.0)
        scheduler.on_tool_call(name, 10, 0.0)
    assert places(scheduler.on_tool_return("a", short, 30, 0.0)) == [("a", "only")]
    assert places(scheduler.on_tool_return("b", long, 30, 0.0)) == [("a", ""), ("b", "only")]


@hypothesis.given(
    lengths=st.lists(st.integers(1, 50), max_size=6), speeds=st.lists(st.integers(1, 4), min_size=1, max_size=3)
)
def test_heddles_cuts_minimise_the_slowest_run(lengths, speeds):
    lengths.sort(reverse=True)

    def seconds(server: int, first: int, last: int) -> float:
        return lengths[first] * (last - first + 3) / server if last > first else 0.0

    def best(servers: list[int], first: int) -> float:
        if not servers:
            return 0.0 if first == len(lengths) else math.inf
        return min(
            max(seconds(servers[0], first, last), best(servers[1:], last)) for last in range(first, len(lengths) + 1)
        )

    cuts = heddle.presorted_cuts(speeds, len(lengths), seconds)
    assert [first for first, _ in cuts] == [0, *(last for _, last in cuts[:-1])]
    assert cuts[-1][1] == len(lengths)
    worst = max(seconds(speed, *cut) for speed, cut in zip(speeds, cuts, strict=True))
    assert worst == best(speeds, 0)


@pytest.mark.parametrize("policy", ["oracle", "length_predictor"])
def test_a_policy_that_needs_the_truth_says_so(policy):
    with pytest.raises(protocols.ConfigError, match="needs the true lengths"):
        registry.create(config_lib.SchedulerConfig(policy=policy))


def test_an_unknown_scheduler_is_refused_with_the_nearest_name():
    with pytest.raises(protocols.ConfigError, match="did you mean 'least_loaded'"):
        config_lib.SchedulerConfig(policy="least_loadd")


def test_bounds_that_do_not_fit_the_degrees_are_refused():
    with pytest.raises(protocols.ConfigError, match=r"max_remaining_tokens: 1 bounds do not separate the 3"):
        levels.check((100,), ((1, ""), (2, ""), (4, ""), (1, "")))
    with pytest.raises(protocols.ConfigError, match=r"separate the 3 .* 1 on h20, 1 on h800, 2 on h20 "):
        levels.check((100,), ((2, "h20"), (1, "h800"), (1, "h20")))
    with pytest.raises(protocols.ConfigError, match="must ascend"):
        config_lib.SchedulerConfig(max_remaining_tokens=(200, 100))
    levels.check((), ((1, ""), (2, ""), (4, "")))


@pytest.mark.parametrize("policy", config_lib.POLICIES)
def test_each_argument_of_a_policy_is_declared_with_its_range(policy):
    arguments = config_lib.ARGUMENTS.get(policy, {})
    create(policy, arguments=dict.fromkeys(arguments, 1))
    for name in arguments:
        with pytest.raises(protocols.ConfigError, match=rf"scheduler\.arguments\.{name}: must .* not -1"):
            create(policy, arguments={name: -1})
    with pytest.raises(protocols.ConfigError, match=rf"scheduler\.arguments: {policy} takes no argument 'hurry'"):
        create(policy, arguments={"hurry": 1})
