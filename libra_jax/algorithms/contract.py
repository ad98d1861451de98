"""Checks a user's loss and advantage on a random batch before a run starts: each refusal names the broken property.

The properties are those that make a step independent of how its batch is split: into rows, micro-batches and devices.

Letters: B rows, T tokens, N trajectories.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import advantages, estimators, losses
from libra_jax.utils import resolving, user_code

Result = TypeVar("Result")

TOLERANCE = 1e-5
"""Largest difference, relative to the largest value, that counts as rounding."""

ARRAYS = [name for name in losses.LossInputs._fields if name.endswith("_BxT")]

LENGTH = 8
"""Tokens of each random trajectory."""


def check(config: config_lib.AlgorithmConfig) -> None:
    """Checks the arguments of the config's functions, and the properties of those that are a user's own.

    Raises:
      ConfigError: a function does not exist, does not take its arguments, raises an error, or breaks a property. The
        message names the function and the fault.
    """
    losses.find(config)
    estimators.find(config)
    if ":" in config.loss:
        check_loss(config)
    if ":" in config.advantage:
        check_advantage(config)
    if ":" in config.baseline:
        check_advantage(config, "algorithm.baseline")


def check_loss(config: config_lib.AlgorithmConfig) -> None:
    """Checks the config's loss, which takes no statistics. See `check`."""
    function, field = losses.find(config), "algorithm.loss"
    alone, together = _rows(config, packed=False), _rows(config, packed=True)

    def value_and_gradient(inputs: losses.LossInputs) -> tuple[np.ndarray, np.ndarray]:
        def total(log_probs_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
            # The ratio moves with the log-probabilities, as in the objective.
            moved_BxT = inputs.log_ratio_BxT + log_probs_BxT - jax.lax.stop_gradient(log_probs_BxT)
            token_loss = function(inputs._replace(log_probs_BxT=log_probs_BxT, log_ratio_BxT=moved_BxT))
            loss_BxT = jnp.where(inputs.mask_BxT, token_loss.loss_BxT, 0.0)
            return jnp.sum(loss_BxT), loss_BxT

        run = jax.jit(jax.value_and_grad(total, has_aux=True))
        (_, loss_BxT), gradient_BxT = _called(lambda: run(inputs.log_probs_BxT), config.loss, field)
        return np.asarray(loss_BxT), np.asarray(gradient_BxT)

    loss_BxT, gradient_BxT = value_and_gradient(alone)
    mask_BxT = np.asarray(alone.mask_BxT)
    _hold(np.isfinite(loss_BxT).all(), field, config.loss, "must be finite on every trained token")
    _hold(np.isfinite(gradient_BxT).all(), field, config.loss, "must have a finite gradient")
    _hold(bool(np.any(gradient_BxT)), field, config.loss, "must depend on inputs.log_probs_BxT or log_ratio_BxT")
    _hold(not np.any(gradient_BxT[~mask_BxT]), field, config.loss, "must not depend on untrained tokens")
    again, _ = value_and_gradient(alone)
    _hold(_equal(again, loss_BxT), field, config.loss, "must be a pure function: two calls gave different values")
    for row in range(len(loss_BxT)):
        part = alone._replace(**{name: getattr(alone, name)[row : row + 1] for name in ARRAYS})
        row_loss_BxT, row_gradient_BxT = value_and_gradient(part)
        _hold(
            _equal(row_loss_BxT[0], loss_BxT[row]) and _equal(row_gradient_BxT[0], gradient_BxT[row]),
            field,
            config.loss,
            "must give a row the same loss in every micro-batch, and compares rows: use sums within a trajectory only",
        )
    for values_BxT, wanted_BxT in zip(value_and_gradient(together), (loss_BxT, gradient_BxT), strict=True):
        _hold(
            _equal(values_BxT.reshape(-1, LENGTH), wanted_BxT[:, :LENGTH]),
            field,
            config.loss,
            "must give a trajectory the same loss in every row, and compares trajectories of a row: use "
            "inputs.segments_BxT",
        )


def _rows(config: config_lib.AlgorithmConfig, *, packed: bool) -> losses.LossInputs:
    """Returns four random trajectories, two in a row or one in a row with padding."""
    rng = np.random.default_rng(0)

    def laid(values_NxL: np.ndarray) -> jax.Array:
        if packed:
            return jnp.asarray(values_NxL.reshape(2, 2 * LENGTH))
        return jnp.asarray(np.pad(values_NxL, ((0, 0), (0, LENGTH))))

    def normal(scale: float) -> np.ndarray:
        return (rng.normal(size=(4, LENGTH)) * scale).astype(np.float32)

    mask_NxL = np.arange(LENGTH) >= np.array([[1], [3], [2], [4]])
    numbers_NxL = np.ones((4, LENGTH), np.int32)
    if packed:
        numbers_NxL[1::2] = 2
    return losses.LossInputs(
        log_probs_BxT=laid(np.where(mask_NxL, -np.abs(normal(1.0)) - 0.1, 0.0).astype(np.float32)),
        log_ratio_BxT=laid(np.where(mask_NxL, normal(0.1), 0.0)),
        advantages_BxT=laid(np.where(mask_NxL, normal(1.0), 0.0)),
        mask_BxT=laid(mask_NxL),
        segments_BxT=laid(numbers_NxL),
        max_segments=2,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )


def check_advantage(config: config_lib.AlgorithmConfig, field: str = "algorithm.advantage") -> None:
    """Checks the config's advantage, and blames the function of `field`: itself, or its baseline. See `check`."""
    rng, name = np.random.default_rng(0), getattr(config, field.rpartition(".")[2])
    rewards_N = rng.integers(0, 3, 12).astype(np.float32)
    groups_N = np.repeat(np.arange(3), 4)
    mask_NxT = np.arange(LENGTH) >= rng.integers(1, 5, (12, 1))

    def estimate(order: np.ndarray, columns: int = 0) -> np.ndarray:
        mask = np.pad(mask_NxT[order], ((0, 0), (0, columns)))
        rewards = rewards_N[order]
        inputs = advantages.AdvantageInputs(
            jnp.asarray(rewards),
            jnp.asarray(groups_N[order], jnp.int32),
            jnp.asarray(mask),
            advantages.spread_rewards(rewards, mask),
            jnp.zeros(mask.shape, jnp.float32),
        )
        return _called(lambda: np.asarray(estimators.find(config)(inputs)), name, field)

    order = np.arange(12)
    found_NxT = estimate(order)
    _hold(np.isfinite(found_NxT).all(), field, name, "must be finite on every trained token")
    _hold(_equal(estimate(order), found_NxT), field, name, "must be a pure function: two calls differed")
    shuffled = rng.permutation(12)
    _hold(
        _equal(estimate(shuffled), found_NxT[shuffled]),
        field,
        name,
        "must not depend on the order of trajectories in the batch",
    )
    _hold(
        _equal(estimate(order, columns=LENGTH)[:, :LENGTH], found_NxT),
        field,
        name,
        "must not depend on padding: use inputs.mask_NxT",
    )


def _called(call: Callable[[], Result], name: str, field: str) -> Result:
    """Returns the result of a call of the user's function, or says in a sentence what it raised."""
    try:
        with user_code.contain_exits():
            return call()
    except protocols.LibraError:
        raise
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise protocols.ConfigError(
            f"config.{field}: {name} uses the value of an array in Python, and the trainer compiles it: use jnp.where "
            "for conditions, and jax.numpy for numpy"
        ) from error
    except Exception as error:  # the user's own code
        raise protocols.ConfigError(f"config.{field}: {name} {resolving.raised(error)}") from error


def _hold(condition: bool, field: str, name: str, sentence: str) -> None:
    config_lib.check(bool(condition), field, f"{name} breaks the contract: it {sentence}")


def _equal(actual: np.ndarray, expected: np.ndarray) -> bool:
    return bool(
        np.allclose(actual, expected, rtol=0.0, atol=TOLERANCE * max(1.0, float(np.abs(expected).max(initial=0.0))))
    )
