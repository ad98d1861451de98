"""The training side of hybrid workers: whose process is up, and who ends it."""

from __future__ import annotations

import asyncio

import coordinator_doubles as doubles

from libra_jax import protocols
from libra_jax.hybrid import training_sides
from libra_jax.utils import deadlines


class NeverUp:
    """A replica whose start does not end."""

    async def start(self) -> None:
        await asyncio.Event().wait()


class Cluster:
    """Says which actors there are."""

    def __init__(self) -> None:
        self.alive: set[str] = set()

    async def spawn(self, spec: protocols.ActorSpec) -> protocols.ActorHandle:
        self.alive.add(spec.name)
        return protocols.DirectHandle(spec.name, NeverUp())

    async def stop(self, name: str) -> None:
        self.alive.discard(name)


def test_a_replica_that_is_given_up_while_it_starts_is_gone_when_it_has_left():
    async def main():
        cluster = Cluster()
        specs = {"rollout-1": protocols.ActorSpec("hybrid-1", "", {})}
        made = training_sides.TrainingSides(doubles.run_context(doubles.make_config(), cluster), specs)
        starting = asyncio.ensure_future(made.ensure("rollout-1"))
        await asyncio.sleep(1.0)
        deadlines.abandon(starting)
        assert cluster.alive == {"hybrid-1"}
        await made.leave("rollout-1")
        assert not cluster.alive

    doubles.run_on_clock(main())
