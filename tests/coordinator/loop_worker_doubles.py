"""Loop workers in this process, on the doubles of the coordinator's tests. They die when the test says so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import coordinator_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rollouts import loop_worker, rollouts
from libra_jax.utils import run_context

MADE: list[Mortal] = []
"""Every worker since `specs`, in the order of their starts."""


class Mortal(loop_worker.LoopWorkerActor):
    """A worker that dies after `life` seconds: it says nothing more, and every call fails."""

    life = float("inf")
    begun = 0

    async def start(self, now: float) -> None:
        self.dead = asyncio.get_running_loop().create_future()
        if self.life < 1e9:
            asyncio.get_running_loop().call_later(self.life, self.die)
        await super().start(now)

    def die(self) -> None:
        if not self.dead.done():
            self.dead.set_result(None)

    async def tell(self, commands: Sequence[protocols.WorkerCommand]) -> None:
        if self.dead.done():
            raise protocols.WorkerLost("the worker was killed by the test")
        self.begun += sum(isinstance(command, protocols.RolloutOrder) for command in commands)
        await super().tell(commands)

    async def events(self) -> AsyncIterator[Sequence[protocols.WorkerEvent]]:
        async with contextlib.aclosing(super().events()) as events:
            while True:
                coming = asyncio.ensure_future(anext(events))
                await asyncio.wait({coming, self.dead}, return_when=asyncio.FIRST_COMPLETED)
                if self.dead.done():
                    coming.cancel()
                    await asyncio.wait({coming})
                    raise protocols.WorkerLost("the worker was killed by the test")
                yield coming.result()


def create(
    config: config_lib.RunConfig,
    make_environment: Callable[[], Any],
    lives: list[float],
    agent: dict[str, Any],
) -> loop_worker.LoopWorkerActor:
    """Makes a worker. Its life is the next of `lives`; beyond these, workers live on."""

    @contextlib.asynccontextmanager
    async def opened(run: run_context.RunContext) -> AsyncIterator[rollouts.RolloutAgent]:
        yield rollouts.RolloutAgent(make_environment=make_environment, tokenizer=doubles.TokenText(), **agent)

    made = Mortal(config, doubles.DirectCluster(), Path("unused"), opened)
    if lives:
        made.life = lives.pop(0)
    MADE.append(made)
    return made


def specs(
    config: config_lib.RunConfig,
    count: int,
    make_environment: Callable[[], Any] = doubles.TwoTurns,
    lives: Sequence[float] = (),
    **agent: Any,
) -> list[protocols.ActorSpec]:
    """Describes workers; `agent` are further fields of their agent."""
    MADE.clear()
    arguments = {"config": config, "make_environment": make_environment, "lives": [*lives], "agent": agent}
    return [protocols.ActorSpec(f"loops-{number}", "loop_worker_doubles:create", arguments) for number in range(count)]


class Bench(doubles.Bench):
    """A coordinator on doubles with loop workers."""

    def __init__(
        self,
        config: config_lib.RunConfig,
        workdir: Path,
        count: int = 2,
        make_environment: Callable[[], Any] = doubles.TwoTurns,
        lives: Sequence[float] = (),
        agent: dict[str, Any] | None = None,
        **further: Any,
    ) -> None:
        workers = specs(config, count, make_environment, lives, **(agent or {}))
        super().__init__(config, workdir, make_environment=make_environment, loop_workers=workers, **further)
