"""A trainer that moves to other processes while it trains, on doubles: whatever breaks, one set has every step."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import threading
from pathlib import Path
from typing import Any

import coordinator_doubles
import movable_trainers as doubles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.trainer_control import client, handover

SIZES = protocols.MeshSizes(2, 1, 1)
LIMITS = config_lib.DeadlineConfig(trainer_start=60, checkpoint=60, train_step=60, shutdown=60)


class Run:
    """A run that trains back to back, and the move beside it."""

    def __init__(
        self, folder: Path, faults: Any = None, successor_step_seconds: float = 0.5, transition: float = 30.0
    ) -> None:
        self.cluster = doubles.Cluster(doubles.Faulty(faults))
        self.limits = dataclasses.replace(LIMITS, transition=transition)
        processes = client.TrainerProcesses(self.cluster, doubles.maker())
        self.trainer = client.TrainerActorClient(processes, self.limits)
        self.seconds = successor_step_seconds
        self.workdir, self.folder = folder, folder / handover.FOLDER
        self.moving = self.move()
        self.version = 0
        self.taken_over: handover.HandoverCost | None = None

    def move(self) -> handover.Handover:
        make = doubles.maker(step_seconds=self.seconds)
        processes = client.TrainerProcesses(self.cluster, make, count=2, name="trainer-1")
        successor = client.TrainerActorClient(processes, self.limits)
        return handover.Handover(
            self.limits, serving=self.trainer, successor=successor, sizes=SIZES, workdir=self.workdir
        )

    async def open(self) -> None:
        await self.trainer.make()
        await self.trainer.start()
        asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        """The serving trainer's saving thread."""
        while "trainer" in self.cluster.alive:
            self.cluster.alive["trainer"].write()
            await asyncio.sleep(0.05)

    async def step(self) -> None:
        batch = protocols.TrainBatch(self.version, ())
        async with self.trainer.lock:
            await self.trainer.train_step(batch)
            self.version += 1
        self.moving.trains(batch)

    async def ready(self) -> bool:
        return (await self.moving.progress()).ready

    async def take_over(self) -> None:
        async with self.trainer.lock:
            self.taken_over = await self.moving.take_over(self.version)
        await self.moving.end_former()

    @property
    def moved(self) -> bool:
        return self.trainer.name == "trainer-1"

    def taken(self) -> list[list[int]]:
        return [actor.taken for actor in self.cluster.alive.values()]


def on_clock(body: Any, folder: Path, **arguments: Any) -> Run:
    async def main() -> Run:
        run = Run(folder, **arguments)
        await run.open()
        await body(run)
        return run

    return coordinator_doubles.run_on_clock(main(), longest=1000)


def test_the_successor_replays_what_it_missed_and_serves_from_there(tmp_path):
    async def body(run: Run) -> None:
        await run.moving.begin()
        seen = []
        while not await run.ready():
            seen.append(run.moving.phase)
            await run.step()
        assert sorted(set(seen), key=seen.index) == ["starting", "compiling", "saving", "restoring", "replaying"]
        await run.take_over()
        await run.step()

    run = on_clock(body, tmp_path)
    assert run.moved
    assert run.taken() == [list(range(run.version))] * 2
    assert not run.folder.exists()
    taken, replayed = run.taken_over, run.moving.replayed
    assert (taken.nbytes, replayed) == (1000, run.version - 1 - 8)
    assert taken.phases["start"] == pytest.approx(2.0, abs=0.1)
    assert 3.0 < taken.phases["compile"] < 5.1  # and twice the wait for the end of a step
    assert 2.5 < taken.phases["snapshot"] < 4.0  # and once
    assert taken.phases["restore"] == pytest.approx(1.5)
    assert taken.phases["replay"] == pytest.approx(replayed * 0.5)
    assert taken.stall == pytest.approx(0.1 + 0.5, abs=0.1)  # the snapshot's copy, and the last step's replay


def test_one_that_is_behind_at_the_take_over_catches_up_within_the_stall_or_is_waited_for_another_time(tmp_path):
    async def body(run: Run) -> None:
        with pytest.raises(protocols.LibraError, match="not moving to other processes"):
            await run.take_over()
        await run.moving.begin()
        with pytest.raises(protocols.DeadlineMissed, match="trainer-1 is still starting"):
            await run.take_over()
        while run.moving.phase != "restoring":
            await run.step()
        with pytest.raises(
            protocols.DeadlineMissed, match=r"trainer-1, restoring to take over, did not finish within 0\.7"
        ):
            await run.take_over()
        assert not run.moving.error
        while not await run.ready():
            await run.step()
        await run.take_over()

    run = on_clock(body, tmp_path, transition=0.7)
    assert run.taken() == [list(range(run.version))] * 2
    assert run.taken_over.stall > 0.5


def test_a_successor_that_is_no_faster_is_ready_when_it_stops_gaining(tmp_path):
    async def body(run: Run) -> None:
        await run.moving.begin()
        while not await run.ready():
            await run.step()
        assert len(run.moving.missed) > 1
        await run.take_over()

    run = on_clock(body, tmp_path, successor_step_seconds=1.0)
    assert run.taken() == [list(range(run.version))] * 2


def test_a_successor_of_another_version_is_refused_and_ended(tmp_path):
    async def body(run: Run) -> None:
        await run.moving.begin()
        while not await run.ready():
            await run.step()
        run.version += 1
        with pytest.raises(protocols.LibraError, match=r"holds version \d+ and the run is at \d+\.$"):
            await run.take_over()
        run.version -= 1
        await run.step()

    run = on_clock(body, tmp_path)
    assert list(run.cluster.alive) == ["trainer"]
    assert not run.folder.exists()


@pytest.mark.parametrize("steps", range(14))
def test_a_cancelled_move_leaves_nothing_and_another_can_begin(tmp_path, steps):
    async def body(run: Run) -> None:
        await run.moving.begin()
        for _ in range(steps):
            await run.step()
        await run.moving.cancel()
        assert list(run.cluster.alive) == ["trainer"]
        assert not run.folder.exists()
        run.moving = run.move()
        await run.moving.begin()
        while not await run.ready():
            await run.step()
        await run.take_over()

    run = on_clock(body, tmp_path)
    assert run.taken() == [list(range(run.version))] * 2


def test_the_event_loop_goes_on_while_a_snapshot_is_removed(tmp_path, monkeypatch):
    looped, waited = threading.Event(), []
    monkeypatch.setattr(handover.shutil, "rmtree", lambda *_, **__: waited.append(looped.wait(20)))

    async def main() -> None:
        run = Run(tmp_path)
        await run.trainer.make()
        await run.moving.begin()
        await asyncio.sleep(0.01)
        looped.set()
        await run.moving.cancel()

    asyncio.run(main())
    assert waited == [True] * 2  # before the move, and after it


CALLS = [
    *[("trainer", method) for method in ("shapes", "snapshot", "snapshot_saved")],
    *[
        (f"trainer-1.{process}", method)
        for process in range(2)
        for method in ("spawn", "join", "stand_by", "warm", "restore", "train_step", "policy_version", "stop")
    ],
    ("trainer-1.0", "reserve"),
    ("trainer-1.0", "is_saved"),
]


def _fault(kind: str, actor: str) -> BaseException | str:
    if kind == "hang":
        return kind
    return protocols.WorkerLost(f"{actor} died") if kind == "lost" else protocols.LibraError(f"{actor} failed")


async def _taken_over(run: Run) -> str:
    """Empty, "late", or why not."""
    try:
        await run.take_over()
    except protocols.DeadlineMissed:
        return "late"
    except protocols.LibraError as error:
        return str(error)
    return ""


@settings(max_examples=150)
@given(
    call=st.sampled_from(CALLS),
    number=st.integers(1, 3),
    kind=st.sampled_from(["lost", "error", "hang"]),
    patience=st.integers(0, 40),
)
def test_whatever_call_fails_or_hangs_one_set_has_every_step_and_nothing_is_left(call, number, kind, patience):
    actor, method = call
    if (kind, method) == ("hang", "stop") or (kind, actor) == ("lost", "trainer"):
        kind = "error"  # that a stop ends is the cluster's part, and a lost trainer is recovery's

    async def body(run: Run) -> None:
        await run.moving.begin()
        for _ in range(400):
            await run.step()
            if run.moving.error:
                assert "stays where it is" in run.moving.error
                break
            if await run.ready() or run.version > 12 + patience:
                outcome = await _taken_over(run)
                assert outcome in ("", "late") or "stays where it is" in outcome
                if outcome != "late":
                    break
        else:
            raise AssertionError(f"stuck in {run.moving.phase}")
        await run.step()

    with tempfile.TemporaryDirectory() as folder:
        run = on_clock(body, Path(folder), transition=5.0, faults={(actor, method, number): _fault(kind, actor)})
        assert not run.folder.exists()
    wanted = ["trainer-1.0", "trainer-1.1"] if run.moved else ["trainer"]
    assert list(run.cluster.alive) == wanted
    assert run.taken() == [list(range(run.version))] * len(wanted)
