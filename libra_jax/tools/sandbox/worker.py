"""One sandbox, seen from the host: starts it, asks it one thing at a time, and kills it with everything in it.

Frames in both directions have a JSON head and a body of plain bytes, both of bounded size. Code in the sandbox may send
anything. An invalid reply raises `Malformed`, and its sandbox is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.tools.sandbox import backends, supervisor
from libra_jax.tools.sandbox import limits as limits_module
from libra_jax.utils import deadlines, processes, scratch

GRACE_SECONDS = 3.0
"""Seconds after a call's deadline before the host kills the sandbox. The sandbox itself enforces the deadline first."""

REAP_SECONDS = 10.0
"""Seconds that the processes of a killed sandbox may take to end."""

_SIGNALS = 128
"""Exit statuses from this one on stand for signals."""

_REASON_BYTES = 2000
_SLACK_SECONDS = 1.0
_INFO_BYTES = 65536


def pack(directory: Path, most_mib: int) -> bytes:
    """Returns a tar of a host's directory for the call "load". Symbolic links are stored as links, not followed."""
    if not directory.is_dir():
        raise protocols.ConfigError(f"the workspace {directory} is no directory of this host; name one that is")
    room, content = most_mib * 2**20, io.BytesIO()

    def prepare_member(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isfile() or member.isdir() or member.issym()):
            return None  # a socket or a device cannot be copied as a file
        nonlocal room
        # Each member takes a header block besides its content, so empty files count too.
        room -= member.size + tarfile.BLOCKSIZE
        config_lib.check(
            room >= 0, "sandbox.workspace_mib", f"{most_mib} do not hold the workspace {directory}; raise it"
        )
        # The host's users mean nothing inside the sandbox, and names would leak who owns the files.
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.add(directory, arcname=".", filter=prepare_member)
    return content.getvalue()


class Malformed(Exception):
    """The sandbox sent an invalid reply."""


@dataclass(frozen=True)
class SandboxReply:
    """A sandbox's reply to one call.

    Attributes:
      status: The call's status, as the sandbox saw it.
      lost: Part of the sandbox's state that was lost: "", "state" or "all".
      note: What happened to the call, in a few words. Empty if nothing special happened.
      left_out: Bytes of output that were dropped between `head` and `tail`.
      head: The output's beginning, or all of it.
      tail: The output's end.
    """

    status: protocols.ToolStatus
    lost: str
    note: str
    left_out: int
    head: bytes
    tail: bytes

    def text(self) -> str:
        """Returns the output as the policy reads it."""
        if not self.left_out:
            return (self.head + self.tail).decode(errors="replace")
        mark = f"\n[... {self.left_out} bytes left out ...]\n"
        return self.head.decode(errors="replace") + mark + self.tail.decode(errors="replace")


async def receive(stream: asyncio.StreamReader, most_bytes: int) -> SandboxReply:
    """Reads the next reply.

    Args:
      stream: Stream from the sandbox.
      most_bytes: Largest accepted body in bytes.

    Raises:
      Malformed: The reply is too long, or is not a valid reply.
      EOFError: The sandbox ended.
    """
    head_bytes, body_bytes = supervisor.HEADER.unpack(await stream.readexactly(supervisor.HEADER.size))
    # Checked before reading: a header must not make the host allocate memory without a bound.
    if head_bytes > supervisor.HEAD_BYTES or body_bytes > most_bytes:
        raise Malformed(f"a reply of {head_bytes} and {body_bytes} bytes")
    head = await stream.readexactly(head_bytes)
    body = await stream.readexactly(body_bytes)
    try:
        values: Any = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise Malformed("a head that is no JSON") from error
    if not isinstance(values, dict):
        raise Malformed("a head that is no JSON object")
    status, lost, note = (values.get(name) for name in ("status", "lost", "note"))
    split, left_out = values.get("split"), values.get("left_out")
    # `type(...) is`: True and False are ints to isinstance, and the sender is untrusted.
    if status not in ("success", "failure", "timeout") or lost not in ("", "state", "all") or type(note) is not str:
        raise Malformed("a head without status, losses or note")
    if type(split) is not int or type(left_out) is not int or not (0 <= split <= len(body) and 0 <= left_out < 2**63):
        raise Malformed("a head whose counts are none")
    return SandboxReply(
        cast("protocols.ToolStatus", status), cast(str, lost), note, left_out, body[:split], body[split:]
    )


@dataclass(eq=False)  # a set holds the running sandboxes, each for itself
class SandboxWorker:
    """A running sandbox.

    Attributes:
      process: Process that starts the sandbox and speaks for it.
      launch: What the sandbox holds besides its processes. Empty once it is closed.
      limits: Limits of the sandbox.
      alive: True until the sandbox is killed, breaks the protocol or ends. After that it cannot be used.
      has_ended: True if a call found that the sandbox had ended by itself.
    """

    process: asyncio.subprocess.Process
    launch: backends.SandboxCommand
    limits: limits_module.Limits
    alive: bool = True
    has_ended: bool = False
    # Descriptor of the first process; -1 if it is not known.
    _first: int = field(default=-1, init=False)
    _group: limits_module.ControlGroup | None = field(default=None, init=False)

    @classmethod
    async def start(cls, backend: backends.Backend, limits: limits_module.Limits, parent: Path | None) -> SandboxWorker:
        """Starts a sandbox and waits until it answers.

        Args:
          backend: Backend that holds the sandbox.
          limits: Limits of the sandbox.
          parent: Control group under which the sandbox gets its own group. None for no control group.

        Raises:
          WorkerLost: The sandbox ended instead of answering, or did not answer in time.
        """
        launch = backend.launch(group=parent is not None)
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *launch.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(launch.environment),
                cwd="/",
                pass_fds=launch.descriptors,
                # Its own session: `close` kills its process group, and a terminal's Ctrl-C does not reach it.
                start_new_session=True,
            )
        )
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
        assert self.process.stderr is not None
        try:
            await deadlines.cancel_after(self.limits.start_seconds, receive(self.process.stdout, 0))
        except deadlines.Overdue:
            raise protocols.WorkerLost(
                f"the sandbox did not answer within {self.limits.start_seconds:g} s (sandbox.start_seconds)"
            ) from None
        except (EOFError, Malformed, OSError) as error:
            reason = ""
            with contextlib.suppress(deadlines.Overdue):
                stderr = await deadlines.cancel_after(_SLACK_SECONDS, self.process.stderr.read(_REASON_BYTES))
                reason = " ".join(stderr.decode(errors="replace").split())
            raise protocols.WorkerLost(f"the sandbox did not start: {reason or error}") from error
        if self.launch.info_fd >= 0:  # bubblewrap writes it before the first process runs, so it is complete by now
            info = json.loads(os.pread(self.launch.info_fd, _INFO_BYTES, 0))
            # Unlike an id, a pidfd never comes to mean another process.
            self._first = os.pidfd_open(int(info["child-pid"]))
            if parent is not None:
                try:
                    self._group = limits_module.ControlGroup(parent, self.limits, int(info["child-pid"]))
                except OSError as error:
                    raise protocols.WorkerLost(f"the control group {parent} takes no sandbox: {error}") from error

    async def call(
        self, kind: str, body: bytes, seconds: float, *, clean: bool = False, max_archive_bytes: int = 0
    ) -> limits_module.SandboxOutcome:
        """Has the sandbox do one thing.

        Args:
          kind: "run" (fresh Python), "python" or "shell" (which keep their state), "edit", "load" or "save".
          body: Code, a command, a request in JSON or an archive.
          seconds: Deadline of the call in seconds.
          clean: Remove all files afterwards, because another caller may be next.
          max_archive_bytes: Largest archive in bytes that "save" may return. The archive is then in the outcome,
            and its text is empty.

        Returns:
          The outcome. `alive` is False afterwards if the call ended the sandbox. Cancelling a call kills the sandbox.
        """
        assert self.process.stdin is not None
        clock = asyncio.get_running_loop().time
        start = clock()
        head = json.dumps({"kind": kind, "seconds": seconds, "clean": clean, "most": max_archive_bytes}).encode()
        try:
            self.process.stdin.write(supervisor.HEADER.pack(len(head), len(body)) + head + body)
            reply = await deadlines.cancel_after(
                seconds + GRACE_SECONDS, self._answer(max_archive_bytes or self.limits.output_bytes)
            )
        except deadlines.Overdue:
            self.kill()
            return limits_module.SandboxOutcome(
                "timeout", f"[no end after {seconds:g} s]", clock() - start, "all", True
            )
        except (EOFError, OSError, Malformed) as error:
            self.has_ended = not isinstance(error, Malformed)
            how, by_code = await self._end() if self.has_ended else ("sent what is no answer", False)
            self.kill()  # not earlier: this signal would hide the first process's own exit status
            return limits_module.SandboxOutcome(
                "failure", f"[the sandbox {how}]", clock() - start, "all", broken=not by_code, by_code=by_code
            )
        except BaseException:
            self.kill()
            raise
        by_code = reply.lost == "all"
        if by_code:
            self.kill()
        if max_archive_bytes and reply.status == "success" and not reply.left_out:
            archive = reply.head + reply.tail
            return limits_module.SandboxOutcome("success", "", clock() - start, reply.lost, archive=archive)
        text = reply.text()
        if max_archive_bytes:  # no archive came: the text says why
            text = limits_module.cut(text, self.limits.output_bytes)
        if reply.note:
            text += f"{chr(10) if text and not text.endswith(chr(10)) else ''}[{reply.note}]"
        return limits_module.SandboxOutcome(reply.status, text, clock() - start, reply.lost, by_code=by_code)

    async def _end(self) -> tuple[str, bool]:
        """Returns how the sandbox ended by itself, in a few words, and whether its code is the cause."""
        if self._group is not None and await deadlines.off_loop(self._group.ran_out):
            return f"ended: more than {self.limits.memory_mib} MiB of memory", True
        with contextlib.suppress(deadlines.Overdue):
            # The first process's own exit status means that it gave up. Code in the sandbox cannot send it a signal, so
            # a signal came from outside.
            if 0 < await deadlines.cancel_after(_SLACK_SECONDS, self.process.wait()) < _SIGNALS:
                return "ended: its first process could not go on with what is in it", True
        return "ended", False

    async def _answer(self, most_bytes: int) -> SandboxReply:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(ConnectionError):  # the sandbox may answer and end before it has read everything
            await self.process.stdin.drain()
        return await receive(self.process.stdout, most_bytes)

    def kill(self) -> None:
        """Kills every process of the sandbox. `close` then waits for their end."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            if self._first >= 0:  # the kernel ends a whole PID namespace with its first process
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            elif self.process.stdin is not None and not self.launch.remove:
                self.process.stdin.close()  # the first process sees that the host is gone, and ends what it started

    async def close(self) -> None:
        """Kills the sandbox and waits until it is gone. Idempotent.

        Raises:
          DeadlineMissed: The sandbox is not gone after `REAP_SECONDS`.
        """
        self.kill()
        if self.launch.remove:
            # Killing the runtime's client leaves its container behind.
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            try:
                remove = functools.partial(subprocess.run, self.launch.remove, timeout=REAP_SECONDS, **quiet)
                # `run` kills a runtime that is late, and then waits without a limit.
                await deadlines.cancel_after(REAP_SECONDS + 1, deadlines.off_loop(remove))
            except (subprocess.TimeoutExpired, deadlines.Overdue):
                raise protocols.DeadlineMissed(
                    f"{' '.join(self.launch.remove)} did not end within {REAP_SECONDS:g} s: the container may still run"
                ) from None
        await processes.reap(self.process, REAP_SECONDS, "the sandbox of process", group=True)
        if self._first >= 0:
            os.close(self._first)
            self._first = -1
        if self._group is not None:
            # Off the loop, because it sleeps until the kernel has released the group.
            await deadlines.off_loop(self._group.close)
        # A second close then finds nothing left to free.
        launch, self.launch = self.launch, backends.SandboxCommand((), {})
        await deadlines.off_loop(_discard, launch)


def _discard(launch: backends.SandboxCommand) -> None:
    """Frees what a sandbox holds besides its processes: descriptors and its directory."""
    for descriptor in launch.descriptors:
        os.close(descriptor)
    if launch.directory:
        scratch.remove(Path(launch.directory))
