"""A field's constraint is metadata: one checker refuses values by it, and help and docs read it."""

import dataclasses
import functools
import math

import pytest

from libra_jax import config as config_lib
from libra_jax.config import fields
from libra_jax.protocols import ConfigError
from libra_jax.simulator import settings


@pytest.mark.parametrize(
    ("constraint", "right", "wrong", "sentence"),
    [
        ({}, 1.0, math.inf, "must be a finite number, not inf"),
        ({"infinite": True}, math.inf, math.nan, "must be a number, not nan"),
        ({"gt": 0}, 1, 0, "must be positive, not 0"),
        ({"ge": 0, "hint": "0 is off"}, 0, -1, "must not be negative, not -1; 0 is off"),
        ({"ge": 1}, 1, 0, "must be at least 1, not 0"),
        ({"gt": 0, "le": 1}, 1.0, 0.0, "must lie in (0, 1], not 0.0"),
        ({"ge": 0, "lt": 1}, 0.0, 1.0, "must lie in [0, 1), not 1.0"),
        ({"choices": ("auto", "cuda")}, "auto", "gpu", "'gpu' is not one of auto, cuda; did you mean 'cuda'?"),
        ({"choices": (1, 2, 4)}, (1, 4), (1, 3), "3 is not one of 1, 2, 4"),
        ({"gt": 0}, (1, 2), (1, 0), "must be positive, not 0"),
        ({"nonempty": True}, "a", "", "must not be empty"),
        ({"unique": True}, ("a", "b"), ("a", "a"), "names 'a' twice"),
        ({"ascending": True}, (1, 2), (2, 1), "must ascend, not (2, 1)"),
        ({"own_function": True}, "a:b", "a", "must have the form \"package.module:function\", not 'a'"),
        (
            {"choices": ("mean",), "own_function": True},
            "a:b",
            "men",
            "'men' is not one of mean; did you mean 'mean'?; a function of your own has the form "
            '"package.module:function"',
        ),
    ],
)
def test_a_value_is_taken_or_refused_by_field_value_and_fix(constraint, right, wrong, sentence):
    fields.check_value(right, constraint, "group.name")
    with pytest.raises(ConfigError) as refused:
        fields.check_value(wrong, constraint, "group.name")
    assert str(refused.value) == f"config.group.name: {sentence}"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("algorithm.correction_cap", 3.0, "3 has no effect with algorithm.correction=none; leave it at 2, or set "),
        ("model.lora.path", "a", 'a has no effect with model.lora.rank=0; leave it at "", or set model.lora.rank'),
    ],
)
def test_a_setting_that_nothing_reads_is_refused_with_its_partner(name, value, sentence):
    run = config_lib.RunConfig()
    *groups, leaf = name.split(".")
    setattr(functools.reduce(getattr, groups, run), leaf, value)
    with pytest.raises(ConfigError, match=rf"^config\.{name}: {sentence}"):
        config_lib.checked(run)


@pytest.mark.parametrize("run", [config_lib.RunConfig(), settings.SimulatedRun()])
def test_each_partner_exists_and_can_have_the_values_that_are_named(run):
    def walk(group, prefix=""):
        for item in dataclasses.fields(group):
            value = getattr(group, item.name)
            if dataclasses.is_dataclass(value):
                yield from walk(value, f"{prefix}{item.name}.")
            elif "needs" in item.metadata:
                yield prefix, item.metadata["needs"]

    found = list(walk(run))
    assert len(found) > 20
    for prefix, (partner, *values) in found:
        *groups, leaf = (partner if "." in partner else prefix + partner).split(".")
        group = functools.reduce(getattr, groups, run)
        assert hasattr(group, leaf), partner
        for value in values:
            setattr(group, leaf, value)
            fields.check_fields(group, "")
