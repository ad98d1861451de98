"""The bound: below every run, tight where it can be, and made of inequalities that hold one by one."""

import dataclasses

import numpy as np
import pytest
import simulator_doubles as doubles
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.simulator import bound, scripts


@dataclasses.dataclass(frozen=True)
class OneAttempt:
    """Every attempt is the same."""

    attempt: scripts.Script

    def script(self, task_index, sample):
        return self.attempt


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1_000),
    policy=st.sampled_from(config_lib.POLICIES),
    degrees=st.lists(st.sampled_from((1, 2, 4)), min_size=1, max_size=3),
    slots=st.integers(1, 4),
    eta=st.integers(0, 3),
    steps=st.integers(1, 4),
)
@example(seed=0, policy="oracle", degrees=[1], slots=4, eta=0, steps=3)
def test_no_run_is_faster_than_its_bound(seed, policy, degrees, slots, eta, steps):
    config = doubles.run_config(
        steps=steps,
        rollout={"tensor_parallel": tuple(degrees), "slots": slots},
        coordinator={"groups_per_step": 2, "group_size": 2, "max_staleness": eta},
        scheduler={"policy": policy, "max_remaining_tokens": ()},
    )
    least = bound.lower_bound(config, doubles.SIMULATION, doubles.SeededWorkload(seed))
    result = doubles.simulate(config, seed)
    assert result.step_summary()["mean"] >= least.step_seconds * (1 - 1e-9)


@pytest.mark.parametrize("eta", [0, 1])
def test_the_bound_is_tight_where_one_attempt_has_the_machines_to_itself(eta):
    """One slot's worth of work: nothing but the path, training, and the weights' way, which the bound leaves out."""
    attempt = scripts.Script(200, (protocols.Turn(500, "look", "success", 300, 40.0), protocols.Turn(900)))
    config = doubles.run_config(
        steps=6,
        rollout={"tensor_parallel": (2,), "slots": 1},
        scheduler={"max_remaining_tokens": ()},
        coordinator={"groups_per_step": 1, "group_size": 1, "max_staleness": eta},
    )
    least = bound.lower_bound(config, doubles.SIMULATION, OneAttempt(attempt))
    healthy = doubles.simulate_workload(config, OneAttempt(attempt))
    assert least.step_seconds <= healthy.step_summary()["mean"] <= 1.1 * least.step_seconds * (1 + eta)
    assert least.path_seconds > 40.0


@pytest.mark.parametrize("preset", ["Qwen3-0.6B", "Qwen3-30B-A3B"])
@given(
    degree=st.sampled_from((1, 2, 4, 8)),
    slots=st.integers(1, 128),
    filled=st.floats(0.0, 1.0),
    prefill=st.integers(0, 4096),
    context=st.floats(0.0, 1.0),
    theta=st.floats(0.0, 1.0),
    phi=st.floats(0.0, 1.0),
)
def test_shares_never_add_up_to_more_than_the_step_they_share(
    preset, degree, slots, filled, prefill, context, theta, phi
):
    model = dataclasses.replace(doubles.model(), shape=model_config.load_preset(preset))
    decode, new, each = bound.token_shares(model, degree, slots, theta, phi)
    decoding, tokens = max(1, round(filled * slots)), context * model.kv_tokens(degree)
    step = model.fixed_seconds(degree, decoding, prefill) + model.context_seconds(degree) * tokens
    assert decoding * decode + prefill * new + tokens * each <= degree * step * (1 + 1e-9)


def groups(work, train, path):
    return bound.GroupSeconds(*(np.array(values, dtype=float) for values in (work, train, path)))


def test_synchronous_steps_add_rollout_and_training():
    made = groups(work=[1, 1, 9, 9], train=[2, 2, 2, 2], path=[5, 4, 3, 3])
    assert bound.run_seconds(made, 2, 0) == (5 + 4) + (18 + 4)


def test_an_asynchronous_run_hides_rollout_behind_training_or_the_reverse():
    trained = groups(work=[1] * 8, train=[10] * 8, path=[1] * 8)
    assert bound.run_seconds(trained, 1, 1) == pytest.approx(1 + 80)
    rolled = groups(work=[10] * 8, train=[1] * 8, path=[10] * 8)
    assert bound.run_seconds(rolled, 1, 1) == pytest.approx(80 + 1)


def test_long_paths_are_spread_over_the_staleness_bound():
    paths = groups(work=[0] * 30, train=[0] * 30, path=[60] * 30)
    assert [bound.run_seconds(paths, 1, eta) for eta in (0, 1, 2)] == [1800, 900, 600]


def test_a_policy_may_choose_who_trains_first():
    """One long group among the first two: at eta 1 it need not hold the first step up."""
    made = groups(work=[0] * 4, train=[1] * 4, path=[100, 1, 1, 1])
    assert bound.run_seconds(made, 1, 1) == 100 + 3
