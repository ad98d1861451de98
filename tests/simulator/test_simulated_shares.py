"""Shares of a simulated step: all are waited for first, and what did not come is trained then."""

from __future__ import annotations

import asyncio
import types

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.simulator import clock, trainer, training_side

LATE_SECONDS = 3.0


def batch() -> protocols.TrainBatch:
    """Four attempts of ten tokens; training takes a second a token."""
    attempts = []
    for index in range(4):
        attempt = protocols.Trajectory(f"p0/{index}", "p0")
        attempt.append_text([1] * 10, protocols.TokenSource.PROMPT)
        attempts.append(attempt)
    return protocols.TrainBatch(0, (protocols.Group(0, protocols.Task("p0", {}), 0, attempts),))


def step(**arrivals: float) -> tuple[dict[str, float], float, float]:
    """A step of which each worker has a quarter, sent so many seconds after its begin.

    Returns its metrics, its seconds, and those of them that the trainer computed.
    """

    async def main():
        loop, channels, log = asyncio.get_running_loop(), training_side.SimulatedChannels(), trainer.TrainingLog()
        model = types.SimpleNamespace(train_seconds=lambda lengths, devices: float(sum(lengths)))
        made = trainer.SimulatedTrainer(model, 1, log, channels=channels, late=0.1, late_seconds=LATE_SECONDS)
        shares = [protocols.Share(worker, 1, 0.25) for worker in arrivals]
        _, parts = training_side.split([10] * 4, shares)
        for worker, seconds in arrivals.items():
            channels.listening[worker] = channels.connected[worker] = 1
            loop.call_later(seconds, channels.send, worker, 1, 0, parts[worker])
        metrics = await made.train_step(batch(), shares)
        return metrics, loop.time(), log.busy_seconds

    return clock.run(main())


def test_shares_that_come_in_time_are_not_trained_again():
    metrics, seconds, busy = step(a=21.0, b=22.5)
    assert (metrics["shares/late"], metrics["shares/micro_batches"]) == (0, 2)
    assert metrics["shares/wait_seconds"] == pytest.approx(2.5)
    assert (seconds, busy) == (pytest.approx(22.5), 20.0)


def test_a_share_that_never_comes_takes_no_time_from_the_next_and_is_trained_when_all_are_in():
    metrics, seconds, busy = step(a=1e6, b=20.0 + 2 * LATE_SECONDS - 0.5)
    assert {name for name in metrics if name.startswith("shares/late/")} == {"shares/late/a"}
    assert (metrics["shares/late"], metrics["shares/micro_batches"]) == (1, 1)
    assert metrics["shares/wait_seconds"] == pytest.approx(2 * LATE_SECONDS - 0.5)
    assert (seconds, busy) == (pytest.approx(20.0 + 2 * LATE_SECONDS - 0.5 + 10.0), 30.0)


def test_what_no_member_sent_is_all_trained_here():
    metrics, seconds, busy = step(a=1e6, b=1e6)
    assert (metrics["shares/late"], metrics["shares/micro_batches"]) == (2, 0)
    assert metrics["shares/wait_seconds"] == pytest.approx(2 * LATE_SECONDS)
    assert (seconds, busy) == (pytest.approx(40.0 + 2 * LATE_SECONDS), 40.0)


def test_rollouts_that_are_masked_take_no_time_of_a_step():
    masks = config_lib.TaskConfig(cut_off="mask", cut_off_limits=("max_seconds",)).masks
    cut = batch()
    cut.groups[0].trajectories[1].finish = "max_seconds"

    async def main():
        model = types.SimpleNamespace(train_seconds=lambda lengths, devices: float(sum(lengths)))
        log, shares = trainer.TrainingLog(), [protocols.Share("a", 1, 1 / 3)]
        channels = training_side.SimulatedChannels()
        channels.listening["a"] = 1
        made = trainer.SimulatedTrainer(
            model, 1, log, channels=channels, late=0.1, late_seconds=LATE_SECONDS, masks=masks
        )
        worker = training_side.SimulatedTrainingSide(
            "a",
            devices=1,
            model=types.SimpleNamespace(load_seconds=lambda _: 0.0, sync_bytes=0),
            channels=channels,
            train_seconds=sum,
            masks=masks,
        )
        await worker.join(1, {})
        await worker.finish_weight_update(0)
        told, metrics = await asyncio.gather(worker.contribute(cut, shares), made.train_step(cut, shares))
        return told, metrics, log

    told, metrics, log = clock.run(main())
    assert (told["seconds"], log.busy_seconds) == (10.0, 20.0)
    assert metrics["shares/of"] == 3.0
    assert "p0/1" not in log.trained
    assert len(log.trained) == 3
