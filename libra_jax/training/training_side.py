"""A hybrid worker's training side as an actor: `protocols.TrainingSide` around a learner without a state.

It holds programs and the parameters of one version, never an optimizer. As in the trainer, all sync methods of the
actor run on one thread of its own, because JAX's mesh contexts are thread-local.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import batch as batch_lib
from libra_jax.models import config as model_config
from libra_jax.models.adapters import lora
from libra_jax.training import learner as learner_lib
from libra_jax.training import program_cache, step
from libra_jax.training import running as running_lib
from libra_jax.training import shares as shares_lib
from libra_jax.utils import turns
from libra_jax.weights import gradient_channel, receiver


def create(config: Mapping[str, Any], workdir: str, name: str, cores: Sequence[int] = ()) -> TrainingSideActor:
    """Creates a hybrid worker of the run's trainer. Its `start` is the first to touch devices.

    Args:
      config: a `RunConfig` as plain dicts (`config.to_dict`).
      workdir: directory of the run. A hybrid worker writes nothing.
      name: name of the hybrid worker, as in `protocols.Share`.
      cores: CPU cores that its threads are pinned to; empty means not pinned.

    Raises:
      ConfigError: a field has an unusable value.
      DataError: the model directory cannot be read.
    """
    return TrainingSideActor(config_lib.parse(config_lib.RunConfig, config), name, tuple(cores))


class TrainingSideActor:
    """Implements `protocols.TrainingSide`, synchronously. Every method raises LibraError with one sentence."""

    def __init__(self, config: config_lib.RunConfig, name: str, cores: tuple[int, ...]) -> None:
        # One data-parallel part of the trainer's mesh, in one process.
        self._config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, data=1, processes=1))
        self._model = running_lib.model_shape(config.model)
        self._name = name
        self._cores = cores
        self._parts: tuple[learner_lib.Learner, receiver.Receiver] | None = None
        self._channel: gradient_channel.Channel | None = None
        self._params: Any = None
        self._version: int | None = None
        self._digest = ""

    def start(self) -> protocols.TrainerInfo:
        if self._cores:
            # Pins this thread; the threads that XLA starts from it inherit the cores.
            config_lib.check_cores(self._cores, "elastic.cores")
            os.sched_setaffinity(0, self._cores)
        # A hybrid worker holds the weights of before the step, so it shares in the step's first update alone.
        learner = learner_lib.Learner(self._config, self._model, jax.devices(), first_update_only=True)
        mesh = learner.layout.mesh
        program_cache.use(self._config.trainer.compilation_cache, mesh.devices.flat[0].platform)
        turns.ending()()  # JAX has read its environment variables
        state = learner.layout.state
        places = state.params if state.base is None else lora.join(state.base, state.params)
        self._parts = learner, receiver.Receiver(self._model, places)
        return protocols.TrainerInfo(
            policy_version=0,
            parameters=model_config.parameter_count(self._model),
            mesh=dict(mesh.shape),
            platform=mesh.devices.flat[0].platform,
            device_kind=mesh.devices.flat[0].device_kind,
        )

    def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        """Does nothing: each chunk says where it lies, so there is nothing to open beforehand."""
        self._started()

    def start_weight_update(self, policy_version: int) -> None:
        """Drops the version it holds and begins another version."""
        _, weights = self._started()
        # Before the first chunk, so that two versions never lie on the devices at once.
        self._params = self._version = None
        weights.start(policy_version)

    def update_weights(self, chunk: protocols.WeightChunk) -> None:
        _, weights = self._started()
        weights.load(chunk)

    def finish_weight_update(self, policy_version: int) -> None:
        _, weights = self._started()
        self._params, self._digest = weights.finish(policy_version)
        self._version = policy_version

    def warm(self) -> None:
        """Compiles the gradient step for every shape of rows, if still missing."""
        learner, _ = self._started()
        # Sums of the policy's loss alone: the core applies them, and takes the warm start by itself.
        for row_shape in learner.inputs.row_shapes():
            learner.compile(step.POLICY, *row_shape, sums_only=True)

    def join(self, generation: int, address: Mapping[str, Any]) -> None:
        """Connects to the core's gradient channel; closes a channel of an earlier membership generation."""
        self._started()
        if (address["worker"], address["generation"]) != (self._name, generation):
            raise protocols.LibraError(
                f"the gradient channel of {address['worker']} (generation {address['generation']}) is not that of "
                f"{self._name} in generation {generation}: call the trainer's listen for it."
            )
        if self._channel is not None:
            self._channel.close("the hybrid worker left")
        seconds = self._config.deadlines.transition
        self._channel = gradient_channel.Channel(address, address["ranks"] - 1, seconds)
        self._channel.wait(seconds)

    def contribute(self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share]) -> dict[str, float]:
        """Computes this worker's share of the step and sends the sums to each process of the core.

        A share smaller than a micro-batch may be empty; then nothing is sent.
        """
        began = time.monotonic()
        (learner, _), channel = self._started(), self._channel
        if batch.policy_version != self._version:
            raise protocols.LibraError(
                f"{self._name} holds policy version {self._version}, and the batch is for {batch.policy_version}."
            )
        mine = [number for number, share in enumerate(shares) if share.worker == self._name]
        if channel is None or channel.closed or not mine or shares[mine[0]].generation != channel.generation:
            raise protocols.LibraError(
                (channel.closed if channel else "")
                or f"{self._name} has no part in this step: it has not joined, or in another membership generation."
            )
        prepared = batch_lib.prepare(self._config, batch.rest, self._model)
        # 1 + : the first range is the core's own.
        indices = shares_lib.split(prepared.work, shares)[1 + mine[0]]
        if not indices:
            return {"seconds": 0.0, "bytes": 0.0, "micro_batches": 0.0}
        sums, report = learner.sums(step.POLICY, self._params, prepared.packed, prepared.extras, indices)
        arrays = jax.device_get(jax.tree.leaves(sums))
        header = gradient_channel.Header(
            worker=self._name,
            generation=channel.generation,
            version=batch.policy_version,
            digest=self._digest,
            first=indices.start,
            last=indices.stop,
            metrics=report["metrics"],
            maxima=report["maxima"],
        )
        sent = channel.send(header, arrays, self._config.deadlines.train_step)
        # The waiting time measures the core. If it counted here, this worker would never be given a larger share.
        seconds = time.monotonic() - began - sent.waited
        return {"seconds": seconds, "bytes": float(sent.nbytes), "micro_batches": float(len(indices))}

    def leave(self) -> None:
        """Closes the channel and frees the parameters; compiled programs stay. Idempotent."""
        if self._channel is not None:
            self._channel.close("the hybrid worker left")
        self._channel = self._params = self._version = None
        if self._parts is not None:
            self._parts[1].close()

    def shutdown(self) -> None:
        self.leave()
        self._parts = None

    def _started(self) -> tuple[learner_lib.Learner, receiver.Receiver]:
        if self._parts is None:
            raise protocols.LibraError(f"hybrid worker {self._name} is not running: call start first.")
        return self._parts
