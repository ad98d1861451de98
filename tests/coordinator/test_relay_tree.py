"""Weights on their way to other hosts: once over each link, while engines load; who fails costs its own host alone."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import relay_doubles as doubles
from relay_doubles import Hosts, on_clock

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.hybrid import training_sides
from libra_jax.scheduling import registry
from libra_jax.weights import relay_tree

CHUNKS = 4
WHOLE = [(1, index) for index in range(CHUNKS)]


def test_the_bytes_come_to_each_host_once_however_many_engines_it_has_and_the_trainers_sends_few_copies():
    async def body(hosts: Hosts) -> None:
        await hosts.publish(1)
        assert set(hosts.versions()) == {1}

    hosts = on_clock(body, 8, engines=2)
    for host in range(1, 8):
        assert sorted(hosts.came(host)) == WHOLE
    assert hosts.came(0) == []  # its engines read the trainer's memory
    copies = collections.Counter(host for host, _ in hosts.sent)
    assert copies[0] == relay_tree.FAN_OUT * CHUNKS
    assert max(copies.values()) == relay_tree.FAN_OUT * CHUNKS
    assert len(hosts.loaded) == 8 * 2 * CHUNKS


def test_frozen_weights_cross_to_a_host_once_and_count_in_the_first_sync_only():
    async def body(hosts: Hosts) -> None:
        hosts.trainer.frozen = frozenset({2, 3})
        moved = []
        for version in range(1, 4):
            await hosts.publish(version)
            assert set(hosts.versions()) == {version}
            moved.append(hosts.publisher.nbytes // doubles.NBYTES)
        assert moved == [CHUNKS, 2, 2]

    hosts = on_clock(body, 4)
    for host in range(1, 4):
        assert sorted(hosts.came(host)) == [*WHOLE, (2, 0), (2, 1), (3, 0), (3, 1)]
    # Engines are told of every chunk, and know by themselves which weights they hold.
    assert len(hosts.loaded) == 3 * 4 * CHUNKS


def test_engines_that_get_their_first_weights_together_are_told_of_once():
    told: list[list[str]] = []

    async def body(hosts: Hosts) -> None:
        hosts.run.events.subscribe(
            protocols.EnginesChanged, lambda event: told.append([instance.name for instance in event.serving])
        )
        await hosts.publish(1)
        await hosts.publish(2)
        assert told == [list(hosts.engines.engines)]

    on_clock(body, 3, engines=2)
    assert len(told[0]) == 6


@pytest.mark.parametrize("policy", config_lib.POLICIES)
def test_a_scheduler_that_hears_of_all_instances_at_once_places_as_one_that_hears_of_each(policy):
    every = [protocols.Instance(f"engine-{number}", (1, 1, 2, 4)[number % 4], 2) for number in range(12)]

    def placed(heard: Sequence[Sequence[protocols.Instance]]) -> list[protocols.Placement]:
        settings = config_lib.SchedulerConfig(policy=policy, max_remaining_tokens=(100, 1_000))
        scheduler = registry.create(settings, remaining=lambda request: 500, kinds=((1, ""), (2, ""), (4, "")))
        for instances in heard:
            assert scheduler.on_instance_change(instances, 0.0) == []
        infos = [protocols.RequestInfo(f"p{n // 2}/{n % 2}", f"p{n // 2}", n // 2, 10 * n, 0) for n in range(20)]
        return [placement for info in infos for placement in scheduler.on_arrival(info, 1.0)]

    together = placed([every])
    assert together == placed([every[: count + 1] for count in range(len(every))])
    # Some policies keep the wide ones free, and Heddle's requests wait for the instance of their rank.
    assert len(together) >= (5 if policy == "heddle" else 10)


def test_a_chunk_crosses_while_engines_load_the_one_before_and_the_trainers_host_waits_for_nobody():
    async def body(hosts: Hosts) -> None:
        begin = doubles.seconds()
        await hosts.publish(1)
        # One chunk's crossing, and then one load after the other.
        assert doubles.seconds() - begin == pytest.approx((CHUNKS + 1) * doubles.LOAD_SECONDS, abs=0.1)
        ends = {name: end - begin for name, _, _, _, end in hosts.loaded}
        assert ends["engine-0.0"] == pytest.approx(CHUNKS * doubles.LOAD_SECONDS, abs=0.1)

    hosts = on_clock(body, 2)
    crossed = {index: (begin, end) for _, _, index, begin, end in hosts.crossed}
    loaded = {index: (begin, end) for name, _, index, begin, end in hosts.loaded if name == "engine-1.0"}
    for index in range(CHUNKS - 1):
        assert crossed[index + 1][0] < loaded[index][1]
        assert loaded[index][0] < crossed[index + 1][1]


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_relay_that_is_lost_on_the_way_costs_its_own_hosts_engines_which_are_brought_up_before_they_serve(how):
    struck: list[int] = []

    async def fault(relay: doubles.Relay, verb: str, chunk: protocols.WeightChunk) -> None:
        # Host 1 is above hosts 3 and 4, which have its first chunk by then.
        if (relay.host, verb, chunk.policy_version, chunk.index) == (1, "receive", 2, 1) and not struck:
            struck.append(1)
            if how == "dies":
                relay.kill()
            else:
                await asyncio.Event().wait()

    async def body(hosts: Hosts) -> None:
        await hosts.publish(1)
        began = doubles.seconds()
        await hosts.publish(2)
        assert doubles.seconds() - began < doubles.LIMITS["weight_sync"] + 15
        assert hosts.versions() == [2, protocols.NO_VERSION, 2, 2, 2]
        assert hosts.engines.losses == 1
        async with hosts.client.lock:  # the trainer trains: it is asked for nothing
            await asyncio.sleep(30)
        assert hosts.versions() == [2] * 5
        assert hosts.engines.engines["engine-1.0"].state == "serving"
        await hosts.publish(3)
        assert hosts.versions() == [3] * 5

    hosts = on_clock(body, 5, fault=fault)
    made = collections.Counter(hosts.cluster.spawned)
    assert {name for name, times in made.items() if times > 1} == {"relay-1", "engine-1.0"}
    for host in (2, 3, 4):
        assert hosts.came(host).count((2, 0)) == 1
    assert any("relay of host 1 is dropped" in note for note in hosts.recorder.notes)


def changed(how: str, chunk: protocols.WeightChunk) -> protocols.WeightChunk:
    if how == "damaged":
        return dataclasses.replace(chunk, checksum="other")
    return dataclasses.replace(chunk, policy_version=chunk.policy_version - 1)


@pytest.mark.parametrize("how", ["damaged", "of another version"])
@pytest.mark.parametrize("always", [False, True])
def test_a_chunk_that_is_not_what_was_asked_for_is_asked_for_once_more_and_then_its_relay_is_dropped(how, always):
    struck: list[int] = []

    async def fault(relay: doubles.Relay, verb: str, chunk: protocols.WeightChunk) -> Any:
        if (verb, chunk.index) == ("send", 2) and (always or not struck):
            struck.append(1)
            return changed(how, chunk)
        return None

    async def body(hosts: Hosts) -> None:
        await hosts.publish(1)
        lost = protocols.NO_VERSION
        assert hosts.versions() == ([1, lost, lost] if always else [1, 1, 1])

    hosts = on_clock(body, 3, fault=fault)
    refused = [host for host, version, index, *_ in hosts.crossed if index == 2]
    assert len(refused) == (4 if always else 3)
    assert any("it is asked for again" in note for note in hosts.recorder.notes)


def test_the_relay_on_the_trainers_host_is_made_again_and_nobody_is_lost():
    async def fault(relay: doubles.Relay, verb: str, chunk: protocols.WeightChunk) -> None:
        if (relay.host, verb, chunk.index) == (0, "send", 2) and relay.hosts.cluster.spawned.count("relay-0") == 1:
            relay.kill()

    async def body(hosts: Hosts) -> None:
        await hosts.publish(1)
        assert hosts.versions() == [1] * 4
        assert hosts.engines.losses == 0

    hosts = on_clock(body, 4, fault=fault)
    assert hosts.cluster.spawned.count("relay-0") == 2


def test_an_engine_that_was_down_reads_its_hosts_copy_while_the_trainer_trains_and_nothing_crosses_again():
    async def body(hosts: Hosts) -> None:
        await hosts.publish(1)
        before = len(hosts.crossed)
        engine = hosts.engines.engines["engine-2.0"]
        async with hosts.client.lock:
            hosts.engines.lost(engine, engine.life, protocols.WorkerLost("it was killed"))
            await asyncio.sleep(20)
            assert (engine.state, engine.policy_version) == ("serving", 1)
        assert len(hosts.crossed) == before

    on_clock(body, 3)


def test_a_relay_that_died_between_two_versions_is_replaced_and_costs_no_engine():
    async def body(hosts: Hosts) -> None:
        await hosts.publish(1)
        hosts.relay(1).kill()
        await hosts.publish(2)
        assert hosts.versions() == [2] * 4
        assert hosts.engines.losses == 0

    hosts = on_clock(body, 4)
    assert hosts.cluster.spawned.count("relay-1") == 2
    assert hosts.came(1) == [*WHOLE, *((2, index) for index in range(CHUNKS))]


def test_a_host_whose_relay_cannot_be_made_gets_no_weights_and_the_others_go_on():
    async def body(hosts: Hosts) -> None:
        hosts.unmakable.add(2)
        hosts.relay(2).kill()
        await hosts.publish(1)
        assert hosts.versions() == [1, 1, protocols.NO_VERSION, 1]

    hosts = on_clock(body, 4)
    assert any("relay-2 is not there" in note and "no such host" in note for note in hosts.recorder.notes)


def test_a_trainer_that_fails_while_it_stages_ends_the_weight_sync_and_is_no_relays_fault():
    async def body(hosts: Hosts) -> None:
        async def broken(policy_version: int, index: int) -> protocols.WeightChunk:
            if index == 2:
                raise protocols.LibraError("there is no memory left")
            return await doubles.Trainer.stage_weights(hosts.trainer, policy_version, index)

        hosts.trainer.stage_weights = broken
        with pytest.raises(protocols.LibraError, match="there is no memory left"):
            await hosts.publish(1)
        assert hosts.engines.losses == 0
        assert not any("dropped" in note for note in hosts.recorder.notes)

    on_clock(body, 3)


class Reader(protocols.TrainingSide):
    """A replica that notes on which host the chunks were that it was given; it is asked for nothing else."""

    def __init__(self) -> None:
        self.read: list[Any] = []

    async def start(self) -> protocols.TrainerInfo:
        return protocols.TrainerInfo(0, 0, {"data": 1}, "cpu")

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        self.read.append((chunk.policy_version, dict(chunk.transport)))

    async def shutdown(self) -> None:
        pass


def test_a_replica_on_another_host_reads_its_hosts_copy_though_no_engine_there_takes_part():
    async def body(hosts: Hosts) -> None:
        spec = protocols.ActorSpec("hybrid-2", f"{__name__}:Reader", {}, host=2)
        sides = training_sides.TrainingSides(hosts.run, {"engine-2.0": spec})
        await sides.ensure("engine-2.0")
        sides.follow("engine-2.0")
        hosts.publisher = hosts.make_publisher(sides=sides)
        hosts.engines.engines["engine-2.0"].state = "asleep"
        for version in (1, 2):
            await hosts.publish(version)
            await asyncio.sleep(1)
        assert sides.holds("engine-2.0", 2)
        read = [(version, {"host": 2}) for version in (1, 2) for _ in range(CHUNKS)]
        assert hosts.cluster.actors["hybrid-2"].read == read
        hosts.unmakable.add(2)
        hosts.relay(2).kill()
        await hosts.publish(3)
        await asyncio.sleep(1)
        assert hosts.cluster.actors["hybrid-2"].read == read
        assert any("hybrid-2 holds no parameters: version 3 could not" in note for note in hosts.recorder.notes)

    on_clock(body, 3)


def test_an_engine_that_is_being_started_again_is_not_blamed_for_its_hosts_relay():
    async def body(hosts: Hosts) -> None:
        await hosts.publish(1)
        hosts.unmakable.add(2)
        hosts.relay(2).kill()
        engine = hosts.engines.engines["engine-2.0"]
        engine.state = "starting"
        await hosts.publisher.catch_up(engine)
        assert engine.state == "starting"
        assert hosts.engines.losses == 0

    on_clock(body, 3)


@pytest.mark.parametrize("making", [20.0, 500.0])
def test_a_relay_that_died_where_an_engine_sleeps_costs_its_replica_nothing_if_it_can_be_made_soon(making):
    async def body(hosts: Hosts) -> None:
        spec = protocols.ActorSpec("hybrid-2", f"{__name__}:Reader", {}, host=2)
        sides = training_sides.TrainingSides(hosts.run, {"engine-2.0": spec})
        await sides.ensure("engine-2.0")
        sides.follow("engine-2.0")
        hosts.publisher = hosts.make_publisher(sides=sides)
        hosts.engines.engines["engine-2.0"].state = "asleep"
        await hosts.publish(1)
        hosts.relay(2).kill()
        slowly_made(hosts, 2, making)
        took = await hosts.publish(2)
        await asyncio.sleep(1)
        soon = making < relay_tree.MAKE_SECONDS
        assert sides.holds("engine-2.0", 2) == sides.follows("engine-2.0") == soon
        assert took < min(making, relay_tree.MAKE_SECONDS) + 15.0
        assert hosts.versions() == [2, 2, protocols.NO_VERSION]

    on_clock(body, 3)


@pytest.mark.parametrize("same", [True, False], ids=["bit for bit", "another mesh rounds otherwise"])
def test_what_another_trainer_publishes_as_the_same_version_crosses_again_only_where_it_differs(same):
    async def body(hosts: Hosts) -> None:
        await hosts.publish(1)
        await hosts.publisher.release()  # its trainer has moved to other processes

        async def staged(policy_version: int, index: int) -> protocols.WeightChunk:
            chunk = await doubles.Trainer.stage_weights(hosts.trainer, policy_version, index)
            return chunk if same else dataclasses.replace(chunk, checksum=f"new {chunk.checksum}")

        hosts.trainer.stage_weights = staged
        engine = hosts.engines.engines["engine-1.0"]
        hosts.engines.lost(engine, engine.life, protocols.WorkerLost("it was killed"))
        await asyncio.sleep(20)
        assert (engine.state, engine.policy_version) == ("serving", 1)

    hosts = on_clock(body, 3)
    assert hosts.came(1) == WHOLE * (1 if same else 2)
    assert hosts.came(2) == WHOLE


def slowly_made(hosts: Hosts, host: int, after: float = 50.0) -> None:
    """Another machine takes the host's place, and that takes a while."""
    spawn = hosts.cluster.spawn

    async def later(spec: protocols.ActorSpec) -> Any:
        if spec.name == f"relay-{host}":
            await asyncio.sleep(after)
        return await spawn(spec)

    hosts.cluster.spawn = later


def test_a_host_that_is_being_replaced_keeps_nobody_elsewhere_from_the_version_not_even_those_below_it():
    async def body(hosts: Hosts) -> None:
        await hosts.publish(1)
        hosts.relay(1).kill()  # above hosts 3 and 4
        slowly_made(hosts, 1)
        began = doubles.seconds()
        await hosts.publish(2)
        ends = {name: end - began for name, version, index, _, end in hosts.loaded if (version, index) == (2, 3)}
        assert ends.pop("engine-1.0") > 50.0
        assert len(ends) == 4
        assert max(ends.values()) < 15.0
        assert hosts.engines.losses == 0

    on_clock(body, 5)


def test_a_host_that_is_being_replaced_and_has_no_engine_to_load_does_not_hold_up_a_weight_sync():
    async def body(hosts: Hosts) -> None:
        spec = protocols.ActorSpec("hybrid-2", f"{__name__}:Reader", {}, host=2)
        sides = training_sides.TrainingSides(hosts.run, {"engine-2.0": spec})
        hosts.publisher = hosts.make_publisher(sides=sides)
        await hosts.publish(1)
        hosts.relay(2).kill()
        slowly_made(hosts, 2)
        engine = hosts.engines.engines["engine-2.0"]
        hosts.engines.lost(engine, engine.life, protocols.WorkerLost("its host lost its power"))
        for version in (2, 3):
            assert await hosts.publish(version) < 15.0
            assert hosts.versions() == [version, version, protocols.NO_VERSION, version]
        await asyncio.sleep(70)
        assert hosts.versions() == [3] * 4

    on_clock(body, 4)
