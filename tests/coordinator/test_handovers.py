"""A trainer that moves to other processes while it trains, on doubles: whatever breaks, one set has every step."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from typing import Any

import coordinator_doubles
import movable_trainers as doubles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import config, protocols
from libra_jax.coordinator import handover, process_set

SIZES = protocols.MeshSizes(2, 1, 1)
LIMITS = config.DeadlineConfig(trainer_start=60, checkpoint=60, train_step=60, shutdown=60)


class Run:
    """A run that trains back to back, and the handover beside it."""

    def __init__(self, folder: Path, faults: Any = None, successor_step_seconds: float = 0.5) -> None:
        self.cluster = doubles.Cluster(doubles.Faulty(faults))
        self.serving = process_set.ProcessSet(self.cluster, doubles.maker())
        self.successor = process_set.ProcessSet(
            self.cluster, doubles.maker(step_seconds=successor_step_seconds), processes=2, name="trainer-1"
        )
        self.lock = asyncio.Lock()
        self.moving = handover.Handover(LIMITS, serving=self.serving, lock=self.lock, workdir=folder)
        self.folder = folder / handover.FOLDER
        self.version = 0
        self.phases: handover.Phases | None = None

    async def open(self) -> None:
        await self.serving.make()
        await self.serving.start()
        asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        """The serving trainer's saving thread."""
        while "trainer" in self.cluster.alive:
            self.cluster.alive["trainer"].write()
            await asyncio.sleep(0.05)

    async def step(self) -> None:
        batch = protocols.TrainBatch(self.version, ())
        async with self.lock:
            await self.serving.train_step(batch)
            self.version += 1
        self.moving.missed(batch)

    async def take_over(self, seconds: float = 30.0) -> None:
        async with self.lock:
            old, (self.serving, self.phases) = self.serving, await self.moving.take_over(self.version, seconds)
        await old.stop()

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
        run.moving.begin(run.successor, SIZES)
        seen = []
        while not run.moving.progress.ready:
            seen.append(run.moving.progress.phase)
            await run.step()
        assert sorted(set(seen), key=seen.index) == ["starting", "compiling", "saving", "restoring", "replaying"]
        await run.take_over()
        await run.step()

    run = on_clock(body, tmp_path)
    assert run.serving is run.successor
    assert run.taken() == [list(range(run.version))] * 2
    assert run.moving.progress == handover.Progress("")
    assert not run.folder.exists()
    phases = run.phases
    assert (phases.nbytes, phases.replayed) == (1000, run.version - 1 - 8)
    assert phases.start == pytest.approx(2.0, abs=0.1)
    assert 3.0 < phases.compile < 5.1  # and twice the wait for the end of a step
    assert 2.5 < phases.snapshot < 4.0  # likewise, once
    assert phases.restore == pytest.approx(1.5)
    assert phases.replay == pytest.approx(phases.replayed * 0.5)
    assert phases.stall == pytest.approx(0.1 + 0.5, abs=0.1)  # the snapshot's copy, and the last step's replay


def test_one_that_is_behind_at_the_take_over_catches_up_within_the_stall_or_is_waited_for_another_time(tmp_path):
    async def body(run: Run) -> None:
        run.moving.begin(run.successor, SIZES)
        with pytest.raises(protocols.DeadlineMissed, match="trainer-1 is still starting"):
            await run.take_over()
        with pytest.raises(protocols.ConfigError, match="moving to a mesh of data 2 x fsdp 1 x tensor 1 already"):
            run.moving.begin(run.successor, SIZES)
        while run.moving.progress.phase != "restoring":
            await run.step()
        with pytest.raises(
            protocols.DeadlineMissed, match=r"trainer-1, restoring to take over, did not finish within 0\.5"
        ):
            await run.take_over(0.5)
        assert not run.moving.progress.error
        for _ in range(3):
            await run.step()
        assert run.moving.progress.missed
        await run.take_over()

    run = on_clock(body, tmp_path, successor_step_seconds=2.0)
    assert run.taken() == [list(range(run.version))] * 2
    assert run.phases.stall > 2


def test_a_successor_that_is_no_faster_is_ready_when_it_stops_gaining(tmp_path):
    async def body(run: Run) -> None:
        run.moving.begin(run.successor, SIZES)
        while not run.moving.progress.ready:
            await run.step()
        assert run.moving.progress.missed > 1
        await run.take_over()

    run = on_clock(body, tmp_path, successor_step_seconds=1.0)
    assert run.taken() == [list(range(run.version))] * 2


def test_nothing_takes_over_that_is_not_moving_and_no_set_succeeds_itself(tmp_path):
    async def body(run: Run) -> None:
        with pytest.raises(protocols.LibraError, match="not moving to other processes"):
            await run.take_over()
        with pytest.raises(protocols.ConfigError, match="'trainer' is the serving trainer's"):
            run.moving.begin(process_set.ProcessSet(run.cluster, doubles.maker()), SIZES)
        await run.moving.cancel()

    on_clock(body, tmp_path)


def test_a_successor_of_another_version_is_refused_and_ended(tmp_path):
    async def body(run: Run) -> None:
        run.moving.begin(run.successor, SIZES)
        while not run.moving.progress.ready:
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
        run.moving.begin(run.successor, SIZES)
        for _ in range(steps):
            await run.step()
        await run.moving.cancel()
        assert list(run.cluster.alive) == ["trainer"]
        assert not run.folder.exists()
        run.moving.begin(run.successor, SIZES)
        while not run.moving.progress.ready:
            await run.step()
        await run.take_over()

    run = on_clock(body, tmp_path)
    assert run.taken() == [list(range(run.version))] * 2


def test_the_event_loop_goes_on_while_a_snapshot_is_removed(tmp_path, monkeypatch):
    looped, waited = threading.Event(), []
    monkeypatch.setattr(handover.shutil, "rmtree", lambda *_, **__: waited.append(looped.wait(20)))

    async def main() -> None:
        run = Run(tmp_path)
        await run.serving.make()
        run.moving.begin(run.successor, SIZES)
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
        await run.take_over(5.0)
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
    if (kind, method) == ("hang", "stop"):
        kind = "error"  # that a stop ends is the cluster's part

    async def body(run: Run) -> None:
        run.moving.begin(run.successor, SIZES)
        for _ in range(400):
            await run.step()
            progress = run.moving.progress
            if progress.error:
                assert "stays where it is" in progress.error
                break
            if progress.ready or run.version > 12 + patience:
                outcome = await _taken_over(run)
                assert outcome in ("", "late") or "stays where it is" in outcome
                if outcome != "late":
                    break
        else:
            raise AssertionError(f"stuck in {run.moving.progress}")
        await run.step()

    with tempfile.TemporaryDirectory() as folder:
        run = on_clock(body, Path(folder), faults={(actor, method, number): _fault(kind, actor)})
        assert not run.folder.exists()
    wanted = ["trainer-1.0", "trainer-1.1"] if run.serving is run.successor else ["trainer"]
    assert list(run.cluster.alive) == wanted
    assert run.taken() == [list(range(run.version))] * len(wanted)
