"""The losses of a micro-batch: the policy objective, and the supervised loss of the warm start.

Both are sums over the micro-batch, with metrics as (sum, count) pairs and maxima, so any split of a batch adds up.

Letters: B rows, T tokens of a row, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from libra_jax import config as config_lib
from libra_jax.algorithms import batch_statistics, corrections, kl, objective
from libra_jax.data import packing
from libra_jax.models import config as model_config
from libra_jax.models import rows, transformer
from libra_jax.models.experts import router
from libra_jax.training import logprobs

Batch = Mapping[str, jax.Array]


@dataclass(frozen=True)
class TokenScorer:
    """Scores tokens with the model.

    Attributes:
      options: options of the forward pass.
      logits_chunk: number of tokens whose vocabulary logits exist at once on a device.
    """

    model: model_config.TransformerConfig
    options: transformer.ComputeOptions
    logits_chunk: int

    def __call__(
        self,
        params: Any,
        batch: Batch,
        *,
        temperature: float,
        entropy_gradient: bool = False,
        tap: transformer.Tap | None = None,
    ) -> tuple[jax.Array, jax.Array, router.Losses | None]:
        """Returns log p(target) and entropy of a micro-batch's targets, float32 [B, T], and the losses of the routers.

        With `routing` in the batch, the tokens that are `routed` take the given experts. `tap` goes over the parameters
        of each layer.
        """
        replayed_experts = None
        if "routing" in batch:
            routing_BxTxLxK = batch["routing"].reshape(*batch["tokens"].shape, self.model.num_layers, -1)
            replayed_experts = router.GivenExperts(routing_BxTxLxK, batch["routed"])
        hidden_BxTxD, of_routers = transformer.forward_and_losses(
            params,
            self.model,
            self.options,
            batch["tokens"],
            batch["positions"],
            batch["segments"],
            replayed_experts,
            batch.get(packing.LENGTHS),
            batch.get(packing.UNTIL),
            tap,
        )
        head_DxV = transformer.unembedding(params, self.model)
        log_probs_BxT, entropy_BxT = logprobs.token_log_probs(
            hidden_BxTxD,
            head_DxV,
            batch["targets"],
            temperature=temperature,
            chunk=self.logits_chunk,
            entropy_gradient=entropy_gradient,
        )
        return log_probs_BxT, entropy_BxT, of_routers


def policy(
    params: Any,
    batch: Batch,
    *,
    scorer: TokenScorer,
    algorithm: config_lib.AlgorithmConfig,
    temperature: float,
    packed: bool,
) -> objective.ObjectiveSums:
    """Computes the configured policy objective, with `mismatch/*` and `offpolicy/kl` among its metrics.

    With `moved`, `mismatch/moved_kl` and `mismatch/moved_log_prob_max` (largest |difference| of log-probabilities)
    cover the tokens of the scoring version in trajectories that several instances served.

    The decoupled objective (AReaL, arXiv 2505.24298 section 5.2) needs a proximal policy: the policy just before the
    batch's first update. In that update it is the policy being differentiated. Its log-probabilities are these, held
    constant, and need no extra forward pass. Later updates take them from `proximal`. With `staleness`, the proximal
    policy is interpolated (`corrections.interpolated_proximal`).

    Args:
      batch: arrays [B, T] of `packing.MicroBatch` and `advantages`; `reference` if there is a reference model; `moved`
        if there are several instances: above 0 on the tokens of trajectories that several instances served;
        `proximal`, the log-probabilities of before the batch's first update; `staleness`, of each token in versions;
        `rollout_tokens` if rollouts were split (`aggregation.token_weights`).
      algorithm: settings of the objective.
      temperature: sampling temperature of the tokens.
      packed: several sequences may share a row.
    """
    log_probs_BxT, entropy_BxT, of_routers = scorer(
        params, batch, temperature=temperature, entropy_gradient=algorithm.entropy_coefficient != 0
    )
    # The policy that the batch came to: compared with the engine, and the proximal policy of the decoupled objective.
    arrived_BxT = jax.lax.stop_gradient(batch.get("proximal", log_probs_BxT))
    proximal_BxT = arrived_BxT
    if "staleness" in batch:
        proximal_BxT = corrections.interpolated_proximal(log_probs_BxT, batch["behaviour"], batch["staleness"])
    sums = objective.policy_objective(
        algorithm,
        log_probs_BxT=log_probs_BxT,
        behaviour_log_probs_BxT=batch["behaviour"],
        advantages_BxT=batch["advantages"],
        mask_BxT=batch["mask"],
        segments_BxT=batch["segments"],
        max_segments=rows.max_segments(batch["tokens"].shape[1], packed),
        entropy_BxT=entropy_BxT,
        proximal_log_probs_BxT=proximal_BxT if algorithm.objective == "decoupled" else None,
        arrived_log_probs_BxT=arrived_BxT,
        statistics={
            name: batch[batch_statistics.PREFIX + name] for name in batch_statistics.NAMES.get(algorithm.loss, ())
        },
        reference_log_probs_BxT=batch.get("reference"),
        same_version_BxT=batch["on_version"],
        balance_BxT=None if of_routers is None else of_routers.balance_BxT,
        router_z_BxT=None if of_routers is None else of_routers.z_BxT,
        rollout_tokens_BxT=batch.get(packing.ROLLOUT_TOKENS),
    )
    # Off-policyness: only tokens of older versions, to keep it apart from the mismatch between engine and trainer.
    older_BxT = batch["mask"] & ~batch["on_version"]
    distance_BxT = kl.k3(batch["behaviour"], arrived_BxT)
    offpolicy = jnp.sum(jnp.where(older_BxT, distance_BxT, 0.0)), jnp.sum(older_BxT, dtype=jnp.float32)
    sums = sums._replace(metrics={**sums.metrics, "offpolicy/kl": offpolicy})
    if "routed" in batch:
        replayed = (
            jnp.sum(batch["mask"] & batch["routed"], dtype=jnp.float32),
            jnp.sum(batch["mask"], dtype=jnp.float32),
        )
        sums = sums._replace(metrics={**sums.metrics, "router/replayed": replayed})
    if "moved" not in batch:
        return sums
    # A move of a trajectory between instances must not change its log-probabilities, so it is measured apart.
    moved_BxT = batch["mask"] & batch["on_version"] & (batch["moved"] > 0)
    difference_BxT = jnp.abs(arrived_BxT - batch["behaviour"])
    moved = jnp.sum(jnp.where(moved_BxT, distance_BxT, 0.0)), jnp.sum(moved_BxT, dtype=jnp.float32)
    largest = jnp.max(jnp.where(moved_BxT, difference_BxT, 0.0))
    return sums._replace(
        metrics={**sums.metrics, "mismatch/moved_kl": moved},
        maxima={**sums.maxima, "mismatch/moved_log_prob_max": largest},
    )


def supervised(params: Any, batch: Batch, *, scorer: TokenScorer) -> objective.ObjectiveSums:
    """Computes the cross entropy of the trained tokens at temperature 1, a mean over tokens.

    Args:
      batch: arrays [B, T] of `packing.MicroBatch`.
    """
    # Demonstrations were not sampled from the policy, so no sampling temperature applies.
    log_probs_BxT, entropy_BxT, _ = scorer(params, batch, temperature=1.0)
    mask_BxT = batch["mask"]
    count = jnp.sum(mask_BxT, dtype=jnp.float32)

    def total(values_BxT: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask_BxT, values_BxT, 0.0))

    metrics = {
        "entropy": (total(entropy_BxT), count),
        "target_probability": (total(jnp.exp(jax.lax.stop_gradient(log_probs_BxT))), count),
    }
    return objective.ObjectiveSums(loss_sum=-total(log_probs_BxT), count=count, metrics=metrics, maxima={})


def keep_float32(platform: str, compute_dtype: str) -> None:
    """Sets JAX's default precision of matrix products so that float32 products are computed in float32.

    By default, JAX lets a GPU round the inputs of float32 products to TF32 (10 bits), and a TPU to bfloat16 (7 bits).
    That breaks the log-prob contract: the trainer's log-probabilities differ from the log-probabilities of an engine
    that computes in float32. A precision that is already set stays (JAX_DEFAULT_MATMUL_PRECISION). The setting holds
    for every thread of the process.

    Args:
      platform: JAX's platform name: "cpu", "gpu" or "tpu". CPUs always compute in float32.
      compute_dtype: compute dtype of the model, as in `config_lib.ModelConfig`.
    """
    if platform != "cpu" and compute_dtype == "float32" and jax.config.jax_default_matmul_precision is None:
        jax.config.update("jax_default_matmul_precision", "highest")
