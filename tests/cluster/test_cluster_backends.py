"""What both backends promise: where methods run, how streams behave, what errors say, how actors end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
from typing import Any

import pytest
from cluster_actors import Counter, Pickled, Reader, Streamer, Stubborn

from libra_jax.protocols import (
    ActorSpec,
    ConfigError,
    DataError,
    DeadlineMissed,
    Group,
    LibraError,
    Task,
    TrainBatch,
    Trajectory,
    WorkerLost,
)


def spec(name: str, factory: str, environment: dict[str, str] | None = None, **arguments: Any) -> ActorSpec:
    return ActorSpec(name, f"cluster_actors:{factory}", arguments, environment=environment or {})


def test_a_sync_actor_is_made_and_called_on_one_thread_always_the_same(with_actors):
    async def body(cluster, counter, streamer):
        threads = await asyncio.gather(*(counter.call(Counter.threads) for _ in range(20)))
        before = await counter.call(Counter.add, 0)
        assert await asyncio.gather(counter.call(Counter.add, 2), counter.call(Counter.add, 3)) == [
            before + 2,
            before + 5,
        ]
        with pytest.raises(AttributeError, match="_private"):
            await counter.call(Counter._private)
        return threads

    threads = with_actors(body)
    assert len({thread for pair in threads for thread in pair}) == 1


def test_a_handle_calls_what_a_protocol_names_and_refuses_what_the_actor_lacks(with_actors):
    async def body(cluster, counter, streamer):
        before = await counter.call(Counter.add, 0)
        assert await counter.call(Counter.add, amount=2) == before + 2
        assert [number async for number in streamer.stream(Streamer.numbers, 3)] == [0, 1, 2]
        with pytest.raises(AttributeError, match="actor 'counter' has no public method 'open'"):
            await counter.call(Streamer.open)

    with_actors(body)


def test_a_batch_that_several_processes_train_on_is_packed_at_most_once(with_actors):
    def group(number):
        task = Task(f"task-{number}", {"counted": Pickled()})
        return Group(number, task, 0, [Trajectory(f"task-{number}/0", task.prompt_id, reward=float(number))])

    async def body(cluster, counter, streamer):
        other = await cluster.spawn(spec("other", "Counter"))
        batch = TrainBatch(3, tuple(map(group, range(4))))
        before = Pickled.times
        calls = [actor.call(Counter.rewards, batch, factor) for actor in (counter, other) for factor in (1.0, 2.0)]
        found = await asyncio.gather(*calls)
        assert Pickled.times - before in (0, 4)
        await cluster.stop("other")
        return found

    plain, twice = [0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 4.0, 6.0]
    assert with_actors(body) == [plain, twice, plain, twice]


def test_calls_of_an_async_actor_interleave(with_actors):
    async def body(cluster, counter, streamer):
        waiting = [asyncio.ensure_future(streamer.call(Streamer.wait)) for _ in range(3)]
        await streamer.call(Streamer.open)
        return await asyncio.gather(*waiting)

    assert with_actors(body) == ["opened"] * 3


def test_streams_keep_their_order_and_their_errors_come_after_their_items(with_actors):
    async def body(cluster, counter, streamer):
        async def read(count):
            return [number async for number in streamer.stream(Streamer.numbers, count)]

        assert await asyncio.gather(read(0), read(1), read(1000)) == [[], [0], list(range(1000))]
        assert [number async for number in streamer.stream(Streamer.wrapped, 3)] == [0, 1, 2]
        seen = []

        async def read_bad():
            async for number in streamer.stream(Streamer.numbers, 5, fail_at=3):
                seen.append(number)

        with pytest.raises(DataError, match="number 3 is bad; leave it out"):
            await read_bad()
        assert seen == [0, 1, 2]

    with_actors(body)


def test_an_actor_calls_another_one_by_its_address(with_actors):
    async def body(cluster, counter, streamer):
        reader = await cluster.spawn(spec("reader", "Reader"))
        assert await reader.call(Reader.ask, streamer.address) == await streamer.call(Streamer.pid)
        # Both read at once, and neither gets what the other asked for.
        theirs, ours = await asyncio.gather(
            reader.call(Reader.read, streamer.address, 500), _numbers(streamer.stream(Streamer.numbers, 300))
        )
        # A second handle in the same process hears of its own streams alone.
        again = await reader.call(Reader.read, streamer.address, 400)
        await cluster.stop("reader")
        return len(theirs), len(ours), len(again)

    assert with_actors(body) == (500, 300, 400)


def test_streams_of_an_actor_that_has_ended_are_closed_in_the_one_that_it_read(with_actors):
    async def body(cluster, counter, streamer):
        reader = await cluster.spawn(spec("reader", "Reader"))
        before = await streamer.call(Streamer.count_closed)
        holding = asyncio.ensure_future(reader.call(Reader.hold, streamer.address))
        await asyncio.sleep(0.5)
        assert await streamer.call(Streamer.count_closed) == before
        await cluster.kill("reader")
        with pytest.raises(WorkerLost):
            await holding
        async with asyncio.timeout(20):
            while await streamer.call(Streamer.count_closed) == before:  # noqa: ASYNC110 (another process counts)
                await asyncio.sleep(0.05)

    with_actors(body)


async def _numbers(stream):
    return [number async for number in stream]


def test_closing_or_cancelling_a_stream_closes_the_actors_generator(with_actors):
    async def body(cluster, counter, streamer):
        before = await streamer.call(Streamer.count_closed)
        stream = streamer.stream(Streamer.forever)
        assert await anext(stream) == 1
        await stream.aclose()
        assert await streamer.call(Streamer.count_closed) == before + 1

        stream = streamer.stream(Streamer.forever)
        assert await anext(stream) == 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
        assert await streamer.call(Streamer.count_closed) == before + 2

    with_actors(body)


def test_a_slow_reader_holds_the_actors_generator_back(with_actors):
    async def body(cluster, counter, streamer):
        async with contextlib.aclosing(streamer.stream(Streamer.counted, 100_000)) as stream:
            await anext(stream)
            counts = [-1, 0]
            while counts[-2] < counts[-1]:
                await asyncio.sleep(0.2)
                counts.append(await streamer.call(Streamer.count_yielded))
        return counts[-1]

    assert with_actors(body) < 10_000


def test_giving_up_on_an_async_call_cancels_it_in_the_actor(with_actors):
    async def body(cluster, counter, streamer):
        call = asyncio.ensure_future(streamer.call(Streamer.note_cancellation))
        await streamer.call(Streamer.until_noting)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(streamer.call(Streamer.until_cancelled), 20)

    with_actors(body)


def test_our_errors_cross_as_themselves_and_others_as_one_sentence(with_actors):
    async def body(cluster, counter, streamer):
        with pytest.raises(DataError, match=r"^tasks\.jsonl line 3 is not JSON; mend the line$"):
            await counter.call(Counter.fail, "ours")
        with pytest.raises(
            LibraError, match=r"^actor 'counter': fail failed with ValueError: first line second line$"
        ) as e:
            await counter.call(Counter.fail, "theirs")
        assert "second line" in str(e.value.__cause__)
        for kind, told in (
            ("exit", "SystemExit: 2"),
            ("interrupt", "KeyboardInterrupt"),
            ("own", "OwnExit: panic"),
            ("stop", "StopIteration: end"),
        ):
            with pytest.raises(LibraError, match=f"^actor 'counter': fail failed with {told}$"):
                await asyncio.wait_for(counter.call(Counter.fail, kind), 20)
        assert await counter.call(Counter.add, 0) is not None

    with_actors(body)


def test_two_actors_cannot_share_a_name(with_actors):
    async def body(cluster, counter, streamer):
        with pytest.raises(LibraError, match="actor 'counter' exists already"):
            await cluster.spawn(spec("counter", "Counter"))

    with_actors(body)


def test_a_factory_that_cannot_be_used_is_named_in_a_sentence(in_cluster):
    async def body(cluster):
        with pytest.raises(ConfigError, match=r"actor 'x'.*module 'cluster_actors' has no 'Absent'"):
            await cluster.spawn(spec("x", "Absent"))
        made = await cluster.spawn(spec("x", "async_factory"))  # the name is free again
        return await made.call(Counter.add, 1)

    assert in_cluster(body) == 8


def test_environment_variables_hold_while_an_actor_is_made_and_started(in_cluster, monkeypatch):
    monkeypatch.delenv("LIBRA_TEST_VARIABLE", raising=False)

    async def body(cluster):
        streamer = await cluster.spawn(spec("streamer", "streamer", {"LIBRA_TEST_VARIABLE": "value"}))
        await streamer.call(Streamer.start)
        assert await streamer.call(Streamer.environment) == ("value", "value")

    in_cluster(body)
    assert "LIBRA_TEST_VARIABLE" not in os.environ


def test_stopping_calls_shutdown_and_ends_every_call_with_worker_lost(in_cluster, tmp_path):
    log = tmp_path / "log"

    async def body(cluster):
        streamer = await cluster.spawn(spec("streamer", "Streamer", log=str(log)))
        waiting = asyncio.ensure_future(streamer.call(Streamer.wait))
        stream = streamer.stream(Streamer.forever)
        assert await anext(stream) == 1
        reading = asyncio.ensure_future(anext(stream))
        await streamer.call(Streamer.count_closed)
        await cluster.stop("streamer")
        for pending in (waiting, reading, streamer.call(Streamer.wait), anext(streamer.stream(Streamer.forever))):
            with pytest.raises(WorkerLost, match=r"actor 'streamer'.*stopped"):
                await pending
        await cluster.stop("streamer")

    in_cluster(body)
    assert log.read_text() == "shutdown"


def test_a_sync_method_that_outlasts_the_stop_is_named(in_cluster):
    async def body(cluster):
        counter = await cluster.spawn(spec("counter", "Counter"))
        sleeping = asyncio.ensure_future(counter.call(Counter.sleep, 3))
        queued = asyncio.ensure_future(counter.call(Counter.add, 1))
        await asyncio.sleep(0.3)
        with pytest.raises(
            DeadlineMissed, match=r"actor 'counter' was still in 'sleep' 0.5 s after it was asked to stop"
        ):
            await cluster.stop("counter")
        for call in (sleeping, queued):
            with pytest.raises(WorkerLost):
                await call

    in_cluster(body, shutdown_seconds=0.5)


def test_shutdown_stops_last_made_first_and_gathers_what_failed(in_cluster, tmp_path):
    log = pathlib.Path(tmp_path / "log")

    async def body(cluster):
        await cluster.spawn(spec("first", "Streamer", log=str(log)))
        await cluster.spawn(spec("busy", "Stubborn", mode="fail"))
        stuck = await cluster.spawn(spec("stuck", "Stubborn", mode="hang"))
        waiting = asyncio.ensure_future(stuck.call(Stubborn.wait))
        with pytest.raises(
            LibraError, match=r"actor 'stuck' was still in 'shutdown'.*; actor 'busy': shutdown.*OSError"
        ):
            await cluster.shutdown()
        with pytest.raises(WorkerLost):
            await waiting

    in_cluster(body, shutdown_seconds=1.0)
    assert log.read_text() == "shutdown"
