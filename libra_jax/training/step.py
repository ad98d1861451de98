"""The programs of a training step, compiled ahead of time, one for each shape.

A step is a host loop. `grad_step` runs once per micro-batch and adds its loss and gradient sums to an accumulator.
`apply_step` runs once: it divides by the global count, clips and updates. Any split of the batch adds up to the same
step, so a share of the batch may be computed elsewhere; `add` adds its sums. Every program consumes the buffers that it
replaces: the accumulator stays in place, and `apply_step` returns it zeroed.

Thread-safety: none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from libra_jax.algorithms import objective
from libra_jax.training import mesh as mesh_lib
from libra_jax.training import state as state_lib

Batch = Mapping[str, jax.Array]
Loss = Callable[[Any, Batch], objective.ObjectiveSums]
Report = dict[str, Any]

SCORE = "score"
"""Name of the scoring program, used beside the names of the losses."""

Shape = tuple[str, dict[str, jax.ShapeDtypeStruct]]
"""A loss's name, or SCORE, and the shapes of a micro-batch that the program was compiled for."""


def grad_step(
    loss: Loss, params: Any, accumulator: state_lib.Accumulator, batch: Batch
) -> tuple[state_lib.Accumulator, Report]:
    """Adds one micro-batch. Returns the accumulator and the micro-batch's metric sums and maxima."""

    def total(params: Any) -> tuple[jax.Array, objective.ObjectiveSums]:
        sums = loss(params, batch)
        return sums.loss_sum, sums

    gradients, sums = jax.grad(total, has_aux=True)(params)
    added = state_lib.Accumulator(
        # Summed in the accumulator's dtype, float32, for parameters of any dtype.
        gradients=jax.tree.map(lambda a, g: a + g.astype(a.dtype), accumulator.gradients, gradients),
        loss=accumulator.loss + sums.loss_sum,
        count=accumulator.count + sums.count,
    )
    return added, {"metrics": sums.metrics, "maxima": sums.maxima}


def apply_step(
    transform: optax.GradientTransformation,
    state: state_lib.TrainState,
    accumulator: state_lib.Accumulator,
    learning_rate: jax.Array,
) -> tuple[state_lib.TrainState, state_lib.Accumulator, Report]:
    """Takes one update from the accumulated sums. Returns the new state, the zeroed accumulator and a report.

    If the loss or a gradient is not finite, the parameters and the optimizer stay unchanged and `skipped` is 1. The
    step number advances in both cases.
    """
    # A step without trained tokens has count 0; dividing by 1 leaves its gradients at zero.
    count = jnp.where(accumulator.count > 0, accumulator.count, 1.0)
    gradients = jax.tree.map(lambda g: g / count, accumulator.gradients)
    norm = optax.tree_utils.tree_norm(gradients)
    # One NaN or infinity in any gradient makes the norm non-finite, so the norm stands for all gradients.
    finite = jnp.isfinite(accumulator.loss) & jnp.isfinite(norm)
    updates, opt_state = transform.update(gradients, state.opt_state, state.params)
    # Applied here, not in the transform: one compiled program serves every schedule.
    params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)

    def keep_if_skipped(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(finite, new.astype(old.dtype), old)

    advanced = state_lib.TrainState(
        step=state.step + 1,
        params=jax.tree.map(keep_if_skipped, params, state.params),
        opt_state=jax.tree.map(keep_if_skipped, opt_state, state.opt_state),
        rng=state.rng,
        reference=state.reference,
    )
    report = {"loss": accumulator.loss / count, "grad_norm": norm, "skipped": 1.0 - finite.astype(jnp.float32)}
    return advanced, jax.tree.map(jnp.zeros_like, accumulator), report


@dataclass(frozen=True)
class Received:
    """Sums over micro-batches that were computed elsewhere.

    Attributes:
      arrays: leaves of the sender's `Accumulator`, on this host.
      report: metric sums and maxima, like the report of a micro-batch.
    """

    arrays: Sequence[np.ndarray]
    report: Report


class Programs:
    """The compiled programs of one mesh: one `grad_step` for each loss and micro-batch shape, and one `apply_step`.

    Attributes:
      compiled_shapes: number of micro-batch programs compiled so far.
    """

    def __init__(
        self,
        where: state_lib.Layout,
        transform: optax.GradientTransformation,
        losses: Mapping[str, Loss],
        score: Callable[[Any, Batch], jax.Array],
        compiler_options: Mapping[str, Any] | None = None,
        *,
        helped: bool = False,
    ) -> None:
        """Stores the arguments; nothing is compiled yet.

        Args:
          where: shapes and shardings.
          transform: gradient to update direction.
          losses: loss functions by name.
          score: (params, batch) -> log-probabilities [B, T].
          compiler_options: XLA options (`jax.stages.Lowered.compile`).
          helped: sums may be computed elsewhere, so `compile` also compiles `add`.
        """
        self._helped = helped
        self._options = dict(compiler_options or {})
        self._where = where
        self._transform = transform
        self._losses = dict(losses)
        self._score = score
        self._scores: dict[tuple[Any, ...], jax.stages.Compiled] = {}
        self._grad_steps: dict[tuple[Any, ...], jax.stages.Compiled] = {}
        self._met: list[Shape] = []
        self._apply_step: jax.stages.Compiled | None = None
        self._zeros: Callable[[], state_lib.Accumulator] | None = None
        self._add: jax.stages.Compiled | None = None

    @property
    def compiled_shapes(self) -> int:
        return len(self._grad_steps) + len(self._scores)

    @property
    def temporary_bytes(self) -> int:
        """Largest number of temporary bytes on a device that any program compiled so far needs beside its arguments."""
        programs = [*self._grad_steps.values(), *self._scores.values(), self._apply_step, self._add]
        return max((_temporary(program) for program in programs if program is not None), default=0)

    def put(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Starts the transfer of a micro-batch's host arrays [B, T] onto the mesh.

        Every process holds the whole arrays and cuts out the part of its own devices. Arrays on the mesh stay there.
        """
        where = mesh_lib.batch_sharding(self._where.mesh)
        if jax.process_count() == 1:
            return jax.device_put(dict(arrays), where)
        return {  # with several processes, device_put would compare the arrays of all of them: a collective
            name: array
            if isinstance(array, jax.Array)
            else jax.make_array_from_callback(array.shape, where, array.__getitem__)
            for name, array in arrays.items()
        }

    def compile(self, loss: str, batch: Mapping[str, Any]) -> None:
        """Compiles the programs of a step over micro-batches like `batch` (host or device arrays), if still missing."""
        self.compile_grad_step(loss, batch)
        if self._apply_step is None:
            self._apply_step = self._compile_apply_step()
        # Ahead of time, so that the first share to arrive does not wait for a compilation.
        if self._helped and self._add is None:
            self._add = self._compile_add()

    def compile_grad_step(self, loss: str, batch: Mapping[str, Any]) -> None:
        """Compiles `grad_step` alone, the only program that a hybrid worker needs."""
        # XLA programs have fixed shapes, so each loss and shape needs its own program.
        key = (loss, _shape_key(batch))
        if key not in self._grad_steps:
            self._grad_steps[key] = self._compile_grad_step(loss, batch)
            self._met.append((loss, _shapes(batch)))

    def shapes(self) -> list[Shape]:
        """Returns each micro-batch shape compiled so far."""
        return list(self._met)

    def compile_like(self, shape: Shape) -> None:
        """Compiles the program for a shape that the programs of another mesh have compiled."""
        loss, batch = shape
        if loss == SCORE:
            self._compile_score(batch)
        else:
            self.compile(loss, batch)

    def grad_step(
        self, loss: str, params: Any, accumulator: state_lib.Accumulator, batch: Batch
    ) -> tuple[state_lib.Accumulator, Report]:
        """Runs `grad_step` of the named loss; consumes the given accumulator."""
        self.compile_grad_step(loss, batch)
        return self._grad_steps[loss, _shape_key(batch)](params, accumulator, batch)

    def apply_step(
        self, state: state_lib.TrainState, accumulator: state_lib.Accumulator, learning_rate: float
    ) -> tuple[state_lib.TrainState, state_lib.Accumulator, Report]:
        """Runs `apply_step`; consumes the given state and accumulator."""
        if self._apply_step is None:
            self._apply_step = self._compile_apply_step()
        return self._apply_step(state, accumulator, np.float32(learning_rate))

    def zeros(self) -> state_lib.Accumulator:
        """Returns a fresh accumulator of zeros."""
        if self._zeros is None:
            self._zeros = state_lib.zeros(self._where.accumulator)
        return self._zeros()

    def add(self, accumulator: state_lib.Accumulator, received: Received) -> state_lib.Accumulator:
        """Adds sums that were computed elsewhere; consumes the given accumulator.

        Each process fills only the shards of its own devices, so all processes must hold the same sums.
        """
        leaves, structure = jax.tree.flatten(accumulator)
        placed = [_put_sum(array, leaf.sharding) for array, leaf in zip(received.arrays, leaves, strict=True)]
        if self._add is None:
            self._add = self._compile_add()
        return self._add(accumulator, jax.tree.unflatten(structure, placed))

    def score(self, params: Any, batch: Batch) -> jax.Array:
        """Returns the log-probability of each target, float32 [B, T]."""
        self._compile_score(batch)
        return self._scores[_shape_key(batch)](params, batch)

    def _compile_score(self, batch: Mapping[str, Any]) -> None:
        key = _shape_key(batch)
        if key in self._scores:
            return
        where = self._where
        batch_sharding = mesh_lib.batch_sharding(where.mesh)
        program = jax.jit(
            self._score,
            in_shardings=(state_lib.shardings_of(where.state.params), dict.fromkeys(batch, batch_sharding)),
            out_shardings=batch_sharding,
        )
        with jax.set_mesh(where.mesh):
            self._scores[key] = program.lower(where.state.params, _shapes(batch)).compile(self._options)
        self._met.append((SCORE, _shapes(batch)))

    def _compile_grad_step(self, loss: str, batch: Mapping[str, Any]) -> jax.stages.Compiled:
        where = self._where
        accumulator = state_lib.shardings_of(where.accumulator)
        function = self._losses[loss]
        program = jax.jit(
            lambda params, sums, arrays: grad_step(function, params, sums, arrays),
            in_shardings=(
                state_lib.shardings_of(where.state.params),
                accumulator,
                dict.fromkeys(batch, mesh_lib.batch_sharding(where.mesh)),
            ),
            out_shardings=(accumulator, mesh_lib.replicated(where.mesh)),
            # Donated: the new sums take the old buffers, so only one accumulator exists.
            donate_argnums=1,
        )
        # The model pins its activations on the current mesh (`models.sharding.constrain`).
        with jax.set_mesh(where.mesh):
            return program.lower(where.state.params, where.accumulator, _shapes(batch)).compile(self._options)

    def _compile_apply_step(self) -> jax.stages.Compiled:
        where = self._where
        everywhere = mesh_lib.replicated(where.mesh)
        state = state_lib.shardings_of(where.state)
        accumulator = state_lib.shardings_of(where.accumulator)
        program = jax.jit(
            lambda state, sums, rate: apply_step(self._transform, state, sums, rate),
            in_shardings=(state, accumulator, everywhere),
            out_shardings=(state, accumulator, everywhere),
            donate_argnums=(0, 1),
        )
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        with jax.set_mesh(where.mesh):
            return program.lower(where.state, where.accumulator, rate).compile(self._options)

    def _compile_add(self) -> jax.stages.Compiled:
        where = state_lib.shardings_of(self._where.accumulator)
        program = jax.jit(
            lambda sums, others: jax.tree.map(jnp.add, sums, others),
            in_shardings=(where, where),
            out_shardings=where,
            donate_argnums=0,
        )
        with jax.set_mesh(self._where.mesh):
            return program.lower(self._where.accumulator, self._where.accumulator).compile(self._options)


def _put_sum(array: np.ndarray, where: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def _temporary(program: jax.stages.Compiled) -> int:
    """Bytes of intermediate values and of results that reuse no argument's buffer; 0 if the backend does not say."""
    told = program.memory_analysis()
    if told is None:
        return 0
    return told.temp_size_in_bytes + max(0, told.output_size_in_bytes - told.alias_size_in_bytes)


def _shape_key(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(sorted((name, array.shape) for name, array in batch.items()))


def _shapes(batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()}
