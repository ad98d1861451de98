"""The virtual clock: timers in order, no real waiting, deadlocks found."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_jax.simulator import clock


@given(st.lists(st.integers(1, 10**9).map(lambda number: number / 1000), min_size=1, max_size=30))
def test_sleepers_wake_in_order_and_at_their_time(delays):
    woken = []

    async def sleeper(delay: float) -> None:
        await asyncio.sleep(delay)
        woken.append((delay, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(*map(sleeper, delays))

    clock.run(main(), longest=1e7)
    assert [delay for delay, _ in woken] == sorted(delays)
    assert all(at == delay for delay, at in woken)


def test_a_late_small_timer_is_reached():
    async def main() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3e6 + 0.1)
        for _ in range(1000):
            await asyncio.sleep(1e-7)
        return loop.time()

    assert clock.run(main(), longest=1e7) == pytest.approx(3e6 + 0.1 + 1e-4, abs=1e-5)


def test_virtual_days_take_no_real_ones():
    async def main() -> float:
        await asyncio.sleep(10 * 86_400.0)
        return asyncio.get_running_loop().time()

    assert clock.run(main(), longest=1e7) == pytest.approx(10 * 86_400.0)  # a real wait would pass the test's deadline


def test_what_would_go_to_a_thread_takes_no_time():
    async def main() -> float:
        await asyncio.sleep(3.0)
        assert await asyncio.to_thread(sum, [3, 4]) == 7
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        return asyncio.get_running_loop().time()

    assert clock.run(main()) == 3.0


def test_waiting_for_nothing_is_a_deadlock():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(AssertionError, match="deadlock"):
        clock.run(main())


def test_a_run_that_outlasts_its_time_is_a_deadlock():
    async def main() -> None:
        for _ in range(1000):
            await asyncio.sleep(10.0)

    with pytest.raises(AssertionError, match="deadlock"):
        clock.run(main(), longest=100.0)
