"""Checksums tell each changed byte, of files longer than a thread reads at a time, too."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.utils import checksums


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


def test_an_indented_object_tells_every_flipped_bit_and_needs_no_checksum(tmp_path):
    record, file = {"steps": 12, "task": {"name": "a"}}, tmp_path / "config.json"
    file.write_text(checksums.indented(record))
    assert checksums.read_object(file) == record
    text = file.read_bytes()
    for place in range(8 * (len(text) - 1)):  # a changed newline at the end changes nothing
        flipped = bytearray(text)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        with pytest.raises(ValueError):  # noqa: PT011  # some flips leave no JSON
            checksums.read_object(file)
    file.write_text(json.dumps(record))
    assert checksums.read_object(file) == record
    file.write_text("[1]")
    with pytest.raises(ValueError, match=r"it holds \[1\]"):
        checksums.read_object(file)


def test_a_seal_of_something_else_is_refused(tmp_path):
    (tmp_path / checksums.SEAL).write_bytes(checksums.sealed(b'{"number": 1}'))
    with pytest.raises(protocols.DataError, match=r"libra_files\.json cannot be used \(it is no seal\)"):
        checksums.check_sealed(tmp_path, weights=True)


def test_weights_of_another_export_in_a_sealed_folder_are_refused(tmp_path):
    """A reader takes model.safetensors before the shards of an index."""
    for name in ("model-00001-of-00001.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_text(name)
    checksums.seal_folder(tmp_path)
    assert checksums.check_sealed(tmp_path, weights=True)
    (tmp_path / "model.safetensors").write_text("older")
    with pytest.raises(protocols.DataError, match=r"/model\.safetensors is not of this export"):
        checksums.check_sealed(tmp_path, weights=True)
    assert checksums.check_sealed(tmp_path, weights=False)


@pytest.mark.parametrize("share", [slice(None), slice(5, 6)])
def test_what_is_no_folder_in_a_sealed_one_is_left_to_its_readers(tmp_path, share):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    checksums.seal_folder(tmp_path)
    for name in ("missing", "config.json"):
        assert not checksums.check_sealed(tmp_path / name, weights=True, share=share)
    shutil.rmtree(tmp_path / "adapter")
    if share == slice(None):
        with pytest.raises(protocols.DataError, match=r"adapter/adapter_config\.json is missing"):
            checksums.check_sealed(tmp_path / "adapter", weights=True)
    else:  # another process has that file
        assert checksums.check_sealed(tmp_path / "adapter", weights=True, share=share)


CHILD = """
import pathlib, sys, threading
from libra_jax.utils import checksums
begun = threading.Event()
checksums._of_chunk = lambda path, begin: begun.set() or path.read_bytes()
threading.Thread(target=checksums.of_files, args=(pathlib.Path(sys.argv[1]), ["pipe"]), daemon=True).start()
begun.wait()
"""


def test_a_disk_that_never_answers_does_not_keep_the_process_alive(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # no one ever writes it
    assert subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], timeout=20).returncode == 0


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def refuse(path, begin):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "file").write_text("a")
    kept = checksums.of_files(tmp_path, ["file"])
    monkeypatch.setattr(checksums, "_of_chunk", refuse)
    assert checksums.problem(tmp_path, kept) == f"{tmp_path / 'file'} cannot be read (Permission denied)"


@pytest.mark.parametrize("name", ["pipe", "socket"])
def test_what_is_no_regular_file_is_refused_instead_of_waited_for(tmp_path, name):
    path = tmp_path / name
    if name == "pipe":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    with pytest.raises(OSError, match=f"{name}'$"):
        checksums.read_bytes(path)
    with pytest.raises(OSError, match=f"{name}'$"):
        checksums.open_regular(path, os.O_RDWR | os.O_CREAT)  # whose writes would fill the pipe
    assert "cannot be read" in checksums.problem(tmp_path, {name: checksums.Sum(0, "0")})
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").write_bytes(b"1")
    assert checksums.read_bytes(tmp_path / "link") == b"1"
    with pytest.raises(IsADirectoryError):
        checksums.read_bytes(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["generation_config.json", "special_tokens_map.json", "additional_chat_templates", "adapter_config.json"],
)
def test_a_file_that_was_added_to_a_sealed_model_is_refused_where_readers_take_it(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    checksums.seal_folder(tmp_path)
    (tmp_path / "README.md").write_text("a note")
    assert checksums.check_sealed(tmp_path, weights=False)
    (tmp_path / name).mkdir()
    with pytest.raises(protocols.DataError, match=f"{name} is not of this export"):
        checksums.check_sealed(tmp_path, weights=False)
    (tmp_path / name).rmdir()
    assert checksums.check_sealed(tmp_path, weights=True)
