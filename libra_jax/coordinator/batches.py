"""Dispatches groups up to the staleness bound and selects the batch of each step."""

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
    """Dispatches groups and forms batches of them. Create it inside the event loop that it serves.

    Args:
      config: the run's configuration (`coordinator`, `steps`).
      tasks: source of the tasks, by position.
      groups: runs the groups.
      publisher: knows the served version, which becomes a group's dispatch version.
      saver: commits a checkpoint while the trainer waits for a batch.
      recovery: restarts the trainer if it dies during that commit.
      recorder: gets a status line while the trainer waits.
      events: source of GroupSettled.

    Attributes:
      data_position: position of the next task.
      next_step: policy version at which the next selected batch trains.
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
        events: protocols.Events,
    ) -> None:
        limits = config.coordinator
        self._source = config.task.source
        spare = limits.spare_groups
        self._bound = admission.Bound(limits.groups_per_step, limits.max_staleness, config.steps, spare)
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
        events.subscribe(protocols.GroupSettled, self._group_settled)
        if spare:
            recorder.note(
                f"config.coordinator.redundancy: {spare} groups more than the {limits.groups_per_step} of a step are "
                "under way, and the last to finish are given up: training is biased towards short attempts."
            )

    def admit(self) -> None:
        """Dispatches as many new groups as the staleness bound allows."""
        if self._publisher.served == protocols.NO_VERSION:  # a restored group may finish before the first weight sync
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

    def _group_settled(self, event: protocols.GroupSettled) -> None:
        """Wakes the wait for a batch, and dispatches new groups."""
        self._settled.set()
        self.admit()

    async def next(self) -> tuple[protocols.Group, ...]:
        """Waits for a batch and returns it.

        If `coordinator.stale` is "replace", groups that would exceed the staleness bound are replaced.
        """
        self.admit()
        while True:
            # Cleared before the look, so that a group that finishes after it wakes the wait below.
            self._settled.clear()
            selection = admission.select(
                self._bound,
                step=self.next_step,
                finished={key: group.dispatch_version for key, group in self._groups.finished.items()},
                running={key: group.dispatch_version for key, group in self._groups.running.items()},
            )
            if selection.batch:
                # No await between take and next_step: a group that finished in between would be admitted at the wrong
                # staleness.
                batch, self.next_step = self._groups.take(selection.batch), self.next_step + 1
                for group_id in selection.surplus:
                    self._groups.replace(group_id, groups_lib.REDUNDANT, "enough others had finished before it")
                self.admit()
                return batch
            if selection.binding and self._replaces:
                for group_id in selection.binding:
                    self._groups.replace(group_id, groups_lib.STALE, "it would have passed the staleness bound")
                continue
            await self._recovery.through(self._saver.commit)  # uses the trainer's idle time
            if self._settled.is_set():
                continue
            ready, size = len(self._groups.finished), self._bound.groups_per_step
            running = len(self._groups.running)
            self._recorder.status("rollout", f"training waits: {ready} groups ready of {size}, {running} running")
            await self._settled.wait()
