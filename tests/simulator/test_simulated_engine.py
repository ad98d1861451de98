"""The simulated engine against a reference that goes token by token, and what it keeps while things go wrong."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import pytest
import simulator_doubles as doubles
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.simulator import clock, engine, requests, trajectory

CHUNK = 256

# The reference ------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """One attempt in the reference: turns of (generated, payload, tool seconds), from `arrival` on."""

    arrival: float
    prompt: int
    turns: list[tuple[int, int, float]]
    length: int = 0
    held: int = 0
    at: int = 0
    left: int = 0
    ends: list[float] = field(default_factory=list)


def token_by_token(jobs: list[Job], model, slots: int) -> list[list[float]]:
    """When each job's turns end: one loop pass a step, every request's token counted singly."""
    for job in jobs:
        job.length, job.left = job.prompt, job.turns[0][0]
    coming = sorted(jobs, key=lambda job: job.arrival)
    now, waiting, decoding, prefilling, chunks = 0.0, [], [], [], 0
    while coming or waiting or decoding or prefilling:
        if not (waiting or decoding or prefilling):
            now = max(now, coming[0].arrival)
        while coming and coming[0].arrival <= now:
            waiting.append(coming.pop(0))
        if not prefilling:
            tokens, attention = 0, 0.0
            while waiting and len(decoding) + len(prefilling) < slots:
                new = max(1, waiting[0].length - waiting[0].held)
                if prefilling and tokens + new > CHUNK:
                    break
                tokens += new
                attention += model.attention_seconds(1, new, waiting[0].length - new)
                prefilling.append(waiting.pop(0))
            total = chunks = -(-tokens // CHUNK)
        extra = tokens / total if prefilling else 0.0
        now += model.fixed_seconds(1, len(decoding), extra)
        now += model.context_seconds(1) * sum(job.length for job in decoding) + (attention / total if extra else 0.0)
        batch = list(decoding)
        if prefilling:
            chunks -= 1
            if not chunks:
                batch += prefilling
                decoding += prefilling
                prefilling = []
        for job in batch:
            job.length, job.left = job.length + 1, job.left - 1
            if not job.left:
                decoding.remove(job)
                job.ends.append(now)
                job.held = job.length
                _, payload, seconds = job.turns[job.at]
                job.at += 1
                if job.at < len(job.turns):
                    job.arrival, job.length, job.left = now + seconds, job.length + payload, job.turns[job.at][0]
                    coming = sorted([*coming, job], key=lambda other: other.arrival)
    return [job.ends for job in jobs]


TURNS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 300), st.floats(0.01, 0.6).map(lambda x: x + 1e-7)),
    min_size=1,
    max_size=4,
)
JOBS = st.lists(
    st.builds(Job, arrival=st.floats(0.001, 1.5), prompt=st.integers(1, 700), turns=TURNS), min_size=1, max_size=7
)


@settings(max_examples=150)
@given(JOBS, st.integers(1, 5), st.integers(1, 40))
def test_a_fluid_ends_each_turn_when_the_token_by_token_reference_does(jobs, slots, interval):
    for index, job in enumerate(jobs):
        # Apart, so that the order of arrivals is the same on both sides.
        job.arrival += index * 1e-6
        job.turns = [(count, payload, seconds + index * 1e-6) for count, payload, seconds in job.turns]
    model = doubles.model(chunk_tokens=CHUNK)
    made = doubles.make_engine(slots=slots, stream_interval=interval, model=model)

    async def play(index: int, job: Job) -> list[float]:
        whose = doubles.attempt(f"{index}/0", job.prompt, [doubles.turn(*item) for item in job.turns])
        await asyncio.sleep(job.arrival)
        ends = []
        for _, payload, seconds in job.turns:
            assert await doubles.take_turn(made, whose) == "stop"
            ends.append(asyncio.get_running_loop().time())
            whose.append_text(trajectory.Runs([(trajectory.TEXT, payload)]), protocols.TokenSource.TOOL)
            await asyncio.sleep(seconds)
        return ends

    async def main() -> list[list[float]]:
        await doubles.serve(made)
        return await asyncio.gather(*(play(index, job) for index, job in enumerate(jobs)))

    ends = clock.run(main())
    assert [[pytest.approx(at, rel=1e-9) for at in one] for one in token_by_token(jobs, model, slots)] == ends
    assert made.counters.generated == sum(count for job in jobs for count, _, _ in job.turns)
    assert made.counters.prefilled_again == 0


@given(st.floats(1e-4, 1.0), st.floats(0, 1e-6), st.integers(0, 10**6), st.integers(0, 300), st.floats(0, 500.0))
def test_the_closed_form_of_steps_inverts_their_time(fixed, per_context, context, decoding, seconds):
    pace = requests.BatchPace(fixed, per_context, context, decoding)
    steps = pace.steps(seconds)
    assert pace.seconds(steps) <= seconds < pace.seconds(steps + 1)
    singly = sum(fixed + per_context * (context + decoding * step) for step in range(min(steps, 200)))
    assert pace.seconds(min(steps, 200)) == pytest.approx(singly)


# The cache ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 300), TURNS), min_size=2, max_size=8),
    st.integers(1500, 3000),
    st.integers(5, 100),
)
def test_the_cache_never_overflows_and_every_token_is_generated_once(attempts, capacity, interval):
    made = doubles.make_engine(
        kind=doubles.Watched, kv_tokens=capacity, max_context=1500, stream_interval=interval, model=doubles.model()
    )
    whose = [
        doubles.attempt(f"{index}/0", prompt, [doubles.turn(*item) for item in turns])
        for index, (prompt, turns) in enumerate(attempts)
    ]

    async def play(index: int) -> None:
        for _, payload, seconds in attempts[index][1]:
            if len(whose[index].token_ids) + payload >= 1400:
                return
            await doubles.take_turn(made, whose[index])
            whose[index].append_text(trajectory.Runs([(trajectory.TEXT, payload)]), protocols.TokenSource.TOOL)
            await asyncio.sleep(seconds)

    async def main() -> None:
        await doubles.serve(made)
        await asyncio.gather(*map(play, range(len(whose))))

    clock.run(main())
    for one in whose:
        scripted = [item.generated_tokens for item in one.script.turns[: one.outputs]]
        assert one.generated_tokens == sum(scripted)
    assert made.counters.generated == sum(one.generated_tokens for one in whose)


def test_out_of_room_the_latest_arrival_gives_way_and_is_prefilled_again():
    made = doubles.make_engine(kind=doubles.Watched, kv_tokens=1100, max_context=1000)

    async def main() -> list[float]:
        await doubles.serve(made)

        async def one(index: int) -> float:
            await asyncio.sleep(0.001 * index)
            await doubles.take_turn(made, doubles.attempt(f"{index}/0", 300, [doubles.turn(500)]))
            return asyncio.get_running_loop().time()

        return await asyncio.gather(one(0), one(1))

    first, second = clock.run(main())
    assert made.counters.preempted == 1
    assert 299 < made.counters.prefilled_again < 800
    assert first < second


def test_a_prefix_that_was_dropped_for_room_is_prefilled_again():
    made = doubles.make_engine(kind=doubles.Watched, kv_tokens=1000, max_context=1000)
    kept, dropped = (doubles.attempt(f"{name}/0", 300, [doubles.turn(10), doubles.turn(10)]) for name in (1, 2))

    async def main() -> None:
        await doubles.serve(made)
        await doubles.take_turn(made, dropped)
        await doubles.take_turn(made, kept)
        await doubles.take_turn(made, doubles.attempt("3/0", 400, [doubles.turn(1)]))
        before = made.counters.prefilled
        await doubles.take_turn(made, kept)
        assert made.counters.prefilled == before + 1, "no more than the token that any request computes"
        await doubles.take_turn(made, dropped)
        assert made.counters.prefilled == before + 1 + 310

    clock.run(main())


# Weights ------------------------------------------------------------------------------------------------------------


def test_an_update_in_flight_stamps_versions_and_recomputes_the_cache():
    made = doubles.make_engine()
    whose = [doubles.attempt(f"{index}/0", 200, [doubles.turn(2000)]) for index in range(3)]
    chunk = protocols.WeightChunk(1, 0, 1, (), 0, {})

    async def main() -> None:
        await doubles.serve(made)
        turns = [asyncio.ensure_future(doubles.take_turn(made, one)) for one in whose]
        await asyncio.sleep(3.0)
        await made.pause()
        stopped, sampled = asyncio.get_running_loop().time(), made.counters.generated
        await made.start_weight_update(1)
        await made.update_weights(chunk)
        await made.finish_weight_update(1)
        assert asyncio.get_running_loop().time() > stopped
        assert (await made.health())["running"] == 3
        generated = made.counters.generated
        assert generated >= sampled, "what was sampled before the pause is counted when it is stamped"
        await made.resume()
        await asyncio.gather(*turns)
        assert made.counters.prefilled_again == 600 + generated - 3, "each one's last token was never computed"

    clock.run(main())
    for one in whose:
        runs = list(one.policy_versions.runs())
        assert [version for version, _ in runs] == [protocols.NO_VERSION, 0, 1]
        assert sum(count for _, count in runs[1:]) == 2000
        assert runs[1][1] > 0


def test_weights_that_were_not_announced_are_refused():
    made = doubles.make_engine()

    async def main() -> None:
        await doubles.serve(made)
        with pytest.raises(protocols.LibraError, match="before pause"):
            await made.start_weight_update(1)
        await made.pause()
        await made.start_weight_update(1)
        with pytest.raises(protocols.LibraError, match="version 2"):
            await made.finish_weight_update(2)

    clock.run(main())


# Departure and death ------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.integers(1, 400),
    st.lists(st.tuples(st.floats(0.0, 1.5), st.booleans()), max_size=4),
    st.integers(1, 120),
)
def test_a_request_that_leaves_in_the_middle_goes_on_elsewhere_without_loss(generated, cuts, interval):
    engines = [doubles.make_engine(f"engine-{index}", doubles.Watched, stream_interval=interval) for index in range(5)]
    whose = doubles.attempt("0/0", 150, [doubles.turn(generated)])
    other = doubles.attempt("1/0", 50, [doubles.turn(3000)])

    async def main() -> None:
        for made in engines:
            await doubles.serve(made)
        beside = asyncio.ensure_future(doubles.take_turn(engines[0], other))
        for (seconds, dies), made in zip(cuts, engines, strict=False):
            if whose.outputs:
                break
            turn = asyncio.ensure_future(doubles.take_turn(made, whose))
            await asyncio.sleep(seconds)
            if dies and made is not engines[0]:
                made.kill()
            else:
                turn.cancel()
            with contextlib.suppress(asyncio.CancelledError, protocols.WorkerLost):
                await turn
        if not whose.outputs:
            assert await doubles.take_turn(engines[-1], whose) == "stop"
        await beside

    clock.run(main())
    assert whose.outputs == 1
    assert whose.generated_tokens == generated
    assert not whose.unstreamed
    assert sum(made.counters.generated for made in engines) == generated + 3000


def test_a_dead_engine_says_so_to_everyone():
    made = doubles.make_engine()

    async def main() -> None:
        await doubles.serve(made)
        turn = asyncio.ensure_future(doubles.take_turn(made, doubles.attempt("0/0", 10, [doubles.turn(1000)])))
        await asyncio.sleep(0.1)
        pausing = asyncio.ensure_future(made.pause())
        await asyncio.sleep(0)
        made.kill()
        for waiter in (turn, pausing, made.health(), made.resume()):
            with pytest.raises(protocols.WorkerLost, match="engine-0 is gone"):
                await waiter

    clock.run(main())


def test_a_slow_node_takes_its_factor_longer():
    ends = []
    for factor in (1.0, 3.0):
        made = doubles.make_engine()
        made.slowdown = factor

        async def main(made: engine.SimulatedEngine = made) -> float:
            await doubles.serve(made)
            await doubles.take_turn(made, doubles.attempt("0/0", 100, [doubles.turn(50)]))
            return asyncio.get_running_loop().time()

        ends.append(clock.run(main()))
    assert ends[1] == pytest.approx(3 * ends[0])


def test_an_output_longer_than_its_limit_ends_for_length():
    made = doubles.make_engine()

    async def main() -> None:
        await doubles.serve(made)
        whose = doubles.attempt("0/0", 9_990, [doubles.turn(50)])
        assert await doubles.take_turn(made, whose) == "length"
        assert len(whose.token_ids) == 10_000

    clock.run(main())


def test_a_cache_smaller_than_one_context_is_refused():
    with pytest.raises(protocols.ConfigError, match=r"rollout\.max_context: 10000 tokens do not fit"):
        engine.SimulatedEngine(
            "engine-0",
            degree=1,
            slots=4,
            max_context=10_000,
            stream_interval=10,
            model=doubles.model(),
            kv_tokens=9_999,
        )
