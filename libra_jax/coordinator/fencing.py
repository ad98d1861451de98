"""Fences runs off: at most one start of a run writes to a workdir.

Each start takes the next fencing token (`Token`), and an earlier start writes nothing more.

    <workdir>/fencing/token-00000003.json  the token of the third start; its creation is exclusive

Locks do not hold across the hosts of every shared file system, and clocks differ between hosts. Exclusive links and
exclusive file creation are promised by POSIX and by NFS (creation from its version 3 on). A run looks for a later token
before it appends a record, writes a part of a checkpoint or renames a manifest. If a later token exists, the run stops
with a sentence.

Between the look and the write lie microseconds. A process that is suspended there for as long as its successor needs to
start might still rename its manifest afterwards. So a token's file holds the step from which its run resumed, and a
manifest holds its run's token. A manifest of an earlier token beyond that step is void. Two runs never write the same
file: parts have the token in their names (`checkpoints`).

Tested on local file systems, not on shared ones. A look lists the folder, which opens the folder, and NFS then asks its
server.

Thread-safety: every thread may look.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from libra_jax import protocols
from libra_jax.utils import checksums

FOLDER = "fencing"

FORMER_FOLDER = "epochs"
"""Folder of the tokens in workdirs of earlier versions, whose runs would not see a token of this version."""

LOOK_SECONDS = 1.0
"""Seconds between two looks for a later token while nothing is written."""

_UNKNOWN = 2**53
"""Step in the file of a token that has just been taken: no manifest is beyond it."""

_NAME = re.compile(r"token-(\d{8})\.json")


class Superseded(protocols.LibraError):
    """Another start of the same run has taken its workdir over."""


@dataclass(frozen=True)
class Holder:
    """The process that took a fencing token.

    Attributes:
      number: number of the token, from 1.
      host: name of the process's host.
      pid: process id on that host.
      step: step of the checkpoint from which the run resumed; -1 if none, and a huge value until it is known.
      taken: time of creation, in seconds since 1970 by that host's clock; for display only, never for comparison.
    """

    number: int
    host: str
    pid: int
    step: int
    taken: float


@dataclass(eq=False)
class Token:
    """The fencing token of a run.

    Attributes:
      number: number of the token, from 1.
    """

    workdir: Path
    number: int
    _superseded: bool = field(default=False, init=False)

    def may_write(self) -> bool:
        """Returns True if no later token is known. If the workdir cannot be reached, the write itself fails later."""
        try:
            self.check()
        except Superseded:
            return False
        except OSError:
            return True
        return True

    def check(self) -> None:
        """Raises Superseded if a later token has been taken, and OSError if the workdir cannot be reached."""
        # Tokens are never removed, so one look that finds a later token is enough.
        self._superseded = self._superseded or max(_numbers(self.workdir), default=0) > self.number
        if self._superseded:
            holder = newest(self.workdir)
            who = f"the run of process {holder.pid} on {holder.host}" if holder is not None else "a later run"
            raise Superseded(
                f"{self.workdir} has been taken over by {who} (fencing token {max(_numbers(self.workdir))}; this "
                f"run's is {self.number}): this one stops and writes nothing more; nothing is lost, the other goes on."
            )


async def watch(token: protocols.FencingToken) -> None:
    """Looks for a later token every `LOOK_SECONDS`. If the workdir cannot be reached, the next look decides.

    Raises:
      Superseded: a later token has been taken.
    """
    while True:
        with contextlib.suppress(OSError):
            # On a thread, because a shared file system may not answer for long.
            await asyncio.to_thread(token.check)
        await asyncio.sleep(LOOK_SECONDS)


def take(workdir: Path, newest_step: Callable[[], int]) -> Token:
    """Takes the next fencing token of a workdir. From then on, every earlier run in the workdir is superseded.

    Args:
      newest_step: returns the step of the newest checkpoint (`checkpoints.newest_step`). It is called once earlier runs
        are fenced off.

    Raises:
      DataError: an earlier version of this program made the workdir.
      OSError: the folder cannot be written.
    """
    if (workdir / FORMER_FOLDER).exists():
        raise protocols.DataError(
            f"{workdir} is the workdir of an earlier version of this program, which kept its fencing tokens in "
            f"{FORMER_FOLDER}/: go on with that version, or choose another --workdir."
        )
    folder = workdir / FOLDER
    folder.mkdir(exist_ok=True)
    number = max(_numbers(workdir), default=0) + 1
    while True:
        holder = Holder(number, socket.gethostname(), os.getpid(), _UNKNOWN, time.time())
        with contextlib.suppress(FileExistsError):
            _write(workdir, holder, new=True)
            break
        # Another start has taken the number since the look.
        number += 1
    # Only now is the newest step final: every earlier run writes nothing more.
    _write(workdir, dataclasses.replace(holder, step=newest_step()), new=False)
    return Token(workdir, number)


def newest(workdir: Path) -> Holder | None:
    """Returns the holder of the newest token. None if no token has been taken, or its file is not readable yet."""
    number = max(_numbers(workdir), default=0)
    return _read(workdir, number) if number else None


def limits(workdir: Path) -> Mapping[int, int]:
    """Returns the resumed step of each token. Manifests of earlier tokens beyond that step are void."""
    holders = (_read(workdir, number) for number in _numbers(workdir))
    return {holder.number: holder.step for holder in holders if holder is not None}


def _file(workdir: Path, number: int) -> Path:
    return workdir / FOLDER / f"token-{number:08d}.json"


def _numbers(workdir: Path) -> list[int]:
    try:
        names = os.listdir(workdir / FOLDER)
    except FileNotFoundError:
        return []
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def _write(workdir: Path, holder: Holder, *, new: bool) -> None:
    """Writes the token's file with its whole content, or not at all, even if this process dies.

    Args:
      holder: the content.
      new: if True, the token must not have been taken; if False, its file is replaced.

    Raises:
      FileExistsError: another process has taken the token.
    """
    file, text = _file(workdir, holder.number), checksums.sealed(json.dumps(asdict(holder)).encode())
    # A file of this process's own, so that two starts never write the same one.
    partial = file.with_suffix(f".{holder.host}.{holder.pid}.partial")
    with partial.open("wb") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    if not new:
        partial.replace(file)
        return
    try:
        # The exclusive step: linking fails if the name exists, on every host.
        os.link(partial, file)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # On a file system without links the file may be empty for a moment.
        with file.open("xb") as stream:
            stream.write(text)
    finally:
        partial.unlink()


def damaged(workdir: Path) -> list[str]:
    """Returns a sentence for each damaged file of a token, including the newest run's own.

    Nothing in such a file is used. The run's manifests still show from where that run resumed (`checkpoint_store`).
    """
    files = [_file(workdir, number) for number in sorted(_numbers(workdir)) if _read(workdir, number) is None]
    return [f"{file} is damaged and is not used: it says which run held the workdir." for file in files]


def _read(workdir: Path, number: int) -> Holder | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Holder(**checksums.unsealed(checksums.read_bytes(_file(workdir, number))))
    return None
