"""Runs one program, and ends it with everything that it started: at its own end, or as soon as the run is gone.

Standard library only, because it runs as a script: `python -I -S keeper.py FOLDER COUNT AFTER... COUNT ORPHANED...
PROGRAM...`. AFTER are the COUNT words of a command that runs last, such as the removal of a container. ORPHANED is one
that runs only if the run is gone. COUNT may be 0.

The keeper's standard input is a pipe that the run holds open. The kernel closes it even if the run is killed with -9.
The keeper then kills the program, and every process that came from it. Such processes cannot escape: the kernel makes
the keeper the parent of each orphan among them. The keeper exits with the program's status, 128 + N after signal N.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_SECONDS, _TOLD_SECONDS = 10.0, 2.0
_NOT_FOUND, _NOT_RUN = 127, 126
_SIGNALS = 128


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _start(program: list[str]) -> int:
    """Starts the program in a session of its own, without input, and returns its process id."""
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        # If the keeper itself is killed with -9, the program dies all the same.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(_NOT_RUN)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the program would inherit that
        os.execvp(program[0], program)
    except OSError as error:
        os.write(2, f"{program[0]}: {error.strerror}\n".encode())
        os._exit(_NOT_FOUND if error.errno == errno.ENOENT else _NOT_RUN)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return [int(word) for word in listed.read().split()]
    except OSError:  # a kernel without this file: looks through all processes
        pids = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat") as described:
                    # The name in parentheses may hold spaces; the parent is the second field after it.
                    parent = described.read().rpartition(")")[2].split()[1]
            except (OSError, IndexError):
                continue
            if int(parent) == os.getpid():
                pids.append(int(name))
        return pids


def _end_all() -> None:
    """Kills all descendants. The death of one makes its children ours, so this goes on until there are none."""
    until = time.monotonic() + _END_SECONDS
    while time.monotonic() < until:
        for pid in _children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.003)


def _wait(pid: int, woken: int) -> tuple[int | None, bool]:
    """Returns the program's exit status, or None if the run is gone or wants it ended; and whether the run is gone."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    poll.register(woken, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if woken in ready and bytes([signal.SIGTERM]) in os.read(woken, 4096):
            return None, _gone(_TOLD_SECONDS)
        # Orphans of the program are reaped here too, or they would stay as zombies.
        try:
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                if child[0] == pid:
                    return os.waitstatus_to_exitcode(child[1]), False
        except ChildProcessError:
            return _NOT_RUN, False
        if 0 in ready:
            return None, _gone(0.0)


def _gone(seconds: float) -> bool:
    """Returns whether the pipe of the run ends within these seconds. A run that lives says something first.

    The parent's id would tell too late: the kernel closes the pipe of a dying process before it gives its children up.
    """
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(1000 * seconds)) and os.read(0, 1) == b""


def _run_last(after: list[str]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            for stream in (0, 1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)
            os.execvp(after[0], after)
        finally:
            os._exit(_NOT_RUN)
    until = time.monotonic() + _END_SECONDS
    while time.monotonic() < until and os.waitpid(pid, os.WNOHANG)[0] == 0:
        time.sleep(0.01)


def main(folder: str, after: list[str], orphaned: list[str], program: list[str]) -> int:
    """Runs the program to its end, and returns the status to exit with."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    status, gone = _wait(_start(program), woken)
    _end_all()
    gone = gone or (status is not None and _gone(0.0))
    for last in (after, orphaned if gone else []):
        if last:
            _run_last(last)
    if gone:
        import shutil  # only here: the import would double the start's time

        shutil.rmtree(folder, ignore_errors=True)  # no one else is left to do it
    if status is None:
        return _SIGNALS + signal.SIGKILL
    return status if status >= 0 else _SIGNALS - status


if __name__ == "__main__":
    first = 3 + int(sys.argv[2])
    second = first + 1 + int(sys.argv[first])
    sys.exit(main(sys.argv[1], sys.argv[3:first], sys.argv[first + 1 : second], sys.argv[second:]))
