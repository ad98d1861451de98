"""What backends share: how all actors are stopped."""

import asyncio

import pytest

from libra_jax.cluster import actors
from libra_jax.protocols import LibraError


def test_processes_of_a_set_stop_together_and_everything_else_one_after_the_other_last_first():
    happened, left = [], asyncio.Event()
    waiting = {"trainer.0", "trainer.1"}

    async def stop(name: str) -> None:
        happened.append(f"{name} is asked")
        waiting.discard(name)
        if not waiting:
            left.set()
        if name.startswith("trainer"):
            await asyncio.wait_for(left.wait(), 5.0)
        await asyncio.sleep(0)
        happened.append(f"{name} has ended")

    asyncio.run(actors.stop_all(stop, ["trainer.0", "rollout-0", "trainer.1", "rollout-1"]))
    asked = [entry for entry in happened if entry.endswith("asked")]
    assert asked == [f"{name} is asked" for name in ("rollout-1", "trainer.1", "trainer.0", "rollout-0")]
    assert happened[0:2] == ["rollout-1 is asked", "rollout-1 has ended"]
    assert happened[-2:] == ["rollout-0 is asked", "rollout-0 has ended"]


def test_one_that_fails_to_stop_keeps_no_other_and_all_that_failed_are_named():
    stopped = []

    async def stop(name: str) -> None:
        stopped.append(name)
        if name != "rollout-0":
            raise LibraError(f"{name} did not stop")

    with pytest.raises(LibraError, match=r"trainer\.1 did not stop; trainer\.0 did not stop"):
        asyncio.run(actors.stop_all(stop, ["trainer.0", "trainer.1", "rollout-0"]))
    assert stopped == ["rollout-0", "trainer.1", "trainer.0"]
