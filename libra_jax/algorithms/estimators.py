"""The advantages of a training batch: the config's estimator, built in or a user's own, on host arrays.

Letters: N trajectories, T tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import advantages, baselines, checks, truncated
from libra_jax.utils import resolving

# Compiled: its dozen operations, run one by one, take a tenth of the host's part of a small step.
_spread_rewards = jax.jit(advantages.spread_rewards)


class Scores(NamedTuple):
    """The scores of a batch's trajectories under the policy, float32 [N] each.

    Attributes:
      norms_N: norms of the gradients of the trajectories' log-probabilities (`AdvantageInputs.score_norms_N`).
      log_weights_N: logarithms of the trajectories' importance weights.
    """

    norms_N: np.ndarray
    log_weights_N: np.ndarray


def compute(
    config: config_lib.AlgorithmConfig,
    *,
    rewards_N: np.ndarray,
    groups_N: np.ndarray,
    mask_NxT: np.ndarray,
    kl_NxT: np.ndarray | None = None,
    values_NxT: np.ndarray | None = None,
    truncated_N: np.ndarray | None = None,
    scores: Scores | None = None,
    own_rewards_NxT: np.ndarray | None = None,
) -> np.ndarray:
    """Computes the advantages of a whole training batch with the config's estimator: host arrays in, host arrays out.

    Call it once per step on the unpacked batch, because groups and whitening need the whole batch. T is rounded up to a
    power of two inside, so that batches of all lengths share a few compiled programs.

    Args:
      config: `advantage` names the estimator. With `kl_in_reward`, the rewards are reduced by `kl_coefficient` times
        `kl_NxT`: token by token for `reinforce_plus_plus`, summed per trajectory for the others.
      rewards_N: one finite reward per trajectory.
      groups_N: integer id of each trajectory's group.
      mask_NxT: true (non-zero) on trained tokens.
      kl_NxT: estimate of KL(π ‖ π_ref) per token (`kl.estimate`); required with `kl_in_reward` and a coefficient.
      values_NxT: the critic's value before each token; required by `gae` and `egae`.
      truncated_N: true for trajectories without an outcome; their rewards are not looked at.
      scores: required by `algorithm.baseline=minimum_variance`.
      own_rewards_NxT: reward of each token's segment less the trajectory's. Such a token has the advantage that the
        trajectory would have with that reward, less the same baseline and over the same scale.

    Returns:
      Advantages of shape [N, T], float32, zero on untrained tokens.

    Raises:
      ConfigError: `kl_in_reward` without `kl_NxT`.
      LibraError: shapes or dtypes do not match, or a reward is not finite.

    Example:
      >>> import numpy as np
      >>> from libra_jax import config as config_lib
      >>> algorithm = config_lib.AlgorithmConfig(advantage="rloo")
      >>> compute(algorithm, rewards_N=np.array([1.0, 0.0]), groups_N=np.array([0, 0]), mask_NxT=np.ones((2, 2)))
      array([[ 1.,  1.],
             [-1., -1.]], dtype=float32)
    """
    inputs = _inputs(config, rewards_N, groups_N, mask_NxT, kl_NxT, values_NxT, truncated_N)
    if scores is not None:
        inputs = inputs._replace(
            score_norms_N=jnp.asarray(scores.norms_N), log_weights_N=jnp.asarray(scores.log_weights_N)
        )
    found_NxT = np.asarray(find(config)(inputs))[:, : np.shape(mask_NxT)[1]]
    if own_rewards_NxT is None:
        return found_NxT
    # Advantages that compare a group are linear in the trajectory's own reward, once baseline and scale are fixed.
    scale_N = np.ones(len(found_NxT), np.float32)
    if config.advantage == "grpo":
        scale_N = np.asarray(advantages.grpo_scale(inputs.rewards_N, inputs.groups_N))
    return found_NxT + np.where(np.asarray(mask_NxT) != 0, own_rewards_NxT / scale_N[:, None], 0.0).astype(np.float32)


def value_targets(
    config: config_lib.AlgorithmConfig,
    *,
    rewards_N: np.ndarray,
    mask_NxT: np.ndarray,
    values_NxT: np.ndarray,
    kl_NxT: np.ndarray | None = None,
) -> np.ndarray:
    """Computes the returns that a critic learns, by `gae` with `algorithm.advantage_arguments`. See `compute`.

    With `egae` they are the discounted rewards themselves (λ = 1). With an advantage of the user's own they are not
    discounted, either.
    """
    inputs = _inputs(config, rewards_N, np.arange(len(rewards_N)), mask_NxT, kl_NxT, values_NxT)
    argument_names = {"gae": ("discount", "turn_discount", "trace_decay"), "egae": ("discount", "turn_discount")}
    arguments = {n: v for n, v in config.advantage_arguments.items() if n in argument_names.get(config.advantage, ())}
    assert inputs.values_NxT is not None
    _, returns_NxT = advantages.gae(inputs.token_rewards_NxT, inputs.values_NxT, inputs.mask_NxT, **arguments)
    return np.asarray(returns_NxT)[:, : np.shape(mask_NxT)[1]]


def _inputs(
    config: config_lib.AlgorithmConfig,
    rewards_N: np.ndarray,
    groups_N: np.ndarray,
    mask_NxT: np.ndarray,
    kl_NxT: np.ndarray | None,
    values_NxT: np.ndarray | None,
    truncated_N: np.ndarray | None = None,
) -> advantages.AdvantageInputs:
    """Checks the arrays of a batch and lays them out for an estimator. T is rounded up to a power of two."""
    rewards_N, groups_N, mask_NxT = np.array(rewards_N, np.float64), np.asarray(groups_N), np.asarray(mask_NxT) != 0
    checks.rank(2, mask_NxT=mask_NxT)
    checks.same_shape(rewards_N=rewards_N, groups_N=groups_N)
    checks.same_shape(rewards_N=rewards_N, mask_N=mask_NxT[:, 0])
    checks.same_shape(mask_NxT=mask_NxT, kl_NxT=kl_NxT, values_NxT=values_NxT)
    if not np.all(finite_N := np.isfinite(rewards_N.astype(np.float32))):
        index = int(np.flatnonzero(~finite_N)[0])
        raise protocols.LibraError(f"rewards_N[{index}] is {rewards_N[index]}: every reward must be finite")
    if truncated_N is not None:
        checks.same_shape(rewards_N=rewards_N, truncated_N=truncated_N)
        rewards_N = np.where(truncated_N, 0.0, rewards_N)
    penalties_NxT = np.zeros(mask_NxT.shape, np.float32)
    if config.kl_in_reward and config.kl_coefficient > 0:
        if kl_NxT is None:
            raise protocols.ConfigError("config.algorithm.kl_in_reward: needs kl_NxT, the KL estimate of each token")
        # Selected, not multiplied: the estimates at untrained tokens may be NaN.
        penalties_NxT = np.where(mask_NxT, config.kl_coefficient * np.asarray(kl_NxT, np.float32), 0.0)
    tokens = mask_NxT.shape[1]
    # Padded columns are masked out, so they change no advantage.
    padding = ((0, 0), (0, (1 << (tokens - 1).bit_length()) - tokens))
    # Small int32 numbers: JAX has no int64 by default, and group ids may be any integers.
    group_index_N = np.unique(groups_N, return_inverse=True)[1].astype(np.int32)
    in_order = np.argsort(group_index_N, kind="stable")
    for members in np.split(in_order, np.flatnonzero(np.diff(group_index_N[in_order])) + 1):
        # 0.1 + 0.2 and 0.3 are one reward, for every estimator.
        if len(members) > 1 and protocols.equal_rewards(rewards_N[members].tolist()):
            rewards_N[members] = rewards_N[members[0]]
    outcomes_N = rewards_N.astype(np.float32)
    mask_NxT, penalties_NxT = np.pad(mask_NxT, padding), np.pad(penalties_NxT, padding)
    if values_NxT is not None:
        # Selected, not multiplied: values at untrained tokens may be NaN.
        values_NxT = np.pad(np.where(mask_NxT[:, :tokens], values_NxT, 0.0), padding).astype(np.float32)
    return advantages.AdvantageInputs(
        # A trajectory pays for all of its tokens at once if whole trajectories are compared.
        rewards_N=jnp.asarray((rewards_N - penalties_NxT.sum(axis=1, dtype=np.float64)).astype(np.float32)),
        groups_N=jnp.asarray(group_index_N),
        mask_NxT=jnp.asarray(mask_NxT),
        token_rewards_NxT=_spread_rewards(outcomes_N, mask_NxT, penalties_NxT),
        penalties_NxT=jnp.asarray(penalties_NxT),
        values_NxT=None if values_NxT is None else jnp.asarray(values_NxT),
        truncated_N=None if truncated_N is None else jnp.asarray(truncated_N, bool),
        outcomes_N=jnp.asarray(outcomes_N),
    )


def _distillation(inputs: advantages.AdvantageInputs, *, reward_weight: float = 0.0) -> jax.Array:
    """Computes A_t = -penalty_t, and adds `reward_weight` times GRPO's advantage of the reward alone.

    The penalty is the coefficient times log π - log π_teacher of the sampled token: the reverse KL to the teacher,
    token by token and without a sum over later tokens (Lu and Thinking Machines, On-Policy Distillation, 2025).
    """
    if not reward_weight:
        return -inputs.penalties_NxT
    # Not the rewards less penalties plus penalties: of equal rewards, rounding would make different ones.
    rewards_N = inputs.rewards_N if inputs.outcomes_N is None else inputs.outcomes_N
    return reward_weight * advantages.grpo(rewards_N, inputs.groups_N)[:, None] - inputs.penalties_NxT


def _gae(
    inputs: advantages.AdvantageInputs,
    *,
    discount: float = 1.0,
    turn_discount: float | None = None,
    trace_decay: float = 1.0,
    whitened: bool = True,
) -> jax.Array:
    if inputs.values_NxT is None:
        raise protocols.ConfigError("config.algorithm.advantage: gae needs values_NxT, the values of a critic")
    found_NxT, _ = advantages.gae(
        inputs.token_rewards_NxT,
        inputs.values_NxT,
        inputs.mask_NxT,
        discount=discount,
        trace_decay=trace_decay,
        turn_discount=turn_discount,
    )
    return advantages.whiten(found_NxT, inputs.mask_NxT) if whitened else found_NxT


_BUILT_IN: dict[str, Callable[..., jax.Array]] = {
    "grpo": lambda inputs: advantages.grpo(inputs.rewards_N, inputs.groups_N, relative_N=inputs.relative_N),
    "dr_grpo": lambda inputs: (
        advantages.dr_grpo(inputs.rewards_N, inputs.groups_N) if inputs.relative_N is None else inputs.relative_N
    ),
    "rloo": lambda inputs: advantages.rloo(inputs.rewards_N, inputs.groups_N),
    "opo": lambda inputs: advantages.opo(inputs.rewards_N, inputs.groups_N, inputs.mask_NxT),
    "reinforce_plus_plus": lambda inputs: advantages.reinforce_plus_plus(inputs.token_rewards_NxT, inputs.mask_NxT),
    "reinforce_plus_plus_baseline": lambda inputs: advantages.reinforce_plus_plus_baseline(
        inputs.rewards_N, inputs.groups_N, inputs.mask_NxT, relative_N=inputs.relative_N
    ),
    "distillation": _distillation,
    "gae": _gae,
    "egae": truncated.egae,
}


def find(config: config_lib.AlgorithmConfig) -> Callable[[advantages.AdvantageInputs], jax.Array]:
    """Returns the config's estimator with its arguments: a built-in one, or a user's `advantage(inputs, **arguments)`.

    The result has the shape [N, T]. A user's function may return [N].

    Raises:
      ConfigError: there is no such function, or it does not take `advantage_arguments`; or the same of the baseline.
    """
    encoded = []
    for name in ("advantage", "baseline"):
        try:
            encoded.append(json.dumps(dict(getattr(config, f"{name}_arguments")), sort_keys=True))
        except TypeError as error:
            raise protocols.ConfigError(
                f"config.algorithm.{name}_arguments: must be numbers, texts, lists or mappings ({error})"
            ) from error
    return _found(config.advantage, config.baseline, *encoded)


@functools.lru_cache(maxsize=64)  # one compiled program for each estimator, not one a call
def _found(
    name: str, baseline: str, encoded: str, encoded_baseline: str
) -> Callable[[advantages.AdvantageInputs], jax.Array]:
    arguments, of_baseline = json.loads(encoded), json.loads(encoded_baseline)
    relative = baselines.find(
        config_lib.AlgorithmConfig(advantage=name, baseline=baseline, baseline_arguments=of_baseline)
    )
    function = resolving.resolve(name, "algorithm.advantage") if ":" in name else _BUILT_IN[name]
    resolving.check_arguments(function, name, {"inputs": None, **arguments}, "algorithm.advantage_arguments")

    def estimate(inputs: advantages.AdvantageInputs) -> jax.Array:
        if relative is not None:
            inputs = inputs._replace(relative_N=relative(inputs))
        result = checks.floats(function(inputs=inputs, **arguments), "the advantages")
        count, tokens = inputs.mask_NxT.shape
        if result.shape not in ((count,), (count, tokens)):
            raise protocols.ConfigError(
                f"config.algorithm.advantage: {name} must return one advantage a trajectory, [N] = [{count}], or a "
                f"token, [N, T] = [{count}, {tokens}], not an array of shape {list(result.shape)}"
            )
        return jnp.where(inputs.mask_NxT, result if result.ndim == 2 else result[:, None], 0.0)

    return jax.jit(estimate)
