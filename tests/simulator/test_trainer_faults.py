"""Deterministic simulation testing of trainers that are lost, beside all that may befall hybrid workers.

Simulated runs save nothing, so that a trainer begins here with its first state, and takes all steps again.
See `seeds` for how many there are, and for how to repeat one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
from collections import Counter
from typing import Any

import pytest
import seeds
import simulator_doubles as doubles
import test_hybrid_faults as hybrid_faults

from libra_jax import protocols
from libra_jax.trainer_control import recovery

MOST_DEATHS = 3


class Mortal(protocols.DirectHandle):
    """The handle of a trainer that dies after a while, in whatever it is doing."""

    def __init__(self, name: str, actor: protocols.Trainer, seconds: float) -> None:
        super().__init__(name, actor)
        loop = asyncio.get_running_loop()
        self._death: asyncio.Future[None] = loop.create_future()
        loop.call_later(seconds, self._death.set_result, None)

    async def call(self, method: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._check()
        work = asyncio.ensure_future(super().call(method, *args, **kwargs))
        try:
            await asyncio.wait({work, self._death}, return_when=asyncio.FIRST_COMPLETED)
            self._check()
            return work.result()
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, protocols.LibraError):
                await work

    def _check(self) -> None:
        if self._death.done():
            raise protocols.WorkerLost("actor 'trainer' is lost: its process 7 died; restart it to go on")


class Deaths:
    """Makes the handles of the trainer's lives: the first few end, soon or late."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"{seed}/deaths")
        self._left = self._rng.randint(1, MOST_DEATHS)
        self._mean = self._rng.choice((5.0, 30.0, 100.0))
        self.lives = 0

    def __call__(self, name: str, actor: Any) -> protocols.ActorHandle:
        if not isinstance(actor, hybrid_faults.Checked):
            return protocols.DirectHandle(name, actor)
        self.lives += 1
        if self.lives > self._left:
            return protocols.DirectHandle(name, actor)
        return Mortal(name, actor, self._rng.expovariate(1.0 / self._mean))


def case(seed: int) -> hybrid_faults.Case:
    made = hybrid_faults.case(seed)
    trainer = dataclasses.replace(made.config.trainer, restarts=MOST_DEATHS)
    return dataclasses.replace(made, config=dataclasses.replace(made.config, trainer=trainer))


@functools.cache  # a seed that two tests look at runs once
def check(seed: int) -> tuple[doubles.Trained, int] | None:
    made, deaths = case(seed), Deaths(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "_why_not", lambda config: "")
        try:
            result, recorder = hybrid_faults.simulate(seed, made, make_handle=deaths)
        except protocols.WorkerLost as error:
            if made.config.rollout.restarts == 10_000 or "No rollout engine is left" not in str(error):
                raise
            return None
    doubles.check_whole(result, made.config)
    recorder.check(result, made.config)
    assert len({sum(size.devices.values()) for size in recorder.pool_sizes}) == 1, "a device was lost or counted twice"
    return recorder, deaths.lives


@pytest.mark.parametrize("batch", seeds.batches(300), ids=str)
def test_whenever_the_trainer_dies_every_prompt_is_trained_once_and_nothing_sticks(batch):
    seeds.each(batch[::4], check, told=case)


def test_the_cases_reach_what_they_are_for():
    """Trainers die while members train, more than once, and with steps behind them."""
    seen: Counter[str] = Counter()
    for seed in range(0, 300, 4):
        if (found := check(seed)) is None:
            continue
        recorder, lives = found
        seen[f"{lives - 1} deaths"] += 1
        seen["streamed"] += lives > 1 and recorder.begun > 0
        seen["again"] += any(scalars.get("trainer/replayed_steps", 0.0) > 0 for _, scalars in recorder.steps)
        seen["shared"] += any(
            scalars.get("shares/micro_batches", 0.0) > 0 and "trainer/restarts" in scalars
            for _, scalars in recorder.steps
        )
    assert min(seen[name] for name in ("1 deaths", "2 deaths", "again", "streamed")) >= 5, seen
