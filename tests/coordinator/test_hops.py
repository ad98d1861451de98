"""A reader's way through one toy step: from the batch to its gradient, and from a tool's return to the move.

A hop is a call. The way is read off a run: up the stack of the thread that computes and then, across threads and tasks,
to the function in which each awaited coroutine was called (`cr_origin`). Functions that only carry out work that they
were handed (`deadlines.within`, `Ending.race`, an actor's thread) are not on it: who follows the calls passes them by.
"""

from __future__ import annotations

import asyncio
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any, NamedTuple

import coordinator_doubles as doubles
import pytest

import libra_jax
from libra_jax import config, protocols
from libra_jax.training import step

HOPS, FILES = 10, 6
"""The most calls on a way, and the most files that hold its functions."""

LIBRARY = Path(libra_jax.__file__).parent

Coroutine = typing.Coroutine[Any, Any, Any]


class Place(NamedTuple):
    """A function on the way."""

    file: str
    function: str

    @property
    def ours(self) -> bool:
        return Path(self.file).is_relative_to(LIBRARY)


def stack(frame: FrameType | None) -> Iterator[Place]:
    """The library's functions on a thread's stack, the innermost first."""
    while frame is not None:
        place = Place(frame.f_code.co_filename, frame.f_code.co_name)
        if place.ours:
            yield place
        frame = frame.f_back


def waiting(tasks: set[asyncio.Task[Any]]) -> dict[Place, Coroutine]:
    """Every coroutine of every task that waits."""
    found = {}
    for task in tasks:
        coroutine: Any = task.get_coro()
        while isinstance(coroutine, CoroutineType):
            found[Place(coroutine.cr_code.co_filename, coroutine.cr_code.co_name)] = coroutine
            coroutine = coroutine.cr_await
    return found


def callers(called: Place, coroutines: dict[Place, Coroutine]) -> Iterator[Place]:
    """The functions through which a coroutine was called, itself first."""
    while called.ours:
        yield called
        for file, _, function in coroutines[called].cr_origin or ():
            caller = Place(file, function)
            if caller in coroutines:
                called = caller
                break
            if caller.ours:  # a plain function between two coroutines
                yield caller
        else:
            return


def check(way: Sequence[Place], first: str, last: str) -> None:
    """Checks a way, the innermost function first, from the function of one name to that of another."""
    names = [place.function for place in way]
    way = way[names.index(last) : names.index(first) + 1][::-1]
    files = list(dict.fromkeys(place.file for place in way))
    told = "\n".join(f"{Path(place.file).relative_to(LIBRARY)}: {place.function}" for place in way)
    print(f"{len(way) - 1} hops in {len(files)} files\n{told}")
    assert len(way) - 1 <= HOPS, told
    assert len(files) <= FILES, told


@pytest.mark.slow
def test_the_way_from_a_batch_to_its_gradient_is_short(tmp_path, monkeypatch):
    run = config.RunConfig(name="toy", steps=1)
    run.rollout.engine, run.rollout.max_context, run.rollout.max_tokens = "fake", 128, 16
    run.trainer.platform, run.trainer.row_tokens = "cpu", 128
    run.coordinator.groups_per_step, run.coordinator.group_size = 1, 2
    run.evaluation.every, run.telemetry.tensorboard, run.telemetry.report = 0, False, False
    ways: list[list[Place]] = []
    computes = step.Programs.grad_step

    async def train() -> None:
        loop = asyncio.get_running_loop()

        def grad_step(*arguments: Any) -> Any:
            coroutines = waiting(asyncio.all_tasks(loop))
            (actor,) = [
                place
                for place, coroutine in coroutines.items()
                if place.file.endswith("actors.py") and coroutine.cr_frame.f_locals.get("method") == "train_step"
            ]
            on_thread = list(stack(sys._getframe(1)))
            on_thread = on_thread[: [place.function for place in on_thread].index("train_step") + 1]
            gradient = Place(computes.__code__.co_filename, "grad_step")
            ways.append([gradient, *on_thread, *callers(actor, coroutines)])
            return computes(*arguments)

        monkeypatch.setattr(step.Programs, "grad_step", grad_step)
        await libra_jax.train_async(run, tasks=[{"prompt": "1+1", "answer": "2"}], workdir=tmp_path / "run")

    depth = sys.get_coroutine_origin_tracking_depth()
    sys.set_coroutine_origin_tracking_depth(30)
    try:
        asyncio.run(train())
    finally:
        sys.set_coroutine_origin_tracking_depth(depth)
    check(ways[0], "_train_one_step", "grad_step")


def test_the_way_from_a_tools_return_to_the_move_is_short(tmp_path, monkeypatch):
    ways: list[list[Place]] = []
    moves = protocols.Move

    def move(*arguments: Any) -> protocols.Move:
        made = moves(*arguments)
        if made.reason is protocols.MoveReason.TOOL_RETURN:
            ways.append(list(stack(sys._getframe(1))))
        return made

    monkeypatch.setattr(protocols, "Move", move)
    doubles.Bench(doubles.make_config(scheduler={"policy": "random"}), tmp_path).run()
    assert ways, "no request moved after a tool's return"
    for way in ways:
        # The loop of a rollout steps the environment, and goes on once the tool has returned.
        check(way, "run", way[0].function)
