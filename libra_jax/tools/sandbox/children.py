"""The code of the child processes in a sandbox: run Python, keep an interpreter or shell, edit and unpack files.

The sandbox gets this file as text together with `supervisor.py`, so it may import the standard library only. The parent
believes a child's output and exit status, and nothing else that the child says.
"""

from __future__ import annotations

import _sitebuiltins
import ast
import builtins
import contextlib
import ctypes
import io
import json
import linecache
import os
import signal
import socket
import stat
import struct
import sys
import tarfile
import traceback
import types
from typing import Any, BinaryIO

RAISED = 256
"""Status of a Python call whose code raised. It is larger than any exit status, so the note does not mention it."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_LIBC = ctypes.CDLL(None, use_errno=True)
_SHELL = ("/bin/bash", "--noprofile", "--norc", "-s")
_DESCRIPTORS = 4096
_LONGEST_VIEW = 2**24


def read_exactly(source: int, count: int) -> bytes:
    """Reads `count` bytes from a descriptor."""
    pieces = bytearray()
    while len(pieces) < count:
        piece = os.read(source, min(count - len(pieces), 2**20))
        if not piece:
            raise EOFError
        pieces += piece
    return bytes(pieces)


def _become(output: int, settings: dict[str, Any], channel: socket.socket | None = None) -> None:
    """Makes a forked child independent of its parent's descriptors, signal handlers and protection."""
    # The child dies with the first process. It becomes dumpable again, which the parent switched off for itself.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.setsid()
    channel_descriptor = -1 if channel is None else channel.fileno()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    # Closes every descriptor except the standard streams and the channel.
    os.closerange(3, max(3, channel_descriptor))
    os.closerange(max(3, channel_descriptor + 1), _DESCRIPTORS)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(settings["workspace"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the process lives
    _renew_streams()


def _renew_streams() -> None:
    """Opens fresh standard streams, because code may have replaced or closed them."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = io.FileIO(descriptor, "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(stream), "utf-8", "backslashreplace"))
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def once(kind: str, body_bytes: int, ack_writer: int, output: int, settings: dict[str, Any]) -> int:
    """Does one call in a fresh process and returns the exit status.

    The child reads the body itself and writes "+" to `ack_writer` afterwards. The parent never holds the body in
    memory.
    """
    body = read_exactly(0, body_bytes)
    os.write(ack_writer, b"+")
    _become(output, settings)
    if kind == "run":
        good = _execute(body, _main(settings), 1)
        if (threading := sys.modules.get("threading")) is not None:
            # As Python does at its end, which `os._exit` leaves out.
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
        return int(not good)
    try:
        if kind == "save":
            _save(json.loads(body), settings["workspace"], sys.stdout.buffer)
        elif kind == "load":
            with tarfile.open(fileobj=io.BytesIO(body)) as archive:
                # Links are kept as they are: they can lead only to places in the sandbox. Early releases of Python 3.11
                # have no filters.
                archive.extraction_filter = getattr(tarfile, "tar_filter", None)
                archive.extractall(settings["workspace"])
        else:
            print(_edit(body, settings["workspace"]), end="")
    except (OSError, ValueError, tarfile.TarError) as error:
        print(f"error: {error}", end="")
        return 1
    return 0


# Python -----------------------------------------------------------------------------------------------------------


def _main(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the namespace that code runs in: a new `__main__` module that contains nothing of this program."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    sys.path[:0] = [settings["workspace"], *settings["packages"]]
    if not hasattr(builtins, "exit"):  # Python was started without `site`, which gives code these
        for name in ("exit", "quit"):
            setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
        builtins.help = _sitebuiltins._Helper()
    return module.__dict__


def _execute(source: bytes, namespace: dict[str, Any], number: int) -> bool:
    """Runs code like a notebook cell, which shows the value of a last expression. Returns False if the code raised."""
    name = f"<python {number}>"
    try:
        text = source.decode()
        # Tracebacks print the code's lines from this cache, as there is no file to read them from.
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        tree = ast.parse(text, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            # Mode "single" prints the value of an expression, as an interactive prompt does.
            exec(compile(ast.Interactive([last]), name, "single"), namespace)
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        return leaving.code in (None, 0)
    except BaseException as error:
        sys.stdout.flush()
        # Frames of this file are not the policy's business: the traceback starts at the code's first own frame.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return False
    return True


def _python(channel: socket.socket, output: int, settings: dict[str, Any]) -> int:
    """Runs a Python interpreter that keeps its state over calls.

    A request is a number, a length and the code. An answer is the same number, a status and a NUL byte.
    """
    _become(output, settings, channel)
    namespace, me, number = _main(settings), os.getpid(), 0
    while True:
        nonce, size = struct.unpack(">II", read_exactly(channel.fileno(), 8))
        number += 1
        good = _execute(read_exactly(channel.fileno(), size), namespace, number)
        if os.getpid() != me:
            return int(not good)  # the code forked, and this process is the fork: it must not answer the next request
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        _renew_streams()
        channel.sendall(b"%d %d\0" % (nonce, 0 if good else RAISED))


def _shell(channel: socket.socket, output: int, settings: dict[str, Any]) -> int:
    """Runs a shell that keeps its state over calls.

    Each line that it reads also makes it answer; see `Supervisor._ask`.
    """
    _become(output, settings, channel)
    os.dup2(channel.fileno(), 0)
    # The shell reads commands from 0 and writes its answers to 3; see `Supervisor._ask`.
    os.dup2(0, 3)
    os.set_inheritable(3, True)
    os.closerange(4, _DESCRIPTORS)
    os.execv(_SHELL[0], _SHELL)


INTERPRETERS = {"python": _python, "shell": _shell}


# Files ------------------------------------------------------------------------------------------------------------


def _save(most_bytes: int, workspace: str, target: BinaryIO) -> None:
    """Writes the workspace's regular files as an archive. Links, pipes and unreadable files are left out."""
    # A tar ends with padding. Each file takes at most a header, a long-name record and its own padding besides its
    # bytes.
    paths, room = [], most_bytes - 2 * tarfile.RECORDSIZE
    for folder, _, names in os.walk(workspace):  # does not follow links to folders
        for path in sorted(os.path.join(folder, name) for name in names):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and os.access(path, os.R_OK):
                paths.append(path)
                room -= 4 * tarfile.BLOCKSIZE + len(os.fsencode(path)) + status.st_size
    if room < 0:
        raise ValueError(f"the files take more than {most_bytes} bytes")
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for path in paths:
            # O_NOFOLLOW: the path may have become a link since the check above.
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                status = os.fstat(file.fileno())
                member = tarfile.TarInfo(os.path.relpath(path, workspace))
                member.size, member.mode = status.st_size, status.st_mode & 0o755
                archive.addfile(member, file)


def _edit(body: bytes, workspace: str) -> str:
    """Views, creates or changes a file of the workspace.

    Raises:
      OSError, ValueError: The request cannot be done. The message is shown to the policy.
    """
    request = json.loads(body)
    request_path, command = request["path"], request["command"]
    # Resolves links before the check, so that a link cannot lead outside of the workspace.
    path = os.path.realpath(os.path.join(workspace, request_path))
    if path != workspace and not path.startswith(workspace + "/"):
        raise ValueError(f"path: {request_path} lies outside the workspace {workspace}")
    if command == "view" and os.path.isdir(path):
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        return "".join(f"{entry.name}{'/' * entry.is_dir(follow_symlinks=False)}\n" for entry in entries)
    if command == "create":
        # Encoded before the file is emptied, because a text with a lone surrogate raises.
        created = request["text"].encode(errors="surrogateescape")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with _open_file(path, request_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            file.write(created)
        return f"wrote {request_path}"
    with _open_file(path, request_path, os.O_RDONLY) as file:
        content = file.read(_LONGEST_VIEW + 1)
    if len(content) > _LONGEST_VIEW:
        raise ValueError(f"path: {request_path} is larger than {_LONGEST_VIEW // 2**20} MiB")
    # Bytes that are no text survive a change of the text around them.
    text = content.decode(errors="surrogateescape")
    if command == "view":
        lines = text.splitlines()
        first, last = max(1, request.get("first", 1)), request.get("last", len(lines))
        return "".join(f"{number}\t{line}\n" for number, line in enumerate(lines[first - 1 : last], first))
    old = request["old"]
    if not old or text.count(old) != 1:
        raise ValueError(f"old: found {text.count(old) if old else 0} times in {request_path}; it must be there once")
    changed = text.replace(old, request["new"]).encode(errors="surrogateescape")
    with _open_file(path, request_path, os.O_WRONLY | os.O_TRUNC) as file:
        file.write(changed)
    return f"changed {request_path}"


def _open_file(path: str, request_path: str, flags: int) -> BinaryIO:
    """Opens a regular file of the workspace."""
    # O_NONBLOCK: opening a pipe would otherwise wait for its other end. O_NOFOLLOW: the path may have become a link
    # since it was resolved. The type is checked on the open descriptor for the same reason.
    descriptor = os.open(path, os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"path: {request_path} is no regular file")
    return open(descriptor, "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "wb")
