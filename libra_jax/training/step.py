"""The programs of a training step, compiled ahead of time, one for each shape.

An update is a host loop. `grad_step` runs once per micro-batch and adds its loss and gradient sums to an accumulator.
`apply_step` runs once: it divides by the global count, clips and updates. Any split of the micro-batches adds up to the
same update, so a share of them may be computed elsewhere; `Programs.add` adds its sums. A step takes one update, or
several on parts of its batch. Every program consumes the
buffers that it replaces: the accumulator stays in place, and `apply_step` returns it zeroed.

Thread-safety: any thread may compile programs; one thread runs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from libra_jax.algorithms import objective
from libra_jax.data import packing
from libra_jax.models.adapters import lora
from libra_jax.training import state as state_lib

Batch = Mapping[str, jax.Array]
Loss = Callable[[Any, Batch], objective.ObjectiveSums]
Score = Callable[[Any, Batch], jax.Array]
Report = dict[str, Any]

POLICY, SUPERVISED, VALUE = "policy", "supervised", "value"
"""Names of the losses."""

SCORE, PROXIMAL, NORMS, APPLY, ADD = "score", "proximal", "norms", "apply", "add"
"""Names of the programs that belong to no loss, used beside the names of the losses."""

Key = tuple[Any, ...]
"""A program's name, and each array's name and shape."""

Shape = tuple[str, dict[str, jax.ShapeDtypeStruct]]
"""A loss's name, SCORE, PROXIMAL or NORMS, and the shapes of a micro-batch that the program was compiled for."""


_OPTIONS: Mapping[str, dict[str, bool | str]] = {
    # Stacks that the scan over layers writes whole are not filled with zeros first. Filling takes 2 to 3% of a
    # gradient's time on an H200 (docs/results/gpu.md).
    "gpu": {"xla_gpu_enable_dus_accumulator_zero_init_elimination": True},
    # Matrix products by YNNPACK, together with what is computed on their results: 7% less time padded, 10% less on
    # real lengths (docs/results/speed.md). YNNPACK is a part of jaxlib.
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"},
}
"""XLA's options for the programs, by JAX's name of the platform."""


def grad_step(
    loss: Loss, params: Any, accumulator: state_lib.Accumulator, batch: Batch, base: Any = None
) -> tuple[state_lib.Accumulator, Report]:
    """Adds one micro-batch. Returns the accumulator and the micro-batch's metric sums and maxima.

    If `base` is given, `params` are an adapter on it, and gradients of the adapter alone are computed.
    """

    def total(params: Any) -> tuple[jax.Array, objective.ObjectiveSums]:
        sums = loss(params if base is None else lora.join(base, params), batch)
        return sums.loss_sum, sums

    gradients, sums = jax.grad(total, has_aux=True)(params)
    added = state_lib.Accumulator(
        # Summed in the accumulator's dtype, float32, for parameters of any dtype.
        gradients=jax.tree.map(lambda a, g: a + g.astype(a.dtype), accumulator.gradients, gradients),
        loss=accumulator.loss + sums.loss_sum,
        count=accumulator.count + sums.count,
    )
    return added, {"metrics": sums.metrics, "maxima": sums.maxima}


def policy_scores(score: Score, params: Any, batch: Batch, base: Any = None) -> jax.Array:
    """Returns what `score` says of the policy. If `base` is given, `params` are an adapter on it."""
    return score(params if base is None else lora.join(base, params), batch)


def apply_step(
    transform: optax.GradientTransformation,
    state: state_lib.TrainState,
    accumulator: state_lib.Accumulator,
    learning_rate: jax.Array,
    steps: jax.Array,
) -> tuple[state_lib.TrainState, state_lib.Accumulator, Report]:
    """Takes one update from the accumulated sums. Returns the new state, the zeroed accumulator and a report.

    If the loss or a gradient is not finite, or no token was trained, the parameters and the optimizer stay unchanged
    and `skipped` is 1. The step number advances by `steps` in any case: 1 for the last update of a step, and 0 for the
    updates before it.
    """
    # Without trained tokens the count is 0. Moments and weight decay would move the parameters all the same.
    trained = accumulator.count > 0
    count = jnp.where(trained, accumulator.count, 1.0)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / count, accumulator.gradients)
    norm = optax.tree_utils.tree_norm(gradients)
    # One NaN or infinity in any gradient makes the norm non-finite, so the norm stands for all gradients.
    moves = jnp.isfinite(accumulator.loss) & jnp.isfinite(norm) & trained
    updates, opt_state = transform.update(gradients, state.opt_state, state.params)
    # Applied here, not in the transform: one compiled program serves every schedule.
    params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)

    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(moves, new.astype(old.dtype), old),
        (params, opt_state),
        (state.params, state.opt_state),
    )
    advanced = dataclasses.replace(state, step=state.step + steps, params=params, opt_state=opt_state)
    report = {"loss": accumulator.loss / count, "grad_norm": norm, "skipped": 1.0 - moves.astype(jnp.float32)}
    return advanced, jax.tree.map(jnp.zeros_like, accumulator), report


def offloaded_apply_step(
    where: state_lib.StateLayout,
    transform: optax.GradientTransformation,
    state: state_lib.TrainState,
    accumulator: state_lib.Accumulator,
    learning_rate: jax.Array,
    steps: jax.Array,
) -> tuple[state_lib.TrainState, state_lib.Accumulator, Report]:
    """Takes one update as `apply_step`, of a state whose moments live in the host's memory."""
    at_rest = where.state.opt_state
    there = state_lib.shardings_of(state_lib.on_devices(at_rest))
    state = dataclasses.replace(state, opt_state=jax.device_put(state.opt_state, there))
    advanced, zeroed, report = apply_step(transform, state, accumulator, learning_rate, steps)
    moments = jax.device_put(advanced.opt_state, state_lib.shardings_of(at_rest))
    return dataclasses.replace(advanced, opt_state=moments), zeroed, report


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
      shapes: the micro-batch shapes compiled so far, in order.
      waited: seconds in which steps waited for programs to be compiled, by their own thread or by another one.
      zeros: returns a fresh accumulator of zeros.
    """

    def __init__(
        self,
        where: state_lib.StateLayout,
        transform: optax.GradientTransformation,
        losses: Mapping[str, Loss],
        score: Score,
        proximal: Score,
        norms: Score,
        *,
        helped: bool = False,
    ) -> None:
        """Stores the arguments; nothing is compiled yet.

        Args:
          where: shapes and shardings.
          transform: gradient to update direction.
          losses: loss functions by name.
          score: (params, batch) -> log-probabilities [B, T] of the reference model.
          proximal: (params, batch) -> log-probabilities [B, T] of the policy.
          norms: (params, batch) -> numbers [2, B] of the scores of single rows (`score_norms`).
          helped: sums may be computed elsewhere, so `compile` also compiles the program that adds them.
        """
        self.shapes: list[Shape] = []
        self.waited = 0.0
        self._where = where
        self._transform = transform
        self._losses = dict(losses)
        self._score = score
        self._proximal = proximal
        self._norms = norms
        self._helped = helped
        self._compiled: dict[Key, jax.stages.Compiled] = {}
        self._locks: dict[Key, threading.Lock] = {}
        self.zeros: Callable[[], state_lib.Accumulator] = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), where.accumulator),
            out_shardings=state_lib.shardings_of(where.accumulator),
        )

    def program(self, name: str, batch: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
        """Returns a program, and compiles it at the first call with these shapes. If another thread compiles it, waits.

        Args:
          name: `APPLY`, `ADD`, `SCORE`, `PROXIMAL`, `NORMS`, or the name of a loss for its `grad_step`.
          batch: host or device arrays of the micro-batch, of which only shapes and dtypes count; None for `APPLY` and
            `ADD`.
        """
        batch = batch or {}
        key = _key(name, batch)
        if key not in self._compiled:
            # A lock for each program: a step must not wait for programs that it does not need. If the other thread
            # fails, this one finds no program behind the lock and compiles it.
            with self._locks.setdefault(key, threading.Lock()):
                if key not in self._compiled:
                    self._compiled[key] = self._compile(name, batch)
        return self._compiled[key]

    def _compile(self, name: str, batch: Mapping[str, Any]) -> jax.stages.Compiled:
        where = self._where
        # Without the frozen weights: no update reads them, and a donation would take them from other states.
        trained = dataclasses.replace(where.state, base=None)
        params, state = state_lib.shardings_of(where.state.params), state_lib.shardings_of(trained)
        sums, base = state_lib.shardings_of(where.accumulator), state_lib.shardings_of(where.state.base)
        shapes = {field: jax.ShapeDtypeStruct(array.shape, array.dtype) for field, array in batch.items()}
        arrays = {field: self._place(field) for field in batch}
        function: Callable[..., Any]
        inputs: tuple[Any, ...]
        shardings: tuple[Any, ...]
        results: Any
        # Donated buffers take the results, so that only one accumulator and one state exist.
        donated: tuple[int, ...] = ()
        if name == APPLY:
            function = functools.partial(apply_step, self._transform)
            if where.offloads:
                function = functools.partial(offloaded_apply_step, where, self._transform)
            scalars = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
            inputs = trained, where.accumulator, *scalars
            results = state, sums, where.everywhere
            shardings, donated = (*results, where.everywhere), (0, 1)
        elif name == ADD:
            function, inputs = functools.partial(jax.tree.map, jnp.add), (where.accumulator, where.accumulator)
            shardings, results, donated = (sums, sums), sums, (0,)
        elif name == SCORE:
            # Of the reference model if there is one; else of the model's own weights.
            reference = where.state.reference or where.weights
            function, inputs = self._score, (reference, shapes)
            shardings, results = (state_lib.shardings_of(reference), arrays), where.rows
        elif name in (PROXIMAL, NORMS):
            function = functools.partial(policy_scores, self._proximal if name == PROXIMAL else self._norms)
            inputs, shardings, results = (
                (where.state.params, shapes, where.state.base),
                (params, arrays, base),
                where.rows if name == PROXIMAL else where.everywhere,
            )
        else:
            function = functools.partial(grad_step, self._losses[name])
            inputs = where.state.params, where.accumulator, shapes, where.state.base
            shardings, results, donated = (params, sums, arrays, base), (sums, where.everywhere), (1,)
        jitted = jax.jit(function, in_shardings=shardings, out_shardings=results, donate_argnums=donated)
        # The model pins its activations on the current mesh (`models.sharding.constrain`). The rows of NORMS have a
        # forward pass each, which has no rows to pin: the compiler lays it out, from the inputs' shardings.
        with contextlib.nullcontext() if name == NORMS else jax.set_mesh(where.mesh):
            options = _OPTIONS.get(where.mesh.devices.flat[0].platform)
            compiled = jitted.lower(*inputs).compile(compiler_options=options)
        if batch:
            self.shapes.append((name, shapes))
        return compiled

    def _needed(self, name: str, batch: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
        """Returns a program that a step runs now, and counts the seconds until it is compiled."""
        if (ready := self._compiled.get(_key(name, batch or {}))) is not None:
            return ready
        start = time.monotonic()
        try:
            return self.program(name, batch)
        finally:
            self.waited += time.monotonic() - start

    def compile(self, name: str, batch: Mapping[str, Any]) -> None:
        """Compiles scoring, or all programs of a step with the named loss, for micro-batches like `batch`."""
        self.program(name, batch)
        if name not in (SCORE, PROXIMAL, NORMS):
            self.program(APPLY)
            # Ahead of time, so that the first share to arrive does not wait for a compilation.
            if self._helped:
                self.program(ADD)

    def temporary_bytes(self) -> int:
        """Returns the bytes on a device that the largest program needs beside its arguments; 0 if unknown.

        Counts intermediate values, and results that reuse no argument's buffer.
        """
        # A copy, because another thread may add a program meanwhile.
        analyses = [program.memory_analysis() for program in list(self._compiled.values())]
        return max(
            (
                item.temp_size_in_bytes + max(0, item.output_size_in_bytes - item.alias_size_in_bytes)
                for item in analyses
                if item is not None  # some backends do not say
            ),
            default=0,
        )

    def put(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Starts the transfer of a micro-batch's host arrays onto the mesh.

        Every process cuts out the part of its own devices; other rows may be empty. Arrays on the mesh stay there.
        """
        places = {name: self._place(name) for name in arrays}
        if jax.process_count() == 1:
            return jax.device_put(dict(arrays), places)
        return {  # with several processes, device_put would compare the arrays of all of them: a collective
            name: array
            if isinstance(array, jax.Array)
            else jax.make_array_from_callback(array.shape, places[name], array.__getitem__)
            for name, array in arrays.items()
        }

    def rows(self, shape: tuple[int, int]) -> list[list[int]]:
        """Returns the rows that the devices of each process hold of an array [B, T], by process."""
        rows_by_process: list[set[int]] = [set() for _ in range(jax.process_count())]
        for device, (rows, *_) in self._where.rows.devices_indices_map(shape).items():
            rows_by_process[device.process_index].update(range(*rows.indices(shape[0])))
        return [sorted(process_rows) for process_rows in rows_by_process]

    def _place(self, name: str) -> jax.sharding.Sharding:
        """Returns the sharding of an array of a micro-batch. Lengths have no tokens that `context` could split."""
        return self._where.everywhere if name == packing.LENGTHS else self._where.rows

    def grad_step(
        self, loss: str, params: Any, accumulator: state_lib.Accumulator, batch: Batch, base: Any = None
    ) -> tuple[state_lib.Accumulator, Report]:
        """Runs `grad_step` of the named loss; consumes the given accumulator."""
        return self._needed(loss, batch)(params, accumulator, batch, base)

    def apply_step(
        self, state: state_lib.TrainState, accumulator: state_lib.Accumulator, learning_rate: float, steps: int = 1
    ) -> tuple[state_lib.TrainState, state_lib.Accumulator, Report]:
        """Runs `apply_step`; consumes the given state, except for its frozen weights, and the accumulator."""
        trained = dataclasses.replace(state, base=None)
        program = self._needed(APPLY)
        advanced, zeroed, report = program(trained, accumulator, np.float32(learning_rate), np.int32(steps))
        return dataclasses.replace(advanced, base=state.base), zeroed, report

    def add(self, accumulator: state_lib.Accumulator, received: Received) -> state_lib.Accumulator:
        """Adds sums that were computed elsewhere; consumes the given accumulator.

        Each process fills only the shards of its own devices, so all processes must hold the same sums.
        """
        leaves, structure = jax.tree.flatten(accumulator)
        sharded_sums = [
            jax.make_array_from_callback(array.shape, leaf.sharding, array.__getitem__)
            for array, leaf in zip(received.arrays, leaves, strict=True)
        ]
        return self._needed(ADD)(accumulator, jax.tree.unflatten(structure, sharded_sums))

    def score(self, params: Any, batch: Batch) -> jax.Array:
        """Returns the reference model's log-probability of each target, float32 [B, T]."""
        return self._needed(SCORE, batch)(params, batch)

    def proximal(self, params: Any, batch: Batch, base: Any = None) -> jax.Array:
        """Returns the policy's log-probability of each target, float32 [B, T]."""
        return self._needed(PROXIMAL, batch)(params, batch, base)

    def norms(self, params: Any, batch: Batch, base: Any = None) -> jax.Array:
        """Returns squared norm and log-weight of each row's score, float32 [2, B] (`score_norms`)."""
        return self._needed(NORMS, batch)(params, batch, base)


def _key(name: str, batch: Mapping[str, Any]) -> Key:
    # XLA programs have fixed shapes, so each name and shape needs its own program.
    return name, *sorted((field, array.shape) for field, array in batch.items())
