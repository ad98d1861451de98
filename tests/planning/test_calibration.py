"""Costs read off hand-made streams and numbers; a whole run's are in tests/simulator/test_twin.py."""

import numpy as np
import pytest

from libra_jax import protocols
from libra_jax.models import rows
from libra_jax.planning.costs import calibration, measured_costs

ENGINE = measured_costs.EngineCosts(4e-3, 50e-6, 0.1e-6, 20e-6, 10e-6, 300e-6)
MODEL = measured_costs.Calibration(
    {1: ENGINE},
    train=measured_costs.TrainCosts(0.2, 40e-6),
    update=measured_costs.UpdateCosts(0.03, 0.05),
    rows=rows.RowShape((8,), 2),
)


def lonely(count: int, seed: int = 0) -> list[calibration.RequestStay]:
    """Streams that never meet, on an engine that costs what `ENGINE` says."""
    rng, at, made = np.random.default_rng(seed), 0.0, []
    for _ in range(count):
        tokens, new, cached = (int(rng.integers(1, high)) for high in (200, 2000, 4000))
        context = new + cached + tokens / 2
        seconds = tokens * (ENGINE.step + ENGINE.request + ENGINE.context * context)
        seconds += ENGINE.prefill_token * new + ENGINE.cached_token * cached + ENGINE.prefill_request
        made.append(calibration.RequestStay("rollout-0", at, at + seconds, tokens, new, cached, True))
        at += seconds + rng.uniform(0.5, 1.0)
    return made


def test_what_streams_cost_alone_is_found_again():
    fitted = calibration.fit_engine([lonely(400), [], lonely(100, seed=1)])
    # Alone, a step and its one request, and a prefilled request and the wait, cannot be told apart.
    assert fitted.step + fitted.request == pytest.approx(ENGINE.step + ENGINE.request, rel=0.01)
    assert fitted.context == pytest.approx(ENGINE.context, rel=0.02)
    assert fitted.prefill_token == pytest.approx(ENGINE.prefill_token, rel=0.02)
    assert fitted.cached_token == pytest.approx(ENGINE.cached_token, rel=0.02)
    assert fitted.prefill_request + fitted.wait == pytest.approx(ENGINE.prefill_request, rel=0.2)


def test_too_few_streams_are_a_sentence():
    for instances in ([], [[]], [lonely(calibration.LEAST_STREAMS - 1)]):
        with pytest.raises(protocols.DataError, match=r"streams of tokens are too few .* at least 20"):
            calibration.fit_engine(instances)
    unknown = [calibration.RequestStay("rollout-0", at, at + 1.0, 5) for at in range(50)]
    with pytest.raises(protocols.DataError, match=r"^0 streams"):
        calibration.fit_engine([unknown])


def test_train_and_update_costs():
    columns = [8192 * count for count in (3, 5, 4, 6, 3, 5, 4, 6)]
    seconds = [0.2 + 40e-6 * count for count in columns]
    seconds[2] += 5.0  # a program was compiled
    fitted = calibration.fit_train(columns, seconds)
    assert (fitted.step, fitted.column) == pytest.approx((0.2, 40e-6), rel=1e-2)
    assert calibration.fit_update([0.08, 0.09, 4.0], [0.05, 0.05, 3.0]) == measured_costs.UpdateCosts(
        pytest.approx(0.04), 0.05
    )
    assert calibration.fit_update([0.08], []) == measured_costs.UpdateCosts(0.0, 0.08)


def test_a_calibration_answers_what_simulated_machines_ask():
    assert MODEL.step_seconds(1, 10, 1000) == pytest.approx(4e-3 + 500e-6 + 100e-6)
    assert MODEL.fixed_seconds(1, 10, 100) - MODEL.fixed_seconds(1, 10) == pytest.approx(2e-3)
    assert MODEL.prefill_seconds(1, 4096, 100) == pytest.approx(2 * 4e-3 + 4096 * 20e-6 + 300e-6 + 1e-3)
    assert MODEL.transfer_seconds(1, 500) == MODEL.prefill_seconds(1, 500)
    assert MODEL.train_seconds([9, 9, 9], 4) == pytest.approx(0.2 + 40e-6 * 32)
    assert MODEL.gather_seconds(4) + MODEL.load_seconds(1) == pytest.approx(0.08)
    assert MODEL.scaled({1: 2.0}).step_seconds(1, 3, 7) == pytest.approx(2 * MODEL.step_seconds(1, 3, 7))
    with pytest.raises(protocols.ConfigError, match="no instance of degree 4 was measured, only of 1"):
        MODEL.context_seconds(4)
