"""The train state, and its layout on the device mesh.

Thread-safety: none; one thread makes and changes the state.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.models import feasibility, sharding, transformer
from libra_jax.models.adapters import lora
from libra_jax.training import critic as critic_lib

PyTree = Any

AXES = ("data", "fsdp", "tensor", "context")
"""Names of the mesh's axes."""


HOST = "pinned_host"
"""JAX's name of the host's memory that devices can read and write."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a training step changes; a pytree.

    Attributes:
      step: int32 scalar, number of steps taken, including skipped steps: the policy version.
      params: master weights: of the adapter if there is one, else of the whole model.
      opt_state: state of the optax transformation.
      rng: uint32 [2], key data of the run's JAX random key. The initial parameters are drawn from it.
      reference: parameters of the frozen reference model, or None if the objective needs none.
      base: frozen weights under the adapter, or None without an adapter. No program consumes them, so they stay the
        same arrays from step to step, and several states may share them. They are also the reference model.
      critic: train state of the critic. Only in a checkpoint: the critic's learner holds it.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    rng: jax.Array
    reference: PyTree = None
    base: PyTree = None
    critic: TrainState | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accumulator:
    """Sums over the micro-batches of a step so far; a pytree.

    Attributes:
      gradients: gradient of the summed loss, shaped like the parameters, in the accumulation dtype.
      loss: float32 scalar, summed loss.
      count: float32 scalar, divisor of the sums at the end of the step (tokens or sequences).
    """

    gradients: PyTree
    loss: jax.Array
    count: jax.Array


@dataclass(frozen=True)
class StateLayout:
    """Shapes and shardings of the state on one mesh.

    Attributes:
      state: `jax.ShapeDtypeStruct` leaves with their shardings, in the structure of `TrainState`.
      accumulator: `jax.ShapeDtypeStruct` leaves in the structure of `Accumulator`.
      rows: sharding of a [rows, tokens] array: rows over data and fsdp, tokens over context.
      everywhere: sharding of an array that every device holds whole.
      weights: the part of `state` that holds the model's own weights: `base` under an adapter, else `params`.
      offloads: the moments live in the host's memory.
    """

    mesh: Mesh
    state: TrainState
    accumulator: Accumulator
    rows: NamedSharding
    everywhere: NamedSharding

    @property
    def weights(self) -> PyTree:
        return self.state.params if self.state.base is None else self.state.base

    @property
    def offloads(self) -> bool:
        return any(leaf.sharding.memory_kind == HOST for leaf in jax.tree.leaves(self.state.opt_state))


def make_mesh(config: config_lib.TrainerConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Builds the mesh of `config` over the first of `devices`. Its axes are `AXES`, of type Auto (the compiler shards).

    Raises:
      ConfigError: the mesh needs more devices, or the devices are not of `config.platform`. Without a GPU, JAX silently
        ignores the "cuda" in JAX_PLATFORMS=cuda,cpu.
    """
    shape = (config.data, config.fsdp, config.tensor, config.context)
    platform = {"cuda": "gpu"}.get(config.platform, config.platform)
    if devices and platform not in ("auto", devices[0].platform):
        raise protocols.ConfigError(
            f"config.trainer.platform: JAX finds no {config.platform} device here, only {devices[0].platform}; install "
            f"JAX for {config.platform}, or use auto"
        )
    if len(devices) < config.devices:
        sizes = " x ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True) if size > 1)
        raise protocols.ConfigError(
            f"config.trainer: the mesh ({sizes or 'one device'}) needs {config.devices} devices and there are "
            f"{len(devices)}; lower data, fsdp, tensor or context, or start with more devices"
        )
    grid = arranged(shape, devices[: config.devices])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arranged(shape: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Arranges devices so that neighbours on the last axes have the fastest links. CPU devices stay in order.

    Inside a TPU slice, or on GPUs of one process, JAX knows the links (`jax.experimental.mesh_utils`). Across slices or
    processes, the data axis spans them first and the fsdp axis spans the rest, so that the tensor axis stays inside. If
    the sizes do not divide that way, the devices stay in the order of their slices or processes.

    Args:
      shape: axis sizes in the order of `AXES`, whose product is the number of devices.
      devices: devices, or devices of a topology description.
    """
    plain = np.asarray(devices, dtype=object).reshape(shape)
    if devices[0].platform == "cpu":
        return plain
    # All hosts of a TPU slice share its links. GPUs share NVLink inside a host, and a process has GPUs of one host.
    attribute = "process_index" if devices[0].platform == "gpu" else "slice_index"
    groups = Counter(getattr(device, attribute, 0) for device in devices)
    try:
        if len(groups) == 1:
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        data = math.gcd(shape[0], len(groups))
        outer = (data, len(groups) // data, 1, 1)
        if len(set(groups.values())) > 1 or shape[1] % outer[1]:
            return plain
        return mesh_utils.create_hybrid_device_mesh(
            tuple(size // across for size, across in zip(shape, outer, strict=True)),
            outer,
            devices,
            process_is_granule=attribute == "process_index",
            allow_split_physical_axes=True,
        )
    except (AssertionError, NotImplementedError, ValueError):
        return plain  # a part of a slice, or a shape that JAX cannot lay onto a torus


def layout(
    config: model_config.TransformerConfig,
    mesh: Mesh,
    transform: optax.GradientTransformation,
    *,
    dtype: str,
    reference: str | None = None,
    base: str | None = None,
    accumulation: str = "float32",
    offload: bool = False,
    critic: bool = False,
    teacher: model_config.TransformerConfig | None = None,
) -> StateLayout:
    """Returns the layout of the state: optimizer moments like their parameters (`_moments`), scalars on every device.

    Args:
      dtype: dtype of master weights and moments.
      reference: compute dtype of the frozen reference model; None: the state holds none.
      base: compute dtype of the frozen weights under an adapter; None without an adapter.
      accumulation: dtype of the sums of gradients.
      offload: the moments live in the host's memory.
      critic: the model has a head of values (`critic`).
      teacher: shape of the reference model; None: that of `config`.

    Raises:
      ConfigError: a size of the model is not divisible by an axis of the mesh.
    """
    feasibility.check_mesh(config, mesh.shape)
    shardings = transformer.shardings(config, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = dict(transformer.abstract_params(config, dtype))
    if critic:
        shapes[critic_lib.HEAD], shardings[critic_lib.HEAD] = critic_lib.head(config, mesh, dtype)

    def place_leaf(leaf: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    frozen = None
    if base is not None:
        # Everything below sees the adapter only: moments and sums of the frozen weights do not exist.
        (shapes, weights), (shardings, places) = lora.split(shapes), lora.split(shardings)
        frozen = _frozen(jax.tree.map(place_leaf, weights, places), base)
    params = jax.tree.map(place_leaf, shapes, shardings)
    referred = params
    if teacher is not None:
        feasibility.check_mesh(teacher, mesh.shape)
        places = transformer.shardings(teacher, mesh)
        referred = jax.tree.map(place_leaf, dict(transformer.abstract_params(teacher, dtype)), places)
    opt_state = _moments(jax.eval_shape(transform.init, shapes), params, everywhere, offload)
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
    return StateLayout(
        mesh=mesh,
        state=TrainState(
            step=jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
            params=params,
            opt_state=opt_state,
            rng=jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=everywhere),
            reference=None if reference is None else _frozen(referred, reference),
            base=frozen,
        ),
        accumulator=Accumulator(
            # By default float32 for any parameter dtype: long sums lose small gradients in bfloat16.
            gradients=jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, accumulation, sharding=leaf.sharding), params
            ),
            loss=scalar,
            count=scalar,
        ),
        rows=NamedSharding(mesh, sharding.spec(("batch", "tokens"))),
        everywhere=everywhere,
    )


def _moments(opt_state: PyTree, params: PyTree, everywhere: NamedSharding, offload: bool) -> PyTree:
    """Places the optimizer's state: each moment like the parameter at the end of its path, all else on every device.

    Nothing but paths and shapes is known of an optimizer: the trees of moments may lack parameters (Muon), and a moment
    may lack axes of its parameter (Adafactor's row and column means).

    Args:
      opt_state: shapes of the optimizer's state.
      params: placed shapes of the parameters.
      everywhere: sharding of what belongs to no parameter, such as counters.
      offload: moments live in the host's memory.
    """
    params_by_path = dict(jax.tree_util.tree_leaves_with_path(params))

    def place_moment(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        ends = (path[start:] for start in range(len(path)))
        param = next((params_by_path[end] for end in ends if end in params_by_path), None)
        # Axes of the parameter, ascending, whose sizes are those of the moment.
        shape = () if param is None else param.shape
        choices = itertools.combinations(range(len(shape)), len(leaf.shape))
        axes = next((axes for axes in choices if tuple(shape[axis] for axis in axes) == leaf.shape), None)
        if param is None or not axes:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
        where = param.sharding
        if len(axes) < len(param.shape):
            where = NamedSharding(where.mesh, PartitionSpec(*(where.spec[axis] for axis in axes)))
        if offload:
            where = where.with_memory_kind(HOST)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(place_moment, opt_state)


def _frozen(params: PyTree, dtype: str) -> PyTree:
    """Returns the shapes of frozen weights: matrices, tables and biases in the compute dtype.

    The forward pass casts them to that dtype before it uses them, so the stored cast changes no bit of its result. It
    uses the weights of norms in float32.
    """

    def stored(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_norm = any(str(getattr(key, "key", "")).endswith("norm") for key in path)
        return leaf if is_norm else jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    return jax.tree_util.tree_map_with_path(stored, params)


def on_devices(structure: PyTree) -> PyTree:
    """Returns a tree of placed `ShapeDtypeStruct` with every leaf in the devices' own memory."""

    def moved(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding.with_memory_kind(None))

    return jax.tree.map(moved, structure)


def shardings_of(structure: PyTree) -> PyTree:
    """Returns the shardings of a tree of placed `ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: leaf.sharding, structure)


def random_params(config: model_config.TransformerConfig, where: StateLayout, seed: int) -> PyTree:
    """Draws the model's initial weights: the same values on every mesh, each shard made on its own device."""

    def draw() -> PyTree:
        return cast_like(transformer.init_params(config, jax.random.key(seed)), where.weights)

    return jax.jit(draw, out_shardings=shardings_of(where.weights))()


def random_adapter(where: StateLayout, seed: int) -> PyTree:
    """Draws a fresh adapter, whose product is zero: the same values on every mesh."""
    places = where.state.params
    # Another stream than that of `random_params`, which has the same seed.
    key = jax.random.fold_in(jax.random.key(seed), 1)
    return jax.jit(lambda: lora.init(places, key), out_shardings=shardings_of(places))()


def cast_like(tree: PyTree, places: PyTree) -> PyTree:
    """Returns a tree in the dtypes of another tree of the same structure."""
    return jax.tree.map(lambda leaf, place: leaf.astype(place.dtype), tree, places)


def begin(
    params: PyTree,
    where: StateLayout,
    transform: optax.GradientTransformation,
    seed: int,
    base: PyTree = None,
    reference: PyTree = None,
) -> TrainState:
    """Builds the state before the first step. It takes over `params`, `base` and `reference`.

    If the layout has a reference model and none is given, it is a copy of `params`.
    """
    step, rng = jax.jit(
        lambda: (jnp.int32(0), jax.random.key_data(jax.random.key(seed))), out_shardings=where.everywhere
    )()
    return TrainState(
        step=step,
        params=params,
        # Jitted, so that each moment is made on its own devices, never whole on one device.
        opt_state=jax.device_put(
            jax.jit(transform.init, out_shardings=shardings_of(on_devices(where.state.opt_state)))(params),
            shardings_of(where.state.opt_state),
        ),
        rng=rng,
        # A copy, because `apply_step` donates the state: a shared buffer would be consumed with the parameters.
        reference=reference
        if where.state.reference is None or reference is not None
        else jax.tree.map(lambda leaf, place: jnp.array(leaf, place.dtype, copy=True), params, where.state.reference),
        base=base,
    )
