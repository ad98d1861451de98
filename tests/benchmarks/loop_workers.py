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
import pathlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

import psutil
from absl import app, flags

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.cluster import inprocess
from libra_jax.coordinator import dispatch, instances, loop_workers, parts
from libra_jax.rollouts import loop_worker, rollouts, streams
from libra_jax.scheduling import registry
from libra_jax.telemetry import memory
from libra_jax.utils import processes, run_context

WORKERS = flags.DEFINE_integer("workers", 64, "Loop workers; 0: the loops run in the coordinator's process.")
HOLDERS = flags.DEFINE_integer("holders", 2, "Processes that hold the workers.")
LIVE = flags.DEFINE_integer("live", 20_000, "Rollouts under way.")
RATE = flags.DEFINE_float("turns_per_second", 1000.0, "Turns a second that the rollouts would make without a queue.")
TURNS = flags.DEFINE_integer("turns", 10, "Turns of a rollout.")
TOKENS = flags.DEFINE_integer("tokens", 256, "Tokens of an output.")
DELTAS = flags.DEFINE_integer("deltas", 2, "Parts in which the tokens of an output come.")
DEADLINE_SECONDS = 60.0
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


def hold(pipe: connection.Connection, config: config_lib.RunConfig, shape: Shape, count: int) -> None:
    """Holds workers until told to end; sends their addresses first."""
    asyncio.run(_hold(pipe, config, shape, count))


async def _hold(pipe: connection.Connection, config: config_lib.RunConfig, shape: Shape, count: int) -> None:
    @contextlib.asynccontextmanager
    async def opened(run: run_context.RunContext) -> AsyncIterator[rollouts.RolloutAgent]:
        yield agent(shape)

    gc.set_threshold(100_000, 50, 100)
    made = [
        loop_worker.LoopWorkerActor(config, inprocess.InProcessCluster(), pathlib.Path(), opened, "127.0.0.1")
        for _ in range(count)
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


@dataclass(frozen=True)
class Figures:
    """What the coordinator's process spent.

    Attributes:
      turns_per_second: turns that ended.
      cores: CPU seconds a second.
      turn_seconds: CPU seconds a turn.
      holders: CPU seconds a second of all processes with workers.
      memory: bytes of the coordinator's process.
      rollout_memory: bytes that it grew by for each rollout.
      waited: seconds that a turn waited for its place.
    """

    turns_per_second: float
    cores: float
    turn_seconds: float
    holders: float
    memory: int
    rollout_memory: float
    waited: float


def measure(shape: Shape, *, workers: int, live: int, seconds: float, holders: int = 2) -> Figures:
    """Runs rollouts for twice `seconds`, and returns what was spent in the second half."""
    config = config_lib.RunConfig(
        rollout=config_lib.RolloutConfig(engine="fake", max_context=CONTEXT, max_tokens=shape.tokens),
        task=config_lib.TaskConfig(max_turns=shape.turns + 1),
        trainer=config_lib.TrainerConfig(row_tokens=CONTEXT),
    )
    count = min(holders, workers)
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(
                processes.Peer(hold, config, shape, workers // count + (number < workers % count), name="a holder")
            )
            for number in range(count)
        ]
        addresses = [address for peer in peers for address in peer.receive(DEADLINE_SECONDS)]
        figures = asyncio.run(_measure(shape, config, addresses, live, seconds))
        spent = sum(peer.ask(None, DEADLINE_SECONDS) for peer in peers)
    return replace(figures, holders=spent / (2 * seconds))


async def _measure(
    shape: Shape,
    config: config_lib.RunConfig,
    addresses: Sequence[protocols.WorkerAddress],
    live: int,
    seconds: float,
) -> Figures:
    run = parts.CoordinatorContext(config, Cluster(addresses), Forgetful(), pathlib.Path())
    count = max(1, len(addresses)) * 4
    slots = -(-2 * live // count)
    engines = instances.Instances(run, [protocols.ActorSpec(f"engine-{number}", ":", {}) for number in range(count)])
    for name, engine in engines.engines.items():
        engine.client = EngineClient(name, shape)  # type: ignore[assignment]
        engine.info = protocols.EngineInfo(name, 1, slots, CONTEXT, ())
        engine.state, engine.policy_version = "serving", 0
    dispatcher = dispatch.Dispatcher(run, scheduler=registry.create(config.scheduler), engines=engines)
    run.events.announce(protocols.EnginesChanged(engines.serving()))
    given = rollouts.Agent(tasks=Tasks(), **vars(agent(shape)))
    runner: rollouts.RolloutRunner
    if addresses:
        specs = [protocols.ActorSpec(f"loops-{number}", ":", {}) for number in range(len(addresses))]
        runner = loop_workers.LoopWorkers(run, given, specs, dispatcher=dispatcher, engines=engines)
    else:
        runner = rollouts.Rollouts(run, given, streams.Streams(run, dispatcher=dispatcher, engines=engines))
    gc.set_threshold(100_000, 50, 100)  # as under load in a long run: most objects live long
    process, numbers = psutil.Process(), itertools.count()
    before = process.memory_info().rss

    async def one() -> None:
        # Each begins at another time of a turn, or all would call their tools at once.
        await asyncio.sleep(random.uniform(0.0, shape.seconds))
        while True:
            number = next(numbers)
            task = protocols.Task(f"task-{number // 8}", {})
            trajectory = runner.begin(f"{task.prompt_id}/{number % 8}", task)
            await runner.run(protocols.RolloutOrder(trajectory, task, number // 8, 0, 1.0))
            if len(trajectory.turns) != shape.turns or trajectory.generated_tokens != shape.turns * shape.tokens:
                raise protocols.LibraError(f"{len(trajectory.turns)} turns came instead of {shape.turns}")

    async def window() -> Figures:
        await asyncio.sleep(seconds)
        runner.take_counts()
        cpu, began, rss = time.process_time(), time.monotonic(), process.memory_info().rss
        await asyncio.sleep(seconds)
        spent, passed = time.process_time() - cpu, time.monotonic() - began
        counts = runner.take_counts()
        turns = counts.tokens / shape.tokens
        return Figures(
            turns_per_second=turns / passed,
            cores=spent / passed,
            turn_seconds=spent / turns,
            holders=0.0,
            memory=rss,
            rollout_memory=(rss - before) / live,
            waited=counts.waited_seconds / turns,
        )

    measured = asyncio.ensure_future(window())
    work = [asyncio.ensure_future(one()) for _ in range(live)]
    try:
        return await run.scope.race(_first(measured, *work))
    finally:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


async def _first(measured: asyncio.Future[Figures], *work: asyncio.Future[None]) -> Figures:
    """Returns the figures, or raises what ended a rollout before."""
    either: set[asyncio.Future[Any]] = {measured, *work}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    for task in work:
        if task.done():
            task.result()
    return measured.result()


class Tasks:
    """Tasks by number; nothing asks for them here."""

    def task(self, index: int) -> protocols.Task:
        return protocols.Task(f"task-{index}", {})

    evaluation_task = task


class Forgetful(memory.MemoryRecorder):
    """Takes spans and keeps none: a run writes them into a file."""

    def span(self, *_: Any, **__: Any) -> None:
        pass


def main(_: Sequence[str]) -> None:
    shape = Shape(TURNS.value, TOKENS.value, DELTAS.value, LIVE.value / RATE.value)
    found = measure(shape, workers=WORKERS.value, live=LIVE.value, seconds=SECONDS.value, holders=HOLDERS.value)
    print(
        f"{WORKERS.value} workers, {LIVE.value:,} rollouts under way: {found.turns_per_second:,.0f} turns/s, "
        f"{found.cores:.3f} cores in the coordinator's process ({1e6 * found.turn_seconds:.0f} us a turn), "
        f"{found.holders:.2f} in those with workers; memory {found.memory / 2**20:,.0f} MiB, "
        f"{found.rollout_memory / 1024:.1f} KiB a rollout; a turn waited {found.waited:.2f} s for its place"
    )


if __name__ == "__main__":
    app.run(main)
