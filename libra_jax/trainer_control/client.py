"""Typed clients of the trainer and of hybrid workers' training sides. Each call has a deadline and an error sentence.

A trainer is one process, or several that train together. The programs of several processes are collectives: if a call
leaves out a process, the others wait for it. So a call goes to all processes at once, and the answer of process 0
counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.protocols import TrainerProcess, TrainingSide
from libra_jax.utils import deadlines, typed_clients

P = ParamSpec("P")
T = TypeVar("T")

MakeProcess = Callable[[int, int], protocols.ActorSpec]
"""Makes the spec of one process of a trainer, from (process, number of processes). The name is set later."""

MakeTrainer = Callable[[protocols.MeshSizes | None], MakeProcess]
"""Returns how to make the processes of a trainer on a mesh; None stands for the config's mesh."""

FIRST_ALONE: frozenset[Callable[..., Any]] = frozenset(
    {
        TrainerProcess.reserve,
        TrainerProcess.rows,
        TrainerProcess.stage_weights,
        TrainerProcess.listen,
        TrainerProcess.is_saved,
    }
)
"""Calls that go to process 0 alone: they concern the memory that it shares and the address at which it listens."""

MEET_FIRST: frozenset[Callable[..., Any]] = frozenset({TrainerProcess.start, TrainerProcess.stand_by})
"""Calls before which several processes are connected with each other, because they form one mesh."""

AT_ANY_TIME: frozenset[Callable[..., Any]] = frozenset(
    {TrainerProcess.abort_step, TrainerProcess.listen, TrainerProcess.connect, TrainerProcess.dismiss}
)
"""Calls that need no trainer lock (`protocols.Trainer`)."""

VERDICT_SECONDS = 5.0
"""Seconds that one process's error waits for the other processes' errors.

If a process is killed, its peers fail before its end is noticed. The error to report names the killed process.
"""


class TrainerProcesses:
    """The processes of one trainer. After `end`, `make` restarts the same processes.

    Args:
      cluster: makes the actors.
      make_process: returns the spec of each process.
      count: number of processes.
      name: name of a single process; several processes are named `<name>.0`, `<name>.1`, ...
      divide: gives each of several processes its part of a batch; None: each takes whole batches.

    Attributes:
      name: the given name.
      count: the given number of processes.
    """

    def __init__(
        self,
        cluster: protocols.Cluster,
        make_process: MakeProcess,
        *,
        count: int = 1,
        name: str = "trainer",
        divide: protocols.DivideBatch | None = None,
    ) -> None:
        self.name = name
        self.count = count
        self._cluster = cluster
        self._divide = divide
        names = [name] if count == 1 else [f"{name}.{process}" for process in range(count)]
        self._specs = [
            dataclasses.replace(make_process(process, count), name=actor) for process, actor in enumerate(names)
        ]
        self._actors: Sequence[protocols.ActorHandle] = ()

    async def make(self) -> None:
        """Creates all actors at once.

        Raises:
          LibraError: an actor cannot be created (`protocols.Cluster.spawn`); `stop` reaps the others.
        """
        self._actors = await deadlines.together(*(self._cluster.spawn(spec) for spec in self._specs))

    async def meet(self) -> None:
        """Connects several processes with each other."""
        await self.call_all(TrainerProcess.join, await self.first.call(TrainerProcess.reserve))

    @property
    def first(self) -> protocols.ActorHandle:
        """Process 0. Raises WorkerLost if no process has been made."""
        if not self._actors:
            raise protocols.WorkerLost(f"{self.name} has no processes: make them first")
        return self._actors[0]

    async def end(self, *, force: bool = False) -> None:
        """Ends and reaps every process, all at once because they leave together. Idempotent.

        Args:
          force: if True, kills the processes: a process whose peer is lost may wait for it forever.

        Raises:
          LibraError: a process did not end cleanly; the others have ended.
        """
        end = self._cluster.kill if force else self._cluster.stop
        if force:
            # A later call then raises WorkerLost at once, and does not wait for a killed process.
            self._actors = ()
        # Every process has to end before the first error is raised.
        results = await asyncio.gather(*(end(spec.name) for spec in self._specs), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error

    async def call_all(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Calls all processes at once, each with its own part of a batch. Returns the answer of process 0.

        Raises:
          WorkerLost: a process is gone, or no process has been made.
          LibraError: the call failed in a process. The other processes may wait for it, so no retry is possible.
        """
        # `first` raises WorkerLost if there is no process.
        actors = (self.first, *self._actors[1:])
        args_by_process = await self._arguments(args)
        # After an error the other processes may hang in a collective, so their calls are abandoned below.
        calls = [
            asyncio.ensure_future(actor.call(method, *process_args, **kwargs))
            for actor, process_args in zip(actors, args_by_process, strict=True)
        ]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if (error := await _verdict(calls)) is not None:
                raise error
            return calls[0].result()
        finally:
            for call in calls:
                deadlines.abandon(call)

    async def _arguments(self, args: tuple[Any, ...]) -> Sequence[tuple[Any, ...]]:
        """Returns the arguments of a call for each process: parts of a batch instead of the batch."""
        args_by_process = [args] * self.count
        if self._divide is None or self.count == 1:
            return args_by_process
        for place, batch in enumerate(args):
            if not isinstance(batch, protocols.TrainBatch):
                continue
            # Asked each time, because the rows change with the mesh. In a thread, because a batch may be large.
            rows = await self.first.call(TrainerProcess.rows)
            parts = await asyncio.to_thread(self._divide, batch, rows)
            if parts is not None:
                args_by_process = [
                    (*process_args[:place], part, *process_args[place + 1 :])
                    for process_args, part in zip(args_by_process, parts, strict=True)
                ]
        return args_by_process


class TrainerActorClient:
    """`protocols.TrainerClient`: the trainer, through the processes that train at the moment.

    Methods without a docstring are those of `protocols.Trainer` and `protocols.MovableTrainer`.

    Args:
      processes: the first processes; `adopt` replaces them.
      limits: the deadlines of the calls.

    Attributes:
      lock: held by the caller of each call that is not in `AT_ANY_TIME`.
      lost: error that ended the trainer; None while it lives. A lost trainer is not called.
    """

    def __init__(self, processes: TrainerProcesses, limits: config_lib.DeadlineConfig) -> None:
        self.lock = asyncio.Lock()
        self.lost: BaseException | None = None
        self._processes = processes
        self._limits = limits
        self._catching_up = False
        # Number of hand-overs and restarts, by which a late error of former processes is told from a present one.
        self._life = 0

    @property
    def name(self) -> str:
        return self._processes.name

    @property
    def processes(self) -> int:
        return self._processes.count

    # The life of the processes -----------------------------------------------------------------------------------

    async def make(self) -> None:
        """Creates the processes. Raises as `TrainerProcesses.make` does, or DeadlineMissed."""
        making = self._processes.make()
        await deadlines.limited(self._limits, "trainer_start", making, f"The making of {self.name}")

    async def stop(self, *, force: bool = False) -> None:
        """Ends and reaps the processes, by force if asked. The cluster has deadlines for that."""
        await self._processes.end(force=force)

    @contextlib.contextmanager
    def catching_up(self) -> Iterator[None]:
        """Marks a block in which restarted processes catch up. An error in the block means that they are lost.

        Calls without the lock are refused meanwhile, because the trainer does not hold its former state yet.
        """
        self.lost, self._catching_up, self._life = None, True, self._life + 1
        try:
            yield
        except BaseException as error:
            self.lost = error
            raise
        finally:
            self._catching_up = False

    def adopt(self, successor: TrainerActorClient) -> TrainerProcesses:
        """Replaces the processes by the successor's. Returns the former ones, which the caller ends."""
        former, self._processes = self._processes, successor._processes
        self.lost, self._life = None, self._life + 1
        return former

    start = typed_clients.ClientMethod("trainer_start", "start", TrainerProcess.start)
    stand_by = typed_clients.ClientMethod("trainer_start", "stand by", TrainerProcess.stand_by)

    # Training ----------------------------------------------------------------------------------------------------

    warm_start_step = typed_clients.ClientMethod("train_step", "take a warm-start step", TrainerProcess.warm_start_step)
    train_step = typed_clients.ClientMethod("train_step", "take a training step", TrainerProcess.train_step)
    accumulate = typed_clients.ClientMethod("train_step", "sum gradients of finished groups", TrainerProcess.accumulate)
    abort_step = typed_clients.ClientMethod("train_step", "abort its step", TrainerProcess.abort_step)
    policy_version = typed_clients.ClientMethod("weight_sync", "say its version", TrainerProcess.policy_version)

    # Gradient channels -------------------------------------------------------------------------------------------

    listen = typed_clients.ClientMethod("weight_sync", "open a channel", TrainerProcess.listen)
    connect = typed_clients.ClientMethod("weight_sync", "connect to a channel", TrainerProcess.connect)
    dismiss = typed_clients.ClientMethod("weight_sync", "close a channel", TrainerProcess.dismiss)

    # Weight sync -------------------------------------------------------------------------------------------------

    open_weights = typed_clients.ClientMethod("weight_sync", "open its weights", TrainerProcess.open_weights)
    stage_weights = typed_clients.ClientMethod("weight_sync", "stage weights", TrainerProcess.stage_weights)
    close_weights = typed_clients.ClientMethod("weight_sync", "close its weights", TrainerProcess.close_weights)

    # Checkpoints -------------------------------------------------------------------------------------------------

    save = typed_clients.ClientMethod("checkpoint", "begin a save", TrainerProcess.save)
    wait_saved = typed_clients.ClientMethod("checkpoint", "finish a save", TrainerProcess.wait_saved)
    restore = typed_clients.ClientMethod("checkpoint", "restore a checkpoint", TrainerProcess.restore)
    export = typed_clients.ClientMethod("checkpoint", "export its parameters", TrainerProcess.export)

    # Another mesh ------------------------------------------------------------------------------------------------

    begin_resize = typed_clients.ClientMethod("trainer_start", "begin to resize", TrainerProcess.begin_resize)
    resize_progress = typed_clients.ClientMethod(
        "trainer_start", "say how far its resize is", TrainerProcess.resize_progress
    )
    finish_resize = typed_clients.ClientMethod("trainer_start", "move to its new mesh", TrainerProcess.finish_resize)
    cancel_resize = typed_clients.ClientMethod("trainer_start", "cancel a resize", TrainerProcess.cancel_resize)
    shapes = typed_clients.ClientMethod("checkpoint", "name its programs", TrainerProcess.shapes)
    warm = typed_clients.ClientMethod("trainer_start", "compile its programs", TrainerProcess.warm)
    snapshot = typed_clients.ClientMethod("checkpoint", "begin a snapshot", TrainerProcess.snapshot)
    snapshot_saved = typed_clients.ClientMethod(
        "checkpoint", "say whether its snapshot is saved", TrainerProcess.snapshot_saved
    )
    is_saved = typed_clients.ClientMethod("checkpoint", "look for a snapshot", TrainerProcess.is_saved)

    async def _ask(
        self,
        limit: deadlines.Limit,
        what: str,
        method: Callable[Concatenate[Any, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        if self.lost is not None:
            raise protocols.TrainerLost(str(self.lost))
        if self._catching_up and method in AT_ANY_TIME:
            raise protocols.TrainerLost(f"{self.name} was lost, and is being restarted")
        if method in MEET_FIRST and self.processes > 1:
            meeting = self._processes.meet()
            await deadlines.limited(self._limits, "trainer_start", meeting, f"The meeting of {self.name}'s processes")
        life, subject = self._life, "The trainer" if self.name == "trainer" else f"The trainer {self.name}"
        processes, alone = self._processes, self._processes.count == 1 or method in FIRST_ALONE
        try:
            work = (processes.first.call if alone else processes.call_all)(method, *args, **kwargs)
            return await deadlines.limited(
                self._limits, limit, work, f"{subject}, asked to {what.format(*args, **kwargs)},"
            )
        except protocols.WorkerLost as error:
            # A late error of former processes must not condemn the present ones.
            if life == self._life:
                self.lost = self.lost or error
            raise protocols.TrainerLost(str(error)) from error


class HybridActorClient(typed_clients.ActorClient):
    """`protocols.HybridClient`: the training side of a hybrid worker, during one life of its process.

    Methods without a docstring are those of `protocols.TrainingSide`.
    """

    _start_limit = "trainer_start"

    start = typed_clients.ClientMethod("trainer_start", "start", TrainingSide.start)
    init_weight_transfer = typed_clients.ClientMethod(
        "weight_sync", "open its weight transport", TrainingSide.init_weight_transfer
    )
    start_weight_update = typed_clients.ClientMethod(
        "weight_sync", "prepare for new parameters", TrainingSide.start_weight_update
    )
    update_weights = typed_clients.ClientMethod(
        "weight_sync", "load weight chunk {0.index}", TrainingSide.update_weights
    )
    finish_weight_update = typed_clients.ClientMethod(
        "weight_sync", "finish its weight update", TrainingSide.finish_weight_update
    )
    warm = typed_clients.ClientMethod("trainer_start", "compile its gradient steps", TrainingSide.warm)
    join = typed_clients.ClientMethod("transition", "join training", TrainingSide.join)
    contribute = typed_clients.ClientMethod("train_step", "compute its share of a step", TrainingSide.contribute)
    leave = typed_clients.ClientMethod("transition", "leave training", TrainingSide.leave)


async def _verdict(calls: Sequence[asyncio.Future[Any]]) -> BaseException | None:
    """Returns the error to report: a lost process's error first, then its peers' errors, then all others.

    Returns None if no call has failed.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + VERDICT_SECONDS
    while True:
        done_calls = [call for call in calls if call.done() and not call.cancelled()]
        errors = [error for call in done_calls if (error := call.exception()) is not None]
        if not errors:
            return None
        lost = [error for error in errors if isinstance(error, protocols.WorkerLost)]
        # A peer only noticed the loss; the error of the lost process itself says what happened, but may come later.
        named = [error for error in lost if not isinstance(error, protocols.PeerLost)]
        running, timeout = {call for call in calls if not call.done()}, deadline - loop.time()
        if named or not running or timeout <= 0:
            return (named or lost or errors)[0]
        await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
