"""The trainer as an actor: the methods of `protocols.Trainer` around a learner. Its steps are here.

A cluster spawns `create`. Most methods are synchronous, because all sync methods of an actor run on one thread of its
own, and JAX's mesh contexts are thread-local.

A trainer of several processes consists of one actor per process, each with its share of the mesh's devices. Every
method is called on all actors at once (`trainer_control.client`); the result of process 0 counts. Arguments are the
same, but of a batch a process may have the tokens of its own rows alone, and outlines of other sequences (`dividing`).
Only process 0 receives `reserve`, `rows`, `listen`, `stage_weights` and `is_saved`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import batch as batch_lib
from libra_jax.data import batch_advantages, packing
from libra_jax.data import sequences as sequences_lib
from libra_jax.models import config as model_config
from libra_jax.planning.costs import costs
from libra_jax.training import critic as critic_lib
from libra_jax.training import learner as learner_lib
from libra_jax.training import optimizer, step, streaming, trainer_life, updates
from libra_jax.training import shares as shares_lib
from libra_jax.weights import adapter_snapshot
from libra_jax.weights import snapshot as weight_snapshot


def create(config: Mapping[str, Any], workdir: str, process: int = 0) -> TrainerActor:
    """Creates the trainer of a run, or one of its processes. Its `start` is the first to touch devices.

    Args:
      config: a `RunConfig` as plain dicts (`config.to_dict`).
      workdir: directory of the run. The trainer writes only to paths that its methods are given.
      process: index of this process among `trainer.processes`.

    Raises:
      ConfigError: a field has an unusable value.
      DataError: the model directory cannot be read.
    """
    return TrainerActor(config_lib.parse(config_lib.RunConfig, config), process)


class TrainerActor(trainer_life.TrainerLife):
    """Implements `protocols.Trainer`, synchronously. Every method raises LibraError with one sentence."""

    def __init__(self, config: config_lib.RunConfig, process: int = 0) -> None:
        super().__init__(config, process)
        self._multiplied = model_config.multiplied_parameter_count(self._model)
        self._schedule = optimizer.schedule(config.optimizer, config.steps)
        self._begun = streaming.Begun()

    def warm_start_step(self, sequences: Sequence[protocols.Trajectory]) -> dict[str, float]:
        """Takes one supervised step (mean cross entropy of the tokens in the loss mask) at the warm start's rate."""
        running = self.running()
        learner = running.learner if self._model.adapter is None else running.warming
        if self._version or learner is None:
            raise protocols.LibraError(f"a warm start comes before training, and this is version {self._version}.")
        examples = sequences_lib.examples(sequences, self._version, self._model)
        packed = batch_lib.pack(self._config, examples)
        running.warmed = True
        # The parameters change without a new version, so the synced snapshot no longer matches.
        self._synced = None
        rate = self._config.warm_start.learning_rate
        metrics = learner.update(step.SUPERVISED, packed, rate)
        return self._finish(learner, metrics, packed)

    def train_step(self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share] = ()) -> dict[str, float]:
        """Takes the updates of one step, and skips non-finite ones. Shares are parts of the first update.

        With shares, the metrics include `shares/*` (`shares.Collection.metrics`).
        """
        self._check_version(batch)
        learner, critic = self.running().learner, self.running().critic
        summed_groups, again = self._take_begun(batch)
        prepared = self._prepared(batch.rest)
        core_range, collection = None, None
        if shares:
            core_range, *ranges = shares_lib.split(prepared.work, shares)
            weights = self.running().weights
            # Hybrid workers read parameters from host memory: the config refuses any other transport.
            assert isinstance(weights, weight_snapshot.HostSnapshot | adapter_snapshot.AdapterSnapshot)
            # Without a sync of this version, no hybrid worker can hold its parameters. Of several processes, the first
            # alone has the snapshot; it checks for all.
            knows_digest = self._synced == self._version and jax.process_index() == 0
            collection = shares_lib.Collection(
                self._channels,
                version=self._version,
                digest=weights.digest(self._version) if knows_digest else None,
                shares=shares,
                ranges=ranges,
                accumulator=learner.layout.accumulator,
            )
        full_step = summed_groups.joined(prepared, batch)
        if not full_step.packed.places and not batch_lib.leaves_out(self._config, full_step.groups):
            raise protocols.LibraError(batch_lib.UNTRAINED.format(len(full_step.examples)))
        rate = float(self._schedule(self._version))
        if critic is not None and self._version < self._config.critic.warmup_steps:
            metrics = learner.stay()
        else:
            metrics = learner.train(
                prepared.packed, rate, prepared.extras, prepared.minibatches, core_range, collection
            )
        if self._config.trainer.share_prompt or full_step.packed.split():
            metrics = {name: value for name, value in metrics.items() if not f"/{name}".endswith(updates.OF_ROLLOUTS)}
        if critic is not None:
            # After the policy, whose step may be aborted: an aborted step must leave the critic unchanged, too.
            critic_metrics = critic.train(
                prepared.packed, self._config.critic.learning_rate, prepared.targets, prepared.minibatches
            )
            metrics |= critic_lib.report(critic_metrics)
            # Asked for while the critic learnt: too late for this step, and no business of the next one.
            learner.abort.clear()
        # A skipped step counts too: the version is the number of steps taken.
        self._version += 1
        metrics |= batch_advantages.statistics(full_step.advantages, full_step.examples, full_step.groups)
        metrics |= full_step.described
        if collection is not None:
            metrics |= collection.metrics()
            metrics["shares/of"] = float(len(prepared.packed.micro_batches) + again)
        metrics["train/devices"] = float(learner.layout.mesh.size + len(shares) * self._config.trainer.replica_devices)
        return self._finish(learner, metrics, full_step.packed, self._config.algorithm.epochs)

    def rows(self) -> Sequence[Sequence[int]]:
        """Returns the rows of each micro-batch that each process's devices hold. See `protocols.TrainerProcess`."""
        trainer = self._config.trainer
        return self.running().learner.programs.rows((trainer.micro_batch_rows, trainer.row_tokens))

    def accumulate(self, batch: protocols.TrainBatch) -> None:
        """Sums the gradients of some groups of the next step. See `protocols.Trainer.accumulate`."""
        self._check_version(batch)
        self._accumulate(batch)

    def _accumulate(self, batch: protocols.TrainBatch, *, in_step: bool = False) -> int:
        """Sums gradients, within a step or before it. Returns the number of micro-batches."""
        prepared, learner = self._prepared(batch), self.running().learner
        if not learner.has_begun:
            # Sums of earlier groups are gone, if there were any: the step will compute them again.
            self._begun = streaming.Begun()
        learner.accumulate(prepared.packed, prepared.extras, in_step=in_step)
        self._begun.add(batch, prepared)
        return len(prepared.packed.micro_batches)

    def _take_begun(self, batch: protocols.TrainBatch) -> tuple[streaming.Begun, int]:
        """Returns the groups whose sums the step goes on from; computes these sums first if they are gone.

        Also returns the number of micro-batches that it computed for that.
        """
        learner, again = self.running().learner, 0
        if self._begun.numbers != batch.begun or learner.has_begun != bool(batch.begun):
            learner.forget()
            self._begun = streaming.Begun()
            if batch.begun:
                again = self._accumulate(batch.of(batch.begun), in_step=True)
        summed_groups, self._begun = self._begun, streaming.Begun()
        return summed_groups, again

    def _check_version(self, batch: protocols.TrainBatch) -> None:
        if batch.policy_version != self._version:
            raise protocols.LibraError(
                f"the batch is for policy version {batch.policy_version} and the trainer holds {self._version}."
            )

    def _prepared(self, batch: protocols.TrainBatch) -> batch_lib.Prepared:
        running = self.running()
        running.end_warm_start()
        values = None if running.critic is None else running.critic.values
        learner = running.learner
        return batch_lib.prepare(
            self._config, batch, self._model, learner.reference_log_probs, values, learner.score_norms
        )

    def _finish(
        self, learner: learner_lib.Learner, metrics: dict[str, float], packed: packing.Packed, epochs: int = 1
    ) -> dict[str, float]:
        """Adds the host's metrics of a step that `learner` took, and stops a run whose steps are not finite."""
        # Updates without a trained token are skipped, too, and are no sign of a broken run.
        self._skipped_in_a_row = 0 if updates.is_finite(metrics) else self._skipped_in_a_row + 1
        limit = self._config.trainer.max_skipped_steps
        if self._skipped_in_a_row > limit:
            raise protocols.LibraError(
                f"trainer.max_skipped_steps: {self._skipped_in_a_row} steps in a row had a loss or gradient that was "
                f"not finite (last: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}, critic's loss "
                f"{metrics.get('critic/loss', 'none')}); lower "
                "optimizer.learning_rate or look at the rewards."
            )
        lengths, pairs = [place.columns for place in packed.places], sum(layout.pairs for layout in packed.layouts)
        if packed.shared_columns:
            metrics["tokens/shared"] = float(packed.shared_columns)
        # A learner that another trainer or mesh has handed over to may lack programs.
        self.running().learner.ahead.begin()
        waited, learner.programs.waited = learner.programs.waited, 0.0
        return metrics | {
            "tokens/processed": float(sum(lengths)),
            "train/flops": epochs * costs.train_flops(learner.model, self._multiplied, lengths, pairs),
            "padding_fraction": packed.padding_fraction,
            "micro_batches": float(len(packed.micro_batches)),
            "compiled_shapes": float(len(learner.programs.shapes)),
            "train/compile_seconds": waited,
        }
