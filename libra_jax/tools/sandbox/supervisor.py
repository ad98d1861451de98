"""The first process of a sandbox. It carries out the host's calls one at a time, and lives on between them.

The sandbox's interpreter gets this file as text, together with `children.py` and `usage.py`, so all three import the
standard library only. Each call runs in a forked child: a fresh one, or an interpreter or shell that lives over many
calls and is stopped between them. Nothing else that a call starts survives the call.

Frames in both directions: `HEADER` (bytes of the head, bytes of the body), the head in JSON, the body. The next call
may belong to another trajectory, so nothing of a call may stay in memory. The body of a fresh call is read by its child
alone, and the output buffer is wiped after sending.
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
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from libra_jax.tools.sandbox import children, usage

HEADER = struct.Struct(">II")
HEAD_BYTES = 4096
WATCH_SECONDS = 0.02  # between two checks of what a call uses
SETTLE_SECONDS = 2.0  # for all processes that a call left to die
OPEN_FILES = 256
EMPTIED_FILES = 1000  # in one place; removing more takes longer than starting another sandbox
TERMINALS = 16  # pseudo-terminals at a time; the machine has a few thousand for everybody
SIGNALS = 256  # signals that wait, and timers, of all processes
RLIMIT_SIGPENDING = 11  # `resource` has no name for it
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


class BoundedOutput:
    """The beginning and the end of a call's output, within a number of bytes. The middle is dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.head, self.tail = bytearray((max_bytes + 1) // 2), bytearray(max_bytes // 2)
        self.total = 0
        self.scratch = bytearray(65536)

    def read(self, source: int) -> int | None:
        """Reads what is available. Returns the number of bytes: 0 at the stream's end, None if nothing has come yet."""
        try:
            piece = memoryview(self.scratch)[: os.readv(source, [self.scratch])]
        except BlockingIOError:
            return None
        count, room = len(piece), max(0, len(self.head) - self.total)
        self.head[self.total : self.total + len(piece[:room])] = piece[:room]
        # The tail is a ring buffer: `at` counts the bytes after the head, and modulo the size is the place to write.
        at, rest, size = self.total + room - len(self.head), piece[room:], len(self.tail)
        self.total += len(piece)
        if len(rest) > size:
            at, rest = at + len(rest) - size, rest[len(rest) - size :]
        while rest:
            place = at % size
            part = rest[: size - place]
            self.tail[place : place + len(part)] = part
            at, rest = at + len(part), rest[len(part) :]
        return count


class Child(NamedTuple):
    """A forked process.

    `output` is the read end of its output; `channel` carries an interpreter's requests and answers.
    """

    pid: int
    pidfd: int
    output: int
    channel: socket.socket | None = None

    def signal(self, number: int) -> None:
        """Sends a signal to the process, if the process still lives."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


class CallVerdict(NamedTuple):
    """How a call ended. `worker.SandboxReply` documents the fields."""

    status: str
    note: str = ""
    lost: str = ""


_FORGED = CallVerdict("failure", "the interpreter's answer was no answer", "state")
_LONGEST_ANSWER = 16


class Supervisor:
    """Serves the host's calls until the host goes away."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.limits = settings, settings["limits"]
        self.output = BoundedOutput(self.limits["output_bytes"])
        self.interpreters: dict[str, Child] = {}
        self.processor = usage.Processor()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        libc = ctypes.CDLL(None, use_errno=True)
        # Orphans become children of this process, so it can find and reap them even if it is not process 1.
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # No process inside may trace this one, or reach its files through /proc.
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        # The kernel's own limits, which every process started from here inherits.
        mib = 2**20
        limits = {
            resource.RLIMIT_FSIZE: self.limits["file_mib"] * mib,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_CORE: 1,  # with 0, the kernel would still write a core to a `core_pattern` that is a pipe
            resource.RLIMIT_MEMLOCK: 0,
            RLIMIT_SIGPENDING: SIGNALS,
        }
        if not self.settings["group"]:  # a control group counts used memory; this limit counts reserved memory
            limits[resource.RLIMIT_AS] = self.limits["memory_mib"] * mib
        if self.settings["count_processes"]:
            # 3 more: this process, and the two interpreters.
            limits[resource.RLIMIT_NPROC] = self.limits["processes"] + 3
        for which, value in limits.items():
            resource.setrlimit(which, (value, value))
        self.pristine = _own_limits()
        self.traffic = _traffic()

    def serve(self) -> NoReturn:
        """Serves one call after the other."""
        self._send(CallVerdict("success", "ready"))
        while True:
            head_bytes, body_bytes = HEADER.unpack(children.read_exactly(0, HEADER.size))
            call = json.loads(children.read_exactly(0, head_bytes))
            deadline = time.monotonic() + call["seconds"]
            if call["most"]:  # an archive is longer than any output for a policy
                self.output = BoundedOutput(call["most"])
            kind = call["kind"]
            if call["clean"]:
                self._forget_times()
            try:
                if kind in children.INTERPRETERS:
                    verdict = self._ask(kind, children.read_exactly(0, body_bytes), deadline)
                else:
                    verdict = self._once(kind, body_bytes, deadline)
            except (OSError, MemoryError) as error:  # no child can be started, because of what the code left running
                note = f"stopped: what runs in the sandbox left no room for the call ({error})"
                verdict = CallVerdict("failure", note, "all")
            # The counters of the network, and connections that linger, would tell the next call something.
            unchanged = _own_limits() == self.pristine and _traffic() == self.traffic
            if call["clean"] and not (self._empty() and unchanged):
                verdict = verdict._replace(lost="all")  # the sandbox ends: the next call may be another trajectory's
            if verdict.status == "timeout":
                verdict = verdict._replace(note=f"no end after {call['seconds']:g} s")
            self._send(verdict)
            if call["most"]:
                self.output = BoundedOutput(self.limits["output_bytes"])
            if verdict.lost == "all":
                os._exit(1)

    # Calls ------------------------------------------------------------------------------------------------------

    def _once(self, kind: str, body_bytes: int, deadline: float) -> CallVerdict:
        """Runs a call in a fresh process, which reads the call's body itself."""
        ack_reader, ack_writer = os.pipe()
        child = self._fork(lambda output: children.once(kind, body_bytes, ack_writer, output, self.settings))
        # Only the child holds the write end now, so the read below ends if the child dies.
        os.close(ack_writer)
        if os.read(ack_reader, 1) != b"+":
            self.leave()  # half of the body is still unread, so the next frame could not be found
        os.close(ack_reader)
        verdict = self._attend(child, b"", deadline)
        if not verdict.note and verdict.status == "success":
            code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
            note = f"ended by signal {-code}" if code < 0 else f"exit status {code}" if code > 1 else ""
            verdict = CallVerdict("success" if code == 0 else "failure", note)
        return self._finish(child, verdict)

    def _ask(self, kind: str, body: bytes, deadline: float) -> CallVerdict:
        """Runs a call in the interpreter of this kind. Starts the interpreter if there is none."""
        if kind not in self.interpreters:
            parent_end, child_end = socket.socketpair()
            interpreter = self._fork(lambda output: children.INTERPRETERS[kind](child_end, output, self.settings))
            child_end.close()
            parent_end.setblocking(False)
            self.interpreters[kind] = interpreter._replace(channel=parent_end)
        child = self.interpreters[kind]
        assert child.channel is not None
        if _receive(child.channel):
            verdict = _FORGED  # a forged answer: nothing was asked
        else:
            child.signal(signal.SIGCONT)
            # Code of an earlier call cannot know the number, so it cannot prepare an answer to this request.
            nonce = int.from_bytes(os.urandom(4), "big")
            request = HEADER.pack(nonce, len(body)) + body
            if kind == "shell":
                # `eval` runs the command at the shell's top level, without the descriptor that carries answers. The
                # second command of the line answers for the first.
                quoted = shlex.quote(os.fsdecode(body))
                line = f"builtin eval {quoted} </dev/null 3>&-; builtin printf '{nonce} %s\\0' \"$?\" >&3\n"
                request = os.fsencode(line)
            verdict = self._attend(child, request, deadline, nonce)
        if verdict.lost:
            del self.interpreters[kind]
        return self._finish(child, verdict)

    def _finish(self, child: Child, verdict: CallVerdict) -> CallVerdict:
        """Ends the processes that the call left, and reads their last output."""
        settled = self._settle()
        while self.output.read(child.output):  # no process writes to the pipe any more, so this ends
            pass
        if child not in self.interpreters.values():
            os.close(child.pidfd)
            os.close(child.output)
            if child.channel is not None:
                child.channel.close()
        return verdict if settled else verdict._replace(lost="all")

    def _fork(self, function: Callable[[int], int]) -> Child:
        """Runs `function(output)` in a child. Its result is the child's exit status."""
        read, write = os.pipe()
        # A silent child must not block this process, which watches its usage.
        os.set_blocking(read, False)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = function(write)
            except BaseException:
                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(Exception):
                        stream.flush()
                # Not sys.exit: the fork must not run the parent's clean-up or return into its code.
                os._exit(status)
        os.close(write)
        return Child(pid, os.pidfd_open(pid), read)

    def _attend(self, child: Child, request: bytes, deadline: float, nonce: int = 0) -> CallVerdict:
        """Collects output until the child answers, ends, uses too much or misses the deadline. Returns the verdict."""
        poll = select.poll()
        poll.register(0, 0)  # registered without events: poll then reports only that the host hung up
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
                    return CallVerdict("failure", f"stopped: {note}", lost or ("" if channel is None else "state"))
                looked = now
                # Random, so that code cannot learn to be idle at each check.
                pause = WATCH_SECONDS * (0.5 + os.urandom(1)[0] / 255)
                pause += time.monotonic() - now  # checking many processes takes long: do not spend all time on checks
            events = dict(poll.poll(1000 * min(pause, max(0.0, deadline - now))))
            if 0 in events:
                self.leave()
            if child.output in events and self.output.read(child.output) == 0:
                poll.unregister(child.output)  # the code closed it
            if channel is not None and events.get(channel.fileno(), 0) & select.POLLOUT:
                try:
                    request = request[channel.send(request) :]
                except OSError:
                    return self._end_verdict(child)
                if not request:
                    poll.modify(channel, select.POLLIN)
            if channel is not None and events.get(channel.fileno(), 0) & ~select.POLLOUT:
                piece = _receive(channel)
                answer += piece
                if not piece:
                    return self._end_verdict(child)
                # An answer before the whole request was sent cannot be an honest one.
                if request or piece.endswith(b"\0") or len(answer) > _LONGEST_ANSWER:
                    return _FORGED if request else _judge(answer, nonce)
            if child.pidfd in events:
                return CallVerdict("success") if channel is None else self._end_verdict(child)
        return CallVerdict("timeout", lost="" if channel is None else "state")

    def _end_verdict(self, child: Child) -> CallVerdict:
        """Returns the verdict on an interpreter that ended during a call.

        This is a failure, no matter its exit status.
        """
        how = "'s channel was closed"
        if select.select([child.pidfd], [], [], WATCH_SECONDS)[0]:
            how = " ended"
            with contextlib.suppress(ChildProcessError):  # it ended between two calls and was reaped then
                code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
                how += f" by signal {-code}" if code < 0 else f" with status {code}"
        return CallVerdict("failure", f"the interpreter{how}", "state")

    def _send(self, verdict: CallVerdict) -> None:
        output = self.output
        head, ring = memoryview(output.head)[: output.total], memoryview(output.tail)
        over = output.total - len(output.head)
        # Once the ring buffer is full, its oldest byte is the next one to be overwritten.
        tail = [ring[: max(0, over)]] if over <= len(ring) else [ring[over % len(ring) :], ring[: over % len(ring)]]
        body_bytes = len(head) + sum(map(len, tail))
        values = {**verdict._asdict(), "split": len(head), "left_out": output.total - body_bytes}
        text = json.dumps(values).encode()
        os.writev(1, [HEADER.pack(len(text), body_bytes), text, head, *tail])
        # Overwrites the output in memory: the next call may be another trajectory's.
        for buffer in (output.head, output.tail, output.scratch):
            buffer[:] = bytes(len(buffer))
        output.total = 0

    # What a call uses, and leaves ---------------------------------------------------------------------------------

    def _processes(self) -> dict[int, usage.Process]:
        """Returns all processes except this one: every process if this one is process 1, otherwise its descendants."""
        processes, me = usage.processes(), os.getpid()
        if me != 1:
            family = {me}
            while generation := {pid for pid, process in processes.items() if process.parent in family} - family:
                family |= generation
            processes = {pid: process for pid, process in processes.items() if pid in family}
        processes.pop(me, None)
        return processes

    def _excess(self, interval: float) -> tuple[str, str]:
        """Returns the limit that the call has hit, in a few words, and what is lost with it. Empty if no limit was hit.

        Args:
          interval: Seconds since the last check.
        """
        processes, limits = self._processes(), self.limits
        running = {pid: process for pid, process in processes.items() if process.runs}
        if sum(process.threads for process in running.values()) > limits["processes"] + len(self.interpreters):
            return f"more than {limits['processes']} processes and threads", ""
        if self.processor.seconds(processes, interval) > limits["cpu_seconds"]:
            return f"more than {limits['cpu_seconds']:g} s of processor time", ""
        memory = usage.memory(running, network=os.getpid() == 1)
        if memory == float("inf"):
            return "more mappings of memory than can be counted", ""
        if memory > limits["memory_mib"] * 2**20:
            return f"more than {limits['memory_mib']} MiB of memory", ""
        if self.settings["private"] and len(os.listdir("/dev/pts")) - 1 > TERMINALS:
            return f"more than {TERMINALS} terminals", ""
        for path in self.settings["private"]:
            filesystem = os.statvfs(path)
            if filesystem.f_files - filesystem.f_ffree > limits["files"]:
                # The whole sandbox: its files stay, so every later call would hit this limit as well.
                return f"more than {limits['files']} files in {path}", "all"
            if (filesystem.f_blocks - filesystem.f_bfree) * filesystem.f_frsize > limits["workspace_mib"] * 2**20:
                return f"more than {limits['workspace_mib']} MiB in {path}", "all"
        return "", ""

    def _settle(self) -> bool:
        """Stops the interpreters and kills all other processes. Returns False if a process cannot be killed."""
        if os.getpid() == 1:
            # Stops all at once: a stopped process cannot fork while the others are searched.
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGSTOP)
        for child in self.interpreters.values():
            child.signal(signal.SIGSTOP)
        interpreter_pids = {child.pid for child in self.interpreters.values()}
        until = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            processes = self._processes()
            # A kept interpreter may live on if it is stopped, and so may its ended children, which only it can reap.
            # Any other ended process is reaped here, in the next round at the latest.
            if all(
                process.state in "TtZX"
                if pid in interpreter_pids
                else process.parent in interpreter_pids and not process.runs
                for pid, process in processes.items()
            ):
                self.processor.begin(processes)
                return True
            for pid in processes.keys() - interpreter_pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.0005)
        return False

    def _empty(self) -> bool:
        """Removes every file and attribute that the call left.

        Returns False if removing fails or there are too many files.
        """
        try:
            for path in self.settings["private"]:
                filesystem = os.statvfs(path)
                if filesystem.f_files - filesystem.f_ffree > EMPTIED_FILES:
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

    def _forget_times(self) -> None:
        """Sets the times of the folders, which an earlier call could have set to anything."""
        for path in self.settings["private"]:
            os.utime(path, (0, 0))

    def leave(self) -> NoReturn:
        """Ends everything, because the host is gone."""
        self.interpreters.clear()
        self._settle()
        os._exit(0)


def _traffic() -> bytes:
    """Returns the counters of the network devices of this process's network namespace; empty if it is the host's."""
    if os.getpid() != 1:
        return b""
    with contextlib.suppress(OSError), open("/proc/self/net/dev", "rb") as file:
        return file.read()
    return b""


def _own_limits() -> tuple[object, ...]:
    """Returns the limits, the priority and the cores of this process, which each child inherits."""
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    limits = tuple(resource.getrlimit(getattr(resource, name)) for name in names)
    priority, policy = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    return limits, priority, policy, frozenset(os.sched_getaffinity(0))


def _receive(channel: socket.socket) -> bytes:
    try:
        return channel.recv(2 * _LONGEST_ANSWER)
    except OSError:
        return b""


def _judge(answer: bytes, nonce: int) -> CallVerdict:
    """Returns the verdict on an interpreter's answer: the call's number, a status, a NUL.

    Any other answer is forged.
    """
    named, _, digits = answer[:-1].partition(b" ")
    if not (answer.endswith(b"\0") and named == b"%d" % nonce and digits.isdigit()):
        return _FORGED
    status = int(digits)
    return CallVerdict(
        "failure" if status else "success", f"exit status {status}" if 0 < status < children.RAISED else ""
    )


if __name__ == "__main__":
    supervisor = Supervisor(json.loads(sys.argv[1]))
    try:
        supervisor.serve()
    except (EOFError, BrokenPipeError):
        supervisor.leave()
