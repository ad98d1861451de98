"""Meshes that change while a run goes on: one call, a handle, and a trainer that stays where it is if that fails."""

from __future__ import annotations

import asyncio

import coordinator_doubles as doubles
import pytest

from libra_jax import protocols
from libra_jax.coordinator import process_set, resizing
from libra_jax.telemetry import memory


def sizes(data=1, fsdp=1, tensor=1):
    return protocols.MeshSizes(data, fsdp, tensor)


def run(work, **deadlines):
    """Runs `work(resizing, trainer, recorder)` on virtual time."""

    async def main():
        trainer, recorder = doubles.make_trainer(), memory.MemoryRecorder()
        config = doubles.make_config(deadlines=deadlines)
        serving = process_set.Serving(doubles.alone(trainer), lambda before: None)
        made = resizing.Resizing(config, trainer=serving, sizes=sizes(), recorder=recorder)
        await work(made, trainer, recorder)

    doubles.run_on_clock(main())


def test_it_compiles_beside_training_and_takes_over_once_that_is_done():
    async def work(mesh, trainer, recorder):
        handle = mesh.resize(sizes(tensor=3), "more is trained")
        for step in range(3):
            assert not handle.done.done()
            assert mesh.sizes == sizes()
            await mesh.boundary(step)
        assert (await handle.done).nbytes == 50
        assert mesh.sizes == sizes(tensor=3)
        assert handle.progress.programs == 3
        assert handle.estimate.peak_bytes == 10
        (record,) = recorder.transitions
        assert record["phases"] == {"compile": 3.0, "wait": 0.0, "move": 0.05}
        assert record["stall"]["training"] == 0.05
        assert (record["step"], record["reason"], record["outcome"]) == (2, "more is trained", "done")
        await mesh.boundary(3)
        assert len(trainer.meshes) == 1

    run(work)


def test_one_that_is_held_compiles_and_moves_only_when_it_may():
    async def work(mesh, trainer, recorder):
        handle = mesh.resize(sizes(data=2), "", hold=True)
        for step in range(3):
            await mesh.boundary(step)
        assert handle.compiled.done()
        assert not trainer.meshes
        handle.go()
        await mesh.boundary(3)
        assert mesh.sizes == sizes(data=2)

    run(work)


def test_two_at_once_are_refused_and_the_first_goes_on():
    async def work(mesh, trainer, recorder):
        first = mesh.resize(sizes(data=2), "")
        with pytest.raises(protocols.ConfigError, match=r"cannot become data 4 .* while it becomes data 2"):
            mesh.resize(sizes(data=4), "")
        await mesh.boundary(0)
        await first.done
        mesh.resize(sizes(data=4), "")

    run(work)


def test_one_that_is_cancelled_says_why_and_another_may_follow():
    async def work(mesh, trainer, recorder):
        handle = mesh.resize(sizes(tensor=8), "")
        await mesh.boundary(0)
        handle.cancel("it is not wanted any more")
        await mesh.boundary(1)
        with pytest.raises(protocols.LibraError, match="cancelled: it is not wanted any more"):
            await handle.done
        assert trainer.cancelled == 1
        assert recorder.transitions[0]["outcome"] == "cancelled"
        mesh.resize(sizes(data=2), "")

    run(work)


def test_one_that_compiles_for_too_long_is_given_up():
    async def work(mesh, trainer, recorder):
        handle = mesh.resize(sizes(tensor=8), "")
        await mesh.boundary(0)
        await asyncio.sleep(61)
        await mesh.boundary(1)
        with pytest.raises(protocols.DeadlineMissed, match=r"tensor 8 was not ready after 60 s.*trainer_start"):
            await handle.done
        assert mesh.sizes == sizes()

    run(work, trainer_start=60.0)


def test_at_the_end_of_a_run_whoever_waits_is_told():
    async def work(mesh, trainer, recorder):
        handle = mesh.resize(sizes(data=2), "")
        await mesh.close()
        with pytest.raises(protocols.LibraError, match="the run ended before"):
            await handle.done

    run(work)
