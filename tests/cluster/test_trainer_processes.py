"""A trainer of several real processes against one of a single process; its state on the way between process sets."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import psutil
import pytest
import small_model
import trainer_processes as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import inprocess, ray_cluster
from libra_jax.data import dividing
from libra_jax.models.hf import hf
from libra_jax.trainer_control import client, handover
from libra_jax.weights import memfd

pytestmark = [pytest.mark.ray, pytest.mark.multiprocess, pytest.mark.slow]

FOUR = protocols.MeshSizes(2, 2, 1)
SPLIT = protocols.MeshSizes(1, 1, 2, 2)


LIMITS = config_lib.DeadlineConfig()


class Trainer(client.TrainerActorClient):
    """A trainer that is also asked for the bits of its state."""

    async def bits(self) -> dict[str, str]:
        return await self._processes.call_all(doubles.Trainer.bits)


class Bench:
    """An event loop, a model, and clusters: Ray's, and this process with its eight devices."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.runner = asyncio.Runner()
        self.folder = folder
        self.model = doubles.write_model(folder / "model")
        self.ray = ray_cluster.RayCluster(start_seconds=120, shutdown_seconds=30)
        self.here = inprocess.InProcessCluster(shutdown_seconds=30)

    def single(self, name: str) -> Trainer:
        """A trainer of one process: this one."""
        return Trainer(client.TrainerProcesses(self.here, doubles.maker(self.model, FOUR), name=name), LIMITS)

    def several(self, name: str, processes: int, sizes: protocols.MeshSizes = FOUR) -> Trainer:
        make = doubles.maker(self.model, sizes)
        config = doubles.run_config(self.model, sizes, processes)
        divide = functools.partial(dividing.divide, config)
        return Trainer(client.TrainerProcesses(self.ray, make, count=processes, name=name, divide=divide), LIMITS)


@pytest.fixture(scope="module")
def bench(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("processes"))
    with made.runner:
        yield made
        made.runner.run(made.here.shutdown())
        made.runner.run(made.ray.shutdown())


async def _started(trainer: Trainer) -> Trainer:
    await trainer.make()
    info = await trainer.start()
    assert (info.policy_version, info.sizes.devices) == (0, 4)
    return trainer


def _handover(bench: Bench, serving: Trainer, successor: Trainer, sizes: protocols.MeshSizes) -> handover.Handover:
    return handover.Handover(LIMITS, serving=serving, successor=successor, sizes=sizes, workdir=bench.folder)


async def _until(moving: handover.Handover, reached: Callable[[], bool]) -> None:
    """Waits for that, or for the move to fail."""
    for _ in range(6000):
        if reached():
            return
        assert not moving.error
        await asyncio.sleep(0.05)
    raise AssertionError(f"stuck in {moving.phase!r}")


def _in(moving: handover.Handover, *phases: str) -> Callable[[], bool]:
    return lambda: moving.phase in phases


@dataclasses.dataclass
class Moves:
    """Steps of a trainer that moves from one process to two and back, with --drills twice, beside one that stays.

    Attributes:
      curves: losses of the two.
      taken: what each move took, and the steps that it replayed.
      one: the trainer that stayed, in this process.
      two: the trainer of two processes that has served, at an older version; it lives.
    """

    curves: tuple[list[float], list[float]]
    taken: list[tuple[handover.HandoverCost, int]]
    one: Trainer
    two: Trainer


@pytest.fixture(scope="module")
def moves(bench: Bench, request: pytest.FixtureRequest) -> Moves:
    steps = 60 if request.config.getoption("--drills") else 30

    async def body() -> Moves:
        fixed, serving = await _started(bench.single("fixed")), await _started(bench.single("trainer-0"))
        successors = [bench.several("trainer", 2, SPLIT), bench.single("trainer-2")]
        successors += [bench.several("trainer-3", 2, SPLIT), bench.single("trainer-4")]
        taken: list[tuple[handover.HandoverCost, int]] = []
        curves: tuple[list[float], list[float]] = ([], [])
        moving = _handover(bench, serving, successors[0], SPLIT)
        for version in range(steps):
            batch = doubles.batch(version, seed=version % 4)
            if version in (5, 20, 33, 46):
                moving = _handover(bench, serving, successors[len(taken)], SPLIT)
                await moving.begin()
            async with serving.lock:
                curves[0].append((await serving.train_step(batch))["loss"])
            moving.trains(batch)
            curves[1].append((await fixed.train_step(batch))["loss"])
            if version in (9, 24, 37, 50):
                await _until(moving, _in(moving, "restoring", "replaying", "ready"))
            if version in (12, 27, 40, 53):
                await _until(moving, _in(moving, "ready"))
                async with serving.lock:
                    taken.append((await moving.take_over(version + 1), moving.replayed))
                if version != 27:  # the first successor lives on
                    await moving.end_former()
        assert serving.name == f"trainer-{len(taken)}"
        await serving.stop()
        return Moves(curves, taken, fixed, successors[0])

    return bench.runner.run(body())


def test_a_run_that_moves_between_process_sets_keeps_its_loss_curve(bench, moves):
    """Each successor replays what it missed."""
    np.testing.assert_allclose(*moves.curves, rtol=1e-3)
    assert moves.curves[1][-1] < 0.8 * moves.curves[1][0]
    assert moves.taken[0][0].nbytes == moves.taken[1][0].nbytes > 0
    assert len(moves.taken) == (4 if len(moves.curves[0]) == 60 else 2)
    assert all(replayed >= 2 for _, replayed in moves.taken)
    assert not (bench.folder / handover.FOLDER).exists()


@pytest.fixture(scope="module")
def four(bench: Bench, moves: Moves) -> Trainer:
    """A trainer of four processes without a state, each with rows of its own."""
    made = bench.several("four", 4)

    async def body() -> None:
        await made.make()
        await made.stand_by()
        await made.warm(await moves.two.shapes())

    bench.runner.run(body())
    return made


def test_a_state_goes_round_process_sets_bit_for_bit_and_each_takes_the_next_step_alike(bench, moves, four):
    """From one process to two, four and one: parameters, moments, step and random key, and what is trained from there.

    Each trains on while its state is saved.
    """

    version = len(moves.curves[0])

    async def body() -> None:
        assert await four.shapes() == await moves.two.shapes()
        wanted, previous, steps = await moves.one.bits(), moves.one, []
        (key,) = [name for name in wanted if "rng" in name]
        for trainer in (moves.two, four, moves.one):
            at = str(bench.folder / "round" / trainer.name)
            await previous.save(at)
            steps.append(
                await previous.train_step(doubles.batch(len(moves.curves[0])))
            )  # donates every buffer that is being saved
            await previous.wait_saved()
            assert (await previous.bits())[key] == wanted[key]
            assert await trainer.restore(at) == await trainer.policy_version() == version
            assert await trainer.bits() == wanted
            previous = trainer
        for taken in steps[1:]:
            assert taken.keys() == steps[0].keys()
            for name in ("loss", "grad_norm", "entropy", "learning_rate", "tokens/processed", "micro_batches"):
                assert taken[name] == pytest.approx(steps[0][name], rel=1e-4)

    bench.runner.run(body())


async def _published(trainer: Trainer, version: int) -> list[tuple[Any, bytes]]:
    """Entries and bytes of every chunk, read as an engine does."""
    found = []
    for index in range(await trainer.open_weights(version)):
        chunk = await trainer.stage_weights(version, index)
        with memfd.open_peer(chunk.transport) as memory:
            found.append((chunk.entries, memory[: chunk.nbytes]))
    await trainer.close_weights(version)
    return found


def test_two_processes_publish_and_export_the_bytes_of_one_and_take_its_steps(bench, moves):
    async def body() -> None:
        trainers = (moves.one, moves.two)
        await moves.one.save(str(bench.folder / "same"))
        await moves.one.wait_saved()
        version = await moves.two.restore(str(bench.folder / "same"))
        published = [await _published(trainer, version) for trainer in trainers]
        assert published[0] == published[1]
        for trainer in trainers:
            await trainer.export(str(bench.folder / trainer.name))
        files = [(bench.folder / trainer.name / "model.safetensors").read_bytes() for trainer in trainers]
        assert files[0] == files[1]
        for step in range(version, version + 3):
            metrics = [await trainer.train_step(doubles.batch(step)) for trainer in trainers]
            assert metrics[0].keys() == metrics[1].keys()
            for name in ("loss", "grad_norm", "entropy", "mismatch/kl"):
                assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-3, abs=1e-6)
        for trainer in trainers:
            await trainer.export(str(bench.folder / trainer.name))
        mine, theirs = [hf.load(bench.folder / trainer.name, small_model.shape()) for trainer in trainers]
        for leaf, wanted in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            assert np.abs(leaf - wanted).max() <= 1e-3 * np.abs(wanted).max()

    bench.runner.run(body())


def test_several_processes_answer_what_is_wrong_with_the_sentence_of_one(bench, moves):
    async def body() -> None:
        taken = bench.folder / "taken"
        taken.mkdir()
        (taken / "other").write_text("")
        for trainer in (moves.one, moves.two):
            version = await trainer.policy_version()
            with pytest.raises(protocols.LibraError, match=r"^the batch is for policy version 9 and the trainer holds"):
                await trainer.train_step(doubles.batch(9))
            with pytest.raises(protocols.DataError, match="taken: exists and holds no model"):
                await trainer.export(str(taken))  # process 0 refuses, and the others wait for nothing
            await trainer.train_step(doubles.batch(version))

    bench.runner.run(body())


def test_a_rollout_that_one_process_alone_has_is_refused_by_all_of_them(bench, four):
    async def body() -> None:
        version = await four.policy_version()
        rows = await four._processes.first.call(doubles.Trainer.rows)
        assert sorted(row for each in rows for row in each) == list(range(8)), "no two processes have a row in common"
        for group in range(3):
            batch = doubles.batch(version)
            rollout = batch.groups[group].trajectories[0]
            rollout.token_ids[-1] = small_model.VOCABULARY
            refused = f"^trajectory {rollout.trajectory_id}: holds a token id outside the model's vocabulary"
            with pytest.raises(protocols.DataError, match=refused):
                await four.train_step(batch)
        assert await four.policy_version() == version
        await four.train_step(doubles.batch(version))

    bench.runner.run(body())


def _ends(pids: list[int], seconds: float = 60.0) -> set[int]:
    """Those of the processes that still run after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := {pid for pid in pids if _runs(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_successor_that_is_killed_while_it_restores_leaves_the_serving_trainer_training(bench, moves):
    async def body() -> None:
        stalled, one = bench.folder / "stalled", moves.one
        cluster = ray_cluster.RayCluster(shutdown_seconds=3)  # its peer waits for it in vain
        make = doubles.maker(bench.model, FOUR, stall=str(stalled))
        successor = Trainer(client.TrainerProcesses(cluster, make, count=2, name="trainer-3"), LIMITS)
        moving = _handover(bench, one, successor, FOUR)
        await moving.begin()
        await _until(moving, stalled.exists)
        assert moving.phase == "restoring"
        version = await one.policy_version()
        batch = doubles.batch(version)
        await one.train_step(batch)
        moving.trains(batch)
        pid = int(stalled.read_text())
        os.kill(pid, signal.SIGKILL)
        await _until(moving, _in(moving, "failed"))
        wanted = rf"a mesh of data 2 x fsdp 2 x tensor 1 failed.*actor 'trainer-3\.1' is lost: its process {pid} died"
        with pytest.raises(protocols.LibraError, match=wanted):
            await moving.take_over(version + 1)
        assert not (bench.folder / handover.FOLDER).exists()
        await one.train_step(doubles.batch(version + 1))

    bench.runner.run(body())


def test_a_killed_process_of_the_serving_set_is_named_and_none_of_its_peers_stays(bench, moves):
    async def body() -> None:
        two = moves.two
        pids = [await actor.call(doubles.Trainer.pid) for actor in two._processes._actors]
        version = await two.policy_version()
        os.kill(pids[1], signal.SIGKILL)
        async with asyncio.timeout(60):
            with pytest.raises(protocols.WorkerLost, match=rf"^actor 'trainer\.1' is lost: its process {pids[1]} died"):
                await two.train_step(doubles.batch(version))
        await two.stop()
        assert _ends(pids) == set()

    bench.runner.run(body())
