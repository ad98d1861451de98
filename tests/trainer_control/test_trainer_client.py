"""A trainer's processes as one trainer: which processes are called, whose answer counts, which error is reported."""

from __future__ import annotations

import asyncio
from typing import Any

import coordinator_doubles
import movable_trainers as doubles
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.trainer_control import client

LOST = protocols.WorkerLost("actor 'trainer.2' is lost: its process 7 died; restart it to go on")
PEER = protocols.PeerLost("a process of the trainer is lost: process 0 can no longer reach it; make the trainer anew")
OWN = protocols.DataError("the disk of process 0 is full; make room")


def made_of(cluster: doubles.Cluster, processes: int, **limits: float) -> client.TrainerActorClient:
    return client.TrainerActorClient(
        client.TrainerProcesses(cluster, doubles.maker(), count=processes), config_lib.DeadlineConfig(**limits)
    )


def run(body: Any, processes: int, faults: Any = None, **limits: float) -> tuple[Any, doubles.Cluster]:
    """Runs `body` with a client whose processes have been made; returns its result, and the cluster."""
    cluster = doubles.Cluster(doubles.Faulty(faults))

    async def main() -> Any:
        made = made_of(cluster, processes, **limits)
        await made.make()
        return await body(made)

    return coordinator_doubles.run_on_clock(main()), cluster


def test_a_process_that_is_alone_has_the_trainers_name_and_meets_nobody():
    async def body(trainer: client.TrainerActorClient) -> Any:
        with pytest.raises(protocols.LibraError, match="the batch is for 3 and the trainer holds 0"):
            await trainer.train_step(protocols.TrainBatch(3, ()))
        return await trainer.start()

    info, cluster = run(body, 1)
    assert info.platform == "cpu of 0"
    assert list(cluster.alive) == ["trainer"]
    assert not {"reserve", "join"} & {method for _, method in cluster.faulty.calls}


def test_processes_meet_where_the_first_one_says_before_they_start():
    async def body(trainer: client.TrainerActorClient) -> Any:
        return await trainer.start()

    info, cluster = run(body, 3)
    assert info.platform == "cpu of 0"
    assert {name: actor.joined for name, actor in cluster.alive.items()} == {
        f"trainer.{process}": "host:trainer.0" for process in range(3)
    }
    order = [method for name, method in cluster.faulty.calls if name == "trainer.1"]
    assert order == ["spawn", "join", "start"]


def test_all_processes_get_every_call_but_for_what_the_first_alone_holds():
    async def body(trainer: client.TrainerActorClient) -> None:
        await trainer.export("folder")
        assert (await trainer.stage_weights(0, 0)).transport == {"staged by": 0}
        assert {actor.exported for actor in cluster_of(trainer).alive.values()} == {"folder"}
        await trainer.stop()
        await trainer.stop()

    def cluster_of(trainer: client.TrainerActorClient) -> Any:
        return trainer._processes._cluster

    _, cluster = run(body, 2)
    asked = [(name, method) for name, method in cluster.faulty.calls if method != "spawn"]
    assert sorted(asked) == [
        ("trainer.0", "export"),
        ("trainer.0", "stage_weights"),
        ("trainer.0", "stop"),
        ("trainer.1", "export"),
        ("trainer.1", "stop"),
    ]
    assert not cluster.alive


@pytest.mark.parametrize(
    ("faults", "told", "at_once"),
    [
        ({("trainer.2", "export", 1): LOST, ("trainer.0", "export", 1): "hang"}, LOST, True),
        ({("trainer.2", "export", 1): LOST, ("trainer.0", "export", 1): PEER}, LOST, True),
        ({("trainer.0", "export", 1): PEER, ("trainer.2", "export", 1): "hang"}, PEER, False),
        ({("trainer.0", "export", 1): OWN, ("trainer.1", "export", 1): PEER}, PEER, True),
        ({(f"trainer.{process}", "export", 1): OWN for process in range(3)}, OWN, True),
        ({("trainer.1", "export", 1): OWN, ("trainer.0", "export", 1): "hang"}, OWN, False),
    ],
    ids=["lost", "lost and missed by a peer", "missed by a peer", "own and missed", "all alike", "own"],
)
def test_a_call_that_fails_on_one_process_fails_with_the_error_that_explains_it(faults, told, at_once):
    async def body(trainer: client.TrainerActorClient) -> float:
        began = asyncio.get_running_loop().time()
        with pytest.raises(protocols.LibraError) as raised:
            await trainer.export("folder")
        assert str(raised.value) == str(told)
        assert isinstance(raised.value, protocols.TrainerLost) == isinstance(told, protocols.WorkerLost)
        assert (trainer.lost is told) == isinstance(told, protocols.WorkerLost)
        return asyncio.get_running_loop().time() - began

    seconds, _ = run(body, 3, faults)
    assert seconds <= (0.1 if at_once else client.VERDICT_SECONDS)


def test_a_call_that_hangs_misses_its_deadline_with_a_sentence_and_the_trainer_is_not_lost():
    async def body(trainer: client.TrainerActorClient) -> None:
        with pytest.raises(
            protocols.DeadlineMissed,
            match=r"^The trainer, asked to export its parameters, did not finish within 30 s: .*deadlines\.checkpoint",
        ):
            await trainer.export("folder")
        assert trainer.lost is None

    run(body, 2, {("trainer.1", "export", 1): "hang"}, checkpoint=30.0)


def test_a_lost_trainer_is_not_called_until_it_has_been_made_again():
    async def body(trainer: client.TrainerActorClient) -> list[str]:
        for _ in range(2):
            with pytest.raises(protocols.TrainerLost, match="its process 7 died"):
                await trainer.export("folder")
        await trainer.stop(force=True)
        await trainer.make()
        with trainer.catching_up():
            await trainer.start()
            for call in (trainer.listen("worker", 1), trainer.dismiss("worker"), trainer.abort_step()):
                with pytest.raises(protocols.TrainerLost, match="trainer was lost, and is being restarted"):
                    await call
        await trainer.listen("worker", 1)
        with pytest.raises(protocols.LibraError, match="no further"), trainer.catching_up():
            raise protocols.LibraError("no further")
        with pytest.raises(protocols.TrainerLost, match="no further"):
            await trainer.export("folder")
        return []

    _, cluster = run(body, 1, {("trainer", "export", 1): LOST})
    assert [method for _, method in cluster.faulty.calls].count("export") == 1


def test_an_error_of_the_former_processes_does_not_make_their_successor_lost():
    async def body(trainer: client.TrainerActorClient) -> None:
        waiting = asyncio.ensure_future(trainer.wait_saved())
        await asyncio.sleep(0)
        with pytest.raises(protocols.TrainerLost, match="its process 7 died"):
            await trainer.policy_version()
        former = trainer._processes
        made = client.TrainerProcesses(former._cluster, doubles.maker(), name="trainer-1")
        successor = client.TrainerActorClient(made, config_lib.DeadlineConfig())
        await successor.make()
        assert trainer.adopt(successor) is former
        with pytest.raises(protocols.TrainerLost, match="its process 7 died"):
            await waiting
        assert await trainer.policy_version() == 0
        assert (trainer.lost, trainer.name) == (None, "trainer-1")

    class Both(doubles.Trainer):
        async def _asked(self, method: str, seconds: float = 0.01) -> None:
            await asyncio.sleep(1.0 if method == "wait_saved" else seconds)
            if self._name == "trainer":
                raise LOST

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "Trainer", Both)
        run(body, 1)


def test_a_process_that_cannot_be_made_leaves_no_other_once_the_trainer_is_stopped():
    cluster = doubles.Cluster(doubles.Faulty({("trainer.1", "spawn", 1): LOST}))

    async def main() -> None:
        made = made_of(cluster, 3)
        with pytest.raises(protocols.WorkerLost):
            await made.make()
        await made.stop()

    coordinator_doubles.run_on_clock(main())
    assert not cluster.alive


def test_every_process_is_stopped_even_if_one_does_not_end_well():
    async def body(trainer: client.TrainerActorClient) -> None:
        with pytest.raises(protocols.DataError, match="the disk of process 0 is full"):
            await trainer.stop()

    _, cluster = run(body, 3, {("trainer.0", "stop", 1): OWN})
    assert not cluster.alive
