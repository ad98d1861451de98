"""Never two trainers for one workdir: each start of a run takes the next epoch, and an earlier one writes nothing more.

    <workdir>/epochs/epoch-00000003.json    made by whoever starts third, and by nobody else: its making is exclusive

Locks do not hold across the hosts of every shared file system, and clocks differ between hosts; that a name is linked
once, or a file created once, is promised by POSIX and by NFS (creation from its version 3 on). A run looks for a later
epoch before it appends a record, writes a part of a checkpoint or renames a manifest into place, and stops with a
sentence once there is one.

Between such a look and the writing lie microseconds. A process that is stopped right there for as long as its successor
needs to start might still rename its manifest afterwards. So an epoch says at which step it went on, a manifest says of
which epoch it is, and one of an earlier epoch beyond that step is void. Files never meet: parts have the epoch in their
names (`checkpoints`).

Local file systems were tried, shared ones not: a look lists the folder, which opens it, and NFS asks its server then.

Thread-safety: any thread may look.
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
from dataclasses import asdict, dataclass
from pathlib import Path

from libra_jax import checksums, protocols

FOLDER = "epochs"

LOOK_SECONDS = 1.0
"""Between two looks whether a workdir has been taken over, as long as nothing is written."""

_UNKNOWN = 2**53
"""The step of an epoch that has just been taken: no manifest is beyond it."""

_NAME = re.compile(r"epoch-(\d{8})\.json")


class Superseded(protocols.LibraError):
    """Another start of the same run has taken its workdir over."""


@dataclass(frozen=True)
class Holder:
    """Who took an epoch.

    Attributes:
      epoch: its number, from 1.
      host: its host's name.
      pid: of the process there.
      step: of the checkpoint that it goes on from; -1 is none, and a huge one stands there until it is known.
      taken: when, in seconds since 1970 by that host's clock; to be shown, never to be compared.
    """

    epoch: int
    host: str
    pid: int
    step: int
    taken: float


class Epoch:
    """A run's own epoch.

    Attributes:
      number: from 1.
    """

    def __init__(self, workdir: Path, number: int) -> None:
        self._workdir = workdir
        self.number = number
        self._superseded = False

    def superseded(self) -> bool:
        """Whether a later epoch has been taken.

        Raises:
          OSError: the workdir cannot be reached.
        """
        self._superseded = self._superseded or max(_numbers(self._workdir), default=0) > self.number
        return self._superseded

    def may_write(self) -> bool:
        """Whether none has, as far as can be seen: where the workdir cannot be reached, writing will say so."""
        try:
            return not self.superseded()
        except OSError:
            return True

    def check(self) -> None:
        """Raises Superseded if a later epoch has been taken, OSError where the workdir cannot be reached."""
        if self.superseded():
            holder = newest(self._workdir)
            who = f"the run of process {holder.pid} on {holder.host}" if holder is not None else "a later run"
            raise Superseded(
                f"{self._workdir} has been taken over by {who} (epoch {max(_numbers(self._workdir))}; this is epoch "
                f"{self.number}): this one stops and writes nothing more; nothing is lost, the other goes on."
            )


async def watch(epoch: Epoch) -> None:
    """Looks again and again, for as long as the run lives; where the workdir cannot be reached, it looks again later.

    Raises:
      Superseded: a later epoch has been taken.
    """
    while True:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(epoch.check)
        await asyncio.sleep(LOOK_SECONDS)


def take(workdir: Path, newest_step: Callable[[], int]) -> Epoch:
    """Takes the next epoch of a workdir: from then on, every earlier run in it is superseded.

    Args:
      workdir: the run's folder.
      newest_step: gives the step of its newest checkpoint (`checkpoints.newest_step`) once earlier runs are fenced off.

    Raises:
      OSError: the folder cannot be written.
    """
    folder = workdir / FOLDER
    folder.mkdir(exist_ok=True)
    number = max(_numbers(workdir), default=0) + 1
    while True:
        holder = Holder(number, socket.gethostname(), os.getpid(), _UNKNOWN, time.time())
        with contextlib.suppress(FileExistsError):
            _make(workdir, holder)
            break
        number += 1
    _replace(workdir, dataclasses.replace(holder, step=newest_step()))
    return Epoch(workdir, number)


def newest(workdir: Path) -> Holder | None:
    """Who took the newest epoch; None if nobody has, or has not yet said who it is."""
    number = max(_numbers(workdir), default=0)
    return _read(workdir, number) if number else None


def limits(workdir: Path) -> Mapping[int, int]:
    """Epoch to the step at which it went on: manifests of earlier epochs beyond that step are void."""
    holders = (_read(workdir, number) for number in _numbers(workdir))
    return {holder.epoch: holder.step for holder in holders if holder is not None}


def _file(workdir: Path, number: int) -> Path:
    return workdir / FOLDER / f"epoch-{number:08d}.json"


def _numbers(workdir: Path) -> list[int]:
    try:
        names = os.listdir(workdir / FOLDER)
    except FileNotFoundError:
        return []
    return [int(found[1]) for name in names if (found := _NAME.fullmatch(name))]


def _make(workdir: Path, holder: Holder) -> None:
    """The epoch is taken with all that it says, or not at all, wherever its taker dies.

    Raises:
      FileExistsError: another has taken it.
    """
    file, partial = _file(workdir, holder.epoch), _written(workdir, holder)
    try:
        os.link(partial, file)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        with file.open("xb") as made:  # a file system without links: it may be empty for a moment
            made.write(_text(holder))
    finally:
        partial.unlink()


def _replace(workdir: Path, holder: Holder) -> None:
    _written(workdir, holder).replace(_file(workdir, holder.epoch))


def _written(workdir: Path, holder: Holder) -> Path:
    """A file of this process's own that says who holds an epoch."""
    partial = _file(workdir, holder.epoch).with_suffix(f".{holder.host}.{holder.pid}.partial")
    with partial.open("wb") as written:
        written.write(_text(holder))
        written.flush()
        os.fsync(written.fileno())
    return partial


def _text(holder: Holder) -> bytes:
    return checksums.sealed(json.dumps(asdict(holder)).encode())


def damaged(workdir: Path) -> list[str]:
    """Returns a sentence for each file of an epoch that is not as it was written, the newest run's own included.

    Nothing of such a file is used. Its run's manifests still tell from where that run went on (`checkpoint_store`).
    """
    files = [_file(workdir, number) for number in sorted(_numbers(workdir)) if _read(workdir, number) is None]
    return [f"{file} is damaged and is not used: it says which run held the workdir." for file in files]


def _read(workdir: Path, number: int) -> Holder | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Holder(**checksums.unsealed(_file(workdir, number).read_bytes()))
    return None
