"""What clusters of any size ask of the coordinator: sums by hand, what grows, what is nearest to its limit."""

from __future__ import annotations

import dataclasses
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.planning import scale
from libra_jax.weights import relay_tree

MS = 1e-3
COSTS = scale.Costs(
    request=1 * MS,
    turn=2 * MS,
    delta=0.1 * MS,
    generated_token=1e-6,
    payload_token=2e-6,
    context_token=1e-7,
    actor=10 * MS,
    call=0.5 * MS,
    engine_update=0.2 * MS,
    engine_chunk=0.1 * MS,
    host_chunk=0.3 * MS,
    health=0.1 * MS,
    serving=0.01 * MS,
    status=0.001 * MS,
    loop_request=0.2 * MS,
    loop_turn=0.3 * MS,
    loop_token=1e-8,
    batch_token=1e-7,
    batch_rollout=5e-5,
    fetch_token=2e-7,
    fetch_rollout=3e-5,
    token_bytes=100.0,
    decisions={1_000: 20e-6, 100_000: 40e-6},
    planner={40: 0.1, 4_000: 10.0},
)
WORK = scale.Work(
    accelerators=40,
    engines=8,
    rollout_accelerators=16,
    trajectories=500,
    turns=10.0,
    generated_tokens=8_000.0,
    payload_tokens=2_000.0,
    sent_tokens=50_000.0,
    trained_tokens=12_000.0,
    step_seconds=1_000.0,
    weight_bytes=8 * 256 * 2**20,
)
SETTINGS = scale.Settings(link_bytes_per_second=2**30, memory_bytes=1e12)
IDLE = scale.Costs(
    **{item.name: 0.0 for item in dataclasses.fields(scale.Costs) if item.name not in ("decisions", "planner")},
    decisions={1: 1e-12},
    planner={1: 1e-12},
)


def found(accelerators: int = 40, costs: scale.Costs = COSTS, **changes) -> scale.Loads:
    return scale.loads(costs, WORK, dataclasses.replace(SETTINGS, **changes), accelerators)


def test_rates_and_cores_are_those_that_were_added_up_by_hand():
    here = found()
    assert here.rates == {"requests": 0.5, "turns": 5.0, "deltas": 252.5, "tokens": 4_000.0}
    assert here.engines == 8
    expected = {
        "requests": 0.5 * 1e-3,
        "turns": 5.0 * 2e-3,
        "scheduler's growth": 0.0,  # the measured size is the smallest there is
        # So many a second from 8 engines; those of one that come within a millisecond are one call.
        "deltas": 252.5 * 1e-4 + 252.5 / (1.0 + 1e-3 * 252.5 / 8) * 5e-4,
        "tokens": 4_000.0 * 1e-6 + 0.5 * (2_000.0 * 2e-6 + 50_000.0 * 1e-7),
        "health": 8 * (0.1 + 0.5) * 1e-3 / 10.0,
        "status": (8 + 2) * 1e-6,
        "batches": 0.5 * (12_000 * 1e-7 + 5e-5),
    }
    assert here.coordinator == pytest.approx(expected)
    assert here.parts["coordinator"].value == pytest.approx(sum(expected.values()))
    beside = expected | {
        "requests": 0.5 * 0.2e-3,
        "turns": 5.0 * 0.3e-3,
        "deltas": 0.0,
        "tokens": (4_000.0 + 0.5 * 2_000.0) * 1e-8,
    }
    assert found(loop_workers=True).coordinator == pytest.approx(beside)


def test_a_weight_sync_is_the_bytes_down_the_tree_or_the_calls_and_then_the_loading():
    here = found()  # two hosts of rollout, so that the tree is two deep; 8 buckets
    calls = 8 * (0.2 + 4 * 0.5) + 8 * 8 * (0.1 + 0.5) + 2 * 8 * (0.3 + 2 * 0.5)
    assert here.weight_sync == pytest.approx({"bytes": 2 * 2.0 * (1 + 2 / 8), "calls": calls * MS, "load": 0.5})
    assert here.parts["weight sync"].value == pytest.approx(5.5)
    assert here.parts["weight sync"].limit == pytest.approx(100.0)
    many = found(40_000)
    assert many.parts["weight sync"].value == pytest.approx(many.weight_sync["calls"] + 0.5)
    assert scale.FAN_OUT == relay_tree.FAN_OUT


def test_a_start_makes_the_actors_one_after_the_other_while_engines_start_at_once():
    here = found(engine_start_seconds=60.0)
    expected = {"actors": 10 * 10 * MS, "calls": 8 * 3 * 0.5 * MS, "serving": 8 * 0.01 * MS, "engines": 60.0}
    assert here.start == pytest.approx(expected)


def test_the_batch_that_is_handed_over_and_kept_counts_each_token_of_each_live_step():
    here = found()
    # Three hosts train, each with a process that takes its own rows.
    own = 500 * 12_000 * 2e-7 / 3
    assert here.parts["hand-over"].value == pytest.approx(500 * (12_000 * 1e-7 + 5e-5) + 500 * 3e-5 + own)
    assert here.parts["hand-over"].limit == pytest.approx(100.0)
    assert here.parts["memory"].value == pytest.approx(2 * 500 * 12_000 * 100.0 / 1e9)
    assert found(staleness=0).parts["memory"].value == pytest.approx(500 * 12_000 * 100.0 / 1e9)


def test_costs_between_measured_sizes_and_beyond_them_follow_the_power_law_of_their_neighbours():
    known = {10: 1.0, 1_000: 100.0, 10_000: 10_000.0}
    assert scale.grown(known, 100) == pytest.approx(10.0)
    assert scale.grown(known, 1_000) == pytest.approx(100.0)
    assert scale.grown(known, 100_000) == pytest.approx(1e6)
    assert scale.grown(known, 1) == 1.0
    assert scale.grown({10: 3.0}, 1e6) == 3.0
    assert scale.grown({10: 3.0, 1_000: 1.0}, 1e6) == 3.0  # noise, and no reason to promise less for more


SIZES = st.integers(1, 200_000)


@hypothesis.given(SIZES, SIZES)
def test_whatever_has_a_limit_grows_with_the_cluster(one, other):
    fewer, more = found(min(one, other)), found(max(one, other))
    for name, part in fewer.parts.items():
        assert part.value <= more.parts[name].value * (1 + 1e-12)


@hypothesis.given(SIZES, st.sampled_from([item.name for item in dataclasses.fields(scale.Costs)]))
def test_no_part_gets_less_for_a_cost_that_is_higher(accelerators, name):
    value = getattr(COSTS, name)
    dearer = {size: 2 * each for size, each in value.items()} if isinstance(value, dict) else 2 * value
    beside = name.startswith("loop_")
    before = found(accelerators, loop_workers=beside)
    after = found(accelerators, dataclasses.replace(COSTS, **{name: dearer}), loop_workers=beside)
    for part in before.parts:
        assert after.parts[part].value >= before.parts[part].value
    assert after != before or name == "decisions"  # among few requests they take what `turn` has


@hypothesis.given(st.integers(40, 100_000), st.integers(1, 512), st.integers(1, 512))
def test_fewer_deltas_and_larger_buckets_never_cost_more(accelerators, one, other):
    few, many = (found(accelerators, stream_interval=size) for size in (max(one, other), min(one, other)))
    assert few.parts["coordinator"].value <= many.parts["coordinator"].value
    large, small = (found(accelerators, chunk_mib=size) for size in (max(one, other), min(one, other)))
    assert large.weight_sync["calls"] <= small.weight_sync["calls"]


@pytest.mark.parametrize("part", found().parts)
def test_a_limit_is_reached_at_the_size_that_is_told_and_not_one_accelerator_before(part):
    at = scale.reached(COSTS, WORK, SETTINGS, part)
    assert at is not None
    assert found(at).parts[part].ratio >= 1.0
    assert at == 1 or found(at - 1).parts[part].ratio < 1.0


def test_the_first_bottleneck_is_what_reaches_its_limit_with_the_fewest_and_then_is_nearest_to_it():
    name, at = scale.first(COSTS, WORK, SETTINGS)
    assert at == min(scale.reached(COSTS, WORK, SETTINGS, part) for part in found().parts)
    assert found(at).bottleneck == name
    roomy = dataclasses.replace(SETTINGS, memory_bytes=math.ldexp(1.0, 100), link_bytes_per_second=1e15)
    assert scale.first(IDLE, WORK, roomy) is None


def test_what_needs_no_remedy_has_none():
    here = {part: scale.remedy(COSTS, WORK, SETTINGS, 40, part) for part in found().parts}
    assert set(here.values()) == {"none needed at 40"}


def test_agent_loops_beside_the_engines_are_the_remedy_of_a_busy_coordinator_as_long_as_they_are_enough():
    assert found(400).parts["coordinator"].value > 1.0
    told = scale.remedy(COSTS, WORK, SETTINGS, 400, "coordinator")
    left = found(400, loop_workers=True).parts["coordinator"].value
    assert left <= scale.BUSY
    assert f"rollout.loop_workers, one or more a host: {left:.2g} cores" in told
    shards = scale.remedy(COSTS, WORK, SETTINGS, 40_000, "coordinator")
    assert "coordinators, each with a share of the groups" in shards
    count = int(shards.split(" and ")[1].split()[0])
    left = found(40_000, loop_workers=True).parts["coordinator"].value
    assert (count - 1) * scale.BUSY < left <= count * scale.BUSY


def test_larger_chunks_are_the_remedy_of_a_weight_sync_as_long_as_they_are_enough():
    dear = dataclasses.replace(COSTS, call=5 * MS)
    over = next(size for size in range(40, 10**6, 40) if found(size, dear).parts["weight sync"].ratio > 1.0)
    told = scale.remedy(dear, WORK, SETTINGS, over, "weight sync")
    assert told.startswith("rollout.chunk_mib=512: ")
    told = scale.remedy(dear, WORK, SETTINGS, 10**6, "weight sync")
    assert "one call for each of 50,000 hosts instead of 4 times as many" in told


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("start-up", "coordinators that make actors"),
        ("hand-over", "hands over its share of the groups"),
        ("planner", "in a process of its own"),
        ("memory", "each on a host of its own"),
    ],
)
def test_every_other_part_has_a_remedy_with_its_numbers(part, said):
    told = scale.remedy(COSTS, WORK, SETTINGS, 10**6, part)
    assert said in told
    assert any(letter.isdigit() for letter in told)


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (lambda: dataclasses.replace(COSTS, call=-1.0), "costs.call: -1.0 is no cost"),
        (lambda: dataclasses.replace(COSTS, turn=math.nan), "costs.turn"),
        (lambda: dataclasses.replace(COSTS, planner={}), "costs.planner: {} needs one size at least"),
        (lambda: dataclasses.replace(COSTS, decisions={0: 1.0}), "costs.decisions"),
        (lambda: dataclasses.replace(WORK, turns=0.0), "work.turns: 0.0 is not possible"),
        (lambda: dataclasses.replace(SETTINGS, stream_interval=0), "settings.stream_interval: 0 is not possible"),
        (lambda: dataclasses.replace(SETTINGS, staleness=-1), "settings.staleness"),
        (lambda: found(0), "accelerators: 0 is no size of a cluster"),
    ],
)
def test_nonsense_is_refused_by_a_sentence_that_names_the_field(made, field):
    with pytest.raises(protocols.ConfigError) as error:
        made()
    assert str(error.value).startswith(field)
