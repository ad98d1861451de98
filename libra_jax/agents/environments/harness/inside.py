"""Runs a program inside a sandbox, which reaches the gateway through a socket, and reports its end as a last line.

Standard library only, because a sandbox gets this file as text. A sandbox's network has nothing but its own loopback.
There this process listens on a port, and hands each connection on to a socket of the host's file system.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from typing import IO, Any

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


def _drain(stream: IO[bytes], most: int, chunks: collections.deque[bytes]) -> None:
    held = 0
    while data := os.read(stream.fileno(), _CHUNK):
        chunks.append(data)
        held += len(data)
        while held - len(chunks[0]) >= most:
            held -= len(chunks.popleft())


def main(asked: dict[str, Any]) -> None:
    """Runs the program, and prints the mark and a line of JSON."""
    if asked["socket"]:
        listening = socket.create_server(("127.0.0.1", asked["port"]), backlog=128)
        threading.Thread(target=_forward, args=(listening, asked["socket"]), daemon=True).start()
    folder = asked["folder"]
    os.makedirs(folder, exist_ok=True)
    for name, text in asked["files"].items():
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)
    pipes: list[collections.deque[bytes]] = [collections.deque(), collections.deque()]
    status: int = 127
    try:
        program = subprocess.Popen(
            asked["command"],
            env={**os.environ, **asked["variables"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert program.stdout is not None
        assert program.stderr is not None
        readers = [
            threading.Thread(target=_drain, args=(stream, asked["most"], chunks), daemon=True)
            for stream, chunks in zip((program.stdout, program.stderr), pipes, strict=True)
        ]
        for reader in readers:
            reader.start()
        status = program.wait()
        for reader in readers:
            reader.join(1.0)  # a process that the program left may hold its output open
    except OSError as error:
        pipes[1].append(f"{asked['command'][0]}: {error.strerror}".encode())
    verdict = None
    with contextlib.suppress(OSError), open(asked["verdict"]) as file:
        verdict = file.read(asked["most"])
    output, errors = (b"".join(chunks)[-asked["most"] :].decode(errors="replace") for chunks in pipes)
    told = {"status": status if status >= 0 else 128 - status, "output": output, "errors": errors, "verdict": verdict}
    print(f"\n{asked['mark']}{json.dumps(told)}", flush=True)


def become(port: int, path: str, command: list[str]) -> None:
    """Becomes the program, beside a process that listens for it. The program's end ends that process's namespace."""
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    if os.fork() == 0:
        _forward(listening, path)
    listening.close()
    os.execvp(command[0], command)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
    else:
        main(json.load(sys.stdin))
