"""Partitions of requests against exhaustive search."""

from __future__ import annotations

import functools
import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.planning.costs import costs, hardware
from libra_jax.planning.forecast import serving
from libra_jax.planning.search import partition

DEGREES = (1, 2, 4, 8)
TURNS = st.lists(
    st.builds(
        protocols.Turn,
        generated_tokens=st.integers(1, 6_000),
        payload_tokens=st.integers(0, 3_000),
        tool_seconds=st.floats(0.0, 60.0),
    ),
    min_size=1,
    max_size=4,
)


LIKE_THEIR_LENGTH = st.integers(1, 30_000).map(lambda tokens: [protocols.Turn(tokens)])
"""Requests whose context and time grow with their length, as those of `TURNS` need not."""


MODEL = costs.CostModel(hardware.sheet("a800"), model_config.load_preset("Qwen3-14B", "model"))
SLOTS = (4, 4, 4, 4)


def serve(trajectories, *, staleness: int = 0) -> serving.Serving:
    wanted = serving.Demand.of_trajectories([500] * len(trajectories), trajectories)
    return serving.Serving(MODEL, wanted, DEGREES, SLOTS, staleness=staleness)


def partitions(made: serving.Serving, *, ordered: bool = False) -> partition.Partitions:
    return partition.Partitions(made.seconds, made.demand.edges(10_000), made.degrees, ordered=ordered)


def exhaustive(made: serving.Serving, devices: int, *, ordered: bool = False) -> float:
    """The best time over all ways to cut the requests into consecutive runs and to give each a degree."""
    count = len(made.demand)

    @functools.cache
    def cost(degree: int, first: int, last: int) -> float:
        return float(made.seconds(degree, np.array([first]), np.array([last]))[0])

    @functools.cache
    def best(first: int, left: int, widest: int) -> float:
        if first == count:
            return 0.0
        found = math.inf
        for degree in made.degrees:
            if degree > min(left, widest):
                break
            for last in range(first + 1, count + 1):
                rest = best(last, left - degree, degree if ordered else widest)
                found = min(found, max(cost(degree, first, last), rest))
        return found

    return best(0, devices, max(made.degrees))


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.lists(LIKE_THEIR_LENGTH, min_size=1, max_size=12), st.integers(1, 8), st.integers(0, 2), st.booleans()
)
def test_no_way_to_cut_the_requests_into_runs_is_faster(trajectories, devices, staleness, ordered):
    made = serve(trajectories, staleness=staleness)
    found = partitions(made, ordered=ordered).fastest(devices)
    assert found is not None
    assert found.devices <= devices
    assert [run.first for run in found.runs] == [0, *(run.last for run in found.runs[:-1])]
    assert found.runs[-1].last == len(trajectories)
    degrees = [run.degree for run in found.runs]
    assert not ordered or degrees == sorted(degrees, reverse=True)
    assert found.seconds == pytest.approx(exhaustive(made, devices, ordered=ordered), rel=1e-7)


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.lists(TURNS, min_size=1, max_size=12), st.integers(1, 8), st.integers(0, 2))
def test_tools_and_contexts_of_any_kind_cost_the_search_five_percent_at_most(trajectories, devices, staleness):
    """Where an instance with a request more may be done earlier, nothing bounds what the search misses: of some
    thousands of drawn cases the worst was 2.01%.
    """
    made = serve(trajectories, staleness=staleness)
    found = partitions(made).fastest(devices)
    assert found is not None
    assert found.seconds <= 1.05 * exhaustive(made, devices)


def assigned(made: serving.Serving, devices: int) -> float:
    """The best time over all ways to share the requests out to instances, neighbours or not."""
    sets = list(range(1, 1 << len(made.demand)))

    @functools.cache
    def cost(degree: int, chosen: int) -> float:
        picked = [index for index in range(len(made.demand)) if chosen >> index & 1]
        fields = {name: getattr(made.demand, name)[picked] for name in serving.FIELDS}
        alone = serving.Serving(MODEL, serving.Demand(**fields), DEGREES, SLOTS, staleness=0)
        return float(alone.seconds(degree, np.array([0]), np.array([len(picked)]))[0])

    @functools.cache
    def best(left: int, chosen: int) -> float:
        if not chosen:
            return 0.0
        lowest = chosen & -chosen  # whoever is first in no other set goes with somebody now
        return min(
            (
                max(cost(degree, part), best(left - degree, chosen & ~part))
                for part in sets
                if part & lowest and part & ~chosen == 0
                for degree in DEGREES
                if degree <= left
            ),
            default=math.inf,
        )

    return best(devices, sets[-1])


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.lists(LIKE_THEIR_LENGTH, min_size=1, max_size=7), st.integers(1, 6))
def test_sharing_requests_out_in_any_other_way_gains_at_most_a_percent(trajectories, devices):
    made = serve(trajectories)
    found = partitions(made).fastest(devices)
    assert found is not None
    assert found.seconds <= 1.01 * assigned(made, devices)


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.lists(TURNS, min_size=1, max_size=12), st.floats(1.0, 2_000.0))
def test_the_fewest_devices_within_a_time_are_those_with_which_it_can_be_met(trajectories, limit):
    made = serve(trajectories)
    found, over = partitions(made).within(limit), partitions(made)
    if found is None:
        assert over.least_seconds > limit
        return
    assert found.seconds <= limit
    if found.devices > 1:
        fewer = over.fastest(found.devices - 1)
        assert fewer is None or fewer.seconds > limit


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.lists(LIKE_THEIR_LENGTH, min_size=1, max_size=40),
    st.lists(st.floats(1.0, 20_000.0), min_size=2, max_size=40),
    st.booleans(),
)
def test_what_was_asked_before_makes_no_answer_another_one(trajectories, limits, ordered):
    """Beyond `MOST_EDGES`, limits asked for before narrow down where to look; and more are asked than are kept."""
    made = serve(trajectories)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "MOST_EDGES", 0)
        patch.setattr(partition, "REMEMBERED", 4)
        asked = partitions(made, ordered=ordered)
        assert [asked.within(limit) for limit in limits] == [
            partitions(made, ordered=ordered).within(limit) for limit in limits
        ]
    by_table = partitions(made, ordered=ordered)  # which looks every run's time up
    assert [asked.within(limit) for limit in limits] == [by_table.within(limit) for limit in limits]


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.lists(LIKE_THEIR_LENGTH, min_size=2, max_size=20), st.integers(0, 2), st.sampled_from(DEGREES), st.data()
)
def test_a_run_takes_longer_with_every_request_that_is_added(trajectories, staleness, degree, data):
    made = serve(trajectories, staleness=staleness)
    first = data.draw(st.integers(0, len(trajectories) - 1))
    last = data.draw(st.integers(first + 1, len(trajectories)))
    inner = made.seconds(degree, np.array([first]), np.array([last]))[0]
    for wider in ((max(0, first - 1), last), (first, min(len(trajectories), last + 1))):
        assert made.seconds(degree, np.array([wider[0]]), np.array([wider[1]]))[0] >= inner * (1 - 1e-12)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.lists(LIKE_THEIR_LENGTH, min_size=1, max_size=8), st.lists(st.sampled_from(DEGREES), min_size=1, max_size=4)
)
def test_given_instances_are_used_as_well_as_they_can_be(trajectories, instances):
    made, order = serve(trajectories), sorted(instances, reverse=True)
    found = partitions(made).over(instances)
    assert found is not None
    best = math.inf
    for cuts in itertools.combinations_with_replacement(range(len(trajectories) + 1), len(order) - 1):
        ends = [0, *cuts, len(trajectories)]
        times = [
            made.seconds(degree, np.array([first]), np.array([last]))[0]
            for degree, first, last in zip(order, ends[:-1], ends[1:], strict=True)
        ]
        best = min(best, max(times))
    assert found.seconds == pytest.approx(best, rel=1e-7)


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.lists(st.integers(1, 20_000), min_size=50, max_size=200), st.sampled_from([1, 2]))
def test_instances_that_serve_many_requests_are_used_as_well_as_they_can_be(tokens, narrow):
    made = serve([[protocols.Turn(count)] for count in tokens])
    found = partitions(made).over([narrow, 4])
    assert found is not None
    cuts, none, all_of_them = np.arange(len(tokens) + 1), np.zeros(len(tokens) + 1, int), len(tokens)
    wide = made.seconds(4, none, cuts)
    assert found.seconds == pytest.approx(
        np.maximum(wide, made.seconds(narrow, cuts, none + all_of_them)).min(), rel=1e-7
    )


def test_a_context_that_fits_no_instance_has_no_partition_and_one_that_fits_wide_ones_only_goes_there():
    long = [protocols.Turn(MODEL.kv_tokens(1) + 1_000)]
    short = [protocols.Turn(100)]
    found = partitions(serve([short, long, short])).fastest(8)
    assert found is not None
    assert found.runs[0].degree > 1
    endless = [protocols.Turn(MODEL.kv_tokens(8) + 1_000)]
    made = partitions(serve([short, endless]))
    assert made.fastest(8) is None
    assert math.isinf(made.least_seconds)


@hypothesis.given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_range_maxima_are_those_of_slices(values):
    made = serving.Maxima(np.array(values))
    pairs = list(itertools.combinations_with_replacement(range(len(values) + 1), 2))
    first, last = np.array(pairs).T
    expected = [max(values[a:b], default=-math.inf) for a, b in pairs]
    assert made.over(first, last).tolist() == expected
