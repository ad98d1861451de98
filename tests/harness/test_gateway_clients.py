"""Clients that hang, flood or vanish cost their own session only."""

import asyncio
import contextlib
import gc
import json
import logging
import socket
import threading
import weakref

import gateway_doubles as doubles
import httpx
import psutil
import pytest
from gateway_doubles import ASK, SECRET, in_loop

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.harness.gateway import server

CHAT = {"model": "m", "messages": ASK}
MIB = 2**20


def address(url: str) -> tuple[str, int]:
    parsed = httpx.URL(url)
    return parsed.host, parsed.port


def raw_request(body: dict, secret: str = SECRET) -> bytes:
    content = json.dumps(body).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: a", f"x-api-key: {secret}", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, "", ""]).encode() + content


@contextlib.asynccontextmanager
async def connection(url: str, receive_bytes: int = 0):
    """A connection whose reader reads nothing by itself, with a small receive buffer if asked for."""
    plain = socket.socket()
    if receive_bytes:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, address(url))
    try:
        yield plain
    finally:
        plain.close()


async def is_served(url: str) -> None:
    """The other session is answered."""
    async with doubles.plain_client(url, doubles.OTHER) as client:
        assert (await client.post("/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize("streams", [False, True])
@in_loop
async def test_a_client_that_leaves_frees_its_slot(streams: bool):
    session = doubles.Scripted([protocols.ContentDelta("Hel"), 3600.0, *doubles.said("lo")])
    async with doubles.serving(session) as url:
        async with connection(url) as plain:
            await asyncio.get_running_loop().sock_sendall(plain, raw_request(CHAT | {"stream": streams}))
            await doubles.until(lambda: session.running == 1)
        await doubles.until(lambda: session.running == 0)
    assert (len(session.requests), session.delivered) == (1, [])


@in_loop
async def test_a_client_that_leaves_frees_the_slots_of_all_choices():
    session = doubles.Scripted(doubles.said("one"), [3600.0], [3600.0])
    async with doubles.serving(session) as url:
        async with connection(url) as plain:
            await asyncio.get_running_loop().sock_sendall(plain, raw_request(CHAT | {"n": 3}))
            await doubles.until(lambda: session.running == 3)
        await doubles.until(lambda: session.running == 0)
    assert session.delivered == []


@in_loop
async def test_a_client_that_never_reads_is_cut_off():
    """The output ends at the engine's speed, whether or not the client reads; then the client has a deadline."""
    text = "x" * 200_000
    session = doubles.Scripted([*(protocols.ContentDelta(text) for _ in range(40)), doubles.reply(text * 40)])
    other = doubles.Scripted()
    async with doubles.serving(session, other, write_seconds=0.5) as url, connection(url, 4096) as plain:
        await asyncio.get_running_loop().sock_sendall(plain, raw_request(CHAT | {"stream": True}))
        await doubles.until(lambda: session.running == 1)
        await is_served(url)
        await doubles.until(lambda: session.running == 0)
        assert session.delivered == []
        await is_served(url)
        # What is in the kernel's buffers can be read, and then the connection ends without the rest.
        size = 0
        with contextlib.suppress(ConnectionError):
            while chunk := await asyncio.get_running_loop().sock_recv(plain, MIB):
                size += len(chunk)
    assert size < len(text) * 40


@in_loop
async def test_a_slow_client_gets_all_and_the_output_does_not_wait_for_it():
    text = "x" * 200_000
    session = doubles.Scripted([*(protocols.ContentDelta(text) for _ in range(40)), doubles.reply(text * 40)])
    async with doubles.serving(session) as url, doubles.plain_client(url) as client:
        size = 0
        async with client.stream("POST", "/chat/completions", json=CHAT | {"stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    size += len(json.loads(line[6:])["choices"][0]["delta"].get("content", ""))
                await asyncio.sleep(0.001)
    assert size == len(text) * 40
    assert len(session.delivered) == 1


@pytest.mark.parametrize("announced", [False, True])
@in_loop
async def test_a_body_of_100_mb_never_enters_memory(announced: bool):
    process = psutil.Process()
    rss: list[int] = []

    async def flood():
        for _ in range(100):
            rss.append(process.memory_info().rss)
            yield b" " * MIB

    session, other = doubles.Scripted(), doubles.Scripted()
    async with doubles.serving(session, other, max_body_bytes=MIB) as url, doubles.plain_client(url) as client:
        await client.post("/chat/completions", json=CHAT)
        headers = {"Content-Length": str(100 * MIB)} if announced else {}
        answer = await client.post("/chat/completions", content=flood(), headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert max(rss) - rss[0] < 32 * MIB
        await is_served(url)
    assert len(session.requests) == 1


@in_loop
async def test_a_body_at_the_limit_is_read():
    session = doubles.Scripted()
    content = json.dumps(CHAT).encode()
    async with doubles.serving(session, max_body_bytes=len(content)) as url, doubles.plain_client(url) as client:
        assert (await client.post("/chat/completions", content=content)).status_code == 200
        assert (await client.post("/chat/completions", content=content + b" ")).status_code == 413


@in_loop
async def test_a_client_that_never_ends_its_body_has_a_deadline():
    session, other = doubles.Scripted(), doubles.Scripted()
    async with doubles.serving(session, other, request_seconds=0.3) as url, connection(url) as plain:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(plain, raw_request(CHAT)[:-1])
        assert (await loop.sock_recv(plain, 4096)).startswith(b"HTTP/1.1 408 ")
        await is_served(url)


@in_loop
async def test_a_connection_without_a_request_is_closed(monkeypatch):
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.2)
    other = doubles.Scripted()
    async with doubles.serving(doubles.Scripted(), other) as url:
        for sent in (b"", b"POST /v1/chat/compl", raw_request(CHAT)):
            async with connection(url) as plain:
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(plain, sent)
                with contextlib.suppress(ConnectionError):  # a reset
                    while await loop.sock_recv(plain, 4096):
                        pass
        await is_served(url)


@in_loop
async def test_a_head_without_an_end_is_cut_off():
    other = doubles.Scripted()
    async with doubles.serving(doubles.Scripted(), other) as url, connection(url) as plain:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(plain, b"GET /health HTTP/1.1\r\n")
            for _ in range(100):
                await loop.sock_sendall(plain, b"x: " + b"y" * 10_000 + b"\r\n")
                await asyncio.sleep(0)
            assert await loop.sock_recv(plain, 1) == b""
        await is_served(url)


@pytest.mark.parametrize("sent", [b"\x16\x03\x01 no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nUpgrade: websocket\r\n\r\n"])
@in_loop
async def test_broken_http_and_upgrades_leave_no_line_in_the_log(sent: bytes, caplog):
    caplog.set_level(logging.INFO)
    async with doubles.serving(doubles.Scripted(), doubles.Scripted()) as url, connection(url) as plain:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(plain, sent)
        assert (await loop.sock_recv(plain, 4096)).startswith(b"HTTP/1.1 4")
        await is_served(url)
    assert [record for record in caplog.records if "uvicorn" in record.name or "libra" in record.name] == []


@in_loop
async def test_one_connection_serves_many_requests():
    session = doubles.Scripted()
    async with doubles.serving(session) as url, doubles.plain_client(url) as client:
        ports = set()
        for streams in (False, True) * 3:
            async with client.stream("POST", "/chat/completions", json=CHAT | {"stream": streams}) as answer:
                await answer.aread()
                ports.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
        assert len(ports) == 1
    assert len(session.delivered) == 6


@in_loop
async def test_sessions_are_served_at_once_and_apart():
    """100 sessions ask at once, and each hears what was asked in its own."""
    sessions = {f"secret-{number}": doubles.Scripted([0.05, *doubles.said(f"for {number}")]) for number in range(100)}
    gateway = server.GatewayServer(doubles.Scripts(**sessions), config_lib.GatewayConfig())
    url = await gateway.start()
    try:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60, trust_env=False) as client:

            async def ask(secret: str) -> str:
                answer = await client.post("/chat/completions", json=CHAT, headers={"x-api-key": secret})
                return answer.json()["choices"][0]["message"]["content"]

            for _ in range(2):
                texts = await asyncio.gather(*map(ask, sessions))
                assert texts == [f"for {number}" for number in range(100)]
    finally:
        await gateway.stop()
    assert all(len(session.delivered) == 2 for session in sessions.values())


class Ordered(doubles.Scripted):
    """Notes at each request how many answers before it counted as delivered."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[int] = []

    def reply(self, request):
        self.known.append(len(self.delivered))
        return super().reply(request)


@pytest.mark.parametrize("streams", [False, True])
@in_loop
async def test_an_answer_counts_as_delivered_before_the_next_request(streams: bool):
    session = Ordered()

    def ask(url: str) -> None:
        # From another thread and on other connections, so that nothing here orders the two.
        headers = {"x-api-key": SECRET, "Connection": "close"}
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            for _ in range(100):
                client.post("/chat/completions", json=CHAT | {"stream": streams}).raise_for_status()

    async with doubles.serving(session, requests_per_second=0) as url:
        await asyncio.to_thread(ask, url)
    assert session.known == list(range(100))


@in_loop
async def test_a_successor_takes_the_port_at_once():
    session = doubles.Scripted()
    async with doubles.serving(session) as url:
        await asyncio.to_thread(lambda: httpx.get(f"{url}/models", headers={"x-api-key": SECRET}, trust_env=False))
    async with doubles.serving(session, port=address(url)[1]) as again, doubles.plain_client(again) as client:
        assert again == url
        assert (await client.get("/models")).status_code == 200


@in_loop
async def test_a_port_in_use_is_refused_by_name():
    async with doubles.serving(doubles.Scripted()) as url:
        with pytest.raises(protocols.ConfigError, match=r"config\.gateway\.port"):
            async with doubles.serving(doubles.Scripted(), port=address(url)[1]):
                pass


@in_loop
async def test_several_gateways_of_a_process_serve_apart():
    first, second = doubles.Scripted(doubles.said("first")), doubles.Scripted(doubles.said("second"))
    async with doubles.serving(first) as one, doubles.serving(second, host="::1") as other:
        texts = []
        for url in (one, other):
            async with doubles.plain_client(url) as client:
                texts.append(
                    (await client.post("/chat/completions", json=CHAT)).json()["choices"][0]["message"]["content"]
                )
    assert texts == ["first", "second"]


@in_loop
async def test_stop_ends_requests_threads_and_connections(monkeypatch):
    monkeypatch.setattr(server, "STOP_SECONDS", 0.2)
    session = doubles.Scripted([3600.0])
    threads = threading.active_count()
    async with doubles.serving(session) as url:
        asked = asyncio.create_task(doubles.plain_client(url).post("/chat/completions", json=CHAT))
        await doubles.until(lambda: session.running == 1)
    with pytest.raises(httpx.TransportError):
        await asked
    assert session.running == 0
    assert threading.active_count() == threads
    with pytest.raises(OSError, match=r"refused|Connect"):
        socket.create_connection(address(url), timeout=1)


@in_loop
async def test_an_ended_session_leaves_nothing_behind():
    sessions = doubles.Scripts(**{SECRET: doubles.Scripted()})
    ended = weakref.ref(sessions.find(SECRET))
    gateway = server.GatewayServer(sessions, config_lib.GatewayConfig())
    url = await gateway.start()
    try:
        async with doubles.plain_client(url) as client:
            await client.post("/responses", json={"model": "m", "input": "Hi"})
            await client.post("/chat/completions", json=CHAT | {"stream": True})
            sessions.sessions = {}
            assert (await client.post("/chat/completions", json=CHAT)).status_code == 401
        await doubles.until(lambda: gc.collect() >= 0 and ended() is None)
    finally:
        await gateway.stop()
