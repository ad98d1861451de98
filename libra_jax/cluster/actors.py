"""The common part of both backends: makes an actor from its spec, calls it, and turns errors into one sentence.

An actor is any object; its handle can call its public methods. The kind of a method decides where it runs:

- *sync* methods run on the actor's own thread, always the same thread (JAX's mesh contexts are thread-local);
- *async* methods run on the event loop and interleave;
- *stream* methods (async generators) run on the event loop in one task each. The task reads a little ahead, so that
  an actor never waits for the round trip to its caller.

An actor with only sync methods is also made on its thread; any other actor is made on the event loop.
"""

from __future__ import annotations

import asyncio
import collections
import collections.abc
import concurrent.futures
import contextlib
import contextvars
import functools
import importlib
import inspect
import queue
import threading
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

from libra_jax.protocols import ActorAddress, ActorSpec, ConfigError, DeadlineMissed, LibraError, WorkerLost
from libra_jax.utils import deadlines, user_code

P = ParamSpec("P")
T = TypeVar("T")

MethodKind = Literal["sync", "async", "stream"]

READ_AHEAD = 64
"""Maximum unread items of a stream before the actor's generator is held back."""

_LONGEST_MESSAGE = 400
_CANCEL_SECONDS = 5.0  # for cancelled async work to unwind at stop


def resolve(spec: ActorSpec) -> Callable[..., Any]:
    """Returns the callable that `spec.factory` names.

    Raises:
      ConfigError: the name is malformed, its module cannot be imported, or the module lacks it.
    """
    module_name, _, attribute = spec.factory.partition(":")
    where = f"actor {spec.name!r}: factory {spec.factory!r}"
    if not module_name or not attribute:
        raise ConfigError(f'{where} must have the form "package.module:callable"')
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(f"{where}: module {module_name!r} cannot be imported ({summary(error)})") from error
    # A dot names an attribute of a class, such as an alternative constructor.
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"{where}: module {module_name!r} has no {attribute!r}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{where} is a {type(target).__name__}, not something that can be called")
    return target


def methods_of(actor: Any) -> dict[str, MethodKind]:
    """Returns the kinds of an actor's public methods by name, without running its properties. Takes a class, too."""
    streams = (collections.abc.AsyncIterator, collections.abc.AsyncGenerator, collections.abc.AsyncIterable)
    kinds: dict[str, MethodKind] = {}
    for name in dir(actor):
        if name.startswith("_") or isinstance(inspect.getattr_static(actor, name), property):
            continue
        member = getattr(actor, name)
        if not inspect.isroutine(member):
            continue
        if inspect.isasyncgenfunction(member):
            kinds[name] = "stream"
        elif inspect.iscoroutinefunction(member):
            kinds[name] = "async"
        else:
            # A plain function that returns an async iterator is a stream too; only its annotation says so.
            kinds[name] = "stream" if typing.get_origin(_returned(member)) in streams else "sync"
    return kinds


def made_on_loop(factory: Callable[..., Any]) -> bool:
    """Returns True if the factory must run on the event loop: it is async, or makes an actor with async methods.

    A plain function declares its actor by the return annotation. Without a concrete class there, it runs on the thread.
    """
    if inspect.iscoroutinefunction(factory):
        return True
    actor_type = factory if inspect.isclass(factory) else _returned(factory)
    # A protocol's methods are async for every implementation, so they tell nothing about the actor that is made.
    if not inspect.isclass(actor_type) or getattr(actor_type, "_is_protocol", False):
        return False
    return any(kind != "sync" for kind in methods_of(actor_type).values())


def _returned(function: Callable[..., Any]) -> Any:
    """Returns the type that a function's annotation promises; None if it cannot be read."""
    try:
        return typing.get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):
        return None


def summary(error: BaseException) -> str:
    """Returns `Type: message` on one line, cut to a readable length."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[:_LONGEST_MESSAGE]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def lost(actor: str, why: str) -> WorkerLost:
    """Returns the error of every call to an actor that is gone."""
    return WorkerLost(f"actor {actor!r} {why}; restart it to go on")


class ActorThread:
    """One daemon thread that runs the given functions in order.

    Not a ThreadPoolExecutor, because the interpreter joins its threads at exit: one hanging method would keep the
    process alive forever.
    """

    def __init__(self, name: str) -> None:
        self.running = ""
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], Any], concurrent.futures.Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            what, function, future = job
            # Cancelled while it was queued.
            if not future.set_running_or_notify_cancel():
                continue
            self.running = what
            try:
                future.set_result(function())
            except BaseException as error:  # the caller's loop must live, and this thread
                future.set_exception(user_code.for_future(error))
            self.running = ""
            del job, function, future  # frees their arrays and batches now, not at the next call

    def submit(self, what: str, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Queues the function, which runs in the caller's context. The future belongs to the running event loop."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        # A context variable of the caller, as its place in a queue (`turns`), holds in the function, too.
        context = contextvars.copy_context()
        self._jobs.put((what, functools.partial(context.run, function), future))
        return asyncio.wrap_future(future)

    def drop_waiting(self) -> None:
        """Cancels the queued functions that have not begun."""
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job[2].cancel()

    def close(self) -> None:
        """Ends the thread after the queued functions."""
        self._jobs.put(None)


class Pump:
    """Reads an async iterator in its own task, at most `READ_AHEAD` items ahead of its reader."""

    def __init__(self, iterator: AsyncIterator[Any]) -> None:
        self._iterator = iterator
        self._items: collections.deque[Any] = collections.deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run())
        self.task.add_done_callback(lambda _: self._changed.set())

    async def _run(self) -> None:
        try:
            async for item in self._iterator:
                self._items.append(item)
                self._changed.set()
                if len(self._items) >= READ_AHEAD:
                    self._room.clear()
                    await self._room.wait()
        finally:
            # Closed here, in the task that read it, because its context managers belong to this task.
            if isinstance(self._iterator, AsyncGenerator):
                await self._iterator.aclose()

    async def take(self) -> list[Any]:
        """Returns all items since the last call, at least one; empty at the end. Raises the iterator's error."""
        while not self._items:
            if self.task.done():
                self.task.result()
                return []
            self._changed.clear()
            await self._changed.wait()
        items = list(self._items)
        self._items.clear()
        # All items were taken at once, so there is room for READ_AHEAD again.
        self._room.set()
        return items

    async def close(self) -> None:
        """Cancels the reading task; returns when the iterator has been closed."""
        await deadlines.cancel_all((self.task,))


@dataclass(eq=False)
class ActorHost:
    """An actor, its thread and its running calls. Lives in the process and on the event loop that run the actor.

    Attributes:
      surroundings: entered while the actor's `start` runs.
      methods: public methods of the actor, once it is made.
    """

    spec: ActorSpec
    surroundings: Callable[[], contextlib.AbstractAsyncContextManager[None]] = contextlib.nullcontext
    methods: dict[str, MethodKind] = field(default_factory=dict, init=False)
    _actor: Any = field(default=None, init=False)
    _thread: ActorThread | None = field(default=None, init=False)
    _work: set[asyncio.Future[Any]] = field(default_factory=set, init=False)
    _stopped: bool = field(default=False, init=False)

    async def make(self) -> dict[str, MethodKind]:
        """Runs the factory; returns the methods that a handle may call.

        Raises:
          ConfigError: the factory cannot be found.
          LibraError: the factory failed.
        """
        factory = resolve(self.spec)
        function = functools.partial(factory, **self.spec.arguments)
        what = f"factory {self.spec.factory!r}"
        try:
            with self._running(what):
                if made_on_loop(factory):
                    actor = function()
                    self._actor = await actor if inspect.isawaitable(actor) else actor
                else:
                    self._actor = await self._on_thread(what, function)
        except BaseException:
            if self._thread is not None:
                self._thread.close()
            raise
        self.methods = methods_of(self._actor)
        return self.methods

    def _on_thread(self, what: str, function: Callable[[], Any]) -> asyncio.Future[Any]:
        # The thread exists only from its first job on: an actor with async methods alone needs none.
        if self._thread is None:
            self._thread = ActorThread(f"actor-{self.spec.name}")
        return self._thread.submit(what, function)

    @contextlib.contextmanager
    def _running(self, what: str) -> Iterator[None]:
        """Turns errors of the actor's code, except LibraError, into one sentence that names the actor and the work.

        Raises:
          WorkerLost: the work was cancelled, but not by its caller.
          LibraError: the work failed.
        """
        try:
            yield
        except LibraError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            why = "was stopped during the call" if self._stopped else "cancelled the call"
            raise lost(self.spec.name, why) from None
        except (Exception, SystemExit) as error:
            raise LibraError(
                f"actor {self.spec.name!r}: {what} failed with {summary(user_code.original(error))}"
            ) from error

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of a sync or async method.

        Raises:
          WorkerLost: the actor was stopped, before or during the call.
          LibraError: the method raised an error.
        """
        async with self.surroundings() if method == "start" else contextlib.nullcontext():
            # Looked at only here: the actor may be stopped while a start waits for its turn at the environment.
            if self._stopped:
                raise lost(self.spec.name, "has been stopped")
            function = functools.partial(getattr(self._actor, method), *args, **kwargs)
            if self.methods[method] == "sync":
                work = self._on_thread(method, function)
            else:
                work = asyncio.ensure_future(function())
            self._work.add(work)
            try:
                with self._running(method):
                    return await work
            finally:
                self._work.discard(work)

    def open(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Pump:
        """Starts a stream method. The caller reads the pump with `take` and must close it.

        Raises:
          WorkerLost: the actor was stopped.
        """
        if self._stopped:
            raise lost(self.spec.name, "has been stopped")
        pump = Pump(getattr(self._actor, method)(*args, **kwargs))
        self._work.add(pump.task)
        pump.task.add_done_callback(self._work.discard)
        return pump

    async def take(self, pump: Pump, method: str) -> list[Any]:
        """Returns all items of a stream that have arrived; empty at its end. Raises the same errors as `call`."""
        with self._running(method):
            return await pump.take()

    async def stop(self, seconds: float) -> None:
        """Calls the actor's `shutdown` after its current sync method. Ends every other call with WorkerLost.

        Raises:
          DeadlineMissed: a call still ran after `seconds`; the message names the call, which is left behind.
          LibraError: `shutdown` failed.
        """
        if self._stopped:
            return
        self._stopped = True
        work = set(self._work)
        if self._thread is not None:
            # Queued calls would delay `shutdown`; only the running call may finish.
            self._thread.drop_waiting()
        ending = asyncio.ensure_future(self._end())
        try:
            with self._running("shutdown"):
                _, late = await asyncio.wait({ending}, timeout=seconds)
                if late:
                    what = (self._thread.running if self._thread else "") or "shutdown"
                    raise DeadlineMissed(
                        f"actor {self.spec.name!r} was still in {what!r} {seconds:g} s after it was asked to stop; "
                        "raise config.deadlines.shutdown if it needs longer"
                    )
                ending.result()
        finally:
            work.add(ending)
            await deadlines.cancel_all(work, _CANCEL_SECONDS)
            if self._thread is not None:
                self._thread.close()
            self._actor = None

    async def _end(self) -> None:
        if "shutdown" in self.methods:
            ending = self._actor.shutdown
            await (self._on_thread("shutdown", ending) if self.methods["shutdown"] == "sync" else ending())
        if self._thread is not None:
            # An empty job behind `shutdown`: when it has run, the thread is idle even if `shutdown` is async.
            await self._thread.submit("shutdown", lambda: None)


class Handle:
    """`protocols.ActorHandle` of an actor that a backend made.

    Args:
      kinds: public methods of the actor.
      call: runs a sync or async method by its name.
      stream: runs a stream method by its name.
      address: place of the actor for other processes; None: this handle, because there are none.
    """

    def __init__(
        self,
        name: str,
        kinds: Mapping[str, MethodKind],
        call: Callable[..., Awaitable[Any]],
        stream: Callable[..., AsyncGenerator[Any, None]],
        address: ActorAddress | None = None,
    ) -> None:
        self.name = name
        self._address = address
        self._kinds = kinds
        self._call = call
        self._stream = stream

    @property
    def address(self) -> ActorAddress:
        """Place of the actor, for other processes."""
        return self._address or self

    def handle(self) -> Handle:
        """Returns the handle itself: an actor of this process."""
        return self

    async def call(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Returns the result of a sync or async method.

        Raises:
          AttributeError: the actor has no such public method.
        """
        return cast(T, await self._call(self._method_name(method), *args, **kwargs))

    def stream(
        self, method: Callable[Concatenate[Any, P], AsyncIterator[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[T, None]:
        """Yields the items of a stream method. Raises the same errors as `call`."""
        return cast(AsyncGenerator[T, None], self._stream(self._method_name(method), *args, **kwargs))

    def _method_name(self, method: Callable[..., Any]) -> str:
        # By name: a protocol's function stands for the method of the actor, which need not be its subclass.
        if method.__name__ not in self._kinds:
            raise AttributeError(f"actor {self.name!r} has no public method {method.__name__!r}")
        return method.__name__


def check_name_free(name: str, names: Collection[str]) -> None:
    """Raises LibraError if an actor of that name lives."""
    if name in names:
        raise LibraError(f"actor {name!r} exists already; stop it before another takes its name")


async def stop_all(stop: Callable[[str], Awaitable[None]], names: Collection[str]) -> None:
    """Stops all named actors, the last first, even if some fail; then raises one error for all failures.

    Processes of one set (`<name>.0`, `<name>.1`, ...: `trainer_control.client`) stop together. Each waits for the
    others before it leaves, so a process stopped alone would wait until its deadline.
    """
    sets: dict[str, list[str]] = {}
    for name in reversed(list(names)):
        stem, dot, number = name.rpartition(".")
        sets.setdefault(stem if dot and number.isdecimal() else name, []).append(name)
    errors = []
    for together in sets.values():
        for error in await asyncio.gather(*map(stop, together), return_exceptions=True):
            if isinstance(error, LibraError):
                errors.append(error)
            elif error is not None:
                raise error
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise LibraError("; ".join(str(error) for error in errors)) from errors[0]
