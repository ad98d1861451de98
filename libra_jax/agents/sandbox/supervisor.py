"""The first process of a sandbox: carries out one call at a time for the host, and outlives the call.

It is handed to the sandbox's interpreter as text, together with `children.py`, so both know the standard library only.
Each call runs in a child, forked from here: afresh, or in an interpreter or shell that lives on from call to call and
stands still between them. Nothing that a call leaves running survives it.

Frames, in both directions: `HEADER` (bytes of head and of body), the head in JSON, the body. Code of a call that starts
afresh is read by its child alone, and output is wiped once it is sent, so that nothing of one call can be found in the
memory of the next, which may be another trajectory's.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shlex
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from libra_jax.agents.sandbox import children, usage

HEADER = struct.Struct(">II")
HEAD_BYTES = 4096
WATCH_SECONDS = 0.02  # between two looks at what a call uses
SETTLE_SECONDS = 2.0  # for everything that a call left to be killed
OPEN_FILES = 256
EMPTIED_FILES = 1000  # of one folder; to remove more takes longer than to begin another sandbox
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


class Output:
    """The beginning and the end of what a call writes, within a number of bytes."""

    def __init__(self, most: int) -> None:
        self.head, self.tail = bytearray((most + 1) // 2), bytearray(most // 2)
        self.total = 0
        self._scratch = bytearray(65536)

    def read(self, source: int) -> bool:
        """Takes what is there; False at the end of the stream, BlockingIOError where nothing is there yet."""
        count = os.readv(source, [self._scratch])
        self._add(memoryview(self._scratch)[:count])
        return count > 0

    def _add(self, piece: memoryview) -> None:
        room = max(0, len(self.head) - self.total)
        self.head[self.total : self.total + len(piece[:room])] = piece[:room]
        at, rest, size = self.total + room - len(self.head), piece[room:], len(self.tail)
        self.total += len(piece)
        if len(rest) > size:
            at, rest = at + len(rest) - size, rest[len(rest) - size :]
        while rest:
            place = at % size
            part = rest[: size - place]
            self.tail[place : place + len(part)] = part
            at, rest = at + len(part), rest[len(part) :]

    def pieces(self) -> list[memoryview]:
        """The beginning, and the end in order."""
        head, tail = memoryview(self.head)[: self.total], memoryview(self.tail)
        over = self.total - len(self.head)
        if over <= len(self.tail):
            return [head, tail[: max(0, over)]]
        return [head, tail[over % len(tail) :], tail[: over % len(tail)]]

    def clear(self) -> None:
        """Forgets it all, in memory too."""
        for buffer in (self.head, self.tail, self._scratch):
            buffer[:] = bytes(len(buffer))
        self.total = 0


class Child(NamedTuple):
    """A forked process: `output` is what it writes, `channel` how an interpreter is asked and answers."""

    pid: int
    pidfd: int
    output: int
    channel: socket.socket | None = None

    def signal(self, number: int) -> None:
        """Sends it, if it still lives."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Of what is held of it; the process is swept."""
        os.close(self.pidfd)
        os.close(self.output)
        if self.channel is not None:
            self.channel.close()


class Verdict(NamedTuple):
    """How a call ended: see `wire.Reply`."""

    status: str
    note: str = ""
    lost: str = ""


class Supervisor:
    """Serves the host's calls until it goes away."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.limits = settings, settings["limits"]
        self.output = Output(self.limits["output_bytes"])
        self.interpreters: dict[str, Child] = {}
        self.processor = usage.Processor()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no one inside may trace it, or reach its files through /proc
        self._limit()
        self.pristine = _own_limits()

    def _limit(self) -> None:
        """The kernel's own limits, which everything started from here inherits."""
        mib = 2**20
        limits = {
            resource.RLIMIT_FSIZE: self.limits["file_mib"] * mib,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_CORE: 1,  # 0 would still feed a core to a pattern that is a pipe
            resource.RLIMIT_MEMLOCK: 0,
        }
        if not self.settings["group"]:  # else a control group counts what is used, not what is reserved
            limits[resource.RLIMIT_AS] = self.limits["memory_mib"] * mib
        if self.settings["count_processes"]:
            limits[resource.RLIMIT_NPROC] = self.limits["processes"] + 3
        for which, value in limits.items():
            resource.setrlimit(which, (value, value))

    def serve(self) -> NoReturn:
        """One call after the other."""
        self._send(Verdict("success", "ready"))
        while True:
            head_bytes, body_bytes = HEADER.unpack(children.read_exactly(0, HEADER.size))
            call = json.loads(children.read_exactly(0, head_bytes))
            deadline = time.monotonic() + call["seconds"]
            if call["most"]:  # an archive, which is longer than what a policy reads
                self.output = Output(call["most"])
            verdict = self._carry_out(call["kind"], body_bytes, deadline)
            if call["clean"] and not (self._empty() and _own_limits() == self.pristine):
                verdict = verdict._replace(lost="all")  # the next call may be another trajectory's
            if verdict.status == "timeout":
                verdict = verdict._replace(note=f"no end after {call['seconds']:g} s")
            self._send(verdict)
            if call["most"]:
                self.output = Output(self.limits["output_bytes"])
            if verdict.lost == "all":
                os._exit(1)

    # Calls ------------------------------------------------------------------------------------------------------

    def _carry_out(self, kind: str, body_bytes: int, deadline: float) -> Verdict:
        """Has a child do what the call asks. Where none can be had, what the code left in the sandbox is the cause."""
        try:
            if kind in children.INTERPRETERS:
                return self._ask(kind, children.read_exactly(0, body_bytes), deadline)
            return self._once(kind, body_bytes, deadline)
        except (OSError, MemoryError) as error:
            return Verdict("failure", f"stopped: what runs in the sandbox left no room for the call ({error})", "all")

    def _once(self, kind: str, body_bytes: int, deadline: float) -> Verdict:
        """A call in a process of its own, which reads its body itself."""
        begun, told = os.pipe()
        child = self._fork(lambda output: children.once(kind, body_bytes, told, output, self.settings))
        os.close(told)
        if os.read(begun, 1) != b"+":
            self.leave()  # half of the body is still to be read: nothing could follow it
        os.close(begun)
        verdict = self._attend(child, b"", deadline)
        if not verdict.note and verdict.status == "success":
            code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
            note = f"ended by signal {-code}" if code < 0 else f"exit status {code}" if code > 1 else ""
            verdict = Verdict("success" if code == 0 else "failure", note)
        return self._finish(child, verdict)

    def _ask(self, kind: str, body: bytes, deadline: float) -> Verdict:
        """A call of the interpreter of this kind, which is started if there is none."""
        child = self.interpreters.get(kind) or self._begin(kind)
        self.interpreters[kind] = child
        assert child.channel is not None
        if _receive(child.channel):
            verdict = _FORGED  # no one asked
        else:
            child.signal(signal.SIGCONT)
            nonce = int.from_bytes(os.urandom(4), "big")
            request = HEADER.pack(nonce, len(body)) + body if kind == "python" else _line(body, nonce)
            verdict = self._attend(child, request, deadline, nonce)
        if verdict.lost:
            del self.interpreters[kind]
        return self._finish(child, verdict)

    def _finish(self, child: Child, verdict: Verdict) -> Verdict:
        """Ends what the call left, and takes its last words."""
        settled = self._settle()
        self._drain(child.output)
        if child not in self.interpreters.values():
            child.close()
        return verdict if settled else verdict._replace(lost="all")

    def _begin(self, kind: str) -> Child:
        ours, theirs = socket.socketpair()
        child = self._fork(lambda output: children.INTERPRETERS[kind](theirs, output, self.settings))
        theirs.close()
        ours.setblocking(False)
        return child._replace(channel=ours)

    def _fork(self, function: Callable[[int], int]) -> Child:
        read, write = os.pipe()
        os.set_blocking(read, False)
        pid = os.fork()
        if pid == 0:
            children.run_child(lambda: function(write))
        os.close(write)
        return Child(pid, os.pidfd_open(pid), read)

    def _attend(self, child: Child, request: bytes, deadline: float, nonce: int = 0) -> Verdict:
        """Takes output until the child answers, ends, uses too much or is overdue."""
        poll = select.poll()
        poll.register(0, 0)  # tells only that the host is gone
        poll.register(child.output, select.POLLIN)
        poll.register(child.pidfd, select.POLLIN)
        channel = child.channel
        if channel is not None:
            poll.register(channel, select.POLLIN | select.POLLOUT)
        answer, looked = b"", time.monotonic()
        pause = WATCH_SECONDS
        while (now := time.monotonic()) < deadline:
            if now - looked >= pause:
                note, lost = self._excess(now - looked)
                if note:
                    return Verdict("failure", f"stopped: {note}", lost or ("" if channel is None else "state"))
                looked = now
                pause = WATCH_SECONDS * (0.5 + os.urandom(1)[0] / 255)  # so that code cannot be idle at each look
                pause += time.monotonic() - now  # a look at many processes takes long
            events = dict(poll.poll(1000 * min(pause, max(0.0, deadline - now))))
            if 0 in events:
                self.leave()
            if child.output in events and not self._take(child.output):
                poll.unregister(child.output)  # the code closed it
            if channel is not None and events.get(channel.fileno(), 0) & select.POLLOUT:
                try:
                    request = request[channel.send(request) :]
                except OSError:
                    return self._ended(child)
                if not request:
                    poll.modify(channel, select.POLLIN)
            if channel is not None and events.get(channel.fileno(), 0) & ~select.POLLOUT:
                piece = _receive(channel)
                answer += piece
                if not piece:
                    return self._ended(child)
                if request or piece.endswith(b"\0") or len(answer) > _LONGEST_ANSWER:
                    return _FORGED if request else _judge(answer, nonce)
            if child.pidfd in events:
                return Verdict("success") if channel is None else self._ended(child)
        return Verdict("timeout", lost="" if channel is None else "state")

    def _ended(self, child: Child) -> Verdict:
        """Says how an interpreter ended, which is a failure with any status."""
        how = "'s channel was closed"
        if select.select([child.pidfd], [], [], WATCH_SECONDS)[0]:
            how = " ended"
            with contextlib.suppress(ChildProcessError):  # reaped before: it ended between two calls
                code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
                how += f" by signal {-code}" if code < 0 else f" with status {code}"
        return Verdict("failure", f"the interpreter{how}", "state")

    def _take(self, source: int) -> bool:
        try:
            return self.output.read(source)
        except BlockingIOError:
            return True

    def _drain(self, source: int) -> None:
        """What the pipe still holds: no one writes to it any more."""
        with contextlib.suppress(BlockingIOError):
            while self.output.read(source):
                pass

    def _send(self, verdict: Verdict) -> None:
        head, *tail = self.output.pieces()
        kept = len(head) + sum(map(len, tail))
        values = {**verdict._asdict(), "split": len(head), "left_out": self.output.total - kept}
        text = json.dumps(values).encode()
        os.writev(1, [HEADER.pack(len(text), kept), text, head, *tail])
        self.output.clear()

    # What a call uses, and leaves ---------------------------------------------------------------------------------

    def _processes(self) -> dict[int, usage.Process]:
        """All but this one: everything there is, if this is the first process; else what descends from it."""
        found = usage.processes()
        me = os.getpid()
        if me != 1:
            found = usage.descendants(found, me)
        found.pop(me, None)
        return found

    def _excess(self, interval: float) -> tuple[str, str]:
        """Which limit the call has met, in a few words, and what goes with it; empty: none.

        Args:
          interval: seconds since the last look.
        """
        everything, limits = self._processes(), self.limits
        found = {pid: process for pid, process in everything.items() if process.runs}
        if sum(process.threads for process in found.values()) > limits["processes"] + len(self.interpreters):
            return f"more than {limits['processes']} processes and threads", ""
        if self.processor.seconds(everything, interval) > limits["cpu_seconds"]:
            return f"more than {limits['cpu_seconds']:g} s of processor time", ""
        memory = usage.memory(found, network=os.getpid() == 1)
        if memory == float("inf"):
            return "more mappings of memory than can be counted", ""
        if memory > limits["memory_mib"] * 2**20:
            return f"more than {limits['memory_mib']} MiB of memory", ""
        for path in self.settings["private"]:
            held = os.statvfs(path)
            if held.f_files - held.f_ffree > limits["files"]:
                return f"more than {limits['files']} files in {path}", "all"  # each later call would meet it as well
            if (held.f_blocks - held.f_bfree) * held.f_frsize > limits["workspace_mib"] * 2**20:
                return f"more than {limits['workspace_mib']} MiB in {path}", "all"
        return "", ""

    def _settle(self) -> bool:
        """Stops the interpreters and kills all else; False if something cannot be killed."""
        if os.getpid() == 1:  # all at once: what stands still cannot fork while the others are looked for
            children.send(-1, signal.SIGSTOP)
        for child in self.interpreters.values():
            child.signal(signal.SIGSTOP)
        kept = {child.pid for child in self.interpreters.values()}
        until = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            children.reap()
            found = self._processes()
            if all(_settled(pid, process, kept) for pid, process in found.items()):
                self.processor.begin(found)
                return True
            for pid in found.keys() - kept:
                children.send(pid, signal.SIGKILL)
            time.sleep(0.0005)
        return False

    def _empty(self) -> bool:
        """Removes every file and mark that the call left; False if it made one that cannot be removed so, or many."""
        try:
            for path in self.settings["private"]:
                held = os.statvfs(path)
                if held.f_files - held.f_ffree > EMPTIED_FILES:
                    return False
            for path in self.settings["writable"]:
                os.chmod(path, 0o755)
                for attribute in os.listxattr(path):
                    os.removexattr(path, attribute)
                for entry in list(os.scandir(path)):
                    shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
        except (OSError, RecursionError):
            return False
        return True

    def leave(self) -> NoReturn:
        """The host is gone: so is everything else."""
        self.interpreters.clear()
        self._settle()
        os._exit(0)


def _own_limits() -> tuple[object, ...]:
    """Limits, priority and cores of this process, which each child begins with."""
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    limits = tuple(resource.getrlimit(getattr(resource, name)) for name in names)
    priority, policy = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    return limits, priority, policy, frozenset(os.sched_getaffinity(0))


_FORGED = Verdict("failure", "the interpreter's answer was no answer", "state")


_LONGEST_ANSWER = 16


def _settled(pid: int, process: usage.Process, kept: set[int]) -> bool:
    """Whether it may still be there when the next call begins: a kept one, if it stands still, and its ended children.

    Any other that has ended is for this process to reap, if not at this look then at the next.
    """
    if pid in kept:
        return process.state in "TtZX"
    return process.parent in kept and not process.runs


def _line(command: bytes, nonce: int) -> bytes:
    """What the shell reads for a command: at its top level, and without the descriptors by which it is asked."""
    quoted = shlex.quote(os.fsdecode(command))
    return os.fsencode(f"builtin eval {quoted} </dev/null 3>&-; builtin printf '{nonce} %s\\0' \"$?\" >&3\n")


def _receive(channel: socket.socket) -> bytes:
    try:
        return channel.recv(2 * _LONGEST_ANSWER)
    except OSError:
        return b""


def _judge(answer: bytes, nonce: int) -> Verdict:
    """An interpreter's answer: the call's number, a status and a NUL; anything else is its end."""
    named, _, digits = answer[:-1].partition(b" ")
    if not (answer.endswith(b"\0") and named == b"%d" % nonce and digits.isdigit()):
        return _FORGED
    status = int(digits)
    return Verdict("failure" if status else "success", f"exit status {status}" if 0 < status < children.RAISED else "")


if __name__ == "__main__":
    supervisor = Supervisor(json.loads(sys.argv[1]))
    try:
        supervisor.serve()
    except (EOFError, BrokenPipeError):
        supervisor.leave()
