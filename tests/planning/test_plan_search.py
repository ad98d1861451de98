"""The split between training and rollout against trying every one."""

from __future__ import annotations

import dataclasses
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.planning.costs import costs, hardware, profiles
from libra_jax.planning.forecast import meshes, serving
from libra_jax.planning.search import partition, plans, search
from tests.benchmarks import predictions

MODEL = costs.CostModel(hardware.sheet("h100"), model_config.load_preset("Qwen3-1.7B", "model"))
DEGREES = (1, 2, 4, 8)
TOKENS = st.lists(st.integers(1, 20_000), min_size=1, max_size=10)


def searched(tokens: list[int], staleness: int, most: int) -> search.PlanSearch:
    """A search whose steps take exactly their bounds."""
    rollout, training = parts(tokens, staleness)

    def step(buckets, train, *, rough):
        served = made.rollout_seconds(buckets)
        return max(train.seconds, served) if staleness else train.seconds + served

    made = search.PlanSearch(rollout, search.front_of(training, most), most, staleness=staleness, step=step)
    return made


def parts(tokens: list[int], staleness: int) -> tuple[serving.Serving, meshes.Training]:
    wanted = serving.Demand.of_trajectories([500] * len(tokens), [[protocols.Turn(count)] for count in tokens])
    rollout = serving.Serving(MODEL, wanted, DEGREES, (4, 4, 4, 4), staleness=staleness)
    training = meshes.Training(MODEL, [500 + count for count in tokens], meshes.TrainerProperties((4_096, 32_768)))
    return rollout, training


@hypothesis.settings(max_examples=40)
@hypothesis.given(TOKENS, st.integers(3, 12), st.integers(0, 2))
def test_no_other_mesh_partition_or_single_degree_has_a_shorter_step(tokens, devices, staleness):
    rollout, training = parts(tokens, staleness)
    made = searched(tokens, staleness, devices)
    found = made.best(devices)
    join = max if staleness else lambda first, second: first + second
    over = partition.Partitions(rollout.seconds, rollout.demand.edges(10_000), DEGREES)
    alike, mixed = [], []
    for mesh in training.front(devices):
        left = devices - mesh.devices
        for degree in DEGREES[: left.bit_length()]:
            if degree <= left:
                bucket = protocols.PlannedBucket(degree, left // degree, 20_000)
                alike.append(join(mesh.seconds, made.rollout_seconds([bucket])))
        served = over.fastest(left) if left > 0 else None
        if served is not None:
            mixed.append((join(mesh.seconds, served.seconds), len({run.degree for run in served.runs})))
    assert found.step_seconds <= min(alike) * (1 + 1e-7)
    shortest, degrees = min(mixed)
    if degrees > 1:  # instances of one degree share requests evenly, which a partition does not
        assert found.step_seconds <= shortest * (1 + 1.1 * search.ROUGH)
    assert found.step_seconds == pytest.approx(join(found.train.seconds, found.rollout_seconds))
    assert found.devices <= devices


@pytest.mark.parametrize("wanted", [(1,), (8,), (2, 4), (4, 8)])
def test_the_degrees_whose_steps_are_shortest_are_found_though_bounds_name_others(wanted):
    rollout, training = parts([2_000] * 30 + [20_000], 1)

    def step(buckets, train, *, rough):
        held = [bucket.tensor_parallel for bucket in buckets]
        apart = sum(abs(math.log2(ours) - math.log2(theirs)) for ours in held for theirs in wanted)
        return train.seconds + made.rollout_seconds(buckets) * (1 + apart + 2 * abs(len(held) - len(wanted)))

    made = search.PlanSearch(rollout, search.front_of(training, 32), 32, staleness=1, step=step)
    assert tuple(bucket.tensor_parallel for bucket in made.best(32).rollout) == wanted


def test_a_rough_prediction_is_near_a_careful_one_where_instances_are_full():
    run = predictions.run_of("swe", 1)
    work = predictions.work_of(run)
    buckets = (protocols.PlannedBucket(2, 14, 80_000),)
    for cycle in (400.0, 600.0, 800.0):
        mesh = meshes.Mesh(1, 5, 4, cycle, 1e9)
        rough, careful = (work._step(buckets, mesh, rough=rough) for rough in (True, False))
        assert rough == pytest.approx(careful, rel=0.08)


@hypothesis.settings(max_examples=40)
@hypothesis.given(TOKENS, st.integers(3, 12))
def test_buckets_ascend_in_degree_and_length_and_the_widest_takes_the_longest(tokens, devices):
    found = searched(tokens, 1, devices).best(devices)
    degrees = [bucket.tensor_parallel for bucket in found.rollout]
    bounds = [bucket.max_remaining_tokens for bucket in found.rollout]
    assert degrees == sorted(set(degrees))
    assert bounds == sorted(set(bounds))
    assert max(tokens) <= bounds[-1] < max(tokens) + len(bounds)  # a token more for each degree of equal lengths


@hypothesis.settings(max_examples=30)
@hypothesis.given(TOKENS, st.integers(3, 11), st.integers(0, 1))
def test_a_device_more_never_makes_the_step_longer(tokens, devices, staleness):
    made = searched(tokens, staleness, 12)
    assert made.best(devices + 1).step_seconds <= made.best(devices).step_seconds * (1 + 1.1 * search.ROUGH)


def test_bounds_ascend_where_requests_of_one_length_go_to_several_degrees():
    made = searched([16_000] * 64, 1, 40)
    rollout = tuple(protocols.PlannedBucket(degree, 2, 1) for degree in (1, 2, 4))
    for buckets in (made.ranges(rollout), made.best(40).rollout):
        bounds = [bucket.max_remaining_tokens for bucket in buckets]
        assert bounds == sorted(set(bounds))
    assert [bucket.max_remaining_tokens for bucket in made.ranges(rollout)] == [16_000, 16_001, 16_002]


def test_a_mesh_over_which_rows_do_not_divide_is_left_out():
    training = meshes.Training(MODEL, [500] * 8, meshes.TrainerProperties((4_098,)))
    assert training.tensor_degrees() == [1, 2]


def test_too_few_devices_for_both_stages_are_refused_with_what_each_takes():
    with pytest.raises(
        protocols.ConfigError,
        match=r"1 devices are too few: training takes at least 1 .* at least 1 more; take 2 or more",
    ):
        searched([1_000], 1, 8).best(1)


def test_a_context_that_no_instance_holds_is_refused_with_its_length():
    tokens = MODEL.kv_tokens(8) + 1_000
    wanted = serving.Demand.of_trajectories([500], [[protocols.Turn(tokens)]])
    rollout = serving.Serving(MODEL, wanted, DEGREES, (4, 4, 4, 4), staleness=1)
    _, training = parts([1_000], 1)
    with pytest.raises(protocols.ConfigError, match=rf"holds a context of {tokens + 500} tokens .* degree 8"):
        search.PlanSearch(
            rollout, search.front_of(training, 8), 8, staleness=1, step=lambda buckets, train, *, rough: train.seconds
        )


@hypothesis.given(st.lists(st.integers(1, 1_000), min_size=1, max_size=60), st.integers(1, 60))
def test_a_demand_of_other_size_keeps_order_and_mean_and_is_no_longer_than_the_longest(tokens, requests):
    made = serving.Demand.of_trajectories(
        [10] * len(tokens), [[protocols.Turn(one)] for one in tokens], requests=requests
    )
    assert len(made) == requests
    assert all(first >= second for first, second in zip(made.tokens[:-1], made.tokens[1:], strict=True))
    assert made.tokens[0] <= max(tokens)
    assert made.peak.max() == max(tokens) + 10
    if len(tokens) % requests == 0:
        assert made.tokens.mean() == pytest.approx(sum(tokens) / len(tokens))


def test_why_the_runner_up_lost_names_the_stage_that_is_slower():
    made = searched([20_000] * 8 + [100] * 50, 1, 8)
    best, splits = made.best(8), list(made.splits(8))
    assert math.isclose(best.step_seconds, min(item.step_seconds for item in splits), rel_tol=1e-7)
    sentence = search.compared(best, splits, 1)
    assert "training devices would make the step" in sentence


@pytest.mark.parametrize(
    ("train", "rollout", "step", "reason"),
    [
        (100.0, 60.0, 100.5, ": training takes 100.0 s on 4 devices"),
        (60.0, 100.0, 101.0, ": rollout takes 100.0 s on the 8 devices left"),
        # (path + 100) / 2 = 200, so the path is 300.
        (100.0, 120.0, 200.0, "the longest rollouts take about 300.0 s on 8 devices, and with 100.0 s of training"),
    ],
)
def test_why_the_runner_up_lost_names_what_binds_its_step(train, rollout, step, reason):
    def split(devices, train, rollout, step):
        mesh = meshes.Mesh(1, devices, 1, train, 1.0)
        return search.DeviceSplit(mesh, (protocols.PlannedBucket(4, 2, 1000),), rollout, step)

    best = split(8, 50.0, 50.0, 50.0)
    assert reason in search.compared(best, [best, split(4, train, rollout, step)], 1)


def test_of_many_splits_a_picture_has_some_and_the_runner_up_among_them():
    made = searched([20_000] * 200 + [100] * 2_000, 1, 160)
    best, every = made.best(160), list(made.splits(160))
    some = list(made.splits(160, near=best))
    assert len(some) <= search.LOOKED_AT < len(every)
    assert set(some) <= set(every)
    assert some[0] == every[0]
    assert search.compared(best, some, 1) == search.compared(best, every, 1)


@hypothesis.settings(max_examples=30)
@hypothesis.given(TOKENS, st.floats(1.0, 8.0), st.integers(0, 2))
def test_the_cheapest_plan_within_a_time_has_no_device_too_many(tokens, slower, staleness):
    made = searched(tokens, staleness, 12)
    limit = slower * made.best(12).step_seconds
    found = made.cheapest(limit, 12)
    assert found.step_seconds <= limit
    for devices in range(2, found.devices):
        try:
            assert made.best(devices).step_seconds > limit * (1 - 1.1 * search.ROUGH)
        except protocols.ConfigError:
            continue
    with pytest.raises(protocols.ConfigError, match=r"no plan of 12 devices takes a step in .* the fastest takes"):
        made.cheapest(0.5 * made.best(12).step_seconds, 12)


@hypothesis.settings(max_examples=30)
@hypothesis.given(TOKENS, st.integers(3, 12), st.integers(0, 2))
def test_no_number_of_devices_gives_each_of_them_much_more_to_do_than_the_thriftiest_plan(tokens, most, staleness):
    made = searched(tokens, staleness, 12)
    found = made.thriftiest(most)
    assert found.devices <= most
    spent = []
    for devices in range(2, most + 1):
        try:
            best = made.best(devices)
        except protocols.ConfigError:
            continue
        spent.append(best.devices * best.step_seconds)
    assert found.devices * found.step_seconds <= 1.05 * min(spent)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 100_000, id="deep"),
        '{"train": {"devices": 1, "data": 1, "fsdp": 1, "tensor": 1}, "rollout": '
        '[{"tensor_parallel": 1, "count": 1000000000000, "max_remaining_tokens": 5}]}',
    ],
)
def test_a_plan_file_that_no_run_could_hold_is_refused_at_once(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    message = r"plan\.json: (this is no plan of launch/plan\.py|.* at most 1,000,000)"
    with pytest.raises(protocols.DataError, match=message):
        plans.read(tmp_path / "plan.json")


def test_a_profile_nested_too_deeply_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "profile.json").write_text("[" * 100_000)
    with pytest.raises(protocols.DataError, match="is no profile of"):
        profiles.read(tmp_path / "profile.json")


def test_a_runner_up_that_is_as_fast_is_not_called_longer():
    mesh = meshes.Mesh(1, 4, 1, 10.0, 1e9)
    bucket = (protocols.PlannedBucket(1, 4, 100),)
    best = search.DeviceSplit(mesh, bucket, 20.0, 20.0)
    other = search.DeviceSplit(dataclasses.replace(mesh, data=2), bucket, 19.9999, 19.9999)
    assert search.compared(best, [best, other], 1).startswith("8 training devices would make the step no shorter")
