"""Deadlines name the worker, and a stall of this process's event loop is not blamed on one."""

from __future__ import annotations

import asyncio

import coordinator_doubles as doubles
import pytest

from libra_jax import protocols
from libra_jax.utils import deadlines, turns


async def answer_after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "answer"


def test_an_answer_in_time_is_returned():
    assert (
        doubles.run_on_clock(deadlines.within(10.0, answer_after(9.9), "engine-1's update", "weight_sync")) == "answer"
    )


def test_a_missed_deadline_names_the_worker():
    with pytest.raises(
        protocols.DeadlineMissed, match=r"engine-1's update did not finish within 10 s.*deadlines\.weight_sync"
    ):
        doubles.run_on_clock(deadlines.within(10.0, answer_after(30.0), "engine-1's update", "weight_sync"))


def test_an_error_of_the_worker_is_its_own():
    async def fail() -> None:
        raise protocols.WorkerLost("engine-1 is gone")

    with pytest.raises(protocols.WorkerLost, match="engine-1 is gone"):
        doubles.run_on_clock(deadlines.within(10.0, fail(), "engine-1's update", "weight_sync"))


@pytest.mark.parametrize("stalled_at", [0.5, 5.0, 9.8])
def test_a_stall_of_the_event_loop_causes_no_false_deadline(stalled_at):
    async def main() -> str:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, doubles.Clock)

        def stall() -> None:
            loop.now += 1000.0

        loop.call_later(stalled_at, stall)
        # The answer is on its way when the stall ends, but needs the loop a few more times to get here.
        answer = loop.create_future()
        loop.call_later(stalled_at + 1000.0 + 0.5, answer.set_result, "answer")
        return await deadlines.within(10.0, answer, "engine-1's update", "weight_sync")

    assert doubles.run_on_clock(main()) == "answer"


def test_a_wait_for_ones_turn_does_not_count():
    """Three workers start one after another, each within its deadline; a fourth takes longer in its own turn."""

    async def start(lock: asyncio.Lock, seconds: float) -> str:
        with turns.queued():
            await lock.acquire()
        try:
            return await answer_after(seconds)
        finally:
            lock.release()

    async def main(*seconds: float) -> list[str]:
        lock = asyncio.Lock()
        starts = [
            deadlines.within(10.0, start(lock, item), f"engine-{index}'s start", "engine_start")
            for index, item in enumerate(seconds)
        ]
        return await asyncio.gather(*starts)

    assert doubles.run_on_clock(main(9.0, 9.0, 9.0)) == ["answer"] * 3
    with pytest.raises(protocols.DeadlineMissed, match="engine-3's start"):
        doubles.run_on_clock(main(9.0, 9.0, 9.0, 30.0))


def test_what_missed_its_deadline_is_cancelled_but_not_waited_for():
    async def main() -> list[str]:
        events = []

        async def deaf() -> None:
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                events.append("cancelled")
                await asyncio.sleep(500.0)
                events.append("ended")

        with pytest.raises(protocols.DeadlineMissed):
            await deadlines.within(10.0, deaf(), "engine-1", "weight_sync")
        await asyncio.sleep(1.0)
        return events

    assert doubles.run_on_clock(main()) == ["cancelled"]
