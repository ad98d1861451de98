"""Segments of rollouts as requests: slots, caches, groups, and what one segment tells of another."""

from __future__ import annotations

import json

import hypothesis
import pytest
import scheduler_machine as machines
from hypothesis import stateful
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling.prediction import evidence, prefix_tree

LEARNING = ("cmlfq", "cmlfq_paper", "heddle")
WORKED = protocols.CausalState("bash", 1_000, "success")
FAILED = protocols.CausalState("bash", 1_000, "failure")


class SegmentMachine(machines.SchedulerMachine):
    """Random trees of segments. A rollout ends as a whole, children first, as the dispatcher ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.rollouts: dict[str, list[protocols.RequestInfo]] = {}

    @stateful.rule(group=st.integers(-1, 2), version=st.integers(0, 2))
    def arrive(self, group: int, version: int) -> None:
        name = f"rollout-{self.arrived}"
        self.arrived += 1
        self.rollouts[name] = []
        self.begin(protocols.RequestInfo(name, f"prompt-{group}", group, 10, 0, version, rollout_id=name))

    @stateful.precondition(lambda self: self.rollouts)
    @stateful.rule(
        data=st.data(), shared=st.integers(0, 40_000), known=st.booleans(), generated=st.sampled_from([0, 7])
    )
    def branch(self, data: st.DataObject, shared: int, known: bool, generated: int) -> None:
        """Another segment, of a parent that the scheduler may not know any more."""
        rollout = data.draw(st.sampled_from(sorted(self.rollouts)))
        segments = self.rollouts[rollout]
        parent, first = data.draw(st.sampled_from(segments)), segments[0]
        number = len(segments)
        self.begin(
            protocols.RequestInfo(
                f"{rollout}+{number}",
                first.prompt_id,
                first.group_id,
                shared + 10 + generated,
                generated,
                first.dispatch_version,
                parent=(parent.request_id if known else "forgotten") if shared else "",
                shared_tokens=shared,
                rollout_id=rollout,
                segment=number,
            )
        )

    def begin(self, info: protocols.RequestInfo) -> None:
        self.rollouts[info.rollout_id].append(info)
        self.waiting[info.request_id] = self.now
        self.generated[info.request_id] = info.generated_tokens
        self.tell("on_arrival", info)

    @stateful.precondition(lambda self: False)
    @stateful.rule()
    def finish(self) -> None:
        """Replaced by `finish_rollout`: no segment ends alone."""

    @stateful.precondition(lambda self: self.rollouts)
    @stateful.rule(data=st.data())
    def finish_rollout(self, data: st.DataObject) -> None:
        self.end_rollout(data.draw(st.sampled_from(sorted(self.rollouts))))

    def end_rollout(self, rollout: str) -> None:
        for info in reversed(self.rollouts.pop(rollout)):
            self.end(info.request_id)

    @stateful.invariant()
    def groups_count_rollouts(self) -> None:
        for group, counted in self.scheduler._groups.items():
            assert counted.live == sum(segments[0].group_id == group for segments in self.rollouts.values())
        assert set(self.scheduler._rollouts) == set(self.rollouts)

    @stateful.invariant()
    def what_was_learnt_survives_a_restart(self) -> None:
        kept = json.loads(json.dumps(self.scheduler.snapshot()))
        # A snapshot first takes in what waits to be learnt, so the twin needs one, too, to decide alike.
        assert json.loads(json.dumps(self.twin.snapshot())) == kept
        again = machines.create(self.policy)
        again.restore(kept)
        assert json.loads(json.dumps(again.snapshot())) == kept

    def teardown(self) -> None:
        self.change_instances(set(machines.INSTANCES))
        while self.rollouts:
            self.now += machines.AGEING
            self.end_rollout(min(self.rollouts, key=lambda name: (self.idle(name), name)))
        assert not self.waiting
        assert not self.decoding
        for server in self.scheduler.servers.values():
            assert not server.decoding
            assert server.residents == server.context == 0
            assert server.footprint == server.urgency == 0.0

    def idle(self, rollout: str) -> bool:
        return not any(info.request_id in self.decoding for info in self.rollouts[rollout])


@pytest.mark.parametrize("policy", config_lib.POLICIES)
def test_trees_of_segments_leak_no_slot_and_starve_nobody(policy):
    machine = type(f"{policy}Segments", (SegmentMachine,), {"policy": policy})
    settings = hypothesis.settings(max_examples=20, stateful_step_count=40)
    stateful.run_state_machine_as_test(machine, settings=settings)


@pytest.mark.parametrize("policy", config_lib.POLICIES)
def test_a_rollout_of_one_segment_is_served_as_a_plain_request(policy):
    """The twin is told of no rollouts, and decides alike on every event (`SchedulerMachine.tell`)."""

    class Twin:
        def __init__(self, scheduler: protocols.Scheduler) -> None:
            self.scheduler = scheduler

        def on_arrival(self, info: protocols.RequestInfo, now: float) -> list[protocols.Placement]:
            plain = protocols.RequestInfo(
                info.request_id, info.prompt_id, info.group_id, info.context_tokens, 0, info.dispatch_version
            )
            return self.scheduler.on_arrival(plain, now)

        def __getattr__(self, name: str):
            return getattr(self.scheduler, name)

    class Machine(SegmentMachine):
        def __init__(self) -> None:
            super().__init__()
            self.twin = Twin(self.twin)

        @stateful.precondition(lambda self: False)
        @stateful.rule()
        def branch(self) -> None:
            """No second segment."""

    machine = type(f"{policy}Plain", (Machine,), {"policy": policy})
    settings = hypothesis.settings(max_examples=10, stateful_step_count=40)
    stateful.run_state_machine_as_test(machine, settings=settings)


# Caches.

SAME = tuple(protocols.Instance(f"engine-{index}", 1, 4, cache_tokens=200_000) for index in range(3))


def first(name: str, context: int = 100, group: int = 0) -> protocols.RequestInfo:
    return protocols.RequestInfo(name, f"prompt-{name}", group, context, rollout_id=name)


def child(of: str, number: int, shared: int, own: int = 10, parent: str = "", group: int = 0) -> protocols.RequestInfo:
    return protocols.RequestInfo(
        f"{of}+{number}",
        f"prompt-{of}",
        group,
        shared + own,
        parent=parent or of,
        shared_tokens=shared,
        rollout_id=of,
        segment=number,
    )


def place_of(placements: list[protocols.Placement], name: str) -> str:
    return next(placement.instance for placement in placements if placement.request_id == name)


def with_parent(policy: str, busy: int = 0) -> protocols.Scheduler:
    """A rollout whose first segment, of 60,000 tokens, was served by the last instance, and is away.

    New requests go to the first instance, which is as idle. `busy` long requests decode on the last one.
    """
    scheduler = machines.create(policy, ())
    scheduler.on_instance_change(SAME[-1:], 0.0)
    for name in ("r", *(f"busy-{index}" for index in range(busy))):
        assert place_of(scheduler.on_arrival(first(name, 60_000), 0.0), name) == SAME[-1].name
    scheduler.on_tool_call("r", 50, 1.0)
    scheduler.on_instance_change(SAME, 1.0)
    return scheduler


@pytest.mark.parametrize("policy", ["cmlfq", "cmlfq_paper", "sticky", "sticky_cache", "length_predictor", "mlfq"])
def test_a_child_goes_where_its_parents_long_context_is(policy):
    scheduler = with_parent(policy)
    assert place_of(scheduler.on_arrival(child("r", 1, 60_000), 2.0), "r+1") == SAME[-1].name
    assert place_of(scheduler.on_arrival(first("new"), 3.0), "new") != SAME[-1].name


def test_a_child_that_shares_little_goes_where_it_is_served_best():
    for shared, home in ((60_000, True), (20, False)):
        scheduler = with_parent("cmlfq", busy=1)
        placed = place_of(scheduler.on_arrival(child("r", 1, shared), 2.0), "r+1")
        assert (placed == SAME[-1].name) == home


def test_a_child_of_a_lost_instance_goes_anywhere():
    scheduler = with_parent("cmlfq")
    scheduler.on_instance_change(SAME[:-1], 1.5)
    assert place_of(scheduler.on_arrival(child("r", 1, 60_000), 2.0), "r+1") in {SAME[0].name, SAME[1].name}


def test_a_child_of_an_unknown_parent_is_placed_as_a_new_request():
    scheduler = with_parent("cmlfq")
    assert place_of(scheduler.on_arrival(child("gone", 3, 5_000), 2.0), "gone+3")
    scheduler.on_finish("gone+3", 500, 3.0)


def test_a_first_placement_of_a_child_is_no_move():
    scheduler = with_parent("least_loaded")
    placed = scheduler.on_arrival(child("r", 1, 60_000), 2.0)
    assert [placement.move for placement in placed] == [None]


def test_a_parent_that_waits_for_its_child_is_no_resident_but_comes_home():
    scheduler = with_parent("cmlfq")
    home = scheduler.servers[SAME[-1].name]
    assert home.residents == 1
    scheduler.on_arrival(child("r", 1, 60_000), 2.0)
    assert home.residents == 1, "the child alone"
    scheduler.on_tool_call("r+1", 30, 3.0)
    assert place_of(scheduler.on_tool_return("r", WORKED, 61_000, 4.0), "r") == home.name
    assert home.residents == 1, "the parent alone"


# Groups.


def test_the_last_rollouts_of_a_group_are_counted_without_their_segments():
    """A rollout of four segments is nearer to its group's end than two rollouts of one."""
    scheduler = machines.create("cmlfq", ())
    scheduler.on_instance_change([protocols.Instance("only", 1, 1)], 0.0)
    scheduler.on_arrival(first("deep", group=2), 0.0)
    scheduler.on_tool_call("deep", 10, 1.0)
    scheduler.on_arrival(first("one", group=1), 2.0)
    scheduler.on_arrival(first("two", group=1), 2.0)
    for number in range(1, 4):
        scheduler.on_arrival(child("deep", number, 50, group=2), 3.0)
    served = []
    for name in ("one", "deep+1", "deep+2", "deep+3"):
        served += machines.places(scheduler.on_finish(name if not served else served[-1][0], 10, 4.0))
    assert [name for name, _ in served] == ["deep+1", "deep+2", "deep+3", "two"]


# Evidence.


def expected(known: evidence.Evidence, track, generated: int = 0) -> float:
    points = known.predict(track, generated)
    return sum(tokens * mass for tokens, mass in zip(points, prefix_tree.MASSES, strict=True))


def test_segments_are_compared_with_siblings_by_their_number():
    known = evidence.Evidence(config_lib.SchedulerConfig())
    for _ in range(80):
        parent = known.start("p", 0)
        for number, tokens in ((1, 200), (2, 2_000)):
            known.finish(known.start("p", 0, number), tokens)
        known.finish(parent, 10)
    lengths = [expected(known, known.start("p", 0, number)) for number in (1, 2)]
    assert lengths == pytest.approx([200, 2_000], rel=0.2)


def test_a_segment_that_arrives_with_tokens_teaches_nothing_and_still_finishes():
    known = evidence.Evidence(config_lib.SchedulerConfig())
    for number in (0, 1):
        known.finish(known.start("p", 0, number), 40)
    kept = json.dumps(known.snapshot())
    track = known.start("p", 5, 2)
    known.observe(track, FAILED, 20)
    assert expected(known, track, 20) > 0
    known.finish(track, 9_000)
    assert json.dumps(known.snapshot()) == kept


@pytest.mark.parametrize("policy", LEARNING)
def test_what_segments_taught_is_kept_and_merged(policy):
    taught, again, joined = (machines.create(policy) for _ in range(3))
    taught.on_instance_change(machines.INSTANCES, 0.0)
    for index in range(5):
        name = f"r{index}"
        taught.on_arrival(first(name), 0.0)
        taught.on_arrival(child(name, 1, 40), 1.0)
        taught.on_tool_call(f"{name}+1", 20, 2.0)
        taught.on_tool_return(f"{name}+1", WORKED, 90, 3.0)
        taught.on_finish(f"{name}+1", 60, 4.0)
        taught.on_finish(name, 10, 4.0)
    kept = json.loads(json.dumps(taught.snapshot()))
    again.restore(kept)
    joined.merge(kept)
    assert json.loads(json.dumps(again.snapshot())) == kept
    nodes = [json.loads(json.dumps(each))["by_prompt"]["nodes"] for each in (joined.snapshot(), kept)]
    assert [node[:3] for node in nodes[0]] == [node[:3] for node in nodes[1]]
    assert ["prompt-r0", 1] in [node[1] for node in nodes[0]], "the second segments of the prompt"


# Off switches.


def test_independent_segments_are_plain_requests():
    scheduler = machines.create("cmlfq", (), segments="independent")
    scheduler.on_instance_change(SAME[-1:], 0.0)
    scheduler.on_arrival(first("r", 60_000), 0.0)
    scheduler.on_tool_call("r", 50, 1.0)
    scheduler.on_instance_change(SAME, 1.0)
    assert place_of(scheduler.on_arrival(child("r", 1, 60_000), 2.0), "r+1") != SAME[-1].name
    assert scheduler.requests["r+1"].rollout is not scheduler.requests["r"].rollout


@pytest.mark.parametrize(("sees", "differs"), [("causes", True), ("blind", False), ("mean", False)])
def test_evidence_that_hides_tool_returns_predicts_alike_after_all_of_them(sees, differs):
    known = evidence.Evidence(config_lib.SchedulerConfig(evidence=sees))
    for index in range(40):
        for state, tokens in ((WORKED, 60), (FAILED, 4_000)):
            track = known.start(f"{index}", 0)
            known.observe(track, state, 10)
            known.finish(track, tokens)
    lengths = []
    for state in (WORKED, FAILED):
        track = known.start("new", 0)
        known.observe(track, state, 10)
        lengths.append(expected(known, track, 10))
    assert (lengths[0] < 0.5 * lengths[1]) == differs
    assert (lengths[0] == lengths[1]) != differs


def test_one_distribution_for_everybody_knows_no_siblings():
    predicted = {}
    for sees in ("blind", "mean"):
        known = evidence.Evidence(config_lib.SchedulerConfig(evidence=sees))
        for index in range(80):
            known.finish(known.start(f"{index}", 0), 100)
        for _ in range(12):
            known.finish(known.start("long", 0), 5_000)
        predicted[sees] = expected(known, known.start("long", 0))
    assert predicted["blind"] > 1.5 * predicted["mean"]
