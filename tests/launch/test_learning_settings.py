"""Settings that cannot do what they say, or that spoil learning, are refused or warned of by name."""

from __future__ import annotations

import pytest

from libra_jax import config, protocols


@pytest.mark.parametrize(("name", "value"), [("clip_low", 0.1), ("clip_high", 0.28), ("dual_clip", 3.0)])
def test_clips_that_cannot_bind_are_refused(name, value):
    algorithm = config.AlgorithmConfig(objective="decoupled", **{name: value})
    with pytest.raises(protocols.ConfigError, match=rf"config\.algorithm\.{name}: {value} never binds .* leave it at"):
        config.RunConfig(algorithm=algorithm)
    config.RunConfig(algorithm=config.AlgorithmConfig(**{name: value}))


def test_the_decoupled_objective_takes_default_clips():
    run = config.RunConfig(algorithm=config.AlgorithmConfig(objective="decoupled", correction="truncated"))
    assert run.algorithm.clip_high == config.AlgorithmConfig().clip_high
