"""Runs groups of rollouts, one group a prompt, and selects the batch of each step among those that finished."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Mapping, Sequence

from libra_jax import protocols
from libra_jax.coordinator import (
    checkpoints,
    filters,
    overlong,
    prompts,
    records,
    replay,
    saving,
    streaming,
    success,
)
from libra_jax.coordinator import weight_sync as sync
from libra_jax.rollouts import rollouts
from libra_jax.scheduling import admission
from libra_jax.trainer_control import recovery as recovery_lib
from libra_jax.utils import resolving, run_context, user_code

ENVIRONMENT, REWARD, TEACHER, TASK = FAILED = "environment", "reward", "teacher", "task"
"""Reasons to replace a group that failed."""

REDUNDANT = "redundant"
"""Reason to replace a group that is intact, beside those of `filters`."""


class Groups:
    """All groups that have been dispatched and are not yet part of a batch.

    Args:
      run: what the parts of the run share (`coordinator`, `rollout.temperature`). The recorder gets a note for each
        replacement after a failure, and events get a GroupSettled for each group that has finished or was replaced.
        The run ends if too many groups have to be replaced.
      rates: counts the successes of groups whose rollouts are all scored.
      replays: stores the successes of such groups, and gives stored ones to groups without any.

    Attributes:
      running: groups in flight, by number.
      finished: finished groups that no batch has taken, by number.
      replaced: number of replaced groups, by reason.
      replaced_tokens: tokens generated in replaced groups.
      replaced_rollouts: number of rollouts of replaced groups.
      trained: number of groups trained.
      scored: number of groups with a rollout that the environment ended, not a limit.
    """

    def __init__(
        self,
        run: run_context.RunContext,
        runner: rollouts.RolloutRunner,
        rates: success.SuccessRates,
        replays: replay.SuccessReplay,
    ) -> None:
        self._config = run.config
        self._recorder = run.recorder
        self._scope = run.scope
        self._events = run.events
        self._clock = run.clock
        self._runner = runner
        self._rates = rates
        self._replays = replays
        self._filtered, self._filter = filters.make(run.config)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._first_replacement = ""
        self.running: dict[int, protocols.Group] = {}
        self.finished: dict[int, protocols.Group] = {}
        self.replaced: collections.Counter[str] = collections.Counter()
        self.replaced_tokens = 0
        self.replaced_rollouts = 0
        self.trained = 0
        self.scored = 0

    def start(self, group: protocols.Group) -> None:
        """Runs a group's rollouts from their present positions: the start, or the tokens in a checkpoint."""
        if not self.running:
            self._busy_since = self._clock()
        self.running[group.group_id] = group
        self._tasks[group.group_id] = self._scope.start(self._run(group), f"group {group.group_id}")

    def put_back(self, groups: Sequence[protocols.Group]) -> None:
        """Returns untrained groups to the waiting ones, before groups that finished later."""
        # Batches take groups in this order, and the staleness bound is next for the oldest.
        later = dict(self.finished)
        self.finished.clear()
        self.finished.update({group.group_id: group for group in groups} | later)

    def replace(self, group_id: int, reason: str, why: str) -> None:
        """Drops a running or finished group and counts it. Its running rollouts are aborted and closed."""
        group = self.finished.pop(group_id, None)
        if group is None:
            group = self.running[group_id]
            self._tasks[group_id].cancel()
            self._leave(group)
        self._count(group, reason, why)

    def state(self) -> checkpoints.GroupsState:
        """Returns a checkpoint's content: waiting groups, groups in flight with their tokens so far, and the counts."""
        return {
            "trained": self.trained,
            "scored": self.scored,
            "replaced": dict(self.replaced),
            "replaced_tokens": self.replaced_tokens,
            "replaced_rollouts": self.replaced_rollouts,
            "first_replacement": self._first_replacement,
            "finished": [records.encode_group(group) for group in self.finished.values()],
            "running": [records.encode_group(group) for group in self.running.values()],
        }

    def restore(self, state: checkpoints.GroupsState) -> None:
        """Restores the result of `state`. Groups that were in flight resume from their tokens."""
        # Checkpoints of earlier versions lack "scored".
        self.trained, self.scored = state["trained"], state.get("scored", state["trained"])
        self.replaced.update(state["replaced"])
        self.replaced_tokens = state["replaced_tokens"]
        self.replaced_rollouts = state.get("replaced_rollouts", 0)
        self._first_replacement = state["first_replacement"]
        finished = map(records.decode_group, state["finished"])
        self.finished.update((group.group_id, group) for group in finished)
        for record in state["running"]:
            self.start(records.decode_group(record))

    async def teach(self) -> None:
        """Scores restored groups that a run finished before it had a teacher.

        Raises:
          TeacherFailed: the teacher failed repeatedly.
        """
        waiting = [trajectory for group in self.finished.values() for trajectory in group.trajectories]
        tasks = [asyncio.ensure_future(self._runner.teach(trajectory)) for trajectory in waiting]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def busy_seconds(self) -> float:
        """Returns the seconds in which any group ran, since the last call."""
        now = self._clock()
        busy = self._busy_seconds + (now - self._busy_since if self.running else 0.0)
        self._busy_seconds, self._busy_since = 0.0, now
        return busy

    async def _run(self, group: protocols.Group) -> None:
        tasks = [asyncio.ensure_future(self._run_rollout(trajectory, group)) for trajectory in group.trajectories]
        if group.replay is not None:
            # Without scores if it was stored before the run had a teacher.
            tasks.append(asyncio.ensure_future(self._runner.teach(group.replay)))
        crash: protocols.EnvironmentCrashed | None = None
        try:
            with user_code.contain_exits():  # a group that ended as cancelled would be waited for forever
                await asyncio.gather(*tasks)
        except protocols.EnvironmentCrashed as error:
            crash = error
        finally:
            for task in tasks:
                # A second cancel would interrupt the closing of its environment.
                if not task.cancelling():
                    task.cancel()
            # Environments are closed before this group is left, even if the group itself is cancelled meanwhile.
            try:
                # Unlike gather, wait leaves the tasks alone if it is cancelled itself.
                await asyncio.wait(tasks)
            except asyncio.CancelledError:
                await asyncio.wait(tasks)
                raise
            finally:
                await asyncio.gather(*tasks, return_exceptions=True)
        self._leave(group)
        self.scored += any(trajectory.finish == "answered" for trajectory in group.trajectories)
        if crash is None:
            self._rates.add(group)
            self._replays.add(group)
            self._replays.join(group)
        if crash is not None:
            kinds = {protocols.RewardFailed: REWARD, protocols.TeacherFailed: TEACHER, protocols.TaskRefused: TASK}
            broken = next((reason for kind, reason in kinds.items() if isinstance(crash, kind)), ENVIRONMENT)
            self._count(group, broken, str(crash))
        elif (why := self._filter(group)) is not None:
            self._count(group, self._filtered, why)
        else:
            # After the filter, which compares rewards without it. No await lies between here and the checkpoint's
            # `finished`, so a restored group is never shaped twice.
            overlong.shape(self._config, group)
            self.finished[group.group_id] = group
            self._events.announce(protocols.GroupSettled(group.group_id))

    async def _run_rollout(self, trajectory: protocols.Trajectory, group: protocols.Group) -> None:
        temperature, version = self._config.rollout.temperature, group.dispatch_version
        await self._runner.run(protocols.RolloutOrder(trajectory, group.task, group.group_id, version, temperature))
        # While others of its group still run.
        await self._runner.teach(trajectory)

    def _leave(self, group: protocols.Group) -> None:
        self._tasks.pop(group.group_id, None)
        self.running.pop(group.group_id, None)
        if not self.running:
            self._busy_seconds += self._clock() - self._busy_since

    def _count(self, group: protocols.Group, reason: str, why: str) -> None:
        """Counts a replaced group. Raises LibraError, which ends the run, if too many groups were replaced."""
        self.replaced[reason] += 1
        self.replaced_rollouts += len(group.rollouts)
        self.replaced_tokens += sum(trajectory.sampled_tokens for trajectory in group.rollouts)
        # The config asks for the other reasons, which may occur by the thousand.
        if reason in FAILED:
            self._recorder.note(f"Prompt {group.task.prompt_id} was replaced ({reason}): {why}")
        # The config asks for redundant groups, so they count towards no limit.
        if reason != REDUNDANT:
            self._first_replacement = self._first_replacement or why
            # Groups cut off at their limits train although the environment never scored them, and an environment that
            # always crashes could hide behind them. So crashes are also compared with the groups that it scored.
            counted = {name: count for name, count in sorted(self.replaced.items()) if name != REDUNDANT}
            crashed = {name: count for name, count in counted.items() if name in FAILED}
            for counts, groups, kind in ((crashed, self.scored, "scored"), (counted, self.trained, "trained")):
                limit, allowed = self._cap(groups, kind)
                if sum(counts.values()) <= limit:
                    continue
                unscored = f" (the environment scored rollouts of {groups} groups)" if counts is crashed else ""
                functions = ", ".join(
                    resolving.shown(function.factory, function.arguments)
                    for function in self._config.reward.parsed().values()
                )
                environment = resolving.shown(self._config.task.environment)
                raise protocols.LibraError(
                    f"{self._first_replacement}. This was the first of too many such groups: {_sum(counts)} and "
                    f"{self.trained} trained{unscored}, more than {allowed}; "
                    f"environment {environment}{f', reward {functions}' if functions else ''}"
                )
        self._events.announce(protocols.GroupSettled(group.group_id))

    def replaced_text(self) -> str:
        """Returns the number of replaced groups by reason, and the cap; empty if none. Ignores redundant groups."""
        counted = {name: count for name, count in sorted(self.replaced.items()) if count and name != REDUNDANT}
        return f"{_sum(counted)}: {self._cap(self.trained, 'trained')[1]}" if counted else ""

    def _cap(self, groups: int, kind: str) -> tuple[float, str]:
        """Returns the replacements that the config allows for `groups` groups of a kind, as a number and as words."""
        limits = self._config.coordinator
        limit = limits.max_replacements * (groups + limits.groups_per_step)
        return limit, (
            f"config.coordinator.max_replacements = {limits.max_replacements:g} allows "
            f"{limits.max_replacements:g} x ({groups} {kind} + {limits.groups_per_step} of a step) = "
            f"{limit:g}"
        )


def _sum(counts: Mapping[str, int]) -> str:
    """Returns the number of replaced groups and its split by reason, as words."""
    total, reasons = sum(counts.values()), " + ".join(f"{name} {count}" for name, count in counts.items())
    return f"{total} group{'s were' if total != 1 else ' was'} replaced ({reasons})"


class Batches:
    """Dispatches groups and forms batches of them. Create it inside the event loop that it serves.

    Args:
      run: what the parts of the run share (`coordinator`, `steps`). Each GroupSettled may complete a batch.
      prompts: chooses the task and the number of rollouts of each group.
      replays: chooses a stored success for each group.
      runner: begins the rollouts of new groups.
      weight_sync: knows the served version, which becomes a group's dispatch version.
      saver: commits a checkpoint while the trainer waits for a batch.
      recovery: restarts the trainer if it dies during that commit.
      stream: begins a step on its first groups.

    Attributes:
      data_position: number of tasks taken, which is also the next group's number.
      next_step: policy version at which the next selected batch trains.
    """

    def __init__(
        self,
        run: run_context.RunContext,
        *,
        prompts: prompts.Prompts,
        replays: replay.SuccessReplay,
        groups: Groups,
        runner: rollouts.RolloutRunner,
        weight_sync: sync.WeightSync,
        saver: saving.Saver,
        recovery: recovery_lib.Recovery,
        stream: streaming.StreamedGroups,
    ) -> None:
        limits = run.config.coordinator
        spare = limits.spare_groups
        self._bound = admission.Bound(
            limits.groups_per_step, limits.max_staleness, run.config.steps, spare, limits.recycle
        )
        self._prompts = prompts
        self._replays = replays
        self._groups = groups
        self._runner = runner
        self._weight_sync = weight_sync
        self._saver = saver
        self._recovery = recovery
        self._stream = stream
        self._recorder = run.recorder
        self._scope = run.scope
        self._settled = asyncio.Event()
        self.data_position = 0
        self.next_step = 0

        run.events.subscribe(protocols.GroupSettled, lambda _: self._settled.set())
        run.events.subscribe(protocols.GroupSettled, lambda _: self.admit())
        if spare and not limits.recycle:
            run.recorder.note(
                f"config.coordinator.redundancy: {spare} groups more than the {limits.groups_per_step} of a step are "
                "under way, and the last to finish are aborted: training is biased towards short rollouts."
            )

    def admit(self) -> None:
        """Dispatches as many new groups as the staleness bound allows."""
        version, outstanding = self._weight_sync.served, len(self._groups.running) + len(self._groups.finished)
        # A restored group may finish before the first weight sync, and any group while the run is ending.
        if version == protocols.NO_VERSION or self._scope.called:
            return
        count = admission.admissible(self._bound, version=version, next_step=self.next_step, outstanding=outstanding)
        for _ in range(count):
            task, size = self._prompts.next(self.data_position)
            names = [f"{task.prompt_id}/{sample}" for sample in range(size)]
            trajectories = [self._runner.begin(name, task) for name in names]
            group = protocols.Group(self.data_position, task, version, trajectories)
            self._replays.choose(group)
            self._groups.start(group)
            self.data_position += 1

    async def next(self) -> protocols.TrainBatch:
        """Waits for the next step's batch and returns it."""
        self.admit()
        while True:
            # Cleared before the look, so that a group that finishes after it wakes the wait below.
            self._settled.clear()
            running = {key: group.dispatch_version for key, group in self._groups.running.items()}
            selection = admission.select(
                self._bound,
                step=self.next_step,
                finished={key: group.dispatch_version for key, group in self._groups.finished.items()},
                running=running,
                joined_groups=self._stream.joined_groups,
            )
            if selection.batch:
                # No await until next_step has grown: a group that finished in between would be admitted at the wrong
                # staleness.
                groups = tuple(self._groups.finished.pop(group_id) for group_id in selection.batch)
                batch = protocols.TrainBatch(self.next_step, groups, self._stream.take())
                self.next_step += 1
                for group_id in selection.surplus:
                    self._groups.replace(group_id, REDUNDANT, "enough others had finished before it")
                self.admit()
                return batch
            # The trainer is idle, so a commit costs no training time.
            await self._recovery.through(self._saver.commit)
            if self._settled.is_set():
                continue
            ready, size = len(self._groups.finished), self._bound.groups_per_step
            self._recorder.status("rollout", f"training waits: {ready} groups ready of {size}, {len(running)} running")
            if await self._stream.begin(self._bound, self.next_step, self._groups.finished, running):
                continue
            await self._settled.wait()
