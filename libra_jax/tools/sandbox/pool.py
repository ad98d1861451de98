"""Pools of sandboxes, some of them started ahead. They run single Python calls, and sessions that keep their state.

limits = limits.Limits(seconds=5.0)
async with pool.Sandbox(limits) as sandbox:
    print((await sandbox.run("1 + 1")).text)
    async with sandbox.session() as session:
        await session.python("x = 6 * 7")
        print((await session.python("x")).text)
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import json
import logging
import shutil
import weakref
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.tools.sandbox import backends, worker
from libra_jax.tools.sandbox import limits as limits_module
from libra_jax.utils import resolving, scratch

_log = logging.getLogger(__name__)

STATE_LOST = "[a new interpreter begins: variables are lost, files are kept]"
ALL_LOST = "[a new sandbox begins: variables are lost, files are what they were at first]"
NO_OUTPUT = "[no output]"
_CLOSED = "the sandbox was closed"

LOAD_SECONDS = 60.0
"""Seconds that a sandbox may take to unpack or to save files."""

EXAMINATION_OUTPUT_BYTES = 2**23
"""Bytes of output of an examination. A test report has to arrive complete, so this is larger than a policy's limit."""


class NotUnpacked(protocols.WorkerLost):
    """Files could not be unpacked in a sandbox that was started to examine them."""


class Sandbox(contextlib.AbstractAsyncContextManager["Sandbox"]):
    """Runs untrusted code. Create it inside a coroutine and use it as `async with`.

    Not thread-safe: it belongs to one event loop. Every sandbox dies with the thread that runs this loop.

    Attributes:
      limits: Limits of each sandbox.
      door: Folder of the host that each sandbox sees at `door_place`. A sandbox may connect to Unix sockets in it.
    """

    def __init__(
        self,
        limits: limits_module.Limits | None = None,
        backend: str = "bubblewrap",
        *,
        allow_unsafe: bool = False,
        warm: int = 2,
        most: int = 64,
        workspace: str = "",
        packages: tuple[str, ...] = (),
        image: str = "",
    ) -> None:
        """Checks the arguments. Nothing is started yet.

        Args:
          limits: Limits of each sandbox. None means the defaults.
          backend: "bubblewrap", "container" or "none".
          allow_unsafe: Permits "none", which contains nothing.
          warm: Number of sandboxes kept ready, so that calls need not wait for a start.
          most: Number of sandboxes in use at once, besides those kept ready. Further calls wait. Only one session that
            takes its sandbox beforehand (`SandboxSession.ready`) waits in this line at a time.
          workspace: A directory of the host. Each session starts with a copy of its files. Empty for an empty
            workspace.
          packages: Directories of Python modules that code may import, read-only.
          image: Container image with Python 3.11 and bash, for the backend "container".
        """
        config_lib.check(0 < warm <= most, "sandbox.warm", f"must lie in 1..sandbox.most = {most}, not {warm}")
        self.limits = limits or limits_module.Limits()
        # Sockets in this folder are a sandbox's only way out. Sandboxes see it read-only, and this user alone writes.
        self.door = scratch.folder("door")
        self.door.chmod(0o755)
        # Also for a pool that is never started, as those of a dry run.
        weakref.finalize(self, shutil.rmtree, self.door, ignore_errors=True)
        self._backend = backends.make(
            backend, self.limits, packages, image, allow_unsafe=allow_unsafe, door=str(self.door)
        )
        # Examinations of a policy's files have larger limits, so what fits a policy's sandbox fits theirs.
        grown = ("cpu_seconds", "memory_mib", "processes", "file_mib", "workspace_mib", "files")
        more = {name: 2 * getattr(self.limits, name) for name in grown}
        self._examining = dataclasses.replace(self.limits, output_bytes=EXAMINATION_OUTPUT_BYTES, **more)
        # A second backend, because the limits of a backend are fixed when it is made.
        self._examiner = backends.make(backend, self._examining, packages, image, allow_unsafe=allow_unsafe)
        self._name = backend
        self._files = worker.pack(Path(workspace), self.limits.workspace_mib) if workspace else b""
        self._warm = warm
        self._places = asyncio.Semaphore(most)
        # Held by the only waiter without a deadline, so that calls with a deadline are served in between.
        self._patient = asyncio.Lock()
        self._idle: collections.deque[worker.SandboxWorker] = collections.deque()
        self._live: set[worker.SandboxWorker] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._coming = 0  # sandboxes that are being started to be kept ready
        self._parent: Path | None = None
        self._closed = False
        self._faults = resolving.FirstFew(lambda sentence: _log.warning("%s", sentence))

    @property
    def door_place(self) -> str:
        """Where a sandbox finds the folder `door`. Empty if sandboxes have the host's network and need none."""
        return self._backend.door_place

    async def __aenter__(self) -> Sandbox:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the warm sandboxes. The first one tells whether sandboxes work here, and in a control group."""
        try:
            # A delegated group can still refuse processes: the second try goes without one.
            for parent in dict.fromkeys((limits_module.delegated(), None)):
                self._parent = parent
                try:
                    self._idle.append(await self._begin())
                    break
                except protocols.WorkerLost as error:
                    if parent is None:
                        raise protocols.ConfigError(
                            f"config.sandbox.backend: {error}; see that this machine lets {self._name} start "
                            "(bubblewrap needs user namespaces), or choose another backend"
                        ) from error
            # The others start side by side, now that the first has shown that sandboxes work here.
            self._idle += await asyncio.gather(*(self._begin() for _ in range(self._warm - 1)))
            _warn_once(tuple(self._backend.caveats(group=self._parent is not None)))
        except BaseException:
            await self.close()
            raise

    async def run(self, code: str, seconds: float | None = None) -> limits_module.SandboxOutcome:
        """Runs Python code in its own process, in an empty workspace. Nothing remains for the next call.

        Args:
          code: Code to run. The value of a last expression is shown.
          seconds: Deadline of the call in seconds. None means `Limits.seconds`.

        Raises:
          WorkerLost: No sandbox could be started.
          DeadlineMissed: No sandbox became free within `Limits.start_seconds`.
          ConfigError: `seconds` is not positive.
        """
        refused, allowed = self.too_long(code), self.limits.of_call(seconds)
        if refused is not None:
            return refused
        loan = await self.take()
        try:
            # Cleaned afterwards, because the sandbox serves another caller next.
            outcome = await loan.call("run", code.encode(errors="replace"), allowed, clean=True)
        finally:
            self.give_back(loan)
        return _with_loss_note(outcome, "")

    async def examine(self, files: bytes, code: str, seconds: float | None = None) -> limits_module.SandboxOutcome:
        """Runs Python code over an archive's files, in a sandbox that is used for this alone.

        Its limits are twice those of a policy's sandbox, and its output may take `EXAMINATION_OUTPUT_BYTES`.

        Args:
          files: A tar. The workspace begins with its files.
          code: Code to run, of any length: the caller wrote it. The files that it runs may be a policy's.
          seconds: Deadline of the run in seconds. None means `Limits.seconds`.

        Raises:
          NotUnpacked: The files could not be unpacked within `LOAD_SECONDS` and the sandbox's limits.
          WorkerLost: No sandbox could be started, or it died while unpacking. The files cannot cause such a death.
          DeadlineMissed: No sandbox became free within `Limits.start_seconds`.
        """
        loan = await self.take(examining=True)
        try:
            unpacked = await loan.call("load", files, LOAD_SECONDS)
            # None of the files has been run yet, so the files are not to blame.
            if unpacked.broken and unpacked.status != "timeout":
                raise protocols.WorkerLost(f"a sandbox died while files were unpacked: {unpacked.text}")
            if unpacked.status != "success":
                raise NotUnpacked(f"a sandbox's files could not be unpacked: {unpacked.text}")
            return await loan.call("run", code.encode(), self.limits.of_call(seconds))
        finally:
            self.give_back(loan, used=True)

    def session(self) -> SandboxSession:
        """Returns a sandbox that keeps state and files over calls. Use it as `async with`, or close it."""
        return SandboxSession(self, self._files)

    async def close(self) -> None:
        """Ends every sandbox, including those of open sessions.

        Raises:
          DeadlineMissed: A sandbox could not be killed. All others are gone.
        """
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._idle.clear()
        # A sandbox that cannot be killed must not keep the others from being closed.
        results = await asyncio.gather(*(live.close() for live in self._live), return_exceptions=True)
        self._live.clear()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def too_long(self, text: str) -> limits_module.SandboxOutcome | None:
        """Returns the failure of a call whose text is longer than the limit. None if the text is short enough."""
        # Every character has at least one byte, so the first comparison saves encoding a huge text.
        if len(text) <= self.limits.input_bytes and len(text.encode(errors="replace")) <= self.limits.input_bytes:
            return None
        return limits_module.SandboxOutcome("failure", f"[longer than {self.limits.input_bytes} bytes: not run]", 0.0)

    async def take(self, *, examining: bool = False, patient: bool = False) -> worker.SandboxWorker:
        """Returns a sandbox for the caller alone. The caller gives it back with `give_back`.

        Args:
          examining: Start a new sandbox under the limits of examinations. Warm sandboxes have a policy's limits.
          patient: Wait without a deadline for a place. The caller bounds the wait.
        """
        if self._closed:
            raise protocols.WorkerLost(_CLOSED)
        if patient:
            async with self._patient:
                await self._places.acquire()
        else:
            # Not in a task: if the caller were cancelled after the task's end, no one would release the place.
            try:
                async with asyncio.timeout(self.limits.start_seconds):
                    await self._places.acquire()
            except TimeoutError:
                raise protocols.DeadlineMissed(
                    f"no sandbox became free within {self.limits.start_seconds:g} s (sandbox.start_seconds); "
                    "raise sandbox.most, or let fewer calls run at once"
                ) from None
        try:
            if self._closed:  # the pool may have been closed during a long wait
                raise protocols.WorkerLost(_CLOSED)
            while self._idle and not examining:
                loan = self._idle.popleft()
                if loan.alive and not loan.gone:
                    # Died while it was idle and before `_watch` noticed.
                    return loan
                self._retire(loan)
            return await self._begin(examining=examining)
        except BaseException:
            self._places.release()
            raise
        finally:
            # Also if nothing was lent: a warm sandbox may have been found dead.
            self._top_up()

    def give_back(self, loan: worker.SandboxWorker, *, used: bool = False) -> None:
        """Ends a loan. A sandbox that is `used` or dead is retired. Any other may serve the next call."""
        self._places.release()
        # Beyond `warm`, sandboxes of a burst of calls would hold memory until the end of the run.
        if used or not loan.alive or loan.gone or self._closed or len(self._idle) >= self._warm:
            self._retire(loan)
        else:
            self._idle.append(loan)
        self._top_up()

    async def _begin(self, *, examining: bool = False) -> worker.SandboxWorker:
        backend, limits = (self._examiner, self._examining) if examining else (self._backend, self.limits)
        new_worker = await worker.SandboxWorker.start(backend, limits, self._parent)
        self._live.add(new_worker)
        self._spawn(self._watch(new_worker))
        return new_worker

    async def _watch(self, ready_worker: worker.SandboxWorker) -> None:
        """Retires a sandbox that ends while it is kept ready. The next loan starts its replacement, not this task.

        If something ended every sandbox, an immediate replacement would start and end without pause. The task lasts as
        long as the sandbox, which ends in `close` at the latest.
        """
        await ready_worker.process.wait()
        if ready_worker in self._idle:
            self._idle.remove(ready_worker)
            self._retire(ready_worker)

    def _top_up(self) -> None:
        """Starts another sandbox in the background if fewer than `warm` are ready or starting."""
        if self._closed or len(self._idle) + self._coming >= self._warm:
            return

        async def refill() -> None:
            try:
                self._idle.append(await self._begin())
            except Exception as error:
                self._faults.tell(
                    f"A sandbox that was to be kept ready did not start ({error}); who needs one starts it"
                )
            finally:
                self._coming -= 1

        self._coming += 1
        self._spawn(refill())

    def _retire(self, dead: worker.SandboxWorker) -> None:
        if dead.has_ended or (dead.alive and dead.gone):  # it ended by itself: no one here killed it
            self._faults.tell(f"The sandbox of process {dead.process.pid} ended of itself; another takes its place")
        dead.kill()
        if not self._closed:  # otherwise `close` waits for it

            async def bury() -> None:
                # If it cannot be killed, it stays in `_live`, and `close` tries again and tells.
                with contextlib.suppress(protocols.LibraError, OSError):
                    await dead.close()
                    self._live.discard(dead)

            self._spawn(bury())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        # asyncio itself keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclasses.dataclass(eq=False)
class SandboxSession(contextlib.AbstractAsyncContextManager["SandboxSession"]):
    """A workspace, a Python interpreter and a shell for one trajectory. Calls run one at a time; others wait.

    `Sandbox.session` makes it, with the pool and the files that the workspace starts with.
    """

    _sandbox: Sandbox
    _files: bytes
    _worker: worker.SandboxWorker | None = dataclasses.field(default=None, init=False)
    _turn: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock, init=False)
    # True if a call was cancelled, and no later outcome has reported yet that its state was lost.
    _untold: bool = dataclasses.field(default=False, init=False)
    _closed: bool = dataclasses.field(default=False, init=False)

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def python(self, code: str, seconds: float | None = None) -> limits_module.SandboxOutcome:
        """Runs code in the interpreter and shows the value of a last expression. Raises like `Sandbox.run`."""
        return await self._call("python", code, seconds)

    async def shell(self, command: str, seconds: float | None = None) -> limits_module.SandboxOutcome:
        """Runs a command in the shell. Its processes end with the call. Raises like `Sandbox.run`."""
        return await self._call("shell", command, seconds)

    async def run(self, code: str, seconds: float | None = None) -> limits_module.SandboxOutcome:
        """Runs code in a process of its own, which may become another program. Raises like `Sandbox.run`."""
        return await self._call("run", code, seconds)

    async def edit(self, request: Mapping[str, Any], seconds: float | None = None) -> limits_module.SandboxOutcome:
        """Views, creates or changes a file; `tools/workspace.py` documents the fields. Raises like `Sandbox.run`."""
        return await self._call("edit", json.dumps(dict(request)), seconds)

    async def ready(self) -> None:
        """Takes the session's sandbox now, so that no later call waits. The wait for a free place has no deadline.

        Raises:
          WorkerLost: No sandbox could be started, or the files could not be unpacked.
        """
        async with self._turn:
            await self._ready(patient=True)

    async def begin(self, files: bytes) -> None:
        """Unpacks a tar into the workspace. If the sandbox is lost, its replacement starts with the same files."""
        self._files = files
        async with self._turn:
            # Without a sandbox yet, the first call unpacks the files into the one that it takes.
            if self._worker is not None:
                await self._unpack(self._worker)

    async def save(self, most_bytes: int) -> limits_module.SandboxOutcome:
        """Returns the workspace's current regular files as a tar, in the outcome's `archive`.

        Links, pipes and devices are left out. Before the first call, the archive is the one that the workspace starts
        with. A workspace larger than `most_bytes` is a failure. Readers must treat the archive as untrusted.
        """
        async with self._turn:
            if self._worker is None:
                return limits_module.SandboxOutcome("success", "", 0.0, archive=self._files)
            loan = self._worker
            try:
                return await loan.call(
                    "save", json.dumps(most_bytes).encode(), LOAD_SECONDS, max_archive_bytes=most_bytes
                )
            finally:
                if not loan.alive:
                    self._drop()

    async def close(self) -> None:
        """Ends the sandbox and everything in it. Idempotent."""
        self._closed = True
        self._drop()

    async def _call(self, kind: str, text: str, seconds: float | None) -> limits_module.SandboxOutcome:
        refused, allowed = self._sandbox.too_long(text), self._sandbox.limits.of_call(seconds)
        if refused is not None:
            return refused
        async with self._turn:
            loan = await self._ready()
            try:
                outcome = await loan.call(kind, text.encode(errors="replace"), allowed)
            except BaseException:
                self._untold = True
                raise
            finally:
                if not loan.alive:
                    self._drop()
            if self._untold:
                outcome, self._untold = dataclasses.replace(outcome, lost="all"), False
        return _with_loss_note(outcome, {"state": STATE_LOST, "all": ALL_LOST}.get(outcome.lost, ""))

    async def _ready(self, *, patient: bool = False) -> worker.SandboxWorker:
        if self._closed:
            raise protocols.WorkerLost("the session was closed")
        if self._worker is None:
            loan = await self._sandbox.take(patient=patient)
            if self._closed:  # closed during the wait
                self._sandbox.give_back(loan)
                raise protocols.WorkerLost("the session was closed")
            self._worker = loan
            if self._files:
                await self._unpack(self._worker)
        return self._worker

    async def _unpack(self, loan: worker.SandboxWorker) -> None:
        try:
            outcome = await loan.call("load", self._files, LOAD_SECONDS)
        except BaseException:
            self._drop()
            raise
        if outcome.status != "success":
            self._drop()
            raise protocols.WorkerLost(f"the session's files could not be unpacked in its sandbox: {outcome.text}")

    def _drop(self) -> None:
        loan, self._worker = self._worker, None
        if loan is not None:
            # What the policy left in it must not reach another trajectory.
            self._sandbox.give_back(loan, used=True)


@functools.cache  # a run has several pools, and one warning is enough
def _warn_once(caveats: tuple[str, ...]) -> None:
    if caveats:
        sentences = ". ".join(text[:1].upper() + text[1:] for text in caveats)
        _log.warning("Sandboxes are limited only roughly here. %s.", sentences)


def _with_loss_note(outcome: limits_module.SandboxOutcome, lost: str) -> limits_module.SandboxOutcome:
    """Returns the outcome as the policy reads it: with a note on what was lost, and never with an empty text."""
    text = outcome.text
    if lost:
        text += ("\n" if text and not text.endswith("\n") else "") + lost
    return dataclasses.replace(outcome, text=text or NO_OUTPUT)
