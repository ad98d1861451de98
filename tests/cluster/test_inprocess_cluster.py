"""The embedded backend's own rules."""

from __future__ import annotations

import asyncio
import os

import pytest
from cluster_actors import Counter, EarlyTurn, SlowStarter, Streamer

from libra_jax.cluster import inprocess
from libra_jax.protocols import ActorSpec, ConfigError, LibraError
from libra_jax.utils import turns


def spec(name: str, factory: str, environment: dict[str, str] | None = None) -> ActorSpec:
    return ActorSpec(name, factory, {}, environment=environment or {})


@pytest.mark.parametrize(
    ("factory", "error", "sentence"),
    [
        ("no_such_package.module:thing", ConfigError, "module 'no_such_package.module' cannot be imported"),
        ("cluster_actors:Absent", ConfigError, "module 'cluster_actors' has no 'Absent'"),
        ("cluster_actors", ConfigError, 'must have the form "package.module:callable"'),
        ("cluster_actors:not_callable", ConfigError, "is a int, not something that can be called"),
        ("cluster_actors:failing", LibraError, "failed with RuntimeError: no accelerator found"),
    ],
)
def test_an_unusable_factory_is_named_with_what_is_wrong(factory, error, sentence):
    async def body():
        cluster = inprocess.InProcessCluster()
        with pytest.raises(error, match=rf"actor 'x'.*{sentence}"):
            await cluster.spawn(ActorSpec("x", factory, {}))

    asyncio.run(body())


def test_a_sync_method_that_ends_in_time_is_waited_for_at_stop():
    async def body():
        cluster = inprocess.InProcessCluster()
        counter = await cluster.spawn(spec("counter", "cluster_actors:Counter"))
        sleeping = asyncio.ensure_future(counter.call(Counter.sleep, 0.4))
        await asyncio.sleep(0.2)
        await cluster.stop("counter")
        assert await sleeping == "slept"

    asyncio.run(body())


def test_environments_of_actors_made_at_once_are_kept_apart_and_restored(monkeypatch):
    monkeypatch.setenv("LIBRA_TEST_VARIABLE", "before")

    async def body():
        cluster = inprocess.InProcessCluster()
        names = [f"streamer-{index}" for index in range(4)]
        made = await asyncio.gather(
            *(cluster.spawn(spec(name, "cluster_actors:Streamer", {"LIBRA_TEST_VARIABLE": name})) for name in names)
        )
        await asyncio.gather(*(streamer.call(Streamer.start) for streamer in made))
        assert [await streamer.call(Streamer.environment) for streamer in made] == [(name, name) for name in names]
        await cluster.shutdown()

    asyncio.run(body())
    assert os.environ["LIBRA_TEST_VARIABLE"] == "before"


def test_a_start_that_waits_for_another_says_so():
    async def body():
        cluster = inprocess.InProcessCluster()
        variables = {"LIBRA_TEST_VARIABLE": "mine"}
        slow, other = [await cluster.spawn(spec(name, "cluster_actors:SlowStarter", variables)) for name in "ab"]
        with turns.watched() as holds:
            first = asyncio.ensure_future(slow.call(SlowStarter.start))
        with turns.watched() as waits:
            second = asyncio.ensure_future(other.call(SlowStarter.start))
        await asyncio.sleep(0.01)
        assert (holds.queued, waits.queued) == (False, True)
        await slow.call(SlowStarter.open)
        await first
        await asyncio.sleep(0)
        assert not waits.queued
        await other.call(SlowStarter.open)
        await second
        await cluster.shutdown()

    asyncio.run(body())


@pytest.mark.parametrize("factory", ["EarlyTurn", "EarlyTurnOnThread"])
def test_a_start_that_ends_its_turn_lets_the_next_start_beside_it(factory, monkeypatch):
    monkeypatch.setenv("LIBRA_TEST_VARIABLE", "before")

    async def body():
        cluster = inprocess.InProcessCluster()
        specs = [spec(name, f"cluster_actors:{factory}", {"LIBRA_TEST_VARIABLE": name}) for name in "ab"]
        made = [await cluster.spawn(item) for item in specs]
        starts = [asyncio.ensure_future(actor.call(SlowStarter.start)) for actor in made]
        for actor in made:
            await asyncio.wait_for(actor.call(EarlyTurn.begun), 20)
        while os.environ["LIBRA_TEST_VARIABLE"] != "before":  # noqa: ASYNC110 (nothing tells when it is put back)
            await asyncio.sleep(0)
        assert not any(start.done() for start in starts)
        assert [host._actor.started_with for host in cluster._hosts.values()] == ["a", "b"]
        for actor in made:
            await actor.call(SlowStarter.open)
        await asyncio.gather(*starts)
        assert os.environ["LIBRA_TEST_VARIABLE"] == "before"
        await cluster.shutdown()

    asyncio.run(body())


def test_an_actor_without_variables_does_not_wait_for_the_start_of_one_that_has_some():
    async def body():
        cluster = inprocess.InProcessCluster()
        slow = await cluster.spawn(spec("slow", "cluster_actors:SlowStarter", {"LIBRA_TEST_VARIABLE": "slow"}))
        starting = asyncio.ensure_future(slow.call(SlowStarter.start))
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            streamer = await cluster.spawn(spec("streamer", "cluster_actors:Streamer"))
            await streamer.call(Streamer.start)
        assert not starting.done()
        await slow.call(SlowStarter.open)
        await starting
        await cluster.shutdown()

    asyncio.run(body())
