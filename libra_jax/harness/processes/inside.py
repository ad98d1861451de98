"""Becomes a program inside a sandbox, and forwards its connections to the gateway's socket.

Standard library only, because a sandbox gets this file as text. A sandbox's network has nothing but its own loopback.
There this process listens on a port, and hands each connection on to a socket of the host's file system.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading

_CHUNK = 65536


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    for end, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
        with contextlib.suppress(OSError):
            end.shutdown(how)


def _join(near: socket.socket, path: str) -> None:
    with contextlib.suppress(OSError), near, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as far:
        far.connect(path)
        back = threading.Thread(target=_copy, args=(far, near), daemon=True)
        back.start()
        _copy(near, far)
        back.join()


def _forward(listening: socket.socket, path: str) -> None:
    while True:
        near, _ = listening.accept()
        threading.Thread(target=_join, args=(near, path), daemon=True).start()


def start(command: list[str], variables: dict[str, str], files: dict[str, str], port: int, door: str) -> None:
    """Writes files, and becomes the program in a sandbox. Without a `door`, the sandbox has the host's network."""
    for path, text in files.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
    os.environ.update(variables)
    if door:
        _serve_gateway(port, door)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the program would inherit that
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _serve_gateway(port: int, path: str) -> None:
    """Starts a process that listens for the program. The program's end ends that process's namespace."""
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    if os.fork() == 0:
        _forward(listening, path)
    listening.close()
