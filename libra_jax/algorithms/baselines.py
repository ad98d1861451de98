"""Baselines of advantages that compare a group: what is subtracted from a reward instead of the group's mean.

Letters: N trajectories.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import advantages, checks, corrections
from libra_jax.utils import resolving

Relative = Callable[[advantages.AdvantageInputs], jax.Array]
"""Returns the rewards less their baseline, [N]."""


def minimum_variance(
    inputs: advantages.AdvantageInputs, *, weighted: bool = True, cap: float = 0.0, by_length: bool = False
) -> jax.Array:
    """Computes R_i - b with VCPO's baseline b = Σ W_i R_i / Σ W_i over i's group, where W_i = (w_i |s_i|)².

    s_i is the trajectory's score ∇ log π(y_i), and w_i its importance weight π(y_i) / π_b(y_i). b minimises the sum of
    the squared norms of the gradients w_i s_i (R_i - b), hence the variance of their mean but for its square.

    Args:
      inputs: the batch, with `score_norms_N` and `log_weights_N`.
      weighted: W_i takes w_i; else W_i = |s_i|², the baseline of least variance for fresh rollouts.
      cap: largest w_i; 0 is no cap.
      by_length: divide W_i by the squared number of trained tokens: the gradient of a mean over tokens.

    Returns:
      R_i - b of shape [N]; a group of one keeps its reward. A group whose weights are all 0, or not finite, takes its
      plain mean.

    Raises:
      ConfigError: there are no norms.

    References:
      Huang et al. (VCPO), arXiv 2602.17616; the authors' `compute_opob_baseline`.
    """
    if inputs.score_norms_N is None or inputs.log_weights_N is None:
        raise protocols.ConfigError("config.algorithm.baseline: minimum_variance needs score_norms_N and log_weights_N")
    weights_N = jnp.square(inputs.score_norms_N)
    if weighted:
        ratio_N = corrections.bounded_ratio(inputs.log_weights_N)
        weights_N *= jnp.square(jnp.minimum(ratio_N, cap) if cap else ratio_N)
    if by_length:
        weights_N /= jnp.square(jnp.maximum(jnp.sum(inputs.mask_NxT, axis=1), 1))
    return advantages.centred(inputs.rewards_N, inputs.groups_N, weights_N)[0]


_BUILT_IN: dict[str, Callable[..., jax.Array]] = {
    "leave_one_out": lambda inputs: advantages.rloo(inputs.rewards_N, inputs.groups_N),
    "length": lambda inputs: advantages.opo(inputs.rewards_N, inputs.groups_N, inputs.mask_NxT),
    "minimum_variance": minimum_variance,
}


def find(config: config_lib.AlgorithmConfig) -> Relative | None:
    """Returns the config's baseline with its arguments; None for the mean, which advantages subtract themselves.

    A user's function `baseline(inputs, **arguments)` returns one number a trajectory, [N]. A group of one keeps its
    reward: it has no comparison.

    Raises:
      ConfigError: there is no such function, or it does not take `baseline_arguments`.
    """
    name, field = config.baseline, "algorithm.baseline"
    if name == "mean":
        return None
    arguments = dict(config.baseline_arguments)
    function = resolving.resolve(name, field) if ":" in name else _BUILT_IN[name]
    resolving.check_arguments(function, name, {"inputs": None, **arguments}, f"{field}_arguments")
    if ":" not in name:
        return functools.partial(function, **arguments)

    def relative(inputs: advantages.AdvantageInputs) -> jax.Array:
        baseline_N = checks.floats(function(inputs=inputs, **arguments), "the baseline")
        if baseline_N.shape != inputs.rewards_N.shape:
            raise protocols.ConfigError(
                f"config.{field}: {name} must return one number a trajectory, [N] = {list(inputs.rewards_N.shape)}, "
                f"not an array of shape {list(baseline_N.shape)}"
            )
        _, size_N, _ = advantages.centred(inputs.rewards_N, inputs.groups_N)
        difference_N = inputs.rewards_N - baseline_N
        # A mean that the function computed has rounding errors, and whitening would blow them up.
        rounds_N = jnp.abs(difference_N) <= protocols.REWARD_ROUNDING * jnp.abs(inputs.rewards_N)
        return jnp.where(size_N > 1, jnp.where(rounds_N, 0.0, difference_N), inputs.rewards_N)

    return relative
