"""The roofline: hand-computed figures, and the directions in which they must move."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.models.adapters import adapters
from libra_jax.planning.costs import costs, hardware, request_costs

MODEL = costs.CostModel(hardware.sheet("a800"), model_config.load_preset("Qwen3-14B"))
SPARSE = costs.CostModel(hardware.sheet("a800"), model_config.load_preset("Qwen3-30B-A3B"))
DEGREES = st.sampled_from([1, 2, 4, 8])


def test_sizes_of_qwen3_14b():
    assert MODEL.parameters == 14_768_307_200
    assert MODEL.kv_bytes_per_token == 2 * 40 * 8 * 128 * 2
    free = 80e9 * 0.9 - 4e9
    assert MODEL.kv_tokens(1) == int((free - 2 * 14_768_307_200) / 163_840)
    assert MODEL.kv_tokens(4) == int((4 * free - 2 * 14_768_307_200) / 163_840)


KNOWN = MODEL.coefficients
OVERHEAD = KNOWN.step_overhead + 40 * KNOWN.layer_overhead


def test_a_lone_decode_step_reads_the_weights_but_not_the_input_embedding():
    weights = 2 * (14_768_307_200 - 151_936 * 5120) / (2.039e12 * KNOWN.memory_share)
    context = 1000 * 163_840 / (2.039e12 * KNOWN.context_share)
    expected = weights + context + OVERHEAD + KNOWN.sequence_overhead
    assert MODEL.step_seconds(1, 1, 1000) == pytest.approx(expected)
    assert MODEL.fixed_seconds(8, 65) - MODEL.fixed_seconds(8, 64) > KNOWN.sequence_overhead


def test_tied_embeddings_are_read_for_the_output():
    tied = costs.CostModel(hardware.sheet("a800"), model_config.load_preset("Qwen3-0.6B"))
    assert tied.reading_seconds(1, 1) == pytest.approx(tied.weight_bytes / (2.039e12 * KNOWN.memory_share))


def test_a_large_prefill_is_bound_by_arithmetic():
    rate = 312e12 * KNOWN.rollout_flops_share
    linear = 2 * (14_768_307_200 - 151_936 * 5120) * 4096 / rate
    attention = 4 * 40 * 40 * 128 * 4096 * 4096 / 2 / rate
    assert MODEL.prefill_seconds(1, 4096) == pytest.approx(linear + attention + OVERHEAD)


def test_small_all_reduces_cost_latency_and_large_ones_bandwidth():
    assert MODEL.collective_seconds(1, 100) == 0
    small = MODEL.collective_seconds(8, 1) / 80
    assert small == pytest.approx(KNOWN.collective_latency, rel=0.3)
    volume = 2 * 7 / 8 * 4096 * 5120 * 2
    assert MODEL.collective_seconds(8, 4096) / 80 == pytest.approx(40e-6 + volume / (200e9 * 0.7))


def test_training_counts_six_operations_a_parameter_and_token():
    single = 6 * 14_768_307_200 * 1e6 / (24 * 312e12 * 0.4)  # without attention, which is nothing for single tokens
    assert MODEL.train_seconds([1] * 10**6, 24) == pytest.approx(single, rel=1e-4)
    assert MODEL.train_seconds([10_000] * 100, 24) > MODEL.train_seconds([1000] * 1000, 24) > single


@given(DEGREES, st.integers(1, 300), st.integers(0, 10**6))
def test_more_work_takes_longer_and_more_devices_less(degree, decoding, context):
    step = MODEL.step_seconds(degree, decoding, context)
    assert MODEL.step_seconds(degree, decoding + 1, context) >= step
    assert MODEL.step_seconds(degree, decoding, context + 1) > step
    assert MODEL.fixed_seconds(degree, decoding, 100.0) >= MODEL.fixed_seconds(degree, decoding)
    if degree > 1:
        assert step < MODEL.step_seconds(degree // 2, decoding, context)


@given(DEGREES, st.integers(1, 64), st.integers(0, 50_000), st.integers(1, 20_000))
def test_a_scheduler_sees_the_same_steps_as_the_engine(degree, decoding, context, tokens):
    instance = protocols.Instance("engine-0", degree, 64)
    seconds = request_costs.SchedulingCosts(MODEL).decode_seconds(instance, decoding, context, tokens)
    first = tokens * MODEL.step_seconds(degree, decoding, decoding * context)
    last = tokens * MODEL.step_seconds(degree, decoding, decoding * (context + tokens))
    assert first <= seconds <= last


def test_moving_costs_a_prefill_or_a_transfer_whichever_is_less():
    target = protocols.Instance("engine-1", 4, 64)
    prefill, transfer = request_costs.SchedulingCosts(MODEL), request_costs.SchedulingCosts(MODEL, transfer=True)
    assert prefill.move_seconds(None, target, 8000) == prefill.move_seconds("engine-1", target, 8000) == 0.0
    assert prefill.move_seconds("engine-0", target, 8000) == MODEL.prefill_seconds(4, 8000)
    assert transfer.move_seconds("engine-0", target, 8000) == 8000 * 163_840 / (4 * 25e9 * 0.8)


def test_sizes_of_qwen3_30b_a3b():
    experts = 48 * 128 * 3 * 2048 * 768
    assert SPARSE.parameters == 30_532_122_624
    assert SPARSE.expert_parameters == experts
    assert SPARSE.active_parameters == SPARSE.parameters - experts * 120 // 128 == 3_353_032_704
    assert MODEL.active_parameters == MODEL.parameters
    # Every expert has its place in memory, and in a weight sync.
    assert SPARSE.kv_tokens(2) == int((2 * (80e9 * 0.9 - 4e9) - 2 * SPARSE.parameters) / (2 * 48 * 4 * 128 * 2))
    assert SPARSE.sync_bytes == SPARSE.weight_bytes == 2 * SPARSE.parameters
    assert SPARSE.load_seconds(4) == pytest.approx(2 * SPARSE.parameters / (4 * 25e9 * 0.8) + 0.5)


def read_dense() -> int:
    """Parameters outside the experts that a step reads: all but the input embedding."""
    return SPARSE.parameters - SPARSE.expert_parameters - 151_936 * 2048


@pytest.mark.parametrize("tokens", [1, 5, 16, 64])
def test_a_step_reads_as_many_experts_as_drawn_tokens_take(tokens):
    drawn = np.random.default_rng(0).random((500, tokens, 128)).argsort(axis=-1)[..., :8]
    counted = np.mean([len(np.unique(one)) for one in drawn])
    dense, rate = read_dense(), 2.039e12 * KNOWN.memory_share
    read = SPARSE.reading_seconds(1, tokens) * rate / 2 - dense
    assert 128 * read / SPARSE.expert_parameters == pytest.approx(counted, rel=0.01)


def test_a_decode_step_reads_only_the_experts_that_its_requests_take():
    dense, rate = read_dense(), 2.039e12 * KNOWN.memory_share
    one = 2 * (dense + SPARSE.expert_parameters * 8 / 128) / rate
    assert SPARSE.fixed_seconds(1, 1) == pytest.approx(one + SPARSE.overhead(1))
    everything = 2 * (dense + SPARSE.expert_parameters) / rate
    assert SPARSE.fixed_seconds(1, 512) == pytest.approx(everything + SPARSE.overhead(512))
    assert SPARSE.fixed_seconds(1, 1) < SPARSE.fixed_seconds(1, 8) < SPARSE.fixed_seconds(1, 64)


def test_arithmetic_counts_the_experts_of_a_token():
    multiplied = SPARSE.active_parameters - 151_936 * 2048
    assert SPARSE.token_seconds(2) == pytest.approx(2 * multiplied / (2 * 312e12 * KNOWN.rollout_flops_share))
    single = 6 * SPARSE.active_parameters * 1e6 / (24 * 312e12 * 0.4)
    assert SPARSE.train_seconds([1] * 10**6, 24) == pytest.approx(single, rel=1e-4)


def test_a_weight_sync_sends_the_adapter_or_the_merged_weights():
    shape = adapters.adapted(MODEL.shape, config_lib.LoraConfig(rank=8))
    alone = dataclasses.replace(MODEL, shape=shape)
    assert alone.sync_bytes == 2 * adapters.parameter_count(shape) < 0.02 * MODEL.sync_bytes
    assert alone.load_seconds(2) < MODEL.load_seconds(2)
    assert dataclasses.replace(alone, merged=True).sync_bytes == MODEL.sync_bytes
    assert alone.kv_tokens(2) == MODEL.kv_tokens(2)
