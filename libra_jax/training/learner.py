"""One process's learner: the train state on its mesh, and the host loop that takes a step.

Thread-safety: none; one thread makes and uses a learner (JAX's mesh contexts are thread-local).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.models import transformer
from libra_jax.training import losses, optimizer, packing, step, world
from libra_jax.training import mesh as mesh_lib
from libra_jax.training import state as state_lib

POLICY = "policy"
SUPERVISED = "supervised"


class Learner:
    """Takes steps on packed micro-batches.

    Attributes:
      config: the run's, with this learner's mesh.
      layout: shapes and shardings of the state.
      state: the train state; replaced by each update, the old one consumed.
      programs: the compiled programs.
    """

    def __init__(
        self,
        config: config_lib.RunConfig,
        model: model_config.TransformerConfig,
        devices: Sequence[jax.Device],
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Builds mesh and programs; the state comes with `begin` or by assignment.

        Args:
          config: the run's.
          model: its shape.
          devices: the mesh takes the first of them.
          compiler_options: XLA's own, for every program.

        Raises:
          ConfigError: too few devices, or the model does not divide over the mesh.
        """
        self.config = config
        self._model = model
        self._options = compiler_options
        self._transform = optimizer.transform(config.optimizer)
        mesh = mesh_lib.make(config.trainer, devices)
        self.layout = state_lib.layout(
            model,
            mesh,
            self._transform,
            dtype=config.model.param_dtype,
            reference=config.algorithm.kl_coefficient > 0,
        )
        options = transformer.ComputeOptions.from_config(config.model)
        scorer = losses.Scorer(model, options, config.model.logits_chunk)
        policy = functools.partial(
            losses.policy,
            scorer=scorer,
            algorithm=config.algorithm,
            temperature=config.rollout.temperature,
            packed=config.trainer.pack,
        )
        self.programs = step.Programs(
            self.layout,
            self._transform,
            losses={POLICY: policy, SUPERVISED: functools.partial(losses.supervised, scorer=scorer)},
            score=functools.partial(losses.score, scorer=scorer, temperature=config.rollout.temperature),
            compiler_options=compiler_options,
        )
        self.state: state_lib.TrainState | None = None
        self._accumulator: state_lib.Accumulator | None = None

    @property
    def params(self) -> Any:
        """The policy's parameters."""
        return self._begun().params

    def begin(self, params: Any) -> None:
        """Starts a fresh state, its optimizer and reference model included, around `params`."""
        self.state = state_lib.begin(params, self.layout, self._transform, self.config.seed)

    def restart(self) -> None:
        """Starts optimizer, reference model and step number anew around the present parameters."""
        self.begin(self.params)

    def on(self, trainer: config_lib.TrainerConfig, devices: Sequence[jax.Device]) -> Learner:
        """A learner like this one on another mesh, without programs or a state.

        Raises:
          ConfigError: too few devices, or the model does not divide over the mesh.
        """
        config = dataclasses.replace(self.config, trainer=trainer)
        return Learner(config, self._model, devices, compiler_options=self._options)

    def release(self) -> tuple[list[jax.Array], Any]:
        """The state's leaves, which this learner no longer holds, and their structure; its accumulator is freed."""
        leaves, structure = jax.tree.flatten(self._begun())
        self.state = self._accumulator = None
        return leaves, structure

    def compile(self, loss: str) -> None:
        """Compiles a step over the shortest rows ahead of its first use."""
        config = self.config.trainer
        shape = (config.rows_per_micro_batch, config.row_tokens)
        batch: dict[str, np.ndarray] = dict(vars(packing.empty(shape)))
        if loss == POLICY:
            batch["advantages"] = np.zeros(shape, np.float32)
            if self.layout.state.reference is not None:
                batch["reference"] = np.zeros(shape, np.float32)
            if len(self.config.rollout.tensor_parallel) > 1:
                batch["moved"] = np.zeros(shape, np.float32)
        self.programs.compile(loss, batch)

    def reference_log_probs(self, packed: packing.Packed) -> list[jax.Array]:
        """The frozen reference model's log-probabilities, on the mesh: one [B, T] a micro-batch."""
        reference = self._begun().reference
        return [self.programs.score(reference, self.programs.put(vars(item))) for item in packed.micro_batches]

    def update(
        self,
        loss: str,
        packed: packing.Packed,
        learning_rate: float,
        extras: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, float]:
        """One step over all micro-batches; host and devices meet once, at its end.

        Args:
          loss: `POLICY` or `SUPERVISED`.
          packed: the global batch.
          learning_rate: of this step.
          extras: further [B, T] arrays of each micro-batch: `advantages`, `reference`, `moved`.

        Returns:
          The step's metrics; a mean or a maximum over nothing is left out.

        Raises:
          LibraError: the devices ran out of memory.
          PeerLost: another process of the trainer is gone.
        """
        accumulator = self._accumulator or state_lib.zeros(self.layout.accumulator)
        self._accumulator = None  # consumed by the first program; kept again only when the step has ended well
        state = self._begun()
        parts: list[step.Report] = []
        try:
            for index, item in enumerate(packed.micro_batches):
                arrays = self.programs.put({**vars(item), **(extras[index] if extras else {})})
                accumulator, part = self.programs.grad_step(loss, state.params, accumulator, arrays)
                parts.append(part)
            self.state, accumulator, report = self.programs.apply_step(state, accumulator, learning_rate)
            report, parts = jax.device_get((report, parts))
        except jax.errors.JaxRuntimeError as error:
            if world.is_loss(error):
                raise world.lost(error) from error
            raise protocols.LibraError(_explain(error)) from error
        self._accumulator = accumulator
        return {**{name: float(value) for name, value in report.items()}, **_merge(parts)}

    def _begun(self) -> state_lib.TrainState:
        if self.state is None:
            raise protocols.LibraError("the trainer holds no state yet: call start first.")
        return self.state


def _merge(parts: Sequence[step.Report]) -> dict[str, float]:
    """Metrics of the step from its micro-batches' sums and maxima."""
    merged: dict[str, float] = {}
    for name in parts[0]["metrics"]:
        total = sum(float(part["metrics"][name][0]) for part in parts)
        count = sum(float(part["metrics"][name][1]) for part in parts)
        if count > 0:
            merged[name] = total / count
    for name in parts[0]["maxima"]:
        largest = float(np.max([part["maxima"][name] for part in parts]))
        if largest != 0:  # all are maxima of positive numbers: there were none to compare
            merged[name] = largest
    return merged


def _explain(error: Exception) -> str:
    text = str(error).strip().splitlines()[0][:300]
    if "RESOURCE_EXHAUSTED" in text:
        return (
            "the trainer's devices ran out of memory; lower trainer.rows_per_micro_batch or model.logits_chunk, set "
            f"model.remat, or raise trainer.fsdp ({text})."
        )
    return f"a training program failed on the devices ({text})."
