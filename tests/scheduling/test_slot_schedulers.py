"""Least loaded and round robin: slots are never exceeded, everyone is served, and a lost instance's requests wait."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.scheduling import least_loaded, registry, round_robin

INSTANCES = tuple(protocols.Instance(f"engine-{index}", 1, slots) for index, slots in enumerate((1, 2, 3)))
RETURN = protocols.CausalState("calculator", 3, "success")


class SchedulerMachine(stateful.RuleBasedStateMachine):
    """Random events against a model of where every request is."""

    scheduler_name = ""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = registry.create(configuration.SchedulerConfig(policy=self.scheduler_name))
        self.live: dict[str, protocols.Instance] = {}
        self.waiting: list[str] = []
        self.decoding: dict[str, str] = {}
        self.away: set[str] = set()
        self.arrived = 0

    def apply(self, placements: list[protocols.Placement]) -> None:
        for placement in placements:
            assert placement.instance in self.live
            assert placement.request_id == self.waiting.pop(0)
            self.decoding[placement.request_id] = placement.instance

    @stateful.rule(live=st.sets(st.sampled_from(INSTANCES)))
    def change_instances(self, live: set[protocols.Instance]) -> None:
        self.live = {instance.name: instance for instance in live}
        displaced = [request for request, name in self.decoding.items() if name not in self.live]
        for request in displaced:
            del self.decoding[request]
        self.waiting = displaced + self.waiting
        self.apply(self.scheduler.on_instance_change(sorted(live, key=lambda item: item.name), 0.0))

    @stateful.rule()
    def arrive(self) -> None:
        request = protocols.RequestInfo(f"request-{self.arrived}", "prompt", 0, 10)
        self.arrived += 1
        self.waiting.append(request.request_id)
        self.apply(self.scheduler.on_arrival(request, 0.0))

    @stateful.precondition(lambda self: self.decoding)
    @stateful.rule(data=st.data())
    def call_tool(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.decoding)))
        del self.decoding[request]
        self.away.add(request)
        self.apply(self.scheduler.on_tool_call(request, 5, 0.0))

    @stateful.precondition(lambda self: self.away)
    @stateful.rule(data=st.data())
    def return_tool(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.away)))
        self.away.remove(request)
        self.waiting.append(request)
        self.apply(self.scheduler.on_tool_return(request, RETURN, 20, 0.0))

    @stateful.precondition(lambda self: self.decoding or self.away or self.waiting)
    @stateful.rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted([*self.decoding, *self.away, *self.waiting])))
        self.decoding.pop(request, None)
        self.away.discard(request)
        self.waiting = [other for other in self.waiting if other != request]
        self.apply(self.scheduler.on_finish(request, 9, 0.0))

    @stateful.invariant()
    def slots_hold_and_none_is_idle_while_a_request_waits(self) -> None:
        for name, instance in self.live.items():
            load = sum(other == name for other in self.decoding.values())
            assert load <= instance.slots
            assert load == instance.slots or not self.waiting

    def teardown(self) -> None:
        """Every waiting request is served once those before it have finished."""
        self.change_instances(set(INSTANCES))
        while self.decoding:
            request = min(self.decoding)
            del self.decoding[request]
            self.apply(self.scheduler.on_finish(request, 9, 0.0))
        assert not self.waiting


class LeastLoadedMachine(SchedulerMachine):
    scheduler_name = "least_loaded"


class RoundRobinMachine(SchedulerMachine):
    scheduler_name = "round_robin"


SETTINGS = hypothesis.settings(deadline=None, max_examples=60, stateful_step_count=30)
TestLeastLoaded = LeastLoadedMachine.TestCase
TestLeastLoaded.settings = SETTINGS
TestRoundRobin = RoundRobinMachine.TestCase
TestRoundRobin.settings = SETTINGS


def arrive_at(scheduler: protocols.Scheduler, count: int) -> list[str]:
    placements = []
    for index in range(count):
        placements += scheduler.on_arrival(protocols.RequestInfo(f"r{index}", "p", 0, 10), 0.0)
    return [placement.instance for placement in placements]


def test_least_loaded_fills_instances_in_proportion_to_their_slots():
    scheduler = least_loaded.LeastLoaded()
    scheduler.on_instance_change([protocols.Instance("small", 1, 2), protocols.Instance("large", 4, 4)], 0.0)
    assert arrive_at(scheduler, 6) == ["large", "small", "large", "large", "small", "large"]


def test_round_robin_takes_turns_and_skips_the_full():
    scheduler = round_robin.RoundRobin()
    scheduler.on_instance_change([protocols.Instance("a", 1, 1), protocols.Instance("b", 1, 3)], 0.0)
    assert arrive_at(scheduler, 4) == ["a", "b", "b", "b"]


def test_an_unknown_scheduler_is_refused_with_the_nearest_name():
    with pytest.raises(protocols.ConfigError, match="did you mean 'least_loaded'"):
        configuration.SchedulerConfig(policy="least_loadd")
