"""A model of where every request is, against which any policy is run with random events."""

from __future__ import annotations

from hypothesis import stateful
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import registry

INSTANCES = tuple(
    protocols.Instance(f"engine-{index}", degree, slots)
    for index, (degree, slots) in enumerate(((1, 1), (1, 2), (2, 3), (4, 2)))
)
BOUNDS = (100, 1_000)
AGEING = 50.0
TOTAL = 3_000
NEVER_IDLE = ("least_loaded", "round_robin", "sticky", "length_predictor")
"""Policies that leave no slot free while anyone waits; the others may, up to the ageing bound (see their modules)."""

STATES = st.builds(
    protocols.CausalState,
    st.sampled_from(["bash", "search"]),
    st.sampled_from([10, 1_000, 20_000]),
    st.sampled_from(["success", "failure", "timeout"]),
)


def create(policy: str, bounds: tuple[int, ...] = BOUNDS, seed: int = 0, **settings):
    config = config_lib.SchedulerConfig(
        policy=policy, max_remaining_tokens=bounds, **{"ageing_seconds": AGEING, **settings}
    )
    return registry.create(config, remaining=lambda request: 1 + sum(map(ord, request)) * 37 % TOTAL, seed=seed)


def places(placements: list[protocols.Placement]) -> list[tuple[str, str]]:
    """Where each request is placed."""
    return [(placement.request_id, placement.instance) for placement in placements]


class SchedulerMachine(stateful.RuleBasedStateMachine):
    """Random events against a model of where every request is."""

    policy = ""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = create(self.policy)
        self.twin = create(self.policy)
        self.live: dict[str, protocols.Instance] = {}
        self.waiting: dict[str, float] = {}  # and since when
        self.decoding: dict[str, str] = {}
        self.away: set[str] = set()
        self.served_by: dict[str, str] = {}
        self.generated: dict[str, int] = {}
        self.arrived = 0
        self.now = 0.0

    def tell(self, event: str, *arguments) -> None:
        """The same event to both schedulers, which must agree; decisions are carried out on the model."""
        placements = getattr(self.scheduler, event)(*arguments, self.now)
        assert placements == getattr(self.twin, event)(*arguments, self.now)
        for placement in placements:
            name = placement.request_id
            if not placement.instance:
                del self.decoding[name]
                self.waiting[name] = self.now
                continue
            assert placement.instance in self.live
            self.check_move(placement)
            assert (name in self.waiting) != (name in self.decoding)
            self.waiting.pop(name, None)
            self.decoding[name] = placement.instance
            self.check_slots(exact=False)
        self.check_slots(exact=True)

    def check_move(self, placement: protocols.Placement) -> None:
        """A move leads from the instance that served the request last, and says so if that one is gone."""
        source, move = self.served_by.get(placement.request_id), placement.move
        self.served_by[placement.request_id] = placement.instance
        if source in (None, placement.instance):
            assert move is None
            return
        assert move is not None
        assert (move.request, move.source, move.target) == (placement.request_id, source, placement.instance)
        assert (move.reason == protocols.MoveReason.ENGINE_LOST) >= (source not in self.live)

    def check_slots(self, exact: bool) -> None:
        for name, instance in self.live.items():
            load = sum(other == name for other in self.decoding.values())
            assert load <= instance.slots
            if exact:
                assert load == self.scheduler.servers[name].load

    @stateful.rule(seconds=st.floats(0.0, 2 * AGEING))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @stateful.rule(live=st.sets(st.sampled_from(INSTANCES)))
    def change_instances(self, live: set[protocols.Instance]) -> None:
        self.live = {instance.name: instance for instance in live}
        for request in [request for request, name in self.decoding.items() if name not in self.live]:
            del self.decoding[request]
            self.waiting[request] = self.now
        self.tell("on_instance_change", sorted(live, key=lambda item: item.name))

    @stateful.rule(bounds=st.lists(st.integers(1, 2 * TOTAL), min_size=3, max_size=3), degrees=st.sampled_from([1, 3]))
    def follow_plan(self, bounds: list[int], degrees: int) -> None:
        """Buckets of other bounds, or one for all instances."""
        pairs = zip((1, 2, 4)[:degrees], sorted(bounds), strict=False)
        self.tell("on_plan", [protocols.PlannedBucket(degree, 1, bound) for degree, bound in pairs])

    @stateful.rule(group=st.integers(-1, 2), version=st.integers(0, 2))
    def arrive(self, group: int, version: int) -> None:
        name = f"request-{self.arrived}"
        self.arrived += 1
        self.waiting[name] = self.now
        self.generated[name] = 0
        self.tell("on_arrival", protocols.RequestInfo(name, f"prompt-{group}", group, 10, 0, version))

    @stateful.precondition(lambda self: self.decoding)
    @stateful.rule(data=st.data(), tokens=st.integers(1, 2_000))
    def progress(self, data: st.DataObject, tokens: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.decoding)))
        self.generated[request] += tokens
        self.tell("on_progress", request, self.generated[request])

    @stateful.precondition(lambda self: self.decoding)
    @stateful.rule(data=st.data(), tokens=st.integers(1, 500))
    def call_tool(self, data: st.DataObject, tokens: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.decoding)))
        del self.decoding[request]
        self.away.add(request)
        self.generated[request] += tokens
        self.tell("on_tool_call", request, self.generated[request])

    @stateful.precondition(lambda self: self.away)
    @stateful.rule(data=st.data(), causal=STATES)
    def return_tool(self, data: st.DataObject, causal: protocols.CausalState) -> None:
        request = data.draw(st.sampled_from(sorted(self.away)))
        self.away.remove(request)
        self.waiting[request] = self.now
        context = 10 + self.generated[request] + causal.payload_tokens
        self.tell("on_tool_return", request, causal, context)

    @stateful.precondition(lambda self: self.decoding or self.away or self.waiting)
    @stateful.rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted([*self.decoding, *self.away, *self.waiting]))))

    def end(self, request: str) -> None:
        self.decoding.pop(request, None)
        self.away.discard(request)
        self.waiting.pop(request, None)
        self.tell("on_finish", request, self.generated.pop(request))
        if self.waiting and len(self.decoding) < sum(item.slots for item in self.live.values()):
            # A slot is free: a request that has aged no longer waits, whatever the slot is kept for.
            assert max(self.waiting.values()) > self.now - AGEING

    @stateful.invariant()
    def no_slot_idles_while_a_request_waits(self) -> None:
        free = sum(instance.slots for instance in self.live.values()) - len(self.decoding)
        if self.policy in NEVER_IDLE:
            assert free == 0 or not self.waiting

    def teardown(self) -> None:
        """Everyone waiting is served once those before have finished, some only when they have aged."""
        self.change_instances(set(INSTANCES))
        while self.decoding or self.waiting:
            self.now += AGEING
            self.end(min(self.decoding or self.waiting))
        assert not any(server.decoding for server in self.scheduler.servers.values())
