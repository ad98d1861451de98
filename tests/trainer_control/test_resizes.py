"""Meshes that change while a run goes on: one call, a handle, and a trainer that stays where it is if that fails."""

from __future__ import annotations

import asyncio

import coordinator_doubles as doubles
import movable_trainers
import pytest

from libra_jax import protocols
from libra_jax.telemetry import memory
from libra_jax.trainer_control import client, handover, resize


def sizes(data=1, fsdp=1, tensor=1):
    return protocols.MeshSizes(data, fsdp, tensor)


class NoCheckpoint:
    """No checkpoint is being written."""

    async def commit_held(self):
        pass


def resizing_of(trainer, recorder, config=None, data=1, successors=None, checkpoint=None, run=None):
    return resize.Resizing(
        run or doubles.run_context(config or doubles.make_config(), recorder=recorder),
        trainer=trainer,
        sizes=sizes(data),
        checkpoint=checkpoint or NoCheckpoint(),
        successors=successors,
    )


def run(work, successors=None, **deadlines):
    """Runs `work(resizing, trainer, recorder)` on virtual time."""

    async def main():
        trainer, recorder = doubles.make_trainer(), memory.MemoryRecorder()
        config = doubles.make_config(deadlines=deadlines)
        mesh = resizing_of(await doubles.alone(trainer, config.deadlines), recorder, config, successors=successors)
        await work(mesh, trainer, recorder)

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

    longest, outside = 60.0, False

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
        return handover.HandoverCost({}, 0.0, 0)

    async def end_former(self):
        pass

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
    """A run whose trainer's state can move to other processes; `happened` is what it tells before they end."""

    def __init__(self, folder, faults=None, replay_seconds=0.5, checkpoint=None):
        self.cluster = movable_trainers.Cluster(movable_trainers.Faulty(faults))
        limits = {"trainer_start": 60.0, "checkpoint": 60.0, "train_step": 60.0, "shutdown": 60.0}
        run = doubles.run_context(doubles.make_config(deadlines=limits), self.cluster, workdir=folder)
        self.recorder, self.events = run.recorder, run.events
        processes = client.TrainerProcesses(self.cluster, movable_trainers.maker())
        self.serving = client.TrainerActorClient(processes, run.config.deadlines)
        successors = handover.successors(
            run, lambda wanted: movable_trainers.maker(step_seconds=replay_seconds), serving=self.serving
        )
        self.mesh = resizing_of(self.serving, self.recorder, successors=successors, checkpoint=checkpoint, run=run)

    async def open(self):
        await self.serving.make()
        await self.serving.start()
        asyncio.get_running_loop().create_task(self._write())

    async def _write(self):
        while "trainer" in self.cluster.alive:
            self.cluster.alive["trainer"].write()
            await asyncio.sleep(0.05)

    async def steps(self, count):
        for _ in range(count):
            async with self.serving.lock:
                version = await self.serving.policy_version()
                await self.mesh.boundary(version)
                batch = protocols.TrainBatch(version, ())
                self.mesh.trains(batch)
                await self.serving.train_step(batch)


def test_a_mesh_of_more_processes_is_readied_beside_training_and_takes_over_with_every_step(tmp_path):
    async def main():
        class Slow:
            async def commit_held(self):
                await asyncio.sleep(0.2)

        run = Elsewhere(tmp_path, checkpoint=Slow())
        await run.open()
        happened = []

        async def note(event) -> None:
            assert "trainer" in run.cluster.alive, "the former processes have ended already"
            await asyncio.sleep(0.4)
            happened.append(event)

        run.events.subscribe(protocols.TrainerReplaced, note)
        run.events.subscribe(protocols.TrainerResized, happened.append)
        handle = run.mesh.resize(sizes(data=2), "more is trained", processes=2)
        await run.steps(30)
        taken = await handle.done
        assert happened == [protocols.TrainerResized(sizes(data=2)), protocols.TrainerReplaced(lost=False)]
        assert list(run.cluster.alive) == ["trainer-1.0", "trainer-1.1"]
        assert [actor.taken for actor in run.cluster.alive.values()] == [list(range(30))] * 2
        assert taken.nbytes == 1000
        assert taken.phases["restore"] >= 1.5
        (record,) = run.recorder.transitions
        assert list(record["phases"]) == ["start", "compile", "snapshot", "restore", "replay", "leave", "settle"]
        assert (record["phases"]["leave"], record["phases"]["settle"]) == pytest.approx((0.2, 0.4))
        assert 0.6 < record["stall"]["training"] < 1.6  # of steps of a second each
        assert taken.stall == record["stall"]["training"]
        assert run.mesh.sizes == sizes(data=2)

    doubles.run_on_clock(main())


class Sized:
    """A trainer that is asked for nothing but the number of its processes, and to resize in its own."""

    def __init__(self, processes):
        self.processes = processes
        self.inside = []

    async def begin_resize(self, wanted):
        self.inside.append(wanted.devices)
        raise protocols.LibraError("that is enough")

    async def cancel_resize(self):
        pass


class AtOnce:
    """Other processes that take over as soon as they are asked for."""

    longest, outside = 60.0, True

    def __init__(self, trainer, processes):
        self._trainer, self._processes = trainer, processes

    async def begin(self):
        return protocols.ResizeEstimate(0, 0, 0)

    async def progress(self):
        return protocols.ResizeProgress(0, 0, ready=True)

    def trains(self, batch):
        pass

    async def take_over(self, step):
        self._trainer.processes = self._processes
        return handover.HandoverCost({}, 0.0, 0)

    async def end_former(self):
        pass

    async def cancel(self):
        pass


@pytest.mark.parametrize(("spare", "outside"), [(0, [2, 2, 8]), (1, [2, 2, 8]), (6, [2, 2])])
def test_processes_that_took_over_reach_the_devices_that_they_were_made_with_and_no_others(spare, outside):
    async def main():
        made, trainer = [], Sized(1)

        def successor(wanted, processes):
            made.append(wanted.devices)
            return AtOnce(trainer, processes)

        config = doubles.make_config(elastic={"spare_devices": spare})
        mesh = resizing_of(trainer, memory.MemoryRecorder(), config, data=8, successors=successor)
        for devices, processes in ((2, 2), (2, 1), (8, 1)):
            mesh.resize(sizes(data=devices), "", processes=processes)
            await mesh.boundary(0)
        assert made == outside
        assert trainer.inside == ([8] if len(outside) == 2 else [])

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
        trainer, config = Sized(processes), doubles.make_config(elastic={"spare_devices": spare})
        mesh = resizing_of(
            trainer,
            memory.MemoryRecorder(),
            config,
            data=devices,
            successors=lambda wanted, processes: AtOnce(trainer, processes),
        )
        got = []
        for count in wanted:
            handle = mesh.resize(sizes(data=count), "")
            got.append(handle.processes)
            if handle.processes == trainer.processes == 1:  # in its own process
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
        mesh = resizing_of(
            Sized(1),
            memory.MemoryRecorder(),
            doubles.make_config(trainer=trainer, rollout=rollout),
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
        lost = protocols.WorkerLost("actor 'trainer-1.1' is lost: its process 7 died")
        run = Elsewhere(tmp_path, {("trainer-1.1", "restore", 1): lost})
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
        assert {"trainer-1.0", "trainer-1.1"} & set(run.cluster.alive)
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
        class Failing:
            async def commit_held(self):
                raise protocols.LibraError("the checkpoint cannot be written")

        run = Elsewhere(tmp_path, checkpoint=Failing())
        await run.open()
        run.mesh.resize(sizes(data=2), "", processes=2)
        with pytest.raises(protocols.LibraError, match="the checkpoint cannot be written"):
            await run.steps(30)
        assert run.serving.name == "trainer"

    doubles.run_on_clock(main())


def test_one_that_is_cancelled_while_its_snapshot_is_written_does_not_hold_training_up(tmp_path):
    async def main():
        run = Elsewhere(tmp_path)
        await run.open()
        handle = run.mesh.resize(sizes(data=2), "", processes=2)
        while not (tmp_path / handover.FOLDER / "trainer-1" / "half").exists():
            await run.steps(1)
        handle.cancel("it is not wanted any more")
        began = asyncio.get_running_loop().time()
        await run.steps(1)
        assert asyncio.get_running_loop().time() - began < 2.0  # a step takes one
        with pytest.raises(protocols.ConfigError, match="before the processes of the last one have ended"):
            run.mesh.resize(sizes(data=2), "", processes=2)
        await run.steps(5)
        assert list(run.cluster.alive) == ["trainer"]
        run.mesh.resize(sizes(data=2), "", processes=2)

    doubles.run_on_clock(main())
