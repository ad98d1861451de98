"""The critic of PPO: a model of the policy's shape with one value a token instead of logits, and its loss.

V at a token is the expected rest of the return after the tokens up to it. The critic's learner (`learner.Learner` with
`critic=True`) has a train state, programs and an optimizer of its own on the policy's mesh.

Letters: B rows, T tokens of a row, D model width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from libra_jax.algorithms import objective
from libra_jax.data import packing
from libra_jax.models import config as model_config
from libra_jax.models import sharding, transformer

HEAD = "value_head"

EQUAL_RETURNS = 1e-5
"""Largest variance of returns, relative to their mean square, that counts as rounding."""


def shape(model: model_config.TransformerConfig) -> model_config.TransformerConfig:
    """Returns the shape of the critic's trunk: the policy's, without an output projection of its own."""
    return dataclasses.replace(model, tie_word_embeddings=True, adapter=None)


def head(
    model: model_config.TransformerConfig, mesh: jax.sharding.Mesh, dtype: str
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, jax.sharding.NamedSharding]]:
    """Returns the shapes of the head, a weight [D] and a bias, and their shardings: every device holds it whole."""
    shapes = {"weight": jax.ShapeDtypeStruct((model.hidden_size,), dtype), "bias": jax.ShapeDtypeStruct((), dtype)}
    return shapes, dict.fromkeys(shapes, jax.sharding.NamedSharding(mesh, sharding.spec(())))


def from_policy(params: Mapping[str, Any], places: Mapping[str, Any]) -> Any:
    """Returns a fresh critic: a copy of the policy's trunk and a head of zeros, so that every value is 0.

    Args:
      params: all parameters of the policy on the mesh.
      places: shapes and shardings of the critic's parameters.
    """

    def copied() -> Any:
        trunk = {name: params[name] for name in places if name != HEAD}
        head = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), places[HEAD])
        return jax.tree.map(lambda leaf, place: leaf.astype(place.dtype), {**trunk, HEAD: head}, dict(places))

    return jax.jit(copied, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, dict(places)))()


@dataclass(frozen=True)
class Values:
    """Computes the values of tokens.

    Attributes:
      model: shape of the critic.
      options: options of the forward pass.
    """

    model: model_config.TransformerConfig
    options: transformer.ComputeOptions

    def __call__(self, params: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> jax.Array:
        """Returns V at every input token of a micro-batch, float32 [B, T]; meaningless in padding."""
        trunk = {name: value for name, value in params.items() if name != HEAD}
        hidden_BxTxD = transformer.forward(
            trunk,
            self.model,
            self.options,
            batch["tokens"],
            batch["positions"],
            batch["segments"],
            lengths_BxM=batch.get(packing.LENGTHS),
            until_BxT=batch.get(packing.UNTIL),
        )
        head = params[HEAD]
        values_BxT = jnp.einsum("btd,d->bt", hidden_BxTxD.astype(jnp.float32), head["weight"].astype(jnp.float32))
        return values_BxT + head["bias"].astype(jnp.float32)


def loss(
    params: Mapping[str, Any], batch: Mapping[str, jax.Array], *, values: Values, clip: float
) -> objective.ObjectiveSums:
    """Computes half the squared error of the values, clipped around the values of before the step.

    loss = 1/2 max((V - G)², (V_old + clip(V - V_old, -clip, clip) - G)²), a mean over trained tokens.

    Args:
      params: parameters of the critic.
      batch: arrays [B, T] of `packing.MicroBatch`; `returns`, the targets G; `values`, V_old.
      values: computes V.
      clip: largest distance from V_old that lowers the loss; 0 is off.

    Returns:
      Sums, with the metrics `clip_fraction`, and `value`, `return`, `return_squared` and `squared_error`.

    References:
      Schulman et al., arXiv 1707.06347; the clip is that of OpenAI Baselines' PPO2, and of verl.
    """
    mask_BxT = batch["mask"]
    # A where, not a product: values in padding may be anything.
    current_BxT = jnp.where(mask_BxT, values(params, batch), 0.0)
    returns_BxT, old_BxT = (jnp.where(mask_BxT, batch[name], 0.0) for name in ("returns", "values"))
    error_BxT = jnp.square(current_BxT - returns_BxT)
    worse_BxT, clipped_BxT = error_BxT, jnp.zeros_like(mask_BxT)
    if clip:
        bounded_BxT = old_BxT + jnp.clip(current_BxT - old_BxT, -clip, clip)
        bounded_error_BxT = jnp.square(bounded_BxT - returns_BxT)
        worse_BxT, clipped_BxT = jnp.maximum(error_BxT, bounded_error_BxT), bounded_error_BxT > error_BxT
    count = jnp.sum(mask_BxT, dtype=jnp.float32)

    def total(values_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.stop_gradient(jnp.sum(values_BxT, dtype=jnp.float32)), count

    metrics = {
        "clip_fraction": total(clipped_BxT & mask_BxT),
        "value": total(current_BxT),
        "return": total(returns_BxT),
        "return_squared": total(jnp.square(returns_BxT)),
        "squared_error": total(error_BxT),
    }
    return objective.ObjectiveSums(loss_sum=0.5 * jnp.sum(worse_BxT), count=count, metrics=metrics, maxima={})


def report(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a critic's step under `critic/`, with the share of the returns' variance it explains."""
    critic_metrics = {f"critic/{name}": metrics[name] for name in ("loss", "grad_norm", "skipped", "learning_rate")}
    if "return" in metrics:
        variance = metrics["return_squared"] - metrics["return"] ** 2
        critic_metrics |= {f"critic/{name}": metrics[name] for name in ("clip_fraction", "value", "return")}
        # The difference of two float32 sums: of nearly equal returns, nothing but rounding is left.
        if variance > EQUAL_RETURNS * metrics["return_squared"]:
            critic_metrics["critic/explained_variance"] = 1.0 - metrics["squared_error"] / variance
    return critic_metrics
