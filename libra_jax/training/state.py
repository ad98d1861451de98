"""The train state and its layout on the mesh.

Thread-safety: none; one thread makes and changes the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from libra_jax.models import config as model_config
from libra_jax.models import feasibility, transformer
from libra_jax.training import mesh as mesh_lib

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a training step changes; a pytree.

    Attributes:
      step: int32 scalar, number of steps taken, including skipped steps: the policy version.
      params: master weights.
      opt_state: state of the optax transformation.
      rng: uint32 [2], key data of the run's JAX random key. The initial parameters are drawn from it.
      reference: parameters of the frozen reference model, or None if the objective needs none.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    rng: jax.Array
    reference: PyTree = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accumulator:
    """Sums over the micro-batches of a step so far; a pytree.

    Attributes:
      gradients: float32, gradient of the summed loss, shaped like the parameters.
      loss: float32 scalar, summed loss.
      count: float32 scalar, divisor of the sums at the end of the step (tokens or sequences).
    """

    gradients: PyTree
    loss: jax.Array
    count: jax.Array


@dataclass(frozen=True)
class Layout:
    """Shapes and shardings of the state on one mesh.

    Attributes:
      mesh: the devices.
      state: `jax.ShapeDtypeStruct` leaves with their shardings, in the structure of `TrainState`.
      accumulator: `jax.ShapeDtypeStruct` leaves in the structure of `Accumulator`.
    """

    mesh: Mesh
    state: TrainState
    accumulator: Accumulator


def layout(
    config: model_config.TransformerConfig,
    mesh: Mesh,
    transform: optax.GradientTransformation,
    *,
    dtype: str,
    reference: bool = False,
) -> Layout:
    """Returns the layout of the state: optimizer moments like their parameters, scalars on every device.

    Args:
      config: shape of the model.
      mesh: the devices.
      transform: the optimizer.
      dtype: dtype of master weights and moments.
      reference: the state holds a frozen reference model.

    Raises:
      ConfigError: a size of the model is not divisible by an axis of the mesh.
    """
    feasibility.check_mesh(config, mesh.shape)
    shardings = transformer.shardings(config, mesh)
    everywhere = mesh_lib.replicated(mesh)
    shapes = transformer.abstract_params(config, dtype)
    params = jax.tree.map(_placed, shapes, shardings)
    moments = jax.eval_shape(transform.init, shapes)
    opt_state = optax.tree_utils.tree_map_params(
        transform,
        _placed,
        moments,
        shardings,
        transform_non_params=lambda leaf: _placed(leaf, everywhere),
    )
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
    return Layout(
        mesh=mesh,
        state=TrainState(
            step=jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
            params=params,
            opt_state=opt_state,
            rng=jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=everywhere),
            reference=params if reference else None,
        ),
        accumulator=Accumulator(
            # float32 for any parameter dtype: a sum over many micro-batches would lose small gradients in bfloat16.
            gradients=jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), params
            ),
            loss=scalar,
            count=scalar,
        ),
    )


def shardings_of(structure: PyTree) -> PyTree:
    """Returns the shardings of a tree of placed `ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: leaf.sharding, structure)


def zeros(structure: PyTree) -> Callable[[], PyTree]:
    """Returns a program that makes zeros in the shapes and shardings of a tree of placed `ShapeDtypeStruct`."""

    def make() -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), structure)

    return jax.jit(make, out_shardings=shardings_of(structure))


def random_params(config: model_config.TransformerConfig, where: Layout, seed: int) -> PyTree:
    """Draws the initial parameters: the same values on every mesh, each shard made on its own device."""

    def make() -> PyTree:
        return transformer.init_params(config, jax.random.key(seed), str(_dtype(where)))

    return jax.jit(make, out_shardings=shardings_of(where.state.params))()


def begin(params: PyTree, where: Layout, transform: optax.GradientTransformation, seed: int) -> TrainState:
    """Builds the state before the first step. It takes over `params`; the reference model is a copy of them."""

    def make() -> tuple[jax.Array, jax.Array]:
        return jnp.int32(0), jax.random.key_data(jax.random.key(seed))

    step, rng = jax.jit(make, out_shardings=mesh_lib.replicated(where.mesh))()
    return TrainState(
        step=step,
        params=params,
        # Jitted, so that each moment is made on its own devices, never whole on one device.
        opt_state=jax.jit(transform.init, out_shardings=shardings_of(where.state.opt_state))(params),
        rng=rng,
        # A copy, because `apply_step` donates the state: a shared buffer would be consumed with the parameters.
        reference=None if where.state.reference is None else jax.tree.map(jnp.copy, params),
    )


def _dtype(where: Layout) -> jnp.dtype:
    return jax.tree.leaves(where.state.params)[0].dtype


def _placed(leaf: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
