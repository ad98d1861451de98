"""Anonymous shared memory, seen from a second process."""

import json
import os
import subprocess
import sys

import pytest

from libra_jax.weights import memfd

READ = """
import json, sys
from libra_jax.weights import memfd
for line in sys.stdin:
    try:
        print(bytes(memfd.open_peer(json.loads(line))[:5]).decode(), flush=True)
    except memfd.SharedMemoryError as error:
        print(f"refused: {error}", flush=True)
"""


@pytest.fixture
def peer():
    process = subprocess.Popen(
        [sys.executable, "-c", READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )

    def read(address: dict) -> str:
        process.stdin.write(json.dumps(address) + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    yield read
    process.stdin.close()
    process.stdout.close()
    process.wait()


@pytest.mark.multiprocess
def test_a_peer_reads_what_the_owner_writes_and_is_refused_once_it_is_closed(peer):
    owner = memfd.Owner(1 << 20, "a test")
    owner.buffer[:5] = b"first"
    assert peer(owner.address) == "first"
    owner.buffer[:5] = b"later"
    assert peer(owner.address) == "later"
    stale = owner.address
    owner.close()
    assert peer(stale).startswith(f"refused: shared weights of process {os.getpid()}")


@pytest.mark.multiprocess
def test_a_descriptor_that_is_another_file_by_now_is_refused(peer):
    owner, other = memfd.Owner(1 << 20, "a test"), memfd.Owner(1 << 20, "a test")
    assert "is another file" in peer({**owner.address, "inode": other.address["inode"]})
    owner.close()
    other.close()


def test_a_mapping_is_read_only_and_outlives_its_owner():
    owner = memfd.Owner(4096, "a test")
    owner.buffer[:3] = b"abc"
    mapping = memfd.open_peer(owner.address)
    owner.close()
    owner.close()
    assert mapping[:3] == b"abc"
    with pytest.raises(TypeError):
        mapping[:3] = b"xyz"


def test_too_little_memory_is_a_sentence_with_the_numbers(monkeypatch):
    monkeypatch.setattr(memfd, "available_bytes", lambda: 3 << 20)
    with pytest.raises(memfd.SharedMemoryError, match=r"the weights needs 8\.0 MiB .* only 3\.0 MiB of memory"):
        memfd.Owner(8 << 20, "the weights")


@pytest.mark.multiprocess
def test_memory_that_the_kernel_refuses_is_a_sentence_too():
    script = """
import resource
from libra_jax.weights import memfd
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    memfd.Owner(8 << 20, "the weights")
except memfd.SharedMemoryError as error:
    print(error)
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "needs 8.0 MiB of shared memory, which the kernel refused" in output


@pytest.mark.parametrize("collapse", [memfd._COLLAPSE, -1])
def test_memory_is_whole_with_and_without_huge_pages(collapse, monkeypatch):
    monkeypatch.setattr(memfd, "_COLLAPSE", collapse)  # no kernel knows -1
    nbytes = 3 * memfd.HUGE_BYTES + 12_345
    owner = memfd.Owner(nbytes, "a test")
    assert bytes(owner.buffer) == bytes(nbytes)
    owner.buffer[:] = written = os.urandom(nbytes)
    read = memfd.open_peer(owner.address)
    assert read[:] == written
    owner.close()
    assert read[:] == written
