"""A trainer's processes as one trainer: who is asked, whose answer counts, and which error is told."""

from __future__ import annotations

import asyncio
from typing import Any

import coordinator_doubles
import movable_trainers as doubles
import pytest

from libra_jax import protocols
from libra_jax.coordinator import process_set

LOST = protocols.WorkerLost("actor 'trainer.2' is lost: its process 7 died; make it anew to go on")
PEER = protocols.PeerLost("a process of the trainer is lost: process 0 can no longer reach it; make the trainer anew")
OWN = protocols.DataError("the disk of process 0 is full; make room")


def run(body: Any, processes: int, faults: Any = None) -> tuple[Any, doubles.Cluster]:
    """Runs `body` of a set that has been made; returns its result, or the error, and the cluster."""
    cluster = doubles.Cluster(doubles.Faulty(faults))

    async def main() -> Any:
        made = process_set.ProcessSet(cluster, doubles.maker(), processes=processes)
        await made.make()
        return await body(made)

    return coordinator_doubles.run_on_clock(main()), cluster


def test_one_process_is_the_actor_itself_with_its_own_name():
    async def body(trainer: Any) -> Any:
        with pytest.raises(protocols.LibraError, match="the batch is for 3 and the trainer holds 0"):
            await trainer.train_step(protocols.TrainBatch(3, ()))
        info = await trainer.start()
        assert trainer.train_step == cluster_of(trainer)["trainer"].train_step
        return info

    def cluster_of(trainer: Any) -> Any:
        return trainer._cluster.alive

    info, cluster = run(body, 1)
    assert info.platform == "cpu of 0"
    assert list(cluster.alive) == ["trainer"]
    assert not {"reserve", "join"} & {method for _, method in cluster.faulty.calls}


def test_what_befell_a_set_that_has_handed_over_is_not_held_against_its_successor():
    async def body(first: Any) -> None:
        serving = process_set.Serving(first, lambda before: None)
        under_way = asyncio.ensure_future(serving.wait_saved())
        await asyncio.sleep(0)
        with pytest.raises(protocols.TrainerLost, match="its process 7 died"):
            await serving.policy_version()
        successor = process_set.ProcessSet(first._cluster, doubles.maker(), name="trainer-1")
        await successor.make()
        serving.hand_over(successor)
        with pytest.raises(protocols.TrainerLost, match="its process 7 died"):
            await under_way
        assert await serving.policy_version() == 0
        assert serving.lost is None

    class Both(doubles.Trainer):
        async def _asked(self, method: str, seconds: float = 0.01) -> None:
            await asyncio.sleep(1.0 if method == "wait_saved" else seconds)
            if self._name == "trainer":
                raise LOST

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "Trainer", Both)
        run(body, 1)


def test_processes_meet_where_the_first_one_says_before_they_start():
    async def body(trainer: Any) -> Any:
        return await trainer.start()

    info, cluster = run(body, 3)
    assert info.platform == "cpu of 0"
    assert {name: actor.joined for name, actor in cluster.alive.items()} == {
        f"trainer.{process}": "host:trainer.0" for process in range(3)
    }
    order = [method for name, method in cluster.faulty.calls if name == "trainer.1"]
    assert order == ["spawn", "join", "start"]


def test_all_processes_get_every_call_with_its_arguments_but_for_what_the_first_alone_holds():
    async def body(trainer: Any) -> Any:
        assert await trainer.saved_by("x", again=True) == (0, "x", True)
        assert await trainer.stage_weights(0, 0) == "staged by 0"
        with pytest.raises(AttributeError, match="dance"):
            trainer.dance  # noqa: B018
        await trainer.stop()
        await trainer.stop()

    _, cluster = run(body, 2)
    asked = [(name, method) for name, method in cluster.faulty.calls if method not in ("spawn",)]
    assert sorted(asked) == [
        ("trainer.0", "saved_by"),
        ("trainer.0", "stage_weights"),
        ("trainer.0", "stop"),
        ("trainer.1", "saved_by"),
        ("trainer.1", "stop"),
    ]
    assert not cluster.alive


@pytest.mark.parametrize(
    ("faults", "told", "at_once"),
    [
        ({("trainer.2", "saved_by", 1): LOST, ("trainer.0", "saved_by", 1): "hang"}, LOST, True),
        ({("trainer.2", "saved_by", 1): LOST, ("trainer.0", "saved_by", 1): PEER}, LOST, True),
        ({("trainer.0", "saved_by", 1): PEER, ("trainer.2", "saved_by", 1): "hang"}, PEER, False),
        ({("trainer.0", "saved_by", 1): OWN, ("trainer.1", "saved_by", 1): PEER}, PEER, True),
        ({(f"trainer.{process}", "saved_by", 1): OWN for process in range(3)}, OWN, True),
        ({("trainer.1", "saved_by", 1): OWN, ("trainer.0", "saved_by", 1): "hang"}, OWN, False),
    ],
    ids=["lost", "lost and missed by a peer", "missed by a peer", "own and missed", "all alike", "own"],
)
def test_a_call_that_fails_on_one_process_fails_with_the_error_that_explains_it(faults, told, at_once):
    async def body(trainer: Any) -> float:
        began = asyncio.get_running_loop().time()
        with pytest.raises(protocols.LibraError) as raised:
            await trainer.saved_by("x")
        assert raised.value is told
        return asyncio.get_running_loop().time() - began

    seconds, _ = run(body, 3, faults)
    assert seconds <= (0.1 if at_once else process_set.VERDICT_SECONDS)


def test_a_process_that_cannot_be_made_leaves_none_of_the_others_once_the_set_is_stopped():
    cluster = doubles.Cluster(doubles.Faulty({("trainer.1", "spawn", 1): LOST}))

    async def main() -> None:
        made = process_set.ProcessSet(cluster, doubles.maker(), processes=3)
        with pytest.raises(protocols.WorkerLost):
            await made.make()
        await made.stop()

    coordinator_doubles.run_on_clock(main())
    assert not cluster.alive


def test_every_process_is_stopped_even_if_one_does_not_end_well():
    async def body(trainer: Any) -> None:
        with pytest.raises(protocols.DataError, match="the disk of process 0 is full"):
            await trainer.stop()

    _, cluster = run(body, 3, {("trainer.0", "stop", 1): OWN})
    assert not cluster.alive
