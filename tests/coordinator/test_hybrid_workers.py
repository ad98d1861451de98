"""When hybrid workers set out, on doubles of their engines and replicas: a borrow that is called off leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import coordinator_doubles as doubles
import pytest

from libra_jax import protocols
from libra_jax.coordinator import instances
from libra_jax.hybrid import hybrid, switching
from libra_jax.hybrid.pool import WorkerState

Decided = tuple[switching.Kind, tuple[str, ...]]

STEP = 10.0
"""Seconds of a training step; a worker that has never joined sets out when nine of them have passed."""


class Engines:
    """Instances, of which some have failed or sleep."""

    def __init__(self, names: Sequence[str], workers: Sequence[str], events: protocols.Events) -> None:
        self.events = events
        self.engines = {
            name: instances.RolloutInstance(protocols.ActorSpec(name, "", {}), hybrid=name in workers, state="serving")
            for name in names
        }
        for name, engine in self.engines.items():
            engine.info = protocols.EngineInfo(name, 1, 4, 256, ())

    def serving(self) -> list[protocols.Instance]:
        return [protocols.Instance(name, 1, 4) for name, engine in self.engines.items() if engine.state == "serving"]

    async def sleep(self, name: str) -> None:
        self.engines[name].state = "asleep"

    async def wake(self, name: str) -> None:
        self.engines[name].state = "serving"

    def await_first_token(self, name: str) -> None:
        self.engines[name].answered = None

    def fail(self, *names: str) -> None:
        for name in names:
            self.engines[name].state = "lost"
            self.events.announce(protocols.EngineLost(name))

    def recover(self, *names: str) -> None:
        for name in names:
            self.engines[name].state = "serving"


class Obliging:
    """Replicas that do at once all that they are asked, once they are there."""

    making = 0.0

    async def ensure(self, worker: str) -> None:
        await asyncio.sleep(self.making)

    def holds(self, worker: str, version: int) -> bool:
        return True

    def follows(self, worker: str) -> bool:
        return True

    def follow(self, worker: str) -> None:
        pass

    async def fetch(self, worker: str) -> int:
        return 0

    async def contribute(self, *arguments: Any) -> Mapping[str, float]:
        return {}

    async def warm(self, worker: str) -> None:
        pass

    async def join(self, worker: str, generation: int, address: Mapping[str, Any]) -> None:
        pass

    async def leave(self, worker: str) -> None:
        pass

    async def end(self, worker: str) -> None:
        pass


class Told:
    """Instead of `switching.Switching`: decides what the test says, a look at a time, and then nothing any more."""

    def __init__(self, decisions: Iterable[Decided]) -> None:
        self._decisions = iter(decisions)
        self.sights: list[switching.Sight] = []

    def look(self, sight: switching.Sight) -> switching.SwitchDecision:
        self.sights.append(sight)
        kind, workers = next(self._decisions, ("stay", ()))
        return switching.SwitchDecision(sight.step, kind, workers, "as told", 1.0, 1.0)


class Bench:
    """Hybrid workers of a run with three instances, of which the last two are theirs."""

    def __init__(self, *decisions: Decided) -> None:
        names = ("rollout-0", "rollout-1", "rollout-2")
        config = doubles.make_config(
            steps=100,
            rollout={"tensor_parallel": (1, 1, 1)},
            coordinator={"max_staleness": 1},
            elastic={"hybrid": 2},
        )
        run = doubles.run_context(config)
        self.engines, self.recorder = Engines(names, names[1:], run.events), run.recorder
        self.trainer = doubles.make_trainer()
        with pytest.MonkeyPatch.context() as patch:
            self.told, self.sides = Told(decisions), Obliging()
            patch.setattr(switching, "Switching", lambda *_, **__: self.told)
            self.workers = hybrid.HybridWorkers(
                run, engines=self.engines, sides=self.sides, trainer=self.trainer, core_devices=1
            )
        self.step = 0

    async def take_step(
        self, events: Mapping[float, Any] | None = None, seconds: float = STEP
    ) -> list[tuple[str, float]]:
        """One training step, in which things happen so many seconds after its begin; who set out in it, and when."""
        loop = asyncio.get_running_loop()
        begin, left = loop.time(), dict.fromkeys(("rollout-1", "rollout-2"))
        before = {worker.name for worker in self.workers.pool.workers if worker.state is not WorkerState.ROLLOUT}
        batch = protocols.TrainBatch(self.step, ())
        shares = self.workers.begin(batch)
        for after, event in (events or {}).items():
            loop.call_later(after, event)
        while loop.time() < begin + seconds:
            await asyncio.sleep(0.25)
            for name in left:
                if left[name] is None and self.workers.pool.worker(name).state is not WorkerState.ROLLOUT:
                    left[name] = loop.time() - begin
        await self.workers.finish(shares, {}, seconds)
        self.step += 1
        self.workers.after(self.step, hybrid.StepSeconds(seconds, seconds, 0.0, seconds, 0.0))
        return [(name, when) for name, when in left.items() if when is not None and name not in before]


def run(body: Any, *decisions: Decided) -> None:
    async def main() -> None:
        bench = Bench(*decisions)
        await body(bench)
        bench.workers.close()

    doubles.run_on_clock(main())


STAY: Decided = ("stay", ())
BORROW: Decided = ("to_training", ("rollout-1",))
IN_TIME = pytest.approx(0.9 * STEP, abs=0.3)
AT_ONCE = pytest.approx(0.0, abs=0.3)


def test_who_is_borrowed_rolls_out_until_it_has_to_set_out_for_the_next_step():
    async def body(bench: Bench) -> None:
        assert await bench.take_step() == []
        assert await bench.take_step() == []
        assert await bench.take_step() == [("rollout-1", IN_TIME)]
        assert set(bench.workers.pool.training()) == {"rollout-1"}

    run(body, STAY, BORROW)


def test_a_borrow_is_called_off_where_nobody_can_be_spared_and_leaves_the_next_one_its_own_time():
    async def body(bench: Bench) -> None:
        await bench.take_step()
        await bench.take_step()
        events = {
            1.0: lambda: bench.engines.fail("rollout-0", "rollout-2"),
            2.0: lambda: bench.engines.recover("rollout-0", "rollout-2"),
        }
        assert await bench.take_step(events, seconds=5.0) == []
        # Nothing is known of the step to come, so it sets out as that begins, and not when it would have before.
        assert await bench.take_step() == [("rollout-1", AT_ONCE)]

    run(body, STAY, BORROW, BORROW)


def test_one_that_comes_back_for_the_floor_is_not_followed_by_another_that_leaves():
    async def body(bench: Bench) -> None:
        for _ in range(4):
            await bench.take_step()
        assert set(bench.workers.pool.training()) == {"rollout-1"}
        events = {
            1.0: lambda: bench.engines.fail("rollout-0", "rollout-2"),
            2.0: lambda: bench.engines.recover("rollout-0", "rollout-2"),
        }
        assert await bench.take_step(events) == []
        assert {worker.state for worker in bench.workers.pool.workers} == {WorkerState.ROLLOUT}

    run(body, STAY, BORROW, STAY, ("to_training", ("rollout-2",)))


def test_a_borrow_that_was_decided_for_other_processes_is_called_off():
    async def body(bench: Bench) -> None:
        await bench.take_step()
        await bench.take_step()
        bench.workers.trainer_moved()
        assert await bench.take_step() == []
        assert await bench.take_step() == []

    run(body, STAY, BORROW)


@pytest.mark.parametrize("method", ["listen", "connect"])
def test_a_trainer_that_is_lost_when_a_worker_joins_is_no_failure_of_the_workers(method):
    async def body(bench: Bench) -> None:
        async def lost(*arguments: Any) -> None:
            raise protocols.TrainerLost("the trainer is gone")

        async def end(worker: str) -> None:
            raise AssertionError("its replica is warm, and was ended")

        bench.sides.end = end
        setattr(bench.trainer, method, lost)
        await bench.take_step()
        await bench.take_step()
        assert await bench.take_step() == [("rollout-1", IN_TIME)]
        (worker,) = (worker for worker in bench.workers.pool.workers if worker.name == "rollout-1")
        assert (worker.state, worker.restarts) == (WorkerState.ROLLOUT, 0)
        assert bench.engines.engines["rollout-1"].state == "serving"
        delattr(bench.trainer, method)
        await bench.take_step()
        assert set(bench.workers.pool.training()) == {"rollout-1"}

    run(body, STAY, BORROW, BORROW)


def test_a_step_that_a_loss_or_a_moving_trainer_touched_says_nothing_of_those_to_come():
    async def body(bench: Bench) -> None:
        for touch in (lambda: bench.engines.fail("rollout-0"), bench.workers.disturb):
            for _ in range(3):
                await bench.take_step()
            assert not bench.told.sights[-1].disturbed
            await bench.take_step({1.0: touch, 2.0: lambda: bench.engines.recover("rollout-0")})
            assert bench.told.sights[-1].disturbed

    run(body)


def test_a_replica_that_had_to_be_made_while_its_engine_served_does_not_make_changes_dear():
    async def body(bench: Bench) -> None:
        bench.sides.making = 3 * STEP
        for _ in range(7):
            await bench.take_step()
        assert set(bench.workers.pool.training()) == {"rollout-1"}
        assert bench.told.sights[-1].move_seconds < 1.0
        assert bench.recorder.transitions[-1]["stall"]["rollout"] < 1.0

    run(body, STAY, BORROW)
