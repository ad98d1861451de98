"""What serving costs by the coefficients of a config."""

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import costs

NARROW, WIDE = protocols.Instance("narrow", 1, 8), protocols.Instance("wide", 4, 8)
COEFFICIENTS = config_lib.CostConfig(
    step_seconds=0.5,
    request_seconds=0.1,
    context_seconds=0.001,
    scaling=0.5,
    prefill_tokens_per_second=100.0,
)


def test_a_decode_step_has_a_fixed_part_and_a_part_for_each_request_and_its_context():
    step = 0.5 + 2 * 0.1 + 3 * (40 + 10 / 2) * 0.001
    assert costs.LinearCosts(COEFFICIENTS).decode_seconds(NARROW, 3, 40, 10) == pytest.approx(10 * step)


def test_a_wider_instance_is_faster_by_the_scaled_share_of_its_further_devices():
    made = costs.LinearCosts(COEFFICIENTS)
    narrow, wide = (made.decode_seconds(instance, 3, 40, 10) for instance in (NARROW, WIDE))
    assert narrow / wide == pytest.approx(1 + 3 * 0.5)


def test_a_move_prefills_the_context_again():
    made = costs.LinearCosts(COEFFICIENTS)
    assert made.move_seconds("other", NARROW, 1000) == pytest.approx(10)
    assert made.move_seconds("other", WIDE, 1000) == pytest.approx(4), "its prefill is faster"


@pytest.mark.parametrize("source", [None, "narrow"])
def test_what_is_there_or_nowhere_does_not_move(source):
    assert costs.LinearCosts(COEFFICIENTS).move_seconds(source, NARROW, 1000) == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("step_seconds", 0), ("request_seconds", -1), ("scaling", 1.5), ("prefill_tokens_per_second", 0)],
)
def test_coefficients_out_of_range_are_refused_by_field(field, value):
    with pytest.raises(protocols.ConfigError, match=rf"config\.scheduler\.costs\.{field}: "):
        config_lib.parse(config_lib.RunConfig, {"scheduler": {"costs": {field: value}}})


@pytest.mark.parametrize(
    ("slots", "problem"), [((8,), "has 1 entries for the 2 instances"), ((8, 0), "must be positive")]
)
def test_slots_that_do_not_fit_the_instances_are_refused_by_field(slots, problem):
    with pytest.raises(protocols.ConfigError, match=rf"config\.rollout\.slots_by_instance: {problem}"):
        config_lib.RolloutConfig(tensor_parallel=(1, 2), slots_by_instance=slots)


def test_without_slots_of_their_own_all_instances_have_the_same():
    assert config_lib.RolloutConfig(tensor_parallel=(1, 2), slots=7).instance_slots == (7, 7)
    assert config_lib.RolloutConfig(tensor_parallel=(1, 2), slots_by_instance=(7, 3)).instance_slots == (7, 3)
