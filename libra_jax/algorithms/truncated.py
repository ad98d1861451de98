"""Advantages of rollouts that a limit cut off, from a critic: T-PPO's extended generalised advantage estimation.

Letters: N trajectories, T tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from libra_jax import protocols
from libra_jax.algorithms import advantages


def egae(
    inputs: advantages.AdvantageInputs,
    *,
    discount: float = 1.0,
    turn_discount: float | None = None,
    trace_decay: float = 0.95,
    length_scale: float = 0.05,
    ignored_tokens: int = 8,
    whitened: bool = True,
    bound: float = 10.0,
) -> jax.Array:
    """Computes extended generalised advantage estimation (EGAE): `advantages.gae` that also takes truncated rollouts.

    δ_t = r_t + γ V_{t+1} - V_t, where V after the end is V of the last token if the trajectory is truncated, else 0.
    A_t = δ_t + γ λ A_{t+1}. λ grows with the trajectory: the larger of `trace_decay` and 1 - 1 / (α l), where l counts
    its trained tokens, and half as many more if it is truncated.

    The end of a truncated trajectory rests on the critic alone, so its last tokens have no advantage and do not enter
    the whitening.

    Args:
      inputs: the batch, with `values_NxT`. The rewards of truncated trajectories are 0: their outcome is not known.
      discount: γ.
      turn_discount: γ between two turns, which untrained tokens separate; None: the same.
      trace_decay: smallest λ.
      length_scale: α; 0 keeps λ at `trace_decay`.
      ignored_tokens: number of last trained tokens of a truncated trajectory that have no advantage.
      whitened: whiten the advantages over the batch.
      bound: largest absolute advantage; 0 is no bound.

    Returns:
      Advantages of shape [N, T], zero on untrained and on ignored tokens.

    Raises:
      ConfigError: there are no values.

    References:
      Fan et al. (T-PPO), arXiv 2506.15050, section 3.1; λ by length: Yue et al. (VAPO), arXiv 2504.05118.
    """
    if inputs.values_NxT is None:
        raise protocols.ConfigError("config.algorithm.advantage: egae needs values_NxT, the values of a critic")
    trained_NxT = inputs.mask_NxT != 0
    truncated_N = jnp.zeros(trained_NxT.shape[:1], bool) if inputs.truncated_N is None else inputs.truncated_N
    decay_N: float | jax.Array = trace_decay
    if length_scale:
        length_N = jnp.sum(trained_NxT, axis=1)
        length_N = jnp.maximum(length_N + jnp.where(truncated_N, length_N // 2, 0), 1)
        decay_N = jnp.maximum(1.0 - 1.0 / (length_scale * length_N), trace_decay).astype(inputs.values_NxT.dtype)
    found_NxT, _ = advantages.gae(
        inputs.token_rewards_NxT,
        inputs.values_NxT,
        trained_NxT,
        discount=discount,
        trace_decay=decay_N,
        turn_discount=turn_discount,
        truncated_N=truncated_N,
    )
    # Counted from the end: the last trained token has count 1.
    after_NxT = jnp.cumsum(trained_NxT[:, ::-1], axis=1)[:, ::-1]
    kept_NxT = trained_NxT & ~(truncated_N[:, None] & (after_NxT <= ignored_tokens))
    found_NxT = jnp.where(kept_NxT, found_NxT, 0.0)
    if whitened:
        found_NxT = advantages.whiten(found_NxT, kept_NxT)
    return jnp.clip(found_NxT, -bound, bound) if bound else found_NxT
