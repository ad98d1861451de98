"""Ray's head, watched: its silence is said once, before Ray ends the driver."""

import asyncio

import pytest

from libra_jax.cluster import ray_runtime


@pytest.fixture
def _hurried(monkeypatch):
    monkeypatch.setattr(ray_runtime, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(ray_runtime, "SILENT_SECONDS", 0.1)


async def _until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (records come from elsewhere)
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("_hurried")
def test_a_head_that_falls_silent_is_told_of_once_and_again_only_after_it_has_answered(caplog):
    async def scene() -> None:
        async def answer(_, writer) -> None:
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        watching = asyncio.create_task(ray_runtime.watch_head(address))
        await asyncio.sleep(0.3)
        assert not caplog.records, "it answers"
        server.close()
        await server.wait_closed()
        await _until(lambda: caplog.records)
        await asyncio.sleep(0.3)
        assert len(caplog.records) == 1
        back = await asyncio.start_server(answer, *address.split(":"))
        await asyncio.sleep(0.3)
        back.close()
        await back.wait_closed()
        await _until(lambda: len(caplog.records) == 2)
        watching.cancel()
        assert f"Ray's head at {address} has not answered for " in caplog.records[0].getMessage()

    asyncio.run(scene())
