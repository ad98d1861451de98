"""The channel of a loop worker: messages in order, ends that prove who they are, and ends that are seen."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from pathlib import Path

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import inprocess
from libra_jax.rollouts import channel, loop_worker, rollouts


async def listening(serve):
    return await channel.listen("127.0.0.1", serve)


def test_messages_of_both_ends_arrive_in_order():
    async def body():
        async def echo(connection):
            async for message in connection.messages():
                connection.send([message, message])

        address, server = await listening(echo)
        connection = await channel.connect(address)
        for number in range(100):
            connection.send({"number": number, "bytes": bytes(1000)})
        await connection.drain()
        came = []
        async for message in connection.messages():
            came.append(message)
            if len(came) == 100:
                break
        connection.close()
        server.close()
        return [[item["number"] for item in pair] for pair in came]

    assert asyncio.run(body()) == [[number, number] for number in range(100)]


def test_neither_end_talks_to_one_that_does_not_know_the_secret():
    async def body():
        served = []

        async def serve(connection):
            served.append(connection)

        address, server = await listening(serve)
        other = dataclasses.replace(address, secret=bytes(32))
        with pytest.raises(protocols.WorkerLost, match=r"cannot be reached|does not know the run's secret"):
            await channel.connect(other)
        # A server that answers anything is found out, too.
        liar = await asyncio.start_server(answering_anything, "127.0.0.1", 0)
        port = liar.sockets[0].getsockname()[1]
        with pytest.raises(protocols.WorkerLost, match="another program listens there"):
            await channel.connect(dataclasses.replace(address, port=port))
        server.close()
        liar.close()
        return served

    assert asyncio.run(body()) == []


async def answering_anything(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(bytes(64))
    await reader.read()
    writer.close()


def test_messages_end_when_the_other_end_is_gone():
    async def body():
        async def leave(connection):
            connection.send("last words")
            await connection.drain()

        address, server = await listening(leave)
        connection = await channel.connect(address)
        async with asyncio.timeout(10):
            came = [message async for message in connection.messages()]
        server.close()
        return came

    assert asyncio.run(body()) == ["last words"]


def test_a_worker_whose_events_cannot_be_sent_breaks_its_connection():
    @contextlib.asynccontextmanager
    async def opened(run):
        yield rollouts.RolloutAgent(make_environment=lambda: None, tokenizer=None)

    async def body():
        made = loop_worker.LoopWorkerActor(
            config_lib.RunConfig(), inprocess.InProcessCluster(), Path(), opened, "127.0.0.1"
        )
        await made.start(asyncio.get_running_loop().time())
        address = await made.listen()
        assert address is not None
        connection = await channel.connect(address)
        made._say(protocols.WorkerNoted("fine"))
        messages = connection.messages()
        async with asyncio.timeout(10):
            assert list(await anext(messages)) == [protocols.WorkerNoted("fine")]
            made._say(protocols.WorkerNoted(threading.Lock()))
            left = [message async for message in messages]
        await made.shutdown()
        return left

    assert asyncio.run(body()) == []


class Stubborn(protocols.LibraError):
    """An error that pickles and does not unpickle."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


def test_an_error_that_does_not_unpickle_travels_as_its_message():
    plain = protocols.EnvironmentCrashed("broken")
    assert protocols.portable(plain) is plain
    found = protocols.portable(Stubborn("this", "that"))
    assert (type(found), str(found)) == (protocols.LibraError, "this and that")


def test_silent_connections_are_few_and_end_without_a_word(capsys, caplog):
    async def body():
        async def serve(connection):
            async for message in connection.messages():
                connection.send(message)

        address, server = await listening(serve)
        silent = [await asyncio.open_connection(address.host, address.port) for _ in range(200)]
        connection = await channel.connect(address)
        connection.send("still served")
        async for message in connection.messages():
            assert message == "still served"
            break

        async def is_open(reader):
            with contextlib.suppress(OSError):
                await reader.readexactly(32)
                try:
                    return bool(await asyncio.wait_for(reader.read(1), 2))
                except TimeoutError:
                    return True
            return False

        opened = sum(await asyncio.gather(*(is_open(reader) for reader, _ in silent)))
        server.close()
        return opened

    assert asyncio.run(body()) <= channel.STRANGERS
    assert caplog.text == ""
    assert "Traceback" not in capsys.readouterr().err
