"""Early checks of the arguments of this room's functions: shapes, dtypes, names.

Shapes are static under `jax.jit`, so the checks run at trace time and cost nothing later.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from libra_jax import protocols


def same_shape(**arrays: jax.Array | None) -> None:
    """Raises unless every given array has the shape of the first; None is skipped.

    Raises:
      protocols.LibraError: names the two arrays and their shapes.
    """
    shapes = [(name, jnp.shape(array)) for name, array in arrays.items() if array is not None]
    first, shape = shapes[0]
    for name, other_shape in shapes[1:]:
        if other_shape != shape:
            raise protocols.LibraError(
                f"{name} has shape {other_shape}, but {first} has {shape}: the two must be equal"
            )


def rank(expected: int, **arrays: jax.Array) -> None:
    """Raises unless every array has `expected` dimensions.

    Raises:
      protocols.LibraError: names the array and its shape.
    """
    for name, array in arrays.items():
        if jnp.ndim(array) != expected:
            raise protocols.LibraError(f"{name} must have {expected} dimensions, not the shape {jnp.shape(array)}")


def integer(**arrays: jax.Array) -> None:
    """Raises unless every array holds integers.

    Raises:
      protocols.LibraError: names the array and its dtype.
    """
    for name, array in arrays.items():
        if not jnp.issubdtype(jnp.result_type(array), jnp.integer):
            raise protocols.LibraError(f"{name} must hold integers, not {jnp.result_type(array)}")


def floats(array: jax.Array, name: str) -> jax.Array:
    """Casts to float32, or keeps float64: log-probs in half precision are too coarse to compare.

    Raises:
      protocols.LibraError: the array does not hold real numbers.
    """
    dtype = jnp.result_type(array)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise protocols.LibraError(f"{name} must hold floating-point numbers, not {dtype}")
    return jnp.asarray(array, jnp.promote_types(dtype, jnp.float32))
