"""Weights from one relay to the next: what comes is what was published; anything else is refused by name."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from libra_jax import protocols
from libra_jax.models import config as models_config
from libra_jax.models import transformer
from libra_jax.weights import differences, gradient_channel, memfd, relay, snapshot

SECONDS = 20.0


@pytest.fixture
def sync():
    """Publishes random parameters as a version; returns its chunks."""
    shape = dataclasses.replace(models_config.load_preset("libra-tiny"), num_layers=2, vocab_size=104)
    publisher = snapshot.HostSnapshot(shape, "float32", 200_000, True)

    def publish(version):
        count = publisher.open(version, transformer.init_params(shape, jax.random.key(version)))
        return [publisher.stage(version, index) for index in range(count)]

    yield publish
    publisher.shutdown()


def content(chunk):
    return memfd.open_peer(chunk.transport)[: chunk.nbytes]


async def link(above, below, name, generation=1):
    await above.connect(name, generation, await below.listen(generation))


def chain(body, count=3, seconds=SECONDS):
    """Runs a body on relays in a row, over the loopback; nothing of theirs is left."""

    async def main():
        relays = [relay.create(f"relay-{number}", seconds, "127.0.0.1:1") for number in range(count)]
        try:
            for number in range(1, count):
                await link(relays[number - 1], relays[number], f"relay-{number}")
            await body(*relays)
        finally:
            for made in relays:
                await made.shutdown()
                await made.shutdown()

    asyncio.run(main())


async def carry(above, below, name, chunk):
    _, copy = await asyncio.gather(above.send(chunk, name), below.receive(chunk))
    return copy


@pytest.mark.parametrize("part_bytes", [1 << 26, 100_000], ids=["a message a chunk", "several"])
def test_every_relay_keeps_what_was_published_bit_for_bit_in_the_same_memory_for_every_version(
    sync, monkeypatch, part_bytes
):
    monkeypatch.setattr(gradient_channel, "PART_BYTES", part_bytes)

    async def body(root, first, second):
        places = []
        for version in (1, 2):
            copies = []
            for chunk in sync(version):
                copy = await carry(root, first, "relay-1", chunk)
                further = await carry(first, second, "relay-2", copy)
                assert content(chunk) == content(copy) == content(further)
                assert dataclasses.replace(further, transport=chunk.transport) == chunk
                assert len({made.transport["inode"] for made in (chunk, copy, further)}) == 3
                copies.append(further)
            assert len(copies) > 2
            places.append([copy.transport for copy in copies])
        assert places[0] == places[1]
        assert (await second.health())["bytes"] == sum(copy.nbytes for copy in copies)

    chain(body)


def test_another_version_or_damaged_bytes_are_refused_and_the_link_goes_on(sync):
    async def body(root, first):
        chunk = sync(3)[0]
        stale = dataclasses.replace(chunk, policy_version=2)
        with pytest.raises(protocols.LibraError, match=r"relay-1 was sent chunk 0 of version 2 instead of chunk 0"):
            await asyncio.gather(root.send(stale, "relay-1"), first.receive(chunk))
        owner = memfd.Owner(chunk.nbytes, "a test")
        owner.buffer[: chunk.nbytes] = bytes(chunk.nbytes)
        damaged = dataclasses.replace(chunk, transport=owner.address)
        with pytest.raises(protocols.LibraError, match=r"chunk 0 of version 3 came to relay-1 damaged: checksum"):
            await asyncio.gather(root.send(damaged, "relay-1"), first.receive(chunk))
        owner.close()
        assert content(await carry(root, first, "relay-1", chunk)) == content(chunk)

    chain(body, 2)


def test_a_chunk_that_does_not_come_in_time_closes_the_link_and_another_link_brings_it(sync):
    async def body(root, first):
        chunk = sync(1)[0]
        with pytest.raises(
            gradient_channel.ChannelError, match=r"relay-1 \(generation 1\) is closed: the other side took"
        ):
            await first.receive(chunk)
        with pytest.raises(gradient_channel.ChannelError, match="is closed"):
            await root.send(chunk, "relay-1")
        await link(root, first, "relay-1", 2)
        assert content(await carry(root, first, "relay-1", chunk)) == content(chunk)

    chain(body, 2, seconds=1.0)


def test_who_has_no_link_or_another_relays_is_told_so(sync):
    async def body(root, first):
        chunk = sync(1)[0]
        with pytest.raises(protocols.LibraError, match="relay-0 has no link to relay-7: call connect first"):
            await root.send(chunk, "relay-7")
        with pytest.raises(protocols.LibraError, match="relay-0 has no link to receive over: call listen first"):
            await root.receive(chunk)
        address = await first.listen(5)
        with pytest.raises(
            protocols.LibraError, match=r"link of relay-1 \(generation 5\) is not .* relay-1 in generation 4"
        ):
            await root.connect("relay-1", 4, address)

    chain(body, 2)


@pytest.fixture
def steps():
    """Publishes versions in bfloat16, each a small step after the one before; returns the version's chunks."""
    shape = dataclasses.replace(models_config.load_preset("libra-tiny"), num_layers=2, vocab_size=104)
    publisher = snapshot.HostSnapshot(shape, "bfloat16", 200_000, True)
    first = transformer.init_params(shape, jax.random.key(0))

    def publish(version):
        moved = jax.tree.map(lambda leaf: leaf + 3e-6 * version * np.sign(leaf) * (leaf.ndim > 1), first)
        count = publisher.open(version, moved)
        return [publisher.stage(version, index) for index in range(count)]

    yield publish
    publisher.shutdown()


async def change(above, below, name, chunk, made):
    _, copy = await asyncio.gather(above.send(chunk, name, made), below.receive(chunk, made))
    return copy


def test_relays_with_differences_hold_what_relays_with_whole_chunks_hold(steps):
    sent, whole = [], []

    async def body(root, first, second, third):
        # The first two of the row get differences, and the third gets whole chunks.
        await link(root, third, "relay-3", 2)
        for version in range(1, 6):
            for chunk in steps(version):
                made = await root.compare(chunk)
                assert (made is None) == (version == 1)
                copy = await change(root, first, "relay-1", chunk, made)
                further = await change(first, second, "relay-2", copy, made)
                other = await carry(root, third, "relay-3", chunk)
                assert content(copy) == content(further) == content(other) == content(chunk)
                assert await root.compare(chunk) == made  # asked again
                if made is not None:
                    sent.append(made.nbytes)
                    whole.append(chunk.nbytes)
        same = dataclasses.replace(chunk, policy_version=6)
        made = await root.compare(same)
        assert made.base == chunk.checksum
        assert made.nbytes == differences.COUNT_BYTES
        assert content(await change(root, first, "relay-1", same, made)) == content(chunk)

    chain(body, 4)
    assert len(sent) > 8
    assert 0 < sum(sent) < 0.1 * sum(whole)


def test_a_relay_whose_chunk_is_not_the_base_refuses_its_difference_and_takes_the_whole_chunk(steps):
    async def body(root, first):
        chunk = steps(1)[0]
        await root.compare(chunk)
        copy = await carry(root, first, "relay-1", chunk)
        # A byte of the copy flips, which the coordinator cannot know.
        first._memory[0].buffer[77] ^= 1
        chunk = steps(2)[0]
        made = await root.compare(chunk)
        with pytest.raises(protocols.LibraError, match=r"chunk 0 of version 2 came to relay-1 damaged: checksum"):
            await change(root, first, "relay-1", chunk, made)
        with pytest.raises(protocols.LibraError, match=r"relay-1 does not hold what the difference of chunk 0 of"):
            await first.receive(chunk, made)
        await link(first, root, "relay-0")
        with pytest.raises(protocols.LibraError, match=r"relay-1 does not hold the difference of chunk 0 of version 1"):
            await first.send(copy, "relay-0", made)
        assert content(await carry(root, first, "relay-1", chunk)) == content(chunk)
        chunk = steps(3)[0]
        assert content(await change(root, first, "relay-1", chunk, await root.compare(chunk))) == content(chunk)

    chain(body, 2)


def test_chunks_that_change_all_over_are_sent_whole(sync):
    async def body(root):
        assert [await root.compare(chunk) for chunk in sync(1)] == [None] * len(sync(1))
        assert [await root.compare(chunk) for chunk in sync(2)] == [None] * len(sync(2))

    chain(body, 1)


def test_too_little_memory_for_the_copies_is_an_error_with_the_numbers(steps, monkeypatch):
    async def body(root):
        chunk = steps(1)[0]
        monkeypatch.setattr(memfd, "available_bytes", lambda: 1_000)
        with pytest.raises(memfd.SharedMemoryError, match=r"the copy of chunk 0 of version 1, which relay-0 compares"):
            await root.compare(chunk)

    chain(body, 1)


SENDER = """
import asyncio, json, sys
from libra_jax import protocols
from libra_jax.weights import memfd, relay, gradient_channel

async def main(address, nbytes):
    made = relay.create("relay-0", 20.0, "127.0.0.1:1")
    gradient_channel.PART_BYTES = nbytes // 4
    await made.connect("relay-1", 1, address)
    owner = memfd.Owner(nbytes, "a test")
    chunk = protocols.WeightChunk(1, 0, 1, (), nbytes, owner.address)
    give, given = gradient_channel.Channel._pass, []
    def few(channel, verb, message, deadline):
        if len(given) == 2:
            print("half", flush=True)
            sys.stdin.readline()
        given.append(message)
        give(channel, verb, message, deadline)
    gradient_channel.Channel._pass = few
    await made.send(chunk, "relay-1")

asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2])))
"""


@pytest.mark.multiprocess
def test_a_sender_killed_in_the_middle_is_noticed_at_once_and_another_link_brings_the_chunk(sync, monkeypatch):
    async def body(root, first):
        chunk = sync(1)[0]
        monkeypatch.setattr(gradient_channel, "PART_BYTES", chunk.nbytes // 4)
        address = await first.listen(1)
        process = subprocess.Popen(  # noqa: ASYNC220 (it is killed as one)
            [sys.executable, "-c", SENDER, json.dumps(address), str(chunk.nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            receiving = asyncio.ensure_future(first.receive(chunk))
            assert (await asyncio.to_thread(process.stdout.readline)).strip() == "half"
            process.kill()
            began = time.monotonic()
            with pytest.raises(gradient_channel.ChannelError, match=r"relay-1 .* is closed: the connection broke"):
                await receiving
            assert time.monotonic() - began < SECONDS / 2
        finally:
            process.kill()
            process.communicate(timeout=20)
        await link(root, first, "relay-1", 2)
        assert content(await carry(root, first, "relay-1", chunk)) == content(chunk)

    chain(body, 2)


def test_memory_of_another_host_is_refused_by_name(monkeypatch):
    owner = memfd.Owner(4096, "a test")
    here = owner.address
    monkeypatch.setenv(memfd.HOST_VARIABLE, "elsewhere")
    with pytest.raises(memfd.SharedMemoryError, match=r"are on another host .* than this one \(elsewhere\): .*relay"):
        memfd.open_peer(here)
    there = owner.address
    assert there["host"] == "elsewhere"
    np.testing.assert_array_equal(np.frombuffer(memfd.open_peer(there), np.uint8), 0)
    monkeypatch.delenv(memfd.HOST_VARIABLE)
    assert str(os.stat("/proc/self/ns/pid").st_ino) in memfd.host()
    owner.close()
