"""The learners and stores of a started trainer: how training begins, and is saved, restored and exported.

Thread-safety: none; the trainer's one thread calls.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from dataclasses import dataclass
from typing import Any

import jax

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.models.adapters import adapters, peft
from libra_jax.models.hf import hf
from libra_jax.training import base as base_lib
from libra_jax.training import checkpoints, program_cache
from libra_jax.training import critic as critic_lib
from libra_jax.training import learner as learner_lib
from libra_jax.training import state as state_lib
from libra_jax.utils import checksums, turns
from libra_jax.weights import create as weights_create

ADAPTER = "adapter"
"""Folder of the adapter in an exported policy. transformers looks for an adapter beside config.json only."""

BASE = "base"
"""Folder of the weights under the adapter in an exported policy."""


MIB = 2**20


def model_shape(config: config_lib.ModelConfig) -> model_config.TransformerConfig:
    """Returns the model's shape with its adapter: from the model directory if the config names one, else the preset."""
    if config.path:
        checksums.check_sealed(pathlib.Path(config.path), weights=False)
    shape = model_config.read_directory(config.path) if config.path else model_config.load_preset(config.preset)
    return adapters.adapted(shape, config.lora)


@dataclass
class Running:
    """The parts of a started trainer.

    Attributes:
      model: shape of the policy, with its adapter.
      learner: the train state and its programs. A finished resize replaces it.
      critic: learner of the critic; None without one.
      warming: learner of the warm start, which trains all weights before an adapter; None after it, or without one.
      sourced: digest of the frozen weights under an adapter, if `base.load` gives them again; else None.
      weights: the snapshot that weight syncs read.
      checkpointer: saves and restores the run's checkpoints.
      handover: saves the state for another trainer.
      warmed: the warm start has filled the optimizer's moments.
    """

    config: config_lib.RunConfig
    model: model_config.TransformerConfig
    learner: learner_lib.Learner
    weights: weights_create.Snapshot
    checkpointer: checkpoints.Checkpointer
    handover: checkpoints.Checkpointer
    critic: learner_lib.Learner | None = None
    warming: learner_lib.Learner | None = None
    sourced: str | None = None
    warmed: bool = False

    @property
    def present(self) -> learner_lib.Learner:
        """The learner that holds the state: of the warm start before an adapter, else of the policy."""
        return self.warming or self.learner

    def begin(self) -> None:
        """Begins a fresh state: the model's weights, or an adapter on them, and the critic.

        Raises:
          DataError: the model directory cannot be used.
        """
        if self.model.adapter is None:
            self.learner.begin(base_lib.load(self.config, self.model, self.learner.layout))
        elif self.config.warm_start.steps:
            self.warming = self._warming_learner()
            self.warming.begin(base_lib.load(self.config, self.model, self.warming.layout))
        else:
            self._begin_adapter(base_lib.load(self.config, self.model, self.learner.layout), sourced=True)
        self._begin_critic()

    def end_warm_start(self) -> None:
        """Starts training with a fresh optimizer, and with the warm-started policy as reference model."""
        if self.warming is not None:
            weights = self.warming.params
            places = self.learner.layout.weights
            self.warming = None
            # Not sourced: nothing but this trainer holds the warm-started weights.
            self._begin_adapter(_frozen(weights, places), sourced=False)
        elif self.warmed:
            self.learner.begin()
            self._begin_critic()
        self.warmed = False

    def _begin_critic(self) -> None:
        """Starts a fresh critic, if there is one, from the policy's weights."""
        if self.critic is not None:
            places = self.critic.layout.state.params
            self.critic.begin(critic_lib.from_policy(self.learner.policy, places))

    def _warming_learner(self) -> learner_lib.Learner:
        """Returns a learner that trains all weights, for the warm start before an adapter."""
        return learner_lib.Learner(self.config, dataclasses.replace(self.model, adapter=None), jax.devices())

    def _begin_adapter(self, base: Any, *, sourced: bool) -> None:
        """Starts to train an adapter, from `model.lora.path` or afresh, on frozen weights."""
        path = self.config.model.lora.path
        where = self.learner.layout
        self.learner.begin(peft.load(path, self.model, where.state.params) if path else None, base)
        self.sourced = base_lib.digest(base) if sourced else None

    def _sourced_base(self, path: str, digest: str) -> Any:
        """Returns the frozen weights that a checkpoint has the digest of: the present ones, or loaded again."""
        if self.sourced == digest and self.learner.state is not None:
            return self.learner.state.base
        base = base_lib.load(self.config, self.model, self.learner.layout)
        if (base_digest := base_lib.digest(base)) != digest:
            source = self.config.model.path or f"the preset {self.config.model.preset}"
            raise protocols.DataError(
                f"{path}: its adapter was trained on weights with digest {digest}, and {source} holds weights with "
                f"digest {base_digest}; bring the former weights back, or start a new workdir."
            )
        return base

    def save(self, checkpointer: checkpoints.Checkpointer, path: str, host: dict[str, Any]) -> state_lib.TrainState:
        """Ends the warm start, starts to save the state, and returns it.

        Args:
          checkpointer: saves the state.
          path: directory to create.
          host: the trainer's further state, to which the base's digest is added.

        Raises:
          CheckpointFailed: the directory cannot be written, or the state holds numbers that are not finite.
        """
        # A restored trainer knows of no warm start, so the moments that it left must be gone before the save.
        if self.warming is not None:
            self.warming.begin()
            state, host["warming"] = self.warming.train_state(), True
        else:
            self.end_warm_start()
            state = self.learner.train_state()
        if self.critic is not None:
            state = dataclasses.replace(state, critic=self.critic.train_state())
        if self.sourced is not None:
            # The bytes of the frozen weights are many times the adapter's, and can be had again where they came from.
            state, host["base"] = dataclasses.replace(state, base=None), self.sourced
        # The host's part is what a step depends on beside the train state.
        checkpointer.save(path, state, host)
        return state

    def restore(self, path: str) -> dict[str, Any]:
        """Restores a train state, saved on any mesh, into this mesh's shardings. Returns the host state beside it.

        Raises:
          DataError: the directory is missing, incomplete, damaged, of another model or optimizer, or not finite.
        """
        host = checkpoints.host_state(path)
        # A save in the middle of a warm start holds all weights as trained, and no adapter yet.
        self.warming = (self.warming or self._warming_learner()) if host.get("warming", False) else None
        structure, digest, self.warmed = self.present.layout.state, host.get("base"), False
        if digest is not None:
            structure = dataclasses.replace(structure, base=None)
        if self.critic is not None:
            structure = dataclasses.replace(structure, critic=self.critic.layout.state)
        state = self.checkpointer.restore(path, structure)
        if self.critic is not None:
            self.critic.state, state = state.critic, dataclasses.replace(state, critic=None)
        if digest is not None:
            state = dataclasses.replace(state, base=self._sourced_base(path, digest))
        self.sourced = digest
        self.present.state = state
        return host

    def export(self, path: str, version: int) -> None:
        """Writes the policy of a version. See `trainer.TrainerActor.export`."""
        if self.warming is not None:
            self.end_warm_start()
        learner = self.learner
        # float32, because the sum of weights and adapter in bfloat16 would lose most of what was learnt.
        params = learner.merged(self.config.model.param_dtype)
        if not checkpoints.is_finite(params):
            raise protocols.LibraError(
                f"{path}: not written, because version {version} of the policy {checkpoints.NOT_FINITE}: go back "
                "to an earlier checkpoint, and lower optimizer.learning_rate or look at the rewards."
            )
        hf.save(params, self.model, path, sealed=True)
        if self.model.adapter is not None:
            del params  # before the next copy of the weights
            peft.save(learner.params, self.model, pathlib.Path(path) / ADAPTER, self._exported_base(path))
        # Process 0 alone writes (`hf.save`), so it alone seals.
        if jax.process_index() == 0:
            try:
                checksums.seal_folder(pathlib.Path(path))
            except OSError as error:
                raise protocols.LibraError(f"{path}: cannot be written ({error.strerror or error})") from error

    def _exported_base(self, path: str) -> str:
        """Returns the directory of the weights under an exported adapter; writes it if no other directory holds them.

        No directory does after a warm start, or if the weights were drawn.
        """
        base = pathlib.Path(path).absolute() / BASE
        if self.sourced is not None and self.config.model.path:
            return self.config.model.path
        hf.save(self.learner.frozen(self.config.model.param_dtype), self.model, base)
        return str(base)


def create(config: config_lib.RunConfig, model: model_config.TransformerConfig, host: str) -> Running:
    """Creates the parts of a trainer, which has no state yet.

    Args:
      model: shape of the policy, with its adapter.
      host: address of this host towards the others of the run.

    Raises:
      ConfigError: too few devices, or the model is not divisible over the mesh.
    """
    learner = learner_lib.Learner(config, model, jax.devices())
    program_cache.use(config.trainer.compilation_cache, learner.layout.mesh.devices.flat[0].platform)
    # JAX has read its environment variables: engines may start while this trainer loads and compiles.
    turns.ending()()
    weights = weights_create.create(
        model,
        config.rollout.dtype,
        config.rollout.chunk_mib * MIB,
        config.rollout.transport,
        # The digest that hybrid workers send is made of the checksums, and weight relays verify chunks with them.
        config.rollout.checksum or config.elastic.hybrid > 0 or config.cluster.accelerators_per_host > 0,
        config.deadlines.weight_sync,
        host,
        adapter=model.adapter is not None and config.model.lora.sync == "adapter",
    )
    # The next trainer reads a snapshot once, so speed matters more than size: no compression.
    handover = checkpoints.Checkpointer(compress=False)
    critic = learner_lib.Learner(config, model, jax.devices(), critic=True) if config.critic.enabled else None
    return Running(config, model, learner, weights, checkpoints.Checkpointer(), handover, critic)


def _frozen(weights: Any, places: Any) -> Any:
    """Returns trained weights as the frozen weights under an adapter, in their dtypes and shardings."""
    return jax.jit(functools.partial(state_lib.cast_like, places=places), out_shardings=state_lib.shardings_of(places))(
        weights
    )
