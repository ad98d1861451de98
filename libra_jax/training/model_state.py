"""One process's model: its train state on the mesh, its compiled programs, and its scores of a batch.

Thread-safety: none; one thread makes and uses it (JAX's mesh contexts are thread-local).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import estimators
from libra_jax.data import packing, world
from libra_jax.data import sequences as sequences_lib
from libra_jax.models import config as model_config
from libra_jax.models import transformer
from libra_jax.models.adapters import lora
from libra_jax.models.attention import attention
from libra_jax.training import background, inputs, losses, optimizer, score_norms, step
from libra_jax.training import critic as critic_lib
from libra_jax.training import state as state_lib


class ModelState:
    """A model that is trained, without the steps (`learner.Learner`).

    Attributes:
      config: the run's configuration, with this learner's mesh.
      model: shape of the model, with the adapter that this learner trains.
      inputs: the arrays that the programs take, and which models score a batch.
      layout: shapes and shardings of the state.
      state: the train state; each update consumes it and sets a new state.
      programs: the compiled programs.
      ahead: compiles the programs of further shapes on another thread.
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
        self.model = model = critic_lib.shape(model) if critic else model
        self._transform = optimizer.transform(config.optimizer)
        mesh = state_lib.make_mesh(config.trainer, devices)
        teacher = None if critic else inputs.teacher(config, model)
        target = attention.target(mesh.devices.flat[0])
        self.inputs = inputs.Inputs(config, model, target, critic, first_update_only, teacher)
        # Before any program is traced: the precision becomes a part of the program.
        losses.keep_float32(mesh.devices.flat[0].platform, config.model.compute_dtype)
        self.layout = state_lib.layout(
            model,
            mesh,
            self._transform,
            dtype=config.model.param_dtype,
            # The frozen weights under an adapter are the reference model: it needs no copy.
            reference=config.model.compute_dtype
            if self.inputs.refers and (model.adapter is None or teacher is not None)
            else None,
            base=None if model.adapter is None else config.model.compute_dtype,
            accumulation=config.trainer.accumulation_dtype,
            offload=config.optimizer.offload,
            critic=critic,
            teacher=teacher,
        )
        options = transformer.ComputeOptions.from_config(config.model, packed=config.trainer.pack, target=target)
        scorer = losses.Scorer(model, options, config.model.logits_chunk)
        referred = teacher or dataclasses.replace(model, adapter=None)
        reference = losses.Scorer(referred, options, config.model.logits_chunk)
        policy = functools.partial(
            losses.policy,
            scorer=scorer,
            algorithm=config.algorithm,
            temperature=config.rollout.temperature,
            packed=config.trainer.pack,
        )
        temperature = config.rollout.temperature
        values = critic_lib.Values(model, options)
        loss_functions: dict[str, step.Loss] = {
            step.POLICY: policy,
            step.SUPERVISED: functools.partial(losses.supervised, scorer=scorer),
            step.VALUE: functools.partial(critic_lib.loss, values=values, clip=config.critic.clip),
        }
        self.programs = step.Programs(
            self.layout,
            self._transform,
            losses=loss_functions,
            score=lambda params, batch: reference(params, batch, temperature=temperature)[0],
            proximal=values if critic else lambda params, batch: scorer(params, batch, temperature=temperature)[0],
            norms=score_norms.ScoreNorms(
                scorer,
                temperature,
                adapter=model.adapter is not None,
                shards=config.trainer.data * config.trainer.fsdp,
            ),
            helped=config.elastic.hybrid > 0,
        )
        self._met_trees = config.trainer.share_prompt
        self._shapes = shapes = self.inputs.shapes() + (self.inputs.shapes(trees=True) if self._met_trees else [])
        # Without a reference to this learner: a cycle would keep its state until the garbage collector runs.
        self.ahead = background.Compilation(self.programs, lambda: shapes, "compile ahead of the steps", _tell)
        # By dtype. A function that is jitted again is compiled again.
        self._merges: dict[str, Callable[[Any, Any], Any]] = {}
        self.state: state_lib.TrainState | None = None

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

    def begin(self, params: Any = None, base: Any = None, seed: int | None = None) -> None:
        """Starts a fresh state, optimizer and reference model.

        Args:
          params: parameters to train; None takes the present ones, or draws a fresh adapter if `base` is given.
          base: frozen weights under an adapter; None takes the present ones.
          seed: seed of the state's random key and of a fresh adapter; None takes the run's.
        """
        seed = self.config.seed if seed is None else seed
        if params is None:
            params = self.params if base is None else state_lib.random_adapter(self.layout, seed)
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
        self.state = state_lib.begin(params, self.layout, self._transform, seed, base, reference)

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


def _tell(error: Exception) -> None:
    """Logs the error that ended the compilation ahead of the steps."""
    logging.getLogger(__name__).warning(
        "A program cannot be compiled ahead of the step that needs it (%s). That step compiles it, and others that are "
        "still missing compile in their steps.",
        str(error).strip().partition("\n")[0][:300],
    )
