"""Checksums of data on disk: xxh3_128 of whole files, and of JSON texts that contain their own checksum.

A file of at most `CHUNK` bytes has the checksum of its bytes. A longer file has the checksum of its chunks' checksums,
so that threads can read its chunks in parallel. xxhash and file reads release Python's global lock.

The checksums find damage (a flipped bit, a lost page, a torn write). They do not protect against an attacker.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import re
import stat
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from libra_jax import protocols

CHUNK = 16 * 2**20
"""Bytes that one thread reads at a time."""

THREADS = 8
"""Largest number of threads. Each holds one chunk."""

SEAL = "libra_files.json"
"""File with the sizes and checksums of a folder's files. It is written last."""

_CHECKSUM = re.compile(rb', "checksum": "([0-9a-f]{32})"\}')
_TAIL = len(b', "checksum": ""}') + 32


class Sum(NamedTuple):
    """Size and checksum of a file.

    Attributes:
      size: Size in bytes.
      checksum: 32 hexadecimal digits.
    """

    size: int
    checksum: str


def open_file(path: Path, buffering: int = -1) -> BinaryIO:
    """Opens a stored file for reading. Raises OSError for a FIFO, a socket or a device, which may never answer."""
    return open(path, "rb", buffering, opener=open_regular)


def open_regular(path: str | Path, flags: int) -> int:
    """Opens or makes a regular file and returns its descriptor. Raises OSError as `open_file`."""
    # Without the flag, opening a FIFO waits for its other end.
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o644)
    if not (stat.S_ISREG(mode := os.fstat(descriptor).st_mode) or stat.S_ISDIR(mode)):  # Python refuses a folder
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return descriptor


def read_bytes(path: Path) -> bytes:
    """Returns the bytes of a stored file. Raises OSError as `open_file`."""
    with open_file(path) as file:
        return file.read()


def of_bytes(data: bytes) -> str:
    """Returns the checksum of bytes. `of_files` gives a file with these bytes the same checksum."""
    # At least one chunk: empty data has the checksum of an empty chunk.
    chunks = [data[begin : begin + CHUNK] for begin in range(0, max(len(data), 1), CHUNK)]
    return _joined([xxhash.xxh3_128_digest(chunk) for chunk in chunks])


def of_files(folder: Path, names: Iterable[str]) -> dict[str, Sum]:
    """Reads files in parallel and returns their sizes and checksums.

    Args:
      folder: Folder of the files.
      names: Paths inside the folder.

    Raises:
      OSError: A file cannot be read.
    """
    sizes = {name: (folder / name).stat().st_size for name in names}
    chunks = [(name, begin) for name, size in sizes.items() for begin in range(0, max(size, 1), CHUNK)]
    digests: dict[str, list[bytes]] = {name: [] for name in sizes}
    for (name, _), digest in zip(chunks, _side_by_side([(folder / name, at) for name, at in chunks]), strict=True):
        digests[name].append(digest)
    return {name: Sum(size, _joined(digests[name])) for name, size in sizes.items()}


def _side_by_side(chunks: Sequence[tuple[Path, int]]) -> list[bytes]:
    """Returns the chunks' digests.

    The threads are daemons, unlike those of a pool: the disk may never answer, and they must not keep the process
    alive. If the caller is interrupted here, no thread begins another chunk.

    Raises:
      OSError: A file cannot be read.
    """
    sums: dict[int, bytes] = {}
    errors: list[BaseException] = []
    waiting = collections.deque(enumerate(chunks))

    def read() -> None:
        try:
            while waiting:
                with contextlib.suppress(IndexError):  # another thread took the last one
                    number, chunk = waiting.popleft()
                    sums[number] = _of_chunk(*chunk)
        except BaseException as error:
            errors.append(error)

    many = max(1, min(THREADS, os.cpu_count() or 1, len(chunks)))
    threads = [threading.Thread(target=read, name=f"checksums-{index}", daemon=True) for index in range(many)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        waiting.clear()
    if errors:
        raise errors[0]
    return [sums[number] for number in range(len(chunks))]


def _of_chunk(path: Path, begin: int) -> bytes:
    with open_file(path, buffering=0) as file:
        file.seek(begin)
        data = bytearray()
        # A network file system may return less than asked for.
        while len(data) < CHUNK and (read := file.read(CHUNK - len(data))):
            data += read
    return xxhash.xxh3_128_digest(data)


def _joined(digests: list[bytes]) -> str:
    return digests[0].hex() if len(digests) == 1 else xxhash.xxh3_128_hexdigest(b"".join(digests))


def problem(folder: Path, expected: Mapping[str, Sum]) -> str:
    """Compares a folder's files with their expected checksums. Returns the first problem, or an empty text if none.

    Files that `expected` does not name are ignored. All sizes are compared before any file is read.
    """
    for name, checksum in expected.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            return f"{name} is missing" if missing else f"{name} cannot be read ({error.strerror or error})"
        if size != checksum.size:
            return f"{name} has {size} bytes instead of {checksum.size}"
    try:
        actual = of_files(folder, expected)
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({error.strerror or error})"
    damaged = [name for name, checksum in expected.items() if actual[name] != checksum]
    further = f", and {len(damaged) - 1} further files" if len(damaged) > 1 else ""
    return f"{damaged[0]} is damaged (its checksum is not the one it was written with{further})" if damaged else ""


def from_json(record: Mapping[str, Any]) -> dict[str, Sum]:
    """Returns sums that were written as JSON."""
    return {name: Sum(int(size), str(checksum)) for name, (size, checksum) in record.items()}


def sealed(text: bytes) -> bytes:
    """Returns the text of a JSON object with its own checksum added as the last field. The object must not be empty."""
    return text[:-1] + b', "checksum": "' + of_bytes(text[:-1]).encode() + b'"}'


def is_whole(text: bytes) -> bool | None:
    """Returns whether a text that `sealed` returned is undamaged. None if the text does not end with a checksum."""
    match = _CHECKSUM.fullmatch(text[-_TAIL:])
    return None if match is None else of_bytes(text[:-_TAIL]) == match[1].decode()


def unsealed(text: bytes) -> dict[str, Any]:
    """Returns the object of a text that `sealed` returned, without its checksum.

    Raises:
      ValueError: The text is damaged, or has no checksum.
    """
    if not is_whole(text):
        raise ValueError("its checksum is not the one it was written with")
    record = json.loads(text)
    del record["checksum"]
    return record


def indented(record: Mapping[str, Any]) -> str:
    """Returns the indented JSON of an object that is not empty, with its own checksum as the last field."""
    return sealed(json.dumps(record, indent=2)[:-2].encode() + b"}").decode() + "\n"


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file without its checksum, which a file of another program or version lacks.

    Raises OSError if it cannot be read, and ValueError if it is damaged or holds no JSON object.
    """
    text = read_bytes(path).rstrip()
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError(f"it holds {record!r:.40}")
    # A flipped bit in the field's name or in its digits leaves a last field that looks like a checksum.
    last = next(reversed(record.values()), None)
    if isinstance(last, str) and len(last) == 32 and not is_whole(text):
        raise ValueError('its checksum is not the one it was written with; if you edited it, remove "checksum"')
    record.pop("checksum", None)
    return record


def known_records(workdir: Path) -> protocols.Records | None:
    """Returns the run's id and the number of its records, as its `status.json` has them. None without them."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        records: protocols.Records | None = unsealed(read_bytes(workdir / "status.json").rstrip()).get("records")
        # The file may be another program's.
        return records if isinstance(records, dict) and records.keys() == {"run", "counts"} else None
    return None


def files_of(folder: Path) -> list[str]:
    """Returns the paths of a folder's files relative to the folder, without its seal."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return [str(file.relative_to(folder)) for file in files if file != folder / SEAL]


def seal_folder(folder: Path, added: Sequence[str] | None = None) -> None:
    """Writes a folder's seal durably.

    Args:
      folder: Folder to seal.
      added: Files to add to the present seal. None seals all files.

    Raises:
      OSError: A file cannot be read, or the seal cannot be written or does not exist.
      ValueError: The present seal is damaged.
    """
    sums = of_files(folder, files_of(folder)) if added is None else read_seal(folder) | of_files(folder, added)
    text = sealed(json.dumps({"files": sums}).encode())
    partial = folder / f"{SEAL}.partial"
    with partial.open("wb") as file:
        file.write(text)
        file.flush()
        # On disk before the rename, or a power failure could leave an empty file behind the name.
        os.fsync(file.fileno())
    partial.replace(folder / SEAL)


def read_seal(folder: Path) -> dict[str, Sum]:
    """Returns the sizes and checksums in a folder's seal.

    Raises:
      FileNotFoundError: The folder has no seal.
      OSError: The seal cannot be read.
      ValueError: The seal is damaged.
    """
    if isinstance(files := unsealed(read_bytes(folder / SEAL)).get("files"), dict):
        return from_json(files)
    raise ValueError("it is no seal")


def check_sealed(folder: Path, *, weights: bool, share: slice = slice(None)) -> bool:
    """Verifies the files of a model, tokenizer or adapter against the seal of the folder, or of the folder above it.

    Args:
      folder: Folder to read from. Folders inside it are not verified.
      weights: Whether the folder's weights are read. If not, their files may be missing.
      share: Part of the sorted files, if several processes verify the folder together.

    Returns:
      False if the folder has no seal, as one that another program wrote.

    Raises:
      DataError: The seal or a file is damaged or missing.
    """
    # An exported model seals the folder of its adapter, too.
    for root, inside in ((folder, ""), (folder.resolve().parent, f"{folder.resolve().name}/")):
        try:
            sums = read_seal(root)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise protocols.DataError(f"{root / SEAL} cannot be used ({error}); {_ADVICE}") from None
        listed = [name.removeprefix(inside) for name in sorted(sums) if name.startswith(inside)]
        names = [name for name in listed if "/" not in name and (weights or not name.endswith(".safetensors"))]
        if problem_found := problem(folder, {name: sums[inside + name] for name in names[share]}):
            raise protocols.DataError(f"{folder}/{problem_found}; {_ADVICE}")
        # Readers may take what an older export or another program left in the folder.
        # `glob` and not `iterdir`, which raises for a file or a missing folder: readers refuse those by a sentence.
        entries = {file.name for file in folder.glob("*") if _READ.fullmatch(file.name)}
        entries |= {file.name for file in folder.glob("*.safetensors") if weights}
        if names and (strangers := entries - {name.partition("/")[0] for name in listed}):
            raise protocols.DataError(f"{folder}/{min(strangers)} is not of this export, as {SEAL} says; remove it")
        if names:
            return True
    return False


_READ = re.compile(
    r".*config\.json|.*\.index\.json|tokenizer.*|.*_tokens(_map)?\.json|vocab\..*|merges\.txt|.*chat_template.*"
)
"""Names besides weights that readers of a model, tokenizer or adapter look for."""

_ADVICE = f"export the model again, or take a copy; if you changed the file yourself, remove {SEAL}"
