"""A simulated replica beside a simulated trainer: what it says of its share is what a real one says."""

from __future__ import annotations

import asyncio

import simulator_doubles as doubles

from libra_jax import protocols
from libra_jax.simulator import clock, trainer, training_side

SHARES = (protocols.Share("r", 1, 0.5),)


def on_clock(work, count):
    """Runs `work(trainer, replica, batch)` with a replica that has joined and `count` trajectories to train on."""

    async def main():
        channels, model = training_side.SimulatedChannels(), doubles.model()
        core = trainer.SimulatedTrainer(model, 1, trainer.TrainingLog(), channels=channels, late_seconds=100.0)
        made = training_side.SimulatedTrainingSide(
            "r", devices=1, model=model, channels=channels, train_seconds=lambda lengths: float(len(lengths))
        )
        address = await core.listen("r", 1)
        await core.connect("r", 1, address)
        await made.start()
        await made.join(1, address)
        await made.finish_weight_update(0)
        attempts = [doubles.attempt(f"p/{number}", 10, [doubles.turn(5)]) for number in range(count)]
        group = protocols.Group(group_id=0, task=protocols.Task("p", {}), dispatch_version=0, trajectories=attempts)
        await work(core, made, protocols.TrainBatch(0, (group,)))

    clock.run(main(), longest=1e6, signals=False)


def test_its_seconds_are_those_until_the_core_has_the_sums():
    async def work(core, made, batch):
        made.slowdown = 3.0
        began = asyncio.get_running_loop().time()
        told = await made.contribute(batch, SHARES)
        assert told["seconds"] == asyncio.get_running_loop().time() - began > 6.0
        assert told["micro_batches"] == 2

    on_clock(work, 4)


def test_a_share_with_nothing_in_it_sends_nothing_and_is_not_waited_for():
    async def work(core, made, batch):
        told = await made.contribute(batch, SHARES)
        assert told == {"seconds": 0.0, "micro_batches": 0.0, "bytes": 0.0}
        metrics = await core.train_step(batch, SHARES)
        assert (metrics["shares/late"], metrics["shares/wait_seconds"]) == (0, 0)

    on_clock(work, 1)
