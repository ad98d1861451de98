"""Steps that follow from requests, slots, caches and versions."""

from __future__ import annotations

import dataclasses
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.planning.costs import costs, hardware
from libra_jax.planning.forecast import degree_queues as pools
from libra_jax.planning.forecast import forecast, meshes, pipeline


def pool(ticks: list[float], *, slots: int = 100, pace: float = 1.0, **changes) -> pools.DegreePool:
    """One instance whose ticks take `pace` seconds, however many requests decode; changes are of it or its requests."""
    fields = {"share": 1.0, "drag": 0.0, "footprint": 1.0, "again": 0.0, "recall": 0.0, "turns": 1.0}
    fields |= {name: changes.pop(name) for name in list(changes) if name in fields}
    requests = [pools.RequestCosts(ticks=one, **fields) for one in ticks]
    sizes = {"instances": 1, "slots": slots, "room": 1e9, "cache": 1e9, "pause": 0.0, **changes}
    return pools.DegreePool(**sizes, fixed=[pace] * (slots + 1), requests=requests)


def seconds(pools, rules: pipeline.Cycle, *, sampled: int = 1, wanted: int = -1) -> float:
    sequence = [number % sampled for number in range(rules.requests)]
    return pipeline.step_seconds(pools, sequence, [wanted] * len(sequence), rules)


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_path_and_training_share_the_window_of_versions(staleness):
    rules = pipeline.Cycle(groups=2, size=2, staleness=staleness, train=10.0)
    assert seconds([pool([100.0])], rules) == pytest.approx(110.0 / (staleness + 1))


def test_at_no_staleness_rollout_and_training_add_up():
    assert seconds([pool([100.0])], pipeline.Cycle(2, 2, 0, 10.0)) == pytest.approx(110.0)


def test_no_step_is_shorter_than_training():
    assert seconds([pool([5.0])], pipeline.Cycle(2, 2, 4, 10.0)) == pytest.approx(10.0)


def test_few_slots_set_the_step_by_their_throughput():
    rules = pipeline.Cycle(groups=4, size=2, staleness=4, train=1.0)
    assert seconds([pool([10.0], slots=2)], rules) == pytest.approx(40.0)
    assert seconds([pool([10.0], slots=4)], rules) == pytest.approx(20.0)
    assert seconds([pool([10.0], slots=2)] * 2, rules) == pytest.approx(20.0)


def test_a_batch_waits_for_the_longest_request_of_its_groups():
    rules = pipeline.Cycle(groups=2, size=2, staleness=0, train=1.0)
    assert seconds([pool([10.0, 40.0, 10.0, 10.0])], rules, sampled=4) == pytest.approx(41.0)


def test_unlike_batches_take_more_than_their_means():
    """Each second batch is long: while it lasts, the batch behind it cannot make up for its own shortness."""
    rules = pipeline.Cycle(groups=1, size=1, staleness=0, train=50.0)
    even = seconds([pool([60.0])], rules)
    assert seconds([pool([20.0, 100.0])], rules, sampled=2) == pytest.approx(even)
    rules = dataclasses.replace(rules, staleness=1)
    even = seconds([pool([60.0])], rules)
    assert seconds([pool([5.0, 115.0])], rules, sampled=2) > 1.1 * even


def test_a_full_cache_keeps_slots_empty():
    rules = pipeline.Cycle(groups=4, size=1, staleness=4, train=1.0)
    assert seconds([pool([10.0], room=2.0)], rules) == pytest.approx(20.0)


def test_contexts_that_outgrow_the_cache_are_prefilled_again():
    rules = pipeline.Cycle(groups=8, size=1, staleness=1, train=1.0)
    fits = pool([10.0], share=0.5, recall=0.1)
    assert seconds([dataclasses.replace(fits, cache=4.0)], rules) > 1.2 * seconds([fits], rules)


def test_requests_that_wait_too_long_take_turns_and_prefill_again():
    """Of forty requests of ten turns, the cache holds four."""
    patient = pipeline.Cycle(groups=40, size=1, staleness=0, train=1.0)
    full = pool([60.0 + 2.0 * index for index in range(40)], cache=4.0, room=4.0, again=5.0, turns=10.0)
    line = seconds([full], patient, sampled=40)
    assert seconds([full], dataclasses.replace(patient, ageing=50.0), sampled=40) > 1.1 * line


def test_waits_shorter_than_the_limit_change_nothing():
    rules = pipeline.Cycle(groups=4, size=1, staleness=4, train=1.0)
    full = pool([10.0], room=2.0, cache=2.0, again=5.0, turns=10.0)
    assert seconds([full], dataclasses.replace(rules, ageing=1e4)) == pytest.approx(seconds([full], rules))


def test_requests_of_one_turn_are_never_pushed_out():
    rules = pipeline.Cycle(groups=10, size=1, staleness=0, train=1.0)
    full = pool([100.0], cache=2.0, room=2.0, again=5.0)
    assert seconds([full], dataclasses.replace(rules, ageing=20.0)) == pytest.approx(seconds([full], rules))


def test_a_weight_sync_prefills_live_contexts_again():
    rules = pipeline.Cycle(groups=2, size=1, staleness=1, train=1.0)
    assert seconds([pool([100.0], again=3.0)], rules) > 2.0 + seconds([pool([100.0])], rules)
    assert seconds([pool([100.0], pause=3.0)], rules) > 1.0 + seconds([pool([100.0])], rules)


def test_requests_that_are_predicted_run_on_their_pool():
    rules = pipeline.Cycle(groups=2, size=2, staleness=1, train=1.0)
    slow, fast = pool([100.0], slots=4, pace=2.0), pool([100.0], slots=4, pace=1.0)
    assert seconds([slow, fast], rules, wanted=0) > 1.4 * seconds([slow, fast], rules, wanted=1)


def test_a_request_moves_to_its_pool_as_soon_as_there_is_room():
    rules = pipeline.Cycle(groups=2, size=1, staleness=0, train=1.0)
    slow, fast = pool([100.0], slots=4, pace=10.0), pool([100.0], slots=1, pace=1.0)
    # One waits on the slow pool for 100 s, in which it gets a tenth, and then takes 90 s.
    assert seconds([slow, fast], rules, wanted=1) == pytest.approx(191.0)


@hypothesis.given(st.lists(st.floats(1.0, 100.0), min_size=4, max_size=4), st.integers(0, 4), st.floats(1.0, 50.0))
def test_half_of_a_cluster_takes_as_long_for_half_of_the_groups(ticks, staleness, train):
    rules = pipeline.Cycle(4, 4, staleness, train)
    half = dataclasses.replace(rules, groups=2)
    one = pool(ticks, slots=4)
    two = dataclasses.replace(one, instances=2, slots=8, room=2e9, cache=2e9)
    assert seconds([two], rules, sampled=4) <= 1.5 * seconds([one], half, sampled=4)
    assert seconds([one], half, sampled=4) <= 1.5 * seconds([two], rules, sampled=4)


def test_a_streamed_step_hides_what_it_trains_before_its_last_group_ends():
    whole = pipeline.Cycle(groups=2, size=1, staleness=0, train=20.0)
    streamed = dataclasses.replace(whole, early=18.0)
    assert seconds([pool([10.0, 100.0])], whole, sampled=2) == pytest.approx(120.0)
    # Half of 18 s hides, the other half and 2 s of update and sync follow.
    assert seconds([pool([10.0, 100.0])], streamed, sampled=2) == pytest.approx(111.0)
    # The first part, from 10 s to 19 s, is not done when the last group ends.
    assert seconds([pool([10.0, 15.0])], streamed, sampled=2) == pytest.approx(30.0)
    # Nothing hides if all groups end together.
    assert seconds([pool([15.0])], streamed) == pytest.approx(35.0)


def test_parts_of_a_streamed_step_cost_their_micro_batches_and_wait_for_enough_tokens():
    rules = pipeline.Cycle(groups=2, size=1, staleness=0, train=20.0, early=18.0, part=4.0)
    # Each of two parts takes 4 + 14 / 2 s.
    assert seconds([pool([10.0, 100.0])], rules, sampled=2) == pytest.approx(113.0)
    large = dataclasses.replace(rules, min_part_share=0.6)
    assert seconds([pool([10.0, 100.0])], large, sampled=2) == pytest.approx(120.0)
    # A group with more of the tokens takes more of the time: here 3 of 4.
    sequence = [number % 2 for number in range(rules.requests)]
    steps = pipeline.follow([pool([10.0, 100.0])], sequence, [-1] * len(sequence), large, [3.0, 1.0])
    assert steps.seconds == pytest.approx(100.0 + 2.0 + 4.0 + 14.0 / 4)
    assert steps.train == pytest.approx(24.0)


@hypothesis.given(
    st.lists(st.floats(1.0, 100.0), min_size=8, max_size=8), st.integers(0, 2), st.floats(1.0, 50.0), st.floats(0.1, 1)
)
def test_a_streamed_step_is_between_its_longest_stage_and_a_whole_one(ticks, staleness, train, early):
    whole = pipeline.Cycle(4, 2, staleness, train)
    streamed = dataclasses.replace(whole, early=early * train)
    found = seconds([pool(ticks)], streamed, sampled=8)
    assert found <= seconds([pool(ticks)], whole, sampled=8) * (1 + 1e-9)
    assert found >= max(train, (max(ticks) + train - early * train) / (staleness + 1)) * (1 - 1e-9)


def test_a_plan_counts_what_streamed_steps_hide():
    plan = protocols.Plan(1, 5, 4, (protocols.PlannedBucket(2, 14, 40_000),))
    off = work(0, 8).predict(plan, forecast.CorrectionLevels())
    group = work(0, 8, part_tokens=0).predict(plan, forecast.CorrectionLevels())
    batch = work(0, 8, part_tokens=10**9).predict(plan, forecast.CorrectionLevels())
    assert max(group.train, group.rollout) < group.step < 0.95 * off.step
    assert group.train >= off.train, "parts fill their last micro-batches less"
    assert batch.step == pytest.approx(off.step), "no group fills a part"
    made = work(0, 8, part_tokens=0)
    best, other = (each.best(forecast.CorrectionLevels()) for each in (made, work(0, 8)))
    assert made.predict(best, forecast.CorrectionLevels()).step <= made.predict(other, forecast.CorrectionLevels()).step


def work(staleness: int, turns: int, **changes) -> forecast.StepWork:
    model = costs.CostModel(hardware.sheet("a800"), model_config.load_preset("Qwen3-14B", "model"))
    setting = forecast.PlanConditions(
        model,
        meshes.TrainerProperties((131_072,)),
        (1, 2, 4, 8),
        (32,) * 4,
        48,
        512,
        staleness,
        group_size=16,
        **changes,
    )
    lengths = [500 * 2 ** (index * 7 // 64 % 7) for index in range(1_024)]
    tool = "bash" if turns > 1 else None
    status = "success" if tool else None
    drawn = [[protocols.Turn(tokens // turns, tool, status, 300 * (turns > 1), 2.0)] * turns for tokens in lengths]
    return forecast.StepWork(setting, [500] * len(drawn), drawn)


def test_where_nothing_tells_lengths_a_plan_has_one_degree():
    plan = work(4, 1).best(forecast.CorrectionLevels())
    assert len(plan.rollout) == 1


def test_who_knows_lengths_gains_by_unlike_degrees_and_who_does_not_loses():
    buckets = (protocols.PlannedBucket(1, 12, 6_000), protocols.PlannedBucket(4, 4, 40_000))
    plan = protocols.Plan(1, 5, 4, buckets)
    clairvoyant = work(1, 8, policy="oracle").predict(plan, forecast.CorrectionLevels())
    blind = work(1, 8, policy="sticky", cache_share=0.9).predict(plan, forecast.CorrectionLevels())
    assert clairvoyant.step < 0.95 * blind.step


def test_the_sheet_charges_for_weight_sync():
    plan = protocols.Plan(1, 5, 4, (protocols.PlannedBucket(2, 14, 40_000),))
    made = work(4, 1)
    expected = made.predict(plan, forecast.CorrectionLevels())
    sync = made.besides(20, forecast.CorrectionLevels())
    assert sync > 1.0
    assert expected.step >= expected.train + sync
    assert made.besides(20, forecast.CorrectionLevels(sync=7.0, between=1.0)) == 8.0


def test_a_large_cluster_is_followed_at_a_smaller_scale():
    small, large = work(1, 8), work(1, 8)
    large._setting = dataclasses.replace(large._setting, requests=512 * 16, devices=48 * 16)
    plan = protocols.Plan(1, 5, 4, (protocols.PlannedBucket(2, 14, 40_000),))
    wide = protocols.Plan(1, 5, 4, (protocols.PlannedBucket(2, 14 * 16, 40_000),))
    mesh = meshes.Mesh(1, 5, 4, 100.0, 1e9)
    one, many = (made._step(which.rollout, mesh, rough=False) for made, which in ((small, plan), (large, wide)))
    assert many == pytest.approx(one, rel=0.15)


def test_a_pool_of_less_than_one_slot_is_used_one_request_at_a_time():
    alone = pools.RequestCosts(ticks=10.0, share=1.0, drag=0.0, footprint=100.0, again=0.0, recall=0.0)
    small = pools.DegreePool(0.02, 0.5, 10.0, 10.0, [1.0] * 40, 0.0, [alone])
    cycle = pipeline.Cycle(groups=1, size=2, staleness=0, train=1.0)
    seconds = pipeline.step_seconds([small], [0] * cycle.requests, [-1] * cycle.requests, cycle)
    assert math.isfinite(seconds)
    assert seconds > 10.0
