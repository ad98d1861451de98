"""One process's learner: its train state, and the host loop of a step and its updates.

Thread-safety: none; one thread makes and uses a learner (JAX's mesh contexts are thread-local).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import batch_statistics, estimators
from libra_jax.data import packing, world
from libra_jax.data import sequences as sequences_lib
from libra_jax.models import config as model_config
from libra_jax.models import sharding
from libra_jax.models.adapters import lora
from libra_jax.training import background, model_programs, step, token_statistics, updates
from libra_jax.training import state as state_lib

AHEAD = 4
"""Maximum micro-batches that the host has queued on the devices beyond the last finished one. Enough to keep the
devices busy; few enough that a step can be aborted quickly."""

Rest = Callable[[float], Iterable["range | step.Received"]]
"""Takes the seconds that this learner needed for its own micro-batches. Yields the rest of the first update: either
micro-batches to compute here after all, or their sums."""


class Learner:
    """A model that is trained: its train state on the mesh, its programs, its steps and its scores of a batch.

    Takes steps on packed micro-batches. Without a state, it only sums gradients for given parameters (`sums`).

    Attributes:
      config: the run's configuration, with this learner's mesh.
      model: shape of the model, with the adapter that this learner trains.
      inputs: the arrays that the programs take, and which models score a batch.
      layout: shapes and shardings of the state.
      state: the train state; each update consumes it and sets a new state.
      programs: the compiled programs.
      ahead: compiles the programs of further shapes on another thread.
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
        """Builds the mesh and the programs. `begin` or an assignment sets the state.

        Args:
          devices: the mesh takes the first of these devices.
          first_update_only: the learner only sums gradients for a batch's first update, in which the policy is its own
            proximal policy.
          critic: the learner trains the critic of PPO (`critic`), and scores values.

        Raises:
          ConfigError: too few devices, or the model is not divisible over the mesh.
        """
        self.config = config
        self.model, self.inputs, self.layout, self._transform, self.programs = model_programs.build(
            config, model, devices, first_update_only=first_update_only, critic=critic
        )
        self._statistics = None if critic else batch_statistics.find(config.algorithm)
        self._met_trees = config.trainer.share_prompt
        self._shapes = shapes = self.inputs.shapes() + (self.inputs.shapes(trees=True) if self._met_trees else [])
        # Without a reference to this learner: a cycle would keep its state until the garbage collector runs.
        self.ahead = background.Compilation(self.programs, lambda: shapes, "compile ahead of the steps", _log_failure)
        # By dtype. A function that is jitted again is compiled again.
        self._merges: dict[str, Callable[[Any, Any], Any]] = {}
        self.state: state_lib.TrainState | None = None
        self.accumulator: state_lib.Accumulator | None = None
        # Set by the actor's event loop while another thread takes the step.
        self.abort = threading.Event()
        self._taking = 0  # the number of the present step's update, from 0
        self._begun: tuple[state_lib.Accumulator, list[step.Report]] | None = None

    @property
    def params(self) -> Any:
        """The trained parameters: of the adapter if there is one, else of the whole policy."""
        return self.train_state().params

    @property
    def policy(self) -> Any:
        """All parameters of the policy: with an adapter, the frozen weights and its leaves."""
        state = self.train_state()
        return state.params if state.base is None else lora.join(state.base, state.params)

    def merged(self, dtype: str) -> Any:
        """Returns the policy's weights without an adapter, which is added to them, in a dtype.

        With an adapter this is a second copy of the weights on the devices. Weights of norms keep their dtype.
        """
        state = self.train_state()
        if state.base is None:
            return state.params
        if dtype not in self._merges:
            add = functools.partial(lora.merged, config=self.model, dtype=dtype)
            self._merges[dtype] = jax.jit(add, out_shardings=state_lib.shardings_of(self.layout.state.base))
        return self._merges[dtype](state.base, state.params)

    def frozen(self, dtype: str) -> Any:
        """Returns a copy of the frozen weights under the adapter, in a dtype."""
        cast = functools.partial(jax.tree.map, lambda leaf: leaf.astype(dtype))
        return jax.jit(cast, out_shardings=state_lib.shardings_of(self.layout.state.base))(self.train_state().base)

    def train_state(self) -> state_lib.TrainState:
        """Returns `state`. Raises LibraError if there is none yet."""
        if self.state is None:
            raise protocols.LibraError("the trainer holds no state yet: call start first.")
        return self.state

    def begin(self, params: Any = None, base: Any = None) -> None:
        """Starts a fresh state, optimizer and reference model.

        Args:
          params: parameters to train; None takes the present ones, or draws a fresh adapter if `base` is given.
          base: frozen weights under an adapter; None takes the present ones.
        """
        if params is None:
            params = self.params if base is None else state_lib.random_adapter(self.layout, self.config.seed)
        if base is None and self.layout.state.base is not None:
            base = self.train_state().base
        reference = None
        if self.inputs.teacher is not None:
            places = self.layout.state.reference
            reference = self.state and self.state.reference
            if reference is None:
                # Imported here, because a learner without a teacher needs no library of model files.
                from libra_jax.models.hf import hf

                path = self.config.algorithm.teacher
                reference = hf.load(path, self.inputs.teacher, places, state_lib.shardings_of(places))
        self.state = state_lib.begin(params, self.layout, self._transform, self.config.seed, base, reference)

    def compile(
        self, loss: str, row_tokens: int | None = None, max_sequences: int | None = None, *, sums_only: bool = False
    ) -> None:
        """Compiles the programs of a step before its first use.

        Args:
          loss: `step.POLICY`, `SUPERVISED` or `VALUE`.
          row_tokens: length of the rows; None for the shortest.
          max_sequences: sequences that a row may hold; None for the fewest of `Inputs.row_shapes`.
          sums_only: compile only what `sums` needs.
        """
        batch = self.inputs.empty(loss, row_tokens, max_sequences)
        if sums_only:
            self.programs.program(loss, batch)
        else:
            self.programs.compile(loss, batch)

    def expect_trees(self, micro_batch: packing.MicroBatch) -> None:
        """Adds the programs of trees to those that `ahead` compiles, from the first micro-batch of trees on."""
        if not self._met_trees and isinstance(micro_batch, packing.TreeMicroBatch):
            self._met_trees = True
            self._shapes += self.inputs.shapes(trees=True)

    def reference_log_probs(self, packed: packing.Packed, extras: Sequence[Mapping[str, Any]]) -> list[jax.Array]:
        """Returns the frozen reference model's log-probabilities on the mesh: one [B, T] array per micro-batch.

        Args:
          extras: further arrays of each micro-batch. With `routing` and `routed`, the reference takes the experts that
            the policy takes: a mixture that takes others is another model.

        Raises:
          LibraError: the devices ran out of memory.
          PeerLost: another process of the trainer is gone.
        """
        state = self.train_state()
        reference = state.base if state.reference is None else state.reference
        indices = range(len(packed.micro_batches))
        if self.inputs.teacher is not None:
            extras = [{} for _ in indices]  # its routers choose for themselves
        with world.explaining():
            return [self.programs.score(reference, arrays) for arrays in self._scored(packed, extras, indices)]

    def score_norms(self, examples: Sequence[sequences_lib.Example]) -> estimators.Scores:
        """Returns the scores of trajectories under the policy as it is now; 0 for those without a trained token.

        Takes a backward pass over each trajectory, in a row of its own.

        Raises:
          LibraError: the devices ran out of memory.
          PeerLost: another process of the trainer is gone.
        """
        state, scores_2xN = self.train_state(), np.zeros((2, len(examples)), np.float32)
        packed = packing.pack(examples, dataclasses.replace(self.config.trainer, pack=False, share_prompt=False))
        extras: Sequence[Mapping[str, Any]] = [{} for _ in packed.micro_batches]
        if self.config.algorithm.routing_replay == "rollout":
            extras = packed.routing(examples, self.model.routing_width, np.dtype(self.model.routing_dtype))
        with world.explaining():
            device_batches = (
                self.programs.put({**vars(item), **extra})
                for item, extra in zip(packed.micro_batches, extras, strict=True)
            )
            numbers = jax.device_get(
                [self.programs.norms(state.params, arrays, state.base) for arrays in device_batches]
            )
        for place in packed.places:
            scores_2xN[:, place.example] = numbers[place.micro_batch][:, place.row]
        return estimators.Scores(np.sqrt(scores_2xN[0]), scores_2xN[1])

    def _scored(
        self, packed: packing.Packed, extras: Sequence[Mapping[str, Any]], indices: Iterable[int]
    ) -> Iterator[dict[str, jax.Array]]:
        """Yields the arrays on the mesh from which a program scores each micro-batch."""
        for index in indices:
            routing = {name: extras[index][name] for name in ("routing", "routed") if name in extras[index]}
            yield self.programs.put(self.inputs.arrays(packed, index, routing))

    def values(self, packed: packing.Packed, extras: Sequence[Mapping[str, Any]] = ()) -> list[jax.Array]:
        """Returns the critic's values on the mesh: one [B, T] array per micro-batch. It takes none of the `extras`."""
        del extras
        return self.scores(packed, [{} for _ in packed.micro_batches], range(len(packed.micro_batches)))

    def scores(self, packed: packing.Packed, extras: Sequence[Mapping[str, Any]], indices: range) -> list[jax.Array]:
        """Returns the log-probabilities of the policy as it is now, on the mesh: one [B, T] array a micro-batch."""
        state, device_batches = self.train_state(), self._scored(packed, extras, indices)
        with world.explaining():
            return [self.programs.proximal(state.params, arrays, state.base) for arrays in device_batches]

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
        rng = np.random.default_rng([self.config.seed, int(self.train_state().step), number])
        on_mesh = [extras[index]["proximal"] for index in part] if self.inputs.scores_proximal else []
        with world.explaining(), sharding.whole([*self.scores(packed, extras, part), *on_mesh]) as whole_arrays:
            arrays = [np.asarray(array) for array in whole_arrays]
            log_probs, anchors = arrays[: len(part)], arrays[len(part) :] or None
            # Decoupled with one update a batch: the policy is its own proximal policy.
            if anchors is None and self.config.algorithm.objective != "decoupled":
                anchors = [packed.micro_batches[index].behaviour for index in part]
            return token_statistics.added(self._statistics, packed, extras, part, log_probs, anchors, rng)

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
            if loss == step.POLICY:
                learning_rate *= updates.rate_scale(self.config.algorithm.ess_scaling, parts)
            self.state, accumulator, report = self.programs.apply_step(state, accumulator, learning_rate, steps)
            # Reports come to the host once per update, because every transfer waits for the devices.
            report, parts = jax.device_get((report, parts))
        self.accumulator = accumulator
        applied = {name: float(value) for name, value in report.items()}
        return updates.Update(applied | {"learning_rate": learning_rate}, updates.combined(parts))

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


def _log_failure(error: Exception) -> None:
    """Logs the error that ended the compilation ahead of the steps."""
    logging.getLogger(__name__).warning(
        "A program cannot be compiled ahead of the step that needs it (%s). That step compiles it, and others that are "
        "still missing compile in their steps.",
        str(error).strip().partition("\n")[0][:300],
    )
