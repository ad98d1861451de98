"""The engine double behaves like an engine where the coordinator can tell."""

import asyncio
import dataclasses
import sys
import types

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.engines import fake_engine

SAMPLING = protocols.SamplingParams(temperature=1.0, max_tokens=40, stop_token_ids=(2,))


def count_up(token_ids, sampling):
    """A script: the last token plus one, stopping at 50."""
    return sampling.stop_token_ids[0] if token_ids[-1] >= 50 else token_ids[-1] + 1


def make(**options) -> fake_engine.FakeEngine:
    rollout = config_lib.to_dict(config_lib.RolloutConfig(engine="fake", slots=2, max_context=64, stream_interval=4))
    return fake_engine.create("rollout-0", {}, rollout, 1, 0, **options)


def request(*token_ids: int, name: str = "a", sampling=SAMPLING) -> protocols.GenerationRequest:
    return protocols.GenerationRequest(name, token_ids, sampling)


async def collect(engine, item) -> list[protocols.TokenDelta]:
    return [delta async for delta in engine.generate(item)]


def tokens_of(deltas) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def chunk(version: int, index: int, count: int) -> protocols.WeightChunk:
    return protocols.WeightChunk(version, index, count, (), 0, {"kind": "memfd"})


async def update(engine, version: int) -> None:
    await engine.pause()
    await engine.start_weight_update(version)
    await engine.update_weights(chunk(version, 0, 1))
    await engine.finish_weight_update(version)
    await engine.resume()


def test_a_request_resumed_from_its_retained_tokens_goes_on_as_it_would_have():
    async def body():
        engine = make()
        await engine.start()
        whole = tokens_of(await collect(engine, request(7, 8, 9)))
        assert len(whole) > 6
        rest = tokens_of(await collect(engine, request(7, 8, 9, *whole[:5])))
        assert whole[:5] + rest[: len(whole) - 5] == whole

    asyncio.run(body())


def test_rollouts_of_a_group_differ_and_each_repeats_on_another_stream():
    async def body():
        engine = make()
        await engine.start()
        names = ("task-1/0#1", "task-1/1#2", "task-1/2#3")
        first = [tokens_of(await collect(engine, request(7, 8, 9, name=name))) for name in names]
        assert len(set(map(tuple, first))) == 3
        again = tokens_of(await collect(engine, request(7, 8, 9, *first[1][:2], name="task-1/1#9")))
        assert (first[1][:2] + again)[: len(first[1])] == first[1]
        greedy = dataclasses.replace(SAMPLING, temperature=0.0)
        alike = [tokens_of(await collect(engine, request(7, 8, 9, name=name, sampling=greedy))) for name in names]
        assert alike[0] == alike[1] == alike[2]

    asyncio.run(body())


def test_a_script_named_in_the_arguments_writes_the_tokens_and_its_stop_token_ends_them(monkeypatch):
    async def body():
        monkeypatch.setitem(sys.modules, "scripts_of_a_test", types.SimpleNamespace(count_up=count_up))
        engine = make(script="scripts_of_a_test:count_up")
        await engine.start()
        deltas = await collect(engine, request(45))
        assert tokens_of(deltas) == [46, 47, 48, 49, 50, 2]
        assert [delta.finish_reason for delta in deltas] == [None, "stop"]
        assert deltas[0].log_probs == tuple(map(fake_engine.log_prob, deltas[0].token_ids))

    asyncio.run(body())


def test_max_tokens_and_a_full_context_both_end_with_length():
    async def body():
        engine = make()
        engine._script = lambda token_ids, sampling: 9
        await engine.start()
        deltas = await collect(engine, request(1))
        assert (len(tokens_of(deltas)), deltas[-1].finish_reason) == (40, "length")
        deltas = await collect(engine, request(*range(3, 63)))
        assert (len(tokens_of(deltas)), deltas[-1].finish_reason) == (4, "length")
        with pytest.raises(protocols.LibraError, match="no room in engine rollout-0's context of 64"):
            await collect(engine, request(*range(64)))

    asyncio.run(body())


def test_a_pause_freezes_and_tokens_after_it_carry_the_new_version():
    async def body():
        engine = make(tokens_per_second=400.0)
        engine._script = lambda token_ids, sampling: 9
        await engine.start()
        await engine.init_weight_transfer({"kind": "memfd"})
        await update(engine, 0)
        stream = engine.generate(request(5))
        first = await anext(stream)
        await engine.pause()
        following = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.05)
        assert not following.done()
        await update(engine, 1)
        versions = [first.policy_versions, (await following).policy_versions]
        assert versions == [(0,) * 4, (1,) * 4]
        await stream.aclose()
        assert (await engine.health())["running"] == 0

    asyncio.run(body())


def test_slots_bound_the_requests_that_decode_and_closing_one_frees_its_slot():
    async def body():
        engine = make(tokens_per_second=400.0)
        engine._script = lambda token_ids, sampling: 9
        await engine.start()
        streams = [engine.generate(request(5, name=str(index))) for index in range(3)]
        await asyncio.gather(anext(streams[0]), anext(streams[1]))
        third = asyncio.ensure_future(anext(streams[2]))
        await asyncio.sleep(0.05)
        assert await engine.health() == {"running": 2, "waiting": 1, "tokens": 8}
        await streams[0].aclose()
        await third
        for stream in streams:
            await stream.aclose()

    asyncio.run(body())


def test_an_engine_told_to_die_loses_its_requests_and_answers_no_more():
    async def body():
        engine = make(fail_after_tokens=10)
        engine._script = lambda token_ids, sampling: 9
        await engine.start()
        seen = []
        with pytest.raises(protocols.WorkerLost, match="engine rollout-0 is gone"):  # noqa: PT012
            async for delta in engine.generate(request(5)):
                seen.extend(delta.token_ids)
        assert len(seen) == 8
        for call in (engine.pause, engine.health):
            with pytest.raises(protocols.WorkerLost):
                await call()
        await engine.shutdown()

    asyncio.run(body())


def test_weight_verbs_out_of_order_or_incomplete_are_refused():
    async def body():
        engine = make()
        await engine.start()
        with pytest.raises(protocols.LibraError, match="before init_weight_transfer"):
            await engine.start_weight_update(1)
        await engine.init_weight_transfer({"kind": "memfd"})
        await engine.start_weight_update(1)
        with pytest.raises(protocols.LibraError, match="a chunk of version 2 came while loading 1"):
            await engine.update_weights(chunk(2, 0, 1))
        await engine.update_weights(chunk(1, 0, 2))
        with pytest.raises(protocols.LibraError, match="1 of 2 chunks of version 1 came"):
            await engine.finish_weight_update(1)

    asyncio.run(body())


def test_a_script_without_a_function_is_refused():
    with pytest.raises(protocols.ConfigError, match='must have the form "module:function"'):
        make(script="json")
    assert make(script="json:dumps")._script.__name__ == "dumps"
