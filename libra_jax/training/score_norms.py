"""Norms of the scores of single trajectories: of ∇ log π(y), the gradient of a trajectory's log-probability.

A training step sums gradients over trajectories, and the norm of a sum says nothing of its parts. So this is a pass of
its own, over rows of one trajectory each. Each device takes its rows one after the other. Each layer's gradients are
squared and summed where they arise, so a device holds those of one layer of one row at a time.

Letters: B rows, S shards of the rows, R rows of a shard, T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from libra_jax.models import feasibility
from libra_jax.models.adapters import lora
from libra_jax.training import losses


@jax.custom_vjp
def _tapped(tree: Any, squares: jax.Array) -> Any:
    """Returns the tree. The gradient of `squares` is the sum of the squares of the tree's gradient."""
    del squares
    return tree


def _backward(_: None, gradients: Any) -> tuple[Any, jax.Array]:
    parts = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients)]
    return gradients, sum(parts, jnp.zeros((), jnp.float32))


_tapped.defvjp(lambda tree, squares: (tree, None), _backward)


@dataclass(frozen=True)
class ScoreNorms:
    """Computes the squared norms of scores, and importance weights.

    Attributes:
      temperature: sampling temperature of the tokens.
      adapter: an adapter alone is trained, so the weights under it do not count.
      shards: S, number of shards of the rows: a row of each is computed at a time.
    """

    scorer: losses.TokenScorer
    temperature: float
    adapter: bool
    shards: int = 1

    def __call__(self, params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Returns two numbers for each row, float32 [2, B]: |∇ Σ log π|² and Σ (log π - log π_b).

        The sums are over the trained tokens of a row, and the gradient is over the trained parameters. Untrained tokens
        count nowhere, even if their numbers are NaN.

        Args:
          params: parameters of the policy, with the leaves of its adapter.
          batch: arrays [B, T] of `packing.MicroBatch`, one trajectory a row; `routing` and `routed` if there are any.
        """
        # The kernels of accelerators are written for the rows of a device together, and the compiler lays this out. So
        # each part is computed as on a CPU, and nothing moves to the host in between.
        options = self.scorer.options
        remat = "full" if options.remat == "offload" else options.remat
        options = dataclasses.replace(options, attention="chunked", remat=remat, packed=False, target=feasibility.CPU)
        scorer = dataclasses.replace(self.scorer, options=options)

        def of_row(arrays: Mapping[str, jax.Array]) -> jax.Array:
            mask_1xT = arrays["mask"][None]

            def score(squares: jax.Array) -> tuple[jax.Array, jax.Array]:
                def tap(tree: Any) -> Any:
                    if not self.adapter:
                        return _tapped(tree, squares)

                    def trained(path: tuple[Any, ...], leaf: Any) -> Any:
                        return _tapped(leaf, squares) if lora.is_leaf(path) else leaf

                    return jax.tree_util.tree_map_with_path(trained, tree)

                # Tapped before both uses of a table, as embedding and as output projection: the gradients add up first.
                tapped_params = {name: leaf if name == "layers" else tap(leaf) for name, leaf in params.items()}
                row = {name: array[None] for name, array in arrays.items()}
                log_probs_1xT, _, _ = scorer(tapped_params, row, temperature=self.temperature, tap=tap)
                ratio_1xT = jnp.where(mask_1xT, log_probs_1xT - row["behaviour"], 0.0)
                return jnp.sum(jnp.where(mask_1xT, log_probs_1xT, 0.0)), jnp.sum(ratio_1xT)

            squares, log_weight = jax.grad(score, has_aux=True)(jnp.zeros((), jnp.float32))
            return jnp.stack([squares, log_weight])

        # Not all rows side by side: each has a gradient of its own of the whole vocabulary's projection.
        numbers_RxSx2 = jax.lax.map(
            jax.vmap(of_row), {name: _in_turns(array, self.shards) for name, array in batch.items()}
        )
        return numbers_RxSx2.swapaxes(0, 1).reshape(-1, 2).T


def _in_turns(array: jax.Array, shards: int) -> jax.Array:
    """Returns the rows as [R, S, ...]: the first row of each shard, then the second. No row leaves its shard."""
    return array.reshape(shards, -1, *array.shape[1:]).swapaxes(0, 1)
