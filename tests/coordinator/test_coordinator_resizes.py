"""Meshes that change while a run goes on: one call, a handle, and a trainer that stays where it is if that fails."""

from __future__ import annotations

import asyncio
import types

import coordinator_doubles as doubles
import movable_trainers
import pytest

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import handover, mesh_moves, process_set, resizing
from libra_jax.telemetry import memory


def sizes(data=1, fsdp=1, tensor=1):
    return protocols.MeshSizes(data, fsdp, tensor)


def run(work, successors=None, **deadlines):
    """Runs `work(resizing, trainer, recorder)` on virtual time."""

    async def main():
        trainer, recorder = doubles.make_trainer(), memory.MemoryRecorder()
        config = doubles.make_config(deadlines=deadlines)
        serving = process_set.Serving(doubles.alone(trainer), lambda before: None)
        made = resizing.Resizing(config, trainer=serving, sizes=sizes(), recorder=recorder, successors=successors)
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


def test_it_says_so_where_devices_do_not_tell_whether_the_state_fits():
    async def work(mesh, trainer, recorder):
        async def begin(wanted) -> protocols.ResizeEstimate:
            trainer.wanted, trainer.looks = wanted, 0
            return protocols.ResizeEstimate(100, 50, 10, unchecked=2)

        trainer.begin_resize = begin
        handle = mesh.resize(sizes(data=2), "")
        await mesh.boundary(0)
        await handle.done
        assert any("is not known: 2 of its devices do not say" in note for note in recorder.notes)

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


class Tardy:
    """A way to another mesh that is ready at once, and misses its deadline the first times that it is to take over."""

    longest = 60.0

    def __init__(self, misses):
        self._misses = misses

    async def begin(self):
        return protocols.ResizeEstimate(0, 0, 0)

    async def progress(self):
        return protocols.ResizeProgress(1, 1, ready=True)

    async def take_over(self, step):
        if step < self._misses:
            await asyncio.sleep(5)
            raise protocols.DeadlineMissed("The trainer trainer-1, replaying to take over, did not finish within 5 s.")
        return mesh_moves.Taken({}, 0.0, 0)

    async def cancel(self):
        pass

    def trains(self, batch):
        pass


def test_a_take_over_that_is_late_is_noted_and_tried_again_until_the_whole_resize_takes_too_long():
    def noted(recorder):
        return [note for note in recorder.notes if "is not data 2 x fsdp 1 x tensor 1 yet" in note]

    async def catches_up(mesh, trainer, recorder):
        handle = mesh.resize(sizes(data=2), "", processes=2)
        for step in range(3):
            await mesh.boundary(step)
        assert (await handle.done).stall == pytest.approx(10.0)
        assert recorder.transitions[0]["phases"] == {"late": pytest.approx(10.0)}
        assert len(noted(recorder)) == 2
        assert noted(recorder)[0].endswith("did not finish within 5 s.")

    async def never_does(mesh, trainer, recorder):
        handle = mesh.resize(sizes(data=2), "", processes=2)
        await mesh.boundary(0)
        assert len(noted(recorder)) == 1
        await asyncio.sleep(61)
        await mesh.boundary(1)
        with pytest.raises(protocols.DeadlineMissed, match="trainer-1, replaying to take over"):
            await handle.done
        assert len(noted(recorder)) == 1
        (record,) = recorder.transitions
        assert (record["outcome"], record["stall"]["training"]) == ("failed", pytest.approx(10.0))

    run(catches_up, successors=lambda wanted, processes: Tardy(2))
    run(never_does, successors=lambda wanted, processes: Tardy(100))


def test_one_with_a_deadline_of_its_own_is_given_up_by_that():
    async def work(mesh, trainer, recorder):
        with pytest.raises(protocols.ConfigError, match=r"deadline of a resize to .* must be positive seconds, not 0"):
            mesh.resize(sizes(tensor=8), "", deadline=0)
        handle = mesh.resize(sizes(tensor=8), "", deadline=10.0)
        await asyncio.sleep(20)  # a step under way
        for step in range(2):
            await mesh.boundary(step)
            assert not handle.done.done()
        await asyncio.sleep(11)
        await mesh.boundary(2)
        with pytest.raises(protocols.DeadlineMissed, match=r"tensor 8 was not ready after 10 s: .* later deadline"):
            await handle.done
        config_deadline = mesh.resize(sizes(tensor=8), "")
        await mesh.boundary(3)
        assert (handle.deadline, config_deadline.deadline) == (10.0, 60.0)

    run(work, trainer_start=60.0)


def test_at_the_end_of_a_run_whoever_waits_is_told():
    async def work(mesh, trainer, recorder):
        handle = mesh.resize(sizes(data=2), "")
        await mesh.close()
        with pytest.raises(protocols.LibraError, match="the run ended before"):
            await handle.done

    run(work)


class Elsewhere:
    """A run whose trainer's state can move to other processes."""

    def __init__(self, folder, faults=None, replay_seconds=0.5):
        self.cluster = movable_trainers.Cluster(movable_trainers.Faulty(faults))
        self.first = process_set.ProcessSet(self.cluster, movable_trainers.maker())
        self.ended, self.lock, self.recorder = [], asyncio.Lock(), memory.MemoryRecorder()
        self.serving = process_set.Serving(self.first, self.ended.append)
        limits = configuration.DeadlineConfig(trainer_start=60, checkpoint=60, train_step=60, shutdown=60)

        def successor(wanted, processes):
            moving = handover.Handover(limits, serving=self.serving.set, lock=self.lock, workdir=folder)
            made = process_set.ProcessSet(
                self.cluster,
                movable_trainers.maker(step_seconds=replay_seconds),
                processes=processes,
                name=f"trainer-{processes}",
            )
            return mesh_moves.Outside(moving, made, wanted, self.serving, limits)

        self.mesh = resizing.Resizing(
            doubles.make_config(),
            trainer=self.serving,
            sizes=sizes(),
            recorder=self.recorder,
            successors=successor,
        )

    async def open(self):
        await self.first.make()
        await self.first.start()
        asyncio.get_running_loop().create_task(self._write())

    async def _write(self):
        while "trainer" in self.cluster.alive:
            self.cluster.alive["trainer"].write()
            await asyncio.sleep(0.05)

    async def steps(self, count):
        for _ in range(count):
            version = len(self.cluster.alive["trainer"].taken)
            if self.serving.set is not self.first:
                version = await self.serving.policy_version()
            async with self.lock:
                await self.mesh.boundary(version)
                batch = protocols.TrainBatch(version, ())
                self.mesh.trains(batch)
                await self.serving.train_step(batch)


def test_a_mesh_of_more_processes_is_readied_beside_training_and_takes_over_with_every_step(tmp_path):
    async def main():
        run = Elsewhere(tmp_path)
        await run.open()
        moved = []

        async def note() -> None:
            assert not run.ended, "those before have ended already"
            await asyncio.sleep(0.4)
            moved.append(True)

        async def finish() -> None:
            await asyncio.sleep(0.2)

        run.mesh.moved, run.mesh.leaving = note, finish
        handle = run.mesh.resize(sizes(data=2), "more is trained", processes=2)
        await run.steps(30)
        taken = await handle.done
        assert (run.serving.set.name, run.ended, moved) == ("trainer-2", [run.first], [True])
        assert [actor.taken for name, actor in run.cluster.alive.items() if name != "trainer"] == [list(range(30))] * 2
        assert taken.nbytes == 1000
        assert taken.phases["restore"] >= 1.5
        (record,) = run.recorder.transitions
        assert list(record["phases"]) == ["start", "compile", "snapshot", "restore", "replay", "leave", "settle"]
        assert (record["phases"]["leave"], record["phases"]["settle"]) == pytest.approx((0.2, 0.4))
        assert 0.6 < record["stall"]["training"] < 1.6  # of steps of a second each
        assert taken.stall == record["stall"]["training"]
        assert run.mesh.sizes == sizes(data=2)

    doubles.run_on_clock(main())


class AtOnce(mesh_moves.Outside):
    """Other processes that take over as soon as they are asked for."""

    def __init__(self, serving, wanted, processes):
        self.longest = 60.0
        self.serving, self.made = serving, types.SimpleNamespace(processes=processes, sizes=wanted)

    async def begin(self):
        return protocols.ResizeEstimate(0, 0, 0)

    async def progress(self):
        return protocols.ResizeProgress(0, 0, ready=True)

    async def take_over(self, step):
        self.serving.hand_over(self.made)
        return mesh_moves.Taken({}, 0.0, 0)

    def end_former(self):
        pass


@pytest.mark.parametrize(("spare", "outside"), [(0, [2, 2, 8]), (1, [2, 2, 8]), (6, [2, 2])])
def test_processes_that_took_over_reach_the_devices_that_they_were_made_with_and_no_others(spare, outside):
    async def main():
        made, inside = [], []

        def successor(wanted, processes):
            made.append(wanted.devices)
            return AtOnce(serving, wanted, processes)

        async def begin_resize(wanted):
            inside.append(wanted.devices)
            raise protocols.LibraError("that is enough")

        serving = process_set.Serving(types.SimpleNamespace(processes=1), lambda before: None)
        config = doubles.make_config(elastic={"spare_devices": spare})
        mesh = resizing.Resizing(
            config, trainer=serving, sizes=sizes(data=8), recorder=memory.MemoryRecorder(), successors=successor
        )
        for devices, processes in ((2, 2), (2, 1), (8, 1)):
            if processes == 1:
                serving.set.begin_resize, serving.set.cancel_resize = begin_resize, mesh.close
            mesh.resize(sizes(data=devices), "", processes=processes)
            await mesh.boundary(0)
        assert made == outside
        assert inside == ([8] if len(outside) == 2 else [])

    doubles.run_on_clock(main())


@pytest.mark.parametrize(
    ("devices", "processes", "spare", "wanted", "expected"),
    [
        (1, 1, 0, [2, 4, 1, 3], [2, 4, 1, 3]),
        (4, 1, 0, [8, 2, 8, 6], [2, 1, 2, 2]),
        (4, 1, 4, [8, 16, 2, 12], [1, 2, 1, 2]),
        (8, 2, 0, [6, 4, 12, 7, 8], [2, 1, 3, 7, 2]),
    ],
)
def test_a_mesh_is_that_of_the_fewest_processes_with_no_more_devices_than_one_has_had(
    devices, processes, spare, wanted, expected
):
    async def main():
        serving = process_set.Serving(types.SimpleNamespace(processes=processes), lambda before: None)
        config, recorder = doubles.make_config(elastic={"spare_devices": spare}), memory.MemoryRecorder()
        mesh = resizing.Resizing(
            config,
            trainer=serving,
            sizes=sizes(data=devices),
            recorder=recorder,
            successors=lambda wanted, processes: AtOnce(serving, wanted, processes),
        )
        got = []
        for count in wanted:
            handle = mesh.resize(sizes(data=count), "")
            got.append(handle.processes)
            if handle.processes == serving.processes == 1:  # in its own process
                await mesh.close()
            else:
                await mesh.boundary(0)
                await handle.done
        assert got == expected

    doubles.run_on_clock(main())


@pytest.mark.parametrize(
    ("others", "trainer", "rollout"),
    [(False, {}, {}), (True, {"cores": (0,)}, {}), (True, {}, {"transport": "ipc"})],
)
def test_a_trainer_that_several_processes_cannot_be_stays_one(others, trainer, rollout):
    async def main():
        mesh = resizing.Resizing(
            doubles.make_config(trainer=trainer, rollout=rollout),
            trainer=process_set.Serving(types.SimpleNamespace(processes=1), lambda before: None),
            sizes=sizes(),
            recorder=memory.MemoryRecorder(),
            successors=(lambda wanted, processes: None) if others else None,
        )
        assert mesh.resize(sizes(data=4), "").processes == 1

    doubles.run_on_clock(main())


def test_processes_that_are_no_faster_take_over_all_the_same_once_they_get_no_nearer(tmp_path):
    async def main():
        run = Elsewhere(tmp_path, replay_seconds=1.0)
        await run.open()
        handle = run.mesh.resize(sizes(data=2), "", processes=2)
        await run.steps(30)
        assert (await handle.done).stall < 6.0  # the snapshot and its way take four of the steps

    doubles.run_on_clock(main())


def test_processes_that_die_on_the_way_leave_the_trainer_training(tmp_path):
    async def main():
        lost = protocols.WorkerLost("actor 'trainer-2.1' is lost: its process 7 died")
        run = Elsewhere(tmp_path, {("trainer-2.1", "restore", 1): lost})
        await run.open()
        handle = run.mesh.resize(sizes(data=2), "", processes=2)
        await run.steps(30)
        with pytest.raises(protocols.LibraError, match=r"stays where it is: .*its process 7 died"):
            await handle.done
        assert list(run.cluster.alive) == ["trainer"]
        assert run.cluster.alive["trainer"].taken == list(range(30))
        assert run.recorder.transitions[0]["outcome"] == "failed"
        assert run.mesh.sizes == sizes()

    doubles.run_on_clock(main())


@pytest.mark.parametrize("steps", [1, 6, 12])
def test_a_trainer_that_is_lost_meanwhile_ends_the_move_and_the_processes_that_were_to_take_over(tmp_path, steps):
    async def main():
        run = Elsewhere(tmp_path)
        await run.open()
        handle = run.mesh.resize(sizes(data=2), "", processes=2)
        await run.steps(steps)
        assert {"trainer-2.0", "trainer-2.1"} & set(run.cluster.alive)
        await run.mesh.trainer_lost(steps)
        with pytest.raises(protocols.LibraError, match="lost meanwhile"):
            await handle.done
        await run.steps(10)
        assert list(run.cluster.alive) == ["trainer"]
        assert not (tmp_path / handover.FOLDER).exists()

    doubles.run_on_clock(main())


def test_a_run_that_ends_meanwhile_ends_the_other_processes(tmp_path):
    async def main():
        run = Elsewhere(tmp_path)
        await run.open()
        run.mesh.resize(sizes(data=2), "", processes=2)
        await run.steps(4)
        assert len(run.cluster.alive) > 1
        await run.mesh.close()
        assert list(run.cluster.alive) == ["trainer"]

    doubles.run_on_clock(main())


def test_without_other_processes_a_mesh_of_several_is_refused():
    async def work(mesh, trainer, recorder):
        handle = mesh.resize(sizes(data=2), "", processes=2)
        await mesh.boundary(0)
        with pytest.raises(protocols.ConfigError, match=r"needs other processes than the trainer's.*backend=ray"):
            await handle.done

    run(work)


def test_a_checkpoint_that_cannot_be_finished_ends_the_run_and_is_no_failed_resize(tmp_path):
    async def main():
        run = Elsewhere(tmp_path)
        await run.open()
        run.mesh.resize(sizes(data=2), "", processes=2)

        async def fails() -> None:
            raise protocols.LibraError("the checkpoint cannot be written")

        run.mesh.leaving = fails
        with pytest.raises(protocols.LibraError, match="the checkpoint cannot be written"):
            await run.steps(30)
        assert run.serving.set is run.first

    doubles.run_on_clock(main())


def test_one_that_is_cancelled_while_its_snapshot_is_written_does_not_hold_training_up(tmp_path):
    async def main():
        run = Elsewhere(tmp_path)
        await run.open()
        handle = run.mesh.resize(sizes(data=2), "", processes=2)
        while not (tmp_path / handover.FOLDER / "trainer-2" / "half").exists():
            await run.steps(1)
        handle.cancel("it is not wanted any more")
        began = asyncio.get_running_loop().time()
        await run.steps(1)
        assert asyncio.get_running_loop().time() - began < 2.0  # a step takes one
        with pytest.raises(protocols.ConfigError, match="before the processes of the last attempt have ended"):
            run.mesh.resize(sizes(data=2), "", processes=2)
        await run.steps(5)
        assert list(run.cluster.alive) == ["trainer"]
        run.mesh.resize(sizes(data=2), "", processes=2)

    doubles.run_on_clock(main())
