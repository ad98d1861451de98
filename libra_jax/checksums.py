"""Checksums of what is kept on disk: xxh3_128, of whole files and of JSON texts that carry their own.

A file of at most `CHUNK` bytes has the checksum of its bytes. A longer one has the checksum of its chunks' checksums,
so that threads can read its chunks side by side. xxhash and the reads release Python's lock.

These checksums find damage (a flipped bit, a lost page, a torn write). They are no defence against an attacker.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

CHUNK = 16 * 2**20
"""Bytes that one thread reads at a time."""

THREADS = 8
"""Threads at most; each holds one chunk."""

SEAL = "libra_files.json"
"""A folder's list of its files with their sizes and checksums, written last."""

_CHECKSUM = re.compile(rb', "checksum": "([0-9a-f]{32})"\}')
_TAIL = len(b', "checksum": ""}') + 32


@dataclass(frozen=True)
class Sum:
    """Size and checksum of a file.

    Attributes:
      size: bytes.
      checksum: 32 hexadecimal digits.
    """

    size: int
    checksum: str


def of_bytes(data: bytes) -> str:
    """Returns the checksum of bytes, the same that `of_files` gives a file that holds them."""
    chunks = [data[begin : begin + CHUNK] for begin in range(0, max(len(data), 1), CHUNK)]
    return _joined([xxhash.xxh3_128_digest(chunk) for chunk in chunks])


def of_files(folder: Path, names: Iterable[str]) -> dict[str, Sum]:
    """Reads files side by side, and returns their sizes and checksums.

    Args:
      folder: holds them.
      names: paths inside the folder.

    Raises:
      OSError: a file cannot be read.
    """
    sizes = {name: (folder / name).stat().st_size for name in names}
    chunks = [(name, begin) for name, size in sizes.items() for begin in range(0, max(size, 1), CHUNK)]
    digests: dict[str, list[bytes]] = {name: [] for name in sizes}
    for (name, _), digest in zip(chunks, _side_by_side([(folder / name, at) for name, at in chunks]), strict=True):
        digests[name].append(digest)
    return {name: Sum(size, _joined(digests[name])) for name, size in sizes.items()}


def _side_by_side(chunks: Sequence[tuple[Path, int]]) -> list[bytes]:
    """Returns the chunks' digests.

    No thread keeps the process alive, as a pool's would: the disk may never answer. Whoever is interrupted here leaves
    the chunks unread that no thread has begun.

    Raises:
      OSError: a file cannot be read.
    """
    found: dict[int, bytes] = {}
    errors: list[BaseException] = []
    numbers, stop, lock = itertools.count(), threading.Event(), threading.Lock()

    def read() -> None:
        while not stop.is_set():
            with lock:
                number = next(numbers)
            if number >= len(chunks):
                return
            try:
                found[number] = _of_chunk(*chunks[number])
            except BaseException as error:
                errors.append(error)
                return

    many = max(1, min(THREADS, os.cpu_count() or 1, len(chunks)))
    threads = [threading.Thread(target=read, name=f"checksums-{index}", daemon=True) for index in range(many)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
    if errors:
        raise errors[0]
    return [found[number] for number in range(len(chunks))]


def _of_chunk(path: Path, begin: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        data = bytearray()
        while len(data) < CHUNK and (read := file.read(CHUNK - len(data))):  # a network file system may read less
            data += read
    return xxhash.xxh3_128_digest(data)


def _joined(digests: list[bytes]) -> str:
    return digests[0].hex() if len(digests) == 1 else xxhash.xxh3_128_hexdigest(b"".join(digests))


def problem(folder: Path, expected: Mapping[str, Sum]) -> str:
    """Compares a folder's files with what they were; returns what is wrong first, and an empty text if nothing is.

    Files that `expected` does not name are ignored. Sizes are compared before anything is read.
    """
    for name, kept in expected.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            return f"{name} is missing" if missing else f"{name} cannot be read ({error.strerror or error})"
        if size != kept.size:
            return f"{name} has {size} bytes instead of {kept.size}"
    try:
        found = of_files(folder, expected)
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({error.strerror or error})"
    damaged = [name for name, kept in expected.items() if found[name] != kept]
    further = f", and {len(damaged) - 1} further files" if len(damaged) > 1 else ""
    return f"{damaged[0]} is damaged (its checksum is not the one it was written with{further})" if damaged else ""


def to_json(sums: Mapping[str, Sum]) -> dict[str, list[Any]]:
    """Returns sums as plain values."""
    return {name: [item.size, item.checksum] for name, item in sums.items()}


def from_json(record: Mapping[str, Any]) -> dict[str, Sum]:
    """Returns the sums that `to_json` was given."""
    return {name: Sum(int(size), str(checksum)) for name, (size, checksum) in record.items()}


def sealed(text: bytes) -> bytes:
    """Adds to the text of a JSON object, which must not be empty, its own checksum as the last field."""
    return text[:-1] + b', "checksum": "' + of_bytes(text[:-1]).encode() + b'"}'


def carries(text: bytes) -> bool:
    """Whether the text of a JSON object ends with a checksum of its own."""
    return _CHECKSUM.fullmatch(text[-_TAIL:]) is not None


def is_whole(text: bytes) -> bool:
    """Whether a text that `sealed` returned is as it was then."""
    found = _CHECKSUM.fullmatch(text[-_TAIL:])
    return found is not None and of_bytes(text[:-_TAIL]) == found[1].decode()


def unsealed(text: bytes) -> dict[str, Any]:
    """Returns the object of a text that `sealed` returned, without its checksum.

    Raises:
      ValueError: the text is damaged, or carries no checksum.
    """
    if not is_whole(text):
        raise ValueError("its checksum is not the one it was written with")
    record = json.loads(text)
    del record["checksum"]
    return record


def files_of(folder: Path) -> list[str]:
    """Returns the paths of a folder's files inside it, its seal left out."""
    found = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return [str(file.relative_to(folder)) for file in found if file != folder / SEAL]


def seal_folder(folder: Path) -> None:
    """Writes a folder's seal, durably.

    Raises:
      OSError: a file cannot be read, or the seal cannot be written.
    """
    text = sealed(json.dumps({"files": to_json(of_files(folder, files_of(folder)))}).encode())
    partial = folder / f"{SEAL}.partial"
    with partial.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / SEAL)


def read_seal(folder: Path) -> dict[str, Sum]:
    """Returns what a folder's seal says of its files.

    Raises:
      FileNotFoundError: the folder has no seal.
      OSError: the seal cannot be read.
      ValueError: the seal is damaged.
    """
    return from_json(unsealed((folder / SEAL).read_bytes())["files"])
