"""Engines that die, hang, lie or do not start: their requests go on elsewhere, and what ends the run is a sentence."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import coordinator_doubles as doubles
import pytest

from libra_jax import protocols
from libra_jax.coordinator import instances
from libra_jax.engines import fake_engine

ALL = sorted(f"task-{index}" for index in range(12))


class Faulty(fake_engine.FakeEngine):
    """A fake engine that fails in a chosen verb: `fault(engine, verb)` raises, hangs or returns."""

    fault: Callable[[Faulty, str], Any]

    async def pause(self) -> None:
        await self.fault("pause")
        await super().pause()

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        await self.fault("update_weights")
        await super().update_weights(chunk)

    async def start(self) -> protocols.EngineInfo:
        await self.fault("start")
        return await super().start()

    async def generate(self, request: protocols.GenerationRequest):
        await self.fault("generate")
        async for delta in super().generate(request):
            yield delta
            await self.fault("delta")


Fault = Callable[[Faulty, str], Any]


def faulty_specs(monkeypatch: pytest.MonkeyPatch, fault: Fault, count: int = 2, **arguments: Any):
    """Engines whose verbs consult `fault`."""

    class WithFault(Faulty):
        pass

    WithFault.fault = fault

    def make(**inner: Any) -> fake_engine.FakeEngine:
        return fake_engine.create(**inner, kind=WithFault)

    monkeypatch.setattr(doubles, "make_faulty", make, raising=False)
    specs = doubles.engine_specs(doubles.make_config(), count, **arguments)
    return [protocols.ActorSpec(spec.name, "coordinator_doubles:make_faulty", spec.arguments) for spec in specs]


def run_all(tmp_path, specs: Sequence[protocols.ActorSpec], **changes: Any) -> tuple[doubles.Bench, Any]:
    """Runs to the end and checks that nothing was lost, trained twice or replaced."""
    bench = doubles.Bench(doubles.make_config(**changes), tmp_path, specs=specs)
    summary = bench.run()
    assert sorted(bench.trained["prompts"]) == ALL
    assert summary.replaced == {}
    return bench, summary


@pytest.mark.parametrize("staleness", [0, 2])
def test_requests_of_a_dead_engine_resume_from_their_tokens_on_the_other(tmp_path, staleness):
    specs = doubles.engine_specs(doubles.make_config(), 2)
    specs[0].arguments["fail_after_tokens"] = 20
    bench, _ = run_all(tmp_path, specs, rollout={"restarts": 1}, coordinator={"max_staleness": staleness})
    assert bench.cluster.spawned.count("engine-0") == 2
    assert sum(scalars["rollout/resumed"] for _, scalars in bench.recorder.steps) > 0
    assert doubles.turns_of(bench) == doubles.reference_tokens(tmp_path), (
        "resumed attempts differ from undisturbed ones"
    )


class Routing(fake_engine.FakeEngine):
    """Returns a token's own number as its experts, of the tokens that the request lacks."""

    async def generate(self, request: protocols.GenerationRequest):
        context, told = list(request.token_ids), request.routed_tokens
        async for delta in super().generate(request):
            context.extend(delta.token_ids)
            rows = tuple(token.to_bytes(4, "little") for token in context[told : len(context) - 1])
            told += len(rows)
            yield dataclasses.replace(delta, routing=rows)


def test_resumed_requests_keep_the_experts_of_every_token(tmp_path, monkeypatch):
    trained: list[protocols.Trajectory] = []
    train_step = doubles.RecordingTrainer.train_step

    async def keep(self: Any, batch: protocols.TrainBatch, shares: Any = ()) -> Any:
        trained.extend(trajectory for group in batch.groups for trajectory in group.trajectories)
        return await train_step(self, batch, shares)

    monkeypatch.setattr(doubles.RecordingTrainer, "train_step", keep)
    monkeypatch.setattr(doubles, "make_routing", functools.partial(fake_engine.create, kind=Routing), raising=False)
    made = doubles.engine_specs(doubles.make_config(), 2)
    made[0].arguments["fail_after_tokens"] = 20
    specs = [protocols.ActorSpec(spec.name, "coordinator_doubles:make_routing", spec.arguments) for spec in made]
    bench, _ = run_all(tmp_path, specs, rollout={"restarts": 1})
    assert sum(scalars["rollout/resumed"] for _, scalars in bench.recorder.steps) > 0
    assert len(trained) > 12
    for trajectory in trained:
        # What the environment appended after the last turn has none.
        sampled = max(n for n, source in enumerate(trajectory.sources) if source == protocols.TokenSource.MODEL)
        wanted = [token.to_bytes(4, "little") for token in trajectory.token_ids[:sampled]]
        assert trajectory.routing == wanted


def test_the_only_engine_is_restarted_with_the_current_weights_before_it_serves(tmp_path, monkeypatch):
    deaths = []

    async def die_once_in_the_third_step(engine: Faulty, verb: str) -> None:
        if verb == "delta" and engine._version == 2 and not deaths:
            deaths.append(engine)
            engine.kill()

    bench, _ = run_all(tmp_path, faulty_specs(monkeypatch, die_once_in_the_third_step, count=1))
    assert bench.cluster.spawned == ["trainer", "engine-0", "engine-0"]
    syncs = [span[4]["policy_version"] for span in bench.recorder.spans if span[:2] == ("weights", "sync engine-0")]
    assert syncs == [0, 1, 2, 2, 3, 4]
    assert doubles.turns_of(bench) == doubles.reference_tokens(tmp_path)


def test_engines_that_die_again_and_again_end_the_run_with_a_sentence(tmp_path):
    specs = doubles.engine_specs(doubles.make_config(), 2, fail_after_tokens=3)
    bench = doubles.Bench(doubles.make_config(rollout={"restarts": 2}), tmp_path, specs=specs)
    with pytest.raises(
        protocols.WorkerLost, match=r"No rollout engine is left.*engine-\d; it was started again 2 times"
    ):
        bench.run()
    assert sorted(bench.cluster.spawned) == ["engine-0"] * 3 + ["engine-1"] * 3 + ["trainer"]


def test_a_request_that_always_fails_ends_the_run_with_a_sentence(tmp_path, monkeypatch):
    async def refuse(engine: Faulty, verb: str) -> None:
        if verb == "generate":
            raise protocols.LibraError("the prompt is cursed")

    specs = faulty_specs(monkeypatch, refuse)
    bench = doubles.Bench(doubles.make_config(rollout={"generation_retries": 3}), tmp_path, specs=specs)
    with pytest.raises(protocols.WorkerLost, match=r"failed 4 times.*generation_retries = 3.*the prompt is cursed"):
        bench.run()


def test_an_engine_that_hangs_misses_its_deadline_and_its_requests_resume(tmp_path, monkeypatch):
    hung = []

    async def hang_once(engine: Faulty, verb: str) -> None:
        if verb == "delta" and engine.name == "engine-0" and hung in ([], [engine]):
            hung[:] = [engine]
            await asyncio.sleep(1e6)

    bench, _ = run_all(tmp_path, faulty_specs(monkeypatch, hang_once), deadlines={"first_token": 20.0})
    assert any("Engine engine-0 sent no token of task-" in note for note in bench.recorder.notes)
    assert doubles.turns_of(bench) == doubles.reference_tokens(tmp_path)


def test_a_stalled_event_loop_costs_no_engine(tmp_path):
    class Stalling(doubles.TwoTurns):
        async def step(self, output: str) -> protocols.StepResult:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, doubles.Clock)
            loop.now += 50.0
            return await super().step(output)

    config = doubles.make_config(deadlines={"first_token": 20.0, "weight_sync": 20.0, "train_step": 20.0})
    bench = doubles.Bench(config, tmp_path, make_environment=Stalling)
    bench.run()
    assert bench.cluster.spawned.count("engine-0") == 1
    assert sorted(bench.trained["prompts"]) == ALL


@pytest.mark.parametrize("verb", ["pause", "update_weights"])
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_an_engine_that_fails_in_a_weight_update_is_restarted_and_the_others_go_on(tmp_path, monkeypatch, verb, how):
    failed = []

    async def fail_once(engine: Faulty, called: str) -> None:
        if called == verb and engine.name == "engine-1" and engine._version == 1 and not failed:
            failed.append(engine)
            if how == "raises":
                raise RuntimeError("out of memory")
            await asyncio.sleep(1e6)

    bench, summary = run_all(
        tmp_path,
        faulty_specs(monkeypatch, fail_once),
        deadlines={"weight_sync": 30.0},
        coordinator={"max_staleness": 1},
    )
    assert summary.steps == 4
    assert bench.cluster.spawned.count("engine-1") == 2
    assert bench.cluster.spawned.count("engine-0") == 1


def test_a_long_weight_update_is_not_blamed_on_the_requests_it_freezes(tmp_path, monkeypatch):
    async def slow(engine: Faulty, called: str) -> None:
        if called == "update_weights":
            await asyncio.sleep(100.0)

    specs = faulty_specs(monkeypatch, slow, tokens_per_second=0.2)
    bench, _ = run_all(tmp_path, specs, deadlines={"first_token": 60.0}, coordinator={"max_staleness": 1})
    assert bench.cluster.spawned.count("engine-0") == 1
    assert sum(scalars["rollout/resumed"] for _, scalars in bench.recorder.steps) == 0


def test_an_engine_that_dies_idle_is_found_and_restarted_before_it_is_needed(tmp_path, monkeypatch):
    async def die_while_the_tools_run(engine: Faulty, called: str) -> None:
        if called == "start" and engine.name == "engine-0" and not deaths:
            deaths.append(asyncio.get_running_loop().call_later(50.0, engine.kill))

    class SlowTool(doubles.TwoTurns):
        tool_seconds = staticmethod(lambda index: 100.0)

    deaths: list[asyncio.TimerHandle] = []
    config = doubles.make_config(task={"tool_seconds": 500.0})
    specs = faulty_specs(monkeypatch, die_while_the_tools_run)
    bench = doubles.Bench(config, tmp_path, specs=specs, make_environment=SlowTool)
    bench.run()
    assert bench.cluster.spawned.count("engine-0") == 2
    assert sum(scalars["rollout/resumed"] for _, scalars in bench.recorder.steps) == 0


def test_an_engine_that_does_not_start_in_time_is_named(tmp_path, monkeypatch):
    async def never_start(engine: Faulty, verb: str) -> None:
        if verb == "start":
            await asyncio.sleep(1e6)

    config = doubles.make_config(rollout={"restarts": 0}, deadlines={"engine_start": 60.0})
    bench = doubles.Bench(config, tmp_path, specs=faulty_specs(monkeypatch, never_start, count=1))
    sentence = r"No rollout engine.*Engine engine-0, asked to start, did not.*within 60 s"
    with pytest.raises(protocols.WorkerLost, match=sentence):
        bench.run()


def test_an_engine_that_hangs_on_its_way_to_sleep_holds_up_no_update_of_the_others():
    class Deaf(fake_engine.FakeEngine):
        async def sleep(self):
            await asyncio.Event().wait()

    async def main():
        config = doubles.make_config(deadlines={"transition": 20.0})
        run = doubles.run_context(config)
        made = instances.Instances(run, [protocols.ActorSpec("engine-0", "", {})])
        deaf = Deaf("engine-0", doubles.chatter, 4, 256, 1, 2, 20_000.0, None)
        made.engines["engine-0"].state = "serving"
        made.engines["engine-0"].client = await doubles.engine_client(deaf, config)
        sleeping = asyncio.ensure_future(made.sleep("engine-0"))
        await asyncio.sleep(1.0)
        async with asyncio.timeout(1.0), made.weights:
            assert made.loadable() == []
        run.scope.call(protocols.LibraError("the run is over"))  # so that nothing is started again
        with pytest.raises(protocols.DeadlineMissed, match="engine-0, asked to sleep"):
            await sleeping

    doubles.run_on_clock(main())


def test_an_engine_that_does_not_come_back_from_sleep_is_named_with_the_deadlines_that_it_missed():
    async def main():
        config = doubles.make_config(deadlines={"engine_start": 30.0, "transition": 20.0})
        made = instances.Instances(doubles.run_context(config), [protocols.ActorSpec("engine-0", "", {})])
        made.engines["engine-0"].state = "lost"
        sentence = r"engine-0 did not come back .* within 20 s and 30 s .*deadlines.transition or .*engine_start"
        with pytest.raises(protocols.DeadlineMissed, match=sentence):
            await made.wake("engine-0")

    doubles.run_on_clock(main())


def test_a_mistaken_engine_ends_the_run_at_once(tmp_path, monkeypatch):
    async def refuse(engine: Faulty, verb: str) -> None:
        if verb == "start":
            raise protocols.ConfigError("config.rollout.dtype: this machine has no bfloat16")

    bench = doubles.Bench(doubles.make_config(), tmp_path, specs=faulty_specs(monkeypatch, refuse))
    with pytest.raises(protocols.ConfigError, match=r"rollout\.dtype"):
        bench.run()
    assert bench.cluster.spawned.count("engine-0") == 1


# Environments and rewards -------------------------------------------------------------------------------------------


def test_an_engine_that_fails_twice_alike_before_a_token_is_not_retried(tmp_path, monkeypatch):
    starts = []

    async def refuse(engine: Faulty, verb: str) -> None:
        if verb == "start":
            starts.append(engine)
            problem = f"ValueError: head size 16 of /tmp/engine-{len(starts)} is not supported"
            raise protocols.WorkerLost(f"engine engine-0 did not start: {problem}")

    specs = faulty_specs(monkeypatch, refuse, count=1)
    bench = doubles.Bench(doubles.make_config(rollout={"restarts": 5}), tmp_path, specs=specs)
    with pytest.raises(protocols.WorkerLost, match=r"two starts in a row ended with the same error.*head size 16"):
        bench.run()
    assert len(starts) == 2


@pytest.mark.parametrize(
    ("errors", "starts"),
    [
        (["engine-0 is gone (killed)"] * 4, 4),  # tells of no exception: it may not come again
        (["did not start: RuntimeError: Engine core initialization failed. {'EngineCore_DP0': -9}"] * 4, 4),
        (["ValueError: one", "ValueError: two", "ValueError: one", "ValueError: two"], 4),
        (["ValueError: one", "OSError: full", "OSError: full"], 3),
        # What others do at the moment: memory, networks and time.
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"] * 4, 4),
        (["ValueError: Free memory on device (3/80 GiB) is less than desired GPU memory utilization"] * 4, 4),
        (["RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory"] * 4, 4),
        (["ConnectionRefusedError: [Errno 111] Connection refused"] * 4, 4),
        (["TimeoutError: the store did not answer"] * 4, 4),
        (["RuntimeError: The client socket has timed out after 60000ms"] * 4, 4),
    ],
)
def test_an_engine_is_retried_while_its_errors_differ(tmp_path, monkeypatch, errors, starts):
    left = list(errors)

    async def refuse(engine: Faulty, verb: str) -> None:
        if verb == "start":
            raise protocols.WorkerLost(left.pop(0))

    specs = faulty_specs(monkeypatch, refuse, count=1)
    bench = doubles.Bench(doubles.make_config(rollout={"restarts": 3}), tmp_path, specs=specs)
    with pytest.raises(protocols.WorkerLost, match="No rollout engine is left"):
        bench.run()
    assert len(errors) - len(left) == starts


def test_an_engine_that_brought_tokens_is_retried_whatever_it_ends_with(tmp_path, monkeypatch):
    async def die_in_use(engine: Faulty, verb: str) -> None:
        if verb == "delta":
            raise protocols.WorkerLost("engine engine-0 is gone (ValueError: the same again)")

    specs = faulty_specs(monkeypatch, die_in_use, count=1)
    bench = doubles.Bench(doubles.make_config(rollout={"restarts": 3}), tmp_path, specs=specs)
    with pytest.raises(protocols.WorkerLost, match=r"it was started again 3 times"):
        bench.run()
