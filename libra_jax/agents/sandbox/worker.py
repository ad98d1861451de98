"""One sandbox, seen from the host: starts it, asks it one thing at a time, and kills it with everything in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from libra_jax import protocols
from libra_jax.agents import deadlines
from libra_jax.agents.sandbox import backends, cgroups, supervisor, wire
from libra_jax.agents.sandbox import limits as limits_module

GRACE_SECONDS = 3.0
"""Seconds after a call's deadline before the host kills the sandbox. The sandbox itself enforces the deadline first."""

REAP_SECONDS = 10.0
"""Seconds that the processes of a killed sandbox may take to end."""

_SIGNALS = 128
"""Exit statuses from this one on stand for signals."""

_REASON_BYTES = 2000
_SLACK_SECONDS = 1.0
_TOLD_BYTES = 65536


class Worker:
    """A running sandbox.

    `alive` is True until the sandbox is killed, breaks the protocol or ends. After that it cannot be used. `ended` is
    True if a call found that the sandbox had ended by itself.
    """

    def __init__(self, process: asyncio.subprocess.Process, launch: backends.Launch, limits: limits_module.Limits):
        self.process, self._launch, self._limits = process, launch, limits
        self.alive = True
        self.ended = False
        self._first = -1
        self._group: cgroups.Group | None = None

    @classmethod
    async def start(cls, backend: backends.Backend, limits: limits_module.Limits, parent: Path | None) -> Worker:
        """Starts a sandbox and waits until it answers.

        Args:
          backend: Backend that holds the sandbox.
          limits: Limits of the sandbox.
          parent: Control group under which the sandbox gets its own group. None for no control group.

        Raises:
          WorkerLost: The sandbox ended instead of answering, or did not answer in time.
        """
        launch = backend.launch(group=parent is not None)
        starting = asyncio.ensure_future(_process(launch))
        try:
            # Shielded: a cancelled start would kill bubblewrap alone, and the process that it cloned would wait
            # forever.
            worker = cls(await asyncio.shield(starting), launch, limits)
        except asyncio.CancelledError:
            try:
                await cls(await starting, launch, limits).close()
            except OSError:
                _discard(launch)
            raise
        except OSError as error:
            _discard(launch)
            raise protocols.WorkerLost(f"the sandbox did not start: {error}") from error
        try:
            await worker._open(parent)
        except BaseException:
            await worker.close()
            raise
        return worker

    @property
    def gone(self) -> bool:
        """Whether the sandbox's process has ended, even if the event loop does not know it yet."""
        if self.process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped a moment ago
            return True

    async def _open(self, parent: Path | None) -> None:
        assert self.process.stdout is not None
        try:
            await deadlines.within(self._limits.start_seconds, wire.receive(self.process.stdout, 0))
        except deadlines.Overdue:
            raise protocols.WorkerLost(
                f"the sandbox did not answer within {self._limits.start_seconds:g} s (sandbox.start_seconds)"
            ) from None
        except (EOFError, wire.Malformed, OSError) as error:
            raise protocols.WorkerLost(f"the sandbox did not start: {await self._reason() or error}") from error
        if self._launch.info_fd >= 0:  # bubblewrap writes it before the first process runs, so it is complete by now
            told = json.loads(os.pread(self._launch.info_fd, _TOLD_BYTES, 0))
            # Unlike an id, a pidfd never comes to mean another process.
            self._first = os.pidfd_open(int(told["child-pid"]))
            if parent is not None:
                self._join_group(parent, int(told["child-pid"]))

    def _join_group(self, parent: Path, first: int) -> None:
        try:
            self._group = cgroups.Group(parent, self._limits)
            self._group.add(first)
        except OSError as error:
            raise protocols.WorkerLost(f"the control group {parent} takes no sandbox: {error}") from error

    async def _reason(self) -> str:
        """Returns what the sandbox wrote to standard error, in one line."""
        assert self.process.stderr is not None
        with contextlib.suppress(deadlines.Overdue):
            said = await deadlines.within(_SLACK_SECONDS, self.process.stderr.read(_REASON_BYTES))
            return " ".join(said.decode(errors="replace").split())
        return ""

    async def call(
        self, kind: str, body: bytes, seconds: float, *, clean: bool = False, most: int = 0
    ) -> limits_module.Outcome:
        """Has the sandbox do one thing.

        Args:
          kind: "run" (fresh Python), "python" or "shell" (which keep their state), "edit", "load" or "save".
          body: Code, a command, a request in JSON or an archive.
          seconds: Deadline of the call in seconds.
          clean: Remove all files afterwards, because another caller may be next.
          most: Largest archive in bytes that "save" may return. The archive is then in the outcome, and its text is
            empty.

        Returns:
          The outcome. `alive` is False afterwards if the call ended the sandbox. Cancelling a call kills the sandbox.
        """
        assert self.process.stdin is not None
        loop = asyncio.get_running_loop()
        began = loop.time()
        head = json.dumps({"kind": kind, "seconds": seconds, "clean": clean, "most": most}).encode()
        try:
            self.process.stdin.write(supervisor.HEADER.pack(len(head), len(body)) + head + body)
            reply = await deadlines.within(seconds + GRACE_SECONDS, self._answer(most or self._limits.output_bytes))
        except deadlines.Overdue:
            self.kill()
            return limits_module.Outcome("timeout", f"[no end after {seconds:g} s]", loop.time() - began, "all", True)
        except (EOFError, OSError, wire.Malformed) as error:
            self.ended = not isinstance(error, wire.Malformed)
            how = "ended" if self.ended else "sent what is no answer"
            by_code = False
            if self.ended and await self._ran_out():
                how, by_code = f"ended: more than {self._limits.memory_mib} MiB of memory", True
            elif self.ended and await self._gave_up():
                how, by_code = "ended: its first process could not go on with what is in it", True
            self.kill()  # not earlier: this signal would hide the first process's own exit status
            seconds = loop.time() - began
            return limits_module.Outcome("failure", f"[the sandbox {how}]", seconds, "all", not by_code, by_code)
        except BaseException:
            self.kill()
            raise
        by_code = reply.lost == "all"
        if by_code:
            self.kill()
        if most and reply.status == "success" and not reply.left_out:
            archive = reply.head + reply.tail
            return limits_module.Outcome("success", "", loop.time() - began, reply.lost, archive=archive)
        text = reply.text()
        if most:  # no archive came: the text says why
            text = limits_module.cut(text, self._limits.output_bytes)
        if reply.note:
            text += f"{chr(10) if text and not text.endswith(chr(10)) else ''}[{reply.note}]"
        return limits_module.Outcome(reply.status, text, loop.time() - began, reply.lost, by_code=by_code)

    async def _gave_up(self) -> bool:
        """Returns whether the first process ended with its own exit status, and not by a signal from outside.

        Code in the sandbox cannot send a signal to the first process.
        """
        with contextlib.suppress(deadlines.Overdue):
            return 0 < await deadlines.within(_SLACK_SECONDS, self.process.wait()) < _SIGNALS
        return False

    async def _ran_out(self) -> bool:
        """Returns whether the sandbox ended because its code used more memory than its control group has."""
        return self._group is not None and await deadlines.off_loop(self._group.ran_out)

    async def _answer(self, most_bytes: int) -> wire.Reply:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(ConnectionError):  # the sandbox may answer and end before it has read everything
            await self.process.stdin.drain()
        return await wire.receive(self.process.stdout, most_bytes)

    def kill(self) -> None:
        """Kills every process of the sandbox. `close` then waits for their end."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            if self._first >= 0:  # the kernel ends a whole PID namespace with its first process
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            elif self.process.stdin is not None and not self._launch.remove:
                self.process.stdin.close()  # the first process sees that the host is gone, and ends what it started

    async def close(self) -> None:
        """Kills the sandbox and waits until it is gone. Idempotent.

        Raises:
          DeadlineMissed: The sandbox is not gone after `REAP_SECONDS`.
        """
        self.kill()
        if self._launch.remove:
            await self._remove()
        try:
            await deadlines.within(REAP_SECONDS / 2, self.process.wait())
        except deadlines.Overdue:
            await self._insist()
        if self._first >= 0:
            os.close(self._first)
            self._first = -1
        if self._group is not None:
            # Off the loop, because it sleeps until the kernel has released the group.
            await deadlines.off_loop(self._group.close)
        self._transports_closed()
        # A second close then finds nothing left to free.
        launch, self._launch = self._launch, backends.Launch((), {})
        await deadlines.off_loop(_discard, launch)

    async def _insist(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            # The process leads its own session, so its process group is its own too.
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            await deadlines.within(REAP_SECONDS / 2, self.process.wait())
        except deadlines.Overdue:
            raise protocols.DeadlineMissed(
                f"the sandbox of process {self.process.pid} was killed and is not gone after {REAP_SECONDS:g} s"
            ) from None

    async def _remove(self) -> None:
        remover = await asyncio.create_subprocess_exec(
            *self._launch.remove, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            await deadlines.within(REAP_SECONDS, remover.wait())
        except deadlines.Overdue:
            with contextlib.suppress(ProcessLookupError):
                remover.kill()
            raise protocols.DeadlineMissed(
                f"{' '.join(self._launch.remove)} did not end within {REAP_SECONDS:g} s: the container may still run"
            ) from None

    def _transports_closed(self) -> None:
        """Closes the pipes at once: a transport that is only collected later would warn."""
        transport: Any = getattr(self.process, "_transport", None)
        if transport is not None:
            transport.close()


async def _process(launch: backends.Launch) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *launch.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(launch.environment),
        cwd="/",
        pass_fds=launch.descriptors,
        # Its own session: `_insist` kills its process group, and a terminal's Ctrl-C does not reach it.
        start_new_session=True,
    )


def _discard(launch: backends.Launch) -> None:
    """Frees what a sandbox holds besides its processes: descriptors and its directory."""
    for descriptor in launch.descriptors:
        os.close(descriptor)
    if launch.directory:
        shutil.rmtree(launch.directory, ignore_errors=True)
