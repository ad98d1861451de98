"""Reward functions in processes of their own, by Ray: killed, hung with the interpreter's lock held, and ended."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import create
from libra_jax.rewards import actors, composition, scoring

pytestmark = [pytest.mark.ray, pytest.mark.multiprocess, pytest.mark.slow]

TASK = protocols.Task("t", {"prompt": "12*34"})


def run(body, functions, notes, **reward):
    """Runs an async function of the scorer of these functions, in processes of their own."""
    entries = {name: {"factory": f"reward_functions:{factory}"} for name, factory in functions.items()}
    made = config_lib.RewardConfig(functions=entries, environment_weight=0.0, **reward)

    async def main():
        actors = create.create(config_lib.ClusterConfig(backend="ray"), shutdown_seconds=1, start_seconds=120)
        try:
            async with composition.open_scorer(made, actors, note=notes.append, start_seconds=60) as scorer:
                return await body(scorer)
        finally:
            await actors.shutdown()

    return asyncio.run(main())


@pytest.mark.usefixtures("ray_session")
def test_a_killed_process_is_made_anew_and_no_attempt_loses_its_score():
    notes, pids = [], []

    async def body(scorer):
        pids.append(int((await scorer(TASK, scoring.Transcript("x"))).reward))
        assert pids[0] != os.getpid()
        under_way = [asyncio.ensure_future(scorer(TASK, scoring.Transcript(f"x{n}"))) for n in range(3)]
        await asyncio.sleep(0.02)
        os.kill(pids[0], signal.SIGKILL)
        scores = await asyncio.gather(*under_way)
        pids.extend({int(score.reward) for score in scores} - {pids[0]})
        poison = asyncio.ensure_future(scorer(TASK, scoring.Transcript("poison")))
        with pytest.raises(protocols.RewardFailed, match=r"killing\), task t: it brought down the actor that ran it"):
            await poison
        return await scorer(TASK, scoring.Transcript("y"))

    pids.append(int(run(body, {"killing": "killing"}, notes, retries=0).reward))
    assert len(set(pids)) >= 2
    assert [note for note in notes if "reward-0 is gone" in note]
    for pid in pids:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.usefixtures("ray_session")
def test_a_function_that_never_gives_up_the_interpreters_lock_costs_its_own_attempt_alone(monkeypatch):
    monkeypatch.setattr(actors, "LOOK_SECONDS", 2.0)
    notes = []

    async def body(scorer):
        first = (await scorer(TASK, scoring.Transcript("x"))).reward
        endless = asyncio.ensure_future(scorer(TASK, scoring.Transcript("a" * 60 + "b")))
        await asyncio.sleep(0.2)
        beside = asyncio.ensure_future(scorer(TASK, scoring.Transcript("y")))
        with pytest.raises(protocols.RewardFailed, match=r"matching\), task t: it took more than 1 s"):
            await endless
        return int(first), int((await beside).reward)

    first, beside = run(body, {"matching": "matching"}, notes, seconds=1.0, retries=0)
    assert first != beside
    assert "reward-0 answers no one; it is restarted" in notes[0]
    assert not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE
