"""Matrix products of float32 are float32 where an accelerator would round their inputs."""

import jax
import pytest

from libra_jax.training import losses


@pytest.fixture
def setting():
    """JAX's own setting, given back in the end."""
    before = jax.config.jax_default_matmul_precision
    yield lambda: jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", before)


@pytest.mark.parametrize(
    ("platform", "dtype", "wanted"),
    [("gpu", "float32", "highest"), ("tpu", "float32", "highest"), ("gpu", "bfloat16", None), ("cpu", "float32", None)],
)
def test_float32_products_are_float32_on_accelerators(setting, platform, dtype, wanted):
    jax.config.update("jax_default_matmul_precision", None)
    losses.keep_float32(platform, dtype)
    assert setting() == wanted


def test_a_precision_that_the_user_chose_stays(setting):
    jax.config.update("jax_default_matmul_precision", "tensorfloat32")
    losses.keep_float32("gpu", "float32")
    assert setting() == "tensorfloat32"


def test_every_learner_asks_for_it(small, monkeypatch):
    asked = []
    monkeypatch.setattr(losses, "keep_float32", lambda *given: asked.append(given))
    small.learner(small.config())
    assert asked == [("cpu", "float32")]
