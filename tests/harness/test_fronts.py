"""The coordinator's side of the gateway: what becomes of requests when fronts, clients and sessions end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import coordinator_doubles as doubles
import front_doubles
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.harness.gateway import front, fronts

REQUEST = protocols.ChatRequest([protocols.Message("user", "hello")])


@pytest.fixture(autouse=True)
def scripted_fronts(monkeypatch):
    monkeypatch.setattr(fronts, "FACTORY", "front_doubles:create")
    front_doubles.made.clear()


def with_fronts(test: Callable[[fronts.Fronts], Coroutine[Any, Any, None]], **limits: float) -> None:
    async def main() -> None:
        config = doubles.make_config(cluster={"backend": "ray"}, deadlines=limits)
        run = doubles.run_context(config, doubles.DirectCluster())
        gateway = fronts.Fronts(run, "policy")
        try:
            await run.scope.race(test(gateway))
        finally:
            await run.scope.cancel_background(1.0)
            await gateway.stop()

    asyncio.run(asyncio.wait_for(main(), 20.0))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come to that")


def test_an_answer_streams_through_and_is_delivered_when_the_client_has_it():
    async def test(gateway: fronts.Fronts) -> None:
        session = front_doubles.Scripted()
        endpoint = await gateway.open(session)
        (one,) = front_doubles.made
        assert endpoint.url == "http://127.0.0.1:4321/v1"
        assert one.admitted == {front.digest(endpoint.secret)}
        one.tell(front.OutputRequested(0, front.digest(endpoint.secret), REQUEST))
        await until(lambda: len(one.answers.get(0, ())) == 3)
        assert [type(item) for item in one.answers[0]] == [
            protocols.ContentDelta,
            protocols.ContentDelta,
            protocols.Reply,
        ]
        assert session.delivered == 0
        one.tell(front.Delivered(0))
        await until(lambda: session.delivered == 1)
        assert session.closed == 0

    with_fronts(test)


@pytest.mark.parametrize("complete", [False, True])
def test_a_client_that_goes_away_closes_its_reply_undelivered(complete):
    async def test(gateway: fronts.Fronts) -> None:
        session = front_doubles.Scripted()
        endpoint = await gateway.open(session)
        (one,) = front_doubles.made
        if not complete:
            session.gate.clear()
        one.tell(front.OutputRequested(0, front.digest(endpoint.secret), REQUEST))
        await until(lambda: len(one.answers.get(0, ())) == (3 if complete else 1))
        one.tell(front.Gone(0))
        await until(lambda: session.closed == 1)
        assert session.delivered == 0

    with_fronts(test)


def test_a_request_that_is_asked_again_waits_for_the_end_of_the_first():
    async def test(gateway: fronts.Fronts) -> None:
        session = front_doubles.Scripted()
        endpoint = await gateway.open(session)
        (one,) = front_doubles.made
        session.gate.clear()
        one.tell(front.OutputRequested(0, front.digest(endpoint.secret), REQUEST))
        await until(lambda: 0 in one.answers)
        one.tell(front.Gone(0))
        one.tell(front.OutputRequested(1, front.digest(endpoint.secret), REQUEST))
        await until(lambda: 1 in one.answers)
        assert (session.most, session.closed) == (1, 1)
        # Requests that were left before they were served do not wait for each other.
        for number in (2, 3):
            one.tell(front.OutputRequested(number, front.digest(endpoint.secret), REQUEST))
        for number in (1, 2, 3):
            one.tell(front.Gone(number))
        session.gate.set()
        one.tell(front.OutputRequested(4, front.digest(endpoint.secret), REQUEST))
        await until(lambda: len(one.answers.get(4, ())) == 3)
        assert session.most == 1

    with_fronts(test)


def test_a_front_that_dies_comes_back_at_its_port_with_its_sessions():
    async def test(gateway: fronts.Fronts) -> None:
        session = front_doubles.Scripted()
        reachable: list[bool] = []
        endpoint = await gateway.open(session, reachable=reachable.append)
        (first,) = front_doubles.made
        session.gate.clear()
        first.tell(front.OutputRequested(0, front.digest(endpoint.secret), REQUEST))
        await until(lambda: 0 in first.answers)
        first.die()
        await until(lambda: len(front_doubles.made) == 2 and bool(front_doubles.made[1].admitted))
        second = front_doubles.made[1]
        # A client that asks before its session is known would be refused for good.
        assert (second.port, second.listened_with) == (4321, {front.digest(endpoint.secret)})
        assert (session.closed, session.delivered) == (1, 0)
        await until(lambda: reachable == [False, True])
        session.gate.set()
        # The same numbers come again, and the answers to them are the new front's own.
        second.tell(front.OutputRequested(0, front.digest(endpoint.secret), REQUEST))
        await until(lambda: len(second.answers.get(0, ())) == 3)
        second.tell(front.Delivered(0))
        await until(lambda: session.delivered == 1)

    with_fronts(test)


@pytest.mark.parametrize("call", ["open", "close"])
def test_a_front_that_answers_no_call_is_restarted(call):
    async def test(gateway: fronts.Fronts) -> None:
        known = await gateway.open(front_doubles.Scripted())
        (first,) = front_doubles.made
        first.hang()
        wanted = {front.digest(known.secret)}
        if call == "open":
            wanted.add(front.digest((await gateway.open(front_doubles.Scripted())).secret))
        else:
            await gateway.close(known)
            wanted.clear()
        await until(lambda: len(front_doubles.made) == 2)
        await gateway.open(front_doubles.Scripted(), "another")
        await until(lambda: front_doubles.made[1].admitted == wanted | {front.digest("another")})

    with_fronts(test, first_token=0.2)


def test_a_session_whose_opening_is_cancelled_leaves_nothing():
    async def test(gateway: fronts.Fronts) -> None:
        await gateway.open(front_doubles.Scripted())
        (one,) = front_doubles.made
        one.hang()
        opening = asyncio.ensure_future(gateway.open(front_doubles.Scripted(), "key"))
        await asyncio.sleep(0.01)
        opening.cancel()
        await asyncio.wait({opening})
        one.resume()
        one.tell(front.OutputRequested(0, front.digest("key"), REQUEST))
        await until(lambda: 0 in one.answers)
        assert isinstance(one.answers[0][0], front.Refusal)

    with_fronts(test)


def test_a_front_that_dies_again_and_again_ends_the_run():
    async def test(gateway: fronts.Fronts) -> None:
        await gateway.open(front_doubles.Scripted())
        for life in range(fronts.RESTARTS + 1):
            await until(lambda life=life: len(front_doubles.made) == life + 1)
            front_doubles.made[-1].die()
        await asyncio.sleep(10.0)

    with pytest.raises(protocols.LibraError, match="gateway-0 died"):
        with_fronts(test)


def test_refusals_and_failures_reach_the_client_as_what_they_are():
    async def test(gateway: fronts.Fronts) -> None:
        session = front_doubles.Scripted()
        endpoint = await gateway.open(session)
        (one,) = front_doubles.made
        for number, error in enumerate((protocols.Refused("limit", "enough", "n"), protocols.WorkerLost("no engine"))):
            session.error = error
            one.tell(front.OutputRequested(number, front.digest(endpoint.secret), REQUEST))
            await until(lambda number=number: len(one.answers.get(number, ())) == 2)
        assert one.answers[0][1] == front.Refusal("limit", "enough", "n")
        assert isinstance(one.answers[1][1], front.Failure)
        assert "no engine" in one.answers[1][1].message

    with_fronts(test)


def test_what_a_front_refuses_is_told_to_its_session():
    async def test(gateway: fronts.Fronts) -> None:
        session = front_doubles.Scripted()
        endpoint = await gateway.open(session)
        serving = front.Front(config_lib.GatewayConfig(), "policy")
        await serving.admit([front.digest(endpoint.secret)])
        serving.find(endpoint.secret).note_refusal("functions: deprecated")
        front_doubles.made[0].tell(await anext(serving.events()))
        await until(lambda: session.told == ["functions: deprecated"])

    with_fronts(test)


def test_a_closed_session_is_dismissed_and_its_requests_end():
    async def test(gateway: fronts.Fronts) -> None:
        session = front_doubles.Scripted()
        endpoint = await gateway.open(session)
        (one,) = front_doubles.made
        session.gate.clear()
        one.tell(front.OutputRequested(0, front.digest(endpoint.secret), REQUEST))
        await until(lambda: 0 in one.answers)
        await gateway.close(endpoint)
        assert (session.closed, one.admitted) == (1, set())
        one.tell(front.OutputRequested(1, front.digest(endpoint.secret), REQUEST))
        await until(lambda: 1 in one.answers)
        assert isinstance(one.answers[1][0], front.Refusal)
        assert one.answers[1][0].kind == "closed"

    with_fronts(test)
