"""Compares a layer of experts with plain products of all tokens with all experts in float32: results and gradients.

Letters: N tokens, D model width, E experts, F an expert's columns, K experts of a token.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from gpu import attention_parity, rows, timing
from libra_jax.models import feasibility
from libra_jax.models.attention import attention
from libra_jax.models.experts import expert_rows, experts


@dataclass(frozen=True)
class Sizes:
    """Sizes of a comparison."""

    tokens: int
    width: int
    columns: int
    experts: int
    of_token: int
    dtype: str


REAL = Sizes(1024, 2048, 768, 128, 8, "bfloat16")
TINY = Sizes(64, 32, 16, 8, 2, "float32")


def measure(bench: rows.Bench) -> rows.Outcome:
    """Compares where experts are taken unevenly, one by no one, and some tokens take none."""
    sizes = TINY if bench.tiny else REAL
    on = attention.target(jax.devices(bench.platform)[0])
    kernel = feasibility.choose_experts(on, sizes.width, sizes.columns, sizes.dtype)
    keys = jax.random.split(jax.random.key(0), 6)
    x, grad = (jax.random.normal(key, (1, sizes.tokens, sizes.width), sizes.dtype) for key in keys[:2])
    shape = (sizes.experts, sizes.columns, sizes.width)
    gate, up, down = (
        jax.random.normal(key, shape, sizes.dtype) * shape[axis] ** -0.5
        for key, axis in zip(keys[2:5], (2, 2, 1), strict=True)
    )
    weights = expert_rows.LayerExperts(gate, up, down.swapaxes(1, 2))
    share = jax.random.uniform(keys[5], (1, sizes.tokens, sizes.of_token))
    chosen = _chosen(sizes)

    def run(kernel: str, x: jax.Array, share: jax.Array, weights: expert_rows.LayerExperts) -> attention_parity.Results:
        def layer(x: jax.Array, share: jax.Array, weights: expert_rows.LayerExperts) -> jax.Array:
            return (
                _plain(x, share, chosen, weights)
                if kernel == "plain"
                else experts.mix(kernel, x, share, chosen, weights)
            )

        out, pull = jax.vjp(layer, x, share, weights)
        x_grad, share_grad, weight_grads = pull(grad.astype(out.dtype))
        return out, x_grad, share_grad, *weight_grads

    program = jax.jit(run, static_argnums=0)
    given = (x, share, weights)
    found, rounded = program(kernel, *given), program("tiles", *given)
    with jax.default_matmul_precision("highest"):
        exact = program(
            "plain", x.astype(jnp.float32), share, jax.tree.map(lambda leaf: leaf.astype("float32"), weights)
        )
    took = statistics.median(timing.seconds(functools.partial(program, kernel, *given)))
    forward, gradient = attention_parity.errors(found, exact)
    bounds = [
        max(attention_parity.ALLOWED * error, attention_parity.FLOOR[sizes.dtype])
        for error in attention_parity.errors(rounded, exact)
    ]
    figures: rows.Figures = {
        "kernel": kernel,
        "dtype": sizes.dtype,
        "tokens": sizes.tokens,
        "experts": sizes.experts,
        "forward_error": forward,
        "forward_bound": bounds[0],
        "gradient_error": gradient,
        "gradient_bound": bounds[1],
        "seconds": took,
    }
    return rows.Outcome(figures, attention_parity.problem(figures, forward <= bounds[0], gradient <= bounds[1], 0))


def _chosen(sizes: Sizes) -> jax.Array:
    """Returns the experts of each token, [1, N, K]: the last is taken by no one, and every eighth token takes none."""
    rng = np.random.default_rng(0)
    likely = rng.dirichlet(np.full(sizes.experts - 1, 4.0))
    drawn = np.log(likely) + rng.gumbel(size=(1, sizes.tokens, sizes.experts - 1))
    chosen = np.argsort(-drawn, axis=-1)[..., : sizes.of_token].astype(np.int32)
    chosen[:, ::8] = -1
    return jnp.asarray(chosen)


def _plain(x: jax.Array, share: jax.Array, chosen: jax.Array, weights: expert_rows.LayerExperts) -> jax.Array:
    gate, up = (jnp.einsum("bnd,efd->bnef", x, leaf) for leaf in (weights.gate_ExFxD, weights.up_ExFxD))
    taken = jax.nn.one_hot(chosen, len(weights.gate_ExFxD)) * share[..., None]
    hidden = jax.nn.silu(gate) * up * taken.sum(axis=2)[..., None]
    return jnp.einsum("bnef,edf->bnd", hidden, weights.down_ExDxF)
