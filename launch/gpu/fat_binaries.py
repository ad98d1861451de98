"""Removes the machine code of other GPU architectures from a CUDA library, so that the library compresses well.

A CUDA library holds fat binaries in its ELF section `.nv_fatbin`. Each has entries: machine code for one architecture,
or PTX. The driver picks an entry by its header, so the bytes of the others are never read. They become zeros here, and
the file keeps its length and every offset in it. PTX stays where a fat binary has no machine code for the architecture.
The formats are those of ELF-64 and of CUDA's `fatbinary.h`; `cuobjdump --list-elf` shows the same entries.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SECTION = ".nv_fatbin"
_MAGIC = 0xBA55ED50
_FAT_HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
_ENTRY_HEADER = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes of the payload
_ENTRY_ARCHITECTURE = 28  # offset of the architecture in an entry's header
_PTX, _MACHINE_CODE = 1, 2


@dataclass(frozen=True)
class Entry:
    """One program of a fat binary.

    Attributes:
      kind: 1 for PTX, 2 for machine code.
      architecture: compute capability times ten, such as 90.
      start: offset of the payload in the file.
      size: bytes of the payload.
    """

    kind: int
    architecture: int
    start: int
    size: int


def slim(library: bytes, architecture: int) -> bytes:
    """Returns the library with zeros instead of the programs that `architecture` does not need.

    Args:
      library: content of an ELF-64 shared library; without the section, it is returned as it is.
      architecture: compute capability times ten, such as 90.

    Raises:
      ValueError: the file is no ELF-64 library, or a fat binary is cut off.
    """
    data = bytearray(library)
    for entries in fat_binaries(library):
        # Machine code runs on later minor versions of its major version, and the driver takes the latest that fits.
        fitting = [
            entry.architecture
            for entry in entries
            if entry.kind == _MACHINE_CODE and architecture // 10 * 10 <= entry.architecture <= architecture
        ]
        for entry in entries:
            native = entry.kind == _MACHINE_CODE and entry.architecture == max(fitting, default=0)
            fallback = entry.kind == _PTX and entry.architecture <= architecture and not fitting
            if not native and not fallback:
                data[entry.start : entry.start + entry.size] = bytes(entry.size)
    return bytes(data)


def fat_binaries(library: bytes) -> Iterator[list[Entry]]:
    """Yields the entries of each fat binary of a library.

    Raises:
      ValueError: see `slim`.
    """
    offset, size = _section(library)
    end = offset + size
    while offset + _FAT_HEADER.size <= end:
        magic, _, header, length = _FAT_HEADER.unpack_from(library, offset)
        if magic != _MAGIC:  # padding between two fat binaries
            offset += 8
            continue
        stop = offset + header + length
        if stop > end:
            raise ValueError(f"a fat binary of {length} bytes is cut off at byte {offset}")
        yield list(_entries(library, offset + header, stop))
        offset = stop


def _entries(library: bytes, offset: int, stop: int) -> Iterator[Entry]:
    while offset < stop:
        kind, _, header, size = _ENTRY_HEADER.unpack_from(library, offset)
        (architecture,) = struct.unpack_from("<I", library, offset + _ENTRY_ARCHITECTURE)
        if not header or offset + header + size > stop:
            raise ValueError(f"an entry of {size} bytes is cut off at byte {offset}")
        yield Entry(kind, architecture, offset + header, size)
        offset += header + size


def _section(library: bytes) -> tuple[int, int]:
    """Returns offset and size of the section of fat binaries; (0, 0) if there is none."""
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("it is no ELF-64 library")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", library, 0x3A)
    # A section header has its name as an offset into the section of names; offset and size follow at byte 24.
    headers = [(struct.unpack_from("<I", library, table + index * entry_size)[0], index) for index in range(count)]
    places = [struct.unpack_from("<QQ", library, table + index * entry_size + 24) for index in range(count)]
    names = places[names_index][0]
    for name, index in headers:
        start = names + name
        if library[start : library.index(b"\0", start)] == SECTION.encode():
            offset, size = places[index]
            return int(offset), int(size)
    return 0, 0
