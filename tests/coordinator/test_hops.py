"""A reader's path through one toy step: from the batch to its gradient, and from a tool's return to the move.

A hop is a call. The path is read off a run: up the stack of the thread that computes and then, across threads and
tasks, to the function in which each awaited coroutine was called (`cr_origin`). Pass-through functions, which only run
the work that they are given (`deadlines.within`, `Ending.race`, an actor's thread), do not count.
"""

from __future__ import annotations

import asyncio
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any, NamedTuple

import pytest

import libra_jax
from configs import simulate
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.training import step

HOPS, FILES = 10, 6
"""Maximum calls on a path, and maximum files that hold its functions."""

LIBRARY = Path(libra_jax.__file__).parent

Coroutine = typing.Coroutine[Any, Any, Any]


class Place(NamedTuple):
    """A function on the path."""

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


def waiting(tasks: set[asyncio.Task[Any]]) -> dict[Place, list[Coroutine]]:
    """Every coroutine of every task that waits, by its function."""
    found: dict[Place, list[Coroutine]] = {}
    for task in tasks:
        coroutine: Any = task.get_coro()
        while isinstance(coroutine, CoroutineType):
            found.setdefault(Place(coroutine.cr_code.co_filename, coroutine.cr_code.co_name), []).append(coroutine)
            coroutine = coroutine.cr_await
    return found


def callers(called: Coroutine, coroutines: dict[Place, list[Coroutine]]) -> Iterator[Place]:
    """The functions through which a coroutine was called, itself first."""
    while True:
        place = Place(called.cr_code.co_filename, called.cr_code.co_name)
        if not place.ours:
            return
        yield place
        # Methods of two classes may share a name: each coroutine is on the path once.
        coroutines[place].remove(called)
        for file, _, function in called.cr_origin or ():
            caller = Place(file, function)
            if coroutines.get(caller):
                called = coroutines[caller][0]
                break
            if caller.ours:  # a plain function between two coroutines
                yield caller
        else:
            return


def check(path: Sequence[Place], first: str, last: str) -> None:
    """Checks the part of a path, innermost function first, that lies between two functions."""
    names = [place.function for place in path]
    path = path[names.index(last) : names.index(first) + 1][::-1]
    files = list(dict.fromkeys(place.file for place in path))
    told = "\n".join(f"{Path(place.file).relative_to(LIBRARY)}: {place.function}" for place in path)
    print(f"{len(path) - 1} hops in {len(files)} files\n{told}")
    assert len(path) - 1 <= HOPS, told
    assert len(files) <= FILES, told


@pytest.mark.slow
def test_the_path_from_a_batch_to_its_gradient_is_short(tmp_path, monkeypatch):
    run = config_lib.RunConfig(name="toy", steps=1)
    run.rollout.engine, run.rollout.max_context, run.rollout.max_tokens = "fake", 128, 16
    run.trainer.platform, run.trainer.row_tokens = "cpu", 128
    run.coordinator.groups_per_step, run.coordinator.group_size = 1, 2
    run.checkpoint.every = 0
    run.evaluation.every, run.telemetry.tensorboard, run.telemetry.report = 0, False, False
    paths: list[list[Place]] = []
    computes = step.Programs.grad_step

    async def train() -> None:
        loop = asyncio.get_running_loop()

        def grad_step(*arguments: Any) -> Any:
            coroutines = waiting(asyncio.all_tasks(loop))
            # The innermost coroutine that waits for the trainer's thread.
            *_, actor = [
                coroutine
                for place, found in coroutines.items()
                for coroutine in found
                if place.file.endswith("actors.py") and coroutine.cr_frame.f_locals.get("method") == "train_step"
            ]
            on_thread = list(stack(sys._getframe(1)))
            on_thread = on_thread[: [place.function for place in on_thread].index("train_step") + 1]
            gradient = Place(computes.__code__.co_filename, "grad_step")
            paths.append([gradient, *on_thread, *callers(actor, coroutines)])
            return computes(*arguments)

        monkeypatch.setattr(step.Programs, "grad_step", grad_step)
        await libra_jax.train_async(run, tasks=[{"prompt": "1+1", "answer": "2"}], workdir=tmp_path / "run")

    depth = sys.get_coroutine_origin_tracking_depth()
    sys.set_coroutine_origin_tracking_depth(30)
    try:
        asyncio.run(train())
    finally:
        sys.set_coroutine_origin_tracking_depth(depth)
    check(paths[0], "_train_one_step", "grad_step")


def test_the_path_from_a_tools_return_to_the_move_is_short(monkeypatch):
    paths: list[list[Place]] = []
    moves = protocols.Move

    def move(*arguments: Any, **named: Any) -> protocols.Move:
        made = moves(*arguments, **named)
        if made.reason is protocols.MoveReason.TOOL_RETURN:
            paths.append(list(stack(sys._getframe(1))))
        return made

    monkeypatch.setattr(protocols, "Move", move)
    run = simulate.get_config()
    run.steps, run.coordinator.groups_per_step = 1, 4
    libra_jax.simulate(run, policies=("cmlfq",))
    assert paths, "no request moved after a tool's return"
    for path in paths:
        # The loop of a rollout steps the environment, and goes on once the tool has returned.
        check(path, "run", path[0].function)
