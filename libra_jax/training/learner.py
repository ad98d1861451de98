"""One process's learner: the host loop of a step and its updates.

Thread-safety: none; one thread makes and uses a learner (JAX's mesh contexts are thread-local).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import batch_statistics, objective
from libra_jax.data import packing, world
from libra_jax.models import config as model_config
from libra_jax.models import sharding
from libra_jax.models.adapters import lora
from libra_jax.training import model_state, step, updates
from libra_jax.training import state as state_lib

AHEAD = 4
"""Maximum micro-batches that the host has queued on the devices beyond the last finished one. Enough to keep the
devices busy; few enough that a step can be aborted quickly."""

Rest = Callable[[float], Iterable["range | step.Received"]]
"""Takes the seconds that this learner needed for its own micro-batches. Yields the rest of the first update: either
micro-batches to compute here after all, or their sums."""


class Learner(model_state.ModelState):
    """Takes steps on packed micro-batches. Without a state, it only sums gradients for given parameters (`sums`).

    Attributes:
      accumulator: the zeroed sums on the devices, kept from step to step; None before the first step,
        after a failed one, and after `release`.
      abort: event that any thread may set during a step of a single-process trainer. It aborts the step between two
        micro-batches of the first update, and has no effect after it. `update`, `train` and `accumulate` clear it.
    """

    def __init__(
        self,
        config: config_lib.RunConfig,
        model: model_config.TransformerConfig,
        devices: Sequence[jax.Device],
        *,
        first_update_only: bool = False,
        critic: bool = False,
    ) -> None:
        """See `model_state.ModelState`."""
        super().__init__(config, model, devices, first_update_only=first_update_only, critic=critic)
        self._statistics = None if critic else batch_statistics.find(config.algorithm)
        # Set by the actor's event loop while another thread takes the step.
        self.abort = threading.Event()
        self._taking = 0  # the number of the present step's update, from 0
        self.accumulator: state_lib.Accumulator | None = None
        self._begun: tuple[state_lib.Accumulator, list[step.Report]] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether `accumulate` has summed micro-batches of the next update."""
        return self._begun is not None

    def on(self, trainer: config_lib.TrainerConfig, devices: Sequence[jax.Device]) -> Learner:
        """Returns a learner like this one on another mesh, without programs or a state.

        Raises:
          ConfigError: too few devices, or the model is not divisible over the mesh.
        """
        config = dataclasses.replace(self.config, trainer=trainer)
        return Learner(config, self.model, devices)

    def release(self) -> tuple[list[jax.Array], Any]:
        """Gives up the state: returns its leaves and their structure, and frees the accumulator."""
        leaves, structure = jax.tree.flatten(self.train_state())
        self.state = self.accumulator = self._begun = None
        return leaves, structure

    def sums(
        self,
        loss: str,
        params: Any,
        packed: packing.Packed,
        extras: Sequence[Mapping[str, Any]],
        indices: Iterable[int],
    ) -> tuple[state_lib.Accumulator, step.Report]:
        """Sums loss and gradients over some micro-batches; returns the sums and their combined report.

        Args:
          loss: `step.POLICY` or `SUPERVISED`.
          params: all parameters of the policy on this learner's mesh, as `policy` nests them.
          extras: further [B, T] arrays of each micro-batch.
          indices: micro-batches to sum over; an empty iterable gives zeros.

        Raises:
          LibraError: the devices ran out of memory.
        """
        parts: list[step.Report] = []
        trained, base = (params, None) if self.layout.state.base is None else lora.split(params)
        with world.explaining():
            accumulator = self._accumulate(loss, trained, packed, extras, indices, self.programs.zeros(), parts, base)
            return accumulator, updates.combined(jax.device_get(parts))

    def update(
        self,
        loss: str,
        packed: packing.Packed,
        learning_rate: float,
        extras: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, float]:
        """Takes a step of one update over all micro-batches, and returns its metrics.

        Args:
          loss: `step.POLICY` or `SUPERVISED`.
          extras: further arrays of each micro-batch (`batch.Prepared`).

        Raises:
          LibraError: the devices ran out of memory.
          PeerLost: another process of the trainer is gone.
          StepAborted: `abort` was set; the state is unchanged.
        """
        extras = extras or [{} for _ in packed.micro_batches]
        indices = range(len(packed.micro_batches))
        try:
            return self._update(loss, packed, learning_rate, extras, indices).metrics()
        finally:
            self.abort.clear()

    def train(
        self,
        packed: packing.Packed,
        learning_rate: float,
        extras: Sequence[Mapping[str, Any]],
        minibatches: Sequence[range],
        core_range: range | None = None,
        rest: Rest | None = None,
    ) -> dict[str, float]:
        """Takes a step of the policy or the critic: an update on each mini-batch, `algorithm.epochs` times.

        Without `rest`, the host waits for the devices only at the end of each update.

        Args:
          extras: further arrays of each micro-batch (`batch.Prepared`).
          minibatches: micro-batches of each mini-batch.
          core_range: micro-batches of the first update to compute here first; default: all.
          rest: yields the sums or indices of the first update's other micro-batches, in the same order in all
            processes. If it raises, the state is unchanged.

        Returns:
          The step's metrics. Means and maxima are over all updates, and `skipped` is its mean over updates. `loss` and
          `grad_norm` are means over the updates with trained tokens. With several updates, `update/<number>/<metric>`
          has `updates.OF_AN_UPDATE` of each.

        Raises:
          LibraError: the devices ran out of memory.
          PeerLost: another process of the trainer is gone.
          StepAborted: `abort` was set before the first update; the state is unchanged.
        """
        parts = [part for _ in range(self.config.algorithm.epochs) for part in minibatches]
        step_updates: list[updates.Update] = []
        try:
            if self.inputs.scores_proximal:
                # The log-probabilities of the policy as it is now, on the mesh.
                scores = self.scores(packed, extras, range(len(packed.micro_batches)))
                extras = [{**extra, "proximal": score} for extra, score in zip(extras, scores, strict=True)]
            for number, part in enumerate(parts):
                self._taking = number
                indices, remainder = (part, None) if number or core_range is None else (core_range, rest)
                last = number == len(parts) - 1
                if self._statistics is not None:
                    extras = self._with_statistics(packed, extras, part, number)
                step_updates.append(
                    self._update(self.inputs.loss, packed, learning_rate, extras, indices, remainder, steps=int(last))
                )
        finally:
            self._taking = 0
            self.abort.clear()
        return updates.step_metrics(step_updates, keeps_first=self.inputs.scores_proximal)

    def accumulate(self, packed: packing.Packed, extras: Sequence[Mapping[str, Any]], *, in_step: bool = False) -> None:
        """Sums micro-batches of the next update under the present parameters; `train` goes on from the sums.

        Args:
          packed: a part of the global batch.
          extras: further arrays of each micro-batch (`batch.Prepared`).
          in_step: `train` follows, for which an abort that comes too late here is left.

        Raises:
          LibraError: the devices ran out of memory.
          PeerLost: another process of the trainer is gone.
          StepAborted: `abort` was set; the sums are dropped.
        """
        state, indices = self.train_state(), range(len(packed.micro_batches))
        accumulator, parts = self._begun or (self.accumulator or self.programs.zeros(), [])
        self.accumulator = self._begun = None  # the first program consumes the sums
        try:
            with world.explaining():
                accumulator = self._accumulate(
                    self.inputs.loss, state.params, packed, extras, indices, accumulator, parts, state.base
                )
                # The caller is told when the devices are free again.
                jax.block_until_ready(accumulator)
        except BaseException:
            in_step = False
            raise
        finally:
            if not in_step:
                self.abort.clear()
        self._begun = accumulator, parts

    def forget(self) -> None:
        """Drops the sums of `accumulate`."""
        self._begun = None

    def stay(self) -> dict[str, float]:
        """Advances the step number without an update, as in the critic's warm-up. Returns the step's metrics.

        The optimizer's state stays as it is, too: an update of zero would count as one in Adam's bias correction.
        """
        state = self.train_state()
        self.state = dataclasses.replace(state, step=_following(state.step))
        self.abort.clear()
        return dict.fromkeys(("loss", "grad_norm", "skipped", "learning_rate"), 0.0)

    def _with_statistics(
        self, packed: packing.Packed, extras: Sequence[Mapping[str, Any]], part: range, number: int
    ) -> Sequence[Mapping[str, Any]]:
        """Adds the statistics of an update's trained tokens to the extras of its micro-batches."""
        assert self._statistics is not None
        items = [packed.micro_batches[index] for index in part]
        masks = [item.mask for item in items]

        # Draws and ties go by the order of tokens, so it is the batch's: that of a layout would change the loss.
        order_K = packed.batch_order(part)

        def trained(arrays: Iterable[Any]) -> np.ndarray:
            of_layout = [np.asarray(array)[mask] for array, mask in zip(arrays, masks, strict=True)]
            return np.concatenate(of_layout)[order_K]

        with world.explaining(), sharding.whole(self.scores(packed, extras, part)) as full_arrays:
            log_probs_K = trained(full_arrays)
        if self.inputs.scores_proximal:
            with world.explaining(), sharding.whole([extras[index]["proximal"] for index in part]) as full_arrays:
                anchors_K = trained(full_arrays)
        elif self.config.algorithm.objective == "decoupled":
            anchors_K = log_probs_K  # the batch's only update: the policy is its own proximal policy
        else:
            anchors_K = trained(item.behaviour for item in items)
        tokens = batch_statistics.BatchTokens(
            log_probs_K, log_probs_K - anchors_K, trained(extras[index]["advantages"] for index in part)
        )
        # The same in every process, and after a restart.
        rng = np.random.default_rng([self.config.seed, int(self.train_state().step), number])
        layout_K = np.argsort(order_K)
        statistics = {
            name: value[layout_K] if isinstance(value, np.ndarray) else value
            for name, value in self._statistics(tokens, rng).items()
        }
        ends, added = np.cumsum([int(mask.sum()) for mask in masks]), list(extras)
        for index, mask, end in zip(part, masks, ends, strict=True):
            arrays = {name: np.zeros(mask.shape, np.float32) for name in statistics}
            for name, value in statistics.items():
                arrays[name][mask] = value[end - int(mask.sum()) : end] if isinstance(value, np.ndarray) else value
            added[index] = {**extras[index], **{batch_statistics.PREFIX + name: a for name, a in arrays.items()}}
        return added

    def _update(
        self,
        loss: str,
        packed: packing.Packed,
        learning_rate: float,
        extras: Sequence[Mapping[str, Any]],
        indices: range,
        rest: Rest | None = None,
        *,
        steps: int = 1,
    ) -> updates.Update:
        """Takes one update on the given micro-batches and `rest`. The step number advances by `steps`."""
        state = self.train_state()
        parts: list[step.Report]
        accumulator, parts = self._begun or (self.accumulator or self.programs.zeros(), [])
        # The first program consumes them. The accumulator is kept again only if the update ends well.
        self.accumulator = self._begun = None
        start = time.monotonic()
        with world.explaining():
            accumulator = self._accumulate(loss, state.params, packed, extras, indices, accumulator, parts, state.base)
            if rest is not None:
                # The seconds passed to `rest` set its deadline, so the core's own work must really be done.
                jax.block_until_ready(accumulator)
                for item in rest(time.monotonic() - start):
                    if isinstance(item, step.Received):
                        accumulator = self.programs.add(accumulator, item)
                        parts.append(item.report)
                    else:
                        accumulator = self._accumulate(
                            loss, state.params, packed, extras, item, accumulator, parts, state.base
                        )
            learning_rate *= self._rate_scale(loss, parts)
            self.state, accumulator, report = self.programs.apply_step(state, accumulator, learning_rate, steps)
            # Reports come to the host once per update, because every transfer waits for the devices.
            report, parts = jax.device_get((report, parts))
        self.accumulator = accumulator
        applied = {name: float(value) for name, value in report.items()}
        return updates.Update(applied | {"learning_rate": learning_rate}, updates.combined(parts))

    def _rate_scale(self, loss: str, parts: Sequence[step.Report]) -> float:
        """Returns the factor of the learning rate that `algorithm.ess_scaling` sets for an update (VCPO, eq. 6)."""
        rule = self.config.algorithm.ess_scaling
        if loss != step.POLICY or rule == "off":
            return 1.0
        share = objective.effective_share(updates.combined(jax.device_get(list(parts)))["metrics"])
        # Nothing trained, or weights that are not finite: the update changes nothing, or is skipped.
        if share is None or not np.isfinite(share):
            return 1.0
        return share**0.5 if rule == "sqrt" else share

    def _accumulate(
        self,
        loss: str,
        params: Any,
        packed: packing.Packed,
        extras: Sequence[Mapping[str, Any]],
        indices: Iterable[int],
        accumulator: state_lib.Accumulator,
        parts: list[step.Report],
        base: Any,
    ) -> state_lib.Accumulator:
        """Adds micro-batches to an accumulator, which is consumed, and appends their reports to `parts`."""
        for index in indices:
            self.expect_trees(packed.micro_batches[index])
            # Waiting for an older report bounds the queue at AHEAD without draining it.
            if len(parts) >= AHEAD:
                jax.block_until_ready(parts[-AHEAD])
            # Between two updates the state is no longer that of before the step, so the step goes on.
            if self.abort.is_set() and not self._taking:
                raise protocols.StepAborted(f"the step was aborted after {len(parts)} of its micro-batches.")
            arrays = self.programs.put(self.inputs.arrays(packed, index, extras[index]))
            accumulator, part = self.programs.grad_step(loss, params, accumulator, arrays, base)
            parts.append(part)
        return accumulator


_following = jax.jit(lambda step: step + 1)
