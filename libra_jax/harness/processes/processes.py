"""Runs an agent's program under a deadline, and keeps the ends of what it printed. `keeper.py` ends its processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_jax import protocols
from libra_jax.utils import deadlines, processes

REAP_SECONDS = 15.0
"""Seconds that the processes of an agent may take to end after they are killed."""

_KEEPER = str(Path(__file__).with_name("keeper.py"))
_CHUNK = 65536


@dataclass(frozen=True)
class ProgramResult:
    """The end of an agent's program.

    Attributes:
      status: exit status, 128 + N after signal N. None if the deadline ended the program.
      output: last part of what it printed.
      errors: last part of what it printed to standard error.
      seconds: seconds that it ran.
    """

    status: int | None
    output: str = ""
    errors: str = ""
    seconds: float = 0.0


async def _drain(stream: asyncio.StreamReader, tail: bytearray, max_bytes: int) -> None:
    """Reads the stream to its end, and keeps the last `max_bytes` bytes in `tail`."""
    while chunk := await stream.read(_CHUNK):
        tail += chunk
        del tail[: max(0, len(tail) - max_bytes)]


async def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    cwd: Path,
    root: Path,
    seconds: float,
    most_bytes: int,
    after: Sequence[str] = (),
    orphaned: Sequence[str] = (),
) -> ProgramResult:
    """Runs a program to its end, and ends every process that it left.

    Args:
      command: the program and its arguments.
      environment: the program's complete environment.
      cwd: its working directory.
      root: folder that is removed if this process dies before the program.
      seconds: deadline of the program in seconds.
      most_bytes: bytes of each output that are kept.
      after: a command that runs at the end in every case, also if this process is gone by then. Empty: none.
      orphaned: a command that runs at the end only if this process is gone by then. Empty: none.

    Raises:
      EnvironmentCrashed: the program could not be started.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    keeper = [sys.executable, "-I", "-S", _KEEPER, str(root), str(len(after)), *after, str(len(orphaned)), *orphaned]
    try:
        process = await asyncio.create_subprocess_exec(
            *keeper,
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=cwd,
            env=dict(environment),
            limit=_CHUNK,
        )
    except (OSError, ValueError) as error:
        raise protocols.EnvironmentCrashed(f"{command[0]} could not be started: {error}") from error
    output, errors = bytearray(), bytearray()

    async def wait_for_end() -> int:
        assert process.stdout is not None
        assert process.stderr is not None
        await asyncio.gather(_drain(process.stdout, output, most_bytes), _drain(process.stderr, errors, most_bytes))
        return await process.wait()

    status: int | None = None
    try:
        with contextlib.suppress(deadlines.Overdue):
            status = await deadlines.cancel_after(seconds, wait_for_end())
    finally:
        await deadlines.finish(_end(process))
    printed, complaints = (tail.decode(errors="replace") for tail in (output, errors))
    return ProgramResult(status, printed, complaints, loop.time() - start)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends the keeper, which ends the program and its descendants first."""
    if process.returncode is not None:
        return
    assert process.stdin is not None
    # The byte says that this process lives: it removes the folder itself.
    process.stdin.write(b".")
    process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        # Besides the closed pipe: a process that was forked off this one may hold a copy of the pipe's end.
        process.send_signal(signal.SIGTERM)
    await processes.reap(process, 2 * REAP_SECONDS, "the keeper of an agent, process")
