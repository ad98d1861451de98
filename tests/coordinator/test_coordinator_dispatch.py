"""Dispatch of single requests: slots, tool calls, moves, aborts and streams that end without saying so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import coordinator_doubles as doubles
import pytest

from libra_jax import protocols
from libra_jax.coordinator import dispatch, instances
from libra_jax.engines import fake_engine
from libra_jax.rollouts import streams
from libra_jax.scheduling.rivals import baselines

SAMPLING = protocols.SamplingParams(temperature=1.0, max_tokens=40, stop_token_ids=(2,))
LONG = protocols.SamplingParams(temperature=1.0, max_tokens=40, stop_token_ids=())


def trajectory(name: str = "task-0/0") -> protocols.Trajectory:
    made = protocols.Trajectory(name, name.partition("/")[0])
    made.append_text([1, 10, int(name[-1]) + 20], protocols.TokenSource.PROMPT)
    return made


def with_dispatcher(
    test: Callable[[streams.Streams, instances.Instances], Coroutine[Any, Any, Any]],
    engines: Sequence[fake_engine.FakeEngine],
    scheduler: protocols.Scheduler | None = None,
    **rollout: Any,
) -> Any:
    """Runs `test` with streams and a dispatcher over engines that serve version 0."""

    async def main() -> Any:
        config = doubles.make_config(rollout=rollout, deadlines={"first_token": 50.0})
        run = doubles.run_context(config)
        specs = [protocols.ActorSpec(engine.name, ":", {}) for engine in engines]
        live = instances.Instances(run, specs)
        dispatcher = dispatch.Dispatcher(run, scheduler=scheduler or baselines.LeastLoaded(), engines=live)
        sampler = OpenStreams(run, dispatcher=dispatcher, engines=live)
        for engine in engines:
            entry = live.engines[engine.name]
            entry.info, entry.state = await engine.start(), "loaded"
            entry.client = await doubles.engine_client(engine, config)
            engine._version = entry.policy_version = 0
            live.serve([entry])
        try:
            return await run.scope.race(test(sampler, live))
        finally:
            await run.scope.cancel_background(1.0)

    return doubles.run_on_clock(main())


class OpenStreams(streams.Streams):
    """Takes every attempt for one of group 0."""

    async def sample(
        self, segment: protocols.Segment, sampling: protocols.SamplingParams, on_tokens: Any = None
    ) -> Any:
        if isinstance(segment, protocols.Trajectory) and segment.trajectory_id not in self._rollouts:
            self.open(segment, 0, 0)
        return await super().sample(segment, sampling, on_tokens)


class Counting(fake_engine.FakeEngine):
    """Remembers the most streams it ever had open, and the requests it was asked."""

    most = 0
    asked: list[protocols.GenerationRequest]

    async def generate(self, request: protocols.GenerationRequest):
        self.asked = [*getattr(self, "asked", []), request]
        async with contextlib.aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                self.most = max(self.most, self._running)
                yield delta


def engine(name: str = "a", kind: type[fake_engine.FakeEngine] = Counting, slots: int = 2, **more: Any) -> Any:
    values = {"script": doubles.chatter, "max_context": 200, "tensor_parallel": 1, "stream_interval": 2, **more}
    return kind(name=name, slots=slots, tokens_per_second=100.0, **{"fail_after_tokens": None, **values})


def test_an_instance_never_decodes_more_requests_than_it_has_slots():
    serving = [engine("a", slots=2), engine("b", slots=3)]

    async def test(sampler: streams.Streams, live: instances.Instances) -> None:
        async def attempt(name: str) -> None:
            made = trajectory(name)
            assert await sampler.sample(made, SAMPLING) == "stop"
            await sampler.tool_called(made)
            await asyncio.sleep(0.05)
            made.append_text([50], protocols.TokenSource.TOOL)
            await sampler.tool_returned(made, protocols.CausalState("look", 1, "success"))
            assert await sampler.sample(made, SAMPLING) == "stop"
            sampler.finish(name)

        await asyncio.gather(*(attempt(f"task-{index}/{index % 10}") for index in range(30)))

    with_dispatcher(test, serving)
    assert [item.most for item in serving] == [2, 3]


def test_a_request_whose_tool_runs_holds_no_slot():
    async def test(sampler: streams.Streams, live: instances.Instances) -> None:
        away, other = trajectory("task-0/0"), trajectory("task-1/1")
        await sampler.sample(away, SAMPLING)
        waiting = asyncio.ensure_future(sampler.sample(other, SAMPLING))
        await asyncio.sleep(5.0)
        assert not waiting.done(), "the only slot is the first request's until it calls its tool"
        await sampler.tool_called(away)
        assert await waiting == "stop"

    with_dispatcher(test, [engine(slots=1)])


class Mover(baselines.LeastLoaded):
    """Moves every request to instance "b" as soon as it has four tokens."""

    moved: frozenset[str] = frozenset()

    def on_progress(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        if generated_tokens < 4 or request_id in self.moved:
            return []
        self.moved |= {request_id}
        move = protocols.Move(request_id, "a", "b", protocols.MoveReason.BUDGET_OUTRUN)
        return [protocols.Placement(request_id, "b", move)]


def test_a_moved_request_goes_on_from_its_tokens():
    serving = [engine("a"), engine("b")]

    async def test(sampler: streams.Streams, live: instances.Instances) -> protocols.Trajectory:
        made = trajectory()
        assert await sampler.sample(made, LONG) == "length"
        return made

    moved = with_dispatcher(test, serving, Mover())
    (first,), (second,) = serving[0].asked, serving[1].asked
    assert first.sampling.max_tokens == 40
    assert second.token_ids == moved.token_ids[: len(second.token_ids)]
    assert len(second.token_ids) >= len(first.token_ids) + 4
    assert second.sampling.max_tokens == 40 - (len(second.token_ids) - len(first.token_ids))
    assert moved.generated_tokens == 40
    expected = list(first.token_ids)
    while len(expected) < len(moved.token_ids):
        expected.append(doubles.chatter(expected, LONG))
    assert list(moved.token_ids) == expected


class Cutting(Counting):
    """Ends its first streams early: by an abort, without a finish, or with an error of its own."""

    how = ""

    async def generate(self, request: protocols.GenerationRequest):
        count = 0
        async with contextlib.aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                count += 1
                if count == 2 and len(self.asked) < 3:
                    if self.how == "abort":
                        yield protocols.TokenDelta(delta.token_ids, delta.log_probs, delta.policy_versions, "abort")
                    if self.how == "error":
                        raise ValueError("no such request")
                    return
                yield delta


@pytest.mark.parametrize("how", ["abort", "error"])
def test_a_stream_that_breaks_off_is_taken_up_again(how):
    serving = engine(kind=Cutting)
    serving.how = how

    async def test(sampler: streams.Streams, live: instances.Instances) -> protocols.Trajectory:
        made = trajectory()
        assert await sampler.sample(made, LONG) == "length"
        assert sampler.counts.resumed == 2
        return made

    made = with_dispatcher(test, [serving])
    assert made.generated_tokens == 40
    assert [len(request.token_ids) - 3 for request in serving.asked] == ([0, 4, 8] if how == "abort" else [0, 2, 4])


def test_an_engine_that_dies_between_the_stop_token_and_its_finish_loses_nothing():
    class LosesTheFinish(Counting):
        async def generate(self, request: protocols.GenerationRequest):
            async with contextlib.aclosing(super().generate(request)) as deltas:
                async for delta in deltas:
                    yield protocols.TokenDelta(delta.token_ids, delta.log_probs, delta.policy_versions)
            raise ValueError("connection reset")

    serving = engine(kind=LosesTheFinish)

    async def test(sampler: streams.Streams, live: instances.Instances) -> protocols.Trajectory:
        made = trajectory()
        assert await sampler.sample(made, SAMPLING) == "stop"
        return made

    made = with_dispatcher(test, [serving])
    assert made.token_ids.count(2) == 1
    assert len(serving.asked) == 1


def test_a_cancelled_attempt_aborts_its_request_and_frees_its_slot():
    serving = engine(slots=1)

    async def test(sampler: streams.Streams, live: instances.Instances) -> None:
        given_up = trajectory("task-0/0")
        attempt = asyncio.ensure_future(sampler.sample(given_up, LONG))
        await asyncio.sleep(0.1)
        attempt.cancel()
        await asyncio.gather(attempt, return_exceptions=True)
        sampler.finish("task-0/0")
        held = len(given_up.token_ids)
        assert await sampler.sample(trajectory("task-1/1"), LONG) == "length"
        assert serving._running == 0
        assert len(given_up.token_ids) == held

    with_dispatcher(test, [serving])


def test_a_deadline_missed_by_one_request_alone_costs_that_request_and_not_the_engine():
    class SkipsOne(Counting):
        async def generate(self, request: protocols.GenerationRequest):
            if request.request_id == "task-0/0#1":
                await asyncio.sleep(1e6)
            async with contextlib.aclosing(super().generate(request)) as deltas:
                async for delta in deltas:
                    yield delta

    serving = engine(kind=SkipsOne)

    async def test(sampler: streams.Streams, live: instances.Instances) -> None:
        async def keep_busy() -> None:
            for index in range(200):
                await sampler.sample(trajectory(f"task-{index + 1}/1"), LONG)
                sampler.finish(f"task-{index + 1}/1")

        busy = asyncio.ensure_future(keep_busy())
        assert await sampler.sample(trajectory("task-0/0"), LONG) == "length"
        assert live.engines["a"].life == 0
        busy.cancel()

    with_dispatcher(test, [serving])


class Parking(baselines.LeastLoaded):
    """Places nothing but on a change of instances, and then only if it is a friendly one."""

    friendly = False
    changing = False

    def on_instance_change(self, instances: Sequence[protocols.Instance], now: float) -> list[protocols.Placement]:
        self.changing = True
        placements = super().on_instance_change(instances, now)
        self.changing = False
        return placements

    def place(self, now: float) -> list[protocols.Placement]:
        return super().place(now) if self.friendly and self.changing else []


def test_a_request_that_is_never_placed_while_slots_are_free_ends_the_run_with_a_sentence():
    async def test(sampler: streams.Streams, live: instances.Instances) -> None:
        await sampler.sample(trajectory(), LONG)

    with pytest.raises(protocols.DeadlineMissed, match=r"task-0/0 was given no place for 12\d\d s.*\.placement"):
        with_dispatcher(test, [engine()], Parking())


def test_a_request_whose_age_nothing_reminded_the_scheduler_of_is_placed_in_the_end():
    scheduler = Parking()
    scheduler.friendly = True

    async def test(sampler: streams.Streams, live: instances.Instances) -> float:
        assert await sampler.sample(trajectory(), LONG) == "length"
        return asyncio.get_running_loop().time()

    assert 1200 <= with_dispatcher(test, [engine()], scheduler) < 1300


def test_a_request_may_wait_for_ever_while_no_slot_is_free_or_its_tool_runs():
    async def test(sampler: streams.Streams, live: instances.Instances) -> None:
        away, other = trajectory("task-0/0"), trajectory("task-1/1")
        await sampler.sample(away, SAMPLING)
        waiting = asyncio.ensure_future(sampler.sample(other, SAMPLING))
        await asyncio.sleep(5000.0)
        await sampler.tool_called(away)
        assert await waiting == "stop"
        await sampler.tool_called(other)
        await asyncio.sleep(5000.0)

    with_dispatcher(test, [engine(slots=1)])
