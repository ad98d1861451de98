"""Checksums tell each changed byte, of files longer than a thread reads at a time, too."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_jax import checksums


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 20])
def test_a_file_has_the_checksum_of_its_bytes_in_any_number_of_chunks(tmp_path, monkeypatch, size):
    monkeypatch.setattr(checksums, "CHUNK", 8)
    data = bytes(range(size))
    (tmp_path / "file").write_bytes(data)
    found = checksums.of_files(tmp_path, ["file"])
    assert found == {"file": checksums.Sum(size, checksums.of_bytes(data))}
    assert checksums.problem(tmp_path, found) == ""
    for place in range(size):
        (tmp_path / "file").write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        assert "file is damaged" in checksums.problem(tmp_path, found)


@given(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), min_size=1, max_size=3), st.data())
def test_a_sealed_text_tells_every_flipped_bit(record, data):
    record.pop("checksum", None)
    record["a"] = 1
    text = checksums.sealed(json.dumps(record).encode())
    assert checksums.unsealed(text) == record
    place = data.draw(st.integers(0, 8 * len(text) - 1))
    flipped = bytearray(text)
    flipped[place // 8] ^= 1 << place % 8
    with pytest.raises(ValueError, match="its checksum is not the one it was written with"):
        checksums.unsealed(bytes(flipped))


def test_a_sealed_folder_names_what_is_missing_or_damaged(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    checksums.seal_folder(tmp_path)
    kept = checksums.read_seal(tmp_path)
    assert set(kept) == {"a", "b"}
    (tmp_path / "a").write_text("ab")
    assert checksums.problem(tmp_path, kept) == "a has 2 bytes instead of 1"
    (tmp_path / "a").unlink()
    assert checksums.problem(tmp_path, kept) == "a is missing"


CHILD = """
import pathlib, sys, threading
from libra_jax import checksums
begun = threading.Event()
read = checksums._of_chunk
checksums._of_chunk = lambda *chunk: begun.set() or read(*chunk)
threading.Thread(target=checksums.of_files, args=(pathlib.Path(sys.argv[1]), ["pipe"]), daemon=True).start()
begun.wait()
"""


def test_a_disk_that_never_answers_does_not_keep_the_process_alive(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # nobody ever writes it
    assert subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], timeout=20).returncode == 0


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def refuse(path, begin):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "file").write_text("a")
    kept = checksums.of_files(tmp_path, ["file"])
    monkeypatch.setattr(checksums, "_of_chunk", refuse)
    assert checksums.problem(tmp_path, kept) == f"{tmp_path / 'file'} cannot be read (Permission denied)"
