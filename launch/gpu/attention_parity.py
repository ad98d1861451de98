"""Compares the platform's attention kernel with plain attention in float32: results, gradients, and padding.

Letters: B rows, T tokens, H query heads, N key and value heads, K head width.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from gpu import rows, timing
from libra_jax.models import feasibility
from libra_jax.models import rows as packing
from libra_jax.models.attention import attention

ALLOWED = 2.0
"""Largest error of the kernel, as a multiple of the error of plain attention in the same dtype."""

FLOOR = {"float32": 1e-5, "bfloat16": 5e-3}
"""Error that is always allowed: rounding of sums in another order."""

Results = tuple[jax.Array, ...]
"""Output [B, T, H, K], and gradients of queries, keys and values."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a comparison, and the block of the chunked kernel."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    chunk: int
    dtype: str
    poison_bytes: int


REAL = Sizes(2048, 16, 8, 128, 512, "bfloat16", 2 * 2**30)
TINY = Sizes(64, 4, 2, 16, 16, "float32", 2**20)


def measure(bench: rows.Bench, packing_of_rows: str) -> rows.Outcome:
    """Compares over four rows, among them a row of padding alone, and rows that end in padding.

    Args:
      bench: where it runs.
      packing_of_rows: "packed": rows of several sequences, one of them with as many as a row may hold; "few": one of
        them with as many as the first programs take; "unpacked": rows of one sequence.
    """
    sizes, packed = TINY if bench.tiny else REAL, packing_of_rows != "unpacked"
    device = jax.devices(bench.platform)[0]
    on = attention.target(device)
    bounds = packing.segment_bounds(sizes.tokens, packed)
    most = bounds[0] if packing_of_rows == "few" else bounds[-1]
    segments_BxT = jnp.asarray(_segments(sizes.tokens, most))
    lengths_BxM = jnp.sum(segments_BxT[..., None] == jnp.arange(1, most + 1), axis=1, dtype=jnp.int32)
    kernel = feasibility.choose_attention("auto", on, sizes.tokens, sizes.head_dim, sizes.dtype, packed)
    inputs = _inputs(sizes, len(segments_BxT))
    found: dict[str, Results] = {}
    took: dict[str, float] = {}
    for name in dict.fromkeys((kernel, "chunked")):
        attend = attention.prepare(
            segments_BxT,
            lengths_BxM,
            kernel=name,
            chunk=sizes.chunk,
            heads=sizes.heads,
            head_dim=sizes.head_dim,
            dtype=sizes.dtype,
            on=on,
            packed=packed,
        )
        program = _program(attend)
        jax.block_until_ready(program(*inputs))
        # Fills free memory with NaN, so that a result that the kernel does not write is one.
        jax.block_until_ready(jnp.full((sizes.poison_bytes // 4,), jnp.nan, jnp.float32))
        found[name] = jax.block_until_ready(program(*inputs))
        took[name] = statistics.median(timing.seconds(functools.partial(program, *inputs)))
    plain = _program(lambda q, k, v: attention.dense(q, k, v, segments_BxT))
    rounded = plain(*inputs)
    with jax.default_matmul_precision("highest"):
        exact = plain(*(x.astype(jnp.float32) for x in inputs))
    padding = sum(int(jnp.sum((x != 0) & (segments_BxT == 0)[..., None, None])) for x in found[kernel])
    forward, gradient = errors(found[kernel], exact)
    forward_bound, gradient_bound = (max(ALLOWED * error, FLOOR[sizes.dtype]) for error in errors(rounded, exact))
    figures: rows.Figures = {
        "kernel": kernel,
        "dtype": sizes.dtype,
        "tokens": sizes.tokens,
        "query_heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "sequences": int(segments_BxT.max()),
        "forward_error": forward,
        "forward_bound": forward_bound,
        "gradient_error": gradient,
        "gradient_bound": gradient_bound,
        "padding_written": padding,
        "kernel_seconds": took[kernel],
        "chunked_seconds": took["chunked"],
    }
    return rows.Outcome(figures, problem(figures, forward <= forward_bound, gradient <= gradient_bound, padding))


def problem(figures: rows.Figures, forward: bool, gradient: bool, padding: int) -> str:
    """Returns the sentence of a case that fails; empty if results and gradients are right and padding is 0."""
    kernel = figures["kernel"]
    if not forward:  # false for NaN, too
        return f"{kernel} is off by {figures['forward_error']:.2g}, and {figures['forward_bound']:.2g} is allowed"
    if not gradient:
        error, bound = figures["gradient_error"], figures["gradient_bound"]
        return f"gradients of {kernel} are off by {error:.2g}, and {bound:.2g} is allowed"
    return f"{kernel} gave {padding} numbers at padding that are not 0" if padding else ""


def _segments(tokens: int, most: int) -> np.ndarray:
    """Returns four rows: sequences and padding; padding alone; one sequence; and the extreme.

    A packed row begins with five sequences, and the extreme has as many as a row may hold. An unpacked row begins with
    one sequence, and the extreme is one token.
    """
    segments = np.zeros((4, tokens), np.int32)
    segments[2] = 1
    if most > 1:
        edges = [0, tokens // 2, tokens // 2 + 1, tokens // 2 + 4, tokens * 3 // 4, tokens * 7 // 8]
        for number, (first, last) in enumerate(itertools.pairwise(edges), start=1):
            segments[0, first:last] = number
        segments[3] = 1 + np.arange(tokens) * most // tokens
    else:
        segments[0, : tokens * 3 // 4] = 1
        segments[3, 0] = 1
    return segments


def _inputs(sizes: Sizes, count: int) -> Results:
    """Returns queries, keys, values and the gradient of the output, random also at padding."""
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    keys = jax.random.split(jax.random.key(0), len(heads))
    return tuple(
        jax.random.normal(key, (count, sizes.tokens, number, sizes.head_dim), sizes.dtype)
        for key, number in zip(keys, heads, strict=True)
    )


def _program(attend: attention.Attend) -> Callable[..., Results]:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, gradient: jax.Array) -> Results:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(gradient)

    return jax.jit(run)


def errors(found: Results, exact: Results) -> tuple[float, float]:
    """Returns relative errors in the Frobenius norm: of the output, and the largest of the gradients."""
    errors = []
    for x, wanted in zip(found, exact, strict=True):
        off = jnp.linalg.norm((x.astype(jnp.float32) - wanted).ravel())
        errors.append(float(off / jnp.linalg.norm(wanted.ravel())))
    return errors[0], float(np.max(errors[1:]))  # np.max keeps a NaN
