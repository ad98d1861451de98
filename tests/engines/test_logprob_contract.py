"""Which sampling settings the log-prob contract refuses."""

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.engines import logprob_contract


@pytest.mark.parametrize(
    ("rollout", "algorithm", "named"),
    [
        ({"top_p": 0.9}, {"correction": "truncated"}, ["rollout.top_p = 0.9", "algorithm.correction = 'truncated'"]),
        ({"top_k": 5}, {"correction": "masked"}, ["rollout.top_k = 5", "algorithm.correction = 'masked'"]),
        ({"top_p": 0.5, "top_k": 3}, {"loss": "gspo"}, ["top_p = 0.5", "top_k = 3", "algorithm.loss = 'gspo'"]),
    ],
)
def test_truncated_sampling_is_refused_with_the_fields_by_name(rollout, algorithm, named):
    with pytest.raises(protocols.ConfigError) as caught:
        logprob_contract.check(config_lib.RolloutConfig(**rollout), config_lib.AlgorithmConfig(**algorithm))
    assert all(name in str(caught.value) for name in named)


def test_temperature_alone_is_allowed():
    logprob_contract.check(
        config_lib.RolloutConfig(temperature=0.7), config_lib.AlgorithmConfig(correction="truncated")
    )
