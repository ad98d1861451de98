"""Admission and batch selection under the staleness bound: pure decisions over counts.

Letters: B groups a training step, eta the staleness bound, s the version that the next batch trains at.
The *deadline* of a group is the last version that may train on it: its dispatch version + eta. A step consumes B
groups, so the outstanding groups (running or finished, not yet in a batch) can all be trained in time if and only if,
for every deadline d, at most B * (d - s + 1) of them are due by d: the feasibility test of earliest-deadline-first
scheduling (Liu and Layland, 1973). Admission and selection both keep this true, so no group ever has to be trained
late, and a batch can always be formed once enough of the outstanding groups have finished.

With E spare groups, at most B * (d - s + 1) + E may be due by d: E more are begun than can be trained, and the first to
finish are trained. A batch aborts the groups left that no later step may train, at most E. Where spare groups are
recycled, they are trained by later steps instead (APRIL, arXiv 2509.18521). At most B + E are then under way, and new
ones are begun between two steps alone, so that only the groups left are older than the version that trains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """The bound that admission and selection keep.

    Attributes:
      groups_per_step: B, groups that one training step consumes.
      staleness: eta, the most versions between a group's first dispatch and its training.
      steps: training steps of the whole run.
      spare: E, groups that may be outstanding beyond what can be trained in time.
      recycles: whether the spare groups of a step go on to the next one. E is at most B then, and eta at least 1.
    """

    groups_per_step: int
    staleness: int
    steps: int
    spare: int = 0
    recycles: bool = False

    @property
    def given_up(self) -> int:
        """Most groups that a batch aborts."""
        return 0 if self.recycles else self.spare

    def last_step(self, dispatch_version: int) -> int:
        """Returns the last step of the run that may train on a group first dispatched at `dispatch_version`."""
        # Step n trains at version n, so the group's deadline is a step as well.
        return min(dispatch_version + self.staleness, self.steps - 1)


def admissible(bound: Bound, *, version: int, next_step: int, outstanding: int) -> int:
    """Returns how many groups may be dispatched now.

    Args:
      bound: the staleness bound and the length of the run.
      version: the policy version that a group dispatched now is dispatched at.
      next_step: s, the version at which the next batch to be selected will train (version + 1 while a step runs).
      outstanding: groups dispatched and not yet selected, finished ones included.

    Returns:
      A count, never negative. Over a run it adds up to steps * B, and one more for every group replaced or aborted.
    """
    steps = bound.last_step(version) - next_step + 1
    if bound.recycles:
        limit = min(bound.groups_per_step + bound.spare, bound.groups_per_step * (bound.steps - next_step))
        return max(0, limit - outstanding) if version == next_step else 0
    return max(0, bound.groups_per_step * steps + bound.spare - outstanding) if steps > 0 else 0


@dataclass(frozen=True)
class Selection:
    """The groups that may be trained now.

    Attributes:
      batch: ids of the B groups to train. Empty if too few have finished, or if the step has to wait for a running
        group that would pass its deadline.
      surplus: ids of groups, finished or running, to abort with the batch: no later step may train on them. Empty
        without spare groups.
    """

    batch: tuple[int, ...] = ()
    surplus: tuple[int, ...] = ()


def early(
    bound: Bound,
    *,
    step: int,
    finished: Mapping[int, int],
    running: Mapping[int, int],
    joined_groups: Collection[int] = (),
) -> tuple[int, ...]:
    """Returns finished groups that may join the batch of version `step` before it is complete, the first to finish
    first. All others can still be trained in time. One place stays free for the group that completes the batch.

    Args:
      step: s, the version that trains.
      finished: group id -> dispatch version of the finished groups, in the order in which they finished.
      running: group id -> dispatch version of the unfinished groups.
      joined_groups: groups of `finished` that have joined before.
    """
    outstanding, joined_versions = [*finished.values(), *running.values()], [finished[group] for group in joined_groups]
    versions, groups = sorted(set(outstanding)), []
    due = {version: sum(dispatch_version <= version for dispatch_version in outstanding) for version in versions}
    for group, dispatched in finished.items():
        if group in joined_groups or len(joined_versions) == bound.groups_per_step - 1:
            continue
        # A later group takes a place in the step, so that one group fewer can be trained by each earlier deadline.
        fits = all(
            due[version] + 1 + sum(dispatch_version > version for dispatch_version in joined_versions)
            <= bound.groups_per_step * (version + bound.staleness - step + 1) + bound.given_up
            for version in versions
            if version < dispatched
        )
        if fits:
            joined_versions.append(dispatched)
            groups.append(group)
    return tuple(groups)


def select(
    bound: Bound,
    *,
    step: int,
    finished: Mapping[int, int],
    running: Mapping[int, int],
    joined_groups: Collection[int] = (),
) -> Selection:
    """Chooses the batch that trains at version `step`: earliest deadline first, and of equal ones the oldest.

    With spare groups, the first to finish go before the oldest: those left may never be trained.

    Args:
      step: s, the version that trains.
      finished: group id -> dispatch version of the finished groups, in the order in which they finished.
      running: group id -> dispatch version of the unfinished groups.
      joined_groups: groups of `finished` that have joined the batch before (`early`).
    """
    size = bound.groups_per_step
    if len(finished) < size:
        return Selection()
    # Group ids ascend as groups are dispatched; the sort is stable, so with spares the order of finishing stays.
    by_deadline = sorted(
        finished, key=lambda group: (group not in joined_groups, finished[group], 0 if bound.spare else group)
    )
    batch, later = by_deadline[:size], by_deadline[size:]
    # For each deadline, the groups due by then have to fit into the steps after this one and up to it. Otherwise the
    # step waits for those of them that run. Finished ones gain nothing by a wait, and may be too many where a resumed
    # run has a lower bound.
    left = [*(finished[group] for group in later), *running.values()]
    for version in {
        version for version in left if any(running_version <= version for running_version in running.values())
    }:
        # One step fewer than B * (d - s + 1): the batch chosen above takes the step s.
        room = bound.groups_per_step * (version + bound.staleness - step) + bound.given_up
        if sum(dispatch_version <= version for dispatch_version in left) > room:
            return Selection()
    # Without spares, admission and the test above leave a later step to every group, so nothing can be surplus.
    remaining = {group: finished[group] for group in later} | dict(running) if bound.given_up else {}
    surplus = (group for group, version in remaining.items() if bound.last_step(version) <= step)
    return Selection(batch=tuple(batch), surplus=tuple(surplus))
