"""Syncs that send changed elements to other hosts (`rollout.full_sync_every`): who lacks the base gets whole chunks."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
import relay_doubles as doubles
from relay_doubles import Hosts, on_clock

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.weights import relay_tree

CHUNKS = 4
EVERY = 4
NEVER = 1_000


def changes(hosts: Hosts, host: int) -> list[tuple[int, int]]:
    """Returns (version, index) of each difference that was sent to a host."""
    return [(version, index) for name, version, index in hosts.changes if name == f"relay-{host}"]


def of(*versions: int) -> list[tuple[int, int]]:
    return [(version, index) for version in versions for index in range(CHUNKS)]


def test_all_hosts_get_differences_but_in_the_first_and_every_so_many_th_sync():
    shares = []

    async def body(hosts: Hosts) -> None:
        for version in range(1, 7):
            await hosts.publish(version)
            assert set(hosts.versions()) == {version}
            shares.append(hosts.publisher.sent_bytes / hosts.publisher.whole_bytes)
        assert hosts.publisher.whole_bytes == 6 * CHUNKS * doubles.NBYTES

    hosts = on_clock(body, 7, full_sync_every=EVERY)
    # Host 3 and on are below another relay, which passes on the differences that it received.
    assert relay_tree.FAN_OUT == 2
    for host in range(1, 7):
        assert changes(hosts, host) == of(2, 3, 5, 6)
        assert sorted(hosts.came(host)) == of(*range(1, 7))
    assert shares == [1.0, 0.01, 0.01, 1.0, 0.01, 0.01]


def test_by_default_every_sync_is_whole():
    async def body(hosts: Hosts) -> None:
        for version in (1, 2):
            await hosts.publish(version)
        assert hosts.publisher.sent_bytes == hosts.publisher.whole_bytes == CHUNKS * doubles.NBYTES
        assert hosts.relay(0).compared == {}

    assert on_clock(body, 2).changes == []


@pytest.mark.parametrize("restarted", [1, 3])
def test_a_restarted_relay_gets_whole_chunks_and_the_others_differences(restarted):
    async def body(hosts: Hosts) -> None:
        for version in (1, 2, 3, 4):
            if version == 3:
                hosts.relay(restarted).kill()
            await hosts.publish(version)
            assert set(hosts.versions()) == {version}
        assert hosts.engines.losses == 0

    hosts = on_clock(body, 5, full_sync_every=NEVER)
    # Hosts 3 and 4 are below host 1, and while it restarts they receive from the root, which has all differences.
    for host in (1, 2, 3, 4):
        assert changes(hosts, host) == (of(2, 4) if host == restarted else of(2, 3, 4))


def test_without_the_roots_copies_a_sync_is_whole_and_the_next_is_not():
    async def body(hosts: Hosts) -> None:
        for version in (1, 2, 3, 4):
            if version == 3:
                hosts.relay(0).kill()
            await hosts.publish(version)
            assert set(hosts.versions()) == {version}
        assert hosts.engines.losses == 0

    hosts = on_clock(body, 3, full_sync_every=NEVER)
    for host in (1, 2):
        assert changes(hosts, host) == of(2, 4)


def test_a_chunk_with_another_checksum_than_the_trainers_comes_again_whole():
    struck: list[int] = []

    async def fault(relay: doubles.Relay, verb: str, chunk: protocols.WeightChunk) -> Any:
        if (verb, relay.host, chunk.policy_version, chunk.index) == ("send", 0, 2, 1) and not struck:
            struck.append(1)
            return dataclasses.replace(chunk, checksum="other")
        return None

    async def body(hosts: Hosts) -> None:
        for version in (1, 2, 3):
            await hosts.publish(version)
            assert set(hosts.versions()) == {version}
        assert hosts.engines.losses == 0

    hosts = on_clock(body, 2, fault=fault, full_sync_every=NEVER)
    assert changes(hosts, 1) == of(2, 3)
    assert hosts.came(1).count((2, 1)) == 2
    assert hosts.cluster.spawned.count("relay-1") == 1
    (note,) = (note for note in hosts.recorder.notes if "did not come" in note)
    assert note.startswith("The difference of chunk 1 of version 2 did not come to host 1 from host 0 (")
    assert note.endswith("it is asked for again, whole.")


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_chunks_that_cannot_be_compared_come_whole(how):
    async def fault(relay: doubles.Relay, verb: str, chunk: protocols.WeightChunk) -> None:
        if (verb, chunk.policy_version, chunk.index) == ("compare", 2, 1):
            if how == "fails":
                raise protocols.LibraError("there is no memory left")
            await asyncio.Event().wait()

    async def body(hosts: Hosts) -> None:
        for version in (1, 2):
            await hosts.publish(version)
            assert set(hosts.versions()) == {version}
        assert hosts.engines.losses == 0

    hosts = on_clock(body, 2, fault=fault, full_sync_every=NEVER)
    assert changes(hosts, 1) == [(2, 0), (2, 2), (2, 3)]
    assert any("could not be compared" in note and "hosts get the whole chunk" in note for note in hosts.recorder.notes)


def test_an_engine_that_missed_syncs_gets_what_its_host_lacks():
    async def body(hosts: Hosts) -> None:
        await hosts.publish(1)
        engine = hosts.engines.engines["engine-1.0"]
        engine.state = "asleep"
        for version in (2, 3):
            await hosts.publish(version)
        engine.state = "loaded"
        await hosts.publisher.catch_up(engine)
        assert hosts.versions() == [3, 3, 3]
        await hosts.publish(4)

    hosts = on_clock(body, 3, full_sync_every=NEVER)
    # Its host holds version 1, and the root has the difference from version 2.
    assert changes(hosts, 1) == of(4)
    assert changes(hosts, 2) == of(2, 3, 4)
    assert hosts.came(1) == of(1, 3, 4)


def test_frozen_weights_are_not_compared():
    async def body(hosts: Hosts) -> None:
        hosts.trainer.frozen = frozenset({2, 3})
        for version in (1, 2):
            await hosts.publish(version)
        assert set(hosts.relay(0).compared) == {0, 1}

    assert changes(on_clock(body, 2, full_sync_every=NEVER), 1) == [(2, 0), (2, 1)]


def test_settings_that_cannot_be_are_refused_by_name():
    with pytest.raises(protocols.ConfigError, match=r"rollout\.full_sync_every: .*nccl; leave it at 1"):
        config_lib.RunConfig(rollout=config_lib.RolloutConfig(transport="nccl", full_sync_every=10))
    with pytest.raises(protocols.ConfigError, match=r"rollout\.full_sync_every.*must be positive"):
        config_lib.RolloutConfig(full_sync_every=0)
