"""The staleness bound, over random orders of finishing: kept, without deadlock, each group leaving exactly once."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax.scheduling import admission


class Model:
    """A run reduced to counts: groups finish in a random order, and the trainer may be busy while they do."""

    def __init__(self, bound: admission.Bound, data: st.DataObject, streams: bool = False) -> None:
        self.bound, self.data, self.streams = bound, data, streams
        self.joined_groups: list[int] = []
        self.version = self.next_step = self.admitted = 0
        self.running: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        self.trained: list[tuple[int, int]] = []
        self.replaced: list[int] = []
        self.given_up: list[int] = []

    def admit(self) -> None:
        outstanding = len(self.running) + len(self.finished)
        count = admission.admissible(
            self.bound, version=self.version, next_step=self.next_step, outstanding=outstanding
        )
        for _ in range(count):
            self.running[self.admitted] = self.version
            self.admitted += 1
        most = (1 if self.bound.recycles else self.bound.staleness + 1) * self.bound.groups_per_step + self.bound.spare
        assert len(self.running) + len(self.finished) <= most

    def finish_some(self, least: int) -> None:
        most = len(self.running)
        for _ in range(self.data.draw(st.integers(min(least, most), most), label="finishing")):
            group = self.data.draw(st.sampled_from(sorted(self.running)), label="finishes")
            version = self.running.pop(group)
            if self.data.draw(st.integers(0, 9), label="fate") == 0 and len(self.replaced) < 20:
                self.replaced.append(group)
                self.admit()
            else:
                self.finished[group] = version

    def select(self) -> admission.Selection:
        """As a streamed step does: finished groups may join the batch before it is complete, and then stay in it."""
        state = {
            "step": self.version,
            "finished": self.finished,
            "running": self.running,
            "joined_groups": self.joined_groups,
        }
        if self.streams and self.data.draw(st.booleans(), label="streams now"):
            self.joined_groups += admission.early(self.bound, **state)
            assert len(set(self.joined_groups)) == len(self.joined_groups) < self.bound.groups_per_step
            state["joined_groups"] = self.joined_groups
        return admission.select(self.bound, **state)

    def step(self) -> None:
        self.admit()
        while not (selection := self.select()).batch:
            assert self.running, "deadlock: nothing runs and no batch can be trained"
            self.finish_some(least=1)
        self.next_step = self.version + 1
        assert set(self.joined_groups) <= set(selection.batch), "a group that had joined the batch is not in it"
        self.joined_groups = []
        for group in selection.batch:
            self.trained.append((group, self.version - self.finished.pop(group)))
        assert len(selection.surplus) <= self.bound.spare
        for group in selection.surplus:
            assert self.bound.last_step((self.running | self.finished)[group]) <= self.version, "it could train later"
            self.running.pop(group, None)
            self.finished.pop(group, None)
            self.given_up.append(group)
        self.admit()
        self.finish_some(least=0)
        self.version += 1


@hypothesis.settings(max_examples=150)
@hypothesis.given(
    size=st.integers(1, 4),
    staleness=st.integers(0, 3),
    steps=st.integers(1, 6),
    spare=st.integers(0, 3),
    streams=st.booleans(),
    recycles=st.booleans(),
    data=st.data(),
)
def test_staleness_is_bounded_and_every_group_leaves_once(size, staleness, steps, spare, streams, recycles, data):
    recycles &= staleness > 0 and 0 < spare <= size
    model = Model(admission.Bound(size, staleness, steps, spare, recycles), data, streams)
    for _ in range(steps):
        model.step()
    groups = [group for group, _ in model.trained]
    assert all(0 <= age <= staleness for _, age in model.trained)
    assert len(groups) == size * steps
    assert sorted(groups + model.replaced + model.given_up) == list(range(model.admitted))
    assert (spare and not recycles) or not model.given_up
    assert not model.running
    assert not model.finished


def feasible(size: int, staleness: int, step: int, versions: list[int]) -> bool:
    """Whether groups dispatched at these versions can all be trained in time by the steps from `step` on."""
    return all(
        sum(version + staleness <= deadline for version in versions) <= size * max(0, deadline - step + 1)
        for deadline in range(step + staleness + 5)
    )


@hypothesis.given(
    size=st.integers(1, 5),
    staleness=st.integers(0, 3),
    finished=st.dictionaries(st.integers(0, 40), st.integers(0, 3), max_size=12),
    running=st.dictionaries(st.integers(41, 80), st.integers(0, 3), max_size=12),
)
def test_a_batch_is_refused_exactly_when_it_would_make_a_later_step_late(size, staleness, finished, running):
    step = 3
    finished = {group: version for group, version in finished.items() if version + staleness >= step}
    for group in sorted(running, reverse=True):  # only states that the bound allows can come about
        if not feasible(size, staleness, step, [*finished.values(), *running.values()]):
            del running[group]
    hypothesis.assume(feasible(size, staleness, step, [*finished.values(), *running.values()]))
    selection = admission.select(admission.Bound(size, staleness, 100), step=step, finished=finished, running=running)
    if len(finished) < size:
        assert selection == admission.Selection()
        return
    batch = sorted(finished, key=lambda group: (finished[group], group))[:size]
    rest = [version for group, version in {**finished, **running}.items() if group not in batch]
    trains = feasible(size, staleness, step + 1, rest)
    assert selection == (admission.Selection(batch=tuple(batch)) if trains else admission.Selection())


def test_finished_groups_beyond_the_bound_of_a_resumed_run_are_trained_and_never_waited_for():
    finished = dict.fromkeys(range(4), 0)
    selection = admission.select(admission.Bound(2, 0, 10), step=1, finished=finished, running={})
    assert selection.batch == (0, 1)
    late = admission.select(admission.Bound(2, 0, 10), step=1, finished=finished, running={4: 1})
    assert not late.batch, "the running group would be late, too"


@hypothesis.given(
    size=st.integers(1, 5),
    staleness=st.integers(0, 3),
    finished=st.dictionaries(st.integers(0, 40), st.integers(0, 3), max_size=12),
    running=st.dictionaries(st.integers(41, 80), st.integers(0, 3), max_size=12),
)
def test_a_group_joins_early_exactly_when_all_others_can_still_be_trained_in_time(size, staleness, finished, running):
    step = 3
    outstanding = {group: version for group, version in {**finished, **running}.items() if version + staleness >= step}
    hypothesis.assume(feasible(size, staleness, step, [*outstanding.values()]))
    finished = {group: version for group, version in finished.items() if group in outstanding}
    running = {group: version for group, version in running.items() if group in outstanding}
    early = admission.early(admission.Bound(size, staleness, 100), step=step, finished=finished, running=running)
    assert len(early) < size
    joined: list[int] = []
    for group in finished:
        # A batch of the joined groups and the most urgent others leaves a feasible state.
        others = sorted((version, other) for other, version in outstanding.items() if other not in (*joined, group))
        left = others[max(0, size - len(joined) - 1) :]
        fits = len(joined) < size - 1 and feasible(size, staleness, step + 1, [version for version, _ in left])
        assert (group in early) == fits
        joined += [group] if fits else []


def test_synchronous_training_admits_nothing_while_a_step_runs():
    bound = admission.Bound(groups_per_step=4, staleness=0, steps=10)
    assert admission.admissible(bound, version=0, next_step=0, outstanding=0) == 4
    assert admission.admissible(bound, version=0, next_step=1, outstanding=0) == 0


@pytest.mark.parametrize(("next_step", "expected"), [(8, 8), (9, 4), (10, 0)])
def test_admission_stops_where_the_run_ends(next_step, expected):
    bound = admission.Bound(groups_per_step=4, staleness=2, steps=10)
    assert admission.admissible(bound, version=next_step, next_step=next_step, outstanding=0) == expected


def test_a_running_group_at_its_deadline_holds_the_step_back():
    bound = admission.Bound(groups_per_step=2, staleness=1, steps=10)
    selection = admission.select(bound, step=1, finished={5: 1, 6: 1}, running={4: 0})
    assert selection == admission.Selection()
    assert admission.select(bound, step=1, finished={5: 1, 6: 1}, running={}).batch == (5, 6)


def test_of_spare_groups_the_first_to_finish_train_and_those_left_at_their_deadline_are_given_up():
    bound = admission.Bound(groups_per_step=2, staleness=0, steps=10, spare=2)
    assert admission.admissible(bound, version=0, next_step=0, outstanding=0) == 4
    selection = admission.select(bound, step=0, finished={3: 0, 1: 0, 0: 0}, running={2: 0})
    assert selection == admission.Selection(batch=(3, 1), surplus=(0, 2))
    assert admission.admissible(bound, version=0, next_step=1, outstanding=0) == 0, "no step may train them any more"


def test_recycled_groups_go_first_and_new_ones_begin_between_two_steps():
    bound = admission.Bound(groups_per_step=2, staleness=1, steps=10, spare=1, recycles=True)
    assert admission.admissible(bound, version=0, next_step=0, outstanding=0) == 3
    selection = admission.select(bound, step=0, finished={2: 0, 0: 0}, running={1: 0})
    assert selection == admission.Selection(batch=(2, 0))
    assert admission.admissible(bound, version=0, next_step=1, outstanding=1) == 0, "a step is under way"
    assert admission.admissible(bound, version=1, next_step=1, outstanding=1) == 2
    held = admission.select(bound, step=1, finished={3: 1, 4: 1}, running={1: 0})
    assert held == admission.Selection(), "it may wait one step"
    assert admission.select(bound, step=1, finished={3: 1, 1: 0}, running={4: 1}).batch == (1, 3)
    assert admission.admissible(bound, version=9, next_step=9, outstanding=1) == 1, "nothing follows the last step"


def test_spare_groups_that_a_later_step_may_train_go_on():
    bound = admission.Bound(groups_per_step=2, staleness=1, steps=10, spare=1)
    selection = admission.select(bound, step=1, finished={5: 1, 3: 0}, running={4: 0, 6: 1, 7: 1})
    assert selection == admission.Selection(batch=(3, 5), surplus=(4,))


def test_more_groups_late_than_are_spare_hold_the_step_back():
    bound = admission.Bound(groups_per_step=2, staleness=1, steps=10, spare=1)
    selection = admission.select(bound, step=1, finished={5: 1, 6: 1}, running={2: 0, 3: 0})
    assert selection == admission.Selection()


def test_the_last_step_gives_up_whatever_is_left():
    bound = admission.Bound(groups_per_step=2, staleness=2, steps=4, spare=1)
    assert admission.admissible(bound, version=3, next_step=3, outstanding=0) == 3
    selection = admission.select(bound, step=3, finished={8: 3, 7: 2}, running={9: 3})
    assert selection == admission.Selection(batch=(7, 8), surplus=(9,))
