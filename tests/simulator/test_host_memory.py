"""Contexts in host memory: what a fetch takes, what it saves, and what ends it."""

import asyncio
import contextlib
import dataclasses

import pytest
import simulator_doubles as doubles
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.simulator import clock, offload, trajectory

LONG = 8_000
"""Tokens of a context that takes seconds to prefill and a fraction of one to fetch."""


def fleet(count: int, **changes):
    """Returns instances that share a store, and the store."""
    store = offload.Store()
    made = [doubles.make_engine(f"engine-{index}", doubles.Watched, store=store, **changes) for index in range(count)]
    return made, store


async def second_turn(first, second, meanwhile=None) -> float:
    """Returns the seconds of a long context's second turn on `second`, after a first one on `first`."""
    whose = doubles.attempt("0/0", LONG, [doubles.turn(2), doubles.turn(1)])
    await doubles.take_turn(first, whose)
    if meanwhile is not None:
        await meanwhile()
    begin = asyncio.get_running_loop().time()
    await doubles.take_turn(second, whose)
    return asyncio.get_running_loop().time() - begin


def seconds_of(kept: bool, *, target: int = 1, meanwhile=None, **changes) -> tuple[float, list]:
    engines, _ = fleet(2, **changes)
    if not kept:
        engines = [doubles.make_engine(made.name, doubles.Watched, **changes) for made in engines]

    async def main() -> float:
        for made in engines:
            await doubles.serve(made)
        return await second_turn(engines[0], engines[target], meanwhile and (lambda: meanwhile(engines)))

    return clock.run(main()), engines


def test_a_moved_context_takes_its_transfer_and_the_step_of_its_last_token():
    seconds, engines = seconds_of(True)
    model = doubles.model()
    # The second token of the first turn was sampled, not computed.
    expected = model.transfer_seconds(1, LONG + 2) + model.prefill_seconds(1, 1, LONG + 1)
    assert seconds == pytest.approx(expected, rel=1e-3)
    assert engines[1].counters.fetched == pytest.approx(LONG, abs=2)
    assert engines[1].counters.prefilled == 1


def test_without_host_memory_a_moved_context_is_prefilled_again():
    seconds, engines = seconds_of(False)
    assert seconds == pytest.approx(doubles.model().prefill_seconds(1, LONG + 2), rel=1e-3)
    assert engines[1].counters.fetched == 0


async def _crowd_out(engines) -> None:
    await doubles.take_turn(engines[0], doubles.attempt("1/0", 9_000, [doubles.turn(1)]))


def test_an_evicted_context_comes_back_over_the_link_of_its_own_host():
    seconds, _ = seconds_of(True, target=0, meanwhile=_crowd_out, kv_tokens=10_000)
    model = doubles.model()
    expected = model.host_seconds(1, LONG + 2) + model.prefill_seconds(1, 1, LONG + 1)
    assert seconds == pytest.approx(expected, rel=1e-3)


def test_a_fetch_that_takes_longer_than_the_prefill_is_not_begun():
    model = doubles.model(network_share=1e-4)
    slow = offload.Store()
    engines = [doubles.make_engine(f"engine-{index}", doubles.Watched, store=slow, model=model) for index in range(2)]

    async def main() -> float:
        for made in engines:
            await doubles.serve(made)
        return await second_turn(*engines)

    assert clock.run(main()) == pytest.approx(model.prefill_seconds(1, LONG + 2), rel=1e-3)
    assert engines[1].counters.fetched == 0


async def _update(engines) -> None:
    for made in engines:
        await made.pause()
        await made.start_weight_update(1)
        await made.update_weights(protocols.WeightChunk(1, 0, 1, (), 0, {}))
        await made.finish_weight_update(1)
        await made.resume()


async def _die(engines) -> None:
    engines[0].kill()


@pytest.mark.parametrize("loss", [_update, _die], ids=["new weights", "a dead host"])
def test_a_context_that_became_worthless_is_prefilled_again(loss):
    _, engines = seconds_of(True, meanwhile=loss)
    assert engines[1].counters.fetched == 0
    assert engines[1].counters.prefilled == LONG + 2


def test_two_fetches_of_one_instance_share_its_link():
    (source, target), _ = fleet(2)
    whose = [doubles.attempt(f"{index}/0", LONG, [doubles.turn(2), doubles.turn(1)]) for index in range(2)]

    async def main() -> float:
        for made in (source, target):
            await doubles.serve(made)
        for one in whose:
            await doubles.take_turn(source, one)
        begin = asyncio.get_running_loop().time()
        await asyncio.gather(*(doubles.take_turn(target, one) for one in whose))
        return asyncio.get_running_loop().time() - begin

    assert clock.run(main()) > 2 * doubles.model().transfer_seconds(1, LONG)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(1, 40)), max_size=40))
def test_host_memory_keeps_the_latest_contexts_that_fit(events):
    model = doubles.model()
    small = dataclasses.replace(model, sheet=dataclasses.replace(model.sheet, host_memory_bytes=200 * 114_688))
    store, order = offload.Store(), []
    capacity = small.host_tokens(1)
    assert capacity == 100
    for instance in range(2):
        store.join(str(instance), 1, small)
    for instance, name, tokens in events:
        key = (str(name), 0)
        store.keep(str(instance), key, tokens, 3)
        order = [item for item in order if item[1] != key] + [(str(instance), key, tokens)]
        mine = [item for item in order if item[0] == str(instance)]
        while sum(item[2] for item in mine) > capacity:
            order.remove(mine.pop(0))
    kept = {(f"{name}", 0): store.find((f"{name}", 0), 3) for name in range(6)}
    assert {key: (found.instance, found.tokens) for key, found in kept.items() if found} == {
        key: (instance, tokens) for instance, key, tokens in order
    }
    assert all(store.find(key, 4) is None for key in kept)


TURNS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 300), st.floats(0.01, 0.6), st.integers(0, 1)), min_size=1, max_size=4
)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 900), TURNS), min_size=2, max_size=8),
    st.integers(1500, 3000),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 1)), max_size=4),
)
def test_moves_updates_and_departures_lose_no_token_and_overflow_no_cache(attempts, capacity, updates):
    # A fast network, so that short contexts are fetched as well.
    model = doubles.model()
    fast = dataclasses.replace(model, sheet=dataclasses.replace(model.sheet, network_bytes_per_second=1e12))
    store = offload.Store()
    engines = [
        doubles.make_engine(
            f"engine-{index}", doubles.Watched, store=store, model=fast, kv_tokens=capacity, max_context=1500
        )
        for index in range(2)
    ]
    whose = [
        doubles.attempt(f"{index}/0", prompt, [doubles.turn(*item[:3]) for item in turns])
        for index, (prompt, turns) in enumerate(attempts)
    ]

    async def play(index: int) -> None:
        for number, (_, payload, seconds, place) in enumerate(attempts[index][1]):
            if len(whose[index].token_ids) + payload >= 1400:
                return
            while whose[index].outputs == number:
                turn = asyncio.ensure_future(doubles.take_turn(engines[place], whose[index]))
                await asyncio.wait([turn], timeout=seconds)  # leaves in the middle of a longer turn
                turn.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await turn
                place = 1 - place
            whose[index].append_text(trajectory.Runs([(trajectory.TEXT, payload)]), protocols.TokenSource.TOOL)
            await asyncio.sleep(seconds)

    async def update() -> None:
        for version, (seconds, place) in enumerate(updates, start=1):
            await asyncio.sleep(seconds)
            made = engines[place]
            await made.pause()
            await made.start_weight_update(version)
            await made.finish_weight_update(version)
            await made.resume()

    async def main() -> None:
        for made in engines:
            await doubles.serve(made)
        await asyncio.gather(update(), *map(play, range(len(whose))))
        for made in engines:
            assert not list(made._fetches)
            assert made._used == 0

    clock.run(main())
    for one in whose:
        scripted = [item.generated_tokens for item in one.script.turns[: one.outputs]]
        assert one.generated_tokens == sum(scripted)
    assert sum(made.counters.generated for made in engines) == sum(one.generated_tokens for one in whose)


def test_hardware_without_host_memory_is_refused_by_field(monkeypatch):
    asked = dataclasses.replace(doubles.SIMULATION, kv_cache="offload", hardware="v5p")
    monkeypatch.setattr(doubles, "SIMULATION", asked)
    with pytest.raises(protocols.ConfigError, match=r"simulation\.kv_cache: v5p has no host memory in its sheet"):
        doubles.simulate(doubles.run_config())


def test_a_run_with_host_memory_computes_less_again_and_repeats_exactly(monkeypatch):
    config = doubles.run_config()
    again = doubles.simulate(config)
    monkeypatch.setattr(doubles, "SIMULATION", dataclasses.replace(doubles.SIMULATION, kv_cache="offload"))
    kept, repeated = doubles.simulate(config), doubles.simulate(config)
    doubles.check_whole(kept, config)
    assert kept.fetched_tokens > 0
    assert kept.prefilled_tokens < again.prefilled_tokens
    assert kept.step_seconds == repeated.step_seconds


def test_a_request_that_leaves_while_it_fetches_makes_room_for_the_next():
    (source, target), _ = fleet(2, kv_tokens=10_000, max_context=10_000)
    fetching = doubles.attempt("0/0", LONG, [doubles.turn(2), doubles.turn(1)])
    waiting = doubles.attempt("1/0", 3_000, [doubles.turn(1)])

    async def main() -> float:
        for made in (source, target):
            await doubles.serve(made)
        await doubles.take_turn(source, fetching)
        first = asyncio.ensure_future(doubles.take_turn(target, fetching))
        second = asyncio.ensure_future(doubles.take_turn(target, waiting))
        await asyncio.sleep(0.001)
        assert list(target._fetches)
        first.cancel()
        await asyncio.wait([first])
        begin = asyncio.get_running_loop().time()
        await second
        return asyncio.get_running_loop().time() - begin

    assert clock.run(main()) == pytest.approx(doubles.model().prefill_seconds(1, 3_000), rel=0.01)
    assert target.counters.fetched == 0


def test_fetches_that_new_weights_cut_off_do_not_book_the_link():
    (source, target), _ = fleet(2)
    whose = [doubles.attempt(f"{index}/0", LONG, [doubles.turn(2), doubles.turn(50)]) for index in range(9)]

    async def main() -> None:
        for made in (source, target):
            await doubles.serve(made)
        for one in whose:
            await doubles.take_turn(source, one)
        turns = [asyncio.ensure_future(doubles.take_turn(target, one)) for one in whose]
        await asyncio.sleep(0.001)
        assert len(list(target._fetches)) == 2
        await target.pause()
        await target.start_weight_update(1)
        await target.finish_weight_update(1)
        await target.resume()
        assert target._fetches.end == 0.0
        await asyncio.gather(*turns)
        assert target.counters.fetched <= LONG + 2, "the first may have ended in the step before the pause"

    clock.run(main())
