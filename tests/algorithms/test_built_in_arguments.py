"""The config's table of arguments names those of the functions, takes their defaults, and refuses the rest."""

import inspect

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import baselines, batch_statistics, estimators, losses
from libra_jax.config import arguments

GIVEN = {"inputs", "tokens", "rng", "clip_low", "clip_high"}
FUNCTIONS = [
    *estimators._BUILT_IN.items(),
    *baselines._BUILT_IN.items(),
    *losses._BUILT_IN.items(),
    *((name, getattr(batch_statistics, name)) for name in config_lib.BATCH_LOSSES),
]


def test_the_table_has_the_arguments_of_every_function_and_takes_their_defaults():
    found = {}
    for name, function in FUNCTIONS:
        taken = inspect.signature(function).parameters.values()
        found.setdefault(name, {}).update({one.name: one.default for one in taken if one.name not in GIVEN})
    assert {name: set(defaults) for name, defaults in found.items() if defaults} == {
        name: set(known) for name, known in arguments.ARGUMENTS.items() if name not in config_lib.POLICIES
    }
    for name, defaults in found.items():
        arguments.check_arguments(name, defaults, "field")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"baseline": "minimum_variance", "baseline_arguments": {"caps": 8}}, "no argument 'caps'; did you mean 'cap'"),
        (
            {"baseline": "minimum_variance", "baseline_arguments": {"cap": -1}},
            "cap: must not be negative, not -1",
        ),
        ({"baseline": "minimum_variance", "baseline_arguments": {"cap": "8"}}, "cap: must be of type float, not '8'"),
        ({"advantage": "egae", "advantage_arguments": {"trace_decay": 2}}, r"trace_decay: must lie in \[0, 1\], not 2"),
        (
            {"advantage": "egae", "advantage_arguments": {"ignored_tokens": 8.5}},
            "ignored_tokens: must be of type int, not 8.5",
        ),
        ({"advantage": "egae", "advantage_arguments": {"whitened": "no"}}, "whitened: must be of type bool, not 'no'"),
        ({"loss": "gspo", "loss_arguments": {"x": 1}}, "gspo takes no argument 'x'; it takes none"),
        ({"loss": "sapo", "loss_arguments": {"tau_negative": 0}}, "tau_negative: must be positive, not 0"),
    ],
)
def test_arguments_that_a_built_in_function_does_not_take_are_refused_by_the_config(settings, sentence):
    with pytest.raises(protocols.ConfigError, match=rf"algorithm\.\w+_arguments.*{sentence}"):
        config_lib.AlgorithmConfig(**settings)
