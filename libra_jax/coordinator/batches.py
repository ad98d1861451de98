"""Which groups run and which train: dispatch up to the staleness bound, and the batch of each step."""

from __future__ import annotations

import asyncio

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.agents import resolving
from libra_jax.coordinator import groups as groups_lib
from libra_jax.coordinator import saving
from libra_jax.scheduling import admission
from libra_jax.trainer_control import recovery as recovery_lib
from libra_jax.weights import sync


class Batches:
    """Dispatches groups and forms batches of them. Made inside the event loop it serves.

    Args:
      config: the run's configuration (`coordinator`, `steps`).
      tasks: what groups attempt, by position.
      groups: runs them, and calls `settled` here.
      publisher: knows the version that is served, at which groups are dispatched.
      saver: commits a checkpoint while the trainer waits for a batch.
      recovery: restarts the trainer if it is lost then.
      recorder: told of that wait.

    Attributes:
      data_position: the position of the next task.
      next_step: the version at which the next batch to be selected will train.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        tasks: protocols.TaskSource,
        groups: groups_lib.Groups,
        publisher: sync.WeightSync,
        saver: saving.Saver,
        recovery: recovery_lib.Recovery,
        recorder: protocols.Recorder,
    ) -> None:
        limits = config.coordinator
        self._source = config.task.source
        spare = limits.spare_groups
        self._bound = admission.Bound(limits.groups_per_step, limits.staleness, config.steps, spare)
        self._replaces = limits.stale == "replace"
        self._tasks = tasks
        self._groups = groups
        self._publisher = publisher
        self._saver = saver
        self._recovery = recovery
        self._recorder = recorder
        self._settled = asyncio.Event()
        self.data_position = 0
        self.next_step = 0
        if spare:
            recorder.note(
                f"config.coordinator.redundancy: {spare} groups more than the {limits.groups_per_step} of a step are "
                "under way, and the last to finish are given up: training is biased towards short attempts."
            )

    def admit(self) -> None:
        """Dispatches as many new groups as the staleness bound lets in."""
        if self._publisher.served == protocols.NO_VERSION:  # a restored group may settle before the first publication
            return
        for _ in range(
            admission.admissible(
                self._bound,
                version=self._publisher.served,
                next_step=self.next_step,
                outstanding=self._groups.outstanding,
            )
        ):
            with resolving.named(self._source, "task.source", f"task({self.data_position})"):
                task = self._tasks.task(self.data_position)
            self._groups.dispatch(self.data_position, task, self._publisher.served)
            self.data_position += 1

    def settled(self) -> None:
        """A group has finished or was replaced."""
        self._settled.set()
        self.admit()

    async def next(self) -> tuple[protocols.Group, ...]:
        """Waits until a batch may be trained, replacing groups that would pass the bound where the config says so."""
        self.admit()
        while True:
            self._settled.clear()
            selection = admission.select(
                self._bound,
                step=self.next_step,
                finished={key: group.dispatch_version for key, group in self._groups.finished.items()},
                running={key: group.dispatch_version for key, group in self._groups.running.items()},
            )
            if selection.batch:
                # In one go: a group that settled between the two would be admitted at the wrong age.
                batch, self.next_step = self._groups.take(selection.batch), self.next_step + 1
                for group_id in selection.surplus:
                    self._groups.replace(group_id, groups_lib.REDUNDANT, "enough others had finished before it")
                self.admit()
                return batch
            if selection.binding and self._replaces:
                for group_id in selection.binding:
                    self._groups.replace(group_id, groups_lib.STALE, "it would have passed the staleness bound")
                continue
            await self._recovery.through(self._saver.commit)  # the trainer has nothing to do anyway
            if self._settled.is_set():
                continue
            ready, size = len(self._groups.finished), self._bound.groups_per_step
            running = len(self._groups.running)
            self._recorder.status("rollout", f"training waits: {ready} groups ready of {size}, {running} running")
            await self._settled.wait()
