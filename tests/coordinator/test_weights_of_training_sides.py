"""The parameters of training sides: an aborted weight update leaves no actor with two updates at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import coordinator_doubles as doubles
import pytest

from libra_jax import protocols
from libra_jax.hybrid import training_sides
from libra_jax.telemetry import memory

WORKER, OTHER = "rollout-1", "rollout-2"
LIMITS = {"weight_sync": 30.0, "transition": 20.0, "train_step": 50.0, "trainer_start": 60.0}


class Actor:
    """Takes one call at a time, as an actor's thread does: whoever gives a call up does not end it.

    Attributes:
      version: whose parameters it holds.
      calls: that began, in order.
      crowded: weight updates that began, or were asked to, while another verb was going on.
    """

    def __init__(self, verb_seconds: float) -> None:
        self.verb_seconds = verb_seconds
        self.version = protocols.NO_VERSION
        self.calls: list[str] = []
        self.crowded: list[str] = []
        self._thread = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    async def _call(self, name: str, seconds: float = 0.0) -> None:
        async def work() -> None:
            async with self._thread:
                self.calls.append(name)
                await asyncio.sleep(seconds)

        if name.startswith("start_weight_update") and self._thread.locked():
            self.crowded.append(name)
        call = asyncio.get_running_loop().create_task(work())
        self._running.add(call)
        call.add_done_callback(self._running.discard)
        await asyncio.shield(call)

    async def start(self) -> None:
        await self._call("start")

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        await self._call("init_weight_transfer")

    async def start_weight_update(self, policy_version: int) -> None:
        await self._call(f"start_weight_update {policy_version}", self.verb_seconds)

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        await self._call(f"update_weights {chunk.policy_version}.{chunk.index}", self.verb_seconds)

    async def finish_weight_update(self, policy_version: int) -> None:
        await self._call(f"finish_weight_update {policy_version}", self.verb_seconds)
        self.version = policy_version

    async def contribute(self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share]) -> Mapping[str, float]:
        await self._call("contribute", 1.0)
        return {"seconds": 1.0}

    async def leave(self) -> None:
        await self._call("leave")
        self.version = protocols.NO_VERSION

    async def shutdown(self) -> None:
        """Its process is killed, with whatever it does."""
        for call in self._running:
            call.cancel()


class Bench:
    """The replicas of two workers; the first is made and ready."""

    def __init__(self, verb_seconds: float) -> None:
        self.cluster, self.recorder = doubles.DirectCluster(), memory.MemoryRecorder()
        config = doubles.make_config(
            deadlines=LIMITS,
            rollout={"tensor_parallel": (1, 1, 1)},
            elastic={"hybrid": 2, "late_factor": 2.0, "late_min_seconds": 1.0},
        )
        specs = {
            worker: protocols.ActorSpec(f"hybrid-{number}", f"{__name__}:Actor", {"verb_seconds": verb_seconds})
            for number, worker in enumerate((WORKER, OTHER), start=1)
        }
        self.sides = training_sides.TrainingSides(doubles.run_context(config, self.cluster, self.recorder), specs)

    @property
    def actor(self) -> Actor:
        return self.cluster.actors["hybrid-1"]

    def publish(self, version: int, chunks: int = 2) -> None:
        staged = [protocols.WeightChunk(version, index, chunks, (), 10, {}) for index in range(chunks)]
        self.sides.offer(version, staged)

    async def contribute(self, version: int) -> Mapping[str, float]:
        return await self.sides.contribute(WORKER, protocols.TrainBatch(version, ()), ())


def on_clock(body: Any, verb_seconds: float = 1.0) -> Bench:
    async def main() -> Bench:
        bench = Bench(verb_seconds)
        await bench.sides.ensure(WORKER)
        await body(bench)
        assert not bench.actor.crowded
        return bench

    return doubles.run_on_clock(main())


def seconds() -> float:
    return asyncio.get_running_loop().time()


def test_a_replica_reads_the_version_that_is_out_and_every_later_one():
    async def body(bench: Bench) -> None:
        fetching = asyncio.ensure_future(bench.sides.fetch(WORKER))
        await asyncio.sleep(5)
        bench.publish(3)
        assert await fetching == 20
        bench.sides.follow(WORKER)
        await bench.sides.settle()
        bench.publish(4)
        assert await bench.contribute(4) == {"seconds": 1.0}
        assert bench.actor.version == 4

    on_clock(body)


def test_one_whose_load_was_given_up_is_given_no_other_before_it_has_answered():
    async def body(bench: Bench) -> None:
        bench.publish(1)
        fetching = asyncio.ensure_future(bench.sides.fetch(WORKER))
        await asyncio.sleep(1)
        await bench.sides.settle()  # waits for a second, and the first verb takes ten
        with pytest.raises(protocols.WorkerLost, match="hybrid-1 could not be given the parameters"):
            await fetching
        bench.publish(2)
        assert not bench.sides.holds(WORKER, 2)
        with pytest.raises(protocols.WorkerLost, match="hybrid-1 may still be in a weight update that was aborted"):
            bench.sides.follow(WORKER)
        with pytest.raises(protocols.WorkerLost, match="hybrid-1 may still be in a weight update that was aborted"):
            await bench.sides.fetch(WORKER)
        await bench.sides.ensure(WORKER)
        assert seconds() == pytest.approx(10)
        await bench.sides.fetch(WORKER)
        assert bench.actor.version == 2
        assert not any(call.startswith("update_weights 1") for call in bench.actor.calls)

    bench = on_clock(body, verb_seconds=10.0)
    assert bench.cluster.spawned == ["hybrid-1"]


def test_one_that_does_not_come_out_of_what_was_given_up_is_replaced():
    async def body(bench: Bench) -> None:
        bench.publish(1)
        fetching = asyncio.ensure_future(bench.sides.fetch(WORKER))
        before = bench.actor
        await asyncio.sleep(1)
        await bench.sides.settle()
        with pytest.raises(protocols.WorkerLost):
            await fetching
        await bench.sides.ensure(WORKER)
        assert bench.actor is not before
        assert seconds() == pytest.approx(2 + LIMITS["transition"])

    bench = on_clock(body, verb_seconds=29.0)
    assert bench.cluster.spawned == ["hybrid-1"] * 2


def test_one_that_leaves_while_it_reads_holds_nothing_afterwards():
    async def body(bench: Bench) -> None:
        bench.publish(1)
        fetching = asyncio.ensure_future(bench.sides.fetch(WORKER))
        await asyncio.sleep(1.5)
        fetching.cancel()  # its worker turns round
        await bench.sides.leave(WORKER)
        await asyncio.sleep(20)
        assert bench.actor.calls[-1] == "leave"
        assert bench.actor.version == protocols.NO_VERSION
        assert not bench.sides.holds(WORKER, 1)
        await bench.sides.fetch(WORKER)
        assert bench.sides.holds(WORKER, 1)

    on_clock(body)


def test_a_snapshot_that_is_about_to_be_written_over_is_given_to_nobody():
    async def body(bench: Bench) -> None:
        await bench.sides.ensure(OTHER)
        other = bench.cluster.actors["hybrid-2"]
        bench.publish(1)
        reading = asyncio.ensure_future(bench.sides.fetch(WORKER))
        await asyncio.sleep(0.5)
        settling = asyncio.ensure_future(bench.sides.settle())
        await asyncio.sleep(0.1)
        bench.sides.follow(OTHER)
        fetching = asyncio.ensure_future(bench.sides.fetch(OTHER))
        await settling
        await asyncio.gather(reading, return_exceptions=True)  # too slow, and given up
        assert other.calls == ["start", "init_weight_transfer"]
        bench.publish(2)
        await fetching
        assert other.version == 2
        assert other.calls.count("start_weight_update 2") == 1

    on_clock(body)


def test_a_load_that_takes_too_long_as_a_whole_is_given_up_by_name():
    message = r"hybrid-1's whole weight update did not finish within 90 s: .*config\.deadlines\.weight_sync"

    async def fetches(bench: Bench) -> None:
        bench.publish(1, chunks=8)
        with pytest.raises(protocols.DeadlineMissed, match=message):
            await bench.sides.fetch(WORKER)
        assert seconds() == pytest.approx(3 * LIMITS["weight_sync"])

    async def contributes(bench: Bench) -> None:
        bench.sides.follow(WORKER)
        bench.publish(1, chunks=8)
        with pytest.raises(protocols.DeadlineMissed, match=message):
            await bench.contribute(1)
        assert not bench.sides.follows(WORKER)

    for body in (fetches, contributes):
        on_clock(body, verb_seconds=20.0)  # each verb is in time


def test_a_version_that_never_comes_out_is_not_waited_for_for_ever():
    async def body(bench: Bench) -> None:
        message = r"hybrid-1's wait for a version to come out did not .* 50 s: .*config\.deadlines\.train_step"
        with pytest.raises(protocols.DeadlineMissed, match=message):
            await bench.sides.fetch(WORKER)
        assert bench.actor.calls == ["start", "init_weight_transfer"]

    on_clock(body)
