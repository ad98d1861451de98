"""One coordinator with many loop workers: its CPU time a turn, and its memory.

  python -m tests.benchmarks.loop_workers --workers=64 --live=20000 --turns_per_second=1000

Workers are emulated: a few processes hold them, each worker with its own connection to the coordinator, its own agent
loops and its own engines, which are doubles that take the time of real ones. Dispatcher, C-MLFQ, channel, agent loops
and streams are those of a run. `--workers=0` runs the loops in the coordinator's process, for comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import pathlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

import psutil
from absl import app, flags

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.agents import tokenizers
from libra_jax.cluster import inprocess
from libra_jax.coordinator import dispatch, instances, loop_workers, parts
from libra_jax.loops import rollouts, streams, worker
from libra_jax.scheduling import registry
from libra_jax.telemetry import memory

WORKERS = flags.DEFINE_integer("workers", 64, "Loop workers; 0: the loops run in the coordinator's process.")
PROCESSES = flags.DEFINE_integer("processes", 2, "Processes that hold the workers.")
LIVE = flags.DEFINE_integer("live", 20_000, "Rollouts under way.")
RATE = flags.DEFINE_float("turns_per_second", 1000.0, "Turns a second that the rollouts would make without a queue.")
TURNS = flags.DEFINE_integer("turns", 10, "Turns of a rollout.")
TOKENS = flags.DEFINE_integer("tokens", 256, "Tokens of an output.")
DELTAS = flags.DEFINE_integer("deltas", 2, "Parts in which the tokens of an output come.")
SECONDS = flags.DEFINE_float("seconds", 60.0, "Seconds that are measured, after as many to warm up.")

DECODING = 0.6
"""Share of a turn that is decoding; the tool takes the rest."""

PAYLOAD = 64
CONTEXT = 65_536


@dataclass(frozen=True)
class Shape:
    """What the emulated rollouts do: turns, tokens and parts of an output, seconds of a turn."""

    turns: int
    tokens: int
    deltas: int
    seconds: float


class Engine:
    """A double of an engine: an output comes in equal parts, over the seconds of a turn's decoding."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    async def generate(self, request: protocols.GenerationRequest) -> AsyncIterator[protocols.TokenDelta]:
        shape, size = self._shape, self._shape.tokens // self._shape.deltas
        for index in range(shape.deltas):
            await asyncio.sleep(DECODING * shape.seconds / shape.deltas * random.uniform(0.5, 1.5))
            last = index == shape.deltas - 1
            end = (request.sampling.stop_token_ids[0],) if last else (65,)
            finish: protocols.FinishReason | None = "stop" if last else None
            yield protocols.TokenDelta((65,) * (size - 1) + end, (-1.0,) * size, (0,) * size, finish)

    async def health(self) -> dict[str, float]:
        return {}

    async def shutdown(self) -> None: ...


@dataclass(frozen=True)
class EngineAddress:
    """An engine that each process has for itself, as a worker has the engines beside it."""

    name: str
    shape: Shape

    def handle(self) -> protocols.DirectHandle:
        return protocols.DirectHandle(self.name, Engine(self.shape))


class EngineClient:
    """The coordinator's end of an emulated engine."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name = name
        self.address = EngineAddress(name, shape)
        self._engine = Engine(shape)

    async def health(self) -> dict[str, float]:
        return {}

    def generate(self, request: protocols.GenerationRequest) -> Any:
        return self._engine.generate(request)


class Tools:
    """An environment whose tool takes its share of a turn, for a number of turns."""

    running_tool = "tool"

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._turns = 0

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        return [protocols.Message("user", "a task of some words")]

    async def step(self, output: str) -> protocols.StepResult:
        await asyncio.sleep((1 - DECODING) * self._shape.seconds * random.uniform(0.5, 1.5))
        self._turns += 1
        if self._turns >= self._shape.turns:
            return protocols.StepResult(done=True, reward=1.0)
        returned = protocols.ToolReturn("tool", random.choice(("success", "failure")), "x" * PAYLOAD)
        return protocols.StepResult(tool_returns=[returned])

    async def close(self) -> None: ...


def agent(shape: Shape) -> rollouts.RolloutAgent:
    return rollouts.RolloutAgent(make_environment=lambda: Tools(shape), tokenizer=tokenizers.CharacterTokenizer())


# The processes with workers -------------------------------------------------------------------------------------------


def hold(pipe: connection.Connection, config: configuration.RunConfig, shape: Shape, count: int) -> None:
    """Holds workers until told to end; sends their addresses first."""
    asyncio.run(_hold(pipe, config, shape, count))


async def _hold(pipe: connection.Connection, config: configuration.RunConfig, shape: Shape, count: int) -> None:
    @contextlib.asynccontextmanager
    async def opened(run: protocols.RunContext) -> AsyncIterator[rollouts.RolloutAgent]:
        yield agent(shape)

    gc.set_threshold(100_000, 50, 100)
    made = [
        worker.Worker(config, inprocess.InProcessCluster(), pathlib.Path(), opened, "127.0.0.1") for _ in range(count)
    ]
    for one in made:
        await one.start(asyncio.get_running_loop().time())
    pipe.send([await one.listen() for one in made])
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    pipe.send(time.process_time())
    # The rollouts are of no use to anybody: they end with the process.


@dataclass(frozen=True)
class Held:
    """A worker in one of the processes, as its actor's handle."""

    name: str
    at: protocols.WorkerAddress

    async def call(self, method: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.at if method.__name__ == "listen" else None


class Cluster(inprocess.InProcessCluster):
    """Hands out the workers of the processes."""

    def __init__(self, addresses: Sequence[protocols.WorkerAddress]) -> None:
        super().__init__()
        self._addresses = list(addresses)

    async def spawn(self, spec: protocols.ActorSpec) -> Any:
        return Held(spec.name, self._addresses.pop())


# The coordinator ------------------------------------------------------------------------------------------------------


async def measure(shape: Shape, config: configuration.RunConfig, addresses: Sequence[protocols.WorkerAddress]) -> None:
    """Runs the rollouts, and prints what the coordinator spent in the second half of the time."""
    run = parts.RunContext(config, Cluster(addresses), memory.MemoryRecorder(), pathlib.Path())
    run = replace(run, recorder=Forgetful())
    count = max(1, len(addresses)) * 4
    slots = -(-LIVE.value // count)
    engines = instances.Instances(run, [protocols.ActorSpec(f"engine-{number}", ":", {}) for number in range(count)])
    for name, engine in engines.engines.items():
        engine.client = EngineClient(name, shape)  # type: ignore[assignment]
        engine.info = protocols.EngineInfo(name, 1, slots, CONTEXT, ())
        engine.state, engine.policy_version = "serving", 0
    dispatcher = dispatch.Dispatcher(run, scheduler=registry.create(config.scheduler), engines=engines)
    run.events.announce(protocols.EnginesChanged(engines.serving()))
    given = rollouts.Agent(tasks=Tasks(), **vars(agent(shape)))
    runner: rollouts.Runner
    if addresses:
        specs = [protocols.ActorSpec(f"loops-{number}", ":", {}) for number in range(len(addresses))]
        runner = loop_workers.LoopWorkers(run, given, specs, dispatcher=dispatcher, engines=engines)
    else:
        runner = rollouts.Rollouts(run, given, streams.Streams(run, dispatcher=dispatcher, engines=engines))
    gc.set_threshold(100_000, 50, 100)  # as under load in a long run: most objects live long
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    numbers = itertools.count()
    turns = 0

    async def one() -> None:
        nonlocal turns
        # Begun over one turn's time, and each at another turn, or all would call their tools at once.
        await asyncio.sleep(random.uniform(0.0, shape.seconds))
        while True:
            number = next(numbers)
            task = protocols.Task(f"task-{number // 8}", {})
            trajectory = runner.begin(f"{task.prompt_id}/{number % 8}", task)
            await runner.run(trajectory, task, group_id=number // 8, dispatch_version=0, temperature=1.0)
            if len(trajectory.turns) != shape.turns or trajectory.generated_tokens != shape.turns * shape.tokens:
                raise protocols.LibraError(f"{len(trajectory.turns)} turns came in place of {shape.turns}")
            turns += shape.turns

    work = [asyncio.ensure_future(one()) for _ in range(LIVE.value)]

    async def window() -> None:
        await asyncio.sleep(SECONDS.value)
        runner.take_counts()
        cpu, began, rss = time.process_time(), time.monotonic(), process.memory_info().rss
        await asyncio.sleep(SECONDS.value)
        spent, seconds = time.process_time() - cpu, time.monotonic() - began
        counts = runner.take_counts()
        done = counts.tokens / shape.tokens
        print(
            f"{len(addresses)} workers, {LIVE.value:,} rollouts under way: {done / seconds:,.0f} turns/s, "
            f"{spent / seconds:.3f} cores in the coordinator's process, {1e6 * spent / done:.0f} us a turn, "
            f"scheduler {1e6 * dispatcher.take_seconds() / (2 * done):.0f} us a turn; "
            f"memory {rss / 2**20:,.0f} MiB, {(rss - before) / LIVE.value / 1024:.1f} KiB a rollout; "
            f"{counts.waited_seconds / max(1, done):.2f} s of waiting for a slot a turn; {counts.resumed} resumed"
        )

    try:
        await run.scope.race(_first(window(), *work))
    finally:
        for task in work:
            task.cancel()
        for each in list(asyncio.all_tasks() - {asyncio.current_task()}):
            each.cancel()


async def _first(window: Any, *work: asyncio.Future[None]) -> None:
    measured = asyncio.ensure_future(window)
    done, _ = await asyncio.wait({measured, *work}, return_when=asyncio.FIRST_COMPLETED)
    next(iter(done)).result()


class Tasks:
    """Tasks by number; nothing asks for them here."""

    def task(self, index: int) -> protocols.Task:
        return protocols.Task(f"task-{index}", {})

    evaluation_task = task


class Forgetful(memory.MemoryRecorder):
    """Counts spans and keeps none: a run writes them into a file."""

    def span(self, *_: Any, **__: Any) -> None:
        pass


def main(_: Sequence[str]) -> None:
    shape = Shape(TURNS.value, TOKENS.value, DELTAS.value, LIVE.value / RATE.value)
    config = configuration.RunConfig(
        rollout=configuration.RolloutConfig(engine="fake", max_context=CONTEXT, max_tokens=TOKENS.value),
        task=configuration.TaskConfig(max_turns=TURNS.value + 1),
        trainer=configuration.TrainerConfig(row_tokens=CONTEXT),
    )
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    count = min(PROCESSES.value, WORKERS.value)
    for number in range(count):
        here, there = context.Pipe()
        share = WORKERS.value // count + (number < WORKERS.value % count)
        processes.append(context.Process(target=hold, args=(there, config, shape, share), daemon=True))
        processes[-1].start()
        pipes.append(here)
    addresses = [address for pipe in pipes for address in pipe.recv()]
    asyncio.run(measure(shape, config, addresses))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        print(f"a process with workers: {pipe.recv() / (2 * SECONDS.value):.2f} cores")
        process.terminate()
        process.join(20)


if __name__ == "__main__":
    app.run(main)
