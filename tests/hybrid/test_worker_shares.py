"""The speeds by which a step is split among hybrid workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from libra_jax import protocols
from libra_jax.hybrid import training_sides, worker_shares
from libra_jax.training import shares as trainer_shares

WORKER = "rollout-1"


class Sides(training_sides.TrainingSides):
    """A worker that holds every version, and computes its shares at a speed relative to the core.

    Attributes:
      pace: its true speed.
      micro_batches: micro-batches of a step.
      computed: micro-batches of each of its shares.
    """

    def __init__(self, pace: float, micro_batches: int = 4) -> None:
        self.pace = pace
        self.micro_batches = micro_batches
        self.computed: list[int] = []

    def holds(self, worker: str, version: int) -> bool:
        return True

    async def contribute(
        self, worker: str, batch: protocols.TrainBatch, shares: Sequence[protocols.Share]
    ) -> Mapping[str, float]:
        (_, part) = trainer_shares.split([1] * self.micro_batches, shares)
        self.computed.append(len(part))
        return {"seconds": len(part) / self.pace, "bytes": 0.0, "micro_batches": float(len(part))}


async def steps(count: int, sides: Sides, shares: worker_shares.Shares, begun: int = 0) -> None:
    """Trains steps whose micro-batches take the core a second each; it had computed `begun` further ones before."""
    for version in range(count):
        split = shares.split({WORKER: 1}, version)
        shares.begin(protocols.TrainBatch(version, ()), split)
        await asyncio.sleep(0)
        taken = sides.micro_batches - sides.computed[-1]
        metrics = {
            "micro_batches": float(begun + sides.micro_batches),
            "shares/of": float(sides.micro_batches),
            "shares/micro_batches": float(sides.computed[-1]),
        }
        (outcome,) = await shares.finish(split, metrics, float(taken))
        assert outcome.counted


def test_a_worker_that_was_slow_for_a_while_is_measured_again():
    async def main() -> None:
        sides = Sides(pace=0.01)
        shares = worker_shares.Shares(sides, {WORKER: 1.0})
        await steps(20, sides, shares)
        assert sides.computed[-1] == 0
        sides.pace = 1.0
        await steps(100, sides, shares)
        assert sides.computed[-1] == sides.micro_batches // 2
        assert shares.speed[WORKER] == pytest.approx(1.0, rel=0.1)

    asyncio.run(main())


def test_what_the_core_had_begun_before_a_step_makes_it_no_faster():
    async def main() -> None:
        sides = Sides(pace=1.0)
        shares = worker_shares.Shares(sides, {WORKER: 1.0})
        await steps(50, sides, shares, begun=100)
        assert sides.computed[-1] == sides.micro_batches // 2
        assert shares.speed[WORKER] == pytest.approx(1.0, rel=0.1)

    asyncio.run(main())


def test_a_worker_that_stays_slow_rarely_computes_a_share():
    async def main() -> None:
        sides = Sides(pace=0.05)
        shares = worker_shares.Shares(sides, {WORKER: 1.0})
        await steps(500, sides, shares)
        assert 0 < sum(count > 0 for count in sides.computed[100:]) <= 400 / 25

    asyncio.run(main())


def test_steps_of_one_micro_batch_make_no_worker_count_as_faster_than_the_core():
    async def main() -> None:
        sides = Sides(pace=1.0, micro_batches=1)
        shares = worker_shares.Shares(sides, {WORKER: 0.5})
        await steps(200, sides, shares)
        assert not any(sides.computed)
        assert shares.speed[WORKER] == 1.0

    asyncio.run(main())
